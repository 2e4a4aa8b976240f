"""The rows of one set of a run: read and tokenized once for all ranks, and kept in a cache."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.errors import DataError
from fullshard.program.config import DataConfig, RunConfig
from fullshard.program.data import (
    Example,
    Sample,
    SourceSpec,
    Split,
    StreamedRows,
    SystemTurnCounts,
    TokenizedSet,
    TokenizeSpec,
    Turn,
    UnusableRowsError,
    answers_as_rows,
    asked_note,
    cached,
    default_directory,
    fingerprint,
    index_to,
    lengths_to,
    open_stream,
    open_tokens,
    read_split,
    sample_lengths,
    sample_notes,
    tokenize_to,
    training_texts,
    with_rows_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_LABELS = 1000
"""Maximum number of distinct targets of a label set."""

_FORMAT = 6
"""Version of the cache entries; increase it when the same inputs give different entries."""

EXAMPLES_NAME = "examples.json"

Progress = Callable[[str, int, int], None]
"""Receives what is being tokenized, the rows done, and the rows in total."""


def sets_of(
    config: RunConfig,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda what, done, total: None,
    rows_file: Path | None = None,
    rows_encoding: str | None = None,
) -> list[SetRows]:
    """Return each set of a mixture with its settings; for other data, a single set."""
    return [
        SetRows(config.model_copy(update={"data": part}), say, progress, name, rows_file, rows_encoding)
        for name, part in config.data.parts.items()
    ]


def source_spec(data: DataConfig) -> SourceSpec:
    """Return where the rows of one set come from; any process, alone."""
    return SourceSpec(**{each.name: getattr(data, each.name) for each in fields(SourceSpec)})


@dataclass
class SetRows:
    """Preparation of one set of a run: its settings, and the data that was read and hashed so far."""

    config: RunConfig
    say: Callable[[str], None]
    progress: Progress = lambda what, done, total: None
    name: str = ""
    rows_file: Path | None = None
    rows_encoding: str | None = None  # encoding of ``rows_file``; None: the set's
    read: dict[Split, tuple[list[Example], tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    hashed: dict[Split, str] = field(default_factory=dict)

    def source(self, split: Split) -> SourceSpec:
        """Return where a split's rows come from."""
        own = source_spec(self.config.data)
        if split == "train" or self.rows_file is None:
            return own
        return with_rows_of(self.rows_file, own, self.rows_encoding or own.encoding)

    @property
    def directory(self) -> Path:
        """Directory of the cache."""
        return self.config.data.cache_dir or default_directory()

    def rows(self, split: Split) -> tuple[list[Example], tuple[str, ...], tuple[str, ...]]:
        """Return the rows of a split to use, notes, and lines on skipped rows beyond the notes; read only once."""
        if split not in self.read:
            try:
                table = read_split(self.source(split), split)
            except UnusableRowsError as error:
                raise DataError("\n".join([str(error), *self.listed(split, error.beyond_shown)])) from error
            used, notes, sample = table.examples, table.notes, self.sample(split)
            if sample is not None:
                drawn = sample.drawn(used)
                used, notes = list(compress(used, drawn)), (*notes, *sample_notes(drawn, split))
            self.read[split] = (used, notes, table.skipped)
        return self.read[split]

    def training_rows(self) -> Iterable[Example]:
        """Return the training rows as text; streamed rows are read again at each call and not kept."""
        if self.config.data.streaming:
            return training_texts(self.source("train"), self.sample("train"))
        return self.rows("train")[0]

    def num_training_rows(self) -> int:
        """Return the number of training rows."""
        return self.index()[1]["rows"] if self.config.data.streaming else len(self.rows("train")[0])

    def holds_conversations(self) -> bool:
        """Return whether the training rows are conversations; the cache remembers it of rows read before."""
        if self.config.data.streaming:
            return self.index()[1]["conversations"]

        def build(entry: Path) -> dict[str, Any]:
            del entry
            rows, _, _ = self.rows("train")
            return {"conversations": rows[0].conversation is not None}

        _, kept = self.find(self.key("train", "kind"), build, "rows")
        return kept["conversations"]

    def index(self, *, by_answer: bool = False) -> tuple[Path, dict[str, Any]]:
        """Return the entry with the index of the training rows, and its JSON values; made in one pass over the file.

        ``by_answer``: make a row of each learned answer of a conversation.
        """

        def build(entry: Path) -> dict[str, Any]:
            spec, what = self.source("train"), "training rows"
            self.say(f"finding the {what} of {spec.train_file or spec.dataset_name}")
            try:
                # The number of rows is known only at the end.
                return index_to(entry, spec, self.sample("train"), MOST_LABELS, by_answer=by_answer)
            except UnusableRowsError as error:
                raise DataError("\n".join([str(error), *self.listed("train", error.beyond_shown)])) from error

        return self.find(self.key("train", "index", by_answer), build, "index")

    def listed(self, split: Split, lines: Sequence[str]) -> tuple[str, ...]:
        """Write a line for each unusable row into the output directory, and return a note that says where; any rank."""
        if not lines:
            return ()
        name = f"{self.name}_{split}" if self.name else split
        if split == "validation" and self.rows_file is not None:  # rows of another file are not the run's
            name = f"of_{self.rows_file.stem}"
        path = Path(self.config.output_dir, f"unusable_rows_{name}.txt")
        # Each rank writes the same file, first under its own temporary name.
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="backslashreplace")
            temporary.replace(path)
        except OSError as error:
            return (f"The list of all {len(lines):,} unusable rows could not be written: {error}.",)
        return (f"All {len(lines):,} unusable rows, one a line: {path}",)

    def content(self, split: Split) -> str:
        """Return the fingerprint of a split, computed once."""
        if split not in self.hashed:
            self.hashed[split] = fingerprint(self.source(split), split)
        return self.hashed[split]

    def sample(self, split: Split) -> Sample | None:
        """Return the rows to draw of a split; None: all are used."""
        data = self.config.data
        rows = data.max_train_samples if split == "train" else data.max_eval_samples
        return None if rows is None else Sample(rows, self.config.seed)

    def key(self, split: Split, kind: str, *more: Any) -> str:
        """Return the name of a cache entry: a hash of everything that its content depends on."""
        versions = [version("tokenizers"), version("transformers")]
        # Notes contain file names, so the names are part of the key.
        sample = self.sample(split)
        drawn = None if sample is None else asdict(sample)
        parts = [_FORMAT, kind, split, self.content(split), asdict(self.source(split)), drawn]
        return blake2b(json.dumps([*parts, *versions, *more], default=str).encode(), digest_size=16).hexdigest()

    def find(self, key: str, build: Callable[[Path], dict[str, Any]], what: str) -> tuple[Path, dict[str, Any]]:
        """Find an entry of the cache, or build it."""
        waiting = lambda: self.say(f"another process is making the same {what}; waiting for it")  # noqa: E731
        return cached(self.directory, key, build, waiting)


def set_tokens(
    work: SetRows,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    spec: TokenizeSpec,
    system_turns: Sequence[Turn] | None = None,
) -> tuple[TokenizedSet, dict[str, Any], Path]:
    """Return a split's token ids, the JSON values of its cache entry, and the entry's directory.

    ``system_turns``: the beginning of the conversation that a row of plain text becomes; None: it stays plain.
    """
    what = "training rows" if split == "train" else "held-out rows"

    def build(entry: Path) -> dict[str, Any]:
        rows, notes, skipped = work.rows(split)
        about = _count_conversations(rows)
        if split == "train" and not spec.causal:
            rows = answers_as_rows(rows)
        if system_turns is not None and not about["conversations"]:
            notes = (*notes, asked_note(system_turns, "as the training rows are conversations"))
            rows = [row.after(system_turns) for row in rows]
        work.say(f"tokenizing {len(rows):,} {what}")
        stats = tokenize_to(entry, rows, tokenizer, spec, lambda done, total: work.progress(what, done, total))
        kept = {"stats": stats, "notes": notes, "skipped": skipped}
        if split == "train":
            return kept | _count_targets(rows) | about
        texts = [(row.source, row.references, row.line) for row in rows]
        (entry / EXAMPLES_NAME).write_text(json.dumps(texts), encoding="utf-8")
        return kept

    key = work.key(split, "tokens", content, asdict(spec), system_turns)
    entry, kept = work.find(key, build, "tokens")
    kept["notes"] = [*kept["notes"], *work.listed(split, kept["skipped"])]
    return open_tokens(entry, kept["stats"]), kept, entry


def streamed_tokens(
    work: SetRows, tokenizer: PreTrainedTokenizerBase, content: str, spec: TokenizeSpec
) -> tuple[TokenizedSet, dict[str, Any]]:
    """Return the training rows as a set that reads and tokenizes them on demand, and the JSON values of its index.

    Raises:
        DataError: The data cannot be used.
    """
    entry, kept = work.index()
    if kept["conversations"] and not spec.causal:
        entry, kept = work.index(by_answer=True)
    rows = StreamedRows(entry, kept, work.source("train"), tokenizer, spec)
    kept["notes"] = [*kept["notes"], *work.listed("train", kept["skipped"])]
    if work.config.training.per_device_train_batch_tokens is None:
        key = work.key("train", "sample", content, asdict(spec))
        _, sample = work.find(key, lambda entry: sample_lengths(rows, spec), "sample of lengths")
        return open_stream(entry, rows, sample), kept

    def build(lengths: Path) -> dict[str, Any]:
        work.say(f"measuring {len(rows.starts):,} training rows in tokens, for the budget of a batch")
        return lengths_to(lengths, rows, spec, lambda done, total: work.progress("training rows", done, total))

    key = work.key("train", "lengths", content, asdict(spec))
    exact, about = work.find(key, build, "lengths")
    return open_stream(entry, rows, about, exact), kept


def _count_targets(rows: Sequence[Example]) -> dict[str, Any]:
    """Return the label set, if there is one, and the most frequent target, the first of equals."""
    counts = Counter(row.target for row in rows)
    labels = dict(counts) if len(counts) <= MOST_LABELS else None
    return {"labels": labels, "majority": counts.most_common(1)[0][0]}


def _count_conversations(rows: Sequence[Example]) -> dict[str, Any]:
    """Return whether the rows are conversations, and the system's turns that they begin with if these are the same."""
    counts = SystemTurnCounts()
    for row in rows:
        counts.add(row)
    return {"conversations": rows[0].conversation is not None, "system_turns": counts.common}


def read_examples(path: Path) -> list[Example]:
    """Return the held-out rows as text that :func:`set_tokens` kept.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Delete its directory; it will be made again.") from error
    return [Example(source, tuple(references), line) for source, references, line in texts]
