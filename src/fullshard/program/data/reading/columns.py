"""Choice of source and target columns: set by the user, filled into a template, or chosen by name."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from fullshard.errors import ConfigError, DataError
from fullshard.program.data.examples import Example, InputRow, SourceSpec
from fullshard.program.data.reading.cells import cell_of, cell_references, cell_text, column_of
from fullshard.program.data.reading.csv_file import DELIMITERS, shown
from fullshard.program.data.reading.row import Row, UnusableRowError

KNOWN_SHAPES: tuple[tuple[tuple[str, ...], str], ...] = (
    # text and its class
    (("text",), "label"),
    (("text",), "category"),
    (("text",), "intent"),
    (("text",), "sentiment"),
    (("sentence",), "label"),
    (("sentence",), "sentiment"),
    # long text and its summary
    (("article",), "highlights"),
    (("article",), "summary"),
    (("article",), "abstract"),
    (("document",), "summary"),
    (("dialogue",), "summary"),
    (("text",), "summary"),
    # text and text
    (("source",), "target"),
    (("src",), "tgt"),
    (("text",), "target"),
    (("inputs",), "targets"),
    (("input",), "target"),
    (("input",), "output"),
    # prompts and responses
    (("instruction", "input"), "output"),
    (("instruction",), "output"),
    (("instruction", "context"), "response"),
    (("instruction",), "response"),
    (("prompt",), "completion"),
    (("prompt",), "response"),
    (("question", "context"), "answer"),
    (("question",), "answer"),
)
"""Source columns and target column of known data, by lower-case name. Of the shapes that fit, those whose columns are a
subset of another's do not count, and exactly one must remain."""

_Shape = tuple[tuple[str, ...], str]
_TARGETS = frozenset(target for _, target in KNOWN_SHAPES)
_NAMES = _TARGETS | {name for sources, _ in KNOWN_SHAPES for name in sources}
_SOURCES = frozenset(sources[0] for sources, _ in KNOWN_SHAPES if len(sources) == 1)
_BY_ORDER = (
    "the first and the second of two columns; to choose otherwise, set data.source_column and data.target_column."
)
_PLAIN_NAME = re.compile(r"[^\W\d][\w ()/.-]*(?<! )")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_WIKIHOW_COLUMNS = {"headline", "title", "text"}
PROMPTS = ("prompt", "question", "instruction", "input")
"""Names of prompts of preferences, in lower case; the first that a table has is read."""

_FURTHER_INPUTS = ("input", "context")
"""Second source columns of known shapes, which may be empty or missing in a row."""

_NO_TARGET = re.compile(
    "chosen|rejected|dispreferred|suggestions?|suggested|negatives?|distractors?|incorrect|wrong|predictions?|predicted|"
    "draft|contexts?|history"
)
"""Words in names of columns that speak against a column being the target, or leave open which one is."""


def leaves_open(name: str) -> bool:
    """Return whether a column's name speaks against it being the target and for others like it, as ``rejected``."""
    return any(map(_NO_TARGET.fullmatch, re.split(r"[\W\d_]+", name.lower())))


def is_no_target(name: str) -> bool:
    """Return whether a column's name speaks against it being the target: of a known source, or :func:`leaves_open`."""
    return leaves_open(name) or name.lower() in _NAMES - _TARGETS


def header_note(names: Sequence[str]) -> str | None:
    """Return a message about a header whose names look like the cells of a row; None: they do not."""
    odd = [name for name in names if _is_number(name) or len(name) > 60 or name.endswith((".", "!", "?"))]
    if not odd:
        return None
    return (
        f"the header looks like a row: {', '.join(map(repr, odd))}. If the file has no line with the columns' names, "
        "add one: its first row is not used otherwise."
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Recipe:
    """How the cells of a row become an example."""

    sources: tuple[str, ...]  # columns of the source, or names inside of their cells
    target: str  # column of the target, or a name inside of its cells
    fill: Callable[[Sequence[str]], str]  # combines those columns' texts into the source
    optional: tuple[str, ...] = ()  # source columns that may be missing in a row
    # whether a list in the target column is one text in pieces; otherwise it is several references
    join_target: bool = False
    notes: tuple[str, ...] = ()  # messages about columns chosen by name

    @property
    def columns(self) -> list[str]:
        """The distinct names that it reads."""
        return list(dict.fromkeys((*self.sources, self.target)))

    def example(self, row: Row) -> Example:
        """Return the example of a row; raises as :meth:`source`."""
        source = self.source(row)
        references = cell_references(self.target, cell_of(row, self.target), join=self.join_target)
        return Example(source, references, row.line)

    def input_row(self, row: Row) -> InputRow:
        """Return the source of a row to predict for; raises as :meth:`source`."""
        return InputRow(self.source(row), row.line)

    def source(self, row: Row) -> str:
        """Return the source of a row.

        Raises:
            UnusableRowError: A cell is missing, empty or of the wrong type.
        """
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        texts = []
        for name in self.sources:
            cell = cell_of(row, name)
            texts.append("" if cell is None and name in self.optional else cell_text(name, cell))
        if not any(text.strip() for text in texts):
            listed = " and ".join(repr(name) for name in self.sources)
            raise UnusableRowError(f"column {listed} is empty")
        return self.fill(texts)


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """How the cells of a row become plain text, which may be empty."""

    def example(self, row: Row) -> Example:
        """Return the text of a row as source and reference; raises as :meth:`source`."""
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        cell = cell_of(row, self.target)
        text = "" if cell is None else cell_text(self.target, cell)
        return Example(text, (text,), row.line)


def choose_text(name: str, columns: Sequence[str], where: str) -> TextRecipe:
    """Return the recipe of plain text in a column; raises as :func:`choose`."""
    name = _without_blanks(name, columns)
    _require((name,), columns, where)
    return TextRecipe((name,), name, _only)


def choose(spec: SourceSpec, columns: Sequence[str], where: str) -> Recipe:
    """Choose the columns of the examples of the data that messages call ``where``.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice, or no or several choices fit; the message lists the columns.
    """
    spec = _stripped(spec, columns)
    if (prompt := _own_prompt(spec, columns, where)) is not None:
        target = spec.target_column or _choose_target(spec, prompt, columns, where)
        note = (f"{where}: prompt is {' and '.join(map(repr, prompt))}, target is {target!r}, chosen by name.",)
        return _checked(spec, _known(prompt, target, note), columns, where)
    if spec.template is None and spec.source_column is None:
        sources, target, how = _choose_by_name(spec, columns, where)
        source = f"source is {' and '.join(map(repr, sources))}"
        also = header_note(columns) if how == _BY_ORDER else None
        note = (f"{where}: {source}, target is {target!r}, {how}", *([f"{where}: {also}"] if also else []))
        return _checked(spec, _known(sources, target, note), columns, where)
    named, fill = ((), None) if spec.template is None else parse_template(spec.template)
    sources = tuple(_without_blanks(name, columns) for name in named) or (str(spec.source_column),)
    target, note = spec.target_column, ()
    if target is None:
        _require(sources, columns, where)
        target = _choose_target(spec, sources, columns, where)
        how = "chosen by name." if target.lower() in _TARGETS else "the other column."
        note = (f"{where}: target is {target!r}, {how}",)
    return _checked(spec, Recipe(sources, target, fill or _only, notes=note), columns, where)


def choose_sources(spec: SourceSpec, columns: Sequence[str], where: str) -> Recipe:
    """Choose the source columns of data that may lack targets: those that training would choose.

    The recipe makes examples whose references are not meaningful.

    Raises:
        DataError: No or several choices fit; the message lists the columns.
    """
    spec = _stripped(spec, columns)
    if (prompt := _own_prompt(spec, columns, where)) is not None:
        note = (f"{where}: prompt is {' and '.join(map(repr, prompt))}, chosen by name.",) if len(columns) > 1 else ()
        return _checked(spec, _known(prompt, prompt[0], note), columns, where)
    names = {name.lower(): name for name in reversed(columns)}
    fitting = [(sources, target) for sources, target in KNOWN_SHAPES if {*sources} <= set(names)]
    if spec.target_column is not None:
        given = spec.target_column.lower()
        # As in training, an unknown target goes with a single source column.
        fitting = [one for one in fitting if one[1] == given] or [one for one in fitting if len(one[0]) == 1]
    # If the data has targets, they determine the shape.
    fitting = [one for one in fitting if one[1] in names] or fitting
    found = {sources for sources, _ in fitting}
    largest = [one for one in found if not any({*one} < {*other} for other in found)]
    how = "chosen by name."
    if len(columns) == 1:
        largest = [(columns[0].lower(),)]
    elif len(columns) == 2 and not largest and (spec.target_column in columns or not _NAMES & set(names)):
        # As in training.
        largest = [(next(name for name in columns if name != spec.target_column).lower(),)]
        how = "the first of two columns, whose names are not known; --source-column NAME names another."
    if len(largest) != 1:
        remedy = "Name it: --source-column NAME, or set data.source_column or data.template."
        raise DataError(f"{where}: which column is the source? {_its(columns)} {remedy}")
    sources = tuple(names[name] for name in largest[0])
    note = () if len(columns) == 1 else (f"{where}: source is {' and '.join(map(repr, sources))}, {how}",)
    return _checked(spec, _known(sources, sources[0], note), columns, where)


def prompt_of(columns: Sequence[str], where: str) -> tuple[str, ...] | None:
    """Return the columns of a prompt of preferences: a known one with the inputs that known data joins to it.

    None: no column has a known name.

    Raises:
        DataError: Different data joins different ones of the columns to it.
    """
    names = {name.strip().lower(): name for name in reversed(columns)}
    first = next((name for name in PROMPTS if name in names), None)
    if first is None:
        return None
    shapes = {sources for sources, _ in KNOWN_SHAPES if sources[0] == first and {*sources} <= names.keys()}
    largest = sorted(one for one in shapes if not any({*one} < {*other} for other in shapes))
    if len(largest) > 1:
        listed = "; ".join(" and ".join(repr(names[name]) for name in one) for one in largest)
        every = dict.fromkeys(names[name] for one in largest for name in one)
        raise DataError(
            f"{where}: which columns are the prompt? More than one choice fits: {listed}. {_its(columns)} Set "
            f"data.template, such as {json.dumps(' '.join(f'{{{name}}}' for name in every))}."
        )
    return tuple(names[name] for name in largest[0])


def _own_prompt(spec: SourceSpec, columns: Sequence[str], where: str) -> tuple[str, ...] | None:
    """Return the prompt of preferences that the spec leaves open; None: it says which, or rows are none."""
    is_open = spec.preferences is not None and spec.template is None and spec.source_column is None
    return prompt_of(columns, where) if is_open else None


def parse_template(template: str) -> tuple[tuple[str, ...], Callable[[Sequence[str]], str]]:
    """Return the columns of a template, and the function that fills in their texts.

    Raises:
        ConfigError: The template is malformed, or names no column.
    """
    pieces: list[tuple[str, int | None]] = []
    names: list[str] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            if name is not None and (not name or spec or conversion):
                raise ValueError("braces may contain only a column name")
            if name is not None and name not in names:
                names.append(name)
            pieces.append((literal, None if name is None else names.index(name)))
    except ValueError as error:
        raise ConfigError(
            f"data.template {template!r} is malformed: {error}. Write column names in braces, such as "
            "'question: {question} context: {context}', and double braces that are text."
        ) from error
    if not names:
        raise ConfigError(
            f"data.template {template!r} names no column: write at least one in braces, such as {{text}}."
        )

    def fill(texts: Sequence[str]) -> str:
        return "".join(literal + ("" if place is None else texts[place]) for literal, place in pieces)

    return tuple(names), fill


def _stripped(spec: SourceSpec, columns: Sequence[str]) -> SourceSpec:
    """Return the spec with the names of columns as the data has them."""
    source, target = (name and _without_blanks(name, columns) for name in (spec.source_column, spec.target_column))
    return replace(spec, source_column=source, target_column=target)


def _without_blanks(name: str, columns: Sequence[str]) -> str:
    """Return a column's name without blanks around it, unless the data (of JSON) has them in its own."""
    return name if name in columns else name.strip()


def _checked(spec: SourceSpec, recipe: Recipe, columns: Sequence[str], where: str) -> Recipe:
    """Return the recipe with the spec's target_lists, after checking that its columns exist once."""
    _require(recipe.columns, columns, where)
    return replace(recipe, join_target=spec.target_lists == "join")


def _require(wanted: Iterable[str], columns: Sequence[str], where: str) -> None:
    """Raise DataError if a wanted column does not exist or exists twice."""
    for name in wanted:
        column = column_of(name, columns)
        count = columns.count(column or name)
        if column is None:
            raise DataError(f"{where} has no column {name!r}.{did_you_mean(name, columns)} {_its(columns)}")
        if count > 1:
            raise DataError(f"{where} has {count} columns named {column!r}: rename all but one.")


def did_you_mean(name: str, columns: Sequence[str]) -> str:
    """Return a question with the column whose name is most similar, whatever its case and blanks; empty without one."""
    by_case = {other.strip().casefold(): other for other in columns}
    near = get_close_matches(name.strip().casefold(), by_case, n=1, cutoff=0.75)
    return f" Did you mean {by_case[near[0]]!r}?" if near else ""


def _choose_by_name(spec: SourceSpec, columns: Sequence[str], where: str) -> tuple[tuple[str, ...], str, str]:
    """Return source and target columns, and how they were chosen: the only known shape that fits, or of two the order.

    Raises:
        DataError: No or several shapes fit, and there are more columns than two, or the given target does not exist.
    """
    names = {name.lower(): name for name in reversed(columns)}
    given = spec.target_column
    if given is not None:
        _require((given,), columns, where)
    fitting = [
        (sources, target)
        for sources, target in KNOWN_SHAPES
        if {*sources, target} <= set(names) and given in (None, names[target])
    ]
    if not fitting and given is not None:
        known = {sources[0] for sources, _ in KNOWN_SHAPES} & set(names) - {given.lower()}
        fitting = [((name,), given.lower()) for name in sorted(known)]
    if not fitting and given is not None and len(columns) == 2:
        return (next(name for name in columns if name != given),), given, "the other column is the source."
    unknown = [name for name in columns if name.lower() not in _NAMES]
    if (
        not fitting
        and len(columns) == 2
        and columns[1] in unknown
        and (len(unknown) == 2 or columns[0].lower() in _SOURCES)
        and not all(map(leaves_open, columns))  # two answers, one of them rejected
    ):
        return (columns[0],), columns[1], _BY_ORDER
    largest = [(ss, t) for ss, t in fitting if not any({*ss, t} < {*others, other} for others, other in fitting)]
    if len(largest) != 1:
        raise _undecided(spec, columns, where, [(tuple(names[s] for s in ss), names[t]) for ss, t in largest])
    sources, target = largest[0]
    return tuple(names[name] for name in sources), names[target], "chosen by name."


def _choose_target(spec: SourceSpec, sources: tuple[str, ...], columns: Sequence[str], where: str) -> str:
    """Return the only known target among the other columns, or the only other column."""
    used = [name.lower() for name in sources]
    partners = {target for known, target in KNOWN_SHAPES if known[0] in used}
    free = [name for name in columns if name not in sources]
    found = [name for name in free if name.lower() in partners]
    found = found or [name for name in free if name.lower() in _TARGETS] or (free if len(columns) == 2 else [])
    if len(found) != 1:
        raise _undecided(spec, columns, where, [(sources, target) for target in found])
    return found[0]


def _undecided(spec: SourceSpec, columns: Sequence[str], where: str, candidates: Sequence[_Shape]) -> DataError:
    """Return the error for columns that fit no known shape, or several, with lines for the run file."""
    pairs = [f"{' and '.join(sources)} -> {target}" for sources, target in candidates]
    found = f"more than one pair fits ({'; '.join(pairs)})" if pairs else "no pair is known by name"
    question = f"{where}: which columns are source and target? {found}. {_its(columns)}"
    if set(columns) >= _WIKIHOW_COLUMNS:
        return DataError(f"{question} These are WikiHow's: set data.format: wikihow.")
    if len(columns) < 2:
        labelled = "; sentences that end in @label are data.format: phrasebank" if list(columns) == ["text"] else ""
        return DataError(f"{question} At least two columns are needed; plain text is data.text_column{labelled}.")
    source, target = (candidates[0][0][0], candidates[0][1]) if candidates else _suggested(spec, columns)
    lines = [f"  source_column: {_as_yaml(spec.source_column or source)}"] if spec.template is None else []
    lines.append(f"  target_column: {_as_yaml(spec.target_column or target)}")
    both = "data.source_column and data.target_column, or data.template for a source of several columns"
    needed = both if spec.template is None else "data.target_column"
    text = f"{question} Set {needed}. In the run file, with your choice:"
    return DataError("\n".join([text, "data:", *lines]))


def _suggested(spec: SourceSpec, columns: Sequence[str]) -> tuple[str, str]:
    """Return a source and a target to begin with: columns with a known name, else the first and the last."""
    free = [name for name in columns if name not in (spec.source_column, spec.target_column)] or list(columns)
    unlike = [name for name in free if name.lower() not in _TARGETS] or free
    source = next((name for name in unlike if name.lower() in _NAMES), unlike[0])
    rest = [name for name in free if name != source] or free
    return source, next((name for name in rest if name.lower() in _TARGETS), rest[-1])


def _as_yaml(name: str) -> str:
    """Return a column's name as YAML reads it back: in quotes, unless it is plain words."""
    plain = _PLAIN_NAME.fullmatch(name) and name.lower() not in _YAML_WORDS
    return name if plain else json.dumps(name, ensure_ascii=False)


def _its(columns: Sequence[str]) -> str:
    """Return a sentence with the columns, and one on the delimiter if they may be several in one."""
    listed = ", ".join(repr(name) for name in columns) or "none"
    inside = [one for one in DELIMITERS if len(columns) == 1 and one in columns[0]]
    hint = f" If {shown(inside[0])} separates its cells, set data.delimiter." if inside else ""
    return f"Its columns: {listed}.{hint}"


def _known(sources: tuple[str, ...], target: str, notes: tuple[str, ...]) -> Recipe:
    """Return the recipe of a known shape, whose further source columns may be missing in a row."""

    def fill(texts: Sequence[str]) -> str:
        if sources[0].lower() == "question":
            return f"question: {texts[0]} context: {texts[1]}" if texts[1].strip() else texts[0]
        return "\n\n".join(text for text in texts if text.strip())

    optional = tuple(name for name in sources[1:] if name.lower() in _FURTHER_INPUTS)
    return Recipe(sources, target, _only if len(sources) == 1 else fill, optional, notes=notes)


def _only(texts: Sequence[str]) -> str:
    return texts[0]
