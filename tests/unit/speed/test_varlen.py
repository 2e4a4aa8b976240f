"""Packed rows without masks: losses and gradients of today's masks, by references of the kernels' signatures."""

import copy
import inspect

import pytest
import torch
from torch.nn.attention import varlen as torchs

from fullshard.program.models import enable_activation_checkpointing
from fullshard.program.models.packing import PACKABLE_CAUSAL
from fullshard.program.speed import WAYS, Facts
from fullshard.program.speed.varlen import WINDOWED
from support.packed_models import LONGEST, TOLERANCES, assert_same, build, loss_and_gradients, rows

OPTIONS = inspect.signature(torchs.varlen_attn).parameters
FACTS = Facts(torch.device("cuda"), torch.bfloat16, packing=True, longest=LONGEST)
SOFT = "gemma2"  # its config caps scores


def by_rows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """varlen_attn by its documentation, one row after the other; tokens (all, H, D).

    Without the option, such as in torch 2.11, ``enable_gqa`` is how the kernel always computes.
    """
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == cu_seq_q.diff().max()
    assert enable_gqa or "enable_gqa" not in OPTIONS or query.shape[1] == key.shape[1]
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    outputs = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        apart = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left = end if window_size[0] < 0 else window_size[0]
        allowed = (apart <= left) & (apart >= -window_size[1])
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        outputs.append((scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setattr(torchs, "varlen_attn", by_rows)


def with_way(plain, name="varlen"):
    way = copy.deepcopy(plain)
    assert WAYS[name].misfit(way, FACTS) is None
    WAYS[name].apply(way, FACTS)
    return way


@pytest.mark.parity
@pytest.mark.parametrize("kind", [kind for kind in PACKABLE_CAUSAL if kind != SOFT])
def test_packed_rows_have_the_loss_and_gradients_of_masks(kind):
    plain = build(kind, "sdpa")
    way = with_way(plain)
    enable_activation_checkpointing(way)
    _, packed = rows(causal=True)
    ours, theirs = (loss_and_gradients(model, packed, causal=True) for model in (way, plain))
    assert_same(ours, theirs, TOLERANCES.get(kind, 1e-12))


def windowed(kind, attention, **more):
    layers = {} if kind in ("mistral", "mixtral", "phi3", "starcoder2") else {"layer_types": ["sliding_attention"] * 2}
    if kind in ("qwen2", "qwen3", "smollm3"):
        layers |= {"use_sliding_window": True}
    return build(kind, attention, sliding_window=4, **layers, **more)


@pytest.mark.parity
@pytest.mark.parametrize("kind", WINDOWED)
def test_a_sliding_window_is_kept_within_each_row(kind, monkeypatch):
    monkeypatch.setattr("support.packed_models.LONGEST", 4)  # so that packing is not refused: varlen keeps windows
    plain = windowed(kind, "sdpa")
    padded, packed = rows(causal=True)
    ours, theirs = loss_and_gradients(with_way(plain), packed, True), loss_and_gradients(plain, padded, True)
    assert_same(ours, theirs, 1e-5)
    without = loss_and_gradients(build(kind, "sdpa"), padded, True)
    assert abs(without[0] - theirs[0]) > 1e-4 * theirs[0]


def test_what_the_kernel_cannot_do_is_refused():
    misfit, llama = WAYS["varlen"].misfit, build("llama", "sdpa")
    for changes, text in (
        ({"device": torch.device("cpu")}, "on CUDA, and this run computes in bfloat16 on cpu"),
        ({"dtype": torch.float32}, "this run computes in float32 on cuda"),
        ({"packing": False}, "training.packing is false, and llama is causal"),
    ):
        assert text in misfit(llama, Facts(**{**vars(FACTS), **changes}))
    assert "t5 has an encoder" in misfit(build("t5", "sdpa"), FACTS)
    assert "attn_logit_softcapping: 50" in misfit(build(SOFT, "eager"), FACTS)
    assert "has 0.1 for attention weights" in misfit(build("llama", "sdpa", attention_dropout=0.1), FACTS)
    moe = build("qwen2_moe", "sdpa")
    moe.config.layer_types, moe.config.sliding_window = ["sliding_attention"] * 2, 4
    assert "qwen2_moe do not tell attention their sliding window of 4 tokens, and rows may have 13" in misfit(
        moe, FACTS
    )
