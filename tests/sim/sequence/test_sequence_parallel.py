"""Ranks as threads: runs whose ranks share rows equal the run of one rank on full rows."""

import pytest

from support.shared_rows import MODELS, assert_shared_rows_train_alike

pytestmark = pytest.mark.parity

WORLDS = {"2 ranks": (2, 1), "4 ranks": (4, 1), "2 groups of 2": (2, 2)}
IN_GROUPS = ("mistral", "t5")
ON_FOUR = ("llama", "mistral", "t5")


SLOW = ("mistral", "qwen3")
"""Of the families that differ from llama in details; test_model_types.py has a step of each."""


@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in MODELS])
def test_ten_steps_on_two_ranks_equal_those_on_full_rows(kind):
    assert_shared_rows_train_alike(MODELS[kind], each=2)


@pytest.mark.parametrize(
    ("kind", "world"), [*((kind, "4 ranks") for kind in ON_FOUR), *((kind, "2 groups of 2") for kind in IN_GROUPS)]
)
def test_steps_on_four_ranks_equal_those_on_full_rows(kind, world):
    each, groups = WORLDS[world]
    assert_shared_rows_train_alike(MODELS[kind], each=each, groups=groups, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["4 ranks", "2 groups of 2"])
@pytest.mark.parametrize("kind", MODELS)
def test_ten_steps_on_four_ranks_equal_those_on_full_rows(kind, world):
    each, groups = WORLDS[world]
    assert_shared_rows_train_alike(MODELS[kind], each=each, groups=groups)
