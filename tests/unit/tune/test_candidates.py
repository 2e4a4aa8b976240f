"""Which candidates there are, and which of them fit."""

import pytest

from fullshard.program.config import load_run
from fullshard.program.speed import WAYS
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.tune.candidates import SAME, Candidate, Memory, candidates
from support.fake_ways import FakeWay, replace_ways
from support.tiny_run import QUICK, write_run_file


@pytest.fixture(autouse=True)
def fakes():
    before = replace_ways("flex", "bias_sdpa", "liger")
    yield
    WAYS.clear()
    WAYS.update(before)


@pytest.fixture
def run_file(tmp_path):
    return write_run_file(tmp_path, **QUICK)


def test_ways_of_different_parts_combine_and_the_plain_ones_come_first(run_file):
    config = load_run(run_file, ["training.gradient_accumulation_steps=null"])
    found = candidates(config, ["flex", "bias_sdpa", "liger"])
    assert found[0] == Candidate(recompute="none", rows=4, times=1)
    assert {one.ways for one in found} == {
        (),
        ("liger",),
        ("flex",),
        ("bias_sdpa",),
        ("liger", "flex"),
        ("liger", "bias_sdpa"),
    }
    assert {(one.rows, one.times) for one in found} == {(4, 1), (2, 2), (1, 4)}
    assert len(found) == len(set(found)) == 6 * 3 * 3
    assert {one.ways for one in candidates(config, ["flex"])} == {(), ("flex",)}


def test_liger_and_compiled_blocks_are_never_tried_together(run_file, monkeypatch):
    monkeypatch.setitem(WAYS, "compile", FakeWay("compile", part="blocks"))
    config = load_run(run_file, [])
    assert {one.ways for one in candidates(config, ["liger", "compile"])} == {(), ("liger",), ("compile",)}


@pytest.mark.parametrize(
    ("override", "axis", "values"),
    [
        ("speed.ways=[flex]", "attention", {"flex"}),
        ("speed.ways=[]", "kernels", {""}),
        ("training.torch_compile=true", "blocks", {"compile"}),
        ("training.gradient_checkpointing=1", "recompute", {"1"}),
        ("training.gradient_checkpointing=auto", "recompute", {"none", "fewest", "all"}),
        ("training.gradient_accumulation_steps=1", "rows", {4}),
    ],
)
def test_what_the_file_sets_is_not_varied(run_file, override, axis, values, monkeypatch):
    monkeypatch.setitem(WAYS, "compile", FakeWay("compile", part="blocks"))
    config = load_run(run_file, ["training.gradient_accumulation_steps=null", override])
    found = candidates(config, ["flex", "liger", "compile"])
    assert {getattr(one, axis) for one in found} == values


def test_a_budget_of_tokens_has_no_rows(run_file):
    config = load_run(
        run_file, ["training.per_device_train_batch_size=null", "training.per_device_train_batch_tokens=64"]
    )
    assert {(one.rows, one.times) for one in candidates(config, [])} == {(None, 2)}


def test_what_does_not_fit_by_the_plan_is_left_out(run_file):
    def load(more):
        return load_run(run_file, more)

    data = prepare(load(()))
    plain = Candidate(recompute="none", rows=4, times=2)
    roomy = Memory(load, data, 2, None, 1 << 40)
    assert roomy.settled(plain, 2).recompute == "false"
    assert roomy.settled(plain, 2).rows == 4
    assert roomy.settled(Candidate(recompute="fewest", rows=4, times=2), 2) == SAME
    assert roomy.settled(Candidate(recompute="all", rows=4, times=2), 2).recompute == "true"
    assert Memory(load, data, 2, None, 1000).settled(plain, 2) == "its memory plan does not fit"
    assert Memory(load, data, 2, None, None).settled(plain, 2).recompute == "false"
