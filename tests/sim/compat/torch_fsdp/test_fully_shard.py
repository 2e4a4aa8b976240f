"""FSDP2's ``fully_shard`` on rank threads: units, arguments, and training as unsharded."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

from fullshard import fully_shard as native_fully_shard, units
from fullshard.compat.torch_fsdp.fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, ProcessGroupError, ShardingError, WrapError
from support.fsdp2 import SIZE, rows_of, shard, with_models
from support.models import KINDS, Block, TinyLM, batches
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded


@pytest.mark.parametrize("kind", ["lm", "lm_two_forwards", "lm_checkpoint_reentrant", "lm_frozen_parts"])
def test_bottom_up_calls_give_the_unsharded_run(kind):
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, SIZE)
    data = batches(2, SIZE * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)

    def work(comm):
        return train_sharded(shard(models[comm.rank], comm), comm, loss_of, data, sharded=True)

    for run in run_ranks(SIZE, work):
        assert_same_run(run, plain)


def test_a_placement_along_another_dimension_is_advice_and_the_run_is_the_same():
    make, loss_of = KINDS["lm"]
    reference, models = replicas(make, SIZE)
    data = batches(2, SIZE * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)

    def longest(param):
        return torch.distributed.tensor.Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))

    def work(comm):
        model = shard(models[comm.rank], comm, shard_placement_fn=longest)
        assert all(param.placements[-1] == torch.distributed.tensor.Shard(0) for param in model.parameters())
        return train_sharded(model, comm, loss_of, data, sharded=True)

    with pytest.warns(UserWarning, match=r"returned Shard\(dim=1\) .* cuts all parameters by rows"):
        runs = run_ranks(SIZE, work)
    for run in runs:
        assert_same_run(run, plain)


def test_a_parameter_tied_between_two_calls_is_refused_and_one_call_on_both_takes_it():
    def tied():
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
        model[1].weight = model[0].weight
        return model

    _, models = replicas(tied, 4)

    def work(comm):
        model = models[comm.rank]
        fully_shard(model[0], mesh=comm)
        with pytest.raises(WrapError, match="earlier call on another module, FSDPEmbedding: it is tied"):
            fully_shard(model[1], mesh=comm)
        assert type(model[1]) is nn.Linear
        model = models[2 + comm.rank]
        fully_shard([model[0], model[1]], mesh=comm)
        fully_shard(model, mesh=comm)(torch.arange(4)).sum().backward()

    run_ranks(2, work)


def test_a_parameter_made_of_other_tensors_is_refused_by_its_class():
    def work(comm):
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
        with pytest.raises(WrapError, match=r"\(4, 4\) is a TwoTensor, .* fsdp_pre_all_gather"):
            fully_shard(model, mesh=comm)

    run_ranks(1, work)


def test_blocks_and_root_stay_fsdp_modules_and_keep_their_units():
    def work(comm):
        model = shard(TinyLM(), comm)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, TinyLM)
        assert [isinstance(block, FSDPModule) and isinstance(block, Block) for block in model.blocks] == [True] * 4
        assert not isinstance(model.embed, FSDPModule)
        assert type(model.blocks[0]).__name__ == "FSDPBlock"
        return [row.unit for row in units(model).rows]

    assert run_ranks(1, work)[0] == ["(root)", *(f"blocks.{i}" for i in range(4))]


class Saving(TinyLM):
    """As models of Hugging Face's libraries, which look classes up by name."""

    def save_pretrained(self, directory):
        """Write the model."""


def test_a_model_with_save_pretrained_keeps_its_name():
    def work(comm):
        model = shard(Saving(), comm)
        assert isinstance(model, FSDPModule)
        assert type(model).__name__ == model._get_name() == "Saving"
        with pytest.raises(ShardingError, match="copied or pickled"):
            pickle.dumps(model.blocks[0])
        assert copy.copy(model).blocks is model.blocks

    run_ranks(1, work)


def test_a_root_alone_is_one_unit():
    def work(comm):
        return len(units(fully_shard(TinyLM(), mesh=comm)).rows)

    assert run_ranks(1, work) == [1]


def test_a_list_of_modules_is_one_unit_and_a_slice_of_a_container_is_plain():
    def work(comm):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        pair = [model[0], model[1]]
        assert fully_shard(pair, mesh=comm) is pair
        assert all(isinstance(one, FSDPModule) for one in pair)
        model = fully_shard(model, mesh=comm)
        model(torch.ones(2, 4)).sum().backward()
        assert type(model[:2]) is nn.Sequential
        return [row.unit for row in units(model).rows]

    assert run_ranks(1, work)[0] == ["(root)", "0 + 1"]


def test_an_embedding_of_its_own_keeps_the_engines_ways():
    def work(comm, model):
        ledger = RecordingComm(comm)
        fully_shard(model[0], mesh=ledger)
        fully_shard(model, mesh=ledger)
        model(torch.arange(4)).sum().backward()
        ledger.entries.clear()
        model(torch.arange(4)).sum().backward()
        return ledger.names.count("all_gather")

    found = with_models(SIZE, work, lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)))
    assert found == [2, 2]  # nothing is gathered again in backward


class Cube(DeviceMesh):
    """A mesh of three axes, without process groups."""

    ndim = 3

    def __init__(self):
        pass

    def __repr__(self):
        return "DeviceMesh((1, 1, 1))"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(2)}, ConfigError, "Shard\\(dim\\)"),
        (lambda m: {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(2)}, AssertionError, "Shard dim 2"),
        (lambda m: {"shard_placement_fn": lambda p: "rows"}, ConfigError, "returned 'rows'"),
        (lambda m: {"dp_mesh_dims": object()}, ConfigError, "dp_mesh_dims"),
        (lambda m: {"mp_policy": torch_fsdp.MixedPrecision()}, ConfigError, "mp_policy"),
        (lambda m: {"offload_policy": torch_fsdp.CPUOffload(True)}, ConfigError, "offload_policy"),
        (lambda m: {"reshard_after_forward": "yes"}, ConfigError, "reshard_after_forward"),
        (lambda m: {"module": m.blocks}, WrapError, "do not implement forward"),
        (lambda m: {"module": m.blocks}, ValueError, "a ModuleList"),
        (lambda m: {"mesh": Cube()}, ProcessGroupError, "1D or 2D DeviceMesh"),
        (lambda m: {"mesh": Cube()}, ValueError, "mesh\\[names\\]"),
        (lambda m: {"module": []}, ConfigError, "empty"),
        (lambda m: {"module": "model"}, ConfigError, "takes a module"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_and_nothing_has_changed(change, error, words):
    def work(comm):
        model = TinyLM()
        with pytest.raises(error, match=words):
            fully_shard(**({"module": model, "mesh": comm} | change(model)))
        assert type(model) is TinyLM
        fully_shard(model, mesh=comm, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(0))
        with pytest.raises(ShardingError, match="only be applied to a module once") as refused:
            fully_shard(model, mesh=comm)
        assert isinstance(refused.value, AssertionError)

    run_ranks(1, work)


@pytest.mark.parametrize("theirs", [False, True])
def test_policies_of_ours_and_of_torch(theirs):
    source = torch_fsdp if theirs else None
    precision = (source.MixedPrecisionPolicy if source else MixedPrecisionPolicy)(
        param_dtype=torch.bfloat16, output_dtype=torch.float32
    )
    offload = (source.CPUOffloadPolicy if source else CPUOffloadPolicy)(pin_memory=False)

    def work(comm):
        model = fully_shard(TinyLM(), mesh=comm, mp_policy=precision, offload_policy=offload)
        unit = model._fullshard_runtime.root
        assert model(rows_of(comm, 1)[0]).dtype == torch.float32
        assert unit.policy.precision.param == unit.policy.precision.reduce == "bfloat16"
        assert unit.policy.offload.pin_memory is False
        none = (source.OffloadPolicy if source else OffloadPolicy)()
        return fully_shard(nn.Linear(2, 2), mesh=comm, offload_policy=none)._fullshard_runtime.root.policy.offload

    assert run_ranks(1, work) == [None]


def test_ignored_parameters_of_a_block_stay_so_in_the_roots_call():
    def work(comm, model):
        kept = model.blocks[0].side.weight
        fully_shard(model.blocks[0], mesh=comm, ignored_params={kept})
        model = fully_shard(model, mesh=comm)
        return hasattr(kept, "shard_meta"), tuple(model.blocks[0].side.weight.shape)

    assert with_models(SIZE, work) == [(False, (24, 24))] * SIZE


def test_modules_without_parameters_are_fsdp_modules_without_a_unit():
    def work(comm):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fully_shard(model[1], mesh=comm)
        fully_shard(model, mesh=comm)
        model[1].unshard()
        model[1].reshard()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 4)).sum().backward()
        return isinstance(model[1], FSDPModule), len(units(model).rows)

    assert run_ranks(1, work) == [(True, 1)]


@pytest.mark.parametrize(
    "options", [{"mp_policy": torch_fsdp.MixedPrecisionPolicy()}, {"offload_policy": torch_fsdp.CPUOffloadPolicy()}]
)
def test_the_native_door_names_the_compat_one_for_torchs_policies(options):
    def work(comm):
        with pytest.raises(ConfigError, match=r"fullshard\.compat\.torch_fsdp"):
            native_fully_shard(TinyLM(), comm, wrap=None, **options)

    run_ranks(1, work)


def test_every_public_name_of_torchs_module_class_is_ours():
    def public(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(torch_fsdp.FSDPModule) <= public(FSDPModule)


def test_a_part_on_a_group_of_the_ranks_has_its_own_gradient_and_no_state_of_all():
    reference, models = replicas(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), SIZE)
    inputs = [torch.linspace(0, 1 + rank, 8).view(2, 4) for rank in range(SIZE)]

    def work(comm):
        model, x = models[comm.rank], inputs[comm.rank]
        fully_shard(model[1], mesh=comm.split([[rank] for rank in range(SIZE)]))
        fully_shard(model, mesh=comm)
        model(x).square().mean().backward()
        with pytest.raises(ShardingError, match=r"1\.weight and 1 other parameters are sharded over some"):
            model.state_dict()
        return [param.grad.full_tensor() for param in model.parameters()]

    found = run_ranks(SIZE, work)
    plain = []
    for x in inputs:
        plain.append(torch.autograd.grad(reference(x).square().mean(), list(reference.parameters())))
    for rank, grads in enumerate(found):
        shared = [sum(of_param) / SIZE for of_param in zip(*plain, strict=True)][:2]
        torch.testing.assert_close(grads, [*shared, *plain[rank][2:]], atol=1e-6, rtol=1e-6)
