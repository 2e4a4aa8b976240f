"""Ranks as threads: sharded runs equal the unsharded run, for every kind of model and several world sizes."""

import pytest
from torch import nn
from transformers import T5ForConditionalGeneration

from support.models import KINDS, VOCAB, Block, causal_loss, llama, lm_loss, seq2seq_loss, tiny_t5_config
from support.parity import assert_trains_alike

pytestmark = pytest.mark.parity

FURTHER = [("lm", 1), ("lm", 3), ("t5_untied", 3), ("bart", 3), ("gpt2", 3), ("t5", 4), ("lm_frozen_parts", 4)]
"""Worlds of one rank, which takes the same path, of an odd number of ranks and of four."""


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in KINDS), *FURTHER])
def test_a_sharded_run_equals_the_unsharded_run(kind, size):
    assert_trains_alike(*KINDS[kind], size)


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
    "llama of one layer": (lambda: llama(num_hidden_layers=1), causal_loss),
    "lists in a list": (Nested, lm_loss),
    "no list": (lambda: nn.Sequential(nn.Embedding(VOCAB, 8), Block(8, 16), nn.Linear(8, VOCAB)), lm_loss),
}


@pytest.mark.parametrize("kind", FEW_BLOCKS)
def test_few_blocks_or_nested_ones_change_nothing(kind):
    assert_trains_alike(*FEW_BLOCKS[kind], steps=4)


@pytest.mark.parametrize("wrap", [None, lambda module: type(module).__name__ in {"T5LayerFF", "T5Block"}])
def test_the_wrapping_does_not_change_the_run(wrap):
    assert_trains_alike(*KINDS["t5"], steps=4, wrap=wrap)
