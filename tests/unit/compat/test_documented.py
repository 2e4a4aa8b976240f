"""docs/reference/compat/ answers every name of torch's FSDP, Accelerate's object, its plugin and its files."""

import dataclasses
import inspect
import re
from fnmatch import fnmatchcase
from pathlib import Path

import accelerate
import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import wrap

from support.releases import as_accelerate_1_15

PAGES = "\n".join(page.read_text() for page in sorted(Path("docs/reference/compat").glob("*.md")))
ROWS = [
    *re.findall(r"^\| (.+?) \| (yes|different|no) \| ?(.*?) ?\|$", PAGES, re.MULTILINE),
    *re.findall(r"^- (.+?) — \*\*(yes|different|no)\*\*(.*)$", re.sub(r"\n  (?=\S)", " ", PAGES), re.MULTILINE),
]
CELLS = [text for cell, _, _ in ROWS for text in re.findall(r"`([^`]+)`", cell)]
NAMES = {*CELLS, *(word for text in CELLS for word in re.findall(r"\w+", text))}


def public(cls, base=object):
    return {name for name in dir(cls) if not name.startswith("_")} - set(dir(base))


def is_own(thing):
    return getattr(thing, "__module__", "") == checkpoint_wrapper.__name__


OTHERS = (
    *("--deepspeed", "--megatron", "--tpu", "--no_tpu", "--vm", "--fp8"),
    *("--parallelism", "--use_parallelism", "--zero", "--offload", "--aws"),
)
"""Options of other engines, clouds and devices."""

WANTED = {
    "torch.distributed.fsdp": set(fsdp.__all__),
    "torch.distributed.fsdp.wrap": set(wrap.__all__) | {"always_wrap_policy", "_or_policy", "enable_wrap", "wrap"},
    "FullyShardedDataParallel": public(fsdp.FullyShardedDataParallel, nn.Module),
    "FullyShardedDataParallel's arguments": set(inspect.signature(fsdp.FullyShardedDataParallel).parameters),
    "MixedPrecision": {field.name for field in dataclasses.fields(fsdp.MixedPrecision)},
    "ShardingStrategy": set(fsdp.ShardingStrategy.__members__),
    "FSDPModule": public(fsdp.FSDPModule),
    "fully_shard's arguments": set(inspect.signature(fsdp.fully_shard).parameters),
    "checkpoint_wrapper": {"apply_activation_checkpointing_wrapper"}
    | {name for name in public(checkpoint_wrapper) if is_own(getattr(checkpoint_wrapper, name))},
    "Accelerator": public(accelerate.Accelerator),
    "FullyShardedDataParallelPlugin": {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)},
    "Accelerate's files": {field.name for field in dataclasses.fields(ClusterConfig)},
    "accelerate launch": {
        name
        for action in launch_command_parser()._actions
        for name in action.option_strings
        if re.match(r"--[a-z0-9_]+$", name) and not name.startswith(OTHERS)
    },
}


@as_accelerate_1_15
@pytest.mark.parametrize("where", WANTED)
def test_every_name_is_answered(where):
    assert {name for name in WANTED[where] if not any(fnmatchcase(name, known) for known in NAMES)} == set()


def test_what_is_not_as_it_was_says_why():
    assert len(ROWS) > 200
    assert [cell for cell, answer, why in ROWS if answer == "different" and len(why) < 4] == []
