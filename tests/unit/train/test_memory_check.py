"""A run is planned before its model is built: what cannot fit is refused with numbers, what can starts."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.errors import MemoryLimitError
from fullshard.planner import TooMuchWorkError, hardware
from fullshard.planner.ranks import PlannedComm
from fullshard.program.config import RUN_NAME, load_run
from fullshard.program.train import fit, memory_check
from fullshard.program.train.auto import choices_without_plan
from fullshard.program.train.memory_check import _Rank, check_memory, least_memory, needed_bytes, shortage
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup.prepare import prepare
from fullshard.sizes import format_bytes
from support.planned import RUNS, plan_run, write_run

BLOCKS = "training.gradient_checkpointing"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    training = {"eval_strategy": "no", "per_device_train_batch_size": 4}
    return write_run(tmp_path_factory.mktemp("run"), training=training)


@pytest.fixture
def start(run_file, monkeypatch):
    """Starts a run of one rank, or of several equal ones, with so many bytes free; returns its plan and the lines."""

    def start(free, *overrides, ranks=1, path=run_file, progress=lambda done, total: None):
        lines = []
        load = partial(read, path, overrides)
        monkeypatch.setattr(memory_check, "free_memory", lambda device: {"machine: x": free})
        comm = PlannedComm(0, ranks, torch.device("cpu"))
        return check_memory(load, prepare(load(())), comm, lines.append, progress), lines

    def read(path, overrides, more):
        return load_run(path, [*overrides, *more])

    return start


@pytest.fixture
def no_remedies(monkeypatch):
    """Their plans take seconds."""
    monkeypatch.setattr(memory_check, "find_remedies", lambda need: [])


@pytest.fixture(scope="module")
def peak(run_file):
    return needed_bytes(plan_run(load_run(run_file, []), 1), "cpu")


def test_a_run_that_just_fits_starts_with_its_plan(start, peak):
    planned, (line,) = start(peak)
    size = format_bytes(peak)
    assert line == f"planned: a rank needs at most {size} for tensors; {size} are free"
    assert overrides(planned) == ["training.gradient_checkpointing=false"]
    assert planned.values["highest_bytes"] == peak + planned.values["host"]["snapshots"]
    assert [rank["peak"] for rank in planned.values["memory"]] == [planned.values["peak_bytes"]]
    assert "peak of a step" in planned.table


def test_a_run_that_cannot_fit_is_refused_with_what_would_need_less(start, peak, monkeypatch):
    monkeypatch.setattr(fit, "MOST", 2)  # each takes a plan
    there = peak * 2 // 3
    with pytest.raises(MemoryLimitError) as caught:
        start(there, f"{BLOCKS}=false")
    text = str(caught.value)
    assert f"its ranks need {format_bytes(peak)} for tensors, and their machine has {format_bytes(there)}" in text
    assert "activations and temporaries" in text
    assert text.endswith("--no-plan starts it anyway.")
    found = [line.strip().split(": ") for line in text.splitlines() if line.endswith("then it fits")]
    assert 1 <= len(found) <= 2
    for overrides, _ in found:
        assert start(there, *overrides.split())[0] is not None


def overrides(planned):
    return [one.override for one in planned.chosen]


@pytest.mark.slow
def test_the_fewest_blocks_are_recomputed_with_which_all_ranks_fit(start, run_file, peak):
    """Also where ranks share the memory; of four blocks, one is not enough here."""
    needs = [needed_bytes(plan_run(load_run(run_file, [f"{BLOCKS}={number}"]), 1), "cpu") for number in (1, 2)]
    planned, (said, line) = start(needs[1])
    assert overrides(planned) == [f"{BLOCKS}=2"]
    assert planned.values["recomputed"] == 2
    sizes = [format_bytes(size) for size in (peak, needs[1], needs[1])]
    assert re.search(r"2 of 4 blocks: .* {} without, {} with it, and may take {}".format(*sizes), said)
    assert line.startswith(f"planned: a rank needs at most {sizes[1]} for tensors")


def test_a_run_that_continues_keeps_the_number_of_its_start_while_it_fits(start, run_file, peak):
    run_name = Path(load_run(run_file).output_dir, RUN_NAME)
    run_name.parent.mkdir(parents=True)
    run_name.write_text(json.dumps({"config": {"training": {"gradient_checkpointing": 3}}}))
    try:
        planned, (said, _) = start(peak, "resume=auto")
        assert overrides(planned) == [f"{BLOCKS}=3"]
        assert "3 of 4 blocks: as at this run's start" in said
        assert overrides(start(peak, "resume=never")[0]) == [f"{BLOCKS}=false"]
        run_name.write_text(json.dumps({"config": {"training": {"gradient_checkpointing": False}}}))
        assert overrides(start(peak, "resume=auto")[0]) == [f"{BLOCKS}=false"]
    finally:
        run_name.unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("no_remedies")
def test_ranks_of_a_machine_share_its_memory(start, run_file):
    peak = needed_bytes(plan_run(load_run(run_file, []), 2), "cpu")  # two ranks stream the full model through rank 0
    assert start(2 * peak, ranks=2)[0] is not None
    with pytest.raises(MemoryLimitError, match="its ranks need"):
        start(int(1.2 * peak), ranks=2)


def test_each_rank_counts_where_it_is(run_file):
    plan = plan_run(load_run(run_file, []), 1)
    size = needed_bytes(plan, "cpu")
    ranks = [_Rank(plan, {"machine: a": 2 * size, "control group: b": size}), _Rank(plan, {"machine: a": 2 * size})]
    assert shortage(ranks, "cpu") is None
    assert shortage([*ranks, _Rank(plan, {"machine: c": size - 1})], "cpu") == ("machine: c", size, size - 1)
    assert shortage([*ranks, _Rank(plan, {"machine: a": 3 * size})], "cpu") == ("machine: a", 3 * size, 2 * size)
    more = size + plan.host["snapshots"]
    assert shortage([_Rank(plan, {"machine: a": size})], "cpu", snapshots=True) == ("machine: a", more, size)


@pytest.mark.slow
@pytest.mark.usefixtures("no_remedies")
def test_batches_that_do_not_come_are_not_counted(start, run_file):
    """The run ends before the longest rows come; a plan begins with these."""
    one = ["training.max_steps=1", "training.per_device_train_batch_size=2"]
    one += ["training.train_sampling_strategy=random", "seed=0"]
    bound = needed_bytes(plan_run(load_run(run_file, one), 1), "cpu")
    with pytest.raises(MemoryLimitError):
        start(bound // 2, *one)
    planned, _ = start(bound - 1, *one)
    assert planned.values["highest_bytes"] - planned.values["host"]["snapshots"] < bound


def test_compiled_blocks_are_planned_and_the_plan_is_said_to_be_a_bound(start, peak):
    planned, (line,) = start(2 * peak, "training.torch_compile=true")
    assert planned.values["compiled_bytes"] > 0
    assert line.endswith("an upper bound because blocks are planned uncompiled")


def test_an_upper_bound_refuses_no_run(start, run_file, peak):
    planned, (line, warning) = start(peak - 1, "training.torch_compile=true", f"{BLOCKS}=false")
    assert planned is not None
    assert "upper bound" in line
    needed = needed_bytes(plan_run(load_run(run_file, ["training.torch_compile=true"]), 1), "cpu")
    assert warning.startswith(f"by that bound ranks need {format_bytes(needed)}, and their machine has ")


def test_a_plan_may_take_work_in_proportion_to_the_run(start, peak, monkeypatch):
    """A micro-batch may take ten operators, and the run has 21; no clock decides."""
    monkeypatch.setattr(memory_check, "LEAST_OPERATORS", 0)
    monkeypatch.setattr(memory_check, "OPERATORS_A_BATCH", 10)
    planned, (line,) = start(peak)
    assert planned is None
    assert line.startswith("starting without a plan: it needs more than 210 operators")
    assert start(peak, "training.num_train_epochs=1000")[0] is not None


def test_the_steps_that_are_planned_are_told(start, peak):
    told = []
    start(peak, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_a_fault_of_the_planner_does_not_keep_a_run_from_starting(start, monkeypatch):
    monkeypatch.setattr(memory_check, "plan_prepared", lambda *_, **__: 1 / 0)
    planned, lines = start(10**9)
    assert planned is None
    assert lines == ["starting without a plan: ZeroDivisionError in the plan: division by zero"]


def test_where_the_system_does_not_say_what_is_free_nothing_is_refused(start, monkeypatch, run_file):
    comm = PlannedComm(0, 1, torch.device("cpu"))
    monkeypatch.setattr(memory_check, "free_memory", lambda device: {})
    assert check_memory(lambda more: load_run(run_file, more), prepare(load_run(run_file)), comm, print) is not None


def test_a_gpu_does_not_hold_the_model_while_it_is_built(run_file):
    plan = plan_run(load_run(run_file, ["training.per_device_train_batch_size=1"]), 1)
    plan = type(plan)(**{**vars(plan), "phase_peaks": {"before_first_step": 9, "forward": 5}, "host": {}})
    assert (needed_bytes(plan, "cpu"), needed_bytes(plan, "cuda")) == (9, 5)


def test_a_run_that_does_not_fit_with_its_snapshots_starts_and_says_so(start, peak, attempts):
    attempts(0)
    _, lines = start(peak)
    assert len(lines) == 2
    assert re.search(r" for tensors and \S+ KiB for snapshots; ", lines[0])
    assert "memory may run out. --max-restarts 0 takes none" in lines[1]
    assert len(start(100 * peak)[1]) == 1


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """Sets the number of the attempt, of a launcher that starts ranks again."""
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))

    def begin(number):
        monkeypatch.setenv("FULLSHARD_ATTEMPT", str(number))

    return begin


def test_a_later_attempt_takes_the_plan_of_the_one_before(start, peak, attempts, monkeypatch):
    attempts(0)
    first, _ = start(peak)
    attempts(1)
    monkeypatch.setattr(memory_check, "plan_prepared", lambda *_, **__: pytest.fail("planned again"))
    again, said = start(peak)
    assert (again.values, again.table, said) == (first.values, first.table, [])
    monkeypatch.setattr(memory_check, "_remedy_lines", lambda need, verdicts: f"{need.before} of {need.limit}")
    assert again.remedies() == f"{peak} of {peak}"


def test_a_later_attempt_that_had_no_plan_makes_none(start, peak, attempts, monkeypatch):
    attempts(0)
    monkeypatch.setattr(memory_check, "OPERATORS_A_BATCH", 0)
    monkeypatch.setattr(memory_check, "LEAST_OPERATORS", 0)
    assert start(peak)[0] is None
    attempts(1)
    monkeypatch.setattr(memory_check, "LEAST_OPERATORS", 10**9)
    assert start(peak) == (None, [])


def test_with_other_settings_or_on_another_machine_it_is_planned_again(start, peak, attempts, tmp_path):
    attempts(0)
    start(peak)
    attempts(1)
    assert start(peak)[1] == []
    assert len(start(3 * peak, "training.per_device_train_batch_size=2")[1]) == 1
    for file in tmp_path.rglob("plan-*"):
        file.unlink()
    assert len(start(3 * peak)[1]) == 1


# Accumulation

WIDE = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 2048, "num_layers": 2, "num_heads": 2}
FOUR = ("training.gradient_accumulation_steps=4", "training.per_device_train_batch_size=1", f"model.config={WIDE}")


@pytest.fixture
def peaks(planned_peaks, monkeypatch):
    """What a step of four ranks needs if micro-batches accumulate sharded, and unsharded; saving does not count."""
    monkeypatch.setattr(memory_check, "needed_bytes", lambda plan, kind: plan.peak_bytes)
    return planned_peaks


@pytest.fixture(scope="module")
def planned_peaks(run_file):
    found = []
    for how in ("sharded", "unsharded"):
        config = load_run(run_file, [*FOUR, f"training.accumulate={how}"])
        found.append(plan_prepared(config, prepare(config), 4, roughly=0).peak_bytes)
    return found


def test_full_gradients_accumulate_where_their_plan_fits_in_nine_tenths(start, peaks):
    sharded, unsharded = peaks
    assert unsharded > sharded
    room = 4 * unsharded * 10 // 9 + 4  # the ranks share it
    planned, _ = start(room, *FOUR, ranks=4)
    assert planned.values["accumulate"] == "unsharded"
    assert planned.chosen[-1].why == "it sends less, and its plan fits in 90% of the free memory"
    assert planned.values["parts"]["gradient_buffers"] > 0
    planned, _ = start(room - 16, *FOUR, ranks=4)
    assert planned.values["accumulate"] == "sharded"
    numbers = f"unsharded needs {format_bytes(4 * unsharded)}, more than 90% of the {format_bytes(room - 16)}"
    assert planned.chosen[-1].why.startswith(numbers)
    assert planned.values["memory"][0]["peak"] == sharded


def test_what_cannot_be_planned_is_not_taken_for_what_fits(start, monkeypatch):
    real = memory_check.plan_prepared

    def planned(config, *args, **how):
        if config.training.accumulate == "unsharded":
            raise TooMuchWorkError(1)
        return real(config, *args, **how)

    monkeypatch.setattr(memory_check, "plan_prepared", planned)
    planned_run, _ = start(10**9, *FOUR, ranks=4)
    assert planned_run.values["accumulate"] == "sharded"
    assert planned_run.chosen[-1].why == "unsharded could not be planned"


@pytest.mark.parametrize("override", ["sharding.strategy=no_shard", "training.gradient_accumulation_steps=1"])
def test_nothing_is_kept_in_full_where_that_would_send_no_less(start, override):
    planned, _ = start(10**9, *FOUR, override, ranks=4)
    assert planned.values["accumulate"] == (None if "steps" in override else "sharded")


@pytest.mark.slow
def test_full_gradients_that_cannot_fit_are_refused_with_what_fits(start, peaks, monkeypatch):
    monkeypatch.setattr(fit, "MOST", 1)  # each takes a plan
    sharded, unsharded = peaks
    there = 2 * (sharded + unsharded)
    with pytest.raises(MemoryLimitError) as caught:
        start(there, *FOUR, f"{BLOCKS}=false", "training.accumulate=unsharded", ranks=4)
    text = str(caught.value)
    assert f"need {format_bytes(4 * unsharded)} for tensors, and their machine has {format_bytes(there)}" in text
    assert re.search(r"training.accumulate=sharded: .* less, then it fits", text)
    assert start(there, *FOUR, ranks=4)[0].values["accumulate"] == "sharded"


@pytest.mark.parametrize("before", [pytest.param("sharded", marks=pytest.mark.slow), "unsharded"])
def test_a_run_that_continues_accumulates_as_at_its_start(start, peaks, tmp_path, before):
    """Nine tenths count for a new run only: in all of the memory the plan still fits."""
    recorded = {"config": {"training": {"accumulate": before}}}
    (tmp_path / "run.json").write_text(json.dumps(recorded if before == "unsharded" else {"config": {"training": {}}}))
    room = 4 * peaks[1] if before == "unsharded" else 10**9
    planned, _ = start(room, *FOUR, f"output_dir={tmp_path}", ranks=4)
    assert planned.values["accumulate"] == before
    assert planned.chosen[-1].why == "as at this run's start"
    assert start(10**9, *FOUR, f"output_dir={tmp_path}", "resume=never", ranks=4)[0].values["accumulate"] == "unsharded"


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


# Evaluation


@pytest.mark.parametrize("room", [1.2, 1.0])
@pytest.mark.slow
def test_evaluations_gather_once_where_that_fits_in_nine_tenths(start, tmp_path, monkeypatch, room):
    """Of the two phases alone: a step of so small a model needs more."""

    def needed(plan, kind):
        return max(plan.phase_peaks[phase] for phase in ("evaluation", "generation"))

    monkeypatch.setattr(memory_check, "needed_bytes", needed)
    model, one = {"config": WIDE, "tokenizer": {"vocab_size": 60}}, {"training__gradient_accumulation_steps": 1}
    path = write_run(tmp_path, model=model, data__max_source_length=4, **one)
    config = load_run(path)
    plan = plan_prepared(config, prepare(config), 4, roughly=0)
    once = needed(plan.gathering_once(), "cpu")
    assert once > needed(plan, "cpu")
    planned, (line, *_) = start(int(4 * once * room), ranks=4, path=path)
    assert planned.values["gathers_once"] is (room > 1.1)
    expected = plan.gathering_once() if room > 1.1 else plan
    assert planned.values["phase_peaks"] == expected.phase_peaks
    assert format_bytes(needed(expected, "cpu")) in line
    assert ("gathers all units once" in planned.table) is (room > 1.1)
    monkeypatch.setattr(memory_check, "needed_bytes", lambda plan, kind: plan.peak_bytes)  # which it does not raise
    assert start(4 * plan.peak_bytes, ranks=4, path=path)[0].values["gathers_once"]


SIZES = {"6B": (4096, 11008, 32), "66B": (8192, 28672, 80)}


def large(size):
    width, inner, layers = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("size", ["6B", pytest.param("66B", marks=pytest.mark.slow)])
def test_what_cannot_fit_is_refused_without_a_plan(tmp_path, monkeypatch, size, compiled):
    """AdamW in fp32 holds 16 bytes a parameter; the last block has no gradient yet while it is gathered."""
    path = write_run(tmp_path, model={"config": large(size), "tokenizer": {"vocab_size": 60}})
    monkeypatch.setattr(memory_check, "plan_prepared", lambda *_, **__: pytest.fail("it was planned"))
    config = load_run(path, [f"training.torch_compile={compiled}"])
    data = prepare(config)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(vocab_size=len(data.tokenizer), **large(size)))
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    least = least_memory(config, data, 2, 0, "cpu")
    assert 16 * parameters / 2 <= least.nbytes <= 1.03 * 16 * parameters / 2
    monkeypatch.setattr(memory_check, "free_memory", lambda device: {"machine: x": least.nbytes})
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(lambda more: load_run(path, more), data, PlannedComm(0, 2, torch.device("cpu")), print)
    gib = f"{2 * least.nbytes / 2**30:.2f} GiB"
    assert f"need at least {gib} for tensors" in str(caught.value)
    assert f"has {least.nbytes / 2**30:.2f} GiB left" in str(caught.value)
    assert "training.optimizer=adamw_8bit: " in str(caught.value)


SETTINGS = [
    ("run", ["sharding.strategy=shard_grad_op", "training.precision=bf16"]),
    ("run", ["sharding.strategy=no_shard", "training.optimizer=adafactor"]),
    ("run", ["training.optimizer=muon"]),
    ("directory", ["training.optimizer=adamw_8bit"]),
    ("adapter", ["sharding.frozen=auto"]),
    ("nf4", []),
    ("packed", ["training.optimizer=adamw_bf16"]),
    ("table", []),
    ("table", ["sharding.tables=gather"]),
    ("accumulating", ["sharding.tables=gather"]),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("gpu", [None, "a10g"])
@pytest.mark.slow
def test_it_is_never_more_than_the_plan(tmp_path, kind, settings, gpu):
    """The plan was compared with measured peaks; a run that it lets start must not be refused."""
    config = load_run(RUNS[kind](tmp_path), settings)
    data, device = prepare(config), "cpu" if gpu is None else "cuda"
    plan = plan_prepared(config, data, 2, gpu and hardware(gpu), roughly=0)
    assert 0 < least_memory(config, data, 2, 0, device).nbytes <= needed_bytes(plan, device)


def test_of_a_small_model_with_short_rows_it_is_the_most(tmp_path):
    """Its largest unit alone takes more than the gradients of all."""
    path = write_run(tmp_path, training={"eval_strategy": "no", "per_device_train_batch_size": 1})
    config = load_run(path, ["model.config.d_model=512", "model.config.d_ff=2048", "data.max_source_length=4"])
    data = prepare(config)
    plan = plan_prepared(config, data, 2, roughly=0)
    least = least_memory(config, data, 2, 0, "cpu")
    assert least.parts["shards"] + least.parts["optimizer_state"] <= plan.peak_bytes
    assert least.nbytes > 0.75 * plan.peak_bytes


def test_offloaded_shards_do_not_count_for_a_gpu(tmp_path):
    config = load_run(write_run(tmp_path), ["sharding.cpu_offload=true"])
    data = prepare(config)
    assert set(least_memory(config, data, 2, 0, "cuda").parts) == {"gathered_units"}
    assert least_memory(config, data, 2, 0, "cpu").parts["shards"] > 0


def test_parts_for_images_may_have_no_gradients(tmp_path):
    """A text does not reach them; a parameter without a gradient has no optimizer state either."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {"model_type": "gemma3", "text_config": text | {"num_key_value_heads": 2, "head_dim": 32}}
    model["vision_config"] = text | {"image_size": 28, "patch_size": 14}
    path = write_run(tmp_path, model={"config": model, "tokenizer": {"vocab_size": 60}})
    config = load_run(path)
    parts = least_memory(config, prepare(config), 1, 0, "cpu").parts
    assert parts["optimizer_state"] == parts["gradient_shards"] == 0
    assert parts["shards"] > 0
