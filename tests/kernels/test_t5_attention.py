"""T5's attention in one kernel: values and gradients of transformers' eager attention, in Triton's interpreter."""

import mmap

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention, eager_attention_forward

from fullshard.program.speed.t5_attention.launch import CARDS, Attention, Blocks
from fullshard.program.speed.t5_attention.operator import t5_attention
from support.philox import kept, philox

HEADS, MOST, SEED = 2, 12, 0x123456789ABCDEF
BUCKETS = 8


def layer(width=16, *, causal=False, bias=True):
    """transformers' layer of T5, with a bias that matters."""
    torch.manual_seed(0)
    config = T5Config(
        **{"d_model": 8, "d_kv": width, "num_heads": HEADS, "is_decoder": causal, "layer_idx": 0},
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=MOST,
    )
    made = T5Attention(config, has_relative_attention_bias=bias, layer_idx=0, is_causal=causal)
    if bias:
        torch.nn.init.normal_(made.relative_attention_bias.weight, std=2.0)
    return made


def states(rows, queries, keys, width, dtype=torch.float32):
    """Queries, keys and values as a layer has them."""
    torch.manual_seed(1)
    made = (torch.randn(rows, length, HEADS, width, dtype=dtype) for length in (queries, keys, keys))
    return [one.transpose(1, 2).requires_grad_() for one in made]


def numbers(kind, rows, queries, keys):
    """Segment numbers of the operator, and of each query and key."""
    if kind is None:
        return None, torch.ones(rows, queries), torch.ones(rows, keys)
    if kind == "padded":
        of_keys = torch.ones(rows, 1, 1, keys, dtype=torch.int32)
        of_keys[-1, ..., -(keys // 3) :] = 0
        return of_keys, torch.ones(rows, queries), of_keys[:, 0, 0]
    of = [torch.arange(n).mul(4).div(n, rounding_mode="floor").add(1).expand(rows, -1) for n in (queries, keys)]
    of[0], of[1] = of[0].clone(), of[1].clone()
    of[0][-1, -3:], of[1][-1, -3:] = 1 << 30, (1 << 30) + 1  # padding, which sees and is seen by nothing
    return torch.cat(of, dim=1)[:, None, None].int(), *of


def ours(given, module, segments, *, causal, rate=0.0):
    table = module.relative_attention_bias.weight.t() if module.has_relative_attention_bias else None
    seed = torch.tensor([SEED]) if rate else None
    return t5_attention(Attention(*given, table, segments, seed, causal, not causal, MOST, 1.0, rate))


def eager(given, module, of_queries, of_keys, *, causal, stays=None, rate=0.0, monkeypatch=None):
    """transformers' eager attention, in the widest dtype; queries that see nothing give zeros."""
    queries, keys = given[0].shape[2], given[1].shape[2]
    sees = (of_queries[:, None, :, None] == of_keys[:, None, None, :]) & (
        torch.ones(queries, keys).tril().bool() if causal else torch.tensor(data=True)
    )
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    bias = module.compute_bias(queries, keys) if module.has_relative_attention_bias else None
    if stays is not None:
        monkeypatch.setattr(functional, "dropout", lambda weights, **_: weights * stays / (1 - rate))
    output, _ = eager_attention_forward(module, *given, mask, scaling=1.0, position_bias=bias, dropout=rate)
    return output.transpose(1, 2) * sees.any(-1, keepdim=True)


def leaves(given, module):
    return [*given, *([module.relative_attention_bias.weight] if module.has_relative_attention_bias else [])]


def assert_near(found, wanted, tolerance):
    for name, one, other in zip(("output", "dq", "dk", "dv", "table"), found, wanted, strict=False):
        assert (one - other).abs().max() <= tolerance * other.abs().max(), name


CASES = {
    "odd": (1, 150, 150, 16, {}),
    "padded": (2, 70, 70, 16, {"kind": "padded"}),
    "packed": (1, 150, 150, 16, {"kind": "packed"}),
    "causal": (1, 101, 101, 16, {"causal": True}),
    "causal and packed": (2, 70, 70, 16, {"causal": True, "kind": "packed"}),
    "cross and padded": (2, 33, 70, 24, {"bias": False, "kind": "padded"}),
    "cross and packed": (1, 70, 140, 16, {"bias": False, "kind": "packed"}),
    "one query": (2, 1, 5, 16, {"bias": False}),
    "64 wide": (1, 20, 20, 64, {}),
    "80 wide": (1, 20, 20, 80, {}),
    "128 wide": (1, 20, 20, 128, {"causal": True}),
    "4 wide": (1, 9, 9, 4, {}),
    "dropout": (2, 39, 39, 16, {"kind": "padded", "rate": 0.25}),
    "dropout, causal and packed": (1, 70, 70, 16, {"causal": True, "kind": "packed", "rate": 0.1}),
    "dropout and cross": (1, 33, 70, 16, {"bias": False, "rate": 0.5}),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_eager_attention(case, monkeypatch):
    rows, queries, keys, width, how = CASES[case]
    causal, rate = how.get("causal", False), how.get("rate", 0.0)
    module = layer(width, causal=causal, bias=how.get("bias", True))
    given = states(rows, queries, keys, width)
    segments, *of = numbers(how.get("kind"), rows, queries, keys)
    stays = kept(SEED, rows, HEADS, queries, keys, rate) if rate else None
    weights = torch.randn(rows, HEADS, queries, width)
    outputs = [
        ours(given, module, segments, causal=causal, rate=rate),
        eager(given, module, *of, causal=causal, stays=stays, rate=rate, monkeypatch=monkeypatch),
    ]
    found, wanted = ([one, *torch.autograd.grad((one * weights).sum(), leaves(given, module))] for one in outputs)
    assert_near(found, wanted, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_near_and_equal_to_the_bit_in_two_runs(dtype):
    module = layer(causal=True)
    given = [one.detach().to(dtype).requires_grad_() for one in states(1, 70, 70, 16)]
    segments, *of = numbers("packed", 1, 70, 70)
    weights = torch.randn(1, HEADS, 70, 16)

    def run(output):
        return [output, *torch.autograd.grad((output * weights).sum(), leaves(given, module))]

    found, again = (run(ours(given, module, segments, causal=True, rate=0.1)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    found = run(ours(given, module, segments, causal=True))
    given = [one.detach().float().requires_grad_() for one in given]
    assert_near(found, run(eager(given, module, *of, causal=True)), 2e-2)


def test_a_recomputed_block_drops_the_same_weights():
    module, given = layer(), states(1, 20, 20, 16)

    def attend(*states):
        seed = torch.randint(2**63 - 1, (1,))
        table = module.relative_attention_bias.weight.t()
        return t5_attention(Attention(*states, table, None, seed, False, True, MOST, 1.0, 0.3)).square()

    results = []
    for call in (attend, lambda *states: checkpoint(attend, *states, use_reentrant=False)):
        torch.manual_seed(3)
        output = call(*given)
        results.append([output, *torch.autograd.grad(output.sum(), leaves(given, module))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_numbers_are_philoxs():
    """Known answers of Random123, for ten rounds."""
    zeros, ones = [0], [0xFFFFFFFF]
    answer = [f"{int(one[0]):08x}" for one in philox([zeros] * 4, (0, 0), rounds=10)]
    assert answer == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    answer = [f"{int(one[0]):08x}" for one in philox([ones] * 4, (0xFFFFFFFF, 0xFFFFFFFF), rounds=10)]
    assert answer == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_dropout_drops_its_share_and_no_two_heads_alike():
    stays = kept(SEED, 2, HEADS, 64, 64, 0.25).float()
    assert abs(stays.mean() - 0.75) < 0.01
    flat = stays.view(4, -1)
    assert all(not torch.equal(flat[i], flat[j]) for i in range(4) for j in range(i))


def test_offsets_are_of_64_bits():
    """Rows that lie more than 2^31 elements apart, in memory that nobody promises."""
    apart, length = (1 << 31) + 64, 20
    memory = mmap.mmap(-1, 4 * (apart + 4096), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    space = torch.frombuffer(memory, dtype=torch.float32)
    near = states(2, length, length, 16)
    far = [space.as_strided(one.shape, (apart, 16, HEADS * 16, 1), 1024 * i) for i, one in enumerate(near)]
    for one, other in zip(far, near, strict=True):
        one.copy_(other.detach())
    module = layer()
    assert torch.equal(*(ours(given, module, None, causal=False) for given in (far, near)))


def test_a_frozen_table_has_no_sums():
    module, given = layer(), states(1, 20, 20, 16)
    trained = torch.autograd.grad(ours(given, module, None, causal=False).square().sum(), given)
    module.requires_grad_(False)
    frozen = torch.autograd.grad(ours(given, module, None, causal=False).square().sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(trained, frozen, strict=True))


@pytest.mark.parametrize("card", CARDS)
def test_the_blocks_of_every_card_give_the_same(card, monkeypatch):
    module, given = layer(causal=True), states(1, 140, 140, 16)
    wanted = torch.autograd.grad(ours(given, module, None, causal=True).square().sum(), leaves(given, module))
    monkeypatch.setattr("fullshard.program.speed.t5_attention.launch.CARDS", {0: CARDS[card]})
    found = torch.autograd.grad(ours(given, module, None, causal=True).square().sum(), leaves(given, module))
    assert_near([given[0], *found], [given[0], *wanted], 1e-5)
    assert all(isinstance(one, Blocks) for kernels in CARDS[card].values() for one in kernels.values())
