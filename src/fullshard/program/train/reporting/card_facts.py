"""The facts of a finished run that its model card states, and the card's metadata for the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData

from fullshard.program.metrics import metric_of
from fullshard.program.train.reporting.reports import RunStart, RunSummary


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
        return None if adapter is None else adapter["type"]

    @property
    def quantization(self) -> str | None:
        """Format of the frozen weights in training, such as ``nf4 (double)``; None: they were not quantised."""
        settings = self.section("model").get("quantization")  # runs of earlier versions have no such setting
        if settings is None:
            return None
        double = settings["double_quant"] and settings["type"] in ("nf4", "fp4")
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
    hub_data = _hub_data(run)
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
        tags=["fullshard", *([run.adapter] if run.adapter else [])],
    )
    if run.base_on_hub:
        card["base_model_relation"] = "adapter" if run.adapter else "finetune"
    return card
