"""The model card of a finished run: ``README.md`` in its directory, and a picture of its curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from fullshard.errors import CheckpointError, ModelError
from fullshard.program.config import option_of
from fullshard.program.metrics import format_metric, metric_of
from fullshard.program.models import saved_adapter, trains_rows
from fullshard.program.train.reporting.reports import RunStart, RunSummary, spread
from fullshard.program.train.reporting.scores import LEAST_OTHERS, RESAMPLES
from fullshard.program.train.reporting.sinks import METRICS_NAME, Sink
from fullshard.sizes import format_bytes, format_duration
from fullshard.state.storage import write_text


@dataclass(frozen=True)
class Run:
    """A finished run as its card sees it."""

    start: RunStart
    end: RunSummary
    merged: bool = False  # whether the adapter was merged into its base
    texts: bool = True  # whether the card may contain texts of rows
    curves: str | None = None  # name of the picture of the curves; None: there is none
    repo: str | None = None  # repository on the Hub that the card is for; None: the card is for the run's directory

    @property
    def name(self) -> str:
        """Name of the model: the last part of its repository's name or of ``output_dir``."""
        return self.repo.rpartition("/")[2] if self.repo else Path(self.end.output_dir).resolve().name

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the settings."""
        return self.end.config[name]

    @property
    def reading(self) -> Mapping[str, Any]:
        """Settings of the data; for a mixture, those of its first set."""
        data = self.section("data")
        first = data["sets"][self.start.sets[0].name] if self.start.sets else {}
        return {**data, **{key: value for key, value in first.items() if value is not None}}

    @property
    def base(self) -> str | None:
        """Id of the base model on the Hub, or the name of its directory; None: the model is new."""
        path = self.section("model")["path"]
        return path if path is None or self.base_on_hub else Path(path).name

    @property
    def base_on_hub(self) -> bool:
        """True if the base model was named by its id on the Hub."""
        return self.section("model")["path"] is not None and "model.path" not in self.start.content

    @property
    def adapter(self) -> str | None:
        """Type of the adapter to load on its base; None if the files are a complete model."""
        return None if self.merged else self.trained_adapter

    @property
    def trained_adapter(self) -> str | None:
        """Type of the adapter that was trained; None: all parameters were trained."""
        adapter = self.section("model")["adapter"]
        if adapter is None or "type" in adapter:
            return None if adapter is None else adapter["type"]
        with suppress(ModelError):  # merged, or moved
            return saved_adapter(Path(self.end.output_dir))[0]
        return "peft"

    @property
    def quantization(self) -> str | None:
        """Format of the frozen weights in training, such as ``nf4 (double)``; None: they were not quantised."""
        settings = self.section("model").get("quantization")  # runs of earlier versions have no such setting
        if settings is None:
            return None
        double = settings["double_quant"] and settings["type"] == "nf4"
        return f"{settings['type']} (double)" if double else settings["type"]

    @property
    def model_class(self) -> str:
        """Name of transformers' class that loads the model, or an adapter's base."""
        return "AutoModelForCausalLM" if self.start.causal else "AutoModelForSeq2SeqLM"

    @property
    def longest_text(self) -> int:
        """Most tokens that an evaluation generates for a row."""
        return self.section("evaluation")["max_new_tokens"] or self.section("data")["max_target_length"]

    @property
    def held_out(self) -> str:
        """Name of the held-out rows."""
        if self.start.sets:
            return f"held-out rows of {' and '.join(one.name for one in self.start.sets if one.validation_rows)}"
        data = self.section("data")
        if data["validation_file"] is not None:
            return Path(data["validation_file"]).name
        name = Path(data["train_file"]).name if data["train_file"] else str(data["dataset_name"])
        if data["validation_fraction"]:
            return f"{name}, the rows held out by data.validation_fraction {data['validation_fraction']:g}"
        return f"{name}, {data['validation_split']}" if data["dataset_name"] else name


def _hub_data(run: Run) -> str | list[str] | None:
    """Return the id of the data on the Hub, the ids of a mixture's sets on the Hub, or None."""
    data, local = run.section("data"), run.start.content
    if not run.start.sets:
        return data["dataset_name"] if "data.dataset_name" not in local else None
    names = {one.name: data["sets"][one.name]["dataset_name"] for one in run.start.sets}
    return [key for name, key in names.items() if key and f"data.sets.{name}.dataset_name" not in local] or None


def benchmark_result(run: Run) -> EvalResultEntry | None:
    """Return the result for ``.eval_results/``; None unless the settings name a task of a benchmark on the Hub.

    The Hub refuses results on data sets that are not registered there as benchmarks, and tasks that they do not have.
    """
    task, end = run.section("card").get("benchmark_task"), run.end
    if task is None or end.metric is None or end.value is None or not isfinite(end.value):
        return None
    data = run.section("data")
    note = f"{end.metric} on {run.start.validation_rows:,} rows: {run.held_out}"
    return EvalResultEntry(dataset_id=data["dataset_name"], task_id=task, value=end.value, notes=note)


def metadata(run: Run) -> ModelCardData:
    """Return the card's metadata in the form that huggingface_hub reads."""
    data, end = run.reading, run.end
    finite = {name: value for name, value in end.metrics.items() if isfinite(value)}
    kind = "text-generation" if run.start.causal else "text2text-generation"
    hub_data, objective = _hub_data(run), run.section("training").get("objective", "sft")
    file = Path(data["validation_file"] or data["train_file"] or "")
    of_files = file.suffix.removeprefix(".") or data["format"]
    results = [
        EvalResult(
            task_type=kind,
            dataset_type=hub_data if isinstance(hub_data, str) else of_files,
            dataset_name=run.held_out,
            dataset_args={"rows": run.start.validation_rows},
            metric_type=metric_of(name).hub_type or name,
            metric_name=name,
            metric_value=value,
        )
        for name, value in finite.items()
    ]
    card = ModelCardData(
        base_model=run.base if run.base_on_hub else None,
        datasets=hub_data,
        eval_results=results or None,
        model_name=run.name if results else None,
        language=list(run.section("card")["language"]) or None,
        library_name="peft" if run.adapter else "transformers",
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        pipeline_tag=kind,
        tags=["fullshard", *([run.adapter] if run.adapter else []), *([] if objective == "sft" else [objective])],
    )
    if run.base_on_hub:
        card["base_model_relation"] = "adapter" if run.adapter else "finetune"
    return card


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
    text = data.get("text_column")
    task = f" It was trained on the texts of `{text}`, which have no targets." if text else task
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
        if run.section("model").get("new_tokens") or trains_rows(Path(run.end.output_dir)):
            rows = "max(len(tokenizer), base.get_input_embeddings().num_embeddings)"
            loaded.insert(1, f"base.resize_token_embeddings({rows})  # room for the adapter's own tokens")
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
    sharers = run.section("sharding").get("sequence_parallel", 1)
    batch = end.world_size // sharers * settings["gradient_accumulation_steps"]
    of_base = start.content.get("model.path")
    rate = settings["learning_rate"]
    schedule = ", ".join(
        [settings["lr_scheduler_type"], *(f"{k} {v}" for k, v in settings.get("lr_scheduler_kwargs", {}).items())]
    )
    objective = _objective(settings)
    rows = "rows" if settings.get("objective", "sft") in ("sft", "kto") else "pairs"
    facts = {
        "objective": objective,
        "base model": None if of_base is None else f"{run.base}: {of_base}",
        "trained only": ", ".join(run.section("model").get("train", ())) or None,
        "not trained": ", ".join(run.section("model").get("freeze", ())) or None,
        "optimizer": end.optimizer,
        "learning rate": "relative steps" if rate is None else f"{rate:g}, {schedule}",
        "weights": settings.get("ema_decay") and f"moving average, decay {settings['ema_decay']:g}",
        "batch": f"at most {batch * tokens:,} tokens" if tokens else f"{batch * each:,} {rows}",
        "steps": f"{end.steps:,} ({end.epochs:.2f} epochs), {end.tokens:,} tokens{_ENDED[end.ended_by]}",
        "steps skipped": f"{end.skipped_steps:,}" if end.skipped_steps else None,
        "precision": start.chosen.get("training.precision", settings["precision"]),
        "frozen weights": f"quantised: {run.quantization}" if run.quantization else None,
        "seed": str(end.config["seed"]),
        "rows": f"each shared by {sharers} ranks" if sharers > 1 else None,
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


def _objective(settings: Mapping[str, Any]) -> str | None:
    """Return what was trained if it is not the target."""
    name = settings.get("objective", "sft")
    if name == "sft":
        return None
    options = {"beta": name, "simpo_gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
    given = ", ".join(f"{key} {settings[key]:g}" for key, one in options.items() if one == name)
    reference = "" if name in ("simpo", "orpo") else "; the reference is the model before this training"
    what = (
        "desirable and undesirable completions"
        if name == "kto"
        else "preferences of a chosen over a rejected completion"
    )
    return f"{name}, {what} ({given}{reference})"


def _without_paths(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings with only the last part of each absolute path, which may name the user."""

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _without_paths(value, f"{prefix}{key}.")
        names = prefix.startswith("model.config.") or option_of(f"{prefix}{key}").names is not None
        return Path(str(value)).name if names and Path(str(value)).is_absolute() else value

    return {key: plain(key, value) for key, value in values.items()}


def _samples(run: Run) -> list[str]:
    """Return a table of predictions, wrong ones first; without texts, only how many are wrong."""
    predictions = run.end.predictions
    if not predictions:
        return []
    right = [one for one in predictions if one.right]
    wrong = [one for one in predictions if not one.right]
    chosen = [(one, "no") for one in spread(wrong, WRONG_SAMPLES)]
    chosen += [(one, "yes") for one in spread(right, RIGHT_SAMPLES)]
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


def _untested(run: Run) -> str:
    rows, longest_source = run.start.validation_rows, run.section("data")["max_source_length"]
    tested = f"It was tested on the {rows:,} held-out rows above only" if run.end.metric else "It was not tested at all"
    points = [
        f"{tested}: not on other sources of data or other languages, nor for bias, safety or invented statements."
    ]
    if run.section("data").get("text_column") is None:
        points.append(f"Inputs of more than {longest_source:,} tokens were cut to that length.")
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


CURVES_NAME = "training_curves.svg"
"""File of the picture."""

CURVES_SIGNATURE = "<!-- written by fullshard train -->"
"""A picture without this line is the user's, and is kept."""

MOST_POINTS = 120
"""Most points of the training loss; each is the mean over an equal number of steps."""

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 42
BLUE, ORANGE, GREY = "#2f6fb7", "#c87a2a", "#98a1ab"

Points = Sequence[tuple[float, float]]
Curve = tuple[str, str, Points, bool]
"""Name, colour, points, and whether each point has a dot."""


def draw_curves(records: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the picture of a run's records of steps and evaluations; None if there is nothing to draw."""
    kept = list(records)
    steps = _points(kept, "step", "loss")
    if not steps:
        return None
    evaluations = [one for one in kept if one["kind"] == "evaluation"]
    each = -(-len(steps) // MOST_POINTS)
    name = "training" if each == 1 else f"training, means of {each:,} steps"
    groups = [steps[start : start + each] for start in range(0, len(steps), each)]
    means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
    losses: list[Curve] = [(name, BLUE, means, False)]
    panels = [("Loss for each target token", losses)]
    if evaluations:
        losses.append(("held-out rows", ORANGE, _points(kept, "evaluation", "loss"), True))
        metric = evaluations[-1]["metric"]
        curves: list[Curve] = [(metric, ORANGE, _points(kept, "evaluation", "value"), True)]
        baseline = evaluations[-1].get("baseline")
        if baseline is not None:
            last = max(step for step, _ in steps)
            curves.append(("baseline", GREY, [(0.0, baseline), (last, baseline)], False))
        panels.append((f"{metric} on held-out rows", curves))
    width = WIDTH * len(panels)
    drawn = "\n".join(_panel(title, curves, WIDTH * place) for place, (title, curves) in enumerate(panels))
    return (
        f'{CURVES_SIGNATURE}\n<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>\n{drawn}\n</svg>\n'
    )


def _points(records: Iterable[Mapping[str, Any]], kind: str, key: str) -> list[tuple[float, float]]:
    found = ((one["step"], one.get(key)) for one in records if one["kind"] == kind)
    return [(float(step), value) for step, value in found if value is not None and math.isfinite(value)]


def _panel(title: str, curves: Sequence[Curve], left: int) -> str:
    every = [point for _, _, points, _ in curves for point in points]
    last = max((step for step, _ in every), default=1.0)
    low, high = _bounds([value for _, value in every])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, value: float) -> str:
        return f"{LEFT + wide * step / last:.1f},{TOP + tall * (high - value) / (high - low):.1f}"

    lines = [f'<g transform="translate({left} 0)">', f'<text x="{LEFT}" y="16" font-size="12">{escape(title)}</text>']
    for part in range(5):
        value = low + (high - low) * part / 4
        y = TOP + tall * (4 - part) / 4
        lines.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#e3e6ea"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for part, anchor in ((0, "start"), (1, "end")):
        text = f"{last * part:,.0f}" if part else "step 0"
        lines.append(f'<text x="{LEFT + wide * part}" y="{TOP + tall + 16}" text-anchor="{anchor}">{text}</text>')
    at = LEFT
    for name, colour, points, dots in curves:
        path = " ".join(place(*point) for point in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        circles = (place(*point).split(",") for point in points if dots)
        lines += [f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>' for x, y in circles]
        lines.append(f'<text x="{at}" y="{HEIGHT - 8}" fill="{colour}">{escape(name)}</text>')
        at += 26 + 6 * len(name)
    return "\n".join([*lines, "</g>"])


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis: the range of the values with a small margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin


CARD_NAMES = ("README.md", "MODEL_CARD.md")
"""Names of the card; the second is used if the first is the user's own file."""

RESULTS_NAME = ".eval_results"
"""Directory for results on the Hub's benchmarks."""

_SIGNATURE = "<!-- written by fullshard train, which replaces this file unless it was edited: "
_PEFTS = "# Model Card for Model ID"
"""Heading of the unfilled card that peft writes with an adapter."""


class CardSink(Sink):
    """Sink that writes the model card at the end of a run; a run that is stopped writes none."""

    def __init__(self, output_dir: Path, say: Callable[[str], None]) -> None:
        """Write into ``output_dir``; ``say`` receives a line if the user's own README.md is kept."""
        self._directory = output_dir
        self._say = say
        self._run: RunStart | None = None

    def start(self, run: RunStart) -> None:
        """Store the facts of the start, and say where the card will be if not in README.md.

        Raises:
            CheckpointError: An existing file cannot be read.
        """
        self._run = run
        path = self._path()
        if path is None:
            self._say(f"{self._kept(CARD_NAMES)} stay as they are, so this run's model card will not be written")
        elif path.name != CARD_NAMES[0]:
            self._say(f"{self._kept(CARD_NAMES[:1])} stays as it is; this run's model card will be {path}")

    def finish(self, summary: RunSummary) -> None:
        """Write the card, atomically.

        Raises:
            CheckpointError: The file system refused.
        """
        assert self._run is not None, "start() comes first"
        path = self._path()
        if path is not None:
            run = Run(self._run, summary)
            write_text(path, signed_card(replace(run, curves=self._draw())))
            write_benchmark_results(run, self._directory)

    def _draw(self) -> str | None:
        """Write the picture of the curves and return its name; None if there is nothing to draw or it is the user's."""
        path = self._directory / CURVES_NAME
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(CURVES_SIGNATURE):
            return None
        metrics = self._directory / METRICS_NAME
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        drawn = draw_curves(json.loads(line) for line in lines)
        if drawn is None:
            path.unlink(missing_ok=True)  # left by an earlier run
            return None
        write_text(path, drawn)
        return path.name

    def _path(self) -> Path | None:
        """Return the first of the card's names that is free or holds the card of an earlier run."""
        return next((path for name in CARD_NAMES if _may_replace(path := self._directory / name)), None)

    def _kept(self, names: tuple[str, ...]) -> str:
        listed = " and ".join(str(self._directory / name) for name in names)
        return f"{listed}, which fullshard did not write or which you edited,"


def write_benchmark_results(run: Run, directory: Path) -> None:
    """Write the results on a benchmark of the Hub to ``.eval_results/``, if the run was evaluated on one.

    Raises:
        CheckpointError: The file system refused.
    """
    entry = benchmark_result(run)
    path = directory / RESULTS_NAME / "fullshard.yaml"
    if entry is None:
        path.unlink(missing_ok=True)  # left by an earlier run
        return
    path.parent.mkdir(exist_ok=True)
    write_text(path, yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True))


def signed_card(run: Run) -> str:
    """Return the card of a run with a signature, which an edited card no longer matches."""
    text = card_text(run)
    return f"{text}\n{_SIGNATURE}{_digest(text)} -->\n"


def is_ours(path: Path) -> bool:
    """Return True if a file is a card that nobody edited: ours, or the unfilled one of peft.

    Raises:
        CheckpointError: It cannot be read.
    """
    return path.exists() and _may_replace(path)


def _may_replace(path: Path) -> bool:
    """Return True if a path is free, or holds a card that nobody edited: ours, or the unfilled one of peft."""
    if not path.exists():
        return True
    try:
        found = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Move it, or check that you can read it.") from error
    text, _, signature = found.rpartition(f"\n{_SIGNATURE}")
    return signature == f"{_digest(text)} -->\n" or _PEFTS in found.splitlines()


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
