"""Frozen parameters sharded or replicated; what is said where ranks part in debug mode."""

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, ShardingStrategy, TransformerBlocks, full_tensors, fully_shard, units
from fullshard.core.engine.setup import api, wrap
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, MismatchError
from support.models import KINDS, TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import assert_trains_alike, on_ranks, replicas, size_for

pytestmark = pytest.mark.parity

SIZE = 2


class Adapter(nn.Module):
    """A frozen linear and a small trainable one beside it, as LoRA has."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted_lm():
    model = TinyLM().requires_grad_(False)
    for block in model.blocks:
        block.up, block.side = Adapter(block.up), Adapter(block.side)
    return model


@pytest.mark.parametrize("frozen", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("make", "loss_of"), [(adapted_lm, lm_loss), (lm_with_frozen_parts, lm_loss), KINDS["t5_frozen_encoder"]]
)
def test_frozen_parameters_anywhere_give_the_unsharded_run(make, loss_of, frozen):
    assert_trains_alike(make, loss_of, steps=6, frozen=frozen)


@pytest.mark.parametrize("strategy", [one for one in ShardingStrategy if one is not ShardingStrategy.FULL_SHARD])
def test_replicated_frozen_parameters_under_every_strategy(strategy):
    assert_trains_alike(adapted_lm, lm_loss, size_for(strategy), steps=4, strategy=strategy, frozen="replicate")


def step_of(models, **options):
    """Collectives and bytes of the second step, the frozen elements kept, and the table."""

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger, **options)
        for tokens in batches(2, 2):
            ledger.entries.clear()
            lm_loss(model, tokens).backward()
        kept = sum(rows_of(p).numel() for p in model.parameters() if not p.requires_grad)
        return ledger.names, ledger.sent_bytes, kept, units(model)

    return run_ranks(SIZE, work)[0]


def test_replicated_frozen_parameters_send_nothing(monkeypatch):
    _, models = replicas(adapted_lm, SIZE)
    names, sent, kept, table = step_of(models, frozen="replicate", wrap=TransformerBlocks({"Block"}))
    trainable = sum(row.trainable for row in table.rows)
    assert kept == sum(row.parameters for row in table.rows) - trainable
    flags = 8 * (2 + sum(row.tensors for row in table.rows))
    assert sent <= 3 * 1.2 * 4 * trainable / SIZE + flags
    assert names.count("all_gather") == 8  # of each block's adapters, forward and backward
    monkeypatch.setattr(wrap, "TINY_NUMEL", 10_000)
    _, models = replicas(adapted_lm, SIZE)
    names, _, _, table = step_of(models, frozen="replicate")
    assert [row.unit for row in table.rows] == ["(root)", "blocks.0 .. 3"]  # what is not sent does not count
    assert names.count("all_gather") == 2


def test_auto_replicates_what_takes_at_most_a_quarter_of_the_smallest_rank(monkeypatch):
    frozen_bytes = 4 * sum(p.numel() for p in adapted_lm().parameters() if not p.requires_grad)

    def kept(smallest):
        _, models = replicas(adapted_lm, SIZE)
        memory = iter([10**12, smallest])
        monkeypatch.setattr(api, "device_memory_bytes", lambda _device: next(memory))
        _, _, kept, table = step_of(models, frozen="auto", wrap=TransformerBlocks({"Block"}))
        return kept == sum(row.parameters - row.trainable for row in table.rows)

    assert kept(4 * frozen_bytes)
    assert not kept(4 * frozen_bytes - 4)
    with pytest.raises(ConfigError, match="frozen must be one of shard, replicate, auto; got 'both'"):
        run_ranks(1, lambda comm: fully_shard(TinyLM(), comm, frozen="both"))


def test_replicated_frozen_parameters_are_streamed_whole_and_kept_in_the_compute_dtype():
    reference, models = replicas(adapted_lm, SIZE)

    def work(comm):
        model = fully_shard(
            models[comm.rank], comm, frozen="replicate", mp_policy=MixedPrecision(param="bf16", reduce="fp32")
        )
        streamed = {name: tensor for _, tensors in full_tensors(model) for name, tensor in tensors.items()}
        return streamed, {p.dtype for p in model.parameters() if not p.requires_grad}

    (first, dtypes), _ = run_ranks(SIZE, work)
    assert dtypes == {torch.bfloat16}
    for name, p in reference.named_parameters():
        assert torch.equal(first[name], p if p.requires_grad else p.bfloat16()), name


def test_debug_mode_names_the_units_in_every_step(monkeypatch):
    def work(comm, model):
        for tokens in batches(2, 2):
            lm_loss(model, tokens).backward()
        if comm.rank:
            model.blocks = nn.ModuleList(reversed(model.blocks))
        with pytest.raises(MismatchError) as caught:
            lm_loss(model, batches(1, 2)[0]).backward()
        return str(caught.value)

    monkeypatch.setenv("FULLSHARD_DEBUG", "1")
    for message in on_ranks(SIZE, TinyLM, work, wrap=TransformerBlocks({"Block"})):
        assert "rank 0: all-gather of unit blocks.0; rank 1: all-gather of unit blocks.3" in message
