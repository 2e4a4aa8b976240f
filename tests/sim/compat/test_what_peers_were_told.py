"""What users of other engines complained of, in every face that shards by ranks played by threads."""

import copy
import functools
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard import Prefetch, fully_shard, unsharded
from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin, prepare
from fullshard.compat.torch_fsdp import (
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
    StateDictType,
    fully_shard as fsdp2,
)
from fullshard.compat.torch_fsdp.wrap import ModuleWrapPolicy, RepeatedBlocks
from fullshard.core.comm import axes_of
from fullshard.core.engine.step.lane import Lane
from fullshard.core.optim import clip_grad_norm_
from fullshard.core.testing import run_ranks
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import (
    ROWS_PER_RANK,
    assert_same_run,
    replicas,
    rows_for,
    train_sharded,
    train_unsharded,
    two_by_two,
    weights_of,
)

pytestmark = pytest.mark.parity
BLOCKS = ModuleWrapPolicy({Block})


def by_fsdp1(model, comm, inside):
    replicate, shard = axes_of(comm, inside)
    hybrid = ShardingStrategy.HYBRID_SHARD
    return FSDP(model, (shard, replicate), sharding_strategy=hybrid, auto_wrap_policy=BLOCKS).module


def by_accelerate(model, comm, inside):
    return prepare.shard(model, Plugin(fsdp_version=2, auto_wrap_policy=BLOCKS), comm, axes_of(comm, inside))


@pytest.mark.parametrize("face", [by_fsdp1, by_accelerate])
@pytest.mark.parametrize(("size", "inside"), [(2, 1), (4, 2)])
def test_a_huge_gradient_on_one_rank_counts_once_in_the_norm_and_the_step(face, size, inside):
    """On meshes of replicas x shards; the last rank's loss is 10,000 times as large."""
    reference, models = replicas(TinyLM, size)
    start = copy.deepcopy(reference.state_dict())
    tokens = batches(1, size * ROWS_PER_RANK)[0]
    factors = [1.0] * (size - 1) + [1e4]
    parts = [tokens[ROWS_PER_RANK * r : ROWS_PER_RANK * (r + 1)] for r in range(size)]
    sum(factor * lm_loss(reference, part) / size for factor, part in zip(factors, parts, strict=True)).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    moved = max((value - start[name]).abs().max() for name, value in reference.state_dict().items())
    assert moved > 1e-2

    def work(comm):
        model = face(models[comm.rank], comm, inside)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        (factors[comm.rank] * lm_loss(model, rows_for(comm, tokens))).backward()
        found = clip_grad_norm_(model, 1.0)
        optimizer.step()
        return found, weights_of(model)

    for found, weights in run_ranks(size, work):
        torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
        for name, value in reference.named_parameters():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code
def test_compiled_blocks_on_replicas_of_shards_train_as_the_unsharded_model():
    reference, models = replicas(TinyLM, 4)
    data = batches(3, 4 * ROWS_PER_RANK)

    def work(comm):
        model, mesh = models[comm.rank], two_by_two(comm)
        for block in model.blocks:
            block.compile(backend="eager")
            fsdp2(block, mesh=mesh)
        return train_sharded(fsdp2(model, mesh=mesh), comm, lm_loss, data, sharded=True)

    plain = train_unsharded(reference, lm_loss, data)
    for run in run_ranks(4, work):
        assert_same_run(run, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_units_under_recompute_and_two_ahead_are_gathered_twice_a_step(reentrant, monkeypatch):
    reference, models = replicas(lambda: TinyLM(reentrant), 2)
    data, issued, issue = batches(4, 2 * ROWS_PER_RANK), [], Lane.issue_gather
    monkeypatch.setattr(Lane, "issue_gather", lambda lane: issued.append(lane) or issue(lane))

    def work(comm):
        model = models[comm.rank]
        units = {part for block in model.blocks for part in (block, block.up)}
        model = fully_shard(model, comm, wrap=units.__contains__, prefetch=Prefetch(forward=True, ahead=2))
        lanes = [lane for unit in model._fullshard_runtime.units for lane in unit.lanes]
        assert len(model._fullshard_runtime.units) == 1 + 4 + 4
        run = train_sharded(model, comm, lm_loss, data, sharded=True)
        return run, [sum(one is lane for one in issued) for lane in lanes]

    plain = train_unsharded(reference, lm_loss, data)
    for run, gathers in run_ranks(2, work):
        assert_same_run(run, plain)
        assert min(gathers) >= len(data)
        assert max(gathers) <= 2 * len(data) + 1  # the last one shows the weights to this test


class OneRow(nn.Module):
    """Blocks that are computed again, and parameters of one row, which only one rank holds."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(24, 40) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x * self.scale)


def zeroing(model):
    """An optimizer that keeps gradients as zeros."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
    return optimizer


@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_of_one_row_trains_where_gradients_are_zeroed(size):
    def loss_of(model, tokens):
        return model(tokens[:, :, None] / 50 * torch.linspace(-1, 1, 24)).square().mean()

    reference, models = replicas(OneRow, size)
    data = batches(4, size * ROWS_PER_RANK)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, prefetch=Prefetch(forward=True, ahead=2))
        return train_sharded(model, comm, loss_of, data, sharded=True, optimizer=zeroing(model))

    plain = train_unsharded(reference, loss_of, data)
    for run in run_ranks(size, work):
        assert_same_run(run, plain)


@pytest.mark.parametrize("version", [1, 2])
def test_the_first_update_after_only_the_model_was_loaded_is_a_new_optimizers(version):
    data = batches(4, 2 * ROWS_PER_RANK)
    _, models = replicas(TinyLM, 4)

    def shard(model, comm):
        if version == 1:
            return FSDP(model, comm, auto_wrap_policy=BLOCKS)
        for block in model.blocks:
            fsdp2(block, mesh=comm)
        return fsdp2(model, mesh=comm)

    def steps(model, comm, rows):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for tokens in rows:
            lm_loss(model, rows_for(comm, tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def work(comm):
        trained, other = shard(models[comm.rank], comm), shard(models[2 + comm.rank], comm)
        steps(trained, comm, data[:2])
        steps(other, comm, data[2:])
        kind = StateDictType.FULL_STATE_DICT if version == 1 else StateDictType.SHARDED_STATE_DICT
        with FSDP.state_dict_type(trained, kind), FSDP.state_dict_type(other, kind):
            other.load_state_dict(copy.deepcopy(trained.state_dict()))
        for model in (trained, other):
            steps(model, comm, data[:1])
        with unsharded(getattr(trained, "module", trained)), unsharded(getattr(other, "module", other)):
            pairs = zip(trained.named_parameters(), other.parameters(), strict=True)
            return [name for (name, one), two in pairs if not torch.equal(one, two)]

    assert run_ranks(2, work) == [[], []]


def llama(*, tied, resized, tokens):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **sizes))
    if resized:
        model.resize_token_embeddings(57, mean_resizing=False)
    if not tokens:
        return model
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 7, 20], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses names that transformers renamed
        return get_peft_model(model, config)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["tokens", "resized", "both"])
def test_trainable_tokens_and_resized_embeddings_train_as_unsharded(how, tied, version):
    def loss_of(model, tokens):
        return model(input_ids=tokens, labels=tokens).loss

    make = functools.partial(llama, tied=tied, resized=how != "tokens", tokens=how != "resized")
    reference, models = replicas(make, 2)
    data = batches(3, 2 * ROWS_PER_RANK)

    def work(comm):
        model = models[comm.rank]
        if version == 1:
            model = FSDP(model, comm, auto_wrap_policy=RepeatedBlocks()).module
        else:
            model = prepare.shard(model, Plugin(fsdp_version=2), comm)
        return train_sharded(model, comm, loss_of, data, sharded=True)

    plain = train_unsharded(reference, loss_of, data)
    for run in run_ranks(2, work):
        assert_same_run(run, plain)
