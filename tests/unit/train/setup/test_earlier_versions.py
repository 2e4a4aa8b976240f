"""Runs that an earlier version began go on as they began, where settings have another meaning now."""

from pathlib import Path

import pytest
import torch

from fullshard.core.optim import decay_groups
from fullshard.errors import CheckpointError
from fullshard.program.train.run import assemble
from support.forged import forge_index
from support.interrupted_run import OFTEN, assert_same, before, run, run_until_stopped

pytestmark = pytest.mark.usefixtures("unmetered")

DECAYING = {"training__weight_decay": 0.1, "training__learning_rate": 1e-2} | OFTEN


def without_rules(path):
    """Leave out of a checkpoint what earlier versions did not record."""
    forge_index(Path(path), lambda index: index["values"].pop("rules", None) and None)


@pytest.fixture
def whole(tmp_path):
    """The directory of the run that is not interrupted."""
    (tmp_path / "whole").mkdir()
    return tmp_path / "whole"


@pytest.fixture
def by_dimensions(monkeypatch):
    """Optimizers as earlier versions made them: all matrices decay, T5's table of relative positions too."""

    def make(model, config, **_):
        training = config.training
        betas = (training.adam_beta1, training.adam_beta2)
        options = {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon, "fused": True}
        return torch.optim.AdamW(decay_groups(model, training.weight_decay), **options)

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "make_optimizer", make)
        yield patch


@pytest.mark.parametrize("by_name", [False, True])
def test_weight_decay_goes_on_by_dimensions_also_when_it_resumes_twice(tmp_path, whole, by_dimensions, by_name):
    run(whole, **DECAYING)
    stopped = run_until_stopped(tmp_path, ("step", 3), **DECAYING)
    by_dimensions.undo()
    without_rules(stopped.checkpoint)
    more = {"resume": str(stopped.checkpoint)} if by_name else {}
    again = run_until_stopped(tmp_path, ("step", 5), **DECAYING | more)
    assert again.step > stopped.step
    run(tmp_path, **DECAYING)
    assert_same(tmp_path, whole)


def test_a_run_that_begins_now_goes_on_by_names(tmp_path, whole):
    run(whole, **DECAYING)
    run_until_stopped(tmp_path, ("step", 3), **DECAYING)
    run(tmp_path, **DECAYING)
    assert_same(tmp_path, whole)


def test_epochs_go_on_to_limit_max_steps_unless_one_of_them_is_changed(tmp_path):
    """Two epochs of four steps, and max_steps above: earlier versions took the smaller number."""
    stopped = run_until_stopped(tmp_path, ("step", 1), training__max_steps=30, training__warmup_steps=0, **OFTEN)
    without_rules(stopped.checkpoint)
    stopped = run_until_stopped(tmp_path, ("step", 3), training__max_steps=30, training__warmup_steps=0, **OFTEN)
    memory = run(tmp_path, training__max_steps=30, training__warmup_steps=0, **OFTEN)
    assert (memory.begun[0].total_steps, memory.ended[0].steps) == (8, 8)
    other = {"training__max_steps": 10, "training__warmup_steps": 0, "resume": str(stopped.checkpoint)}
    assert run(tmp_path, **OFTEN | other).begun[0].total_steps == 10


@pytest.mark.parametrize("rules", [None, {}, {"weight_decay": "dimensions"}, {"weight_decay": "n", "steps": "smaller"}])
def test_rules_that_no_run_saves_are_refused(tmp_path, rules):
    path = Path(run_until_stopped(tmp_path, None).checkpoint)
    forge_index(path, lambda index: index["values"].update(rules=rules))
    with pytest.raises(CheckpointError, match="rules is"):
        run(tmp_path)


FREE = OFTEN | {"evaluation__max_new_tokens": None, "data__max_target_length": 40}


@pytest.mark.parametrize(("changes", "comparable"), [({}, True), ({"max_new_tokens": 6}, False), (None, False)])
def test_evaluations_of_texts_of_other_lengths_are_not_compared(tmp_path, changes, comparable):
    """Without the setting, earlier versions wrote up to data.max_target_length (40), now it is the longest target."""
    path = Path(run_until_stopped(tmp_path, before(6), **FREE).checkpoint)

    def change(index):
        longest = index["values"].pop("max_new_tokens", None)
        assert longest is None or 6 < longest < 40
        index["values"].update({} if changes is None else {"max_new_tokens": longest} | changes)

    forge_index(path, change)
    notes = run(tmp_path, **FREE).begun[0].notes
    assert any("was evaluated with other settings" in note for note in notes) is not comparable


def test_other_data_with_longer_targets_makes_other_evaluations(tmp_path):
    path = run_until_stopped(tmp_path, before(6), **FREE).checkpoint
    more = tmp_path / "more.csv"
    more.write_text((tmp_path / "train.csv").read_text() + "it is long,joy joy joy joy joy\n")
    other = {"data__train_file": str(more), "data__max_train_samples": None, "resume": str(path)}
    notes = run(tmp_path, **FREE | other).begun[0].notes
    assert any("was evaluated with other settings" in note for note in notes)
