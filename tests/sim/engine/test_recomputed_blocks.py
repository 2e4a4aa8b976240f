"""A sharded model of which none, some or all blocks are recomputed: the same losses and weights, to the bit."""

import pytest
import torch
from torch.nn import functional

from fullshard.models import blocks_of, enable_activation_checkpointing
from fullshard.testing import run_ranks
from support.models import bart, batches, gpt2, llama, t5
from support.parity import replicas, train_sharded

KINDS = {"t5": t5, "bart": bart, "gpt2": gpt2, "llama": llama}
STEPS = 3


def loss_of(model, tokens):
    inputs = {"decoder_input_ids": tokens[:, :-1]} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=tokens, **inputs, use_cache=False).logits[:, : tokens.shape[1] - 1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def with_dropout(model):
    """Every probability in transformers' modules and functions."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
    return model.train()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_none_some_or_all_recomputed_blocks_are_one_run(kind, size):
    """With dropout on one rank: ranks are threads, which share the random numbers."""
    make = KINDS[kind]
    data, runs = batches(STEPS, size * 2), []
    blocks = len(blocks_of(make()))
    for number in (0, 1, blocks - 1, None):
        _, models = replicas(make, size)
        for model in models:
            enable_activation_checkpointing(model, number)
            (with_dropout if size == 1 else torch.nn.Module.train)(model)
        torch.manual_seed(1)
        runs.append(run_ranks(size, lambda comm, models=models: train_sharded(models[comm.rank], comm, loss_of, data)))
    for run in runs[1:]:
        for (losses, norms, weights), plain in zip(run, runs[0], strict=True):
            assert (losses, norms) == plain[:2]
            assert all(torch.equal(weight, plain[2][name]) for name, weight in weights.items())
