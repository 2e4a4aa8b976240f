"""The HTML of a page: tables, tiles and notes, in which all data is escaped, and the frame with plotly."""

from __future__ import annotations

import base64
import importlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.program.metrics import Confusion, format_metric
from fullshard.program.report.figures import MEMORY_PARTS, WAITS, Figure, number, share
from fullshard.program.report.files import Record
from fullshard.program.train.reporting.reports import RankTrace, spread
from fullshard.sizes import format_bytes, format_duration
from fullshard.version import __version__

SHOWN_PREDICTIONS = 20
SHOWN_MISTAKES = 15
MOST_TEXT = 1_500
"""Maximum characters shown of a prediction's texts."""


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 1) -> str:
    """Return a table whose first column holds row headings; columns from ``numbers_from`` on hold numbers."""
    classes = [' class="number"' if place >= numbers_from else "" for place in range(len(head))]
    titles = "".join(f'<th scope="col"{of}>{escape(name)}</th>' for of, name in zip(classes, head, strict=True))
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td{of}>{escape(str(cell))}</td>" for of, cell in zip(classes[1:], rest, strict=True))
        lines.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Return tiles with the name, value and remark of each fact."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in facts
    )
    return f'<dl class="tiles">{cells}</dl>'


def note(text: str) -> str:
    """Return a note in small print."""
    return f'<p class="note">{escape(text)}</p>'


def resting(rank: RankTrace) -> Record:
    """Return a rank's memory at the end of the recorded step, after temporary tensors were freed."""
    last = {part: getattr(rank.memory, part)[-1] for part in ("parameters", "gradients", "optimizer")}
    return {"rank": rank.rank, **last, "peak": rank.peak_bytes}


def memory_table(ranks: Sequence[Mapping[str, int]], planned: Mapping[int, Mapping[str, int]]) -> str:
    """Return a table of each rank's memory, next to its planned peak if there is a plan, each with the same contents.

    ``planned`` has the bytes of ``peak``, and of ``copies`` for checkpoints and snapshots where the measured tensors
    include them.
    """
    columns = {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "gathered_peak": "gathered, peak",
        "gradient_buffer_peak": "gradient buffers, peak",
        "peak": "all tensors, peak of a step",
        "reserved": "reserved by the allocator",
    }
    there = {key: title for key, title in columns.items() if any(key in rank for rank in ranks)}
    if not any(rank.get("reserved") for rank in ranks):
        there.pop("reserved", None)
    rows = [[f"rank {rank['rank']}", *(format_bytes(rank.get(key, 0)) for key in there)] for rank in ranks]
    if planned:
        copies = any(one.get("copies") for one in planned.values())
        there["planned"] = f"planned for the largest batch{', with all copies for restarts and saving' * copies}"
        for row, rank in zip(rows, ranks, strict=True):
            of_rank = planned.get(rank["rank"])
            row.append("none" if of_rank is None else format_bytes(of_rank["peak"] + of_rank.get("copies", 0)))
    return table("Tensor memory of each rank", ["", *there.values()], rows)


def timeline_table(ranks: Sequence[RankTrace]) -> str:
    """Return a table of each rank's memory by part at its peak."""
    rows = []
    for rank in ranks:
        columns = {part: getattr(rank.memory, part) for part in MEMORY_PARTS}
        totals = [sum(values) for values in zip(*columns.values(), strict=True)]
        top = totals.index(max(totals))
        parts = [format_bytes(columns[part][top]) for part in MEMORY_PARTS]
        rows.append([f"rank {rank.rank}", format_duration(rank.memory.seconds[top]), *parts, format_bytes(totals[top])])
    head = ["", "at", *MEMORY_PARTS, "total"]
    return table("Memory at the peak of the recorded step", head, rows)


def schedule_table(ranks: Sequence[RankTrace], root: str) -> str:
    """Return a table of each rank's time in the recorded step."""
    rows = []
    for rank in ranks:
        sums = {kind: spent(rank, kind) for kind in (*WAITS, "optimizer")}
        passes = [sum(e.end_s - e.start_s for e in rank.events if (e.unit, e.kind) == (root, kind)) for kind in _PASSES]
        waited = sum(sums[kind] for kind in WAITS)
        seconds = [rank.seconds, *passes, *sums.values()]
        rows.append([f"rank {rank.rank}", *(number(value * 1e3) for value in seconds), share(waited / rank.seconds)])
    head = ["", "step, ms", "forward, ms", "backward, ms", *(f"{label}, ms" for label in WAITS.values())]
    caption = "Time of the recorded step; forward and backward include the waiting in them"
    return table(caption, [*head, "optimizer, ms", "waiting"], rows)


_PASSES = ("forward", "backward")


def spent(rank: RankTrace, kind: str) -> float:
    """Return the total seconds of all events of a kind."""
    return sum(event.end_s - event.start_s for event in rank.events if event.kind == kind)


def prediction_table(predictions: Sequence[Record], *, compared: bool) -> str:
    """Return a table of predictions and references; with ``compared``, marked, and those that equal none first."""
    wrong = [one for one in predictions if compared and not _equals_a_reference(one)]
    chosen, rows = spread(wrong, SHOWN_PREDICTIONS), []
    errors = len(chosen)
    if errors < SHOWN_PREDICTIONS:
        kept = set(map(id, wrong))
        chosen += spread([one for one in predictions if id(one) not in kept], SHOWN_PREDICTIONS - errors)
    for place, one in enumerate(chosen):
        references = [str(text) for text in one.get("references", ())]
        texts = [_text(one.get("input", "")), _text(one.get("prediction", "")), "".join(map(_text, references))]
        cells = "".join(f"<td>{text}</td>" for text in texts)
        if compared:
            cells += '<td class="differs">differs</td>' if place < errors else '<td class="same">equal</td>'
        rows.append(f"<tr>{cells}</tr>")
    names = ("input", "prediction", "references", *(("compared",) if compared else ()))
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    caption = f"{len(chosen):,} of {len(predictions):,} predictions on held-out rows, evenly spaced"
    if compared:
        caption += f"; {errors:,} of the {len(wrong):,} that differ first"
    return (
        f'<div class="scroll"><table class="texts"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _equals_a_reference(one: Record) -> bool:
    written = " ".join(str(one.get("prediction", "")).split())
    return written in {" ".join(str(text).split()) for text in one.get("references", ())}


def _text(value: object) -> str:
    text = str(value)
    cut = f"{text[:MOST_TEXT]}… ({len(text):,} characters)" if len(text) > MOST_TEXT else text
    return f'<div class="text">{escape(cut) or "<i>empty</i>"}</div>'


def row_table(rows: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return a table of training rows as the model sees them, with a line for each masked, read or learned part."""
    bodies = []
    for row in rows:
        # A line break is often all that separates two turns, so it must be visible.
        parts = ((escape(name), escape(text.replace("\n", "↵\n"))) for name, text in row)
        lines = (
            f'<tr class="{name}"><th scope="row">{name}</th><td><div class="text">{text}</div></td></tr>'
            for name, text in parts
        )
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    learned = "source is read by the encoder, target is learned"
    if any(name != "source" for row in rows for name, _ in row[:1]):
        learned = "masked and prompt are only read, target is learned"
    caption = f"Training rows as the model sees them, {len(rows)} evenly spaced: {learned}"
    return f'<div class="scroll"><table class="seen"><caption>{caption}</caption>{"".join(bodies)}</table></div>'


def mistake_table(confusion: Confusion) -> str:
    """Return a table of the most frequent mistakes."""
    found = confusion.mistakes()
    caption = f"Most frequent mistakes, {min(SHOWN_MISTAKES, len(found))} of {len(found):,} kinds"
    return table(caption, ["correct label", "predicted", "rows"], found[:SHOWN_MISTAKES], numbers_from=2)


def set_table(sets: Sequence[Record], best: Record | None) -> str:
    """Return a table of the sets of a mixture, with the metrics of the best model on each."""
    scores = (best or {}).get("sets", {})
    metrics = list(dict.fromkeys(name for one in scores.values() for name in one["metrics"]))
    rows = []
    for one in sets:
        found = scores.get(one["name"], {"metrics": {}})
        shown = [format_metric(name, found["metrics"][name]) if name in found["metrics"] else "" for name in metrics]
        loss = f"{found['loss']:.4f}" if "loss" in found else ""
        weight = "none" if one["weight"] is None else f"{one['weight']:g}"
        counts = [f"{one[key]:,}" for key in ("train_rows", "epoch_rows", "validation_rows")]
        rows.append([one["name"], weight, *counts, one["content"][:8], loss, *shown])
    head = ["", "weight", "training rows", "rows of an epoch", "held-out rows", "hash", "held-out loss", *metrics]
    return table("Sets of the mixture", head, rows)


def settings_table(caption: str, values: Mapping[str, Any]) -> str:
    """Return a table of settings by dotted key, one per line."""
    rows = [(key, "not set" if value is None else str(value)) for key, value in values.items()]
    return table(caption, ["setting", "value"], rows, numbers_from=2)


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
    """Return a page as HTML; ``lead``, the line below the heading, is HTML, title and heading are text.

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
