"""What a step may be run with changes nothing of a quantised run either."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    Pretrained,
    Quantize,
    ShardingStrategy,
    TransformerBlocks,
    fully_shard,
    memory_summary,
    units,
    unsharded,
)
from fullshard.core.comm import RecordingComm
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.program.models import enable_activation_checkpointing, fuse_head
from support import quantized
from support.models import batches, causal_loss, seq2seq_loss
from support.parity import ROWS_PER_RANK, mesh_for, size_for, train_sharded, train_unsharded
from support.quantized import NF4, bart, llama, t5

BLOCKS = {"wrap": TransformerBlocks({"T5Block"})}


OFFLOAD = {"offload_policy": CPUOffload()}
SETTINGS = {
    "late prefetch": {"prefetch": BackwardPrefetch.BACKWARD_POST, **BLOCKS},
    "kept after forward": {"strategy": ShardingStrategy.SHARD_GRAD_OP, **BLOCKS},
    "not sharded": {"strategy": ShardingStrategy.NO_SHARD},
    "frozen in full": {"frozen": "replicate", **BLOCKS},
    "offload": OFFLOAD | BLOCKS,
    "one unit": {"wrap": None},
    "offload, not sharded": {"strategy": ShardingStrategy.NO_SHARD, **OFFLOAD},
    "offload, frozen in full": {"frozen": "replicate", **OFFLOAD, **BLOCKS},
    "offload, hybrid": {"strategy": ShardingStrategy.HYBRID_SHARD, **OFFLOAD, **BLOCKS},
    "hybrid, frozen by memory": {"strategy": ShardingStrategy.HYBRID_SHARD, "frozen": "auto", **BLOCKS},
    "hybrid, kept after forward": {"strategy": ShardingStrategy.HYBRID_SHARD_ZERO2, **BLOCKS},
}


@functools.cache
def plain_run(size):
    """A T5's directory, the batches of ``size`` ranks, and the unsharded run on them."""
    model, path = quantized.saved(t5)
    data = batches(3, size * ROWS_PER_RANK)
    return path, data, train_unsharded(quantized.reference(model, NF4), seq2seq_loss, data)


@pytest.mark.parity
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_engine_does_not_change_the_run(setting):
    options = SETTINGS[setting]
    strategy = options.get("strategy", ShardingStrategy.FULL_SHARD)
    size = size_for(strategy)
    path, data, plain = plain_run(size)

    def rank(comm):
        sharded = quantized.sharded_from_files(t5, path, mesh_for(strategy, comm), NF4, **options)
        return train_sharded(sharded, comm, seq2seq_loss, data, sharded=True)

    for run in run_ranks(size, rank):
        quantized.assert_same(run, plain)


@pytest.mark.parity
@pytest.mark.parametrize(("make", "loss_of"), [(t5, seq2seq_loss), (llama, causal_loss)])
def test_activation_checkpointing_does_not_change_the_run(make, loss_of):
    model, _ = quantized.saved(make)
    plain_model = quantized.reference(model, NF4)
    copies = [copy.deepcopy(plain_model) for _ in range(2)]
    data = batches(4, 2 * ROWS_PER_RANK)
    plain = train_unsharded(plain_model, loss_of, data)

    def rank(comm):
        mine = copies[comm.rank]
        enable_activation_checkpointing(mine)
        return train_sharded(mine, comm, loss_of, data)

    for run in run_ranks(2, rank):
        quantized.assert_same(run, plain)


@pytest.mark.parametrize("once", [False, True])
def test_generation_and_evaluation_give_what_bitsandbytes_gives(once):
    """Also where all units are gathered once: codes and scales stay as they are."""
    model, path = quantized.saved(t5)
    plain = quantized.reference(model, NF4).eval()
    prompt = batches(1, 2, seed=3)[0]
    expected = [plain.generate(input_ids=prompt[[r]], max_new_tokens=6, do_sample=False) for r in range(2)]
    with torch.no_grad():
        logits = plain(input_ids=prompt, decoder_input_ids=prompt).logits

    def rank(comm):
        mine = quantized.sharded_from_files(t5, path, comm, NF4).eval()
        with unsharded(mine, write_back=False) if once else nullcontext():
            gathered = memory_summary(mine)["gathered_peak"] if once else 0
            ids = mine.generate(input_ids=prompt[[comm.rank]], max_new_tokens=6, do_sample=False)
        assert memory_summary(mine)["gathered_peak"] == gathered or not once
        assert gathered == once * sum(row.gathered_bytes for row in units(mine).rows)
        with torch.no_grad():
            return ids, mine(input_ids=prompt, decoder_input_ids=prompt).logits

    for number, (ids, ours) in enumerate(run_ranks(2, rank)):
        assert torch.equal(ids, expected[number])
        assert (ours - logits).abs().max() <= 1e-5


def test_mixed_precision_casts_no_code_and_no_scale():
    _, path = quantized.saved(t5)

    def rank(comm):
        options = {"mp_policy": MixedPrecision(param="bf16", reduce="fp32")} if comm.size == 2 else {}
        mine = quantized.sharded_from_files(t5, path, comm, NF4, **options)
        if comm.size == 2:
            tokens = batches(1, 2)[0]
            seq2seq_loss(mine, tokens).backward()
        return {name: parts[:2] for name, parts in quantized.stored(mine).items()}

    full = run_ranks(1, rank)[0]
    for ours in run_ranks(2, rank):
        for name, parts in full.items():
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours[name], parts, strict=True)), name


class Block(nn.Module):
    """A quantised layer, and a vector to train."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x):
        return x + self.linear(x) * self.scale


@pytest.mark.parametrize(
    ("size", "quantize", "bytes_a_weight"),
    [(2, Quantize("nf4"), 0.52), (4, Quantize("nf4"), 0.52), (3, Quantize("int8"), 1.02)],
)
def test_a_rank_holds_and_gives_its_share_of_codes_and_scales(size, quantize, bytes_a_weight, tmp_path):
    count = 4
    torch.manual_seed(0)
    save_file(nn.Sequential(*(Block() for _ in range(count))).state_dict(), tmp_path / "model.safetensors")
    weights = count * 256 * 256

    def rank(comm):
        with torch.device("meta"):
            model = nn.Sequential(*(Block() for _ in range(count)))
        for block in model:
            block.linear.requires_grad_(requires_grad=False)
        ledger = RecordingComm(comm)
        fully_shard(model, ledger, wrap=lambda m: type(m) is Block, weights=Pretrained(tmp_path, quantize=quantize))
        frozen = [param for param in model.parameters() if not param.requires_grad]
        held = sum(rows_of(param).nbytes for param in frozen)
        shards = model._fullshard_runtime.tracker.live["shards"]
        ledger.entries.clear()
        model(torch.randn(2, 256, requires_grad=True)).sum().backward()
        gathered = sum(entry.sent_bytes for entry in ledger.entries if entry.collective == "all_gather")
        return held, shards, gathered

    for held, shards, gathered in run_ranks(size, rank):
        assert held <= 1.05 * bytes_a_weight * weights / size
        assert shards <= 1.05 * (bytes_a_weight * weights + 4 * 256 * count) / size
        # For forward and for backward, but the last block, which stays.
        assert gathered <= 1.05 * 2 * (bytes_a_weight * weights + 4 * 256 * count) / size * (size - 1)


@pytest.mark.parity
def test_the_fused_loss_does_not_change_the_run():
    model, path = quantized.saved(bart)
    plain_model = quantized.reference(model, NF4)
    data = batches(4, 2 * ROWS_PER_RANK)
    plain = train_unsharded(plain_model, labelled_loss, data)

    def rank(comm):
        def make():
            made = bart()
            fuse_head(made)
            return made

        mine = quantized.sharded_from_files(make, path, comm, NF4)
        return train_sharded(mine, comm, labelled_loss, data, sharded=True)

    for run in run_ranks(2, rank):
        quantized.assert_same(run, plain)


def labelled_loss(model, tokens):
    return model(input_ids=tokens, decoder_input_ids=tokens[:, :-1], labels=tokens[:, 1:].contiguous()).loss
