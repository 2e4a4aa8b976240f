"""Optimizers under sharding against the same optimizer on the unsharded model: one model with every kind of layout."""

import copy

import torch
from torch import nn

from fullshard import fully_shard, unsharded
from fullshard.core.testing import run_ranks

TOKENS, ROWS = 11, 2

LAYOUTS = {"one unit": {"wrap": None}, "a unit each": {"wrap": lambda module: isinstance(module, UNITS)}}
"""Options of fully_shard. In one unit most matrices are whole on a rank; alone in theirs all of them are split."""

UNITS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.LayerNorm)


class Zoo(nn.Module):
    """Parameters of every layout, for 2 to 4 ranks.

    ``tall`` and ``wide`` are split by rows; of ``many``, small matrices, most are whole on one rank; ``table`` is an
    embedding; ``few`` has fewer rows than ranks, so that rows are split; ``experts`` has three dimensions, ``conv``
    four; vectors and a number; some of all that is empty on some rank.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 24)
        self.tall = nn.Linear(24, 300)
        self.wide = nn.Linear(300, 20, bias=False)
        self.many = nn.ModuleList(nn.Linear(20, 20) for _ in range(5))
        self.norm = nn.LayerNorm(20)
        self.few = nn.Linear(20, 2)
        self.wide_few = nn.Linear(9600, 2, bias=False)
        self.experts = nn.Parameter(torch.randn(6, 20, 10) / 5)
        self.conv = nn.Conv1d(10, 12, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens_BT):
        hidden = self.wide(torch.tanh(self.tall(self.table(tokens_BT))))
        for layer in self.many:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = self.norm(hidden)
        mixed = torch.einsum("btr,erc->btc", hidden, self.experts) / 6
        mixed = self.conv(mixed.transpose(1, 2)).transpose(1, 2)
        spread = self.wide_few(mixed.flatten(1).repeat(1, 9600 // (mixed.shape[1] * 12) + 1)[:, :9600])
        return (self.few(hidden).mean(1) + spread / 100) * self.scale


def batches(steps, ranks, seed=0):
    """``steps`` batches of (ranks * ROWS, 8) tokens and as many targets, (ranks * ROWS, 2)."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(TOKENS, (ranks * ROWS, 8), generator=draw), torch.randn(ranks * ROWS, 2, generator=draw))
        for _ in range(steps)
    ]


def zoo(seed=0):
    """The model, the same for a seed."""
    torch.manual_seed(seed)
    return Zoo()


def loss_of(model, batch):
    tokens, targets = batch
    return (model(tokens) - targets).square().mean()


def train(model, optimizer, data, before_step=lambda model: None):
    """One step a batch; ``before_step`` gets the model with its gradients."""
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before_step(model)
        optimizer.step()


def train_by_parts(model, optimizer, data, ranks):
    """The same with gradients added up, in the order of ranks, over what each rank has of a batch."""
    for batch in data:
        parts = []
        for rank in range(ranks):
            optimizer.zero_grad()
            loss_of(model, of_rank(batch, rank)).backward()
            parts.append([param.grad for param in model.parameters()])
        for param, *grads in zip(model.parameters(), *parts, strict=True):
            param.grad = torch.stack(grads).sum(0) / ranks
        optimizer.step()


def whole(model):
    """All parameters of a sharded model, whole, by name; every rank calls it."""
    with unsharded(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def of_rank(batch, rank):
    return tuple(part[rank * ROWS : (rank + 1) * ROWS] for part in batch)


def steps_for(ranks):
    """Steps of a comparison: ten on two ranks, six on more. With fewer, rounding is too much of an update."""
    return 10 if ranks <= 2 else 6


def sharded_weights(make_optimizer, ranks, steps=None, **options):
    """Weights of :func:`zoo` trained on ``ranks`` threads; ``options`` are those of fully_shard."""
    models, data = [zoo() for _ in range(ranks)], batches(steps or steps_for(ranks), ranks)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **options)
        train(model, make_optimizer(model), [of_rank(batch, comm.rank) for batch in data])
        return whole(model)

    return run_ranks(ranks, work)[0]


def unsharded_weights(make_optimizer, ranks, steps=None):
    """The same on the unsharded model and the joint batch."""
    model = zoo()
    train(model, make_optimizer(model), batches(steps or steps_for(ranks), ranks))
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def update_errors(ours, reference):
    """For each parameter, the largest difference to ``reference`` over the reference's largest update.

    Both runs round a weight in every step: four units in the last place do not count, which are 1e-3 of a small update.
    """
    start, errors = dict(zoo().named_parameters()), {}
    for name, new in reference.items():
        rounding = 4 * torch.finfo(new.dtype).eps * new.abs()
        difference = ((ours[name] - new).abs() - rounding).clamp_min(0).max()
        errors[name] = (difference / (new - start[name]).abs().max().clamp_min(1e-12)).item()
    return errors


def assert_same_updates(ours, reference, tolerance=1e-4):
    errors = update_errors(ours, reference)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst}: relative update error {errors[worst]:.1e}"


def copies(model, count):
    return [copy.deepcopy(model) for _ in range(count)]
