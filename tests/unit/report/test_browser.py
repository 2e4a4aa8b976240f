"""The page in a real browser: every chart is drawn, in light and dark, without an error or a request."""

import json
import re
import shutil
import subprocess

import pytest

from fullshard.program.report import write_report
from fullshard.program.train.reporting.reports import StepTrace
from support.report_run import UNITS, rank_trace, write_finished, write_small

pytestmark = pytest.mark.slow

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DARK, LIGHT = 0, 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("no Chromium here")
    pytest.importorskip("plotly")
    directory = tmp_path_factory.mktemp("run")
    write_finished(directory)
    write_report(directory)
    return directory


def browse(run, scheme, *options):
    """What Chromium prints."""
    command = [
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
        *(f"--user-data-dir={run / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"),
        *("--window-size=1280,5000", "--virtual-time-budget=5000", *options, f"file://{run / 'report.html'}"),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_chart_is_drawn_without_an_error(run, scheme):
    done = browse(run, scheme, "--dump-dom")
    assert 'data-drawn="10"' in done.stdout
    assert len(re.findall(r'class="main-svg"', done.stdout)) >= 10
    assert "CONSOLE" not in done.stderr, done.stderr
    text_colour = "rgb(29, 33, 38)" if scheme == LIGHT else "rgb(231, 234, 237)"
    assert f"fill: {text_colour}" in done.stdout


def test_light_and_dark_look_different(run):
    pictures = []
    for scheme, name in ((LIGHT, "light"), (DARK, "dark")):
        browse(run, scheme, f"--screenshot={run / name}.png")
        pictures.append((run / f"{name}.png").read_bytes())
    assert all(len(picture) > 50_000 for picture in pictures)
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize("write", [write_finished, write_small])
def test_the_ticks_of_an_axis_are_told_apart(run, write, tmp_path):
    """Of three steps, a rate of 1e-5, a share of 0.1 % or 30 KiB, some were all labelled 0 or 1."""
    write(tmp_path)
    write_report(tmp_path)
    drawn = browse(tmp_path, LIGHT, "--dump-dom").stdout
    axes = re.findall(r'<g class="([xy])axislayer-above">(.*?)</g></g>', drawn)
    assert len(axes) >= 16
    for axis, labels in ((axis, re.findall(r"<text[^>]*>(.*?)</text>", ticks)) for axis, ticks in axes):
        assert len(set(labels)) == len(labels) >= 2, (axis, labels)
    for labels in step_labels(drawn):
        assert labels
        assert all(label.replace(",", "").isdecimal() for label in labels), labels


def step_labels(drawn):
    """The labels of each axis of steps."""
    for chart in drawn.split('class="js-plotly-plot"')[1:]:
        if re.search(r'class="xtitle"[^>]*>step<', chart):
            yield re.findall(r'class="xtick"><text[^>]*>(.*?)</text>', chart)


MEASURE = """<script>
document.documentElement.dataset.cut = [...document.querySelectorAll(".scroll")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText.slice(0, 60)).join("; ");
</script>"""


def test_a_long_step_is_in_seconds_and_no_table_is_cut(run, tmp_path):
    """A step of 15 s had ticks such as 0.5e+4 milliseconds, and its table was wider than a window of 1280 pixels."""
    write_finished(tmp_path)
    trace = StepTrace(3, "cpu", UNITS, (rank_trace(0, seconds=15.25), rank_trace(1, seconds=15.25)))
    (tmp_path / "trace.json").write_text(json.dumps(trace.as_dict()))
    write_report(tmp_path)
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    drawn = browse(tmp_path, LIGHT, "--dump-dom").stdout
    assert re.search(r'data-cut="([^"]*)"', drawn).group(1) == ""
    assert "seconds from the start of the step" in drawn
    labels = re.findall(r'class="[xy]tick"><text[^>]*>(.*?)</text>', drawn)
    assert labels
    assert not [label for label in labels if "e+" in label]
