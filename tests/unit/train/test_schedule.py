"""The pure schedule equals the schedulers people know."""

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from fullshard.train.schedule import Schedule


def factors_of(make, steps):
    """Factors that a torch scheduler applies to steps 0, 1, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("warmup", [0, 1, 4, 10, 12])
def test_linear_equals_transformers(warmup):
    schedule = Schedule("linear", total_steps=10, steps_per_epoch=5, warmup_steps=warmup)
    expected = factors_of(lambda o: get_linear_schedule_with_warmup(o, warmup, 10), 10)
    assert [schedule.factor(step) for step in range(10)] == pytest.approx(expected)


def test_step_equals_torch_stepped_once_an_epoch():
    schedule = Schedule("step", total_steps=18, steps_per_epoch=3, step_epochs=2, gamma=0.7)
    expected = factors_of(lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.7), 6)
    assert [schedule.factor(step) for step in range(18)] == pytest.approx([f for f in expected for _ in range(3)])


def test_constant_after_warmup():
    schedule = Schedule("constant", total_steps=6, steps_per_epoch=3, warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
