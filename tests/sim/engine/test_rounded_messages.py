"""Rounded messages: computation with the rounded weights of all ranks, exact masters, the sum of rounded gradients."""

import copy
import math

import pytest
import torch

from fullshard import MixedPrecision, ShardingStrategy, clip_grad_norm_, full_state_dict, fully_shard, unsharded
from fullshard.core.comm.rounded import BLOCK
from fullshard.core.engine import unshard
from fullshard.core.engine.full.summon import summoned_parameters
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup import wrap
from fullshard.core.engine.tables.table_param import TableParam
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError
from support.models import TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import (
    ROWS_PER_RANK,
    alone,
    mesh_for,
    on_ranks,
    optimizer_for,
    replicas,
    rows_for,
    size_for,
    train_unsharded,
    weights_of,
)

BF16, FP8 = MixedPrecision(messages="bf16"), MixedPrecision(messages="fp8")
EPS = {"bf16": 2.0**-8, "fp8": 2.0**-4}
"""Largest error of a rounding: of the number in bf16, of the largest of its block in fp8."""


def in_bf16(tensor):
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def rounded_gradients(reference, tokens, ranks):
    """What ranks reduce: each rank's gradients of the model with rounded weights, rounded, added in float32."""
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(in_bf16(param))
    total = {}
    for rank in range(ranks):
        model.zero_grad()
        lm_loss(model, tokens[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK]).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + in_bf16(param.grad)
    return {name: gradient / ranks for name, gradient in total.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_rounded_once_and_gradients_are_the_sum_of_rounded_ones(ranks):
    reference, models = replicas(TinyLM, ranks)
    (tokens,) = batches(1, ranks * ROWS_PER_RANK)
    expected = rounded_gradients(reference, tokens, ranks)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=BF16)
        shown = weights_of(model)
        lm_loss(model, rows_for(comm, tokens)).backward()
        gradients = {p.shard_meta.name: (p.shard_meta.row_range, p.grad) for p in model.parameters()}
        return shown, gradients, full_state_dict(model)

    for rank, (shown, gradients, saved) in enumerate(run_ranks(ranks, work)):
        for name, param in reference.named_parameters():
            assert torch.equal(shown[name], in_bf16(param)), name
            assert rank or torch.equal(saved[name], param), name
        for name, (rows, gradient) in gradients.items():
            if name not in expected:
                assert gradient is None, name
                continue
            # One unit in the last place of bf16: a product of other tiles may round the other way before its sum.
            atol = EPS["bf16"] * expected[name].abs().max().item()
            torch.testing.assert_close(rows_of(gradient), expected[name][slice(*rows)], atol=atol, rtol=0)
            same = (rows_of(gradient) == expected[name][slice(*rows)]).float().mean().item()
            assert math.isnan(same) or same > 0.99, name


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        (ShardingStrategy.FULL_SHARD, BF16),
        (ShardingStrategy.SHARD_GRAD_OP, FP8),
        (ShardingStrategy.HYBRID_SHARD, FP8),
        (ShardingStrategy.HYBRID_SHARD_ZERO2, BF16),
    ],
)
def test_every_rank_and_replica_computes_with_the_same_weights(strategy, precision):
    ranks = size_for(strategy, 3)
    _, models = replicas(TinyLM, ranks)

    def work(comm):
        model = fully_shard(models[comm.rank], mesh_for(strategy, comm), strategy=strategy, mp_policy=precision)
        optimizer = optimizer_for(model)
        for tokens in batches(2, 2 * ranks):
            lm_loss(model, rows_for(comm, tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    first, *others = run_ranks(ranks, work)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("messages", ["bf16", "fp8"])
def test_one_rank_takes_the_same_path(messages):
    reference, (model,) = replicas(TinyLM, 1)

    shown = weights_of(alone(model, mp_policy=MixedPrecision(messages=messages)))
    weight = reference.blocks[0].up.weight
    assert not torch.equal(shown["blocks.0.up.weight"], weight)
    worst = EPS[messages] * weight.abs().max().item()
    torch.testing.assert_close(shown["blocks.0.up.weight"], weight.detach(), atol=worst, rtol=0)


def test_shards_keep_their_bits_when_full_parameters_are_shown():
    reference, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=BF16)
        with unsharded(model), torch.no_grad():
            model.blocks[0].up.weight[0, 0] = 5.0
        with summoned_parameters(model, model.modules()):
            exact = model.blocks[1].up.weight.detach().clone()
        weight = model.blocks[1].side.weight
        return full_state_dict(model), exact, weight.full_tensor()

    saved, exact, gathered = run_ranks(2, work)[0]
    assert torch.equal(exact, reference.blocks[1].up.weight)
    assert torch.equal(gathered, reference.blocks[1].side.weight)
    with torch.no_grad():
        reference.blocks[0].up.weight[0, 0] = 5.0
    assert all(torch.equal(saved[name], param) for name, param in reference.named_parameters())


def test_a_unit_that_was_gathered_before_is_gathered_again_only_if_its_shards_changed():
    def work(ledger, model):
        counts, tokens = [], batches(1, 2)[0]
        for _ in range(2):
            for unit in runtime_of(model).units:
                unshard(unit)
            ledger.entries.clear()
            with torch.no_grad():
                lm_loss(model, tokens)
            counts.append(ledger.names.count("all_gather"))
            with torch.no_grad():
                for param in model.parameters():
                    rows_of(param).add_(1.0)
        with unsharded(model):
            return counts, model.blocks[0].up.weight.detach().clone()

    for counts, weight in on_ranks(2, TinyLM, work, recorded=True, mp_policy=BF16):
        assert counts == [0, 0]
        assert weight.mean() > 1.5


@pytest.mark.parametrize(("messages", "share"), [("bf16", 0.5), ("fp8", 0.25 + 1 / BLOCK)])
def test_a_step_sends_that_share_of_the_bytes(messages, share):
    def sent(comm, model, **options):
        ledger = RecordingComm(comm)
        model = fully_shard(model, ledger, **options)
        ledger.entries.clear()
        lm_loss(model, batches(1, 2)[0]).backward()
        clip_grad_norm_(model, 1.0)
        return sum(entry.sent_bytes for entry in ledger.entries if entry.collective != "all_reduce")

    _, models = replicas(lambda: TinyLM(width=64, hidden=128), 4)

    def work(comm):
        plain, less = models[comm.rank], models[2 + comm.rank]
        return sent(comm, plain), sent(comm, less, mp_policy=MixedPrecision(messages=messages))

    for plain, less in run_ranks(2, work):
        assert less / plain == pytest.approx(share, rel=2e-3)


@pytest.mark.parametrize("messages", ["bf16", "fp8"])
def test_a_run_stays_as_near_as_its_roundings_are(messages):
    reference, models = replicas(TinyLM, 3)
    data = batches(6, 3 * ROWS_PER_RANK)
    losses, _, _ = train_unsharded(reference, lm_loss, data)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=MixedPrecision(messages=messages))
        optimizer, seen = optimizer_for(model), []
        for tokens in data:
            loss = lm_loss(model, rows_for(comm, tokens))
            loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().reshape(1).clone()
            comm.all_reduce(mean).wait()
            seen.append(mean.item() / comm.size)
        return seen

    for seen in run_ranks(3, work):
        worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(seen, losses, strict=True))
        # A relative error of EPS in each weight moves the loss by less than that share; fp32's own error is 1e-5.
        assert 1e-5 < worst < EPS[messages]


def test_frozen_parameters_and_rows_at_home_travel_as_they_are(monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 500)
    reference, models = replicas(lm_with_frozen_parts, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, tables="home", mp_policy=FP8)
        with torch.no_grad():
            looked_up = model.embed(torch.arange(8))
        return looked_up, weights_of(model)

    trainable = {name: param.requires_grad for name, param in reference.named_parameters()}
    assert len(set(trainable.values())) == 2
    for looked_up, shown in run_ranks(2, work):
        assert torch.equal(looked_up, reference.embed.weight[:8])
        for name, param in reference.named_parameters():
            if param.std() > 0:
                assert torch.equal(shown[name], param) is not trainable[name], name


def test_tokens_travel_where_they_send_fewer_bytes_than_a_rounded_table(monkeypatch):
    """Of 50 rows, 2 ranks with 20 tokens each: 40 exact rows against 50, or 25 in half the bytes."""
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 500)
    _, models = replicas(TinyLM, 4)

    def work(comm):
        pays = []
        for number, options in enumerate(({}, {"mp_policy": BF16})):
            model = fully_shard(models[2 * number + comm.rank], comm, tables="auto", **options)
            (table,) = [p for p in runtime_of(model).units[0].params if isinstance(p, TableParam)]
            pays += [table.pays(20), table.pays(12)]
        return pays

    assert run_ranks(2, work) == [[True, True, False, True]] * 2


def test_a_part_that_was_sharded_before_keeps_its_messages():
    reference, models = replicas(TinyLM, 2)

    def work(comm):
        model = models[comm.rank]
        fully_shard(model.blocks[0], comm, wrap=None, mp_policy=BF16)
        with unsharded(fully_shard(model, comm)):
            return model.blocks[0].up.weight.detach().clone(), model.embed.weight.detach().clone()

    for rounded, exact in run_ranks(2, work):
        assert torch.equal(rounded, in_bf16(reference.blocks[0].up.weight))
        assert torch.equal(exact, reference.embed.weight)


@pytest.mark.parametrize("param", [None, "bf16"])
def test_modules_kept_in_fp32_travel_as_they_are(param):
    """In fp32 all compute in one dtype: the kept ones have a lane of their own all the same."""
    reference, models = replicas(TinyLM, 2)
    policy = MixedPrecision(param=param, reduce="fp32", keep_fp32=("up", "LayerNorm"), messages="fp8")

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=policy)
        messages = {lane.mesh.messages for unit in runtime_of(model).units for lane in unit.lanes}
        return messages, weights_of(model)

    for messages, shown in run_ranks(2, work):
        assert messages == {None, "fp8"}
        for name, parameter in reference.named_parameters():
            if parameter.std() > 0:
                exact = torch.equal(shown[name], parameter)
                assert exact is (".up." in name or "norm" in name), name


def test_a_number_that_is_not_finite_leaves_its_neighbours_their_bits():
    """In fp8 one nan or inf shows nan in 128 numbers: leaving unsharded() must not write them to the shards."""
    reference, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=FP8)
        weight = model.blocks[0].up.weight
        with torch.no_grad():
            if rows_of(weight).numel():
                rows_of(weight)[0, 0] = math.inf
        with unsharded(model), torch.no_grad():
            assert model.blocks[0].up.weight.isnan().sum() > 2
            model.blocks[0].up.weight[-1, -1] = 5.0
        return full_state_dict(model)

    saved = run_ranks(2, work)[0]["blocks.0.up.weight"]
    expected = reference.blocks[0].up.weight.detach()
    infinite = saved.isinf()
    assert 1 <= infinite.sum() <= 2
    assert saved[-1, -1] == 5.0
    infinite[-1, -1] = True
    assert torch.equal(saved[~infinite], expected[~infinite])


REFUSED = {
    "unknown": ({"messages": "int4"}, {}, r"one of bf16, fp8, or None; got 'int4'"),
    "reduce": ({"messages": "bf16", "reduce": "bf16"}, {}, r"reduce is bfloat16\. Leave reduce out, or messages"),
    "sum": ({"messages": "fp8", "reduce_sum": "fp16"}, {}, r"reduce_sum is float16"),
    "eval": ({"messages": "bf16", "param": "bf16", "full_in_eval": True}, {}, r"full_in_eval asks for unrounded"),
    "no shard": ({"messages": "bf16"}, {"strategy": ShardingStrategy.NO_SHARD}, r"NO_SHARD does neither"),
    "bf16 model": ({"messages": "bf16"}, {"dtype": torch.bfloat16}, r"those of .* are in torch.bfloat16\. Add reduce"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rounded_is_refused_by_name(case):
    precision, options, text = REFUSED[case]
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)

    def work(comm):
        fully_shard(TinyLM().to(dtype), comm, mp_policy=MixedPrecision(**precision), **options)

    with pytest.raises(ConfigError, match=text):
        run_ranks(2, work)
