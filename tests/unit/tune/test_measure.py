"""A candidate's steps on ranks that are threads: its values beside the plain ways', and what is recorded."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, MemoryLimitError, ModelError
from fullshard.program.config import load_run
from fullshard.program.speed import WAYS
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.tune import measure
from fullshard.program.tune.candidates import Candidate, Memory
from fullshard.program.tune.journal import Journal
from fullshard.program.tune.measure import TOLERANCES, difference, product_format, without_dropout
from fullshard.program.tune.tune import tune
from support.fake_ways import FakeWay, replace_ways
from support.tiny_run import QUICK, write_run_file


@pytest.fixture
def fakes(request):
    before = replace_ways(*request.param)
    yield
    WAYS.clear()
    WAYS.update(before)


@pytest.fixture
def run_file(tmp_path):
    return write_run_file(tmp_path, **QUICK, training__gradient_checkpointing=False)


def tuned(run_file, *overrides, minutes=5.0):
    def load(more):
        return load_run(run_file, ["training.precision=fp32", *overrides, *more])

    data = prepare(load(()))
    found = run_ranks(2, lambda comm: tune(load, data, comm, minutes))
    assert found[0].outcome == found[1].outcome
    assert found[0].chosen == found[1].chosen
    return found[0]


@pytest.mark.parametrize("fakes", [("flash", "flex", "liger")], indirect=True)
def test_values_of_every_combination_are_compared_and_the_wrong_ones_are_told(fakes, run_file, one_at_a_time):
    found = tuned(run_file)
    assert found.misfits == {"flash": "the device is a CPU"}
    assert {one.ways for one in found.outcome.measured} == {(), ("liger",)}
    wrong = {one.ways: why for one, why in found.outcome.left_out.items()}
    assert set(wrong) == {("flex",), ("liger", "flex")}
    assert wrong["flex",].startswith("loss ")
    assert ", and " in wrong["flex",]
    for one in found.outcome.measured.values():
        assert len(one.steps_s) >= 1
        assert one.tokens > 0
        assert (one.reserved_bytes, one.share_of_peak) == (0, None)
    recorded = json.loads(found.kept.read_text())
    assert recorded[0]["ways"] == list(found.chosen.ways)
    assert not list(found.kept.parent.glob("tuning-*"))


@pytest.mark.parametrize("fakes", [()], indirect=True)
def test_the_rows_of_a_step_are_the_same_however_they_are_divided(fakes, run_file, one_at_a_time):
    found = tuned(run_file, "training.gradient_accumulation_steps=null", "training.per_device_train_batch_size=2")
    measured = found.outcome.measured.values()
    assert {(one.setting.rows, one.setting.times) for one in measured} == {(2, 1), (1, 2)}
    assert len({one.tokens for one in measured}) == 1


@pytest.mark.parametrize("fakes", [("liger",)], indirect=True)
def test_without_time_only_the_first_is_measured(fakes, run_file, one_at_a_time):
    found = tuned(run_file, minutes=0.0)
    assert [one.ways for one in found.outcome.measured] == [()]
    assert [one.ways for one in found.outcome.left_out] == [("liger",)]


@pytest.mark.parametrize("fakes", [()], indirect=True)
def test_nothing_that_fits_is_an_error_on_every_rank(fakes, run_file, one_at_a_time, monkeypatch):
    monkeypatch.setattr("fullshard.program.tune.tune.free_memory", lambda device: {"machine: here": 1000})
    with pytest.raises(MemoryLimitError, match="Nothing could be measured: its memory plan does not fit"):
        tuned(run_file)


@pytest.mark.parametrize("fakes", [("flash",)], indirect=True)
def test_a_way_of_the_file_that_does_not_apply_is_an_error_as_in_training(fakes, run_file, one_at_a_time):
    with pytest.raises(ModelError, match=r"flash does not apply: the device is a CPU\. Remove it"):
        tuned(run_file, "speed.ways=[flash]")


def test_the_strategy_must_be_set(run_file):
    with pytest.raises(ConfigError, match="tune measures what sharding: auto predicts"):
        tuned(run_file, "sharding=auto")


@pytest.mark.parametrize("fakes", [()], indirect=True)
def test_a_way_that_cannot_be_applied_is_left_out_but_an_error_of_the_plain_model_ends_it(
    fakes, run_file, one_at_a_time, monkeypatch
):
    def refuse(model):
        raise ConfigError("no such kernel")

    monkeypatch.setitem(WAYS, "liger", FakeWay("liger", refuse, part="kernels"))
    found = tuned(run_file)
    assert list(found.outcome.left_out.values()) == ["no such kernel"]
    monkeypatch.setattr(measure, "make_optimizer", lambda *_: refuse(None))
    with pytest.raises(ConfigError, match="no such kernel"):
        tuned(run_file)


def test_differences_beyond_rounding_are_told_with_both_numbers():
    assert difference((2.0, 3.0), (2.0, 3.0), (0.0, 0.0)) is None
    assert difference((2.0, 3.0), (2.00001, 3.0002), TOLERANCES["fp32"]) is None
    text = "loss 2.1, and 2 without it: rounding makes at most 1e-05 of it"
    assert difference((2.0, 3.0), (2.1, 3.0), TOLERANCES["fp32"]) == text
    assert difference((2.0, 3.0), (2.0, 3.3), TOLERANCES["bf16"]).startswith("gradient norm 3.3, and 3 without it")
    assert difference((2.0, 3.0), (math.nan, 3.0), TOLERANCES["bf16"]).startswith("loss nan")


def test_the_tolerance_follows_the_format_of_products(run_file):
    def of(device, *overrides):
        return product_format(load_run(run_file, overrides), torch.device(device))

    assert of("cpu", "training.precision=fp32") == "fp32"
    assert of("cuda", "training.precision=fp32") == "tf32"
    assert of("cuda", "training.precision=fp32", "training.tf32=false") == "fp32"
    assert of("cuda", "training.precision=bf16") == "bf16"


def test_all_dropout_is_off_inside_and_as_before_after():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_dropout, self.dropout, self.scale = 0.2, 0.1, 0.5
            self.inner, self.config = nn.Dropout(0.3), SimpleNamespace(attn_pdrop=0.4, layers=2)

    model = Attention()
    with without_dropout(model):
        assert (model.attention_dropout, model.dropout, model.scale, model.inner.p) == (0.0, 0.0, 0.5, 0.0)
        assert vars(model.config) == {"attn_pdrop": 0.0, "layers": 2}
        assert model.training
    assert (model.attention_dropout, model.dropout, model.scale, model.inner.p) == (0.2, 0.1, 0.5, 0.3)
    assert model.config.attn_pdrop == 0.4


@pytest.mark.parametrize("fakes", [("liger",)], indirect=True)
def test_what_was_measured_before_ranks_started_again_is_not_measured_again(
    fakes, run_file, one_at_a_time, monkeypatch, tmp_path
):
    """A rank that fails in a candidate records it and ends; the next attempt goes on from the others' results."""
    data = prepare(load_run(run_file))
    built, fails = [], True
    real = measure.Bench._built

    def counted(self, setting):
        built.append(setting.ways)
        if fails and setting.ways:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, setting)

    monkeypatch.setattr(measure.Bench, "_built", counted)

    def attempt():
        def load(more):
            return load_run(run_file, ["training.precision=fp32", *more])

        return run_ranks(1, lambda comm: tune(load, data, comm, 5.0, tmp_path / "journal.json"))[0]

    with pytest.raises(MemoryLimitError, match="Rank 0 is out of memory in the candidate liger, recompute false"):
        attempt()
    assert built == [(), ("liger",)]
    fails = False
    found = attempt()
    assert built.count(("liger",)) == 1
    assert [one.ways for one in found.outcome.measured] == [()]
    assert list(found.outcome.left_out.values()) == ["rank 0 failed in it, out of memory: CUDA out of memory."]
    assert not list(tmp_path.glob("journal.json*"))


def test_the_cause_of_a_loss_is_told_before_what_it_caused_on_other_ranks(tmp_path):
    path, one = tmp_path / "journal.json", Candidate(attention="flex", rows=4)
    for why in ("rank 0 failed in it, ConnectionError: reset", "rank 1 failed in it, out of memory: CUDA", "later"):
        run_ranks(1, lambda comm, why=why: Journal(path, comm).lose(one, why))
    found = run_ranks(2, lambda comm: Journal(path, comm).take(one))
    assert found == ["rank 1 failed in it, out of memory: CUDA"] * 2


def test_an_old_journal_is_not_continued(tmp_path, monkeypatch):
    path = tmp_path / "journal.json"
    path.write_text(json.dumps({"plain": {"4": [1.0, 2.0]}}))

    def read():
        return run_ranks(1, lambda comm: Journal(path, comm).values["plain"])[0]

    assert read() == {"4": [1.0, 2.0]}
    monkeypatch.setattr("fullshard.program.tune.journal.YOUNG_S", -1.0)
    assert read() == {}


@pytest.mark.parametrize("fakes", [("liger",)], indirect=True)
def test_a_way_beside_which_the_plain_model_does_not_fit_is_left_out_without_trying(
    fakes, run_file, one_at_a_time, monkeypatch
):
    settled = Memory.settled

    def tight(self, candidate, blocks):
        return settled(self, candidate, blocks) if candidate.ways else "its memory plan does not fit"

    monkeypatch.setattr(Memory, "settled", tight)
    with pytest.raises(MemoryLimitError, match="cannot be compared: the model without it does not fit"):
        tuned(run_file)


@pytest.mark.parametrize("fakes", [()], indirect=True)
def test_ranks_with_other_cards_stay_together_where_one_card_is_not_known(fakes, run_file, one_at_a_time, monkeypatch):
    calls = iter([1e12])
    monkeypatch.setattr(measure, "peak_flops", lambda *_: next(calls, None))
    data = prepare(load_run(run_file))
    load = lambda more: load_run(run_file, ["training.precision=fp32", *more])  # noqa: E731
    shares = [
        [one.share_of_peak for one in found.outcome.measured.values()]
        for found in run_ranks(2, lambda comm: tune(load, data, comm, 0.0))
    ]
    assert sorted(map(len, shares)) == [1, 1]
