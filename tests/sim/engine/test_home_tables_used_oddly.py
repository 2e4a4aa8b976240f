"""Tables that stay home under uses that other tests do not have: equal to the unsharded model, or an error by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecision, ShardingStrategy, fully_shard, vocab_parallel_loss
from fullshard.core.comm.memory import LOGITS_AT_ONCE
from fullshard.core.engine import unshard
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup import wrap
from fullshard.core.engine.tables.table_lane import LookupState, TableLane
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from support.parity import assert_gradients_alike, replicas, two_by_two
from support.tiny_lm import VOCAB, HiddenLM, TinyLM, batches, lm_loss

pytestmark = pytest.mark.parity

FIRST, SECOND, THIRD = batches(3, 4)


@pytest.fixture(autouse=True)
def small_tables_count(monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 1000)


def untied(kind):
    def make():
        model = kind()
        model.head = nn.Linear(24, VOCAB, bias=False)
        return model

    return make


def hidden_loss(model, tokens):
    return vocab_parallel_loss(model(tokens[:, :-1]), model.head, tokens[:, 1:])


KINDS = {
    "logits": (TinyLM, lm_loss),
    "logits_untied": (untied(TinyLM), lm_loss),
    "hidden": (HiddenLM, hidden_loss),
    "hidden_untied": (untied(HiddenLM), hidden_loss),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def compare(make, steps, ranks=2, **options):
    """Compare the gradients that ``steps(model, mine)`` leaves, where ``mine`` cuts a rank's rows from a batch."""
    how = {"dtype": torch.float64, "tolerance": 1e-7, "tables": "home"}
    return assert_gradients_alike(make, steps, ranks, **how, **options)


def tables_of(model):
    return [lane for unit in runtime_of(model).units for lane in unit.lanes if isinstance(lane, TableLane)]


@pytest.mark.parametrize(
    ("kind", "order"), [*((kind, (1, 0)) for kind in KINDS), ("logits", (0, 1)), ("hidden_untied", (0, 1))]
)
def test_two_forwards_then_two_backwards(kind, order):
    make, loss_of = KINDS[kind]

    def steps(model, mine):
        losses = [loss_of(model, mine(FIRST)), loss_of(model, mine(SECOND))]
        for index in order:
            losses[index].backward()

    compare(make, steps)


@pytest.mark.parametrize("kind", ["logits", "logits_untied"])
def test_a_graph_that_backward_runs_twice(kind):
    make, loss_of = KINDS[kind]

    def steps(model, mine):
        loss = loss_of(model, mine(FIRST))
        loss.backward(retain_graph=True)
        loss.backward()

    compare(make, steps)


@each_kind
def test_units_gathered_without_gradients_before_a_step(kind):
    make, loss_of = KINDS[kind]

    def steps(model, mine):
        if model.embed.weight.shape[0] < VOCAB:
            with torch.no_grad():
                for unit in runtime_of(model).units:
                    unshard(unit)
        loss_of(model, mine(FIRST)).backward()
        loss_of(model, mine(SECOND)).backward()

    models = compare(make, steps)
    if kind.startswith("hidden"):
        assert not any(
            lane.lookup is not LookupState.EXCHANGED for lane in tables_of(models[0])
        )  # the second step sends tokens again


@pytest.mark.parametrize("trains", [True, False])
def test_a_table_goes_home_again_after_a_step_that_gathered_it(trains):
    def steps(model, mine):
        model.embed.weight.requires_grad_(trains)
        F.cross_entropy(model.head(model(mine(FIRST))).flatten(0, 1), mine(FIRST).flatten()).backward()
        with torch.no_grad():
            hidden_loss(model, mine(SECOND))
        hidden_loss(model, mine(SECOND)).backward()

    for model in compare(HiddenLM, steps):
        assert [lane.lookup is not LookupState.EXCHANGED for lane in tables_of(model)] == [False]


def test_logits_of_a_forward_before_one_that_sends_tokens():
    def steps(model, mine):
        first, second = (
            F.cross_entropy(model.head(model(mine(t))).flatten(0, 1), mine(t).flatten()) for t in (FIRST, SECOND)
        )
        second.backward()
        third = hidden_loss(model, mine(THIRD))
        first.backward()
        third.backward()

    compare(HiddenLM, steps)


def test_a_gradient_of_an_older_forward_that_would_be_lost_is_refused():
    def work(comm):
        model = fully_shard(copies[comm.rank].double(), comm, tables="home")
        model.way = "only_sum"
        first, second = (model(tokens).sum() for tokens in (FIRST, SECOND))
        second.backward()
        model.way = "hidden"
        hidden_loss(model, THIRD)
        with pytest.raises(ShardingError, match="belongs to an earlier forward"):
            first.backward()

    _, copies = replicas(OddLM, 2)
    run_ranks(2, work)


class OddLM(TinyLM):
    """Reads the weight of its embedding in one of several ways."""

    way = ""

    def forward(self, tokens):
        weight = self.embed.weight
        if self.way == "hidden":
            return self.blocks[0](self.embed(tokens))
        x = LOOKUPS.get(self.way, OddLM.embedded)(self, tokens, weight)
        for block in self.blocks:
            x = block(x)
            if self.way in ("reentrant", "not_reentrant"):
                x = checkpoint(self.read_inside, x, tokens, use_reentrant=self.way == "reentrant")
        return x + weight.sum() if self.way == "only_sum" else F.linear(x, weight)

    def embedded(self, tokens, weight):
        return self.embed(tokens)

    def read_inside(self, x, tokens):
        weight = self.embed.weight
        return x + F.linear(F.linear(x, weight).tanh(), weight.t()) + self.embed(tokens)


LOOKUPS = {
    "sum": lambda self, tokens, weight: self.embed(tokens) + weight.sum() * 1e-2,
    "function": lambda self, tokens, weight: F.embedding(tokens, weight),
    "padding_from_the_end": lambda self, tokens, weight: F.embedding(tokens, weight, 5 - VOCAB),
    "index": lambda self, tokens, weight: weight[tokens],
    "int32": lambda self, tokens, weight: self.embed(tokens.int()),
    "vmap": lambda self, tokens, weight: torch.func.vmap(self.embed)(tokens),
    "vmap_function": lambda self, tokens, weight: torch.func.vmap(lambda row: F.embedding(row, weight))(tokens),
    "checkpoint": lambda self, tokens, weight: checkpoint(self.embed, tokens, use_reentrant=False),
    "one_hot": lambda self, tokens, weight: F.one_hot(tokens, VOCAB).to(weight.dtype) @ weight,
}


@pytest.mark.parametrize(
    ("way", "units"),
    [
        *((way, "auto") for way in (*LOOKUPS, "reentrant", "not_reentrant")),
        *((way, None) for way in ("sum", "function", "index", "reentrant")),
    ],
)
def test_ways_to_read_the_table(way, units):
    def make():
        model = OddLM()
        model.way = way
        return model

    def steps(model, mine):
        lm_loss(model, mine(FIRST)).backward()
        lm_loss(model, mine(SECOND)).backward()

    compare(make, steps, wrap=units)


class LimitedLM(TinyLM):
    def forward(self, tokens):
        return self.head(F.embedding(tokens, self.embed.weight, max_norm=0.1))


def limited():
    model = untied(TinyLM)()
    model.embed = nn.Embedding(VOCAB, 24, max_norm=0.5)
    return model


@pytest.mark.parametrize("make", [LimitedLM, limited])
def test_a_lookup_that_limits_norms_is_refused(make):
    def work(comm):
        model = fully_shard(copies[comm.rank], comm, tables="home")
        with pytest.raises(ShardingError, match="changed a parameter in place"):
            model(FIRST)

    _, copies = replicas(make, 2)
    run_ranks(2, work)


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_without_a_row_is_an_error_on_every_rank(label):
    def work(comm):
        model = fully_shard(copies[comm.rank], comm, tables="home")
        labels = FIRST.clone()
        labels[0, 0] = label if comm.rank else 3
        with pytest.raises(IndexError, match="has 50 rows; labels of rank 1 are from"):
            vocab_parallel_loss(model(FIRST), model.head, labels)

    _, copies = replicas(HiddenLM, 2)
    run_ranks(2, work)


def test_ranks_with_different_numbers_of_rows_go_through_the_same_chunks(monkeypatch):
    """17, 17 and 16 rows: by their own rows, the last rank would take 72 tokens at once and others 67."""
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 64 * 18)
    (tokens,) = batches(1, 6, 40)
    compare(untied(HiddenLM), lambda model, mine: hidden_loss(model, mine(tokens)).backward(), ranks=3)


@pytest.mark.parametrize("ranks", [7, 52])
def test_ranks_with_few_rows_or_none(ranks):
    (tokens,) = batches(1, 2 * ranks, 4)
    compare(HiddenLM, lambda model, mine: hidden_loss(model, mine(tokens)).backward(), ranks=ranks)


def test_replicas_with_different_numbers_of_tokens_choose_alike():
    """Two ranks with 10 tokens each would send them, two with 40 each gather the table of 50 rows."""

    def work(comm):
        mesh = two_by_two(comm)[::-1]
        options = {"tables": "auto", "strategy": ShardingStrategy.HYBRID_SHARD}
        model = fully_shard(copies[comm.rank].double(), mesh, **options)
        tokens = FIRST[:2, :6] if comm.rank < 2 else torch.cat([FIRST, SECOND])[:5]
        hidden_loss(model, tokens).backward()
        return [lane.lookup is not LookupState.EXCHANGED for lane in tables_of(model)]

    _, copies = replicas(HiddenLM, 4)
    assert run_ranks(4, work) == [[True]] * 4


def test_a_mean_over_many_tokens_in_float16():
    """1 / (4,998 tokens x 2,000 rows) is two of float16's smallest steps: slopes would lose their digits."""

    def make():
        model = HiddenLM(layers=2)
        model.embed, model.head = nn.Embedding(2000, 24), nn.Linear(24, 2000, bias=False)
        return model

    tokens = batches(1, 4, 2500)[0] * 40
    reference, copies = replicas(make, 2)
    (gradient,) = torch.autograd.grad(hidden_loss(reference, tokens), [reference.head.weight])

    def work(comm):
        policy = MixedPrecision(param="float16", reduce="float32")
        model = fully_shard(copies[comm.rank], comm, tables="home", mp_policy=policy)
        (hidden_loss(model, tokens[2 * comm.rank :][:2]) * 2**14).backward()
        weight = model.head.weight
        first, last = weight.shard_meta.row_range
        wanted = gradient[first:last]
        others = torch.arange(first, last) % 40 > 0  # rows that are nobody's target
        error = rows_of(weight.grad)[others] / 2**14 - wanted[others]
        assert error.abs().max() <= 0.02 * wanted[others].abs().max()

    run_ranks(2, work)


def test_hidden_states_in_another_dtype_than_the_table():
    """``output="float32"`` casts what the model returns."""

    def work(comm):
        policy = MixedPrecision(param="bfloat16", reduce="float32", output="float32")
        model = fully_shard(copies[comm.rank], comm, tables="home", mp_policy=policy)
        loss = hidden_loss(model, FIRST)
        loss.backward()
        return loss.item()

    reference, copies = replicas(untied(HiddenLM), 2)
    expected = hidden_loss(reference, FIRST).item()
    assert all(abs(loss - expected) <= 2**-7 * expected for loss in run_ranks(2, work))
