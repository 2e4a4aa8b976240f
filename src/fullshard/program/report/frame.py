"""The frame of a page: head, sections with charts, and plotly, in a single file that needs no network."""

from __future__ import annotations

import base64
import importlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.program.report.figures import Figure
from fullshard.sizes import format_bytes
from fullshard.version import __version__

STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))

# Makes the browser block all network requests of the page.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class PageSection:
    """One section of the page."""

    name: str  # HTML id
    title: str  # heading
    body: str  # HTML
    figures: tuple[Figure, ...] = ()  # the charts with a placeholder in ``body``


def frame(title: str, heading: str, lead: str, sections: Sequence[PageSection]) -> str:
    """Return a page as HTML.

    Args:
        title: Title of the browser's window, as text.
        heading: As text.
        lead: The line below the heading, as HTML.
        sections: In order of appearance.

    Raises:
        ConfigError: plotly is missing.
    """
    drawn = {figure.name: list(figure.choices.values()) for section in sections for figure in section.figures}
    # Escaped, because a "<" in the data could end the script element.
    values = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    links = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    body = "".join(
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>{section.body}</section>' for section in sections
    )
    library = _plotly()
    size = len(library) + len(values) + len(body)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>"
        f'<header><h1>{escape(heading)}</h1><p class="lead">{lead}</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        "<main><noscript><p>The charts need JavaScript; the tables do not.</p></noscript>"
        '<p id="old" hidden>The charts need a browser of 2023 or newer; the tables do not.</p>'
        f"{body}</main><footer>Written by fullshard {escape(__version__)}. This file is self-contained and makes no "
        f"network requests. Its size is about {format_bytes(size)}, mostly plotly.js, compressed.</footer>"
        f'<script type="application/json" id="figures">{values}</script>'
        f'<script type="text/plain" id="plotly">{library}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _plotly() -> str:
    """Return the source of plotly.js, which is part of the package: compressed, in base64. It is 4.8 MB, so 2.0."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise ConfigError("The report draws its charts with plotly: pip install plotly.") from error
    return base64.b64encode(zlib.compress(offline.get_plotlyjs().encode(), 9)).decode()


def placeholders(drawn: Sequence[Figure]) -> str:
    """Return the elements in which the script draws the charts."""
    places = []
    for figure in drawn:
        chooser = ""
        if len(figure.choices) > 1:
            options = "".join(f"<option>{escape(label)}</option>" for label in figure.choices)
            label = f"{figure.title}: rank"
            chooser = f'<select data-figure="{figure.name}" aria-label="{escape(label)}">{options}</select>'
        places.append(
            f'<figure{" class=wide" if figure.wide else ""}><div class="head"><h3>{escape(figure.title)}</h3>{chooser}'
            f'</div><div id="{figure.name}" role="img" aria-label="{escape(figure.title)}" '
            f'style="height:{figure.height}px"></div><figcaption>{escape(figure.text)}</figcaption></figure>'
        )
    return f'<div class="charts">{"".join(places)}</div>'
