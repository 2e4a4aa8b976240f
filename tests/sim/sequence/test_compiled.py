"""Compiled blocks of shared rows take the steps of uncompiled full rows, and blocks that are alike share a graph."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from fullshard.core.torch_private import limits_each_function
from fullshard.program.models import compile_blocks
from support.models import llama, t5
from support.shared_rows import MODELS, assert_shared_rows_train_alike, checkpointed

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    # What is compiled in a thread lets later plans in the process crash.
    pytest.mark.skipif(not limits_each_function, reason="torch 2.11: fake tensors crash after a compile in a thread"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about its own code
    pytest.mark.timeout(900),
]


def eagerly(model):
    model.set_attn_implementation("eager")
    return model


def assert_compiled_trains_alike(make, backend, *, ranks=2, steps=3, **options):
    """Two blocks of a stack share a graph for each of two shapes of batches, made by each rank in this process."""
    torch._dynamo.reset()
    counters.clear()
    compiling = partial(compile_blocks, backend=backend)
    assert_shared_rows_train_alike(make, each=ranks, steps=steps, shared=compiling, **options)
    stacks = 2 if make().config.is_encoder_decoder else 1
    # Recomputed, T5's second block of a stack gets a bias whose gradient is asked for where the first one's is not.
    most = 3 if make is t5 and "change" in options else 2
    assert 0 < counters["stats"]["unique_graphs"] <= most * stacks * ranks


CASES = {
    **{kind: {"make": make} for kind, make in MODELS.items()},
    "4 ranks": {"make": llama, "ranks": 4},
    "recomputed": {"make": llama, "change": checkpointed},
    "recomputed t5": {"make": t5, "change": checkpointed},
    "eager": {"make": llama, "change": eagerly},
    "eager t5": {"make": t5, "change": eagerly},
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_compiled_blocks_trains_alike(case):
    assert_compiled_trains_alike(backend="aot_eager", **CASES[case])


def test_by_inductor():
    assert_compiled_trains_alike(llama, "inductor")
