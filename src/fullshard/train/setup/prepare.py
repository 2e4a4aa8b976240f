"""Tokenizer and token ids of a run: made before there is a process group, once for all ranks, and kept in a cache."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config import RunConfig
from fullshard.data import (
    CollateSpec,
    Example,
    SourceSpec,
    Split,
    TokenizedSet,
    TokenizeSpec,
    UnusableRowsError,
    add_plain_template,
    answers_as_rows,
    cached,
    choose_separator,
    default_directory,
    describe_separator,
    fingerprint,
    open_tokens,
    read_split,
    show_row,
    tokenize_to,
    uses_chat_template,
    with_rows_of,
    writes_date,
)
from fullshard.errors import ConfigError, DataError
from fullshard.models import load_tokenizer, resolve_model, train_tokenizer
from fullshard.models.kind import reads_one_sequence, task_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_LABELS = 1000
"""Maximum number of distinct targets of a label set."""

_FORMAT = 4
"""Version of the cache entries; to be increased when the same inputs give other entries."""

_EXAMPLES_NAME = "examples.json"

Progress = Callable[[str, int, int], None]
"""Receives what is being tokenized, the rows done, and the rows in total."""


@dataclass(frozen=True)
class Prepared:
    """Tokenizer and data of a run."""

    tokenizer: PreTrainedTokenizerBase  # the model directory's tokenizer, or one trained on the training rows
    model_directory: Path | None  # local directory of ``model.path``; None with ``model.config``
    causal: bool  # whether source and target are one sequence (decoder-only) rather than two (encoder-decoder)
    separator: str | None  # text between source and target; None: an encoder-decoder, or a chat template
    train_set: TokenizedSet  # token ids of the training rows
    held_out: list[Example]  # the held-out rows as text; empty if the run never evaluates
    held_out_set: TokenizedSet | None  # their token ids, or None
    # the distinct training targets and the number of rows of each, if there are at most 1,000; else None
    labels: Mapping[str, int] | None
    majority: str  # the most frequent training target
    notes: tuple[str, ...]  # notes for the user: recognised columns, skipped rows, lengths, truncated rows
    conversations: bool = False  # whether the training rows are conversations


def prepare(
    config: RunConfig,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda what, done, total: None,
    rows_file: Path | None = None,
) -> Prepared:
    """Read and tokenize the data and keep the token ids in the cache, or find them there; any rank, alone.

    Any number of ranks, runs and threads may call it at once: one of them tokenizes, the others wait. The cache is
    memory-mapped, and its rows are not read as text again.

    Args:
        config: The run's settings.
        say: Receives a line for everything that takes long.
        progress: Receives the progress of tokenizing.
        rows_file: A file whose rows replace the run's held-out rows; training uses neither of them.

    Raises:
        DataError: The data cannot be used, or the cache directory cannot be written.
        ModelError: The tokenizer or the model's configuration cannot be read.
        ConfigError: The template is invalid, or the separator would not be used.
    """
    work = _Preparation(config, say, progress, rows_file)
    path = config.model.path
    directory = None if path is None else resolve_model(path)
    tokenizer = make_tokenizer(work, directory)
    source = directory if config.model.config is None else config.model.config
    causal = reads_one_sequence(source, config.model.model_class)  # type: ignore[arg-type]
    chats = causal and work.holds_conversations()
    prompt_notes = chat_notes(config, tokenizer) if chats else []
    content = _content_of(tokenizer)
    spec = tokenize_spec(config, tokenizer, causal=causal)
    separator = separator_of(tokenizer, spec)
    prompt_notes += [] if separator is None else [describe_separator(separator, tokenizer)]
    if writes_date(tokenizer, spec):
        today = date.today()
        content = f"{content} {today}"
        prompt_notes += [f"the tokenizer's chat template writes the date: {today} in this run's prompts"]
    train_set, kept, _ = _tokens(work, "train", tokenizer, content, spec)
    # With other rows to measure on, the training rows give no more than their labels.
    trains = rows_file is None
    notes = [*kept["notes"], *_vocabulary_notes(config, tokenizer)] if trains else []
    notes += [*_prefix_notes(config, directory), *prompt_notes]
    if trains:
        notes += [*_length_notes("training", train_set), show_row(train_set, 0, tokenizer, causal=causal)]
    held_out: list[Example] = []
    held_out_set = None
    if config.training.eval_strategy != "no" and (rows_file is not None or config.data.holds_out):
        held_out_set, held_kept, entry = _tokens(work, "validation", tokenizer, content, spec)
        held_out = _read_examples(entry / _EXAMPLES_NAME)
        notes += [note for note in held_kept["notes"] if note not in notes]
        notes += _length_notes("held-out", held_out_set)
    return Prepared(
        tokenizer=_without_padding(tokenizer),
        model_directory=directory,
        causal=spec.causal,
        separator=separator,
        train_set=train_set,
        held_out=held_out,
        held_out_set=held_out_set,
        labels=kept["labels"],
        majority=kept["majority"],
        notes=tuple(notes),
        conversations=kept["conversations"],
    )


def tokenize_spec(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, causal: bool) -> TokenizeSpec:
    """Return how a run's rows are tokenized; any process, alone.

    Raises:
        ConfigError: The run has a separator that would not be used.
        DataError: See :func:`~fullshard.data.uses_chat_template`.
    """
    data = config.data
    spec = TokenizeSpec(
        max_source_length=data.max_source_length,
        max_target_length=data.max_target_length,
        source_prefix=data.source_prefix,
        causal=causal,
        chat_template=data.chat_template,
    )
    chats = uses_chat_template(tokenizer, spec)
    if causal and not chats:
        return replace(spec, separator=choose_separator(data.separator, data.template, tokenizer))
    if data.separator:
        kind = "this model has a chat template" if causal else "this one is an encoder-decoder"
        raise ConfigError(
            f"data.separator: {data.separator!r} is put between source and target of a causal model without a chat "
            f"template; {kind}. Remove it{', or set data.chat_template: false' if causal else ''}."
        )
    return spec


def chat_notes(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Give a causal model's tokenizer without a chat template the plain one, for conversations; any process, alone.

    Returns:
        A note for the user, or none if it has a template.

    Raises:
        ConfigError: The run does without a template.
    """
    if config.data.chat_template is False:
        raise ConfigError(
            "data.chat_template: false does without a template, and the rows are conversations, which a causal model "
            "reads in one. Leave it out: a tokenizer without a template gets a plain one, roles as lines. Or save "
            "another template with the tokenizer (chat_template.jinja)."
        )
    return [] if tokenizer.chat_template is not None else [add_plain_template(tokenizer)]


def separator_of(tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> str | None:
    """Return the text between source and target; None where there is none to choose."""
    return spec.separator if spec.causal and not uses_chat_template(tokenizer, spec) else None


def collate_spec(tokenizer: PreTrainedTokenizerBase, *, causal: bool) -> CollateSpec:
    """Return how batches are padded for a tokenizer of ``load_tokenizer``; any process, alone."""
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int), "load_tokenizer gives every tokenizer a padding token"
    return CollateSpec(pad, causal=causal)


def source_spec(config: RunConfig) -> SourceSpec:
    """Return where a run's rows come from; any process, alone."""
    return SourceSpec(**{each.name: getattr(config.data, each.name) for each in fields(SourceSpec)})


def prepare_tokenizer(config: RunConfig, say: Callable[[str], None] = lambda line: None) -> PreTrainedTokenizerBase:
    """Return the model directory's tokenizer, or train one on the training rows; any process, alone.

    Raises:
        DataError, ModelError: See :func:`prepare`.
    """
    directory = None if config.model.path is None else resolve_model(config.model.path)
    return make_tokenizer(_Preparation(config, say), directory)


@dataclass
class _Preparation:
    """Preparation of one run: its settings, and the data that was read and hashed so far."""

    config: RunConfig
    say: Callable[[str], None]
    progress: Progress = lambda what, done, total: None
    rows_file: Path | None = None
    read: dict[Split, tuple[list[Example], tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    hashed: dict[Split, str] = field(default_factory=dict)

    def source(self, split: Split) -> SourceSpec:
        """Return where a split's rows come from."""
        own = source_spec(self.config)
        if split == "train" or self.rows_file is None:
            return own
        return with_rows_of(self.rows_file, own)

    @property
    def directory(self) -> Path:
        """Directory of the cache."""
        return self.config.data.cache_dir or default_directory()

    def rows(self, split: Split) -> tuple[list[Example], tuple[str, ...], tuple[str, ...]]:
        """Return the rows to use of a split, notes, and lines on skipped rows beyond the notes; they are read once."""
        if split not in self.read:
            try:
                table = read_split(self.source(split), split)
            except UnusableRowsError as error:
                raise DataError("\n".join([str(error), *self.listed(split, error.beyond_shown)])) from error
            used = table.examples[: self.limit(split)]
            notes = table.notes
            if len(used) < len(table.examples):
                name, option = ("training", "train") if split == "train" else ("held-out", "eval")
                cut = f"{name}: the first {len(used):,} of {len(table.examples):,} rows (data.max_{option}_samples)"
                notes = (*notes, cut)
            self.read[split] = (used, notes, table.skipped)
        return self.read[split]

    def holds_conversations(self) -> bool:
        """Return whether the training rows are conversations; the cache knows it of rows that were read before."""

        def build(entry: Path) -> dict[str, Any]:
            del entry
            rows, _, _ = self.rows("train")
            return {"conversations": rows[0].conversation is not None}

        _, kept = self.find(self.key("train", "kind"), build, "rows")
        return kept["conversations"]

    def listed(self, split: Split, lines: Sequence[str]) -> tuple[str, ...]:
        """Write a line for each unusable row into the output directory, and return a note that says where; any rank."""
        if not lines:
            return ()
        # Rows of another file are not the run's.
        other = self.rows_file if split == "validation" else None
        name = f"unusable_rows_{split}.txt" if other is None else f"unusable_rows_of_{other.stem}.txt"
        path = Path(self.config.output_dir, name)
        # Each rank writes the same, under a name of its own first.
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

    def limit(self, split: Split) -> int | None:
        """Return the maximum number of rows to use of a split, or None."""
        return self.config.data.max_train_samples if split == "train" else self.config.data.max_eval_samples

    def key(self, split: Split, kind: str, *more: Any) -> str:
        """Return the name of a cache entry: a hash of everything that its content depends on."""
        versions = [version("tokenizers"), version("transformers")]
        # Notes name files, so the names are part of the key.
        parts = [_FORMAT, kind, split, self.content(split), asdict(self.source(split)), self.limit(split)]
        return blake2b(json.dumps([*parts, *versions, *more], default=str).encode(), digest_size=16).hexdigest()

    def find(self, key: str, build: Callable[[Path], dict[str, Any]], what: str) -> tuple[Path, dict[str, Any]]:
        """Find an entry of the cache, or build it."""
        waiting = lambda: self.say(f"another process is making the same {what}; waiting for it")  # noqa: E731
        return cached(self.directory, key, build, waiting)


def make_tokenizer(work: _Preparation, directory: Path | None) -> PreTrainedTokenizerBase:
    """Return the model directory's tokenizer, or one trained on the training rows and kept in the cache.

    Raises:
        ModelError: It cannot be loaded or trained.
    """
    if directory is not None:
        return _without_padding(load_tokenizer(directory))
    settings = work.config.model.tokenizer
    assert settings is not None, "the schema requires model.tokenizer with model.config"
    prefix, separator = work.config.data.source_prefix, work.config.data.separator or ""

    def build(entry: Path) -> dict[str, Any]:
        rows, _, _ = work.rows("train")
        work.say(f"training a tokenizer on {len(rows):,} rows")
        # A history is followed by the beginning of the answer, whose letters may be in no other text.
        ends = [separator if row.conversation is None else "\nassistant:" for row in rows]
        texts = [prefix + row.source + end for row, end in zip(rows, ends, strict=True)]
        texts += [row.target for row in rows]
        train_tokenizer(texts, settings.vocab_size).save_pretrained(entry)
        return {}

    entry, _ = work.find(work.key("train", "tokenizer", prefix, separator, settings.vocab_size), build, "tokenizer")
    return _without_padding(load_tokenizer(entry))


def _without_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Reset the truncation and padding of the tokenizer's last call, which would be saved with the model."""
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def _tokens(
    work: _Preparation, split: Split, tokenizer: PreTrainedTokenizerBase, content: str, spec: TokenizeSpec
) -> tuple[TokenizedSet, dict[str, Any], Path]:
    """Return a split's token ids, the JSON values of its cache entry, and the entry's directory."""
    what = "training rows" if split == "train" else "held-out rows"

    def build(entry: Path) -> dict[str, Any]:
        rows, notes, skipped = work.rows(split)
        if split == "train" and not spec.causal:
            rows = answers_as_rows(rows)
        work.say(f"tokenizing {len(rows):,} {what}")
        stats = tokenize_to(entry, rows, tokenizer, spec, lambda done, total: work.progress(what, done, total))
        kept = {"stats": stats, "notes": notes, "skipped": skipped}
        if split == "train":
            return kept | _count_targets(rows) | {"conversations": rows[0].conversation is not None}
        texts = [(row.source, row.references, row.line) for row in rows]
        (entry / _EXAMPLES_NAME).write_text(json.dumps(texts), encoding="utf-8")
        return kept

    key = work.key(split, "tokens", content, asdict(spec))
    entry, kept = work.find(key, build, "tokens")
    kept["notes"] = [*kept["notes"], *work.listed(split, kept["skipped"])]
    return open_tokens(entry, kept["stats"]), kept, entry


def _count_targets(rows: Sequence[Example]) -> dict[str, Any]:
    """Return the label set, if it is one, and the most frequent target; of equally frequent ones, the first."""
    counts = Counter(row.target for row in rows)
    labels = dict(counts) if len(counts) <= MOST_LABELS else None
    return {"labels": labels, "majority": counts.most_common(1)[0][0]}


def _read_examples(path: Path) -> list[Example]:
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Delete its directory, and it is made again.") from error
    return [Example(source, tuple(references), line) for source, references, line in texts]


def _content_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all files of a tokenizer."""
    digest = blake2b(digest_size=16)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _prefix_notes(config: RunConfig, directory: Path | None) -> list[str]:
    """Return a line if a checkpoint names prefixes for its tasks and the run has none."""
    data = config.data
    if directory is None or data.source_prefix or data.template is not None:
        return []
    prefixes = task_prefixes(directory)
    if not prefixes:
        return []
    listed = ", ".join(f"{task}: {prefix!r}" for task, prefix in prefixes.items())
    return [f"data.source_prefix is empty, and {config.model.path} was trained with a prefix for each task ({listed})"]


def _vocabulary_notes(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a line if the training rows have fewer pieces than the requested vocabulary size."""
    settings = config.model.tokenizer
    if settings is None or len(tokenizer) >= settings.vocab_size:
        return []
    return [
        f"the vocabulary has {len(tokenizer):,} pieces, not the {settings.vocab_size:,} of model.tokenizer.vocab_size: "
        "the training rows have no more"
    ]


def _length_notes(name: str, tokenized: TokenizedSet) -> list[str]:
    """Return a line with a set's lengths, and one for each side with truncated rows."""
    sides = (("source", tokenized.source_stats), ("target", tokenized.target_stats))
    means = ", ".join(f"{side} {stats.mean:.1f} tokens (longest {stats.longest})" for side, stats in sides)
    cut = [
        f"{stats.truncated:,} {name} {side}s were cut to {stats.limit} tokens (data.max_{side}_length)"
        for side, stats in sides
        if stats.truncated
    ]
    return [f"{name}: {len(tokenized):,} rows, mean {means}", *cut]
