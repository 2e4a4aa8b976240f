"""A run is planned before its model is built: what cannot fit is refused with numbers, what can starts."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.errors import MemoryLimitError
from fullshard.planner.ranks import PlannedComm
from fullshard.program.config import RUN_NAME, load_run
from fullshard.program.train import memory_check
from fullshard.program.train.auto import choices_without_plan
from fullshard.program.train.memory_check import check_memory
from fullshard.program.train.run_plan import needed_bytes
from fullshard.program.train.setup.prepare import prepare
from fullshard.sizes import format_bytes
from support.planned import plan_run, write_run

BLOCKS = "training.gradient_checkpointing"
COMPILED = "training.torch_compile=true"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    training = {"eval_strategy": "no", "per_device_train_batch_size": 4}
    return write_run(tmp_path_factory.mktemp("run"), training=training)


@pytest.fixture
def start(run_file, monkeypatch):
    """Starts a run of equal ranks on a machine with so many bytes free; returns its plan and the lines."""

    def start(free, *overrides, ranks=1, path=run_file, progress=lambda done, total: None):
        def load(more):
            return load_run(path, [*overrides, *more])

        lines, pools = [], {} if free is None else {"machine: x": free}
        monkeypatch.setattr(memory_check, "free_memory", lambda device: pools)
        comm = PlannedComm(0, ranks, torch.device("cpu"))
        return check_memory(load, prepare(load(())), comm, lines.append, progress), lines

    return start


@pytest.fixture(scope="module")
def peak(run_file):
    return needed_bytes(plan_run(load_run(run_file, []), 1), "cpu")


FITS, REFUSED = "starts", "is refused"


@pytest.mark.parametrize(
    ("share", "overrides", "outcome", "chosen", "said"),
    [
        (1.0, [], FITS, f"{BLOCKS}=false", r"planned: a rank needs at most {peak} for tensors; {peak} are free$"),
        (1.0, [f"{BLOCKS}=2"], FITS, None, r"planned: "),
        (0.95, [], FITS, f"{BLOCKS}=", r"\d of 4 blocks: a rank needs {peak} without, "),
        (None, [], FITS, f"{BLOCKS}=false", r"planned: a rank needs at most {peak} for tensors$"),
        (2.0, [COMPILED], FITS, f"{BLOCKS}=false", r"an upper bound because blocks are planned uncompiled$"),
        (0.98, [COMPILED, f"{BLOCKS}=false"], FITS, None, r"by that bound ranks need .* unless compiled blocks"),
        (0.98, [f"{BLOCKS}=false", "training.eval_strategy=no"], REFUSED, None, r"its ranks need {peak} for tensors"),
        (0.01, [], REFUSED, None, r"need at least .* even without activations, and their machine has "),
        (0.01, [COMPILED], REFUSED, None, r"even without activations"),
    ],
)
def test_what_fits_starts_and_what_cannot_is_refused(start, peak, share, overrides, outcome, chosen, said):
    free, said = None if share is None else int(share * peak), said.format(peak=re.escape(format_bytes(peak)))
    if outcome is REFUSED:
        with pytest.raises(MemoryLimitError, match=said) as caught:
            start(free, *overrides)
        assert str(caught.value).endswith("--no-plan starts it anyway.")
        return
    planned, lines = start(free, *overrides)
    assert any(re.search(said, line) for line in lines), lines
    assert "".join(one.override for one in planned.chosen).startswith(chosen or "")
    assert [rank["peak"] for rank in planned.values["memory"]] == [planned.values["peak_bytes"]]
    assert "peak of a step" in planned.table


@pytest.mark.slow
def test_what_a_refusal_names_as_enough_is_enough(start, peak):
    free = peak * 2 // 3
    with pytest.raises(MemoryLimitError, match="activations and temporaries") as caught:
        start(free, f"{BLOCKS}=false")
    found = [line.split(": ")[0].split() for line in str(caught.value).splitlines() if line.endswith("then it fits")]
    assert found
    for overrides in found:
        assert start(free, *overrides)[0] is not None


@pytest.mark.slow
def test_the_fewest_blocks_are_recomputed_with_which_all_ranks_fit(start, run_file):
    """Of four blocks, one is not enough here."""
    needs = [needed_bytes(plan_run(load_run(run_file, [f"{BLOCKS}={number}"]), 1), "cpu") for number in (1, 2)]
    assert needs[0] > needs[1]
    planned, _ = start(needs[1])
    assert [one.override for one in planned.chosen] == [f"{BLOCKS}=2"]
    assert planned.values["recomputed"] == 2


def test_a_run_that_continues_keeps_what_it_chose_at_its_start(start, run_file, peak):
    run_name = Path(load_run(run_file).output_dir, RUN_NAME)
    run_name.parent.mkdir(parents=True)
    run_name.write_text(json.dumps({"config": {"training": {"gradient_checkpointing": 3}}}))
    try:
        planned, (said, _) = start(peak, "resume=auto")
        assert planned.values["recomputed"] == 3
        assert "3 of 4 blocks: as at this run's start" in said
        assert start(peak, "resume=never")[0].values["recomputed"] == 0
    finally:
        run_name.unlink()


@pytest.mark.slow
def test_ranks_of_a_machine_share_its_memory(start, run_file):
    peak = needed_bytes(plan_run(load_run(run_file, []), 2), "cpu")  # two ranks stream the full model through rank 0
    assert start(2 * peak, f"{BLOCKS}=false", ranks=2)[0] is not None
    with pytest.raises(MemoryLimitError, match="its ranks need"):
        start(2 * peak - 2, f"{BLOCKS}=false", ranks=2)


@pytest.mark.slow
def test_batches_that_do_not_come_are_not_counted(start, run_file):
    """The run ends before the longest rows come; a plan begins with these."""
    one = ["training.max_steps=1", "training.per_device_train_batch_size=2", f"{BLOCKS}=false"]
    one += ["training.train_sampling_strategy=random", "seed=0"]
    bound = needed_bytes(plan_run(load_run(run_file, one), 1), "cpu")
    planned, _ = start(bound - 1, *one)
    assert planned.values["highest_bytes"] - planned.values["host"]["snapshots"] < bound


def test_the_steps_that_are_planned_are_told(start, peak):
    told = []
    start(peak, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_a_plan_that_fails_does_not_keep_a_run_from_starting(start, monkeypatch):
    monkeypatch.setattr(memory_check, "plan_prepared", lambda *_, **__: 1 / 0)
    planned, lines = start(10**9)
    assert planned is None
    assert lines == ["starting without a plan: ZeroDivisionError in the plan: division by zero"]


def test_a_run_that_does_not_fit_with_its_snapshots_starts_and_says_so(start, peak, attempts):
    attempts(0)
    _, lines = start(peak)
    assert re.search(r" for tensors and \S+ KiB for snapshots; ", lines[0])
    assert "memory may run out. --max-restarts 0 takes none" in lines[1]


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """Sets the number of the attempt, of a launcher that starts ranks again."""
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))

    def begin(number):
        monkeypatch.setenv("FULLSHARD_ATTEMPT", str(number))

    return begin


def test_a_later_attempt_takes_the_plan_of_the_one_before(start, peak, attempts, tmp_path):
    """With other settings, or on another machine, it plans again."""
    attempts(0)
    first, _ = start(peak)
    attempts(1)
    again, said = start(peak // 100)  # which would be refused
    assert (again.values, again.table, said) == (first.values, first.table, [])
    assert len(start(3 * peak, "training.per_device_train_batch_size=2")[1]) == 1
    for file in tmp_path.rglob("plan-*"):
        file.unlink()
    assert len(start(3 * peak)[1]) == 1


FOUR = ("training.gradient_accumulation_steps=4", "training.per_device_train_batch_size=1")


def test_without_a_plan_a_run_takes_what_needs_least_or_what_it_took_before(run_file, tmp_path):
    def chosen(*overrides):
        config = load_run(run_file, [*FOUR, f"output_dir={tmp_path}", *overrides])
        return [one.override for one in choices_without_plan(config, PlannedComm(0, 4, torch.device("cpu")))]

    assert chosen() == [f"{BLOCKS}=false", "training.accumulate=sharded"]
    assert chosen(f"{BLOCKS}=2", "training.accumulate=unsharded") == []
    assert chosen("training.gradient_accumulation_steps=1") == [f"{BLOCKS}=false"]
    recorded = {"training": {"accumulate": "unsharded", "gradient_checkpointing": 3}}
    (tmp_path / "run.json").write_text(json.dumps({"config": recorded}))
    assert chosen() == [f"{BLOCKS}=3", "training.accumulate=unsharded"]
    assert chosen("resume=never") == [f"{BLOCKS}=false", "training.accumulate=sharded"]


def test_full_gradients_accumulate_where_they_fit(start):
    planned, _ = start(10**9, *FOUR, ranks=4)
    assert planned.values["accumulate"] == "unsharded"
    assert planned.values["parts"]["gradient_buffers"] > 0
    planned, _ = start(10**9, *FOUR, "training.accumulate=sharded", ranks=4)
    assert planned.values["accumulate"] == "sharded"


# By the first numbers

SIZES = {"6B": (4096, 11008, 32), "66B": (8192, 28672, 80)}


@pytest.mark.parametrize("size", ["6B", pytest.param("66B", marks=pytest.mark.slow)])
def test_a_large_model_is_refused_before_anything_is_simulated(start, tmp_path, size):
    """AdamW in fp32 holds 16 bytes a parameter; the last block has no gradient yet while it is gathered."""
    width, inner, layers = SIZES[size]
    large = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 32}
    model = {"config": {"model_type": "llama", **large, "num_key_value_heads": 32}, "tokenizer": {"vocab_size": 60}}
    path, told = write_run(tmp_path, model=model), []
    with pytest.raises(MemoryLimitError) as caught:
        start(24 * 10**9, ranks=2, path=path, progress=lambda *steps: told.append(steps))
    assert told == []
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(vocab_size=len(prepare(load_run(path)).tokenizer), **large))
    (needed,) = re.findall(r"need at least ([\d.]+) GiB for tensors", str(caught.value))
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    assert 16 * parameters <= float(needed) * 2**30 <= 1.03 * 16 * parameters
    assert "machine has 22.35 GiB left" in str(caught.value)
    assert "training.optimizer=adamw_8bit: " in str(caught.value)
