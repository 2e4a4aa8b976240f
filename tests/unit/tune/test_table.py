"""What a tuning prints."""

import json

from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.candidates import Candidate
from fullshard.program.tune.halving import NO_TIME, Measured, Outcome
from fullshard.program.tune.table import SHOWN, as_json, as_text

FAST = Setting(("liger", "compile"), "12", 4, 2)


def outcome():
    measured = {
        Candidate(kernels="liger", blocks="compile", rows=4, times=2): Measured(
            FAST, (0.4, 0.5, 0.41), 8200, 90.0, 41.2, 62_100_000_000, 0.304
        ),
        Candidate(rows=8): Measured(Setting((), "true", 8, 1), (1.25,), 8200, 9.0, 0.3, 0),
    }
    left_out = {
        Candidate("flex", recompute="none", rows=8): "loss 3, and 2 without it",
        Candidate("flex", recompute="all", rows=8): "loss 3, and 2 without it",
        Candidate(recompute="none", rows=8): "its memory plan does not fit",
        Candidate(recompute="none", rows=2): NO_TIME,
        Candidate(recompute="none", rows=1): NO_TIME,
    }
    return Outcome(measured, left_out)


def test_the_table_marks_the_choice_and_tells_what_was_left_out():
    assert as_text(outcome(), {"flash": "it is not installed"}, FAST).splitlines() == [
        "  ways             recompute   rows      step  tokens/s  of peak   reserved  compile",
        "* liger + compile         12  4 x 2    410 ms    20,000    30.4%  57.84 GiB   41.2 s",
        "  plain                  all  8 x 1  1,250 ms     6,560        -          -        -",
        "left out:",
        "  flash: does not apply: it is not installed",
        "  flex (2 candidates): loss 3, and 2 without it",
        "  plain, recompute none, 8 rows a micro-batch: its memory plan does not fit",
        "  2 candidates: no time was left (--minutes)",
    ]


def test_a_long_table_is_cut_and_json_has_all():
    many = {
        Candidate(rows=rows): Measured(Setting((), "false", rows, 1), (1.0,), 1, 1.0, 0.0, 0) for rows in range(1, 31)
    }
    chosen = Setting((), "false", 1, 1)
    text = as_text(Outcome(many, {}), {}, chosen).splitlines()
    assert len(text) == SHOWN + 2
    assert text[-1] == "  and 10 more; --json prints all of them"
    found = json.loads(as_json(Outcome(many, {}), {"flash": "no"}, chosen))
    assert found["choice"]["training.per_device_train_batch_size"] == 1
    assert len(found["measured"]) == 30
    assert [one["chosen"] for one in found["measured"]] == [True] + [False] * 29
    assert found["left_out"] == [{"ways": ["flash"], "candidate": "flash", "why": "no"}]
