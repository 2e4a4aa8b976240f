"""Large embeddings and heads: units of their own, or given back in backward before the rest of the root."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard import ShardingStrategy, units
from fullshard.core.engine.setup import wrap
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_gradients_alike, assert_trains_alike, on_ranks

pytestmark = pytest.mark.parity

SIZE = 2


@pytest.fixture(autouse=True)
def tables_are_large(monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 1000)


class Untied(TinyLM):
    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(50, 24) / 5)


class UsedFunctionally(TinyLM):
    """The table is read by an operation after the head's use, whose backward therefore comes before and after it."""

    def forward(self, tokens):
        x = self.embed(tokens)
        early = F.linear(x, self.embed.weight).mean()
        for block in self.blocks:
            x = block(x)
        return self.head(x) + early * F.linear(x, self.head.weight.t().contiguous().t()).mean()


@pytest.mark.parametrize(
    "kind", ["lm", "lm_two_forwards", "lm_checkpoint_reentrant", "lm_reentrant_two_forwards", "t5", "t5_untied", "gpt2"]
)
def test_models_with_tables_give_the_unsharded_run(kind):
    assert_trains_alike(*KINDS[kind], SIZE, steps=4)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (TinyLM, ShardingStrategy.NO_SHARD),
        (Untied, ShardingStrategy.FULL_SHARD),
        (Untied, ShardingStrategy.SHARD_GRAD_OP),
        (UsedFunctionally, ShardingStrategy.FULL_SHARD),
        (UsedFunctionally, ShardingStrategy.SHARD_GRAD_OP),
    ],
)
def test_untied_heads_functional_uses_and_other_strategies(make, strategy):
    assert_trains_alike(make, lm_loss, SIZE, steps=4, strategy=strategy)


def gathered_bytes_in_backward(make):
    """Bytes gathered when each block's backward begins, last block first, and the collectives of the step."""

    def work(ledger, model):
        tracker, seen = model._fullshard_runtime.tracker, []
        for block in model.blocks:
            block.register_full_backward_pre_hook(lambda *_: seen.append(tracker.live["gathered"]))
        for tokens in batches(2, 2):
            seen.clear()
            ledger.entries.clear()
            lm_loss(model, tokens).backward()
        return seen, ledger.names, units(model)

    return on_ranks(SIZE, make, work, recorded=True)[0]


def test_a_tied_table_is_given_back_after_the_heads_backward(monkeypatch):
    early, names, table = gathered_bytes_in_backward(TinyLM)
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 10**9)
    late, without, _ = gathered_bytes_in_backward(TinyLM)
    nbytes = 50 * 24 * 4
    assert [a - b for a, b in zip(late, early, strict=True)] == pytest.approx([nbytes] * 4, abs=128)
    assert names.count("all_gather") == without.count("all_gather") + 1  # the table is a lane of its own
    assert table.rows[0].lanes == 2


def test_a_table_that_something_else_reads_is_kept():
    early, names, _ = gathered_bytes_in_backward(UsedFunctionally)
    assert names.count("all_gather") == 6 + 4
    assert min(early) > 50 * 24 * 4


def test_untied_tables_are_units_and_an_embedding_is_gathered_once():
    _, names, table = gathered_bytes_in_backward(Untied)
    assert [row.unit for row in table.rows] == ["(root)", "embed", *(f"blocks.{i}" for i in range(4)), "head"]
    assert names.count("all_gather") == 7 + 5  # backward: not the root, which is kept, and not the embedding
    assert names.count("reduce_scatter") == 7


def test_a_table_given_back_is_gathered_again_for_a_graph_that_was_kept():
    first_tokens, second_tokens = batches(2, SIZE * ROWS_PER_RANK)

    def backwards(model, rows):
        first = lm_loss(model, rows(first_tokens))
        first.backward(retain_graph=True)
        (lm_loss(model, rows(second_tokens)) + first).backward()

    assert_gradients_alike(TinyLM, backwards, SIZE)
