"""Ways of different parts in one model: compiled blocks are given what the way of attention prepares."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from fullshard import fully_shard, unsharded
from fullshard.program.models import enable_activation_checkpointing, uncompiled
from fullshard.program.speed import Facts, apply_ways, compiled
from support.alone import alone
from support.packed_models import LONGEST, assert_same, build, loss_and_gradients, rows

FACTS = Facts(torch.device("cpu"), torch.float32, packing=True, longest=LONGEST)


@pytest.mark.filterwarnings("default")  # of the compiler
@pytest.mark.parametrize(
    ("packed", "recompute"),
    [(False, False), (True, True), *(pytest.param(one, not one, marks=pytest.mark.slow) for one in (False, True))],
)
def test_compiled_blocks_attend_as_the_way_of_attention_does(monkeypatch, packed, recompute):
    torch._dynamo.reset()
    counters.clear()
    compile_blocks = compiled.compile_blocks
    monkeypatch.setattr(compiled, "compile_blocks", lambda model: compile_blocks(model, backend="eager"))
    plain = build("t5", "eager")
    both = copy.deepcopy(plain)
    if recompute:
        enable_activation_checkpointing(both)
    apply_ways(both, ["compile", "bias_sdpa"], FACTS)
    fully_shard(both, alone())
    batch = rows(causal=False)[packed]
    for _ in range(2):
        loss, _ = loss_and_gradients(both, batch, causal=False)
    gradients = {name: shard.grad.full_tensor() for name, shard in both.named_parameters()}
    assert_same((loss, gradients), loss_and_gradients(plain, batch, causal=False))
    assert counters["stats"]["unique_graphs"] == 2, "one of each stack"
    inputs = {"input_ids": batch.input_ids_BS, "decoder_input_ids": batch.labels_BT.clamp(min=0)}
    with torch.no_grad(), uncompiled(both), unsharded(both):
        torch.testing.assert_close(both.eval()(**inputs).logits, plain.eval()(**inputs).logits)
