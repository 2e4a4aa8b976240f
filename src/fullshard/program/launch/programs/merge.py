"""A checkpoint of an adapter that has none any more, for ``fullshard export --merge``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fullshard.core.comm import join_alone, shutdown
from fullshard.program.config import PROMPT_NAME, recorded_run
from fullshard.program.models import save_tokenizer
from fullshard.program.train.evaluation.trained import Trained, find_trained, load_trained
from fullshard.program.train.setup.quantization import quantised_base
from fullshard.state.saving import Checkpoints, write_assets
from fullshard.state.storage import Place


@contextmanager
def checkpoint_of_adapter(directory: Path, moved: Path | None, near: Path) -> Iterator[Place]:
    """Save an adapter over its base as a checkpoint, which is deleted when the context ends; one process on the CPU.

    Args:
        directory: A finished run, its ``best/``, or what peft saved.
        moved: Where the adapter's quantised base is now; None: where the adapter says.
        near: A directory on the disk that has room for it.

    Raises:
        UserError: The adapter or its base cannot be loaded, or the checkpoint cannot be written.
    """
    trained = find_trained(str(directory), recorded_run(directory), moved)
    comm = join_alone(torch.device("cpu"))
    try:
        model, tokenizer, _ = load_trained(trained, comm)
        base = quantised_base(model, trained.config, trained.base, comm)
        small_files = partial(write_assets, model, tokenizer=_Files(trained, tokenizer))
        with (
            TemporaryDirectory(dir=near, prefix=".merging-") as scratch,
            Checkpoints(Path(scratch), ranks=comm) as checkpoints,
        ):
            yield checkpoints.save(model, step=0, assets=small_files, base=base)
    finally:
        shutdown()


class _Files:
    """Takes the tokenizer's place: also saves how the model is asked."""

    def __init__(self, trained: Trained, tokenizer: Any) -> None:
        self._trained, self._tokenizer = trained, tokenizer

    def save_pretrained(self, directory: Path) -> None:
        save_tokenizer(self._tokenizer, directory)
        asked = self._trained.directory / PROMPT_NAME
        if asked.is_file():
            shutil.copyfile(asked, directory / PROMPT_NAME)
