"""A model of everything that is not a plain matrix."""

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard
from fullshard.core.optim.adafactor import Adafactor
from fullshard.core.optim.lowbit import AdamW8bit
from support.states import rank_runs, whole


class Odd(nn.Module):
    """Parameters of all kinds of shapes, buffers, tied pairs, and a tensor with fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.wide = nn.Parameter(torch.randn(2, 3, 3000))
        self.scale = nn.Parameter(torch.randn(()))
        self.kept = nn.Parameter(torch.randn(3, 2))
        self.kept_too = self.kept
        self.out = nn.Linear(5, 7)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("passing_too", self.passing, persistent=False)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.out(x).sum() * self.scale + self.wide.square().sum() + self.kept.square().sum()


def odd_loss(model, tokens):
    return model(tokens[:, :9].float().view(-1, 1, 3, 3).expand(-1, 3, -1, -1))


def odd(seed, mesh=None, **options):
    """Sharded, but for the tied parameter."""
    torch.manual_seed(seed)
    model = Odd()
    return fully_shard(model, mesh, wrap=None, ignored_params=[model.kept], **options)


def adagrad(model, lr=1e-2):
    """It has state from the start, also where this rank holds nothing of a parameter, and counts no steps there."""
    return torch.optim.Adagrad(model.parameters(), lr=lr)


def adafactor(model, lr=None):
    """Its state is by rows and columns."""
    return Adafactor(model.parameters(), beta1=0.9)


def eight_bit(model, lr=1e-2):
    """Its state is by blocks."""
    return AdamW8bit(model.parameters(), lr=lr)


def gathered(model, optimizer):
    """The whole state of a model on processes, on each of them."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rank_runs(model, optimizer))
    return whole(parts)
