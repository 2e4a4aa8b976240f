"""A finished run's model card says what was recorded, is read back by huggingface_hub, and spares the user's files."""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from fullshard.errors import RunStopped
from fullshard.program.config import RunConfig
from fullshard.program.models import build_model, train_tokenizer
from fullshard.program.sharing.contents import recorded_facts
from fullshard.program.train import StopRequest, train
from fullshard.program.train.reporting.card import CardSink, card_text, draw_curves
from fullshard.program.train.reporting.scores import mean_interval
from support.alone import alone, finish
from support.tiny_run import MODEL, settings

BLANK = re.compile(r"\bNone\b|\[\]\(|\bnan\b|\|[ \t]*\||: *$", re.MULTILINE)
"""What a card has where a fact is missing and nobody noticed."""


def run(directory, stop=None, **changes):
    """Train to the end; return the summary, what was said, and the run's directory."""
    config = RunConfig.model_validate(settings(directory, **{"training__max_steps": 2} | changes))
    said = []
    return finish(config, say=said.append, stop=stop), said, directory / "out"


def card_of(out, name="README.md"):
    """The card as the Hub's own parser reads it, after checking that it has no gap."""
    card = ModelCard.load(out / name)
    prose = re.sub(r"```yaml.*?```", "", card.text, flags=re.DOTALL)
    assert BLANK.findall(prose) == []
    return card


def run_its_code(card, out, monkeypatch, answer="where is my card"):
    """What the card's code prints, run next to the model's directory."""
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    monkeypatch.chdir(out.parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"input": lambda: answer})
    return printed.getvalue().strip()


def test_a_new_t5(tmp_path, monkeypatch):
    summary, said, out = run(
        tmp_path,
        evaluation={"metric": "accuracy", "metrics": ["rougeL", "chrf", "perplexity"], "max_new_tokens": 4},
        card={"data_license": "cc-by-4.0", "language": ["en"]},
    )
    card = card_of(out)
    assert said == []
    data = card.data
    assert (data.library_name, data.base_model, data.language) == ("transformers", None, ["en"])
    assert "base_model_relation" not in data
    assert data.metrics == ["accuracy", "rouge", "chrf", "perplexity"]
    assert data.model_name == "out"
    read = {result.metric_name: result for result in data.eval_results}
    assert {name: result.metric_value for name, result in read.items()} == dict(summary.metrics)
    assert {result.dataset_name for result in read.values()} == {"held_out.csv"}
    assert read["accuracy"].dataset_args == {"rows": 7}
    low, high = summary.intervals["accuracy"]
    assert list(summary.intervals) == ["accuracy", "rougeL"]
    row = f"| accuracy | {summary.value:.2%} | {low:.2%} to {high:.2%} | {summary.baseline:.2%} | 7 |"
    assert row in card.text
    assert f"| chrf | {summary.metrics['chrf']:.2%} | none |" in card.text
    assert "trained from scratch. It reads `text` and writes `category`." in card.text
    assert re.search(r"\| training \| train.csv \| 25 \| [\d,]+ bytes, hash [0-9a-f]{16} \|", card.text)
    assert "Licence of the data: cc-by-4.0." in card.text
    assert "| precision | fp32 (ranks compute on CPUs) |" in card.text
    chosen = json.loads((out / "run.json").read_text())["chosen"]
    assert chosen["training.precision"] == "fp32 (ranks compute on CPUs)"
    assert chosen["training.fused_cross_entropy"].startswith("false (logits of up to ")
    assert "**It does not beat its baseline in accuracy.**" in card.text
    assert "| no |" in card.text
    assert str(tmp_path) not in card.text
    assert run_its_code(card, out, monkeypatch) == summary.predictions[0].prediction


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's own use of the name
def test_a_lora_adapter_names_its_base(tmp_path, monkeypatch):
    base = tmp_path / "little-t5"
    tokenizer = train_tokenizer(["where is my card", "i lost it", "what is the rate", "card_arrival lost_card"], 60)
    build_model(MODEL, tokenizer, seed=1).save_pretrained(base)
    tokenizer.save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# A base\n")
    model = {"path": str(base), "adapter": {"type": "lora", "r": 2}}
    summary, _, out = run(tmp_path, model=model)
    card = card_of(out)
    assert card.data.library_name == "peft"
    assert card.data.tags == ["fullshard", "lora"]
    assert card.data.base_model is None  # a directory is no id on the Hub
    assert "Licence of the base model: cc-by-nc-4.0." in card.text
    assert card.data.license is None, "that of the adapter is not known"
    assert "A lora adapter for the local model little-t5, whose own parameters were not trained." in card.text
    assert re.search(r"\| base model \| little-t5: \d files, [\d,]+ bytes, sha256 [0-9a-f]{16} \|", card.text)
    assert run_its_code(card, out, monkeypatch) == summary.predictions[0].prediction


def test_a_base_on_the_hub_is_linked(tmp_path):
    """The run records another model than it trains: nothing is downloaded here."""

    class Recorded(CardSink):
        def finish(self, summary):
            model = {**summary.config["model"], "path": "google-t5/t5-small", "config": None, "tokenizer": None}
            super().finish(dataclasses.replace(summary, config={**summary.config, "model": model}))

    config = RunConfig.model_validate(settings(tmp_path, training__max_steps=1))
    train(config, alone(), [Recorded(config.output_dir, print)])
    card = card_of(tmp_path / "out")
    assert (card.data.base_model, card.data["base_model_relation"]) == ("google-t5/t5-small", "finetune")
    assert "[google-t5/t5-small](https://huggingface.co/google-t5/t5-small), fine-tuned: all " in card.text


@pytest.mark.slow
def test_a_run_without_evaluation(tmp_path, monkeypatch):
    _, _, out = run(tmp_path, training__eval_strategy="no")
    card = card_of(out)
    assert card.data.eval_results is None
    assert card.data.metrics is None
    assert "Not evaluated: the run had no evaluation." in card.text
    assert "It was not tested at all: " in card.text
    assert "## Samples" not in card.text
    run_its_code(card, out, monkeypatch)


@pytest.mark.slow
def test_a_run_without_held_out_rows(tmp_path):
    _, _, out = run(tmp_path, training__eval_strategy="no", data__validation_file=None)
    card = card_of(out)
    assert "held out |" not in card.text
    assert "| training | train.csv | 25 |" in card.text


@pytest.mark.slow
def test_rows_held_out_by_a_fraction_are_named(tmp_path):
    summary, _, out = run(tmp_path, data__validation_file=None, data__validation_fraction=0.3)
    card = card_of(out)
    rows = len(summary.predictions)
    named = "train.csv, the rows held out by data.validation_fraction 0.3"
    assert f"| held out | {named} | {rows} | " in card.text
    assert card.data.eval_results[0].dataset_name == named


def test_a_causal_model_continues_its_separator(tmp_path, monkeypatch):
    model = {
        "config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
        "tokenizer": {"vocab_size": 60},
    }
    summary, _, out = run(tmp_path, model=model, data__separator=" ->", data__source_prefix="q: ")
    card = card_of(out)
    assert card.data.pipeline_tag == "text-generation"
    assert 'tokenizer("q: " + text + " ->", ' in card.text
    assert run_its_code(card, out, monkeypatch) == summary.predictions[0].prediction


CHAT = (
    "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_a_model_with_a_chat_template_is_asked_by_it(tmp_path, monkeypatch):
    base = tmp_path / "little-gpt"
    words = (
        "user: where is my card i lost it what is the rate q 0123456789 assistant: card_arrival lost_card exchange_rate"
    )
    tokenizer = train_tokenizer([words] * 3, 120)
    tokenizer.chat_template = CHAT
    shape = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    build_model(shape, tokenizer, seed=1).save_pretrained(base)
    tokenizer.save_pretrained(base)
    data = {"data__source_prefix": "q: ", "data__max_source_length": 40, "training__gradient_accumulation_steps": 1}
    wanted = settings(tmp_path, model={"path": str(base)}, training__num_train_epochs=20, **data)
    wanted["training"] |= {"eval_strategy": "steps", "eval_steps": 140}
    config = RunConfig.model_validate(wanted)
    summary = finish(config)
    out = config.output_dir
    card = card_of(out)
    assert summary.config["data"]["separator"] is None
    assert 'tokenizer.apply_chat_template([{"role": "user", "content": "q: " + text}]' in card.text
    facts = recorded_facts(Path(out), "ada/mine", merged=False, texts=True)
    assert "text = input()" not in card_text(facts)
    opening = {"": [{"role": "system", "content": 'You are a "bank".'}]}
    start = dataclasses.replace(facts.start, conversations=True, system_turns=opening)
    talks = dataclasses.replace(facts, start=start)
    assert "text = input()" in card_text(talks), "the recorded source is several turns, not the user's one"
    assert r'[{"role": "system", "content": "You are a \"bank\"."}, {"role": "user", ' in card_text(talks)
    assert "bank" not in card_text(dataclasses.replace(talks, texts=False)), "the system's turn is text of rows too"
    printed = run_its_code(card, out, monkeypatch)
    assert printed
    assert printed == summary.predictions[0].prediction


@pytest.mark.slow
def test_the_curves_are_a_picture(tmp_path):
    _, said, out = run(tmp_path, training__max_steps=6, training__eval_strategy="steps", training__eval_steps=2)
    card = card_of(out)
    assert "![Loss and metric over the steps](training_curves.svg)" in card.text
    picture = ElementTree.parse(out / "training_curves.svg").getroot()
    lines = [one.get("points").split() for one in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in lines] == [6, 3, 3, 2], "loss, held-out loss, metric, baseline"
    across = [[float(point.split(",")[0]) for point in points] for points in lines]
    assert all(points == sorted(points) and points[0] >= 62 and points[-1] <= 406 for points in across)
    (out / "training_curves.svg").write_text("<svg/>")
    _, said, _ = run(tmp_path, resume="never")
    assert said == []
    assert (out / "training_curves.svg").read_text() == "<svg/>", "a picture of the user's stays"
    assert "training_curves" not in (out / "README.md").read_text()


def test_a_long_run_is_drawn_by_means():
    steps = [{"kind": "step", "step": step, "loss": float(step % 2)} for step in range(1, 1001)]
    picture = draw_curves([*steps, {"kind": "checkpoint", "step": 7}])
    assert "training, means of 9 steps" in picture
    (points,) = re.findall(r'points="([^"]*)"', picture)
    assert len(points.split()) == 112
    assert draw_curves([]) is None


@pytest.mark.slow
def test_results_on_a_benchmark_are_read_back(tmp_path):
    """The run records that its rows are a benchmark's: nothing is downloaded here."""

    class Recorded(CardSink):
        def finish(self, summary):
            data = {**summary.config["data"], "dataset_name": "ada/intents", "train_file": None}
            card = {**summary.config["card"], "benchmark_task": "intents_test"}
            super().finish(dataclasses.replace(summary, config={**summary.config, "data": data, "card": card}))

    config = RunConfig.model_validate(settings(tmp_path, training__max_steps=1))
    summary = train(config, alone(), [Recorded(config.output_dir, print)])
    (entry,) = parse_eval_result_entries(yaml.safe_load((tmp_path / "out/.eval_results/fullshard.yaml").read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("ada/intents", "intents_test", summary.value)
    assert entry.notes == f"{summary.metric} on 7 rows: held_out.csv"
    run(tmp_path, resume="never")
    assert not (tmp_path / "out/.eval_results/fullshard.yaml").exists()
    with pytest.raises(ValueError, match=r"names a task of the benchmark data\.dataset_name, which is not set"):
        RunConfig.model_validate(settings(tmp_path, card={"benchmark_task": "x"}))


def test_a_stopped_run_writes_no_card(tmp_path):
    stopped = StopRequest()
    stopped.requested = True
    with pytest.raises(RunStopped):
        run(tmp_path, stopped)
    assert not (tmp_path / "out" / "README.md").exists()


def test_the_users_own_readme_stays(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine\n")
    _, said, _ = run(tmp_path)
    assert (out / "README.md").read_text() == "mine\n"
    assert len(said) == 1
    assert "README.md, which fullshard did not write or which you edited, stays as it is" in said[0]
    card_of(out, "MODEL_CARD.md")
    (out / "MODEL_CARD.md").write_text("mine too\n")
    _, said, _ = run(tmp_path, resume="never")
    assert (out / "MODEL_CARD.md").read_text() == "mine too\n"
    assert "will not be written" in said[0]


def test_an_edited_card_stays_and_an_earlier_runs_is_replaced(tmp_path):
    _, _, out = run(tmp_path)
    first = (out / "README.md").read_text()
    _, said, _ = run(tmp_path, resume="never", seed=4)
    assert said == []
    second = (out / "README.md").read_text()
    assert "| seed | 4 |" in second
    assert second != first
    (out / "README.md").write_text(second.replace("# out", "# My model"))
    _, said, _ = run(tmp_path, resume="never")
    assert len(said) == 1
    assert "# My model" in (out / "README.md").read_text()


def test_pefts_unfilled_card_is_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n\n# Model Card for Model ID\n\n[More Information Needed]\n"
    )
    _, said, _ = run(tmp_path)
    assert said == []
    card_of(out)


def test_the_interval_of_scores_is_that_of_a_plain_bootstrap():
    """Against 20,000 resamples by index: both bounds within 6 % of the interval's width."""
    values = np.linspace(0, 1, 57) ** 2
    draw = np.random.default_rng(1)
    means = values[draw.integers(0, len(values), (20_000, len(values)))].mean(axis=1)
    plain = np.percentile(means, (2.5, 97.5))
    found = mean_interval(list(values))
    assert found == mean_interval(list(values))
    assert np.abs(np.array(found) - plain).max() < 0.06 * (plain[1] - plain[0])


@pytest.mark.parametrize("rows", [1, 5, 59, 3080])
def test_the_interval_of_a_share_has_the_shares_that_a_test_would_not_refuse(rows):
    """Wilson's bounds are where the share is 1.96 standard deviations away, of counts at both ends and between."""
    for right in {0, 1, rows // 3, rows - 1, rows}:
        low, high = mean_interval([1.0] * right + [0.0] * (rows - right))
        share = right / rows
        assert 0 <= low <= share <= high <= 1
        assert (low == 0, high == 1) == (right == 0, right == rows)
        for bound in {low, high} - {0.0, 1.0}:
            assert abs(bound - share) == pytest.approx(1.959963984540054 * (bound * (1 - bound) / rows) ** 0.5)


def test_the_interval_of_none_right_of_59_is_not_a_point():
    low, high = mean_interval([0.0] * 59)
    assert (low, f"{high:.2%}") == (0.0, "6.11%")
    assert mean_interval([1.0] * 59) == pytest.approx((1 - high, 1))


@pytest.mark.parametrize("scores", [[0.25] * 9, [0.0] * 58 + [0.3], [0.5, 0.6, 0.7]])
def test_the_interval_of_scores_that_hardly_differ_is_that_of_a_share(scores):
    mean, rows = float(np.mean(scores)), len(scores)
    low, high = mean_interval(scores)
    assert low < mean < high
    for bound in (low, high):
        assert abs(bound - mean) == pytest.approx(1.959963984540054 * (bound * (1 - bound) / rows) ** 0.5)


def test_a_run_and_its_card_say_how_words_of_other_scripts_were_counted(tmp_path):
    rows = "text,category\n" + "".join(f"где моя карта {row},карта\n" for row in range(8))
    for name in ("ru_train.csv", "ru_held_out.csv"):
        (tmp_path / name).write_text(rows)
    files = {
        "data__train_file": str(tmp_path / "ru_train.csv"),
        "data__validation_file": str(tmp_path / "ru_held_out.csv"),
    }
    summary, _, out = run(tmp_path, evaluation={"metric": "rougeL", "max_new_tokens": 2}, **files)
    recorded = [json.loads((out / "summary.json").read_text()), json.loads((out / "run.json").read_text())]
    assert (
        summary.words == recorded[0]["words"] == {"rougeL": "words of any script; characters in scripts without spaces"}
    )
    assert sum("rougeL: words of any script" in note for note in recorded[1]["notes"]) == 1
    assert "Words in rougeL: words of any script" in card_of(out).text
