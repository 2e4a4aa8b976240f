"""Pages from their templates: one file each, with style, script and plotly in it. All values are escaped."""

from __future__ import annotations

import base64
import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fullshard.errors import ConfigError
from fullshard.program.metrics import format_metric
from fullshard.program.report.figures import Figure, number, share
from fullshard.sizes import format_bytes, format_duration
from fullshard.version import __version__

MOST_TEXT = 1_500
"""Maximum characters shown of a prediction's texts."""

_TEMPLATES = Path(__file__).with_name("templates")
STYLE, SCRIPT = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))


def render(template: str, name: str, drawn: Mapping[str, Sequence[Figure]], **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: Name of its template.
        name: Its heading.
        drawn: The charts of each section.
        values: What else the template shows.

    Raises:
        ConfigError: plotly is missing.
    """
    charts = {figure.name: list(figure.choices.values()) for figures in drawn.values() for figure in figures}
    frame = {"style": STYLE, "script": SCRIPT, "plotly": _plotly(), "version": __version__}
    return _environment().get_template(template).render(name=name, drawn=drawn, charts=charts, **frame, **values)


def _environment() -> Environment:
    loader = FileSystemLoader(_TEMPLATES)
    found = Environment(
        autoescape=True, loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    known: dict[str, Callable[..., str]] = {
        "bytes": format_bytes,
        "count": "{:,}".format,
        "cut": _cut,
        "duration": format_duration,
        "metric": lambda value, metric: format_metric(metric, value),
        "number": number,
        "share": share,
    }
    found.filters |= {name: _of_known(form) for name, form in known.items()}
    return found


def _of_known(form: Callable[..., str]) -> Callable[..., str | None]:
    """Return a filter that passes None on: a tile of None is left out."""
    return lambda value, *more: None if value is None else form(value, *more)


def _cut(text: str) -> str:
    return f"{text[:MOST_TEXT]}… ({len(text):,} characters)" if len(text) > MOST_TEXT else text


def _plotly() -> str:
    """Return the source of plotly.js, which is part of the package: compressed, in base64. It is 4.8 MB, so 2.0."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise ConfigError("The report draws its charts with plotly: pip install plotly.") from error
    return base64.b64encode(zlib.compress(offline.get_plotlyjs().encode(), 9)).decode()
