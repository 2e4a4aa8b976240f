"""The text of a model card: a section for each question of its reader. Facts that were not recorded are left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fullshard.program.config import option_of
from fullshard.program.metrics import format_metric
from fullshard.program.train.reporting.card_facts import Run, metadata
from fullshard.program.train.reporting.reports import Prediction
from fullshard.program.train.reporting.scores import LEAST_OTHERS, RESAMPLES
from fullshard.sizes import format_bytes, format_duration

WRONG_SAMPLES, RIGHT_SAMPLES = 5, 3
"""Most samples of each kind."""

SAMPLE_CHARACTERS = 240
"""Most characters of a text among the samples."""

_ENDED = {"steps": "", "time": "; ended by training.max_train_minutes", "early_stopping": "; ended by early stopping"}


def card_text(run: Run) -> str:
    """Return the card with its metadata; any process, alone."""
    parts = [
        f"---\n{metadata(run).to_yaml()}\n---\n\n# {run.name}",
        _introduction(run),
        "## Result",
        *_result(run),
        *([f"![Loss and metric over the steps]({run.curves})"] if run.curves else []),
        "## Use",
        _use(run),
        "## Data",
        *_data(run),
        "## Training",
        *_training(run),
        *_samples(run),
        "## What it was not tested for",
        _untested(run),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(run: Run) -> str:
    base = f"[{run.base}](https://huggingface.co/{run.base})" if run.base_on_hub else f"the local model {run.base}"
    if run.adapter:
        made = f"A {run.adapter} adapter for {base}, whose own parameters were not trained"
        made += f"; its linear layers were quantised: {run.quantization}" if run.quantization else ""
    elif run.trained_adapter:
        made = (
            f"{base[0].upper()}{base[1:]} with a {run.trained_adapter} adapter merged into it, which alone was trained"
        )
    elif run.base is None:
        made = f"A {run.start.architecture} with {run.end.parameters:,} parameters, trained from scratch"
    else:
        made = f"{base[0].upper()}{base[1:]}, fine-tuned: all {run.end.parameters:,} parameters were trained"
    data = run.section("data")
    columns = data["source_column"], data["target_column"]
    task = f" It reads `{columns[0]}` and writes `{columns[1]}`." if all(columns) else ""
    return f"{made}.{task} Everything here was recorded by the run that made it."


def _result(run: Run) -> list[str]:
    end = run.end
    if end.metric is None or end.value is None or end.loss is None:
        return [f"Not evaluated: the run had no evaluation. The last step's training loss was {end.train_loss:.4f}."]
    rows = []
    for name, value in end.metrics.items():
        interval, baseline = end.intervals.get(name), end.baselines.get(name)
        between = "none" if interval is None else " to ".join(format_metric(name, bound) for bound in interval)
        beside = "none" if baseline is None else format_metric(name, baseline)
        rows.append([name, format_metric(name, value), between, beside, f"{run.start.validation_rows:,}"])
        for of_set, one in end.sets.items():
            beside = format_metric(name, one["baselines"][name]) if name in one["baselines"] else "none"
            shown = [f"{name} ({of_set})", format_metric(name, one["metrics"][name])]
            rows.append([*shown, "none", beside, f"{one['rows']:,}"])
    text = ""
    if end.baseline_name:
        # "always 'text'" quotes a target.
        name = end.baseline_name if run.texts or not end.baseline_name.startswith("always ") else "one target for all"
        text = f"Baseline: {_cell(name)}, which needs no model. "
    if end.words:
        text += " ".join(f"Words in {name}: {how}." for name, how in end.words.items()) + " "
    if end.intervals:
        text += (
            "Interval: Wilson's where each row is right or wrong, or where fewer than "
            f"{LEAST_OTHERS} rows have another score than most; else the bootstrap over the held-out rows, "
            f"{RESAMPLES:,} resamples with a fixed seed. "
        )
    if len(end.intervals) < len(end.metrics):
        text += "A metric that is not a mean over rows has no interval. "
    text += (
        f"Loss {end.loss:.4f} for each target token. This is the model after step {end.best_step:,} of {end.steps:,}, "
        f"the one with the best {end.metric} among the run's evaluations, all on these rows."
    )
    beaten = end.baseline is None or end.value > end.baseline
    warning = [] if beaten else [f"**It does not beat its baseline in {end.metric}.**"]
    return [*warning, _table(["metric", "model", "95 % interval", "baseline", "held-out rows"], rows), text]


def _opening(run: Run) -> str:
    """Return the code of the system's turns that the training conversations begin with; empty if they differ."""
    name = run.start.sets[0].name if run.start.sets else ""
    turns = (run.start.system_turns.get(name) or ()) if run.texts else ()
    return "".join(f'{{"role": "{turn["role"]}", "content": {_quoted(turn["content"])}}}, ' for turn in turns)


def _use(run: Run) -> str:
    name, data, template = run.model_class, run.reading, run.reading["template"]
    loaded = [f"model = {name}.from_pretrained(path)"]
    if run.adapter:
        loaded = [f'base = {name}.from_pretrained("{run.base}")', "model = PeftModel.from_pretrained(base, path)"]
    predictions, place = run.end.predictions, run.repo or run.name
    # A recorded conversation is one text; as the content of a single turn it would give another prompt.
    usable = predictions and run.texts and not (run.start.causal and run.start.conversations)
    example = _quoted(predictions[0].source[:SAMPLE_CHARACTERS]) if usable else "input()"
    prompt = " + ".join(
        [*([_quoted(data["source_prefix"])] if data["source_prefix"] else []), "text"]
        + ([_quoted(data["separator"])] if data["separator"] else [])
    )
    read = f'inputs = tokenizer({prompt}, truncation=True, max_length={data["max_source_length"]}, return_tensors="pt")'
    if run.start.causal and data["separator"] is None:
        chat = f'[{_opening(run)}{{"role": "user", "content": {prompt}}}], add_generation_prompt=True'
        read = f'inputs = tokenizer.apply_chat_template({chat}, return_dict=True, return_tensors="pt")'
    written = "ids[0, inputs.input_ids.shape[1] :]" if run.start.causal else "ids[0]"
    lines = [
        *(["from peft import PeftModel"] if run.adapter else []),
        f"from transformers import {name}, AutoTokenizer",
        "",
        f'path = "{place}"' + ("" if run.repo else "  # this directory"),
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        *loaded,
        f"text = {example}" + ("" if template is None else f"  # made by the template {template!r}"),
        read,
        f"ids = model.generate(**inputs, {_generation(run)})",
        f"print(tokenizer.decode({written}, skip_special_tokens=True))",
    ]
    code = "\n".join(lines)
    chosen = f" --set {run.start.sets[0].name}" if run.start.sets else ""
    before = f"A row of the set {run.start.sets[0].name}:\n\n" if run.start.sets else ""
    return f"{before}```python\n{code}\n```\n\nOr, with fullshard: `fullshard predict {place} rows.csv{chosen}`."


def _generation(run: Run) -> str:
    """Return the generation settings of the evaluations as arguments."""
    settings = run.section("evaluation")
    wanted = {"min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "length_penalty": 1.0}
    options = {name: settings[name] for name, usual in wanted.items() if settings[name] != usual}
    return ", ".join(f"{name}={value}" for name, value in ({"max_new_tokens": run.longest_text} | options).items())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _data(run: Run) -> list[str]:
    data, content = run.section("data"), run.start.content
    licences = {"data": run.section("card")["data_license"], "base model": run.start.base_license}
    stated = [" ".join(f"Licence of the {name}: {licence}." for name, licence in licences.items() if licence)]
    if run.start.sets:
        return [_sets(run), *filter(None, stated)]
    source = "data.dataset_name" if data["dataset_name"] else "data.train_file"
    name = data[source.removeprefix("data.")]
    shown = Path(name).name if source in content else str(name)
    rows = [["training", shown, f"{run.start.train_rows:,}", content.get(source, "on the Hub")]]
    if run.start.validation_rows:
        held = "data.validation_file" if data["validation_file"] else source
        rows.append(["held out", run.held_out, f"{run.start.validation_rows:,}", content.get(held, "on the Hub")])
    found = [_table(["rows", "from", "number", "content (start of its SHA-256)"], rows)]
    return [*found, *filter(None, stated)]


def _sets(run: Run) -> str:
    """Return the table of the sets of a mixture."""
    rows = []
    for one in run.start.sets:
        settings = run.section("data")["sets"][one.name]
        file = settings["train_file"]
        weight = "none" if one.weight is None else f"{one.weight:g}"
        numbers = [f"{count:,}" for count in (one.train_rows, one.epoch_rows, one.validation_rows)]
        rows.append([one.name, Path(file).name if file else settings["dataset_name"], weight, *numbers, one.content])
    return _table(["set", "from", "weight", "training rows", "of an epoch", "held-out rows", "content (hash)"], rows)


def _training(run: Run) -> list[str]:
    settings, end, start = run.section("training"), run.end, run.start
    tokens, each = settings["per_device_train_batch_tokens"], settings["per_device_train_batch_size"]
    batch = end.world_size * settings["gradient_accumulation_steps"]
    of_base = start.content.get("model.path")
    rate = settings["learning_rate"]
    facts = {
        "base model": None if of_base is None else f"{run.base}: {of_base}",
        "optimizer": end.optimizer,
        "learning rate": "relative steps" if rate is None else f"{rate:g}, {settings['lr_scheduler_type']}",
        "batch": f"at most {batch * tokens:,} tokens" if tokens else f"{batch * each:,} rows",
        "steps": f"{end.steps:,} ({end.epochs:.2f} epochs), {end.tokens:,} tokens{_ENDED[end.ended_by]}",
        "steps skipped": f"{end.skipped_steps:,}" if end.skipped_steps else None,
        "precision": start.chosen.get("training.precision", settings["precision"]),
        "messages between ranks": settings.get("messages") and f"rounded to {settings['messages']}",
        "frozen weights": f"quantised: {run.quantization}" if run.quantization else None,
        "seed": str(end.config["seed"]),
        "hardware": f"{end.world_size} rank{'s' if end.world_size > 1 else ''} on {end.device}, {start.hardware}",
        "memory": f"{format_bytes(max(rank.peak for rank in end.memory))} of tensors at most on a rank",
        "time": f"{end.train_seconds / 3600:.2g} hours ({format_duration(end.train_seconds)}), evaluations included",
        "versions": ", ".join(f"{name} {version}" for name, version in end.versions.items()),
    }
    if start.resumed_step:
        facts["resumed"] = f"after step {start.resumed_step:,}; hardware and versions are those since then"
    table = _table(["fact", "value"], ([name, value] for name, value in facts.items() if value is not None))
    plain = yaml.safe_dump(_without_paths(end.config), sort_keys=False, allow_unicode=True)
    return [table, f"<details><summary>All settings</summary>\n\n```yaml\n{plain}```\n\n</details>"]


def _without_paths(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings with only the last part of each absolute path, which may name the user."""

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _without_paths(value, f"{prefix}{key}.")
        is_path = option_of(f"{prefix}{key}").names is not None and Path(str(value)).is_absolute()
        return Path(value).name if is_path else value

    return {key: plain(key, value) for key, value in values.items()}


def _samples(run: Run) -> list[str]:
    """Return a table of predictions, wrong ones first; without texts, only how many are wrong."""
    predictions = run.end.predictions
    if not predictions:
        return []
    right = [one for one in predictions if _is_right(one)]
    wrong = [one for one in predictions if not _is_right(one)]
    chosen = [(one, "no") for one in _spread(wrong, WRONG_SAMPLES)] + [
        (one, "yes") for one in _spread(right, RIGHT_SAMPLES)
    ]
    rows = [
        [_cell(one.source), _cell(one.prediction) or "(nothing)", _cell(one.references[0]), equal]
        for one, equal in chosen
    ]
    text = (
        f"{len(right):,} of {len(predictions):,} predictions on held-out rows equal a reference, {len(wrong):,} differ."
    )
    if not run.texts:
        return ["## Samples", f"{text} The texts of the rows were not published."]
    text += f" Below are at most {WRONG_SAMPLES} that differ and {RIGHT_SAMPLES} that are equal, evenly spaced."
    return ["## Samples", text, _table(["input", "prediction", "reference", "equal"], rows)]


def _is_right(one: Prediction) -> bool:
    return " ".join(one.prediction.split()) in {" ".join(text.split()) for text in one.references}


def _spread(rows: Sequence[Prediction], most: int) -> list[Prediction]:
    count = min(most, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def _untested(run: Run) -> str:
    rows, longest_source = run.start.validation_rows, run.section("data")["max_source_length"]
    tested = f"It was tested on the {rows:,} held-out rows above only" if run.end.metric else "It was not tested at all"
    points = [
        f"{tested}: not on other sources of data or other languages, nor for bias, safety or invented statements.",
        f"Inputs of more than {longest_source:,} tokens were cut to that length.",
    ]
    if run.end.predictions:
        points.append(f"Texts of more than {run.longest_text:,} new tokens were not written.")
    if run.end.metric:
        points.append("One seed was trained; the interval does not say how other seeds differ.")
    return "\n".join(f"- {point}" for point in points)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return a text as one line of a table, escaped for Markdown and HTML."""
    line = " ".join(text.split())
    cut = f"{line[:SAMPLE_CHARACTERS]}…" if len(line) > SAMPLE_CHARACTERS else line
    for plain, escaped in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("`", "\\`"), ("*", "\\*"), ("_", "\\_")):
        cut = cut.replace(plain, escaped)
    return cut
