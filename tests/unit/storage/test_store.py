"""Which checkpoint is the best: by the direction that was recorded with the metric."""

from pathlib import Path

import pytest

from fullshard.state.storage.completion import Completion, parse_completion
from fullshard.state.storage.store import rank_by_metric


def found(*metrics):
    """Checkpoints of steps 1, 2, … with (metric, whether the greater is better)."""
    return [
        (Completion(step, metric, "", {}, step, greater), Path(f"step-{step:08d}"))
        for step, (metric, greater) in enumerate(metrics, start=1)
    ]


@pytest.mark.parametrize(
    ("metrics", "otherwise", "steps", "recorded"),
    [
        ([(0.1, True), (0.9, True), (0.5, True)], True, [2, 3, 1], True),
        ([(3.0, False), (float("inf"), False), (1.0, False), (1.0, False)], True, [4, 3, 1, 2], True),
        ([(0.5, True), (0.5, True), (None, None)], True, [2, 1], True),
        ([(0.1, None), (0.9, None)], True, [2, 1], False),
        ([(0.1, None), (0.9, None)], False, [1, 2], False),
        ([(0.9, None), (7.0, False), (3.0, False)], True, [1, 3, 2], True),
        ([(0.9, True), (7.0, False), (3.0, False)], True, [3, 2], True),
        ([(None, None)], True, [], False),
    ],
    ids=["shares", "losses", "ties", "earlier", "earlier-named", "earlier-and-losses", "changed", "none"],
)
def test_the_best_comes_first(metrics, otherwise, steps, recorded):
    ranking = rank_by_metric(found(*metrics), otherwise=otherwise)
    assert [int(path.name[5:]) for path in ranking.paths] == steps
    assert ranking.recorded == recorded


def test_a_marker_of_a_later_version_is_read():
    digest = "0" * 64
    text = f'{{"step":3,"metric":0.5,"index_sha256":"{digest}","files":{{}},"greater_is_better":false,"colour":"red"}}'
    assert parse_completion(text.encode()) == Completion(3, 0.5, digest, {}, greater_is_better=False)
