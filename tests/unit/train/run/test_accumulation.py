"""Micro-batches of a step: gradients that accumulate in shards or in full, what they send, and the unsharded step."""

import copy

import pytest
import torch

from fullshard import MixedPrecision, ShardingStrategy, fully_shard, unsharded
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.program.data import CollateSpec, LengthStats, RowRef, TokenizedSet, collate
from fullshard.program.train.run.step import StepSpec
from support.models import VOCAB, t5
from support.one_step import train_step

TIMES = 4  # micro-batches of a rank
STATS = LengthStats(mean=0.0, longest=0, truncated=0, limit=0)
IDS = torch.randint(3, VOCAB, (16, 9), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = TokenizedSet(
    source_ids=[[*row[: 2 + index % 3], 1] for index, row in enumerate(IDS)],
    target_ids=[[*row[: 1 + index % 4], 1] for index, row in enumerate(IDS)],
    source_stats=STATS,
    target_stats=STATS,
)
TWO_BY_TWO = ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def batch_of(rows):
    return collate([RowRef(row) for row in rows], ROWS, CollateSpec(pad_token_id=0, causal=False))


def stepped(size, *, full, replicas=1, **options):
    """A step of four micro-batches: of each rank the weights, and what was sent to its shard group and its replicas."""
    torch.manual_seed(0)
    model = t5()
    models = [copy.deepcopy(model) for _ in range(size)]
    spec = StepSpec(step=1, epoch=0.5, learning_rate=1e-2, max_grad_norm=1.0, causal=False, unsharded=full)

    def work(comm):
        groups = [RecordingComm(comm.split(groups)) for groups in TWO_BY_TWO] if replicas > 1 else [RecordingComm(comm)]
        mesh = tuple(groups) if replicas > 1 else groups[0]
        sharded = fully_shard(models[comm.rank], mesh, **options)
        mine = range(comm.rank, 16, size)
        batches = [batch_of(mine[part::TIMES]) for part in range(TIMES)]
        for group in groups:
            group.entries.clear()
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        report = train_step(sharded, optimizer, batches, comm, spec)
        entries = [list(group.entries) for group in groups]
        with unsharded(sharded):
            weights = {name: p.detach().clone() for name, p in sharded.named_parameters()}
        lanes = [lane for unit in sharded._fullshard_runtime.units for lane in unit.lanes]
        return report, weights, entries, sum(4 * lane.layout.shard_numel for lane in lanes)

    return model, run_ranks(size, work)


def sent(entries, kind, least=0):
    return [entry.sent_bytes for entry in entries if entry.collective == kind and entry.sent_bytes >= least]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_is_that_of_the_unsharded_model_and_gradients_travel_as_rarely_as_they_can(replicas, full):
    size = 2 * replicas
    strategy = ShardingStrategy.HYBRID_SHARD if replicas > 1 else ShardingStrategy.FULL_SHARD
    model, runs = stepped(size, full=full, replicas=replicas, strategy=strategy, tables="gather")
    batch = batch_of(range(16))
    loss = model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, labels=batch.labels_BT).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    for report, weights, entries, shards in runs:
        assert report.loss == pytest.approx(loss.item(), abs=1e-5)
        for name, weight in model.named_parameters():
            assert torch.allclose(weights[name], weight, rtol=0, atol=1e-5), name
        # To the other rank that shares the shards: each micro-batch half of all gradients, or once a step.
        assert sum(sent(entries[-1], "reduce_scatter")) == (1 if full else TIMES) * shards
        if replicas > 1:  # to the replica: this rank's sums, once a step; flags and norms are smaller
            assert sum(sent(entries[0], "all_reduce", least=1000)) == shards


def test_full_gradients_of_bf16_compute_accumulate_in_fp32():
    """A bf16 sum of four would differ by 2^-8 of a gradient."""
    options = {"mp_policy": MixedPrecision(param="bfloat16", reduce="float32")}
    (_, in_shards), (_, in_full) = (stepped(2, full=full, **options) for full in (False, True))
    for (one, ours, *_), (other, theirs, *_) in zip(in_shards, in_full, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-7) for name in ours)
