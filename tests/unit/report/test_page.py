"""The report: whole in itself, true to the run's files, and never undone by what is in them."""

import argparse
import base64
import json
import re
import zlib
from html.parser import HTMLParser

import pytest

from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.cli import report as verb
from fullshard.program.config import RunConfig
from fullshard.program.report import figures, render, write_report
from fullshard.program.report.figures import MOST_POINTS, memory_unit, number, share, shown, smooth
from fullshard.program.report.files import read_run
from fullshard.program.report.page import MOST_RANKS, headline, make_page
from fullshard.program.report.render import STYLE
from fullshard.sizes import format_duration
from support.report_run import NASTY, RUN, UNITS, make_trace, write_finished, write_small, write_unfinished
from support.tiny_run import settings

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, the text of elements by tag, and whether all elements are closed in order."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.open, self.badly_nested = [], [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.badly_nested.append(tag)

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self):
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))

    def figures(self):
        return json.loads(next(d for t, d in self.texts if t == "script" and d.startswith('{"')))


@pytest.fixture(autouse=True)
def _no_library(request, monkeypatch):
    """plotly.js is 5 MB: only the tests about it parse a page that has it."""
    if not request.function.__name__.endswith(("megabytes", "names_the_package")):
        monkeypatch.setattr(render, "_plotly", lambda: "/* plotly.js */")


@pytest.fixture
def finished(tmp_path):
    write_finished(tmp_path / "run")
    return tmp_path / "run"


def made(directory):
    return Page(make_page(read_run(directory)))


def test_nothing_is_loaded_from_anywhere(finished):
    loading = {"src", "srcset", "data", "poster", "action", "xlink:href"}
    found = made(finished)
    for tag, attributes in found.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert not loading & attributes.keys(), (tag, attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(", STYLE)
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_what_comes_from_data_is_escaped(finished):
    source = make_page(read_run(finished))
    assert "alert('x')" not in source.replace("&#x27;", "'").replace("&lt;", "<").split("<script")[0].split("<body")[0]
    found = Page(source)
    assert [a for t, a in found.tags if t == "script"] == [
        {"type": "application/json", "id": "figures"},
        {"type": "text/plain", "id": "plotly"},
        {},
    ]
    assert not [a for _, a in found.tags if "onerror" in a]
    assert NASTY in found.text()
    assert "<script" not in json.dumps(found.figures())


def test_no_text_of_a_chart_ends_its_script(finished, monkeypatch):
    monkeypatch.setattr(figures, "safe", str)
    found = made(finished)
    assert NASTY in json.dumps(found.figures())
    assert sum(tag == "script" for tag, _ in found.tags) == 3


def test_elements_are_closed_in_order(finished):
    found = made(finished)
    assert found.badly_nested == []
    assert found.open == []


def test_the_headline_is_the_summarys(finished):
    assert headline(read_run(finished)) == {
        "finished": True,
        "metric": "accuracy",
        "value": 0.75,
        "baseline": 0.125,
        "baseline_name": f"always {NASTY!r}",
        "held_out_loss": 1.25,
        "best_step": 40,
        "steps": 40,
        "total_steps": 40,
        "train_loss": 1.125,
        "tokens_per_second": 2_003.4,
        "train_seconds": 83.0,
        "peak_bytes": 61 << 20,
        "padding_share": 0.0825,
    }
    text = made(finished).text()
    assert "8-bit AdamW" in text
    assert f"bf16 ({NASTY} computes it in hardware)" in text
    for part in ("75.00%", "12.50%", "1 min 23 s", "61.0 MiB", "8.2%", "1,234,567", "perplexity", "2.13.0", "not set"):
        assert part in text, part


def test_every_chart_has_its_place_a_heading_and_words(finished):
    found = made(finished)
    drawn = set(found.figures())
    assert drawn == {
        *("loss", "metric-metrics", "metric-perplexity", "learning_rate", "grad_norm", "tokens_per_second"),
        *("memory-rest", "memory-step", "schedule", "confusion"),
    }
    places = {a["id"]: a for t, a in found.tags if t == "div" and a.get("role") == "img"}
    assert set(places) == drawn
    assert all(place["aria-label"] for place in places.values())
    words = [data for tag, data in found.texts if tag == "figcaption"]
    assert len(words) == len(drawn)
    assert any("4.1" in text or "lowest" in text for text in words)
    tables = [t for t, _ in found.tags if t in ("table", "caption")]
    assert tables == ["table", "caption"] * (len(tables) // 2)
    assert {a["scope"] for t, a in found.tags if t == "th"} == {"col", "row"}


def test_every_colour_of_a_chart_is_one_of_the_page_in_light_and_dark(finished):
    used = set(re.findall(r"var\((--[\w-]+)\)", json.dumps(made(finished).figures()))) | {"--text", "--soft"}
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    for colour in used:
        assert f"{colour}:" in light, colour
        assert f"{colour}:" in dark.split("}\n}")[0], colour


def test_plotly_takes_every_chart(finished):
    graph_objects = pytest.importorskip("plotly.graph_objects")

    def painted(value):
        if isinstance(value, str):
            return "#123456" if value.startswith("var(--") else value
        if isinstance(value, list):
            return [painted(one) for one in value]
        return {k: painted(v) for k, v in value.items()} if isinstance(value, dict) else value

    for choices in made(finished).figures().values():
        for choice in choices:
            graph_objects.Figure(painted(choice))


def test_the_schedule_marks_the_time_that_was_waited(finished):
    (first, second) = made(finished).figures()["schedule"]
    bars = {bar["name"]: bar for bar in second["data"]}
    assert set(bars) == {"forward", "backward", "optimizer step", "gather", "reduce", "waiting"}
    waiting = bars["waiting"]
    assert waiting["marker"]["color"] == "var(--signal)"
    # Once in the unit's row and once in the row of all waiting.
    assert sum(waiting["x"]) == pytest.approx(2 * 2 * (30 + 10))
    assert first["layout"]["yaxis"]["ticktext"] == ["waiting, all units", *UNITS, "optimizer"]


def test_the_timeline_adds_up_to_the_peak(finished):
    for choice in made(finished).figures()["memory-step"]:
        assert sum(trace["y"][1] for trace in choice["data"]) == 61
        assert {trace["stackgroup"] for trace in choice["data"]} == {"memory"}


def test_the_planned_peak_is_beside_the_measured_one(finished, tmp_path):
    assert "planned for the largest batch" not in made(finished).text()
    write_finished(tmp_path)
    plan = {"memory": [{"rank": 0, "peak": 63 << 20, "copies": 2 << 20}, {"rank": 1, "peak": 63 << 20}]}
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "plan": plan}))
    found = made(tmp_path).text()
    assert "planned for the largest batch" in found
    assert "with the copies of a save" in found
    assert "63.0 MiB" in found
    assert "65.0 MiB" in found


def test_the_settings_that_differ_come_first_and_all_are_folded(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, training__learning_rate=3e-3, model={"path": "my-t5"}))
    write_finished(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "config": config.as_plain()}))
    source = make_page(read_run(tmp_path))
    shown, folded = source.split("All ")[0], source.split("<summary>All ")[1]
    assert "training.learning_rate" in shown
    assert "training.weight_decay" not in shown
    assert "training.weight_decay" in folded
    assert int(folded.split()[0]) >= len(config.as_flat())


def test_of_many_ranks_the_slowest_and_the_fullest_are_there(tmp_path):
    write_finished(tmp_path)
    values = make_trace(ranks=40).as_dict()
    values["ranks"][23]["seconds"] = 9.0
    values["ranks"][31]["peak_bytes"] = 99 << 20
    (tmp_path / "trace.json").write_text(json.dumps(values))
    found = made(tmp_path)
    labels = [data for tag, data in found.texts if tag == "option"]
    assert len(labels) == 2 * MOST_RANKS
    assert {"rank 0", "rank 23", "rank 31"} <= set(labels)
    assert "8 of 40 ranks" in found.text()


def test_a_run_of_which_there_are_only_metrics_has_a_page(tmp_path):
    write_unfinished(tmp_path, steps=17)
    found = made(tmp_path)
    assert set(found.figures()) == {"loss", "learning_rate", "grad_norm", "tokens_per_second"}
    text = found.text()
    assert "last recorded step 17." in text
    for name in ("trace.json", "run.json", "predictions.jsonl"):
        assert f"There is no {name}." in text
    numbers = headline(read_run(tmp_path))
    assert (numbers["finished"], numbers["steps"], numbers["value"]) == (False, 17, None)
    assert numbers["tokens_per_second"] == 2_000


def test_a_run_before_its_first_step_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No step has been recorded yet." in made(tmp_path).text()


def test_losses_name_the_steps_they_are_of(tmp_path):
    write_finished(tmp_path)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best_step": 30}))
    text = made(tmp_path).text()
    assert "per target token, last step (40)" in text
    assert "per target token, step 30" in text


def test_a_run_under_way_shows_its_best_evaluation(tmp_path):
    write_finished(tmp_path)
    (tmp_path / "summary.json").unlink()
    numbers = headline(read_run(tmp_path))
    assert (numbers["finished"], numbers["value"], numbers["best_step"]) == (False, 0.75, 40)
    assert numbers["peak_bytes"] == 61 << 20  # of the recorded step
    assert "not finished" in made(tmp_path).text()


@pytest.mark.parametrize("name", ["run.json", "summary.json", "trace.json"])
def test_a_damaged_file_is_said_and_the_rest_is_shown(finished, name):
    (finished / name).write_text('{"ranks": 3')
    files = read_run(finished)
    assert name in files.missing[name]
    assert "is not in the format of a run" in files.missing[name]
    assert "loss" in made(finished).figures()


def test_numbers_that_are_none_are_left_out(tmp_path):
    write_unfinished(tmp_path, steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\n{"kind": "step", "step": 4, "loss": NaN, "grad_norm": Infinity, "learning_rate": 1e-3}\n')
    drawn = made(tmp_path).figures()
    assert drawn["loss"][0]["data"][0]["x"] == [1, 2, 3]
    assert drawn["learning_rate"][0]["data"][0]["x"] == [1, 2, 3, 4]


def test_without_a_run_it_says_what_to_name(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape("has no metrics.jsonl, which every run writes")):
        write_report(tmp_path / "nothing")


def test_a_long_run_is_a_short_page_and_says_so(tmp_path):
    steps = 30_000
    line = '{"kind": "step", "step": %d, "loss": %s, "grad_norm": 1.5, "tokens_per_second": 100.5}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(line % (n, 99 if n == 777 else 2) for n in range(1, steps + 1)))
    found = made(tmp_path)
    (chart,) = found.figures()["loss"]
    raw = chart["data"][0]
    assert len(raw["x"]) <= MOST_POINTS
    assert (raw["x"][0], raw["x"][-1], max(raw["y"])) == (1, steps, 99)
    assert "30,000 recorded steps are drawn with 1,500 points" in found.text()
    assert len(json.dumps(found.figures())) < 400_000


def test_smoothing_keeps_a_constant_and_lags_nothing_at_the_start():
    assert smooth(([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])) == (([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]), 1)
    (_, values), over = smooth(([float(x) for x in range(300)], [2.0] * 300))
    assert over == 10
    assert values == pytest.approx([2.0] * 300)


def test_the_page_holds_plotly_once_and_is_a_few_megabytes(finished, tmp_path):
    pytest.importorskip("plotly")
    written = write_report(finished, tmp_path / "mine.html")
    source = (tmp_path / "mine.html").read_text()
    assert written["bytes"] == len(source.encode()) < 2_300_000
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', source).group(1)
    assert "plotly.js v" in zlib.decompress(base64.b64decode(packed)).decode()[:200]
    assert source.count("</script>") == 3
    assert re.search(r"about \d\.\d MiB", source)


def test_without_plotly_it_names_the_package(finished, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(render.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install plotly"):
        write_report(finished)


def test_the_verb_prints_the_page_and_its_headline(finished, capsys):
    parser = page_parser()
    verb.run(parser.parse_args([str(finished), "--json"]))
    values = json.loads(capsys.readouterr().out)
    assert values["report"] == str(finished / "report.html")
    assert (values["metric"], values["value"]) == ("accuracy", 0.75)
    verb.run(parser.parse_args([str(finished), "-o", str(finished / "other.html")]))
    assert capsys.readouterr().out.startswith(f"{finished / 'other.html'} (")
    assert (finished / "other.html").read_text().startswith("<!DOCTYPE html>")


def page_parser():
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser


def test_small_numbers_are_readable():
    assert [number(value) for value in (12_345.6, 12.34, 4.125, 0.05, 0.0, -0.0123)] == [
        "12,345.6", "12.3", "4.12", "0.05", "0", "-0.0123"
    ]  # fmt: skip
    assert [number(value, 4) for value in (1.125, 3.03e-4)] == ["1.1250", "0.000303"]
    assert [number(value, 0) for value in (12_345.6, 3.2)] == ["12,346", "3.2"]
    assert [format_duration(value) for value in (3_725, 83, 0.25, 0.002)] == [
        "1 h 02 min",
        "1 min 23 s",
        "0.2 s",
        "2 ms",
    ]
    assert [share(value) for value in (0.0825, 1e-4, 0)] == ["8.2%", "<0.1%", "0.0%"]
    assert [memory_unit([size])[0] for size in (1 << 19, 1 << 20, 0)] == ["KiB", "MiB", "KiB"]
    assert [memory_unit([size << 30])[0] for size in (9, 10)] == ["MiB", "GiB"]
    assert shown(1.00052) == 1.00052


def test_a_run_of_a_few_small_steps_says_its_numbers(tmp_path):
    write_small(tmp_path)
    found = made(tmp_path)
    for text in ("0.000303", "20 ms", "3.2", "61.0 KiB"):
        assert text in found.text(), text
    layouts = [one["layout"] for choices in found.figures().values() for one in choices]
    steps = [layout["xaxis"] for layout in layouts if layout["xaxis"]["title"]["text"] == "step"]
    assert len(steps) >= 6
    assert all(axis["dtick"] == 1 for axis in steps)
    assert {layout["xaxis"]["title"]["text"] for layout in layouts} >= {"KiB"}


def test_rows_are_shown_as_the_model_sees_them_and_not_twice(tmp_path):
    write_finished(tmp_path)
    started = json.loads((tmp_path / "run.json").read_text())
    started["shown_rows"] = [[["masked", f"a\nb{NASTY}"], ["target", "yes"], ["prompt", "c"], ["target", "no"]]]
    started["notes"].append("one training row as the model sees it (masked: read, not learned):\n  target | 'yes'")
    (tmp_path / "run.json").write_text(json.dumps(started))
    page = make_page(read_run(tmp_path))
    assert '<tr class="target"><th scope="row">target</th><td><div class="text">yes</div></td></tr>' in page
    assert "a↵\nb&lt;/script&gt;" in page
    assert NASTY not in page.partition("<main>")[2].partition("</main>")[0]
    assert "Training rows as the model sees them, 1 evenly spaced: masked and prompt are only read" in page
    assert "one training row as the model sees it" not in page


def test_predictions_that_differ_come_first_below_the_most_confused_labels(tmp_path):
    write_finished(tmp_path)
    rows = [
        {"input": f"row {n}", "prediction": "card", "references": ["rate" if n % 10 == 9 else "card"]}
        for n in range(50)
    ]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    page = make_page(read_run(tmp_path))
    table = page.partition('<table class="texts">')[2].partition("</table>")[0]
    marks = re.findall(r'class="(same|differs)"', table)
    assert marks == ["differs"] * 5 + ["same"] * (len(marks) - 5)
    assert re.findall(r"row \d+", table)[:5] == ["row 9", "row 19", "row 29", "row 39", "row 49"]
    assert "5 of the 5 that differ first" in table
    assert page.index("Most frequent mistakes") < page.index('<table class="texts">')
