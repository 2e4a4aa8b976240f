"""The GPU command: it goes on where it stopped, keeps its budget, and its page says what has run."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.gpu import report
from benchmarks.gpu.record import Case, Lacking, Record, run_cases

ROOT = Path(__file__).parents[3]
DEVICE = {"name": "NVIDIA Z1", "torch": "2.11.0"}


class Clock:
    """Seconds that pass only in cases."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def stage(tmp_path):
    """Runs cases, each given as what it does, as a new process would; its calls, and the record of afterwards."""

    def run(works, *, budget_s=1000.0, again=False, takes_s=1.0, limit_s=500.0, dry=False):
        called, clock = [], Clock()

        def doing(name, work):
            def do(allowed):
                called.append((name, allowed))
                clock.now += takes_s
                return work()

            return do

        record = Record(tmp_path, "step", dry=dry, machine=DEVICE)
        cases = [Case(name, doing(name, work), limit_s) for name, work in works.items()]
        run_cases(record, cases, budget_s=budget_s, again=again, tell=lambda _text: None, clock=clock)
        return [name for name, _ in called], Record(tmp_path, "step", dry=dry, machine=DEVICE)

    return run


def raises(error):
    def work():
        raise error

    return work


def test_finished_cases_are_skipped_and_failed_ones_repeated_after_new_ones(stage):
    stage({"a": lambda: {"x": 1}, "b": raises(RuntimeError("out of memory")), "c": raises(Lacking("no peft"))})
    called, record = stage({name: lambda: {"x": 2} for name in "abcd"})
    assert called == ["d", "b"]
    assert record.cases["a"]["figures"] == {"x": 1}
    assert {name: case["status"] for name, case in record.cases.items()} == dict.fromkeys("abd", "done") | {
        "c": "skipped"
    }


def test_again_repeats_finished_cases(stage):
    stage({"a": lambda: {"x": 1}})
    called, record = stage({"a": lambda: {"x": 2}}, again=True)
    assert called == ["a"]
    assert record.cases["a"]["figures"] == {"x": 2}


def test_a_case_is_on_disk_before_the_next_starts(stage, tmp_path):
    seen = []
    stage({"a": lambda: {"x": 1}, "b": lambda: seen.append(json.loads((tmp_path / "step.json").read_text())) or {}})
    assert seen[0]["cases"]["a"]["figures"] == {"x": 1}


def test_the_budget_ends_a_stage_and_says_what_is_left(stage):
    called, record = stage(dict.fromkeys("abc", dict), budget_s=100.0, takes_s=45.0)
    assert called == ["a", "b"]
    assert record.data["left"] == []  # a new process has not left any yet
    assert json.loads(record.path.read_text())["left"] == ["c"]


def test_what_the_budget_interrupts_is_cut_and_what_outlasts_its_own_limit_has_failed(stage):
    late = raises(RuntimeError("did not finish in time"))
    _, record = stage({"a": late}, budget_s=100.0, takes_s=100.0)
    assert record.status("a") == "cut"
    _, record = stage({"b": late}, budget_s=1000.0, takes_s=100.0, limit_s=100.0)
    assert record.status("b") == "failed"


def test_missing_figures_make_a_case_fail_and_are_kept(stage):
    _, record = stage({"a": lambda: {"x": 1, "failed": "fsdp1: out of memory"}})
    assert (record.status("a"), record.cases["a"]["figures"]) == ("failed", {"x": 1})
    assert record.cases["a"]["why"] == "fsdp1: out of memory"


def test_what_a_rank_lacks_is_skipped(stage):
    _, record = stage({"a": raises(RuntimeError("rank 0: Lacking: nothing stages 2 ranks over a device"))})
    assert record.status("a") == "skipped"


def test_dry_figures_do_not_mix_with_others(stage, tmp_path):
    stage({"a": dict}, dry=True)
    with pytest.raises(SystemExit, match="dry run"):
        stage({"a": dict})
    with pytest.raises(SystemExit, match="dry run"):
        report.write(tmp_path, tmp_path / "results" / "gpu.json", tmp_path / "page.md")


def result(status, at, **figures):
    return {"status": status, "why": "", "at": at, "device": "NVIDIA Z1", "figures": figures}


def test_the_latest_result_counts_but_a_cut_or_skipped_one_hides_no_figures():
    old, new = result("done", "2026-01-01", x=1), result("done", "2026-01-02", x=2)
    assert report.merged({"a": old}, {"a": new}) == {"a": new}
    assert report.merged({"a": new}, {"a": old}) == {"a": new}
    assert report.merged({"a": old}, {"a": result("failed", "2026-01-02")})["a"]["status"] == "failed"
    for status in ("cut", "skipped"):
        assert report.merged({"a": old}, {"a": result(status, "2026-01-02")}) == {"a": old}


def test_the_report_writes_between_the_marks_only(tmp_path):
    folder, results, page = tmp_path / "runs", tmp_path / "gpu.json", tmp_path / "gpu.md"
    times = {"median_s": 0.125, "tokens_per_s": 100.0, "mfu": 0.4}
    record = Record(folder, "step", dry=False, machine=DEVICE)
    record.put("t5-large, full, 1 rank", "done", 9.0, {"engines": {"fullshard": times}})
    record.put("t5-3b, full, 1 rank", "failed", 9.0, {}, "OutOfMemoryError: of two lines\nand more")
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.write(folder, results, page)
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| t5-large, full, 1 rank | 125.0 | - | - | 100.0 | 40.0% |" in text
    assert "- step, t5-3b, full, 1 rank: failed. OutOfMemoryError: of two lines and more" in text
    assert "| step | time of a step, next to FSDP2 and FSDP1 | 1 done, 1 failed | NVIDIA Z1 |" in text
    assert "| memory | peaks, waits, kernels, each engine alone | **not yet run** |" in text
    with pytest.raises(ValueError, match="needs a line"):
        report.replaced("a page without marks", "")


def test_the_page_says_what_the_results_say():
    known = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    page = (ROOT / "docs/evidence/gpu.md").read_text()
    assert report.replaced(page, report.part(known)) == page, "run python -m benchmarks.gpu --report"
