"""Write the reference pages that are made from the code: options, command line, Python API, files.

Example:
    python docs/generate.py            # writes docs/reference/
    python docs/generate.py --check    # exit code 1 if a page is stale
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import fullshard
from fullshard.program.cli.main import main
from fullshard.program.config.schema import RunConfig
from fullshard.program.config.section import own_option
from fullshard.program.data.reading.columns import KNOWN_SHAPES
from fullshard.program.metrics import METRICS
from fullshard.program.speed import WAYS

REFERENCE = Path(__file__).parent / "reference"
VERBS = (
    *(
        "",
        "init",
        "train",
        "evaluate",
        "predict",
        "chat",
        "report",
        "inspect",
        "plan",
        "export",
        "verify",
        "share",
        "launch",
    ),
    *("config", "config check"),
)
MODULES = (("fullshard", None), ("fullshard.optim", None))
"""Modules on the Python page, each with its names; None: those of its ``__all__``."""

OPTIONS_HEAD = """\
# Options of the run file

```bash
fullshard train run.yaml training.learning_rate=1e-4
```

Every option, its values and its default. On the command line an option is `section.key=value`, the value in YAML.
Text with a colon or braces needs YAML's quotes inside the shell's: `'data.source_prefix="summarize: "'`.

A [resumed run](../guides/resume.md) needs the same settings, data files and models by their content. *Free* options
may change. With `resume=PATH` all may but *fixed* ones; after a change of a *compared* one, evaluations before it are
not compared with later ones.
"""

_RESUMING = {"free": "*free*", "evaluation": "*compared*", "state": "*fixed*"}
"""What a resumed run may do with an option, as the head of the page explains it."""


COLUMNS_HEAD = """\
## Columns chosen by name

Without `data.source_column`, `data.template` and `data.target_column`, the columns are those of the only pair below
that a table has, in upper or lower case; a pair inside a larger one that the table also has does not count. Of exactly
two columns with none of these names, or a known source and another, the first is the source and the second the target.
Each choice is printed; everything else is an error with the lines to paste.
"""


def options_page() -> str:
    """Return the page with every option of the run file, made from its schema."""
    return (
        "\n".join([OPTIONS_HEAD, *_sections(RunConfig, ""), *_ways(), "", *_metrics(), "", *_known_columns()]).rstrip()
        + "\n"
    )


def _ways() -> Iterator[str]:
    """Yield the table of the ways."""
    yield "## Ways\n\n| `speed.ways` | changes | what it is | results |\n|---|---|---|---|"
    for way in WAYS.values():
        results = "equal to the bit" if way.exact else "round differently"
        yield f"| {way.name} | {way.part} | {way.purpose} | {results} |"


def _metrics() -> Iterator[str]:
    """Yield the table of the metrics."""
    yield "## Metrics\n\n| `evaluation.metric` | what it is | by | baseline |\n|---|---|---|---|"
    for one in METRICS.values():
        yield f"| {one.name} | {one.what} | {one.package or 'fullshard'} | {one.baseline} |"


def _known_columns() -> Iterator[str]:
    """Yield the section with the columns that are chosen by name."""
    yield COLUMNS_HEAD
    yield "| `data.source_column` | `data.target_column` |\n|---|---|"
    for sources, target in KNOWN_SHAPES:
        yield f"| {' and '.join(f'`{name}`' for name in sources)} | `{target}` |"


def command_line_page() -> str:
    """Return the page with the help of every verb."""
    text = "# Command line\n\n```bash\nfullshard --help\n```\n\nThe first one lists the exit codes.\n"
    for verb in VERBS:
        text += f"\n## `{f'fullshard {verb}'.strip()}`\n\n```text\n{_help(verb)}```\n"
    return text


FILES_HEAD = """\
# Files

```bash
ls src/fullshard
```

What each file of the source is for, by its own first sentence. How the rooms depend on each other:
[Architecture](../concepts/architecture.md).
"""


def files_page() -> str:
    """Return the page with every source file, wing by wing, and the first sentence of its docstring."""
    root = Path(fullshard.__file__).parent
    wings = ("core", "state", "planner", "program", "compat")
    lines = [FILES_HEAD]
    for wing in (*wings, "."):
        lines.append(f"\n## {'beside the wings' if wing == '.' else wing}\n")
        for path in sorted((root / wing).glob("*.py" if wing == "." else "**/*.py")):
            doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            if path.name != "__init__.py":
                first = re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()))[0].rstrip(".")
                lines.append(f"- `{path.relative_to(root)}`: {_markdown(first).strip()}")
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """Return the page with every public name."""
    text = (
        "# Python API\n\n```python\nimport fullshard\nfrom fullshard import optim\n```\n\n"
        "Every public name. How to use them: [The engine](../concepts/engine.md), "
        "[Loading and saving](../concepts/checkpoints.md),\n[Optimizers](../concepts/optimizers.md).\n"
    )
    for name, chosen in MODULES:
        module = importlib.import_module(name)
        text += f"\n## `{name}`\n"
        for key in chosen or _names(module):
            text += "".join(_entry(getattr(module, key), f"{name}.{key}"))
    return text


PAGES: dict[str, Callable[[], str]] = {
    "options.md": options_page,
    "command-line.md": command_line_page,
    "python.md": python_page,
    "files.md": files_page,
}


def _sections(model: type[BaseModel], prefix: str, more: str | None = "") -> Iterator[str]:
    """Yield the options of a section, then the sections in it; ``more`` is what its field says."""
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    yield f"## {title}\n\n{f'{_one_line(model.__doc__)} {_one_line(more)}'.strip()}\n"
    for name, field in model.model_fields.items():
        if _section_of(field) is None:
            key = f"{prefix}{field.alias or name}"
            facts = [_values(field.annotation), "required" if field.is_required() else f"default: {_default(field)}"]
            option = own_option(field)
            facts += [_RESUMING[option.resume]] if option is not None and option.resume in _RESUMING else []
            yield f"### `{key}`\n\n{'; '.join(facts)}\n\n{_one_line(field.description or f'As data.{name}.')}\n"
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section is not None:
            named = "NAME." if get_origin(field.annotation) is Mapping else ""
            yield from _sections(section, f"{prefix}{field.alias or name}.{named}", field.description if named else "")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds; None for a plain option."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _values(annotation: Any) -> str:
    """Return a field's type in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join("null" if kind is type(None) else _values(kind) for kind in inner)
    if origin is Literal:
        return ", ".join(str(value) for value in inner)
    if origin is tuple:
        return f"list of: {_values(inner[0])}"
    if origin is dict:
        return "section"
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "true, false", "Path": "path"}
    return names.get(getattr(annotation, "__name__", ""), str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value == () or value == {}:
        return "none"
    return f'`"{value}"`' if value == "" else f"`{value}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _help(verb: str) -> str:
    """Return the help of a verb, 100 columns wide."""
    os.environ["COLUMNS"] = "100"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*verb.split(), "--help"])
    return output.getvalue()


def _names(module: types.ModuleType) -> list[str]:
    return sorted((name for name in module.__all__ if not name.startswith("__")), key=str.lower)


def _entry(thing: Any, name: str) -> Iterator[str]:
    """Yield the heading, signature and docstring of a name, and of a class its public methods."""
    yield f"\n### `{name}`\n\n"
    if isinstance(thing, type) and issubclass(thing, Enum):
        yield "```python\n" + "".join(
            f"{thing.__name__}.{key} = {item.value!r}\n" for key, item in thing.__members__.items()
        )
        yield "```\n\n"
    elif callable(thing):
        yield f"```python\n{_signature(thing, name.rpartition('.')[2])}\n```\n\n"
    yield _markdown(inspect.getdoc(thing))
    if not inspect.isclass(thing):
        return
    for key, member in vars(thing).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        # Torch adds an inherited ``step`` to a class when its first optimizer is made.
        own = inspect.isfunction(function) and inspect.unwrap(function).__qualname__.startswith(f"{thing.__name__}.")
        if not key.startswith("_") and own and function.__doc__:
            call = key if isinstance(member, property) else _signature(function, key)
            yield f"\n#### `{thing.__name__}.{key}`\n\n```python\n{call}\n```\n\n{_markdown(inspect.getdoc(function))}"


def _signature(thing: Any, name: str) -> str:
    """Return the call as it is written, one argument on each line where it is long."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return name
    parts = [
        re.sub(r"^(\*{0,2}\w+): '(.*?)'(?= = |$)", r"\1: \2", str(part))
        for part in signature.parameters.values()
        if part.name != "self"
    ]
    kinds = [part.kind for part in signature.parameters.values() if part.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty or inspect.isclass(thing) else f" -> {returns}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"
    line = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", line)
    return re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", line)


def _markdown(doc: str | None) -> str:
    """Return a docstring in Google's format as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc or "").replace("``", "`")
    text = re.sub(r"(?m)^(Example)s?:$", r"\1::", text)
    text = re.sub(r"(?m)^(.*?) ?::\n\n?((?:    .*\n?|\n)+)", _code_block, text)
    text = re.sub(r"(?m)^(Args|Attributes|Raises):\n((?:    .*\n?|\n)+)", _item_list, text)
    text = re.sub(
        r"(?m)^(Returns|Yields):\n((?:    .*\n?|\n)+)", lambda m: f"**{m[1]}**: {dedent(m[2]).strip()}\n\n", text
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _code_block(found: re.Match[str]) -> str:
    title = f"**{found[1]}**" if found[1] == "Example" else found[1]
    return f"{title}\n\n```python\n{dedent(found[2]).strip()}\n```\n\n"


def _item_list(found: re.Match[str]) -> str:
    items = re.sub(r"(?m)^(\*{0,2}[\w.]+)(?: \([^)]*\))?: ", r"- `\1`: ", dedent(found[2]).strip())
    return f"**{found[1]}**\n\n" + re.sub(r"(?m)^    ", "  ", items) + "\n\n"


def stale_pages() -> list[str]:
    """Return the names of pages that are not what the code would make."""
    files = {name: REFERENCE / name for name in PAGES}
    return [
        name for name, make in PAGES.items() if not files[name].exists() or files[name].read_text("utf-8") != make()
    ]


def run() -> int:
    """Write the pages, or with ``--check`` compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if a page is stale")
    if parser.parse_args().check:
        stale = stale_pages()
        print("".join(f"docs/reference/{name} is stale: python docs/generate.py\n" for name in stale), end="")
        return 1 if stale else 0
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run())
