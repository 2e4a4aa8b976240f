"""``fullshard.compat.redirect()`` changes where torch's FSDP names lead, and gives back exactly what was there."""

import ast
import importlib
import logging
import subprocess
import sys
import types

import pytest
import torch.distributed.checkpoint.state_dict as getters
import torch.distributed.fsdp as torch_fsdp

from fullshard.compat import _COUNTERPARTS, redirect, torch_fsdp as ours
from support.processes import environment

IMPORTS = [  # as libraries write them inside their functions
    "from torch.distributed.fsdp import FullyShardedDataParallel",
    "from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard",
    "from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, MixedPrecision",
    "from torch.distributed.fsdp.fully_sharded_data_parallel import FullOptimStateDictConfig, StateDictType",
    "from torch.distributed.fsdp.api import ShardedStateDictConfig, ShardedOptimStateDictConfig, ShardingStrategy",
    "from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, transformer_auto_wrap_policy, wrap",
    "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler",
    "from torch.distributed._composable.fsdp import FSDPModule, fully_shard",
    "from torch.distributed._composable.fsdp.fully_shard import fully_shard",
    "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper",
    "from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict",
]


def imported(line):
    """The values that an import statement binds."""
    names = {}
    exec(line, names)
    (statement,) = ast.parse(line).body
    return [names[alias.name] for alias in statement.names]


def of(values):
    return {value.__module__.partition(".")[0] for value in values}


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_inside_gives_ours_and_after_it_torchs(line):
    before = imported(line)
    assert of(before) == {"torch"}
    with redirect():
        names = [alias.name for alias in ast.parse(line).body[0].names]
        # Settings and most policies are torch's own in both.
        assert imported(line) == [vars(ours.wrap).get(name) or vars(ours)[name] for name in names]
    assert all(one is other for one, other in zip(imported(line), before, strict=True))


def everything():
    return {name: dict(vars(importlib.import_module(name))) for name in _COUNTERPARTS}


def test_all_of_torchs_modules_are_given_back_after_an_error_too():
    redirect().restore()  # what the first call imports
    before = everything()
    inside = []
    with pytest.raises(StopIteration), redirect():
        next(iter(inside.append(everything()) or []))
    assert inside[0] != before
    assert everything() == before


def test_as_a_call_it_stays_until_it_is_restored_and_a_block_inside_leaves_it():
    redirection = redirect()
    try:
        with redirect():
            assert torch_fsdp.FullyShardedDataParallel is ours.FullyShardedDataParallel
        assert torch_fsdp.FullyShardedDataParallel is ours.FullyShardedDataParallel
        assert torch_fsdp.wrap.wrap is ours.wrap.wrap
        assert torch_fsdp.wrap is sys.modules["torch.distributed.fsdp.wrap"]  # with the names that ours lacks
    finally:
        redirection.restore()
        redirection.restore()
    assert of([torch_fsdp.FullyShardedDataParallel]) == {"torch"}


def test_torchs_getters_keep_torchs_classes_where_they_are_first_imported_inside():
    """In a process of its own: here they are imported."""
    script = (
        "import fullshard.compat\n"
        "with fullshard.compat.redirect():\n"
        "    import torch.distributed.checkpoint.state_dict as getters\n"
        "assert getters.FSDP.__module__.startswith('torch.'), getters.FSDP\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=environment())
    assert of([getters.FSDP]) == {"torch"}


def test_modules_that_hold_a_name_by_value_are_told(monkeypatch, caplog):
    early = types.ModuleType("an_early_library")
    early.FSDP, early.number = torch_fsdp.FullyShardedDataParallel, 3
    monkeypatch.setitem(sys.modules, "an_early_library", early)
    with caplog.at_level(logging.WARNING, "fullshard"), redirect():
        pass
    (record,) = caplog.records
    assert "an_early_library (FullyShardedDataParallel)" in record.getMessage()
    assert "torch.distributed.checkpoint" not in record.getMessage()
    assert early.FSDP is torch_fsdp.FullyShardedDataParallel


def test_asking_for_it_does_not_import_torch():
    script = "import sys, fullshard.compat; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, env=environment())
