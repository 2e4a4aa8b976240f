"""Activations of a plan by block."""

from functools import partial

import pytest
import torch
from torch import nn

import fullshard
from fullshard.planner.blocks import OUTSIDE, REST
from support.planned import batch, make_model

ROWS, WIDTH = 256, 64
ROW_BYTES = 4 * ROWS


class Layered(nn.Module):
    """Two blocks whose backward needs their output, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def planned(loss):
    return fullshard.plan(
        Layered, lambda: torch.zeros(ROWS, WIDTH), world_size=2, rank=0, loss_fn=lambda model, x: loss(model(x))
    )


def test_each_block_has_what_its_forward_made():
    # exp keeps its result for backward; at the fullest moment its gradient is there, and the product with it.
    plan = planned(lambda y: y.exp().sum())
    head = 16 * WIDTH * ROW_BYTES
    assert plan.activations["layers.*"] == 2 * WIDTH * ROW_BYTES
    assert plan.activations[OUTSIDE] == pytest.approx(head, abs=16)
    assert "head" not in plan.activations, "the head's output is freed with the last look at it"
    assert plan.activations[REST] == pytest.approx(head, abs=0.1 * head)
    assert "\n  layers.* " in str(plan)
    assert "\n  loss, rest of forward " in str(plan)


def test_the_head_has_the_logits():
    plan = planned(lambda y: y.square().sum())
    assert plan.activations["head"] == 16 * WIDTH * ROW_BYTES


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_add_up(checkpointing):
    plan = fullshard.plan(partial(make_model, checkpointing=checkpointing), batch, world_size=2, rank=0)
    assert sum(plan.activations.values()) == plan.parts["activations_and_temporaries"]
    assert min(plan.activations.values()) > 0
    of_blocks = sum(nbytes for name, nbytes in plan.activations.items() if name.endswith(".*"))
    assert (of_blocks > plan.activations[REST]) is not checkpointing
