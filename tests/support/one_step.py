"""A step of the program whose numbers are read at once, and the models and batches that it takes."""

import copy

import torch

from fullshard import fully_shard, unsharded
from fullshard.program.data import CollateSpec, LengthStats, RowRef, TokenizedSet, collate
from fullshard.program.train.run.step import issue_step

NO_STATS = LengthStats(mean=0.0, longest=0, truncated=0, limit=0)


def train_step(*inputs):
    """Issue a step with the arguments of ``issue_step``, and report it."""
    return issue_step(*inputs).report()


def one_step(model, comm, micro_batches, spec, optimizer=torch.optim.SGD):
    """Shard a model and take a step; returns the report and the full parameters."""
    model = fully_shard(model, comm)
    report = train_step(model, optimizer(model.parameters(), lr=1.0), micro_batches, comm, spec)
    with unsharded(model):
        return report, {name: p.detach().clone() for name, p in model.named_parameters()}


def tokenized(sources, targets):
    """Rows of these ids."""
    return TokenizedSet(sources, targets, NO_STATS, NO_STATS)


def batch_from(rows, numbers, *, fillers=(), **how):
    """A batch of these of ``rows``; padding is id 0."""
    return collate([RowRef(row, filler=row in fillers) for row in numbers], rows, CollateSpec(0, **how))


def twins(make, count=2):
    """Equal models."""
    torch.manual_seed(0)
    model = make()
    return [copy.deepcopy(model) for _ in range(count)]
