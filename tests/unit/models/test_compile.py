"""Compiled blocks give the same outputs and gradients, and keep the names of parameters."""

import copy

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.errors import ModelError
from fullshard.models import compile_blocks
from fullshard.testing import run_ranks
from support.models import gpt2, t5

DYNAMO = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code


def output(model, seed=0):
    tokens = torch.arange(3, 13).view(2, 5)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(input_ids=tokens, decoder_input_ids=tokens).logits


@DYNAMO
def test_compiled_blocks_keep_names_and_values():
    torch.manual_seed(0)
    model = t5()
    names = [name for name, _ in model.named_parameters()]
    expected = output(model)
    compile_blocks(model, backend="eager")
    assert [name for name, _ in model.named_parameters()] == names
    assert len([module for module in model.modules() if module._compiled_call_impl is not None]) == 4
    torch.testing.assert_close(output(model), expected)


@DYNAMO
@pytest.mark.parametrize(
    ("make", "backend"),
    [(gpt2, "eager"), pytest.param(gpt2, "inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_a_sharded_model_of_compiled_blocks_gives_the_same_gradients(make, backend):
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    tokens = torch.arange(3, 13).view(2, 5)

    def loss(one):
        inputs = {"decoder_input_ids": tokens} if one.config.is_encoder_decoder else {}
        return one(input_ids=tokens, **inputs).logits.square().mean()

    loss(reference).backward()
    compile_blocks(model, backend=backend)
    run_ranks(1, lambda comm: loss(fully_shard(model, comm)).backward())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_a_model_without_blocks_is_not_compiled():
    with pytest.raises(ModelError, match="Linear has no transformer blocks"):
        compile_blocks(nn.Linear(2, 2))
