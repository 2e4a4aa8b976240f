"""The reference page of run-file options, made from the schema; ``python docs/generate.py`` writes it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fullshard.config.schema import RunConfig

_HEAD = """\
# Options of the run file

```bash
fullshard train run.yaml training.learning_rate=1e-4
```

Every option, its values and its default. On the command line an option is `section.key=value`, the value in YAML.
Text with a colon or braces needs YAML's quotes inside the shell's: `'data.source_prefix="summarize: "'`.
"""


def options_page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *_sections(RunConfig, "")]).rstrip() + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the options of a section, then the sections in it."""
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    yield f"## {title}\n\n{_one_line(model.__doc__)}\n"
    for name, field in model.model_fields.items():
        if _section_of(field) is None:
            key = f"{prefix}{field.alias or name}"
            default = "required" if field.is_required() else f"default: {_default(field)}"
            yield f"### `{key}`\n\n{_values(field.annotation)}; {default}\n\n{_one_line(field.description)}\n"
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section is not None:
            yield from _sections(section, f"{prefix}{field.alias or name}.")


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
