"""Names of ``torch.distributed.tensor`` for shards."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard as TorchsShard

from fullshard.compat.torch_fsdp.fsdp2 import fully_shard
from fullshard.compat.torch_fsdp.tensor import DTensor, RaggedShard, Shard, distribute_tensor
from fullshard.errors import ConfigError, ShardingError
from support.fsdp2 import with_models
from support.models import TinyLM


def on_ranks(work, size=3):
    return with_models(size, lambda comm, model: work(fully_shard(model, mesh=comm), comm))


def test_what_is_a_dtensor():
    def work(model, comm):
        param = next(model.parameters())
        part = model.state_dict()
        assert isinstance(param, DTensor)
        assert all(isinstance(value, DTensor) for value in part.values())
        assert not isinstance(torch.ones(1), DTensor)
        assert not isinstance(part, DTensor)

    on_ranks(work)


def test_placements_equal_rows_and_say_which():
    def work(model, comm):
        name, param = next(iter(model.named_parameters()))
        (place,) = param.placements
        assert place == Shard(0) == TorchsShard(0)
        assert place not in (Shard(1), Replicate())
        assert hash(place) == hash(Shard(0))
        assert place.is_shard()
        assert place.is_shard(0)
        assert [place.is_shard(1), place.is_replicate(), place.is_partial()] == [False] * 3
        assert model.state_dict()[name].placements[0].elements == place.elements
        assert param.device_mesh is None
        return place.elements, param.global_shape

    found = on_ranks(work)
    held = [elements for elements, _ in found if elements[0] < elements[1]]
    assert [start for start, _ in held] == [0, *(stop for _, stop in held[:-1])], "one run after the other"
    assert held[-1][1] == torch.Size(found[0][1]).numel()


@pytest.mark.parametrize("source", [0, 2, None])
def test_a_full_tensor_is_distributed_from_the_rank_that_has_it(source):
    def work(model, comm):
        mine = model.state_dict()
        full = {name: torch.full(value.shape, float(comm.rank)) for name, value in mine.items()}
        parts = {
            name: distribute_tensor(full[name], value.device_mesh, value.placements, src_data_rank=source)
            for name, value in mine.items()
        }
        assert all(value.eq(comm.rank).all() for value in full.values()), "the argument is left as it was"
        model.load_state_dict({name: torch.nn.Parameter(part) for name, part in parts.items()}, assign=True)
        return all(
            (param.to_local() == (comm.rank if source is None else source)).all() for param in model.parameters()
        )

    assert on_ranks(work) == [True] * 3


def test_full_tensors_are_not_assigned():
    def work(model, comm):
        full = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
        with pytest.raises(ShardingError, match="would replace the shards with full tensors"):
            model.load_state_dict(full, assign=True)

    on_ranks(work)


def test_a_place_shows_its_elements():
    def work(model, comm):
        return repr(next(model.parameters()).placements[0])

    assert on_ranks(work, size=1) == [repr(RaggedShard(None, (0, TinyLM().embed.weight.numel())))]


def test_on_two_axes_all_replicas_take_the_values_of_the_first():
    def work(model, comms):
        replicate, shard = comms
        model = fully_shard(model, mesh=comms)
        mine = model.state_dict()
        number = float(2 * replicate.rank + shard.rank)
        parts = {
            name: distribute_tensor(torch.full(value.shape, number), value.device_mesh, value.placements)
            for name, value in mine.items()
        }
        model.load_state_dict(parts)
        param = next(model.parameters())
        assert param.placements[0] == Replicate()
        return [param.to_local().abs().max().item() if param.nbytes else 0.0 for param in model.parameters()]

    def rank(comm, model):
        return work(model, (comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])))

    for values in with_models(4, rank):
        assert set(values) == {0.0}


def test_parts_keep_their_placements_when_they_move():
    def work(model, comm):
        for part in model.state_dict().values():
            for moved in (part.cpu(), part.to(torch.float64), part.detach()):
                assert moved.placements == part.placements

    on_ranks(work)


def test_a_part_gives_its_rows_as_a_plain_tensor():
    """torch's way to compare a sharded model with a full one: the full one's values, cut like the parameter."""

    def work(model, comm):
        shapes = []
        for name, param in model.named_parameters():
            full = param.full_tensor()
            part = distribute_tensor(full, param.device_mesh, param.placements)
            for one in (part, model.state_dict()[name]):
                assert type(one.to_local()) is torch.Tensor
                assert one.to_local().shape == param.to_local().shape
                assert torch.equal(one.to_local(), param.to_local())
            shapes.append(param.to_local().shape)
        part.to_local().fill_(3.0)
        assert (part.to_local() == 3.0).all(), "it is the same memory"
        return shapes

    found = on_ranks(work)
    assert any(0 in shape for shapes in found for shape in shapes), "some rank has no rows of some parameter"


def test_rows_of_a_rank_are_not_put_together_by_torchs_class():
    def work(model, comm):
        value = next(iter(model.state_dict().values()))
        with pytest.raises(ConfigError, match="distribute_tensor"):
            DTensor.from_local(torch.ones(3, 5), value.device_mesh, value.placements)

    on_ranks(work, size=1)
