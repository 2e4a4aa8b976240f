"""bf16 compute with fp32 shards and fp32 reduce, against a reference that does the same by hand."""

import copy

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, fully_shard, no_sync
from fullshard.core.engine.step import lane
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import WrapError
from support.models import TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import alone, on_ranks, replicas

BF16 = MixedPrecision(param=torch.bfloat16, reduce=torch.float32)


def test_gradients_are_those_of_bf16_compute_summed_in_fp32_bit_for_bit():
    reference, models = replicas(TinyLM, 2)
    tokens = batches(1, 4)[0]
    halves = []
    for rank in range(2):
        low = copy.deepcopy(reference).bfloat16()
        lm_loss(low, tokens[2 * rank : 2 * rank + 2]).backward()
        halves.append({name: p.grad.float() for name, p in low.named_parameters() if p.grad is not None})

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=BF16)
        lm_loss(model, tokens[2 * comm.rank : 2 * comm.rank + 2]).backward()
        for p in model.parameters():
            name, rows = p.shard_meta.name, p.shard_meta.row_range
            assert p.dtype == torch.float32
            if p.grad is None:
                continue
            assert p.grad.dtype == torch.float32
            mean = ((halves[0][name] + halves[1][name]) / 2)[rows[0] : rows[1]]
            if name == "embed.weight":  # looked-up rows are added in fp32 here and rounded to bf16 by autograd
                rounding = torch.finfo(torch.bfloat16).eps * mean.abs().max().item()
                torch.testing.assert_close(p.grad, mean, atol=rounding, rtol=0)
            else:
                assert torch.equal(p.grad, mean), name

    run_ranks(2, work)


def test_the_gradients_of_a_unit_are_cast_into_its_lane_in_one_operator(monkeypatch):
    _, models = replicas(TinyLM, 1)
    calls, copy = [], torch._foreach_copy_

    def counting(views, gradients):
        calls.append([gradient.dtype for gradient in gradients])
        return copy(views, gradients)

    monkeypatch.setattr(lane, "foreach_copy", counting)

    model = alone(models[0], mp_policy=BF16)
    units = model._fullshard_runtime.units
    with no_sync(model):
        lm_loss(model, batches(1, 2)[0]).backward()
    assert not any(lane.held for unit in units for lane in unit.lanes)
    held = len(calls)
    lm_loss(model, batches(1, 2)[0]).backward()  # adds to what the first one left
    lanes = [len(unit.lanes) for unit in units]
    assert held <= sum(lanes) < sum(map(len, calls))
    assert len(calls) == held
    assert {dtype for call in calls for dtype in call} == {torch.bfloat16}


def test_frozen_lanes_are_kept_in_the_compute_dtype_and_have_no_gradient_buffer():
    def work(comm, model):
        lm_loss(model, batches(1, 2)[0]).backward()
        for p in model.parameters():
            assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16)
            assert p.requires_grad or p.grad is None
        runtime = model._fullshard_runtime
        return runtime.tracker.peak["gradients"], next(u for u in runtime.units if u.name == "blocks.1")

    for peak, unit in on_ranks(2, lm_with_frozen_parts, work, mp_policy=BF16):
        trainable = [lane for lane in unit.lanes if lane.trainable]
        frozen = [lane for lane in unit.lanes if not lane.trainable]
        assert trainable
        assert frozen
        assert peak <= max(2 * lane.full.nbytes for lane in trainable) + 2 * 50 * 24 * 4


def test_gathers_move_the_compute_dtype_and_reduces_the_reduce_dtype():
    def sent(policy):
        _, models = replicas(TinyLM, 2)

        def work(comm):
            ledger = RecordingComm(comm)
            model = fully_shard(models[comm.rank], ledger, mp_policy=policy)
            ledger.entries.clear()
            lm_loss(model, batches(1, 2)[0]).backward()
            return {
                kind: sum(e.sent_bytes for e in ledger.entries if e.collective == kind) for kind in set(ledger.names)
            }

        return run_ranks(2, work)[0]

    plain, low, lowest = sent(None), sent(BF16), sent(MixedPrecision(param="bf16", reduce="bf16"))
    assert low["all_gather"] * 2 == plain["all_gather"]
    assert low["reduce_scatter"] == plain["reduce_scatter"]
    assert lowest["reduce_scatter"] * 2 == plain["reduce_scatter"]


class WithBuffers(nn.Module):
    """A block with a norm, a buffer that is added, an integer buffer, and a part named ``wo``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wi = nn.Linear(16, 32)
        self.wo = nn.Linear(32, 16)
        self.register_buffer("shift", torch.ones(16))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x):
        return x + self.wo(torch.relu(self.wi(self.norm(x)))) + self.shift


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([WithBuffers(), WithBuffers()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def dtypes_seen(comm, model, policy, dtype=torch.float32):
    """Input and output dtype of every submodule of the first block, the output's, and each gradient's."""
    model = fully_shard(model, comm, mp_policy=policy)
    seen = {}
    for name, module in model.blocks[0].named_children():
        module.register_forward_hook(lambda m, a, o, n=name: seen.update({n: (a[0].dtype, o.dtype)}))
    out = model(torch.ones(2, 16, dtype=dtype))
    out.float().sum().backward()
    return seen, out.dtype, {p.grad.dtype for p in model.parameters()}, model


def test_kept_modules_compute_in_fp32_between_bf16_ones():
    policy = MixedPrecision(param="bf16", reduce="fp32", output="fp32", keep_fp32=("wo", "LayerNorm"))

    def work(comm):
        return dtypes_seen(comm, Two(), policy)

    seen, out, grads, model = run_ranks(1, work)[0]
    low, full = torch.bfloat16, torch.float32
    assert seen == {"norm": (full, low), "wi": (low, low), "wo": (full, low)}
    assert out == full
    assert grads == {full}
    lanes = {lane.dtypes.compute for lane in model._fullshard_runtime.units[1].lanes}
    assert lanes == {low, full}


def test_a_name_that_no_module_has_is_not_kept_silently():
    with pytest.raises(WrapError, match="keep_fp32 names vo"):
        run_ranks(1, lambda comm: fully_shard(Two(), comm, mp_policy=MixedPrecision(param="bf16", keep_fp32="vo")))


def test_float16_gradients_are_divided_in_two_steps_so_that_the_sum_fits():
    def work(comm):
        model = nn.Linear(8, 8, bias=False)
        nn.init.ones_(model.weight)
        policy = MixedPrecision(param="fp16", reduce="fp16")
        model = fully_shard(model, comm, wrap=None, mp_policy=policy)
        # Each rank's gradient is 20,000: four of them do not fit float16 (65,504), and their mean does.
        (model(torch.full((1, 8), 100.0)) * 200.0).sum().backward()
        return [rows_of(p.grad) for p in model.parameters()]

    for grads in run_ranks(4, work):
        assert all((grad == 20000.0).all() for grad in grads)


def test_bf16_messages_with_an_fp32_sum_round_each_rank_once():
    policy = MixedPrecision(param="bf16", reduce="bf16", reduce_sum="fp32")
    reference, models = replicas(TinyLM, 3)
    tokens = batches(1, 6)[0]
    terms = []
    for rank in range(3):
        low = copy.deepcopy(reference).bfloat16()
        lm_loss(low, tokens[2 * rank : 2 * rank + 2]).backward()
        terms.append({name: p.grad for name, p in low.named_parameters() if p.grad is not None})

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger, mp_policy=policy)
        lm_loss(model, tokens[2 * comm.rank : 2 * comm.rank + 2]).backward()
        for p in model.parameters():
            name, rows = p.shard_meta.name, p.shard_meta.row_range
            if p.grad is not None and name != "embed.weight":
                mean = (terms[0][name].float() + terms[1][name].float() + terms[2][name].float()) / 3
                torch.testing.assert_close(p.grad, mean[rows[0] : rows[1]], atol=0, rtol=1e-6)
        lanes = [lane for unit in model._fullshard_runtime.units for lane in unit.lanes if lane.trainable]
        sent = sum(entry.sent_bytes for entry in ledger.entries if entry.collective == "reduce_scatter")
        assert sent == sum(2 * lane.layout.shard_numel * (comm.size - 1) for lane in lanes)

    run_ranks(3, work)
