"""Losses that read ``lm_head.weight`` outside the head's forward, as Liger's kernel and TRL's chunked loss do."""

import types

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin, prepare
from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from fullshard.compat.torch_fsdp.wrap import RepeatedBlocks
from fullshard.core.engine.setup import wrap
from fullshard.core.engine.step.lane import Lane
from fullshard.core.testing import run_ranks
from support.parity import assert_same_run, replicas, train_sharded, train_unsharded

VOCAB = 64
DATA = [torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step)) for step in range(3)]


@pytest.fixture(autouse=True)
def heads_are_large(monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 1000)


def llama(tied=False):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=tied, **sizes))


def fused(self, input_ids, labels):
    """As Liger's: the hidden states and the head's weight go into one function."""
    hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1]
    return {"loss": F.cross_entropy(F.linear(hidden, self.lm_head.weight).flatten(0, 1), labels[:, 1:].flatten())}


def chunked(self, input_ids, labels):
    """As TRL's: a chunk of the logits at a time, computed again in backward."""
    hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1]

    def part(states, targets):
        return F.cross_entropy(F.linear(states, self.lm_head.weight).flatten(0, 1), targets.flatten(), reduction="sum")

    pairs = zip(hidden.split(2, 1), labels[:, 1:].split(2, 1), strict=True)
    return {"loss": sum(checkpoint(part, *pair, use_reentrant=False) for pair in pairs) / labels[:, 1:].numel()}


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens)["loss"]


def all_params(model):
    return [param for unit in model._fullshard_runtime.units for param in unit.params]


def by_one_import(model, comm, version):
    """Sharded as by the Trainer and Accelerator without settings; those have a process group for version 1."""
    if version == 1:
        return FSDP(model, comm, auto_wrap_policy=RepeatedBlocks()).module
    return prepare.shard(model, Plugin(fsdp_version=2), comm)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("forward", "tied"), [(fused, False), (chunked, False), (chunked, True)])
def test_values_are_right_and_the_head_is_gathered_once_a_pass(forward, tied, version, monkeypatch):
    reference, models = replicas(lambda: llama(tied), 2)
    for model in (reference, *models):
        model.forward = types.MethodType(forward, model)
    issued, issue = [], Lane.issue_gather
    monkeypatch.setattr(Lane, "issue_gather", lambda lane: issued.append(lane) or issue(lane))

    def work(comm):
        model = by_one_import(models[comm.rank], comm, version)
        run = train_sharded(model, comm, loss_of, DATA, sharded=True)
        lane = next(p.lane for p in all_params(model) if "lm_head.weight" in (p.meta.name, *p.meta.aliases))
        return run, sum(one is lane for one in issued)

    plain = train_unsharded(reference, loss_of, DATA)
    for run, gathers in run_ranks(2, work):
        assert_same_run(run, plain)
        assert (
            len(DATA) <= gathers <= 2 * len(DATA) + 1
        )  # forward and backward, however many chunks; and for the weights after it


def test_a_decorated_forward_is_the_models_own():
    model = llama()
    autocast = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(convert_outputs_to_fp32(autocast), model)  # as Accelerate does for bf16
    assert model.lm_head in RepeatedBlocks()._run_policy(model, set(), {})
