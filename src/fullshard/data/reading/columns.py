"""Choice of source and target columns: set by the user, filled into a template, or chosen by name."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fullshard.data.examples import Example, SourceSpec
from fullshard.data.reading.bad_rows import UnusableRowError
from fullshard.data.reading.cells import cell_references, cell_text
from fullshard.data.reading.tables import Row
from fullshard.errors import ConfigError, DataError

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
"""Source columns and target column of known tables, by lower-case name. Of the shapes that fit a table, those whose
columns are a subset of another's do not count, and exactly one must remain."""

_WIKIHOW_COLUMNS = {"headline", "title", "text"}
_FURTHER_INPUTS = ("input", "context")
"""Second source columns of known shapes, which may be empty or missing in a row."""


@dataclass(frozen=True)
class Recipe:
    """How the cells of a row become an example.

    Attributes:
        sources: Columns of the source.
        target: Column of the target.
        fill: Combines those columns' texts into the source.
        optional: Source columns that may be missing in a row.
        join_target: Whether a list in the target column is one text in pieces; otherwise it is several references.
        notes: Messages about columns chosen by name.
    """

    sources: tuple[str, ...]
    target: str
    fill: Callable[[Sequence[str]], str]
    optional: tuple[str, ...] = ()
    join_target: bool = False
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The distinct columns that it reads."""
        return list(dict.fromkeys((*self.sources, self.target)))

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A cell is missing, empty or of the wrong type.
        """
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        texts = [self._source_text(name, row.cells) for name in self.sources]
        if not any(text.strip() for text in texts):
            listed = " and ".join(repr(name) for name in self.sources)
            raise UnusableRowError(f"column {listed} is empty")
        references = cell_references(self.target, row.cells.get(self.target), join=self.join_target)
        return Example(self.fill(texts), references, row.line)

    def _source_text(self, name: str, cells: Mapping[str, object]) -> str:
        cell = cells.get(name)
        return "" if cell is None and name in self.optional else cell_text(name, cell)


def choose(spec: SourceSpec, columns: Sequence[str], where: str) -> Recipe:
    """Choose the columns of a table's examples.

    Args:
        spec: The user's settings.
        columns: The table's columns.
        where: Name of the table in messages.

    Raises:
        ConfigError: The template is malformed.
        DataError: A column does not exist or exists twice, or no or several choices fit; the message lists the columns.
    """
    if spec.template is not None:
        sources, fill = parse_template(spec.template)
        optional, note = (), ()
    elif spec.source_column is not None:
        sources, fill, optional, note = (spec.source_column,), _only, (), ()
    else:
        sources, target = _choose_by_name(spec, columns, where)
        fill, optional = _known_fill(sources), _optional(sources)
        source = f"source is {' and '.join(map(repr, sources))}"
        note = (f"{where}: {source}, target is {target!r}, chosen by name.",)
        return _checked(spec, Recipe(sources, target, fill, optional, notes=note), columns, where)
    target = spec.target_column
    if target is None:
        _require((*sources,), columns, where)
        target = _choose_target(sources, columns, where)
        note = (f"{where}: target is {target!r}, chosen by name.",)
    return _checked(spec, Recipe(sources, target, fill, optional, notes=note), columns, where)


def choose_sources(spec: SourceSpec, columns: Sequence[str], where: str) -> Recipe:
    """Choose the source columns of a table that may lack targets: those that training would choose.

    Args:
        spec: The user's setting of the target; the source is chosen by name.
        columns: The table's columns.
        where: Name of the table in messages.

    Returns:
        A recipe for examples whose references are not meaningful.

    Raises:
        DataError: No or several choices fit; the message lists the columns.
    """
    names = {name.lower(): name for name in reversed(columns)}
    fitting = [(sources, target) for sources, target in KNOWN_SHAPES if {*sources} <= set(names)]
    if spec.target_column is not None:
        given = spec.target_column.lower()
        # As in training, an unknown target goes with a single source column.
        fitting = [one for one in fitting if one[1] == given] or [one for one in fitting if len(one[0]) == 1]
    # If the table has targets, they determine the shape.
    fitting = [one for one in fitting if one[1] in names] or fitting
    found = {sources for sources, _ in fitting}
    largest = [one for one in found if not any({*one} < {*other} for other in found)]
    if len(columns) == 1:
        largest = [(columns[0].lower(),)]
    if len(largest) != 1:
        remedy = "Name it: --source-column NAME, or set data.source_column or data.template."
        raise DataError(f"{where}: which column is the source? Its columns: {_listed(columns)}. {remedy}")
    sources = tuple(names[name] for name in largest[0])
    note = () if len(columns) == 1 else (f"{where}: source is {' and '.join(map(repr, sources))}, chosen by name.",)
    recipe = Recipe(sources, sources[0], _known_fill(sources), _optional(sources), notes=note)
    return _checked(spec, recipe, columns, where)


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


def _checked(spec: SourceSpec, recipe: Recipe, columns: Sequence[str], where: str) -> Recipe:
    """Return the recipe with the spec's target_lists, after checking that its columns exist once."""
    _require(recipe.columns, columns, where)
    return Recipe(
        recipe.sources, recipe.target, recipe.fill, recipe.optional, spec.target_lists == "join", recipe.notes
    )


def _require(wanted: Iterable[str], columns: Sequence[str], where: str) -> None:
    """Raise DataError if a wanted column does not exist or exists twice."""
    for name in wanted:
        count = columns.count(name)
        if count == 0:
            raise DataError(f"{where} has no column {name!r}. Its columns: {_listed(columns)}.")
        if count > 1:
            raise DataError(f"{where} has {count} columns named {name!r}: rename all but one.")


def _choose_by_name(spec: SourceSpec, columns: Sequence[str], where: str) -> tuple[tuple[str, ...], str]:
    """Return source and target columns of the only known shape that fits a table."""
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
    largest = [shape for shape in fitting if not any(_columns_of(shape) < _columns_of(other) for other in fitting)]
    if len(largest) != 1:
        raise _undecided(columns, where, [f"{' and '.join(sources)} -> {target}" for sources, target in largest])
    sources, target = largest[0]
    return tuple(names[name] for name in sources), names[target]


def _choose_target(sources: Sequence[str], columns: Sequence[str], where: str) -> str:
    """Return the only known target among the other columns."""
    used = [name.lower() for name in sources]
    partners = {target for known, target in KNOWN_SHAPES if known[0] in used}
    free = [name for name in columns if name not in sources]
    found = [name for name in free if name.lower() in partners]
    found = found or [name for name in free if name.lower() in {target for _, target in KNOWN_SHAPES}]
    if len(found) != 1:
        raise _undecided(columns, where, [f"{' and '.join(sources)} -> {target}" for target in found])
    return found[0]


def _undecided(columns: Sequence[str], where: str, candidates: Sequence[str]) -> DataError:
    """Return the error for a table whose columns fit no known shape, or several."""
    found = f"more than one pair fits ({'; '.join(candidates)})" if candidates else "no pair is known by name"
    remedy = "Set data.source_column (or data.template) and data.target_column."
    if set(columns) >= _WIKIHOW_COLUMNS:
        remedy = "These are WikiHow's: set data.format: wikihow."
    return DataError(
        f"{where}: which columns are source and target? {found}. Its columns: {_listed(columns)}. {remedy}"
    )


def _columns_of(shape: tuple[tuple[str, ...], str]) -> set[str]:
    return {*shape[0], shape[1]}


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in columns) or "none"


def _known_fill(sources: Sequence[str]) -> Callable[[Sequence[str]], str]:
    """Return the function that joins a known shape's source columns."""
    if len(sources) == 1:
        return _only
    if sources[0].lower() == "question":
        return lambda texts: f"question: {texts[0]} context: {texts[1]}" if texts[1].strip() else texts[0]
    return lambda texts: "\n\n".join(text for text in texts if text.strip())


def _optional(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the source columns of a known shape that may be missing in a row."""
    return tuple(name for name in sources[1:] if name.lower() in _FURTHER_INPUTS)


def _only(texts: Sequence[str]) -> str:
    return texts[0]
