"""Which columns make the source and the target: given by the user, filled into a template, or recognised by name."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fullshard.data.bad_rows import UnusableRowError
from fullshard.data.cells import cell_references, cell_text
from fullshard.data.examples import Example, SourceSpec
from fullshard.data.tables import Row
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
    # prompts and what is to be written
    (("instruction", "input"), "output"),
    (("instruction",), "output"),
    (("instruction", "context"), "response"),
    (("instruction",), "response"),
    (("prompt",), "completion"),
    (("prompt",), "response"),
    (("question", "context"), "answer"),
    (("question",), "answer"),
)
"""Source columns and target column of tables that are known, by name in lower case. Of the shapes that fit a table,
those whose columns are a part of another's do not count, and one must be left."""
_WIKIHOW_COLUMNS = {"headline", "title", "text"}
_FURTHER_INPUTS = ("input", "context")
"""Second source columns of known shapes, which rows may leave empty or out."""


@dataclass(frozen=True)
class Recipe:
    """How the cells of a row become an example.

    Attributes:
        sources: Columns of the source.
        target: Column of the target.
        fill: The source of those columns' texts.
        optional: Source columns that a row need not have.
        join_target: A list in the target column is one text in pieces; else it is several references.
        notes: What was recognised.
    """

    sources: tuple[str, ...]
    target: str
    fill: Callable[[Sequence[str]], str]
    optional: tuple[str, ...] = ()
    join_target: bool = False
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """All columns it reads, each once."""
        return list(dict.fromkeys((*self.sources, self.target)))

    def example(self, row: Row) -> Example:
        """The example of a row.

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
    """Which columns of a table make its examples.

    Args:
        spec: What the user said of them.
        columns: The table's columns.
        where: The table, for messages.

    Raises:
        ConfigError: The template cannot be understood.
        DataError: A column does not exist or exists twice, or none or several could be meant; the message lists those
            that exist.
    """
    if spec.template is not None:
        sources, fill = parse_template(spec.template)
        optional, note = (), ()
    elif spec.source_column is not None:
        sources, fill, optional, note = (spec.source_column,), _only, (), ()
    else:
        sources, target = _recognise(spec, columns, where)
        fill, optional = _known_fill(sources), _optional(sources)
        source = f"source is {' and '.join(map(repr, sources))}"
        note = (f"{where}: {source}, target is {target!r}, recognised by name.",)
        return _checked(spec, Recipe(sources, target, fill, optional, notes=note), columns, where)
    target = spec.target_column
    if target is None:
        _require((*sources,), columns, where)
        target = _recognise_target(sources, columns, where)
        note = (f"{where}: target is {target!r}, recognised by name.",)
    return _checked(spec, Recipe(sources, target, fill, optional, notes=note), columns, where)


def choose_sources(spec: SourceSpec, columns: Sequence[str], where: str) -> Recipe:
    """Which columns of a table make its sources where it need not have targets: those that training would take.

    Args:
        spec: What the user said of the target; the source is recognised.
        columns: The table's columns.
        where: The table, for messages.

    Returns:
        What makes examples whose references are of no use.

    Raises:
        DataError: None or several could be meant; the message lists the columns.
    """
    names = {name.lower(): name for name in reversed(columns)}
    fitting = [(sources, target) for sources, target in KNOWN_SHAPES if {*sources} <= set(names)]
    if spec.target_column is not None:
        given = spec.target_column.lower()
        # As in training, another target has only one column beside it.
        fitting = [one for one in fitting if one[1] == given] or [one for one in fitting if len(one[0]) == 1]
    # Where targets are there, they say which shape it is.
    fitting = [one for one in fitting if one[1] in names] or fitting
    found = {sources for sources, _ in fitting}
    whole = [one for one in found if not any({*one} < {*other} for other in found)]
    if len(columns) == 1:
        whole = [(columns[0].lower(),)]
    if len(whole) != 1:
        remedy = "Name it: --source-column NAME, or set data.source_column or data.template."
        raise DataError(f"{where}: which column is the source? Its columns: {_listed(columns)}. {remedy}")
    sources = tuple(names[name] for name in whole[0])
    note = () if len(columns) == 1 else (f"{where}: source is {' and '.join(map(repr, sources))}, recognised by name.",)
    recipe = Recipe(sources, sources[0], _known_fill(sources), _optional(sources), notes=note)
    return _checked(spec, recipe, columns, where)


def parse_template(template: str) -> tuple[tuple[str, ...], Callable[[Sequence[str]], str]]:
    """The columns a template names, and what fills their texts into it.

    Raises:
        ConfigError: It is malformed, or names no column.
    """
    pieces: list[tuple[str, int | None]] = []
    names: list[str] = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(template):
            if name is not None and (not name or spec or conversion):
                raise ValueError("only {column} may stand in braces")
            if name is not None and name not in names:
                names.append(name)
            pieces.append((literal, None if name is None else names.index(name)))
    except ValueError as error:
        raise ConfigError(
            f"data.template {template!r} is malformed: {error}. Write column names in braces, such as "
            "'question: {question} context: {context}', and double braces that are meant as such."
        ) from error
    if not names:
        raise ConfigError(
            f"data.template {template!r} names no column: write at least one in braces, such as {{text}}."
        )

    def fill(texts: Sequence[str]) -> str:
        return "".join(literal + ("" if place is None else texts[place]) for literal, place in pieces)

    return tuple(names), fill


def _checked(spec: SourceSpec, recipe: Recipe, columns: Sequence[str], where: str) -> Recipe:
    """The recipe with the spec's target_lists, when its columns exist once."""
    _require(recipe.columns, columns, where)
    return Recipe(
        recipe.sources, recipe.target, recipe.fill, recipe.optional, spec.target_lists == "join", recipe.notes
    )


def _require(wanted: Iterable[str], columns: Sequence[str], where: str) -> None:
    """Raise when a wanted column does not exist or exists twice."""
    for name in wanted:
        count = columns.count(name)
        if count == 0:
            raise DataError(f"{where} has no column {name!r}. Its columns: {_listed(columns)}.")
        if count > 1:
            raise DataError(f"{where} has {count} columns named {name!r}: rename all but one.")


def _recognise(spec: SourceSpec, columns: Sequence[str], where: str) -> tuple[tuple[str, ...], str]:
    """Source and target columns of the one known shape that a table has."""
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
    whole = [shape for shape in fitting if not any(_columns_of(shape) < _columns_of(other) for other in fitting)]
    if len(whole) != 1:
        raise _undecided(columns, where, [f"{' and '.join(sources)} -> {target}" for sources, target in whole])
    sources, target = whole[0]
    return tuple(names[name] for name in sources), names[target]


def _recognise_target(sources: Sequence[str], columns: Sequence[str], where: str) -> str:
    """The one column beside the sources that is a known target."""
    used = [name.lower() for name in sources]
    partners = {target for known, target in KNOWN_SHAPES if known[0] in used}
    free = [name for name in columns if name not in sources]
    found = [name for name in free if name.lower() in partners]
    found = found or [name for name in free if name.lower() in {target for _, target in KNOWN_SHAPES}]
    if len(found) != 1:
        raise _undecided(columns, where, [f"{' and '.join(sources)} -> {target}" for target in found])
    return found[0]


def _undecided(columns: Sequence[str], where: str, candidates: Sequence[str]) -> DataError:
    """The error for a table whose columns are not known, or known in several ways."""
    found = f"more than one pair could be meant ({'; '.join(candidates)})" if candidates else "no pair is known by name"
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
    """How a known shape's source columns become one text."""
    if len(sources) == 1:
        return _only
    if sources[0].lower() == "question":
        return lambda texts: f"question: {texts[0]} context: {texts[1]}" if texts[1].strip() else texts[0]
    return lambda texts: "\n\n".join(text for text in texts if text.strip())


def _optional(sources: Sequence[str]) -> tuple[str, ...]:
    """Those of a known shape's source columns that a row need not have."""
    return tuple(name for name in sources[1:] if name.lower() in _FURTHER_INPUTS)


def _only(texts: Sequence[str]) -> str:
    return texts[0]
