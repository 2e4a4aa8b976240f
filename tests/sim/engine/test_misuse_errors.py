"""Misuse gets an error that names the rule, the numbers and the remedy: on every rank, and without a hang."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import fullshard
from fullshard import MixedPrecision, TransformerBlocks, clip_grad_norm_, fully_shard, unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ProcessGroupError, ShardingError, WrapError
from support.models import TinyLM, batches, lm_loss, t5
from support.parity import alone, replicas


def on_two_ranks(work):
    """Run ``work(comm, model)`` on two ranks with equal models."""
    _, models = replicas(TinyLM, 2)
    return run_ranks(2, lambda comm: work(comm, models[comm.rank]), timeout_s=20)


def test_without_a_process_group():
    with pytest.raises(ProcessGroupError, match="torchrun"):
        fully_shard(TinyLM())


def test_a_mesh_that_is_none_of_the_known_kinds():
    with pytest.raises(ProcessGroupError, match="DeviceMesh"):
        fully_shard(TinyLM(), "world")


def test_an_unknown_class_lists_those_that_would_work():
    with pytest.raises(WrapError, match=r"T5Blok.*T5Block \(x4\)"):
        alone(t5(), wrap=TransformerBlocks({"T5Blok"}))


def test_one_giant_unit_is_refused_unless_asked_for():
    model = alone(nn.Linear(1024, 1024))
    with pytest.raises(WrapError, match="wrap=None"):
        model(torch.ones(1024))
    alone(nn.Linear(1024, 1024), wrap=None)(torch.ones(1024))
    alone(nn.Linear(4, 4))(torch.ones(4))


def test_ranks_with_different_shapes():
    def work(comm):
        with pytest.raises(MismatchError, match=r"First difference: rank 0 has .*rank 1 has"):
            fully_shard(TinyLM(hidden=40 + comm.rank), comm)

    run_ranks(2, work)


def test_ranks_with_different_numbers_of_blocks():
    def work(comm):
        with pytest.raises(MismatchError, match=r"blocks\.3"):
            fully_shard(TinyLM(layers=3 + comm.rank), comm)

    run_ranks(2, work)


def test_ranks_with_different_values():
    _, models = replicas(TinyLM, 2)
    with torch.no_grad():
        models[1].blocks[2].up.weight += 1

    def work(comm):
        with pytest.raises(MismatchError, match=r"blocks\.2.*same seed"):
            fully_shard(models[comm.rank], comm)

    run_ranks(2, work)


def test_ranks_with_different_policies():
    def work(comm, model):
        with pytest.raises(MismatchError, match="bfloat16"):
            fully_shard(model, comm, mp_policy=MixedPrecision(param=torch.bfloat16) if comm.rank else None)

    on_two_ranks(work)


def test_a_refused_model_is_left_as_it_was():
    model = TinyLM(layers=1)
    before = {name: p for name, p in model.named_parameters()}

    with pytest.raises(WrapError):
        alone(model, wrap=TransformerBlocks({"Blocks"}))
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.state_dict()


def test_copying_and_pickling():
    def work(comm, model):
        model = fully_shard(model, comm)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises((ShardingError, AttributeError, pickle.PicklingError, TypeError)) as caught:
                attempt(model)
            if attempt is copy.deepcopy:
                assert "cannot be copied" in str(caught.value)
        with pytest.raises(ShardingError, match="cannot be copied"):
            copy.deepcopy(model.blocks[0])

    on_two_ranks(work)


def test_pickling_a_class_that_pickle_finds():
    model = alone(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ShardingError, match=r"copied or pickled.* fullshard\.save"):
        pickle.dumps(model)
    copied = copy.copy(model)
    assert type(copied) is type(model)
    assert [id(param) for param in copied.parameters()] == [id(param) for param in model.parameters()]


def test_state_dict_is_refused_with_the_remedy():
    def work(comm, model):
        with pytest.raises(ShardingError, match=r"fullshard\.save"):
            fully_shard(model, comm).state_dict()

    on_two_ranks(work)


def test_a_full_parameter_kept_from_forward_is_refused_after_it():
    def work(comm, model):
        model = fully_shard(model, comm)
        kept = []
        model.blocks[0].up.register_forward_hook(lambda module, *_: kept.append(module.weight))
        lm_loss(model, batches(1, 2)[0])
        assert kept[0].shape == (40, 24)
        for use in (lambda p: p.sum(), lambda p: p + 1, lambda p: p.data, lambda p: p.T, repr):
            with pytest.raises(ShardingError, match="unsharded"):
                use(kept[0])

    on_two_ranks(work)


CALLS = {
    "load": lambda comm, model: fullshard.load(model, "nowhere"),
    "save": lambda comm, model: fullshard.save(model, "nowhere"),
    "full_state_dict": lambda comm, model: fullshard.full_state_dict(model),
    "clip_grad_norm_": lambda comm, model: clip_grad_norm_(model.parameters(), 1.0),
    "Checkpoints": lambda comm, model: fullshard.Checkpoints("nowhere", ranks=comm),
    "load_checkpoint": lambda comm, model: fullshard.load_checkpoint(model, None, "nowhere"),
    "unsharded": lambda comm, model: unsharded(model).__enter__(),
    "barrier": lambda comm, model: comm.barrier(),
}
"""Calls that every rank makes, by the name that the error has."""


@pytest.mark.parametrize("name", CALLS)
def test_ranks_in_different_calls_are_told_each_ranks_call(name):
    _, models = replicas(TinyLM, 2)
    _, others = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with pytest.raises(MismatchError) as caught:
            CALLS[name](comm, model) if comm.rank else fully_shard(others[comm.rank], comm)
        return str(caught.value)

    first, second = run_ranks(2, work, timeout_s=20)
    assert first == second
    assert re.search(r"rank 0: .*\bfully_shard, called at test_misuse_errors\.py:\d+", first)
    assert re.search(rf"; rank 1: .*\b{name}\b", first)


def test_ranks_in_different_parts_of_one_call_are_told_so():
    def work(comm, model):
        with pytest.raises(MismatchError, match=r"different calls: rank 0: fully_shard, .*; rank 1: fully_shard, "):
            fully_shard(model, comm, frozen="auto" if comm.rank else "shard")

    on_two_ranks(work)


def test_an_object_of_the_programs_own_is_not_taken_for_the_engines():
    def work(comm, model):
        with pytest.raises(MismatchError, match=r"rank 0: fully_shard, .*; rank 1: .*own objects"):
            comm.all_gather_object("mine") if comm.rank else fully_shard(model, comm)

    on_two_ranks(work)


def test_parameters_outside_forward_are_this_ranks_rows():
    def work(comm, model):
        model = fully_shard(model, comm)
        weight = model.blocks[0].up.weight
        assert weight.shape == (weight.shard_meta.row_range[1] - weight.shard_meta.row_range[0], 24)
        with unsharded(model):
            assert model.blocks[0].up.weight.shape == (40, 24)
        return weight.shape[0]

    assert sum(on_two_ranks(work)) == 40


def test_replacing_a_parameter_is_refused_in_the_next_forward():
    def work(comm, model):
        model = fully_shard(model, comm)
        model.blocks[0].up.weight = nn.Parameter(torch.zeros(40, 24))
        with pytest.raises(ShardingError, match="replaced"):
            lm_loss(model, batches(1, 2)[0])

    on_two_ranks(work)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_double_backward_and_sparse_gradients_are_refused():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4, sparse=True)

        def forward(self, x):
            return self.embed(x)

    model = alone(Sparse(), wrap=None)
    with pytest.raises(ShardingError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
    for layer in (nn.LayerNorm(4), nn.Linear(4, 4)):
        with pytest.raises(ShardingError, match="create_graph"):
            alone(nn.Sequential(layer), wrap=None)(torch.ones(2, 4)).square().sum().backward(create_graph=True)
