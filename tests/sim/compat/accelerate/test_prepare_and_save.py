"""What Accelerate's object does with ranks, played by threads: values of the first rank, and saving."""

import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullshard import fully_shard, unsharded
from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin
from fullshard.compat.accelerate import prepare as sharding
from fullshard.compat.accelerate import saving
from fullshard.compat.torch_fsdp.api import StateDictType
from fullshard.compat.torch_fsdp.wrap import transformer_auto_wrap_policy
from fullshard.errors import FullshardError
from fullshard.testing import run_ranks
from support.models import Block, TinyLM

BLOCKS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def build(*, meta=False):
    with torch.random.fork_rng(), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(0)
        model = TinyLM()
        model.register_buffer("table", torch.arange(3))
    return model


def numel_here(model):
    return sum(p.numel() for p in model.parameters() if not p.is_meta and not hasattr(p, "shard_meta"))


def test_version_2_fills_ranks_without_values_one_unit_at_a_time(monkeypatch):
    plain = build()
    seen = []
    original = sharding.fully_shard

    def watched(module, **options):
        seen.append((options["mesh"].rank, numel_here(module), numel_here(models[options["mesh"].rank])))
        return original(module, **options)

    monkeypatch.setattr(sharding, "fully_shard", watched)
    models = [build(), build(meta=True)]

    def work(comm):
        plugin = Plugin(fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy=BLOCKS)
        model = sharding.shard(models[comm.rank], plugin, comm)
        with unsharded(model):
            return {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}

    for found in run_ranks(2, work):
        torch.testing.assert_close(found, dict([*plain.named_parameters(), *plain.named_buffers()]), atol=0, rtol=0)
    on_other = [(unit, held) for rank, unit, held in seen if rank == 1]
    assert len(on_other) == 5
    assert all(unit == held > 0 for unit, held in on_other)


def test_version_1_leaves_other_ranks_without_values_to_the_wrapper_and_fills_what_it_ignores(monkeypatch):
    given = {}

    def wrapper(model, **options):
        given.update(options, held=numel_here(model), ignored=sum(p.numel() for p in model.unused.parameters()))
        return model

    monkeypatch.setattr(sharding, "FullyShardedDataParallel", wrapper)
    models = [build(), build(meta=True)]

    def work(comm):
        plugin = Plugin(cpu_ram_efficient_loading=True, auto_wrap_policy=BLOCKS, ignored_modules="unused")
        model = sharding.shard(models[comm.rank], plugin, comm)
        return given if comm.rank else model

    options = run_ranks(2, work)[1]
    assert options["sync_module_states"] is True
    assert numel_here(models[1]) == options["ignored"]
    assert torch.equal(models[1].unused.weight, models[0].unused.weight)


def test_narrow_parameters_without_values_are_widened_without_being_written():
    model = nn.Linear(4, 4).bfloat16()
    with torch.device("meta"):
        other = nn.Linear(4, 4).bfloat16()
    sharding.upcast_trainable(other, warn=False, values=True)
    assert [(p.dtype, p.is_meta) for p in other.parameters()] == [(torch.float32, True)] * 2
    sharding.upcast_trainable(model, warn=False, values=False)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2


def accelerator_of(ranks, **more):
    hooks = {"_save_model_state_pre_hook": {}, "_load_model_state_pre_hook": {}}
    fields = {
        "_ranks": ranks,
        "_models": [],
        "_optimizers": [],
        "is_main_process": ranks.rank == 0,
        "process_index": ranks.rank,
        "state": SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=StateDictType.FULL_STATE_DICT)),
        "project_configuration": SimpleNamespace(automatic_checkpoint_naming=False, save_on_each_node=False),
    }
    return SimpleNamespace(**(fields | hooks | more))


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_hook_that_fails_on_one_rank_is_told_to_all(tmp_path, what):
    def hook(*_):
        if threading.current_thread().name == "rank 1":
            raise RuntimeError("the hook's own words")

    def work(comm):
        threading.current_thread().name = f"rank {comm.rank}"
        accelerator = accelerator_of(comm, **{f"_{what}_model_state_pre_hook": {0: hook}})
        try:
            if what == "save":
                saving.save_state(accelerator, tmp_path / "state", safe_serialization=True, options={})
            else:
                saving.load_state(accelerator, tmp_path, None, {})
        except Exception as error:
            return type(error), str(error)

    first, second = run_ranks(2, work)
    assert second == (RuntimeError, "the hook's own words")
    assert first[0] is FullshardError
    assert "Rank 1 failed" in first[1]
    assert "the hook's own words" in first[1]


class Counted:
    """A rank's collectives, that say when objects were exchanged three times."""

    def __init__(self, comm):
        self.comm, self.count, self.thrice = comm, 0, threading.Event()

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def all_gather_object(self, value):
        self.count += 1
        if self.count == 3:
            self.thrice.set()
        return self.comm.all_gather_object(value)


def test_ranks_wait_for_a_slow_write_in_short_exchanges(tmp_path, monkeypatch):
    other = threading.Event()
    waited = []
    models = [build(), build()]
    monkeypatch.setattr(saving.torch, "save", lambda *_: waited.append(other.wait(5)))

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        ranks = Counted(comm)
        if comm.rank == 1:
            ranks.thrice = other
        saving._State(accelerator_of(ranks), tmp_path).save_model(model, 0)

    run_ranks(2, work)
    assert waited == [True]
