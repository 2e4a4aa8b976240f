"""Each habit of users is as on the unsharded model or refused by name, on every rank."""

import copy
from itertools import cycle

import pytest
import torch

from fullshard import fully_shard, unsharded
from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin, prepare
from fullshard.compat.torch_fsdp import FullyShardedDataParallel, fully_shard as fully_shard_2
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from users.habits import HABITS, Net

FACES = {
    "native": lambda model, comm: fully_shard(model, comm, wrap=None),
    "fsdp1": lambda model, comm: FullyShardedDataParallel(model, comm, use_orig_params=True),
    "fsdp2": lambda model, comm: fully_shard_2(model, mesh=comm),
    "accelerate": lambda model, comm: prepare.shard(model, Plugin(fsdp_version=2, auto_wrap_policy="no_wrap"), comm),
}
STEPS = 3
ROWS = 2


def numbers(values):
    """What a habit returned, as one list of floats."""
    found = []
    for value in values or []:
        if isinstance(value, (list, tuple)):
            found += numbers(value)
        elif value is not None:
            found += value.detach().double().flatten().tolist() if isinstance(value, torch.Tensor) else [float(value)]
    return found


def joint_batches(size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS * size, 6, generator=generator) for _ in range(STEPS)]


def weights(model):
    """Every parameter in full, by its place in the model; every rank calls it."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def in_faces():
    """Each habit on three ranks in the native face, and in another face or on two ranks, which take turns."""
    others = cycle([("fsdp1", 3), ("fsdp2", 3), ("accelerate", 3), ("native", 2)])
    for name in HABITS:
        yield from ((name, *how) for how in (("native", 3), next(others)))


@pytest.mark.parametrize(("name", "face", "size"), list(in_faces()))
def test_a_habit_is_as_on_the_unsharded_model_or_refused(name, face, size):
    habit = HABITS[name]
    torch.manual_seed(0)
    reference = Net()
    models = [copy.deepcopy(reference) for _ in range(size)]
    batches = joint_batches(size)
    expected = None if habit.refused else numbers(habit.run(reference, batches))

    def work(comm):
        model = FACES[face](models[comm.rank], comm)
        mine = [batch[ROWS * comm.rank : ROWS * (comm.rank + 1)] for batch in batches]
        if habit.refused:
            with pytest.raises(ShardingError, match=habit.refused):
                habit.run(model, mine)
            return None
        found = numbers(habit.run(model, mine))
        with unsharded(getattr(model, "module", model)):
            shown = [p.detach().clone() for p in model.parameters()]
        return found, weights(model), shown

    for result in run_ranks(size, work):
        if result is not None:
            found, full, shown = result
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
            for ours in (full, shown):
                for got, wanted in zip(ours, reference.parameters(), strict=True):
                    torch.testing.assert_close(got, wanted.detach(), atol=1e-5, rtol=0)
