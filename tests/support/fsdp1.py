"""Models wrapped by FSDP1 on rank threads, each with its unsharded copy."""

import functools

import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Block

from fullshard.compat.torch_fsdp.api import MixedPrecision
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.compat.torch_fsdp.wrap import ModuleWrapPolicy
from fullshard.core.testing import run_ranks
from support.models import Block, TinyLM, lm_loss, lm_with_frozen_parts, seq2seq_loss, t5
from support.parity import replicas

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Normed(nn.Module):
    """Module with buffers, one of them not saved, extra state, an ignored part, and a parameter of three rows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.apart = nn.Linear(3, 3)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.seen = 0

    def forward(self, x):
        return self.apart(self.last(self.norm(self.first(x))))

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def normed_loss(model, tokens):
    return model(tokens[:, :6].float()).square().mean()


def wrapped_normed(model, comm, **options):
    return FSDP(model, comm, ignored_modules=[model.apart], **options)


POLICY = ModuleWrapPolicy({Block, T5Block})


KINDS = {
    "lm": (TinyLM, lm_loss, functools.partial(FSDP, auto_wrap_policy=POLICY)),
    "lm_frozen_parts": (lm_with_frozen_parts, lm_loss, functools.partial(FSDP, auto_wrap_policy=POLICY)),
    "t5": (t5, seq2seq_loss, functools.partial(FSDP, auto_wrap_policy=POLICY)),
    "normed": (Normed, normed_loss, wrapped_normed),
}


def same(ours, theirs):
    """Assert equal names, their order, dtypes and values."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, atol=0, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert ours[name] == value


def on_ranks(kind, size, work, **options):
    """Run ``work(comm, model, plain)`` on each rank, with a wrapped model and an equal plain one."""
    make, _, wrap = KINDS[kind]
    reference, models = replicas(make, 2 * size)
    del reference
    return run_ranks(size, lambda c: work(c, wrap(models[c.rank], c, **options), models[size + c.rank]))
