"""The pure schedule equals the schedulers people know."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from transformers.optimization import Adafactor

from fullshard.program.config import TrainingConfig
from fullshard.program.train.setup.steps import LearningRateSchedule, learning_rate


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
    schedule = LearningRateSchedule("linear", total_steps=10, steps_per_epoch=5, warmup_steps=warmup)
    expected = factors_of(lambda o: get_linear_schedule_with_warmup(o, warmup, 10), 10)
    assert [schedule.factor(step) for step in range(10)] == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_cosine_equals_transformers(warmup):
    schedule = LearningRateSchedule("cosine", total_steps=10, steps_per_epoch=5, warmup_steps=warmup)
    expected = factors_of(lambda o: get_cosine_schedule_with_warmup(o, warmup, 10), 10)
    assert [schedule.factor(step) for step in range(10)] == pytest.approx(expected)


def test_step_equals_torch_stepped_once_an_epoch():
    schedule = LearningRateSchedule("step", total_steps=18, steps_per_epoch=3, step_epochs=2, gamma=0.7)
    expected = factors_of(lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.7), 6)
    assert [schedule.factor(step) for step in range(18)] == pytest.approx([f for f in expected for _ in range(3)])


def test_constant_after_warmup():
    schedule = LearningRateSchedule("constant", total_steps=6, steps_per_epoch=3, warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_rate_is_the_peak_times_the_factor_of_the_steps_before():
    schedule = LearningRateSchedule("linear", total_steps=10, steps_per_epoch=5)
    settings = TrainingConfig(learning_rate=2e-3)
    assert [learning_rate(settings, schedule, step, 3) for step in (1, 6)] == pytest.approx([2e-3, 1e-3])


@pytest.mark.parametrize("skipped", [0, 2])
def test_adafactors_own_rate_equals_transformers_but_for_the_scale(skipped):
    """Of a parameter whose root mean square is one; steps that were left out do not count."""
    settings = TrainingConfig(optimizer="adafactor", learning_rate=None, lr_scheduler_type="constant")
    schedule = LearningRateSchedule("constant", total_steps=20_000, steps_per_epoch=20_000)
    (group,) = Adafactor([torch.nn.Parameter(torch.ones(1))]).param_groups
    for step in (3, 100, 9_999, 10_001, 20_000):
        expected = Adafactor._get_lr(group, {"step": step - skipped, "RMS": 1.0})
        assert learning_rate(settings, schedule, step, skipped) == pytest.approx(expected)
