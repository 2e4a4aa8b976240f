"""Preparation of a run's tokenizer and token ids: before there is a process group, once for all ranks, in a cache."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.data import (
    SAMPLED_ROWS,
    CollateSpec,
    Example,
    TokenizedSet,
    TokenizeSpec,
    Turn,
    add_plain_template,
    chained,
    choose_separator,
    describe_separator,
    show_row,
    uses_chat_template,
    writes_date,
)
from fullshard.program.models import load_tokenizer, resolve_model, train_tokenizer
from fullshard.program.models.hub import reads_one_sequence, task_prefixes
from fullshard.program.train.setup.set_rows import (
    EXAMPLES_NAME,
    MOST_LABELS,
    Progress,
    SetRows,
    read_examples,
    set_tokens,
    sets_of,
    streamed_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedSet:
    """One set of a mixture."""

    name: str  # its name in the run file; empty: the run's only set
    train_set: TokenizedSet  # token ids of its training rows
    held_out: list[Example]  # its held-out rows as text; empty if there are none
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
    held_out: list[Example]  # the held-out rows as text; empty if the run never evaluates
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
        if evaluation.max_new_tokens is None and self.longest_target is not None:
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

    Args:
        config: The run's settings.
        say: Receives a line before everything that takes long.
        progress: Receives the progress of tokenizing.
        rows_file: A file whose rows replace the run's held-out rows; neither of them is trained on.
        rows_encoding: The encoding of that file; None: ``data.encoding``.

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
    prompt_notes += [] if separator is None else [describe_separator(separator, tokenizer)]
    if writes_date(tokenizer, specs[0]):
        today = date.today()
        content = f"{content} {today}"
        prompt_notes += [f"the tokenizer's chat template writes the date: {today} in this run's prompts"]
    found = [_prepare_set(work, tokenizer, content, spec) for work, spec in zip(works, specs, strict=True)]
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


def _prepare_set(
    work: SetRows, tokenizer: PreTrainedTokenizerBase, content: str, spec: TokenizeSpec
) -> tuple[PreparedSet, list[str], list[str]]:
    """Return one set, and notes for the user about how its training rows were read and what they are."""
    config, of_set = work.config, f" ({work.name})" if work.name else ""
    if config.data.streaming:
        train_set, kept = streamed_tokens(work, tokenizer, content, spec)
    else:
        train_set, kept, _ = set_tokens(work, "train", tokenizer, content, spec)
    reading: list[str] = []
    notes: list[str] = []
    # With other rows to measure on, the training rows are only needed for their labels.
    if work.rows_file is None:
        reading = kept["notes"]
        notes += [
            *_length_notes(f"training{of_set}", train_set),
            *_weight_notes(work, train_set),
            show_row(train_set, 0, tokenizer, causal=spec.causal),
        ]
    held_out: list[Example] = []
    held_out_set = None
    if config.training.eval_strategy != "no" and (work.rows_file is not None or config.data.holds_out):
        turns = (kept["system_turns"] or []) if kept["conversations"] else None
        held_out_set, held_kept, entry = set_tokens(work, "validation", tokenizer, content, spec, turns)
        held_out = read_examples(entry / EXAMPLES_NAME)
        notes += [note for note in held_kept["notes"] if note not in reading]
        notes += _length_notes(f"held-out{of_set}", held_out_set)
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
        chat_template=data.chat_template,
    )
    chats = uses_chat_template(tokenizer, spec)
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


def make_tokenizer(works: Sequence[SetRows], directory: Path | None) -> PreTrainedTokenizerBase:
    """Return the model directory's tokenizer, or one trained on the training rows and kept in the cache.

    Raises:
        ModelError: It cannot be loaded or trained.
    """
    if directory is not None:
        return _without_padding(load_tokenizer(directory))
    settings = works[0].config.model.tokenizer
    assert settings is not None, "the schema requires model.tokenizer with model.config"

    def build(entry: Path) -> dict[str, Any]:
        works[0].say(f"training a tokenizer on {sum(work.num_training_rows() for work in works):,} rows")
        train_tokenizer(chain(_sources(works), _targets(works)), settings.vocab_size).save_pretrained(entry)
        return {}

    around = [(work.config.data.source_prefix, work.config.data.separator or "") for work in works]
    others = [work.key("train", "tokenizer") for work in works[1:]]
    key = works[0].key("train", "tokenizer", around, others, settings.vocab_size)
    entry, _ = works[0].find(key, build, "tokenizer")
    return _without_padding(load_tokenizer(entry))


def _sources(works: Sequence[SetRows]) -> Iterator[str]:
    """Yield the source of each training row as the model reads it, without keeping streamed rows."""
    for work in works:
        data = work.config.data
        for row in work.training_rows():
            # The answer's beginning follows a history; its letters may occur in no other text.
            end = (data.separator or "") if row.conversation is None else "\nassistant:"
            yield data.source_prefix + row.source + end


def _targets(works: Sequence[SetRows]) -> Iterator[str]:
    """Yield the target of each training row; streamed rows are read a second time."""
    return (row.target for work in works for row in work.training_rows())


def _without_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Reset the truncation and padding left by the tokenizer's last call, which would be saved with the model."""
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


def _content_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all files of a tokenizer."""
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
    """Return a line with the weights of a set's training rows, if they have any."""
    column, of_set = work.config.data.weight_column, f" of {work.name}" if work.name else ""
    if column is None:
        return []
    weights = np.ones(1) if rows.weights is None else rows.weights
    low, mean, high = (f"{float(one):g}" for one in (weights.min(), weights.mean(), weights.max()))
    return [f"weights{of_set} from column {column!r}: {low} to {high}, mean {mean} (data.weight_column)"]


def _length_notes(name: str, tokenized: TokenizedSet) -> list[str]:
    """Return a line with a set's lengths, and one for each side with truncated rows."""
    sides = (("source", tokenized.source_stats), ("target", tokenized.target_stats))
    rows = f"{name}: {len(tokenized):,} rows"
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
