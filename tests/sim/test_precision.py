"""bf16 compute with fp32 shards and fp32 reduce, against a reference that does the same by hand."""

import copy

import torch
from torch import nn

from fullshard import MixedPrecision, fully_shard
from fullshard.comm import RecordingComm, run_ranks
from support.models import TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import replicas

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
            if name == "embed.weight":  # looked-up rows are added in fp32 here and in bf16 by autograd
                torch.testing.assert_close(p.grad, mean, atol=2e-3, rtol=0)
            else:
                assert torch.equal(p.grad, mean), name

    run_ranks(2, work)


def test_frozen_lanes_are_kept_in_the_compute_dtype_and_have_no_gradient_buffer():
    _, models = replicas(lm_with_frozen_parts, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=BF16)
        lm_loss(model, batches(1, 2)[0]).backward()
        for p in model.parameters():
            assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16)
            assert p.requires_grad or p.grad is None
        runtime = model._fullshard_runtime
        return runtime.account.peak["gradients"], next(u for u in runtime.units if u.name == "blocks.1")

    for peak, unit in run_ranks(2, work):
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


def test_inputs_are_cast_on_the_way_in_and_outputs_on_the_way_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.seen = []

        def forward(self, x, *, extra):
            for block in self.blocks:
                x = block(x)
                self.seen.append(x.dtype)
            return {"y": x + extra["bias"], "count": torch.tensor(3)}

    def work(comm):
        torch.manual_seed(0)
        policy = MixedPrecision(param="bfloat16", output="float32")
        model = fully_shard(Model(), comm, mp_policy=policy)
        output = model(torch.ones(2, 4), extra={"bias": torch.ones(4)})
        assert model.seen == [torch.bfloat16] * 2
        assert output["y"].dtype == torch.float32
        assert output["count"].dtype == torch.int64
        output["y"].sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.numel())

    run_ranks(1, work)
