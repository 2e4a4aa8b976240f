"""The model card of a finished run: ``README.md`` in its directory, from what the run recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import yaml
from huggingface_hub import eval_result_entries_to_yaml

from fullshard.errors import CheckpointError
from fullshard.program.train.reporting.card_curves import CURVES_NAME, CURVES_SIGNATURE, draw_curves
from fullshard.program.train.reporting.card_facts import Run, benchmark_result
from fullshard.program.train.reporting.card_text import card_text
from fullshard.program.train.reporting.reports import RunStart, RunSummary
from fullshard.program.train.reporting.sinks import METRICS_NAME, Sink
from fullshard.state.storage import write_text

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
