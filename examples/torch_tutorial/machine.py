"""What the tutorial's script takes for granted: names that it uses and never imports, and a machine with GPUs."""

from __future__ import annotations

import os

import torch
from packaging.version import Version
from torch.cuda import nccl as nccl

g_gigabyte = 1024**3

has_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
backend = "nccl" if has_gpus else "gloo"
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpus else torch.device("cpu")


def set_device(local_rank: int) -> None:
    """``torch.cuda.set_device``, where there are GPUs."""
    if has_gpus:
        torch.cuda.set_device(local_rank)


class LooseVersion(Version):
    """A version that can be compared with text, as that of distutils, which Python no longer has."""

    def __ge__(self, other: object) -> bool:
        """Whether this version is at least ``other``."""
        return super().__ge__(Version(str(other)))
