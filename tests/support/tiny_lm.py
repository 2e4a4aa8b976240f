"""A small language model, its batches and losses, without transformers: importing that takes seconds."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB = 50


class Block(nn.Module):
    """A block with uneven shapes: 40 and 24 rows, vectors, and a linear with a bias."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.side = nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h))) + self.side(h)


class TinyLM(nn.Module):
    """A language model with a tied head and a module that forward never uses."""

    def __init__(self, reentrant=None, layers=4, width=24, hidden=40):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(7, 3)
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)

    def loss(self, tokens):
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class HiddenLM(TinyLM):
    """Returns what its head would read."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class SkippingLM(TinyLM):
    """Lets no gradient through the blocks in ``cut``."""

    cut = ()

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = x + (y - x).detach() if number in self.cut else y
        return self.head(x)


def lm_loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def two_forwards_loss(model, tokens):
    return (lm_loss(model, tokens) + lm_loss(model, tokens.flip(1))) / 2


def lm_with_frozen_parts():
    model = TinyLM()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def batches(steps, size, length=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (size, length), generator=generator) for _ in range(steps)]
