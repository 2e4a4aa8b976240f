"""The files that are published of a finished run: model and card; texts of rows and data files only on request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, ConfigError, DataError
from fullshard.program.config import PROMPT_NAME, RunConfig, recorded_prompt, recorded_run
from fullshard.program.models import card_metadata, stated_license
from fullshard.program.train.reporting.card import CARD_NAMES, RESULTS_NAME, is_ours, signed_card
from fullshard.program.train.reporting.card_curves import CURVES_NAME
from fullshard.program.train.reporting.card_facts import Run
from fullshard.program.train.reporting.reports import Prediction, RankMemory, RunStart, RunSummary, SetFacts
from fullshard.program.train.reporting.sinks import PREDICTIONS_NAME, RUN_NAME, SUMMARY_NAME
from fullshard.state.storage import CHECKPOINTS_NAME, FINISHED_NAME, holds_model, read_json

WEIGHT_PATTERNS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
"""Weights of a complete model."""

MODEL_PATTERNS = (
    *WEIGHT_PATTERNS,
    "adapter_model.safetensors",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "*tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    PROMPT_NAME,
)
"""Files of a model and its tokenizer, and of how it is asked. Nothing else of a run is published: no checkpoints, logs
or predictions."""

CARD_FILES = (CURVES_NAME, f"{RESULTS_NAME}/*.yaml")
"""Files that the card refers to."""

SECRET = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
"""An access token of the Hub, in any file."""

TEXT_BYTES = 5 << 20
"""Files up to this size are searched for tokens; larger ones are taken to be weights."""

QUOTED_CHARACTERS = 16
"""Texts of rows of at least this length are searched for in an edited card; shorter ones are ordinary words."""


@dataclass(frozen=True)
class File:
    """A file to publish."""

    name: str  # its path in the repository
    content: Path | bytes
    nbytes: int


@dataclass(frozen=True)
class Contents:
    """Everything that one upload publishes."""

    files: tuple[File, ...]
    licences: tuple[str, ...]  # what the card and the settings state
    notes: tuple[str, ...]  # files that are left out, and remarks for the user

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.nbytes for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        files = [{"name": file.name, "bytes": file.nbytes} for file in self.files]
        return {"files": files, "bytes": self.nbytes, "licences": list(self.licences), "notes": list(self.notes)}


def contents_of(
    run: Path, repo: str, *, samples: bool = False, data: bool = False, merged: Path | None = None
) -> Contents:
    """Collect what is published of a finished run; one process.

    Args:
        run: The run's ``output_dir``.
        repo: Id of the repository; the card says how to load the model from it.
        samples: Keep the card's samples, which are texts of held-out rows.
        data: Also publish the data files and the predictions on held-out rows; implies ``samples``.
        merged: Directory of the model with the adapter merged into it; None publishes the model in ``run``.

    Raises:
        CheckpointError: The run is not finished, has no model, or a file cannot be read.
        ConfigError: A file contains an access token of the Hub, or an edited card contains texts of rows.
        DataError: A data file does not exist.
    """
    config = require_finished(run)
    model = merged or run
    if not holds_model(model):
        raise CheckpointError(f"{model} has no weights in Hugging Face's format. Train the run again, or restore them.")
    files = [_file(model, path) for path in model_files(model)]
    prompt = recorded_prompt(run)
    if prompt is not None and not (model / PROMPT_NAME).exists():  # an earlier version's run
        files.append(File(PROMPT_NAME, prompt.encode(), len(prompt.encode())))
    files += [_file(run, path) for path in _matching(run, CARD_FILES)]
    notes: list[str] = []
    files += _cards(run, repo, merged=merged is not None, samples=samples or data, notes=notes)
    if data:
        files += _data_files(run, config, notes)
    else:
        notes.append("training and held-out rows stay here; --with-data publishes their files and the predictions")
    for file in files:
        _require_no_secret(file)
    return Contents(tuple(sorted(files, key=lambda file: file.name)), _licences(files, config), tuple(notes))


def require_finished(run: Path) -> RunConfig:
    """Return the settings of a finished run.

    Raises:
        CheckpointError: There is no finished run.
    """
    if not run.is_dir():
        raise CheckpointError(f"There is no directory {run}. Give the output_dir of a finished run.")
    config = recorded_run(run)
    if config is None or not (run / CHECKPOINTS_NAME / FINISHED_NAME).exists():
        raise CheckpointError(
            f"{run} is not the output_dir of a finished run. `fullshard train` with its run file resumes one that was "
            "stopped, and leaves a finished one as it is."
        )
    return config


def model_files(directory: Path) -> list[Path]:
    """Return the files of a model and its tokenizer in a directory that may hold others."""
    return _matching(directory, MODEL_PATTERNS)


def is_of_a_model(name: str) -> bool:
    """Return True if a path in a repository may belong to a published model."""
    return any(fnmatch(name, pattern) for pattern in MODEL_PATTERNS if "/" in pattern or "/" not in name)


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    found = (path for pattern in patterns for path in directory.glob(pattern) if path.is_file())
    return sorted(set(found))


def _file(directory: Path, path: Path) -> File:
    return File(path.relative_to(directory).as_posix(), path, path.stat().st_size)


def _cards(run: Path, repo: str, *, merged: bool, samples: bool, notes: list[str]) -> list[File]:
    """Return the cards. A card that nobody edited is written anew for this upload."""
    found = []
    for name in CARD_NAMES:
        path = run / name
        if not path.exists():
            continue
        if not is_ours(path):
            _require_no_rows(run, path, samples=samples)
            notes.append(f"{name} is published as you edited it")
            found.append(_file(run, path))
            continue
        facts = recorded_facts(run, repo, merged=merged, texts=samples)
        if facts.end.predictions:
            kept = (
                "has samples: texts of held-out rows" if samples else "has no texts of rows; --with-samples keeps them"
            )
            notes.append(f"{name} {kept}")
        content = signed_card(facts).encode()
        found.append(File(name, content, len(content)))
    if not found:
        notes.append("the run has no card: README.md is missing")
    return found


def _require_no_rows(run: Path, path: Path, *, samples: bool) -> None:
    """Raise if a card that the user edited contains texts of held-out rows without ``--with-samples``."""
    if samples:
        return
    text = _plain(path.read_text(encoding="utf-8", errors="replace"))
    try:
        predictions = recorded_predictions(run)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{run / PREDICTIONS_NAME} cannot be read: {error!r}.") from error
    texts = {_plain(one) for row in predictions for one in (row.source, *row.references)}
    # A card shortens long texts, so only their beginning is compared.
    found = [one for one in texts if len(one) >= QUOTED_CHARACTERS and one[:200] in text]
    if found:
        raise ConfigError(
            f"{path}, which you edited, has texts of {len(found):,} held-out rows, such as {found[0][:60]!r}. Take "
            "them out, or publish them with --with-samples."
        )


def _plain(text: str) -> str:
    """Return a text without the escapes and line breaks of a Markdown table."""
    return " ".join(text.replace("\\", "").replace("&lt;", "<").split())


def _data_files(run: Path, config: RunConfig, notes: list[str]) -> list[File]:
    found = [_file(run, path) for path in _matching(run, (PREDICTIONS_NAME,))]
    # In numbered directories: two sources may have files of the same name.
    for name, data in config.data.parts.items():
        for role, named in (("train", data.train_file), ("held_out", data.validation_file)):
            if named is None:
                continue
            path = Path(named)
            if not path.is_file():
                raise DataError(f"{path}, a data file of {run}, is not there. Restore it, or leave out --with-data.")
            found.append(File("/".join(filter(None, ("data", name, role, path.name))), path, path.stat().st_size))
        if data.dataset_name is not None:
            notes.append(f"the rows of {data.dataset_name} are not in a file of the run, and are not published")
    return found


def _require_no_secret(file: File) -> None:
    if file.nbytes > TEXT_BYTES:
        return
    content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
    if SECRET.search(content):
        raise ConfigError(f"{file.name} has a token of the Hugging Face Hub in it. Take it out, and revoke that token.")


def _licences(files: Iterable[File], config: RunConfig) -> tuple[str, ...]:
    """Return the licences that the card's metadata and the settings state."""
    stated = []
    for file in files:
        if file.name == CARD_NAMES[0]:
            text = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
            licence = card_metadata(text.decode(errors="replace")).get("license")
            stated += [f"{licence} for the model, by the card"] if licence else []
    base = None if config.model.path is None else stated_license(config.model.path)
    stated += [f"{base} for the base model, by its card"] if base else []
    stated += [f"{config.card.data_license} for the data"] if config.card.data_license else []
    return tuple(stated) or ("none is stated: add one to the card, or set card.data_license",)


def recorded_facts(directory: Path, repo: str, *, merged: bool, texts: bool) -> Run:
    """Read what the card of a finished run states from the run's files; one process.

    Args:
        directory: The run's ``output_dir``.
        repo: The repository that the card is for.
        merged: True if the adapter was merged into its base.
        texts: True if the card may contain texts of rows.

    Raises:
        CheckpointError: A file is missing, damaged, or of an earlier version of fullshard.
    """
    try:
        start, end = (_object(directory / name) for name in (RUN_NAME, SUMMARY_NAME))
        # A card shows neither of them, and reading them needs their own classes.
        sets = tuple(SetFacts(**one) for one in start.get("sets", ()))
        start |= {"flops": None, "plan": None, "sets": sets, "output_dir": str(directory)}
        predictions = tuple(recorded_predictions(directory))
        memory = tuple(RankMemory(**one) for one in end["memory"])
        end |= {"memory": memory, "predictions": predictions, "confusion": None, "output_dir": str(directory)}
        known = {field.name: end[field.name] for field in fields(RunSummary) if field.name in end}
        curves = CURVES_NAME if (directory / CURVES_NAME).exists() else None
        return Run(RunStart(**start), RunSummary(**known), merged=merged, texts=texts, curves=curves, repo=repo)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"The card of {directory} cannot be made from its {RUN_NAME} and {SUMMARY_NAME}: {error!r}. They are "
            "damaged, or of another version of fullshard: use the one that trained the run."
        ) from error


def recorded_predictions(directory: Path) -> list[Prediction]:
    """Return the predictions of a finished run; empty if it has none.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
        KeyError: The file is damaged.
    """
    path = directory / PREDICTIONS_NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    return [Prediction(one["input"], one["prediction"], tuple(one["references"])) for one in records]


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values
