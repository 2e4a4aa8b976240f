"""A first run file, with a reason for each setting, and what this machine can train."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import try_to_load_from_cache

from fullshard.errors import DataError
from fullshard.program.config.training import NEW_MODEL_LEARNING_RATE, auto_precision
from fullshard.program.data import Example, SourceSpec, read_split
from fullshard.program.data.examples import turn_text
from fullshard.program.data.reading.preferences import CHOSEN, LABEL, REJECTED
from fullshard.program.data.reading.split import FORMATS, open_rows
from fullshard.program.starter.inspection import FEW, Look, Preferences
from fullshard.program.train.setup.devices import Devices, precision_of
from fullshard.sizes import format_bytes

MODELS = (
    ("google/flan-t5-xl", 2_850_000_000),
    ("google/flan-t5-large", 783_000_000),
    ("google/flan-t5-base", 248_000_000),
    ("google/flan-t5-small", 77_000_000),
)
"""Encoder-decoder models on the Hub to suggest, with their numbers of parameters, largest first."""

_BYTES_A_PARAMETER = 16
_SHARE_FOR_STATES = 0.6
"""Share of memory for weights, gradients and AdamW's state; the rest is left to activations."""


@dataclass(frozen=True)
class Machine:
    """GPUs, memory and cores of a machine."""

    gpus: int
    memory_bytes: int  # of all GPUs together; of the host if there are none
    cores: int
    precision: tuple[str, str] = auto_precision(None)  # what training.precision: auto is here, and why

    @property
    def ranks(self) -> int:
        """Number of ranks that a run starts on this machine."""
        return self.gpus or 2

    @property
    def fitting(self) -> str:
        """Id of the largest suggested model that can be fully trained here; on CPUs the smallest, for speed."""
        room = self.memory_bytes * _SHARE_FOR_STATES
        fitting = [name for name, count in MODELS if count * _BYTES_A_PARAMETER <= room]
        return fitting[0] if fitting and self.gpus else MODELS[-1][0]

    @property
    def at_hand(self) -> str | None:
        """Id of the largest suggested model that fits and is in the Hugging Face cache; None if there is none."""
        names = [name for name, _ in MODELS]
        return next((name for name in names[names.index(self.fitting) :] if is_cached(name)), None)

    def __str__(self) -> str:
        memory = format_bytes(self.memory_bytes)
        return f"{self.gpus} GPUs with {memory}" if self.gpus else f"no GPU; {self.cores} CPU cores, {memory}"


def this_machine(gpus: int) -> Machine:
    """Return this machine, with the GPUs that are visible to this process."""
    cores = len(os.sched_getaffinity(0))
    if not gpus:
        return Machine(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cores)
    memory = sum(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    return Machine(gpus, memory, cores, precision_of(Devices.of_machine(gpus)))


def is_cached(model_id: str) -> bool:
    """Return True if the Hugging Face cache holds a model's configuration and weights, so that no network is needed."""
    return all(isinstance(try_to_load_from_cache(model_id, name), str) for name in ("config.json", "model.safetensors"))


NEW_MODEL = "new"
"""Answer that chooses a small model with random weights, which needs no download."""

_USUAL_NAMES = {"train", "training", "data", "dataset", "all", "rows", "table", "input"}
"""Names that tables of different data have."""

_FRACTIONS = (0.1, 0.2, 0.3, 0.5)
_STEPS_AN_EPOCH = 40
_NEW_MODEL_STEPS = 400
_MOST_HELD_OUT = 1_000
_CHARACTERS_A_TOKEN = 4

_NEW = """\
  # A small T5 with random weights. It learns labels and short texts; pretrained weights do better but need a download:
  #   path: {suggested}        instead of config and tokenizer
  config:
    model_type: t5
    d_model: 128
    d_kv: 32
    d_ff: 256
    num_layers: 2
    num_decoder_layers: 2
    num_heads: 4
    feed_forward_proj: gated-gelu
    dropout_rate: 0.0
  tokenizer:
    vocab_size: 2000"""


ANSWERING = "for a model that answers already"
"""What dpo, ipo, simpo and kto are."""


@dataclass(frozen=True)
class Choice:
    """The user's answers: columns and model."""

    sources: tuple[str, ...]  # source columns; several for a known combination, none for conversations
    target: str  # target column; empty for conversations and plain text
    model: str  # directory or id of a model, or ``NEW_MODEL``
    preferences: Preferences | None = None  # as of :class:`Look`

    @property
    def prefers(self) -> Literal["pairs", "labels"] | None:
        """What rows of preferences are; None: they are none."""
        return None if self.preferences is None else self.preferences.kind

    @property
    def is_transcript(self) -> bool:
        """True if the prompt is the beginning of the texts."""
        return not self.sources and bool(self.target)

    @property
    def text(self) -> str | None:
        """The column of plain text; None: the rows have targets."""
        return self.sources[0] if self.sources and not self.target else None


@dataclass(frozen=True)
class Rows:
    """The table's rows as a run would read them."""

    examples: list[Example]
    reasons: Mapping[str, Sequence[int]]  # why rows are unusable, with the line numbers of each reason
    fraction: float | None  # share to hold out; None if the rows are too few or too alike
    held_out: int
    unused: str | None = None  # a message about columns that are not used

    @property
    def unusable(self) -> int:
        """Number of unusable rows."""
        return sum(map(len, self.reasons.values()))


def run_file_text(look: Look, machine: Machine, choice: Choice, rows: Rows, out: Path) -> str:
    """Return the text of a run file that will be written to ``out``; one process."""
    lines = [
        f"# Made by `fullshard init {look.path}`: {look.rows:,} rows, {machine}.",
        f"# Change anything: `fullshard config check {out}` prints every setting and finds mistakes.",
        f"output_dir: {_quoted('runs/' + _run_name(look.path))}",
        "model:",
        _NEW.format(suggested=machine.fitting) if choice.model == NEW_MODEL else f"  path: {_quoted(choice.model)}",
        *_data(look, choice, rows, out),
        *_training(machine, choice, rows),
        *(_rewards(choice, rows) if choice.prefers else _evaluation(choice, rows)),
    ]
    return "\n".join(lines) + "\n"


def read_rows(look: Look, choice: Choice) -> Rows:
    """Read the rows and choose a validation fraction that leaves rows on both sides; one process.

    Raises:
        DataError: No row has text in the chosen columns.
    """
    source = choice.sources[0] if len(choice.sources) == 1 and choice.text is None else None
    found = choice.preferences
    spec = SourceSpec(
        train_file=look.path,
        text_column=choice.text,
        source_column=source,
        target_column=choice.target if source or choice.is_transcript else None,
        rejected_column=found.rejected if found is not None and (source or choice.is_transcript) else None,
        label_column=None if found is None else found.label,
        preferences=choice.prefers,
        encoding=look.encoding.name,
        delimiter=look.delimiter,
        max_bad_rows=look.rows,
    )
    table = open_rows(spec, "train")
    examples = [example for _, example in table.usable()]
    table.notes()  # raises if no row is usable
    for fraction in _FRACTIONS:
        try:
            divided = replace(spec, validation_fraction=fraction)
            sides = [read_split(divided, side).examples for side in ("validation", "train")]
        except DataError:
            continue
        if choice.prefers != "labels" or all(map(_compares, sides)):
            return Rows(examples, table.bad.reasons, fraction, len(sides[0]), table.unused)
    return Rows(examples, table.bad.reasons, None, 0, table.unused)


def _compares(rows: Sequence[Example]) -> bool:
    """Return whether kto can be computed of rows: both kinds, and more than one prompt."""
    return len({row.desirable for row in rows}) > 1 and len({row.source for row in rows}) > 1


def _run_name(path: Path) -> str:
    """Name the run after the table, without suffixes unless another table here has the same stem.

    A name that only says what the rows are for follows that of the directory, unless that is the working directory.
    """
    name = path.name.partition(".")[0]
    where = path.resolve().parent
    if name.lower() in _USUAL_NAMES and where != Path.cwd():
        return f"{where.name}-{name}"
    others = (one.name for one in path.parent.iterdir() if FORMATS.keys() & {end.lower() for end in one.suffixes})
    alike = sum(other.partition(".")[0] == name for other in others)
    return path.name.replace(".", "-") if alike > 1 else name


def _data(look: Look, choice: Choice, rows: Rows, out: Path) -> list[str]:
    lines = ["data:", f"  train_file: {_quoted(os.path.relpath(look.path, out.parent))}"]
    if look.encoding.name != "utf-8":
        lines.append(f"  encoding: {look.encoding.name}  # the file is not UTF-8; change it if letters are wrong")
    if look.delimiter not in (None, ","):
        lines.append(f"  delimiter: {_quoted(str(look.delimiter))}")
    lines += _columns(look, choice)
    if rows.fraction is not None:
        lines.append(f"  validation_fraction: {rows.fraction}  # {rows.held_out:,} rows; or validation_file: a file")
    if rows.unusable:
        lines.append(f"  max_bad_rows: {rows.unusable}  # rows with an empty or broken cell, which are skipped")
        if any("data.missing_values" in reason for reason in rows.reasons):
            lines.append(
                "  missing_values: empty  # targets such as NaN or None are empty cells; text: they are targets"
            )
    if choice.text is not None:
        return [*lines, f"  max_source_length: {_row_tokens(choice)}  # tokens of a row"]
    source, target = ([len(text) for text in texts] for texts in _texts(rows))
    for side, lengths, each, most in (("source", source, 64, 1024), ("target", target, 16, 512)):
        usual = sorted(lengths)[(len(lengths) - 1) * 99 // 100]
        tokens = min(most, max(each, math.ceil(usual / 2.5 / each) * each))
        lines.append(f"  max_{side}_length: {tokens}  # tokens; 99 % have at most {usual:,} characters")
    if rows.held_out > _MOST_HELD_OUT:
        lines.append(f"  max_eval_samples: {_MOST_HELD_OUT}  # a random sample of them; generating texts is slow")
    return lines


def _columns(look: Look, choice: Choice) -> list[str]:
    """Return the lines that name the columns, and those that are not used."""
    found = choice.preferences
    more = (None, None) if found is None else (found.rejected, found.label)
    others = [one.name for one in look.columns if one.name not in (*choice.sources, choice.target, *more)]
    unused = f"  # not used: {', '.join(others)}" if others else ""
    if look.turns is not None:
        told = f"  # {look.turns}: each row is a conversation; train_on: last trains on its last answer only"
        if found is not None and found.rejected is not None:
            told = f"  # {look.turns} and {found.rejected} are turns of conversations; the prompt is {found.prompt}"
        return [told, *_preferred(choice)]
    if choice.text is not None:
        return [f"  text_column: {_quoted(choice.text)}  # plain text, joined and cut into rows{unused}"]
    unused = unused.replace("\n", " ")
    if len(choice.sources) == 1:
        lines = [f"  source_column: {_quoted(choice.sources[0])}{unused}", f"  target_column: {_quoted(choice.target)}"]
        return [*lines, *_preferred(choice)]
    if choice.is_transcript:
        lines = [
            f"  target_column: {_quoted(choice.target)}{unused}",
            "  # the prompt is what both texts begin with; of a causal model the rest follows it directly:",
            '  separator: ""',
        ]
        return [*lines, *_preferred(choice)]
    lines = [f"  # source is {' and '.join(choice.sources)}, target is {choice.target}: chosen by their names"]
    return [*lines, *([unused] if unused else []), *_preferred(choice)]


def _preferred(choice: Choice) -> list[str]:
    """Return the lines on what else is read of preferences."""
    found = choice.preferences
    if found is None:
        return []
    lines, label = [], found.label
    if found.kind == "pairs":
        named = (found.target.lower(), str(found.rejected).lower()) != (CHOSEN, REJECTED)
        if named and not choice.sources and not choice.is_transcript:
            lines.append(f"  target_column: {_quoted(found.target)}")
        lines += [f"  rejected_column: {_quoted(str(found.rejected))}"] if named else []
        if label is None:
            return [*lines, f"  # {found.rejected} is the completion that the target is preferred to"]
        return [*lines, f"  label_column: {_quoted(label)}  # says which of the two is better"]
    if label is not None and label.strip().lower() != LABEL:
        lines.append(f"  label_column: {_quoted(label)}")
    return [*lines, f"  # {label} says whether the target is desirable"]


def _row_tokens(choice: Choice) -> int:
    """Return the tokens of a row of plain text."""
    return 128 if choice.model == NEW_MODEL else 512


def _texts(rows: Rows) -> tuple[list[str], list[str]]:
    both = [side for one in rows.examples for side in (one, one.rejected) if side is not None]
    return [one.source for one in rows.examples], [text for one in both for text in _targets(one)]


def _targets(example: Example) -> list[str]:
    """Return the texts to be learned from a row; of a conversation, each answer."""
    if example.conversation is None:
        return [example.target]
    return [turn_text(example.conversation.messages[index]) for index in example.conversation.answers]


def _training(machine: Machine, choice: Choice, rows: Rows) -> list[str]:
    trained = _trained_rows(choice, rows)
    batch = 2 ** max(0, min(6, int(math.log2(max(1, trained / machine.ranks / _STEPS_AN_EPOCH)))))
    steps = max(1, math.ceil(trained / machine.ranks / batch))
    is_new = choice.model == NEW_MODEL
    epochs = max(3, min(20, math.ceil(_NEW_MODEL_STEPS / steps))) if is_new else 3
    rate, why = NEW_MODEL_LEARNING_RATE, "a new model"
    if not is_new:
        rate, why = 3e-4, "a T5; a causal model needs about 2.0e-5"
    if choice.prefers and not is_new:
        rate, why = 1e-5, "preferences; with an adapter about 1.0e-4"
    lines = [
        "training:",
        *([_objective(choice, is_new=is_new)] if choice.prefers else []),
        f"  per_device_train_batch_size: {batch}  # on {machine.ranks} ranks about {steps:,} steps an epoch",
        "  per_device_eval_batch_size: 32",
        f"  num_train_epochs: {epochs}",
        "  learning_rate: " + f"{rate:.1e}".replace("e-0", "e-") + f"  # for {why}",
        "  warmup_steps: 0.05  # share of all steps",
        f"  # precision: auto, which is {machine.precision[0]} on this machine: {machine.precision[1]}",
    ]
    if rows.fraction is None:
        lines.append("  eval_strategy: no  # the rows are too few or too alike to hold some out")
    return lines


def _trained_rows(choice: Choice, rows: Rows) -> int:
    """Estimate the rows of an epoch: of plain text by its characters, of conversations by the answers if need be.

    For an encoder-decoder, each answer of a conversation is a row.
    """
    trained = len(rows.examples) - rows.held_out
    if choice.text is not None:
        characters = sum(len(one.source) for one in rows.examples) * trained // len(rows.examples)
        return max(1, characters // (_CHARACTERS_A_TOKEN * _row_tokens(choice)))
    if choice.sources or choice.prefers or choice.model != NEW_MODEL:
        return trained
    answers = sum(len(one.conversation.answers) for one in rows.examples if one.conversation is not None)
    return trained * answers // len(rows.examples)


def _evaluation(choice: Choice, rows: Rows) -> list[str]:
    if rows.fraction is None:
        return []
    if choice.text is not None:
        return ["evaluation:", "  metric: perplexity  # of held-out texts; nothing is generated"]
    targets = _texts(rows)[1]
    is_label = len(set(targets)) <= min(FEW * 4, max(1, len(targets) // 2))
    is_short = sum(map(len, targets)) / len(targets) < 40
    if is_label or is_short:
        return ["evaluation:", "  metric: exact_match  # targets are labels or short; rougeL is for longer texts"]
    return ["evaluation:", "  metric: rougeL  # targets are texts; exact_match is for labels"]


def _objective(choice: Choice, *, is_new: bool) -> str:
    if choice.prefers == "labels":
        return f"  objective: kto  # {ANSWERING}"
    if is_new:
        return f"  objective: orpo  # which learns the targets too; dpo, ipo and simpo are {ANSWERING}"
    return "  objective: dpo  # or ipo, simpo, orpo"


def _rewards(choice: Choice, rows: Rows) -> list[str]:
    if rows.fraction is None:
        return []
    if choice.prefers == "labels":
        return ["evaluation:", "  metric: rewards/margins  # of the desirable completions, less that of the others"]
    return ["evaluation:", "  metrics: [rewards/margins]"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
