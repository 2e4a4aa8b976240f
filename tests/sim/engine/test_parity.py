"""Ranks as threads: sharded runs equal the unsharded run, for every kind of model and several world sizes."""

import pytest
from torch import nn
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from fullshard.core.testing import run_ranks
from support.models import KINDS, VOCAB, Block, batches, causal_loss, llama, lm_loss, seq2seq_loss, tiny_t5_config
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, steps_for, train_sharded, train_unsharded

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sharded_run_equals_the_unsharded_run(kind, size):
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, size)
    data = batches(steps_for(size), size * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)
    runs = run_ranks(size, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data))
    for run in runs:
        assert_same_run(run, plain)


@pytest.mark.parametrize("kind", ["lm", "t5", "lm_frozen_parts"])
@pytest.mark.parametrize("size", [1, 4])
def test_one_rank_takes_the_same_path_and_four_ranks_agree(kind, size):
    test_a_sharded_run_equals_the_unsharded_run(kind, size)


class Nested(nn.Module):
    """Layers as lists of their parts, which the model itself calls."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleList([Block(8, 16), Block(8, 24)]) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for first, second in self.layers:
            x = x + second(first(x))
        return self.head(x)


ONE = {"num_layers": 1, "num_decoder_layers": 1}
FEW_BLOCKS = {
    "t5 of one layer": (lambda: T5ForConditionalGeneration(tiny_t5_config(**ONE)), seq2seq_loss),
    "llama of one layer": (lambda: LlamaForCausalLM(one_layer()), causal_loss),
    "lists in a list": (Nested, lm_loss),
    "no list": (lambda: nn.Sequential(nn.Embedding(VOCAB, 8), Block(8, 16), nn.Linear(8, VOCAB)), lm_loss),
}


def one_layer():
    config = llama().config
    config.num_hidden_layers = 1
    return config


@pytest.mark.parametrize("kind", FEW_BLOCKS)
def test_few_blocks_or_nested_ones_change_nothing(kind):
    make, loss_of = FEW_BLOCKS[kind]
    reference, models = replicas(make, 2)
    data = batches(4, 2 * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)
    for run in run_ranks(2, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data)):
        assert_same_run(run, plain)


@pytest.mark.parametrize("wrap", [None, lambda module: type(module).__name__ in {"T5LayerFF", "T5Block"}])
def test_the_wrapping_does_not_change_the_run(wrap):
    make, loss_of = KINDS["t5"]
    reference, models = replicas(make, 2)
    data = batches(4, 2 * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)
    for run in run_ranks(2, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data, wrap=wrap)):
        assert_same_run(run, plain)
