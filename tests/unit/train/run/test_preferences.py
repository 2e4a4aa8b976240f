"""Runs on preferences take the steps of a plain loop, on any ranks; their reference is that of the start."""

import copy
import json
import threading

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer, T5ForConditionalGeneration

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, DataError, ModelError, RunStopped
from fullshard.program.config import RunConfig
from fullshard.program.models import AdapterSpec, add_adapter, rates_of_dropout
from fullshard.program.report.files import read_run
from fullshard.program.report.page import make_page
from fullshard.program.train import FileSink, StopRequest, run_plan, train
from fullshard.program.train.evaluation.evaluate import evaluate
from fullshard.program.train.evaluation.reference import with_held_out_reference
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.run.assemble import make_evaluation
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup import model as modelling
from fullshard.program.train.setup.prepare import prepare
from support.interrupted_run import Director
from support.preference_runs import PAIRS, logp, pair_settings, saved_start, start_of, train_by_hand
from support.quantized import NF4, bitsandbytes_stored
from support.tiny_run import Memory

pytestmark = [
    pytest.mark.usefixtures("unmetered", "one_at_a_time"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft's own use
]


def run(config, ranks=1, sinks=(), stop=None):
    memory = Memory()

    def work(comm):
        mine = [FileSink(config.output_dir), memory, *sinks] if comm.rank == 0 else []
        return train(config, comm, mine, stop if comm.rank == 0 else None)

    run_ranks(ranks, work)
    return memory


def partitioned(config, each, accumulation):
    changed = {"per_device_train_batch_size": each, "gradient_accumulation_steps": accumulation}
    return config.model_copy(update={"training": config.training.model_copy(update=changed)})


def assert_same(directory, model, tolerance=1e-5):
    saved = load_file(directory / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in saved:
            assert torch.allclose(saved[name], weight, atol=tolerance), name


@pytest.mark.parametrize(
    ("kind", "objective", "ranks", "each", "accumulation", "packing"),
    [
        ("t5", "dpo", 2, 1, 3, False),
        pytest.param("t5", "dpo", 3, 2, 1, False, marks=pytest.mark.slow),
        pytest.param("t5", "dpo", 2, 3, 1, True, marks=pytest.mark.slow),
        pytest.param("t5", "ipo", 3, 1, 2, False, marks=pytest.mark.slow),
        pytest.param("t5", "simpo", 2, 3, 1, False, marks=pytest.mark.slow),
        pytest.param("t5", "orpo", 2, 3, 1, False, marks=pytest.mark.slow),
        pytest.param("t5", "orpo", 3, 2, 1, True, marks=pytest.mark.slow),
        ("llama", "dpo", 3, 2, 1, False),
        pytest.param("llama", "dpo", 2, 1, 3, True, marks=pytest.mark.slow),
        ("llama", "ipo", 2, 3, 1, True),
        pytest.param("llama", "simpo", 2, 3, 1, True, marks=pytest.mark.slow),
        pytest.param("llama", "orpo", 2, 3, 1, False, marks=pytest.mark.slow),
        ("t5", "kto", 3, 1, 2, False),
        pytest.param("t5", "kto", 2, 1, 3, False, marks=pytest.mark.slow),
        pytest.param("t5", "kto", 2, 3, 1, True, marks=pytest.mark.slow),
        pytest.param("llama", "kto", 2, 3, 1, False, marks=pytest.mark.slow),
        pytest.param("llama", "kto", 3, 2, 1, True, marks=pytest.mark.slow),
    ],
)
def test_ten_steps_are_those_of_a_plain_loop(tmp_path, kind, objective, ranks, each, accumulation, packing):
    changes = {"training__objective": objective, "training__packing": packing}
    plain = RunConfig.model_validate(pair_settings(tmp_path, kind, **changes))
    model = start_of(plain)
    reference = copy.deepcopy(model)
    losses, rewards = train_by_hand(plain, model, lambda call: call(reference))
    config = partitioned(plain, each, accumulation)
    memory = run(config, ranks)
    assert [one.loss for one in memory.steps] == pytest.approx(losses, abs=1e-5)
    lines = map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())
    written = [line for line in lines if line["kind"] == "step"]
    for step, line, expected in zip(memory.steps, written, rewards, strict=True):
        assert line.items() >= step.rewards.items()
        if step.step == 1 and memory.referred:  # every reward is 0 but for rounding
            expected["rewards/accuracies"] = step.rewards.get("rewards/accuracies")
        assert step.rewards == pytest.approx({name: expected[name] for name in step.rewards}, abs=1e-5)
    assert_same(config.output_dir, model)
    assert bool(memory.referred) == (objective in ("dpo", "ipo", "kto"))


@pytest.mark.parametrize(
    ("kind", "quantised"),
    [
        pytest.param("t5", False, marks=pytest.mark.slow),
        pytest.param("llama", False, marks=pytest.mark.slow),
        ("wide llama", True),
    ],
)
def test_an_adapter_is_trained_against_the_model_without_it(tmp_path, kind, quantised, monkeypatch):
    lock = threading.Lock()

    def locked(*args, **kwargs):  # ranks are threads, which share torch's random state
        with lock:
            return add_adapter(*args, **kwargs)

    monkeypatch.setattr(modelling, "add_adapter", locked)
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    values = pair_settings(tmp_path, kind, model={"path": saved_start(tmp_path, kind), "adapter": adapter})
    values["model"] |= {"quantization": {"type": "nf4"}} if quantised else {}
    config = RunConfig.model_validate(values)
    memory = run(partitioned(config, 3, 1), 2)
    plain = _started_adapter(config)
    with_adapter_off = lambda call: _without(plain, call)  # noqa: E731
    losses, _ = train_by_hand(config, plain, with_adapter_off)
    assert [one.loss for one in memory.steps] == pytest.approx(losses, abs=1e-5)
    saved = load_file(config.output_dir / "adapter_model.safetensors")
    ours = get_peft_model_state_dict(plain)
    assert saved.keys() == ours.keys()
    for name, weight in ours.items():
        assert torch.allclose(saved[name], weight, atol=1e-5), name


@pytest.mark.parametrize(("kind", "objective"), [("llama", "dpo"), ("t5", "ipo"), ("t5", "kto")])
def test_an_adapter_that_changes_the_model_at_its_start_is_no_part_of_the_reference(tmp_path, kind, objective):
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "options": {"init_lora_weights": False}}
    model = {"path": saved_start(tmp_path, kind), "adapter": adapter}
    config = RunConfig.model_validate(pair_settings(tmp_path, kind, training__objective=objective, model=model))
    memory = run(partitioned(config, 6, 1))
    losses, _ = train_by_hand(config, plain := _started_adapter(config), lambda call: _without(plain, call))
    assert [one.loss for one in memory.steps] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_taken_out_of_the_base_leaves_the_reference_the_base(tmp_path, init):
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "options": {"init_lora_weights": init}}
    model = {"path": saved_start(tmp_path, "llama"), "adapter": adapter}
    config = RunConfig.model_validate(pair_settings(tmp_path, "llama", model=model))
    memory = run(partitioned(config, 6, 1))
    assert memory.steps[0].loss == pytest.approx(0.693147, abs=1e-5)


def test_an_adapter_that_only_approximates_the_base_has_no_reference(tmp_path):
    adapter = {"type": "lora", "r": 4, "options": {"init_lora_weights": "loftq"}}
    model = {"path": saved_start(tmp_path, "llama"), "adapter": adapter}
    config = RunConfig.model_validate(pair_settings(tmp_path, "llama", model=model))
    with pytest.raises(ConfigError, match=r"init_lora_weights: loftq.*objective: dpo"):
        run(config)


def test_dropout_is_off_but_for_what_the_run_file_sets_as_in_trl(tmp_path):
    path = saved_start(tmp_path, "t5", dropout_rate=0.25)
    for objective, given, rates in (("dpo", None, set()), ("orpo", 0.5, {0.5}), ("sft", None, {0.25})):
        model = {"path": path, "attention_dropout": given}
        config = RunConfig.model_validate(pair_settings(tmp_path, training__objective=objective, model=model))
        tokenizer = AutoTokenizer.from_pretrained(path)
        ready = modelling.prepare_model(config, tokenizer).model
        assert {rate for _, _, rate in rates_of_dropout(ready.modules())} == rates
        assert ready.config.dropout_rate == 0.25


@pytest.mark.slow
def test_a_trained_adapter_is_the_reference_of_going_on_with_it(tmp_path):
    path = saved_start(tmp_path, "llama")
    (tmp_path / "first").mkdir()
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    first = RunConfig.model_validate(
        pair_settings(tmp_path / "first", "llama", model={"path": path, "adapter": adapter})
    )
    run(first)
    values = pair_settings(tmp_path, "llama", model={"path": path, "adapter": {"path": str(first.output_dir)}})
    config = RunConfig.model_validate(values)
    memory = run(partitioned(config, 3, 1), 2)
    plain = PeftModel.from_pretrained(start_of(config), first.output_dir, is_trainable=True)
    reference = copy.deepcopy(plain)
    losses, rewards = train_by_hand(config, plain, lambda call: call(reference))
    assert [one.loss for one in memory.steps] == pytest.approx(losses, abs=1e-5)
    assert rewards[0]["rewards/margins"] == 0


def _started_adapter(config):
    settings = config.model.adapter
    spec = AdapterSpec(base=str(config.model.path), **dict(settings))
    start = start_of(config)
    if config.model.quantization is not None:
        for name, layer in start.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                layer.weight.data = bitsandbytes_stored(layer.weight.data, NF4)[2]
    return add_adapter(start, spec, seed=config.seed).model


def _without(model, call):
    with model.disable_adapter():
        return call(model)


def test_conversations_reach_an_encoder_decoder_as_text(tmp_path):
    config = RunConfig.model_validate(pair_settings(tmp_path, data__max_source_length=64))
    turns = [{"role": "user", "content": "where is my card"}]
    answers = [{"role": "assistant", "content": text} for text in ("yes yes", "no 1")]
    row = {"chosen": [*turns, answers[0]], "rejected": [*turns, answers[1]]}
    file = tmp_path / "turns.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 3)
    config = config.model_copy(update={"data": config.data.model_copy(update={"train_file": file})})
    data = prepare(config)
    assert data.train_set.examples == 3
    texts = [data.tokenizer.decode(data.train_set.source_ids[row], skip_special_tokens=True) for row in (0, 1)]
    assert texts == ["user: where is my card"] * 2
    assert data.train_set.target_ids[2].tolist() == data.tokenizer(text_target="yes yes")["input_ids"]
    more = row | {"chosen": [*row["chosen"], turns[0], answers[1]]}
    file.write_text(f"{json.dumps(row)}\n{json.dumps(more)}\n")
    with pytest.raises(DataError, match=r"Line 2 of the data has a completion of 2 answers.*data\.train_on: last"):
        prepare(config)


EVALUATED = {"training__eval_strategy": "epoch", "evaluation__metrics": ["rewards/margins"]}


def test_held_out_rewards_are_measured_keep_the_best_model_and_are_the_same_on_any_ranks(tmp_path):
    config = RunConfig.model_validate(pair_settings(tmp_path, **EVALUATED, training__per_device_eval_batch_size=2))
    first = run(config).evaluations
    for report, _ in first:
        assert report.metric == "rewards/accuracies"
        assert list(report.metrics) == ["rewards/accuracies", "rewards/margins"]
    assert first[-1][0].loss < first[0][0].loss < 0.7
    assert first[-1][0].metrics["rewards/margins"] > first[0][0].metrics["rewards/margins"]
    losses, margins, right = held_out_by_hand(config)
    best = next(report for report, is_best in reversed(first) if is_best)
    assert best.loss == pytest.approx(losses, abs=1e-5)
    assert best.metrics == pytest.approx({"rewards/accuracies": right, "rewards/margins": margins}, abs=1e-5)
    assert_evaluated(config, best)
    start = json.loads((config.output_dir / "run.json").read_text())
    assert start["train_rows"] == PAIRS
    assert start["validation_rows"] == 5
    again = run(partitioned(config, 2, 1).model_copy(update={"resume": "never"}), 3)
    assert again.referred == [], "the reference is in the cache"
    for (one, _), (other, _) in zip(first, again.evaluations, strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_several_sets_are_measured_each_with_its_own_reference(tmp_path, weighted):
    config = RunConfig.model_validate(pair_settings(tmp_path, **EVALUATED))
    expected, _ = run(config).evaluations[-1]
    parts = {}
    for name, rows in (("a", slice(0, 5)), ("b", slice(5, None))):
        parts[name] = {}
        for side in ("train", "held_out"):
            header, *lines = (tmp_path / f"{side}.csv").read_text().splitlines()
            cut = rows if side == "train" else slice(*((0, 2) if name == "a" else (2, None)))
            (tmp_path / f"{name}_{side}.csv").write_text("\n".join([header, *lines[cut]]) + "\n")
        parts[name] = {"train_file": f"{name}_train.csv", "validation_file": f"{name}_held_out.csv"}
        parts[name] = {key: str(tmp_path / file) for key, file in parts[name].items()}
        parts[name] |= {"weight": 1.0} if weighted else {}
    values = config.as_plain()
    values["resume"] = "never"
    values["data"] |= {"sets": parts, "train_file": None, "validation_file": None}
    mixed = RunConfig.model_validate(values)
    memory = run(mixed)
    report, _ = memory.evaluations[-1]
    assert len(memory.steps) == 10
    if not weighted:  # the same rows in the same order
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)
        assert report.metrics == pytest.approx(expected.metrics, abs=1e-5)
    for name in report.metrics:
        sides = [report.sets[one]["metrics"][name] * report.sets[one]["rows"] for one in parts]
        assert sum(sides) / 5 == pytest.approx(report.metrics[name], abs=1e-9)
    assert [report.sets[one]["rows"] for one in parts] == [2, 3]
    assert_evaluated(mixed, next(one for one, is_best in reversed(memory.evaluations) if is_best))


def assert_evaluated(config, best):
    """The finished model is measured as in its run, against the model at the start."""

    def work(comm):
        trained = find_trained(str(config.output_dir), config)
        data = with_held_out_reference(config, prepare(trained.config), comm)
        model, tokenizer, _ = load_trained(trained, comm)
        return evaluate(model, tokenizer, make_evaluation(trained.config, data), comm, step=0, epoch=0.0)

    report = run_ranks(2, work)[0]
    assert report.loss == pytest.approx(best.loss, abs=1e-5)
    assert report.metrics == pytest.approx(best.metrics, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [False, True])
def test_an_adapter_is_evaluated_against_the_model_at_the_start_of_its_run(tmp_path, quantised):
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    model = {"path": saved_start(tmp_path, "wide llama"), "adapter": adapter}
    model |= {"quantization": {"type": "nf4"}} if quantised else {}
    config = RunConfig.model_validate(pair_settings(tmp_path, "wide llama", model=model, **EVALUATED))
    best = next(report for report, is_best in reversed(run(config).evaluations) if is_best)
    assert_evaluated(config, best)
    (tmp_path / "start" / "more.txt").write_text("changed")
    with pytest.raises(ModelError, match=r"model\.path: .* has changed since the run started with it"):
        assert_evaluated(config, best)


@pytest.mark.slow
def test_held_out_labels_are_measured_with_the_reference_point_of_all_rows(tmp_path):
    changes = {"training__objective": "kto", "training__eval_strategy": "epoch", "training__max_steps": 3}
    config = RunConfig.model_validate(pair_settings(tmp_path, **changes))
    report = run(partitioned(config, 3, 1), 2).evaluations[-1][0]
    rows, beta = prepare(config).held_out_set, config.training.beta
    models = [start_of(config), T5ForConditionalGeneration.from_pretrained(config.output_dir)]
    with torch.no_grad():
        start, end = (
            torch.stack([logp(one, rows.source_ids[n], rows.target_ids[n], causal=False) for n in range(len(rows))])
            for one in models
        )
    gains, divergence = (end - start)[::2], (end - start)[1::2].mean().clamp(min=0)
    good = torch.tensor([row % 3 != 1 for row in range(PAIRS, PAIRS + 5)])
    losses = 1 - torch.sigmoid(beta * torch.where(good, gains - divergence, divergence - gains))
    assert report.loss == pytest.approx(float(losses.mean()), abs=1e-5)
    margin = beta * (gains[good].mean() - gains[~good].mean())
    assert report.metrics == pytest.approx({"rewards/margins": float(margin)}, abs=1e-5)
    again = run(partitioned(config, 2, 1).model_copy(update={"resume": "never"}), 3)
    assert again.evaluations[-1][0].metrics == pytest.approx(report.metrics, abs=1e-5)
    assert_evaluated(config, next(one for one, is_best in reversed(again.evaluations) if is_best))


def held_out_by_hand(config):
    """Loss, margin and accuracy of the saved model on the held-out pairs."""
    data, beta = prepare(config), config.training.beta
    models = [start_of(config), T5ForConditionalGeneration.from_pretrained(config.output_dir)]
    rows = data.held_out_set
    with torch.no_grad():
        start, end = (
            torch.stack([logp(one, rows.source_ids[n], rows.target_ids[n], causal=False) for n in range(len(rows))])
            for one in models
        )
    margins = beta * ((end - start)[::2] - (end - start)[1::2])
    losses = -torch.nn.functional.logsigmoid(margins)
    return float(losses.mean()), float(margins.mean()), float((margins > 0).float().mean())


@pytest.mark.parametrize("kept", [pytest.param(True, marks=pytest.mark.slow), False], ids=["cached", "cache deleted"])
def test_a_resumed_run_has_the_reference_of_its_start(tmp_path, kept):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for directory in (whole, stopped):
        directory.mkdir()
    config = RunConfig.model_validate(pair_settings(whole))
    run(config)
    config = RunConfig.model_validate(pair_settings(stopped, training__save_strategy="no"))
    stop = StopRequest()
    with pytest.raises(RunStopped):
        run(config, sinks=[Director(("step", 4), lambda: setattr(stop, "requested", True))], stop=stop)
    (reference,) = (stopped / "cache").glob("reference-*.npy")
    if not kept:
        reference.unlink()
    memory = run(config)
    assert [one.step for one in memory.steps] == [6, 7, 8, 9, 10]
    assert bool(memory.referred) == (not kept)
    saved, expected = (load_file(one / "out" / "model.safetensors") for one in (stopped, whole))
    for name, weight in expected.items():
        assert torch.equal(saved[name], weight), name


def test_the_reference_of_another_model_is_not_taken(tmp_path):
    config = RunConfig.model_validate(pair_settings(tmp_path, training__max_steps=1))
    assert run(config).referred
    assert run(config.model_copy(update={"seed": 4, "resume": "never"})).referred, "another seed, another model"
    assert not run(config.model_copy(update={"resume": "never"})).referred
    beta = config.training.model_copy(update={"beta": 0.5})
    assert not run(config.model_copy(update={"training": beta, "resume": "never"})).referred
    for file in (tmp_path / "cache").glob("reference-*.npy"):
        file.write_bytes(file.read_bytes()[:-8])
    assert run(config.model_copy(update={"resume": "never"})).referred, "a damaged file is made again"


@pytest.mark.parametrize(
    ("kind", "objective", "packing"),
    [
        ("t5", "dpo", False),
        pytest.param("t5", "kto", False, marks=pytest.mark.slow),
        pytest.param("t5", "ipo", True, marks=pytest.mark.slow),
        pytest.param("llama", "dpo", True, marks=pytest.mark.slow),
        pytest.param("llama", "kto", True, marks=pytest.mark.slow),
    ],
)
def test_a_fused_head_takes_the_same_steps(tmp_path, kind, objective, packing):
    changes = {"training__objective": objective, "training__max_steps": 3}
    plain = RunConfig.model_validate(pair_settings(tmp_path, kind, **changes))
    fused = plain.training.model_copy(update={"fused_cross_entropy": True, "packing": packing})
    losses = [run(plain).steps, run(plain.model_copy(update={"training": fused, "resume": "never"}), 1).steps]
    assert [one.loss for one in losses[1]] == pytest.approx([one.loss for one in losses[0]], abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its code
@pytest.mark.parametrize(
    ("kind", "objective", "packing"), [("t5", "dpo", False), ("llama", "kto", False), ("llama", "kto", True)]
)
def test_compiled_blocks_take_the_same_steps(tmp_path, kind, objective, packing):
    changes = {"training__objective": objective, "training__max_steps": 4}
    plain = RunConfig.model_validate(pair_settings(tmp_path, kind, **changes))
    compiled = plain.training.model_copy(update={"torch_compile": True, "packing": packing})
    memories = [run(plain), run(plain.model_copy(update={"training": compiled, "resume": "never"}))]
    assert memories[1].compiled
    assert not any(late for _, late in memories[1].compiled)
    losses = [[one.loss for one in memory.steps] for memory in memories]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("kind", "objective"), [("t5", "dpo"), ("llama", "dpo"), ("t5", "kto")])
def test_a_plan_of_a_run_has_its_step_and_evaluation(tmp_path, kind, objective, packing):
    changes = EVALUATED | {"training__objective": objective, "training__packing": packing}
    config = RunConfig.model_validate(pair_settings(tmp_path, kind, **changes))
    plan = plan_prepared(config, prepare(config), 2)
    assert plan.phase_peaks["evaluation"] > 0
    held_out = run_plan._largest_held_out(config, prepare(config), 2)
    assert len(held_out.loss.indices) == 2 * 3, "both completions of the larger rank's three, of labels too"
    alone = RunConfig.model_validate(pair_settings(tmp_path, kind, **changes, training__per_device_train_batch_size=1))
    assert plan_prepared(alone, prepare(alone), 2).peak_bytes < plan.peak_bytes


def test_card_and_report_say_what_was_trained(tmp_path):
    config = RunConfig.model_validate(pair_settings(tmp_path, **EVALUATED, training__max_steps=2))
    run(config, sinks=[CardSink(config.output_dir, print)])
    card = ModelCard.load(config.output_dir / "README.md")
    reference = "the reference is the model before this training"
    assert (
        f"| objective | dpo, preferences of a chosen over a rejected completion (beta 0.1; {reference}) |" in card.text
    )
    assert "| batch | 6 pairs |" in card.text
    assert card.data.tags == ["fullshard", "dpo"]
    assert card.data.metrics == ["rewards/accuracies", "rewards/margins"]
    page = make_page(read_run(config.output_dir))
    assert "preferences of a chosen over a rejected text" in page
    assert "per pair, last step (2)" in page
