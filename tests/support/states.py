"""A training state put together from what the ranks hold of it, to compare states of any world size to the bit."""

import torch

from fullshard.core.engine import local_tensors
from fullshard.core.optim.walk import parameter_states, part_of_state
from fullshard.core.shards import rows_of


def rank_runs(model, optimizer=None):
    """This rank's runs of elements: ``(name, shape, start, copy)`` of weights, buffers and optimizer state."""
    held = local_tensors(model)
    runs = [("model/" + one.name, one.shape, one.start, one.tensor.clone()) for one in held]
    by_param = {id(one.param): one for one in held}
    for param, state, _ in parameter_states(optimizer) if optimizer is not None else []:
        one = by_param[id(param)]
        for key, value in state.items():
            if not param.nbytes or not isinstance(value, torch.Tensor):
                continue
            name = f"optimizer/{one.name}/{key}"
            part = part_of_state(optimizer, param, key, value, one.name)
            shape, start = ((), 0) if part is None else (part.shape, part.held[0])
            runs.append((name, shape, start, rows_of(value).reshape(-1).clone()))
    return runs


def whole(by_rank):
    """Full tensors by name from the runs of all ranks; copies of an element on several ranks must agree."""
    tensors, written = {}, {}
    for name, shape, start, part in (run for runs in by_rank for run in runs):
        full = tensors.setdefault(name, torch.zeros(shape, dtype=part.dtype).reshape(-1))
        seen = written.setdefault(name, torch.zeros(full.numel(), dtype=torch.bool))
        place = slice(start, start + part.numel())
        assert torch.equal(full[place][seen[place]], part[seen[place]]), f"ranks disagree on {name}"
        full[place] = part
        seen[place] = True
    for name, seen in written.items():
        assert seen.all(), f"nobody holds part of {name}"
    return tensors


def assert_same_bits(ours, theirs):
    """Two results of :func:`whole` are the same."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), f"{name} differs"
