"""Preparation of a run's tokenizer and token ids: before there is a process group, once for all ranks, in a cache."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.errors import ConfigError, DataError
from fullshard.program.config import RunConfig
from fullshard.program.config.data import source_spec as source_spec
from fullshard.program.data import (
    SAMPLED_ROWS,
    CollateSpec,
    Corruption,
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
    Unwritten,
    add_plain_template,
    answers_as_rows,
    asked_note,
    cached,
    chained,
    choose_separator,
    corrupted,
    describe_separator,
    find_unwritten,
    fingerprint,
    in_pairs,
    index_to,
    lengths_to,
    num_sentinels,
    open_stream,
    open_tokens,
    read_split,
    references_of,
    row_tokens,
    sample_lengths,
    sample_notes,
    sentinel_ids,
    show_row,
    tokenize_to,
    training_texts,
    uses_chat_template,
    with_rows_of,
    with_unrelated,
    writes_date,
    written_forms,
)
from fullshard.program.models import (
    add_tokens,
    load_tokenizer,
    resolve_adapter,
    resolve_model,
    tokenizer_of,
    train_tokenizer,
)
from fullshard.program.models.hub import reads_one_sequence, task_prefixes
from fullshard.user_cache import default_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_LABELS = 1000
"""Maximum number of distinct targets of a label set."""

_FORMAT = 8
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
        own = source_spec(self.config.data, self.config.training.objective)
        if split == "train" or self.rows_file is None:
            return own
        return with_rows_of(self.rows_file, own, self.rows_encoding or own.encoding)

    @property
    def together(self) -> int:
        """Rows of tokens of each row of the data."""
        return 1 if self.config.training.objective == "sft" else 2

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
    objective = work.config.training.objective
    what = "training rows" if split == "train" else "held-out rows"

    def build(entry: Path) -> dict[str, Any]:
        rows, notes, skipped = work.rows(split)
        about = _count_conversations(rows)
        desirable = ""
        if objective != "sft":
            desirable = _labels_of(rows) if objective == "kto" else ""
            rows = with_unrelated(rows) if objective == "kto" else in_pairs(rows)
            _require_one_answer(rows, causal=spec.causal)
        elif split == "train" and not spec.causal:
            rows = answers_as_rows(rows)
        if system_turns is not None and not about["conversations"]:
            notes = (*notes, asked_note(system_turns, "as the training rows are conversations"))
            rows = [row.after(system_turns) for row in rows]
        texts_are_rows = not spec.text_tokens
        work.say(f"tokenizing {len(rows):,} {what if texts_are_rows else f'texts for {what}'}")
        stats = tokenize_to(entry, rows, tokenizer, spec, lambda done, total: work.progress(what, done, total))
        kept = {"stats": stats, "notes": notes, "skipped": skipped, "desirable": desirable, "unwritten": None}
        forms: dict[str, str] = {}
        if texts_are_rows:
            forms = written_forms((text for row in rows for text in row.references), tokenizer, spec)
            kept["unwritten"] = find_unwritten([row.target for row in rows], forms)
            forms = references_of(forms)
        if split == "train":
            counted = _count_targets(rows, forms) if texts_are_rows else {"labels": None, "majority": ""}
            return kept | counted | about
        # Rows that are cut out of joined texts are none of them. Metrics compare with what the tokenizer can write.
        used = rows[:: work.together] if texts_are_rows else []
        texts = [(row.source, [forms[text] for text in row.references], row.line) for row in used]
        (entry / EXAMPLES_NAME).write_text(json.dumps(texts), encoding="utf-8")
        return kept

    key = work.key(split, "tokens", content, asdict(spec), system_turns)
    entry, kept = work.find(key, build, "tokens")
    kept["notes"] = [*kept["notes"], *work.listed(split, kept["skipped"])]
    labels = np.array([one == "1" for one in kept["desirable"]]) if kept.get("desirable") else None
    return replace(open_tokens(entry, kept["stats"]), together=work.together, desirable=labels), kept, entry


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
    whole = f"{work.content('train')} {content} {asdict(spec)}"
    if work.config.training.per_device_train_batch_tokens is None:
        key = work.key("train", "sample", content, asdict(spec))
        _, sample = work.find(key, lambda entry: sample_lengths(rows, spec), "sample of lengths")
        return open_stream(entry, rows, sample, content=whole), kept | _written_labels(kept, tokenizer, spec)

    def build(lengths: Path) -> dict[str, Any]:
        work.say(f"measuring {len(rows.starts):,} training rows in tokens, for the budget of a batch")
        return lengths_to(lengths, rows, spec, lambda done, total: work.progress("training rows", done, total))

    key = work.key("train", "lengths", content, asdict(spec))
    exact, about = work.find(key, build, "lengths")
    return open_stream(entry, rows, about, exact, content=whole), kept | _written_labels(kept, tokenizer, spec)


def _written_labels(kept: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> dict[str, Any]:
    """Return label set and most frequent target of streamed rows as the tokenizer writes them, and which it cannot.

    With too many different targets for a label set, the most frequent one alone is looked at.
    """
    labels: Mapping[str, int] = kept["labels"] or {}
    forms = written_forms([kept["majority"], *labels], tokenizer, spec)
    references, counts = references_of(forms), Counter[str]()
    for label, rows in labels.items():
        counts[references[label]] += rows
    every = [label for label, rows in labels.items() for _ in range(rows)] or [kept["majority"]]
    return {
        "labels": dict(counts) if kept["labels"] is not None else None,
        "majority": references[kept["majority"]],
        "unwritten": find_unwritten(every, forms),
    }


def _labels_of(rows: Sequence[Example]) -> str:
    """Return a digit for each row, 1 if it is desirable.

    Raises:
        DataError: All are alike, so that no desirable completion can be told from an undesirable one.
    """
    labels = "".join("1" if row.desirable else "0" for row in rows)
    if len(set(labels)) == 1:
        kind = "desirable" if rows[0].desirable else "undesirable"
        raise DataError(f"All {len(rows):,} rows are {kind} (column label), and kto needs both kinds, also held out.")
    return labels


def _require_one_answer(rows: Sequence[Example], *, causal: bool) -> None:
    """Raise DataError if a completion has several answers, and the model is an encoder-decoder, which learns one."""
    talks = ((row.line, row.conversation) for row in rows if row.conversation is not None and not causal)
    long = next(((line, talk) for line, talk in talks if len(talk.answers) > 1), None)
    if long is not None:
        raise DataError(
            f"Line {long[0]} of the data has a completion of {len(long[1].answers)} answers, and an encoder-decoder "
            "learns one. data.train_on: last takes the last, after the turns before it."
        )


def _count_targets(rows: Sequence[Example], forms: Mapping[str, str]) -> dict[str, Any]:
    """Return the label set, if there is one, and the most frequent target, the first of equals, as they are written."""
    counts = Counter(forms[row.target] for row in rows)
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


@dataclass(frozen=True)
class PreparedSet:
    """One set of a mixture."""

    name: str  # its name in the run file; empty: the run's only set
    train_set: TokenizedSet  # token ids of its training rows
    held_out: list[Example]  # its held-out rows as text; empty if there are none, and for plain text
    held_out_set: TokenizedSet | None  # their token ids, or None
    labels: Mapping[str, int] | None  # as in :class:`Prepared`
    majority: str  # the most frequent training target
    content: str  # hash of what its training rows were read from
    conversations: bool = False  # whether its training rows are conversations
    # the system's turns at the beginning of (nearly) all of them; None: they differ, or there are no conversations
    system_turns: Sequence[Turn] | None = None


@dataclass(frozen=True)
class Prepared:
    """Tokenizer and data of a run."""

    tokenizer: PreTrainedTokenizerBase  # the model directory's tokenizer, or one trained on the training rows
    model_directory: Path | None  # local directory of ``model.path``; None with ``model.config``
    causal: bool  # whether source and target are one sequence (decoder-only) rather than two (encoder-decoder)
    separator: str | None  # text between source and target; None: an encoder-decoder, or a chat template
    train_set: TokenizedSet  # token ids of the training rows
    held_out: list[Example]  # the held-out rows as text; empty if the run never evaluates, and for plain text
    held_out_set: TokenizedSet | None  # their token ids, or None
    # the distinct training targets and the number of rows of each, if there are at most 1,000; else None
    labels: Mapping[str, int] | None
    sets: tuple[PreparedSet, ...]  # the sets of a mixture; of other data one, named ""
    notes: tuple[str, ...]  # notes for the user: recognised columns, skipped rows, lengths, truncated rows
    # ``system_turns`` of each set whose training rows are conversations
    system_turns: Mapping[str, Sequence[Turn] | None] = field(default_factory=dict)

    @property
    def longest_target(self) -> int | None:
        """Tokens of the longest target, training and held-out; None if not all rows have been tokenized."""
        sets = [one for one in (self.train_set, self.held_out_set) if one is not None]
        return None if any(one.estimated for one in sets) else max(int(one.target_ids.lengths.max()) for one in sets)

    def settled(self, config: RunConfig) -> RunConfig:
        """Return the settings with what the data decides, so that it is recorded and holds for new rows; any rank.

        The separator, and the tokens that an evaluation writes: as many as the longest target has.
        """
        evaluation, data = config.evaluation, config.data
        if evaluation.max_new_tokens is None and self.longest_target is not None and data.text_column is None:
            tokens = max(evaluation.min_new_tokens, self.longest_target)
            evaluation = evaluation.model_copy(update={"max_new_tokens": tokens})
        data = data.model_copy(update={"separator": self.separator})
        return config.model_copy(update={"data": data, "evaluation": evaluation})


def prepare(
    config: RunConfig,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda what, done, total: None,
    rows_file: Path | None = None,
    rows_encoding: str | None = None,
) -> Prepared:
    """Tokenize the data into the cache, or find it there; any rank.

    Any number of ranks, runs and threads may call it at once: one of them tokenizes, the others wait. The cache is
    memory-mapped, and its rows are not read as text again.

    ``say`` receives a line before everything that takes long, ``progress`` that of tokenizing. The rows of
    ``rows_file`` (None for ``rows_encoding``: in ``data.encoding``) replace the run's held-out rows; neither of them is
    trained on.

    Raises:
        DataError: The data cannot be used, or the cache directory cannot be written.
        ModelError: The tokenizer or the model's configuration cannot be read.
        ConfigError: The template is invalid, or the separator would not be used.
    """
    works = sets_of(config, say, progress, rows_file, rows_encoding)
    path = config.model.path
    directory = None if path is None else resolve_model(path)
    tokenizer = make_tokenizer(works, directory)
    source = directory if config.model.config is None else config.model.config
    causal = reads_one_sequence(source, config.model.model_class)  # type: ignore[arg-type]
    chats = causal and any(work.holds_conversations() for work in works)
    prompt_notes = chat_notes(config, tokenizer) if chats else []
    content = _content_of(tokenizer)
    specs = [tokenize_spec(work.config, tokenizer, causal=causal) for work in works]
    separator = _one_separator(works, [separator_of(tokenizer, spec) for spec in specs])
    how = None
    if config.data.text_column is not None:
        specs, how = _of_text(config, tokenizer, specs)
    elif separator is not None:
        prompt_notes.append(describe_separator(separator, tokenizer))
    if writes_date(tokenizer, specs[0]):
        today = date.today()
        content = f"{content} {today}"
        prompt_notes += [f"the tokenizer's chat template writes the date: {today} in this run's prompts"]
    found = [_prepare_set(work, tokenizer, content, spec, how) for work, spec in zip(works, specs, strict=True)]
    sets = [one for one, _, _ in found]
    notes = [note for _, reading, _ in found for note in reading]
    notes += _vocabulary_notes(config, tokenizer) if rows_file is None else []
    notes += [note for work in works for note in _prefix_notes(work, directory)] + prompt_notes
    for _, _, lengths in found:
        notes += [note for note in lengths if note not in notes]
    held_out_sets = [one.held_out_set for one in sets if one.held_out_set is not None]
    return Prepared(
        tokenizer=_without_padding(tokenizer),
        model_directory=directory,
        causal=causal,
        separator=separator,
        train_set=chained([one.train_set for one in sets]),
        held_out=[row for one in sets for row in one.held_out],
        held_out_set=chained(held_out_sets) if held_out_sets else None,
        labels=_joined_labels([one.labels for one in sets]),
        sets=tuple(sets),
        notes=tuple(notes),
        system_turns={one.name: one.system_turns for one in sets if one.conversations},
    )


def _of_text(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, specs: Sequence[TokenizeSpec]
) -> tuple[list[TokenizeSpec], Corruption | None]:
    """Return how plain text is cut into rows, and how an encoder-decoder's are corrupted; None for a causal model.

    Raises:
        DataError: The tokenizer has too few sentinel tokens, or rows are too short.
    """
    limit, end = config.data.max_source_length, tokenizer.eos_token_id
    assert isinstance(end, int), "load_tokenizer requires an end token"
    if specs[0].causal:
        return [replace(spec, text_tokens=limit) for spec in specs], None
    how = Corruption(sentinel_ids(tokenizer, limit), end, config.seed)
    return [replace(spec, text_tokens=row_tokens(limit)) for spec in specs], how


def _prepare_set(
    work: SetRows, tokenizer: PreTrainedTokenizerBase, content: str, spec: TokenizeSpec, how: Corruption | None = None
) -> tuple[PreparedSet, list[str], list[str]]:
    """Return one set, and notes for the user about how its training rows were read and what they are.

    ``how`` is how the rows of an encoder-decoder's plain text are corrupted.
    """
    config, of_set = work.config, f" ({work.name})" if work.name else ""
    if config.data.streaming:
        train_set, kept = streamed_tokens(work, tokenizer, content, spec)
    else:
        train_set, kept, _ = set_tokens(work, "train", tokenizer, content, spec)
    train_set = train_set if how is None else corrupted(train_set, how)
    reading: list[str] = []
    notes: list[str] = []
    # With other rows to measure on, the training rows are only needed for their labels.
    if work.rows_file is None:
        reading = kept["notes"]
        notes += [
            *_length_notes(f"training{of_set}", train_set, spec),
            *_weight_notes(work, train_set),
            *_unwritten_notes(f"training{of_set}", kept),
            show_row(train_set, 0, tokenizer, causal=spec.causal),
        ]
    held_out: list[Example] = []
    held_out_set = None
    if config.training.eval_strategy != "no" and (work.rows_file is not None or config.data.holds_out):
        turns = (kept["system_turns"] or []) if kept["conversations"] else None
        held_out_set, held_kept, entry = set_tokens(work, "validation", tokenizer, content, spec, turns)
        held_out_set = held_out_set if how is None else corrupted(held_out_set, how)
        held_out = read_examples(entry / EXAMPLES_NAME)
        notes += [note for note in held_kept["notes"] if note not in reading]
        notes += _length_notes(f"held-out{of_set}", held_out_set, spec)
        notes += _unwritten_notes(f"held-out{of_set}", held_kept)
    labels, majority = kept["labels"], kept["majority"]
    of_rows = held_out, held_out_set, labels, majority
    about = kept["conversations"], kept["system_turns"]
    one = PreparedSet(work.name, train_set, *of_rows, work.content("train"), *about)
    return one, reading, notes


def _joined_labels(sets: Sequence[Mapping[str, int] | None]) -> Mapping[str, int] | None:
    """Return the label set of several sets; None if one of them, or all together, have too many targets."""
    joined: Counter[str] = Counter()
    for labels in sets:
        if labels is None:
            return None
        joined.update(labels)
    return dict(joined) if len(joined) <= MOST_LABELS else None


def _one_separator(works: Sequence[SetRows], found: Sequence[str | None]) -> str | None:
    """Return the separator of all sets. There must be one, because it is recorded once and used for new rows.

    Raises:
        ConfigError: The templates of only some sets end with text of their own, so that separators would differ.
    """
    if len(set(found)) > 1:
        chosen = ", ".join(f"{work.name}: {one!r}" for work, one in zip(works, found, strict=True))
        raise ConfigError(
            f"The sets of a mixture have one separator, but their templates ask for different ones ({chosen}). Set "
            "data.separator."
        )
    return found[0]


def tokenize_spec(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, causal: bool) -> TokenizeSpec:
    """Return how a run's rows are tokenized; any process.

    Raises:
        ConfigError: The run has a separator that would not be used.
        DataError: See :func:`~fullshard.program.data.uses_chat_template`.
    """
    data = config.data
    spec = TokenizeSpec(
        max_source_length=data.max_source_length,
        max_target_length=data.max_target_length,
        source_prefix=data.source_prefix,
        causal=causal,
        # Plain text has no turns.
        chat_template=data.chat_template if data.text_column is None else False,
    )
    chats = uses_chat_template(tokenizer, spec)
    if data.text_column is not None:
        return spec
    if causal and not chats:
        return replace(spec, separator=choose_separator(data.separator, data.template, tokenizer))
    if data.separator:
        kind = "this model has a chat template" if causal else "this one is an encoder-decoder"
        raise ConfigError(
            f"data.separator: {data.separator!r} applies to causal models without a chat "
            f"template; {kind}. Remove it{', or set data.chat_template: false' if causal else ''}."
        )
    return spec


def chat_notes(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Give a causal model's tokenizer the plain chat template for conversations if it has none; any process.

    Returns:
        A note for the user, or none if it has a template.

    Raises:
        ConfigError: ``data.chat_template`` is false.
    """
    if config.data.chat_template is False:
        raise ConfigError(
            "data.chat_template: false leaves out the template, but the rows are conversations, which a causal model "
            "reads by a template. Leave the setting out: a tokenizer without a template gets a plain one, with each "
            "turn on a line. Or save another template with the tokenizer (chat_template.jinja)."
        )
    return [] if tokenizer.chat_template is not None else [add_plain_template(tokenizer)]


def separator_of(tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> str | None:
    """Return the text between source and target; None if there is none to choose."""
    return spec.separator if spec.causal and not uses_chat_template(tokenizer, spec) else None


def collate_spec(tokenizer: PreTrainedTokenizerBase, *, causal: bool) -> CollateSpec:
    """Return how batches are padded for a tokenizer of ``load_tokenizer``; any process."""
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int), "load_tokenizer gives every tokenizer a padding token"
    return CollateSpec(pad, causal=causal)


def prepare_tokenizer(config: RunConfig, say: Callable[[str], None] = lambda line: None) -> PreTrainedTokenizerBase:
    """Return the model directory's tokenizer, or train one on the training rows; any process.

    Raises:
        DataError, ModelError: See :func:`prepare`.
    """
    directory = None if config.model.path is None else resolve_model(config.model.path)
    return make_tokenizer(sets_of(config, say), directory)


def model_tokenizer(config: RunConfig, directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``model.path``, or of a trained adapter that brings tokens of its own, with new tokens.

    ``directory`` is the former, resolved. Any process.

    Raises:
        ModelError: It cannot be loaded, or has a new token already.
    """
    adapter = config.model.adapter
    begun = None if adapter is None or adapter.path is None else resolve_adapter(adapter.path)
    return add_tokens(_without_padding(tokenizer_of(directory, begun)), config.model.new_tokens)


def make_tokenizer(works: Sequence[SetRows], directory: Path | None) -> PreTrainedTokenizerBase:
    """Return the model directory's tokenizer, or one trained on the training rows and kept in the cache.

    Raises:
        ModelError: It cannot be loaded or trained.
    """
    if directory is not None:
        return model_tokenizer(works[0].config, directory)
    settings = works[0].config.model.tokenizer
    assert settings is not None, "the schema requires model.tokenizer with model.config"

    config = works[0].config
    of_text, sentinels = config.data.text_column is not None, 0
    causal = reads_one_sequence(config.model.config or {}, config.model.model_class)
    if of_text and not causal:
        sentinels = num_sentinels(row_tokens(config.data.max_source_length))

    def build(entry: Path) -> dict[str, Any]:
        works[0].say(f"training a tokenizer on {sum(work.num_training_rows() for work in works):,} rows")
        # Streamed rows are read a second time for the targets; plain text has none.
        targets = (row.target for work in works if not of_text for row in work.training_rows())
        texts, ends = chain(_sources(works), targets), not (of_text and causal)
        train_tokenizer(texts, settings.vocab_size, sentinels, ends=ends).save_pretrained(entry)
        return {}

    around = [(work.config.data.source_prefix, work.config.data.separator or "") for work in works]
    others = [work.key("train", "tokenizer") for work in works[1:]]
    own = [sentinels] if of_text else []
    key = works[0].key("train", "tokenizer", around, others, settings.vocab_size, *own)
    entry, _ = works[0].find(key, build, "tokenizer")
    return add_tokens(_without_padding(load_tokenizer(entry)), config.model.new_tokens)


def _sources(works: Sequence[SetRows]) -> Iterator[str]:
    """Yield the source of each training row as the model reads it, without keeping streamed rows."""
    for work in works:
        data = work.config.data
        for row in work.training_rows():
            # The answer's beginning follows a history; its letters may occur in no other text.
            end = (data.separator or "") if row.conversation is None else "\nassistant:"
            yield data.source_prefix + row.source + end


def _without_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Reset the truncation and padding left by the tokenizer's last call, which would be saved with the model."""
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def _content_of(tokenizer: PreTrainedTokenizerBase) -> str:
    digest = blake2b(digest_size=16)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _prefix_notes(work: SetRows, directory: Path | None) -> list[str]:
    """Return a line if a checkpoint names prefixes for its tasks but the set has none."""
    data, of_set = work.config.data, f" of {work.name}" if work.name else ""
    if directory is None or data.source_prefix or data.template is not None:
        return []
    prefixes = task_prefixes(directory)
    if not prefixes:
        return []
    listed = ", ".join(f"{task}: {prefix!r}" for task, prefix in prefixes.items())
    path = work.config.model.path
    return [f"data.source_prefix{of_set} is empty, but {path} was trained with a prefix for each task ({listed})"]


def _vocabulary_notes(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a line if the training rows have fewer pieces than the requested vocabulary size."""
    settings = config.model.tokenizer
    if settings is None or len(tokenizer) >= settings.vocab_size:
        return []
    return [
        f"the vocabulary has {len(tokenizer):,} pieces, not the {settings.vocab_size:,} of model.tokenizer.vocab_size: "
        "the training rows have no more"
    ]


def _weight_notes(work: SetRows, rows: TokenizedSet) -> list[str]:
    column, of_set = work.config.data.weight_column, f" of {work.name}" if work.name else ""
    if column is None:
        return []
    weights = np.ones(1) if rows.weights is None else rows.weights
    low, mean, high = (f"{float(one):g}" for one in (weights.min(), weights.mean(), weights.max()))
    return [f"weights{of_set} from column {column!r}: {low} to {high}, mean {mean} (data.weight_column)"]


def _unwritten_notes(name: str, kept: Mapping[str, Any]) -> list[str]:
    """Return a message on targets that the tokenizer cannot write, or none."""
    return [] if kept["unwritten"] is None else [Unwritten(**kept["unwritten"]).note(name)]


def _length_notes(name: str, tokenized: TokenizedSet, spec: TokenizeSpec) -> list[str]:
    """Return a line with a set's lengths, and one for each side with truncated rows."""
    if spec.text_tokens:
        rows = f"{name}: {len(tokenized):,} rows of {spec.text_tokens} tokens, cut out of the joined texts"
        longest = tokenized.source_stats.longest, tokenized.target_stats.longest
        parts = f"; 15 % are left out: sources of {longest[0]} tokens, targets of {longest[1]}"
        return [rows if spec.causal else rows + parts]
    sides = (("source", tokenized.source_stats), ("target", tokenized.target_stats))
    rows = f"{name}: {len(tokenized):,} rows"
    if tokenized.together > 1:
        rows = f"{name}: {tokenized.examples:,} pairs, in {len(tokenized):,} rows"
    if tokenized.desirable is not None:
        good = int(tokenized.desirable.sum())
        rows = f"{name}: {tokenized.examples:,} rows, {good:,} desirable, each also with another row's completion"
    if tokenized.source is not None:
        rows += ", tokenized when a step needs them"
    if tokenized.estimated:
        rows += f"; in {min(SAMPLED_ROWS, len(tokenized)):,} of them"
        name = f"sampled {name}"
    means = ", ".join(f"{side} {stats.mean:.1f} tokens (longest {stats.longest})" for side, stats in sides)
    cut = [
        f"{stats.truncated:,} {name} {side}s were cut to {stats.limit} tokens (data.max_{side}_length)"
        for side, stats in sides
        if stats.truncated
    ]
    return [f"{rows}, mean {means}", *cut]
