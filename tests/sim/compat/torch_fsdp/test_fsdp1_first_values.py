"""FSDP1's wrapper on rank threads: values from rank 0, and of units on the meta device."""

import pytest
import torch
from torch import nn

from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, ModuleWrapPolicy
from fullshard.core.layout.sharded import ShardMeta
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, WrapError
from support.models import Block, TinyLM, batches, lm_loss

BLOCKS = ModuleWrapPolicy({Block})


def test_sync_module_states_gives_every_rank_the_values_of_rank_0():
    def build(rank, *, meta=False):
        with torch.random.fork_rng(), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(rank)
            model = TinyLM(layers=2)
            model.register_buffer("table", torch.arange(3) + rank)
            model.register_buffer("flag", torch.tensor(rank == 0))
        return model

    models = [build(0), build(1), build(2, meta=True)]
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=BLOCKS, sync_module_states=True)
        return {name: value.clone() for name, value in model.state_dict().items()}

    for state in run_ranks(3, work):
        torch.testing.assert_close(state, expected, atol=0, rtol=0)


def test_sync_module_states_tells_ranks_with_other_buffers():
    def work(comm):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(2 + comm.rank))
        FSDP(model, comm, sync_module_states=True)

    with pytest.raises(MismatchError, match="different buffers"):
        run_ranks(2, work)


def empty_and_reset(module):
    module.to_empty(device="cpu", recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_param_init_fn_initialises_units_of_the_meta_device_one_at_a_time():
    called = [[], []]

    def work(comm):
        with torch.device("meta"):
            model = TinyLM()
        blocks = list(model.blocks)
        largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)

        def init(module):
            called[comm.rank].append(module)
            whole = sum(
                p.numel()
                for block in blocks
                for p in block.parameters()
                if not p.is_meta and not hasattr(p, "shard_meta")
            )
            assert whole <= largest  # of the unit that is initialised now
            empty_and_reset(module)

        wrapped = FSDP(model, comm, auto_wrap_policy=BLOCKS, param_init_fn=init)
        assert model.head.weight is model.embed.weight
        assert all(isinstance(p.shard_meta, ShardMeta) for p in wrapped.parameters())
        lm_loss(wrapped, batches(1, 2)[0]).backward()
        return {name: value.clone() for name, value in wrapped.state_dict().items()}

    one, two = run_ranks(2, work)
    torch.testing.assert_close(one, two, atol=0, rtol=0)
    assert one["blocks.0.up.weight"].std() > 0.1
    assert not torch.equal(one["blocks.0.up.weight"], one["blocks.1.up.weight"])
    for modules in called:
        assert len(set(modules)) == len(modules) == 25


def test_param_init_fn_with_sync_initialises_and_rank_0_wins():
    def work(comm):
        torch.manual_seed(0)
        with torch.device("meta" if comm.rank else "cpu"):
            model = TinyLM(layers=2)
        if comm.rank == 0:
            with torch.no_grad():
                for index, param in enumerate(model.parameters()):
                    param.fill_(index)
        wrapped = FSDP(
            model,
            comm,
            auto_wrap_policy=BLOCKS,
            sync_module_states=True,
            param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False),
        )
        return [value.unique().tolist() for value in wrapped.state_dict().values()]

    one, two = run_ranks(2, work)
    assert one == two
    assert all(len(values) == 1 for values in one)


def test_a_function_that_leaves_a_parameter_on_the_meta_device_is_told_so():
    def work(comm):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        FSDP(model, comm, param_init_fn=lambda _module: None)

    with pytest.raises(WrapError, match=r"left weight as .* on meta"):
        run_ranks(2, work)
