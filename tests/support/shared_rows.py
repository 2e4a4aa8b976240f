"""Models whose ranks share rows, beside the same run of one rank on full rows."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fullshard import ShardingStrategy, fully_shard, sequence_parallel, unsharded
from fullshard.core.comm import SoloComm
from fullshard.core.testing import run_ranks
from support.models import VOCAB, bart, gpt2, llama, t5

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {
    "llama": llama,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "gpt2": gpt2,
    "t5": t5,
    "bart": bart,
}
SOURCE, TARGET = 13, 7


def padded(generator, *, seq2seq, source=SOURCE, target=TARGET):
    """Two rows, one padded; no two splits of them are even."""
    ids = torch.randint(3, VOCAB, (2, source), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, source * 2 // 3 :] = 0
    if not seq2seq:
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    labels = torch.randint(3, VOCAB, (2, target), generator=generator)
    labels[0, target * 2 // 3 :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(generator, *, seq2seq):
    """A sequence of rows, told apart by positions, that crosses every border; of an encoder-decoder without padding."""
    ids = torch.randint(3, VOCAB, (2, SOURCE), generator=generator)
    if seq2seq:
        return {"input_ids": ids, "labels": torch.randint(3, VOCAB, (2, TARGET), generator=generator)}
    positions = torch.cat([torch.arange(length) for length in (2, 8, 3)])[None].expand(2, -1)
    starts = positions == 0
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(starts, -100)}


def batches_of(model, steps, groups=1):
    """For each step and group of ranks, two micro-batches."""
    generator, seq2seq = torch.Generator().manual_seed(0), model.config.is_encoder_decoder
    return [
        [[make(generator, seq2seq=seq2seq) for make in (padded, packed)] for _ in range(groups)] for _ in range(steps)
    ]


def step(model, micro_batches, optimizer, clip, context):
    """Accumulate over micro-batches, all but the last in ``context(model)``, and take a step; the losses."""
    losses, last = [], len(micro_batches) - 1
    for number, batch in enumerate(micro_batches):
        with context(model) if number < last else nullcontext():
            loss = model(**batch, use_cache=False).loss
            (loss / len(micro_batches)).backward()
        losses.append(loss.item())
    clip(model)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def adamw(model):
    # With the default eps of 1e-8, elements whose gradient is rounding alone would take steps of full length.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def nothing(model):
    return model


def checkpointed(model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def assert_shared_rows_train_alike(
    make,
    *,
    each,
    groups=1,
    steps=10,
    change=nothing,
    shared=nothing,
    optimizer=adamw,
    hybrid=False,
    clip=nothing,
    context=nullcontext,
):
    """Runs of ``groups`` groups of ``each`` ranks that share rows equal that of one rank on all groups' full rows.

    ``change`` is done to all models, ``shared`` to those whose rows are shared.
    """
    torch.manual_seed(0)
    reference = change(make().train())
    models = [copy.deepcopy(reference) for _ in range(each * groups)]
    data = batches_of(reference, steps, groups)

    def train(model, rows_of):
        own = optimizer(model)
        losses = [step(model, rows_of(row), own, clip, context) for row in data]
        with unsharded(model):
            return losses, {name: param.detach().clone() for name, param in model.named_parameters()}

    alone = fully_shard(reference, SoloComm(torch.device("cpu")))
    expected, weights = train(alone, lambda row: [batch for of_group in row for batch in of_group])

    def work(comm):
        group = comm.split([list(range(first, first + each)) for first in range(0, comm.size, each)])
        model = sequence_parallel(models[comm.rank], group)
        shared(model)
        if hybrid:
            across = comm.split([list(range(place, comm.size, each)) for place in range(each)])
            model = fully_shard(model, (across, group), strategy=ShardingStrategy.HYBRID_SHARD)
        else:
            model = fully_shard(model, comm)
        return train(model, lambda row: row[comm.rank // each])

    for rank, (losses, ours) in enumerate(run_ranks(each * groups, work)):
        first = rank // each * 2
        for theirs, here in zip(expected, losses, strict=True):
            assert here == pytest.approx(theirs[first : first + 2], abs=1e-5)
        for name, weight in weights.items():
            worst = (ours[name] - weight).abs().max().item()
            assert worst <= 1e-5, f"{name} differs by {worst:.1e}"
