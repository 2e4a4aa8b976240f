"""The page of a plan: its charts hold the plan's figures, and it asks nobody for anything."""

import contextlib
import io
import json
import re

import pytest

from fullshard.program.cli.main import main
from fullshard.program.report import render
from support.planned import write_run
from support.tiny_run import QUICK


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The plan as JSON, the charts of its page and the page."""
    directory = tmp_path_factory.mktemp("page")
    target = directory / "plan.html"
    command = ["plan", str(write_run(directory, **QUICK)), "--world", "2", "--gpu", "t4", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "_plotly", lambda: "/* plotly.js */")
        patch.setattr("fullshard.program.cli.plan.DRAWN_WORLDS", (1, 4096))
        plain = printed(command)
        assert printed([*command, "--html", str(target)]) == plain
    text = target.read_text()
    charts = json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])
    return plain, charts, text


def printed(command):
    """The object that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(command) == 0
    return json.loads(out.getvalue())


def test_the_charts_hold_the_figures_of_the_plan(page):
    plan, charts, text = page
    assert "fp32 (t4 has no bfloat16 arithmetic; matrix products in TF32)" in text
    assert set(charts) == {"memory", "schedule", "memory-ranks", "time-ranks"}
    areas = charts["memory"][0]["data"]
    places = areas[0]["x"]
    assert len(set(places)) == len(places) <= 600
    peak = max(map(sum, zip(*(area["y"] for area in areas), strict=True)))
    assert peak * 1024 == pytest.approx(plan["peak_bytes"], rel=1e-5)
    names = {bar["name"] for bar in charts["schedule"][0]["data"]}
    assert names == {"forward", "backward", "gather", "reduce", "optimizer step"}
    by_ranks = {line["name"]: line for line in charts["memory-ranks"][0]["data"]}
    assert by_ranks["needed"]["x"] == [1, 4096]
    assert charts["memory-ranks"][0]["layout"]["xaxis"]["type"] == "log"
    limit = by_ranks["memory of the device"]["y"]
    assert limit == [pytest.approx(plan["memory_bytes"] / 2**30)] * 2
    assert '<span class="state">fits</span>: rank' in text


def test_the_page_needs_no_other_file(page):
    text = page[2]
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]* (src|href)=", text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world", "1,2"], "--html draws one plan"),
        (["--gpu", "t4", "--fit"], "--html draws one plan"),
        (["--html", "."], "is a directory; name a file, such as plan.html"),
    ],
)
def test_a_page_that_cannot_be_written(options, said, tmp_path, capsys):
    assert main(["plan", str(write_run(tmp_path)), "--html", "plan.html", *options]) == 2
    assert said in capsys.readouterr().err
