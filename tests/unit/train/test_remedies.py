"""What a run that does not fit is told to set: what fits, the cheapest first, or what saves most."""

from types import SimpleNamespace

import pytest

from fullshard.errors import ModelError
from fullshard.program.config import load_run
from fullshard.program.train import fit
from fullshard.program.train.fit import Need, find_remedies
from support.planned import write_run

FUSED, CHECKPOINTED, HALF = (
    "training.fused_cross_entropy=true",
    "training.gradient_checkpointing=true",
    "training.per_device_train_batch_size=2 training.gradient_accumulation_steps=4",
)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Returns what is named if plans need what a function of the settings says."""
    path = write_run(tmp_path)

    def found(limit, needs, *overrides):
        def planned(config, *_, **__):
            return SimpleNamespace(needs=needs(config.training), unplanned=(), blocks=24)

        monkeypatch.setattr(fit, "plan_prepared", planned)
        need = Need(
            load=lambda more: load_run(path, [*overrides, *more]),
            data=None,
            world_size=2,
            rank=0,
            bytes_of=lambda plan: plan.needs,
            before=needs(load_run(path, overrides).training),
            limit=limit,
        )
        return [(" ".join(one.overrides), one.saved_bytes, one.fits) for one in find_remedies(need)]

    return found


def saving(**saved):
    return lambda training: 100 - sum(size for name, size in saved.items() if getattr(training, name) is True)


def test_what_fits_comes_first_the_cheapest_first(found):
    first, second, third = found(80, saving(fused_cross_entropy=15, gradient_checkpointing=20))
    assert first == (CHECKPOINTED, 20, True)
    assert second[0].startswith(f"{FUSED} {CHECKPOINTED}")
    assert second[1:] == third[1:] == (35, True)


def test_the_fewest_blocks_with_which_it_fits_are_named(found):
    def needs(training):
        asked = training.gradient_checkpointing
        return 1000 - 10 * (asked if type(asked) is int else 24 * (asked is True))

    assert found(930, needs)[0] == ("training.gradient_checkpointing=7", 70, True)
    assert found(930, needs, "training.gradient_checkpointing=5")[0] == ("training.gradient_checkpointing=7", 20, True)


def test_if_nothing_fits_what_saves_most_is_named(found):
    named = found(10, saving(fused_cross_entropy=15, gradient_checkpointing=20))
    assert [one[1:] for one in named] == [(35, False)] * 3


def test_a_step_keeps_its_rows(found):
    named = found(90, lambda training: 25 * training.per_device_train_batch_size)
    assert named[0] == (HALF, 50, True)


def test_what_the_run_has_already_is_not_named(found):
    named = found(60, saving(gradient_checkpointing=30), CHECKPOINTED, "training.eval_strategy=no")
    assert named == []


def test_settings_that_cannot_be_planned_are_left_out(found):
    def needs(training):
        if training.fused_cross_entropy is True:
            raise ModelError("not planned")
        return 50

    assert FUSED not in " ".join(overrides for overrides, *_ in found(60, needs))
