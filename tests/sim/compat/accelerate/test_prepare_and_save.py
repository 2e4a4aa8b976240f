"""What Accelerate's object does with ranks, played by threads: values of the first rank, and saving."""

import copy
import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullshard import fully_shard, unsharded
from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin, prepare as sharding, saving
from fullshard.compat.torch_fsdp.api import StateDictType
from fullshard.compat.torch_fsdp.wrap import transformer_auto_wrap_policy
from fullshard.core.comm import axes_of
from fullshard.core.testing import run_ranks
from fullshard.errors import FullshardError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, steps_for, train_sharded, train_unsharded

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


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_seeds_of_their_own_train_as_the_unsharded_run_from_rank_0s_values(size, monkeypatch):
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)  # a plugin of another test may have set it
    models = []
    for rank in range(size):
        with torch.random.fork_rng():
            torch.manual_seed(7 + rank)
            models.append(TinyLM())
    plain = copy.deepcopy(models[0])
    data = batches(steps_for(size), size * ROWS_PER_RANK)

    def work(comm):
        model = models[comm.rank]
        sharding.shard(model, Plugin(fsdp_version=2, auto_wrap_policy=BLOCKS), comm)
        return train_sharded(model, comm, lm_loss, data, sharded=True)

    with pytest.warns(UserWarning, match="different values") as told:
        runs = run_ranks(size, work)
    assert len(told) == 1
    for run in runs:
        assert_same_run(run, train_unsharded(copy.deepcopy(plain), lm_loss, data))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", None])
def test_two_axes_shard_over_one_and_replicate_over_the_other(strategy):
    """Four ranks, two by two, as ``parallelism_config`` sets them; None: version 2."""
    rows = torch.randint(3, 50, (8, 9), generator=torch.Generator().manual_seed(4))
    plain, models = build(), [build() for _ in range(4)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        lm_loss(plain, rows).backward()
        optimizer.step()

    def work(comm):
        settings = {"fsdp_version": 2} if strategy is None else {"sharding_strategy": strategy}
        plugin = Plugin(**settings, auto_wrap_policy=BLOCKS)
        model = sharding.shard(models[comm.rank], plugin, comm, axes_of(comm, 2))
        held = sum(param.nbytes for param in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            lm_loss(model, rows[2 * comm.rank : 2 * comm.rank + 2]).backward()
            optimizer.step()
        inner = sharding.unwrapped(model)
        with unsharded(inner):
            return held, {name: value.detach().clone() for name, value in inner.named_parameters()}

    results = run_ranks(4, work)
    whole = sum(param.nbytes for param in plain.parameters())
    assert results[0][0] + results[1][0] == results[2][0] + results[3][0] == whole
    for _, found in results:
        torch.testing.assert_close(found, dict(plain.named_parameters()), atol=1e-5, rtol=1e-5)


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
        **{f"_{name}": [] for name in ("models", "optimizers", "schedulers", "dataloaders", "custom_objects")},
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
        saving.State(accelerator_of(ranks), tmp_path).save_model(model, 0)

    run_ranks(2, work)
    assert waited == [True]
