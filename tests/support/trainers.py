"""Runs of Hugging Face's trainers and of those derived from them: short, on the CPU, logged step by step."""

import contextlib
import functools
import os

import pytest
import transformers
from transformers import TrainerCallback

from fullshard.compat import transformers as ours

STEPS = 6
SETTINGS = {
    "use_cpu": True,
    "ddp_backend": "gloo",
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "log_level": "error",
}


def both_versions_of(checks):
    """A decorator that adds a check to ``checks``, once for each version of FSDP, which is its argument."""

    def add(check):
        for version in (1, 2):
            checks[f"{check.__name__}_v{version}"] = functools.partial(check, version)

    return add


def ask_for_nothing():
    """Remove the variables that ask for FSDP; an Accelerator of fullshard leaves some."""
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE"))]:
        del os.environ[name]


@contextlib.contextmanager
def installed():
    """``install()``, and what it changed put back."""
    before = {name: value for name, value in vars(transformers.Trainer).items() if name in vars(ours.Trainer)}
    ours.install()
    try:
        yield
    finally:
        for name, value in before.items():
            if not name.startswith("__"):
                setattr(transformers.Trainer, name, value)


class Stop(TrainerCallback):
    """Interrupts a run at half of its steps, after it saved."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == STEPS // 2


def history(trainer):
    """What it logged, without the times."""
    kept = ("loss", "grad_norm", "eval_loss", "eval_tokens", "learning_rate")
    return [{key: log[key] for key in kept if key in log} for log in trainer.state.log_history if "epoch" in log][:-1]


def trained(trainer, **options):
    trainer.train(**options)
    trainer.evaluate()
    return [*history(trainer), {"eval_loss": trainer.state.log_history[-1]["eval_loss"]}]


def same(logs, expected, tolerance=1e-5):
    assert len(logs) == len(expected)
    assert len(logs) > 1
    for number, (log, other) in enumerate(zip(logs, expected, strict=True)):
        assert log == pytest.approx(other, rel=tolerance, abs=tolerance), f"entry {number}: {log} {other}"
