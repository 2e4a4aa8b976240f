"""Codes, scales and dequantised weights are bitsandbytes' own of the unsharded model, to the bit, on any ranks."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fullshard import Pretrained, Quantize, fully_shard
from fullshard.core.comm import RecordingComm
from fullshard.core.quantized.formats import NF4, bitsandbytes
from fullshard.core.testing import run_ranks
from support import quantized
from support.quantized import t5

TYPES = [("nf4", True), ("nf4", False), ("int8", False)]
SIZES = [1, 2, 3, 8]
SHAPES = [(64, 64), (320, 640), (5001, 40), (48, 40), (33, 96), (3, 32), (7, 10), (5, 33), (1, 100), (130, 2)]
"""(out, in): whole blocks; more than 256 blocks; blocks that two ranks share; blocks across rows; a short last
block; an odd number; one row."""


def by_weight(stored):
    return {name: [part.reshape(-1).view(torch.uint8) for part in parts] for name, parts in stored.items()}


def expected(model, quantize, names):
    """Codes, scales as bytes, and dequantised weights of the unsharded model, by bitsandbytes."""
    found = {}
    for name in names:
        codes, state, weight = quantized.bitsandbytes_stored(model.get_submodule(name).weight.data, quantize)
        if quantize.type == "int8":
            parts = [state]
        elif quantize.double_quant:
            parts = [state.state2.absmax, state.offset.reshape(1), state.absmax]
        else:
            parts = [state.absmax]
        scales = torch.cat([part.reshape(-1).contiguous().view(torch.uint8) for part in parts])
        if quantize.type != "int8" and weight.shape[1] % 64:
            weight = by_hand(codes, state, weight.shape)  # which scales bitsandbytes takes here depends on the CPU
        # int8 is dequantised to float32, which then takes the dtype of the weight.
        weight = weight.to(model.get_submodule(name).weight.dtype)
        found[name] = [codes.reshape(-1).view(torch.uint8), scales, weight.reshape(-1).view(torch.uint8)]
    return found


def largest(state):
    """The largest absolute value of each block, as bitsandbytes dequantises it."""
    functional = bitsandbytes().functional
    return functional.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax


def by_hand(codes, state, shape):
    """Dequantise by the format: a number of the table times the scale of its block of 64."""
    scales = largest(state)
    table = bitsandbytes().functional.get_4bit_type(state.quant_type, device="cpu")
    numbers = torch.stack([codes.reshape(-1) >> 4, codes.reshape(-1) & 15], 1).reshape(-1)
    numel = shape[0] * shape[1]
    return (table[numbers[:numel].long()] * scales.repeat_interleave(64)[:numel]).reshape(shape)


def assert_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, parts in ours.items():
        for what, mine, yours in zip(("codes", "scales", "weight"), parts, theirs[name], strict=True):
            assert torch.equal(mine, yours), f"{what} of {name}"


def linears(dtype):
    return nn.ModuleList(nn.Linear(width, rows, bias=False, dtype=dtype) for rows, width in SHAPES)


@pytest.mark.parametrize(("type", "double"), TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_every_shape_have_bitsandbytes_bits_on_any_number_of_ranks(type, double, dtype, tmp_path):
    torch.manual_seed(0)
    model = linears(dtype)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    quantize = Quantize(type, double_quant=double)
    theirs = expected(model, quantize, [str(index) for index in range(len(SHAPES))])

    def rank(comm):
        with torch.device("meta"):
            mine = linears(dtype).requires_grad_(requires_grad=False)
        fully_shard(mine, comm, wrap=None, weights=Pretrained(tmp_path, quantize=quantize))
        return by_weight(quantized.stored(mine))

    for size in SIZES:
        for ours in run_ranks(size, rank):
            assert_bits(ours, theirs)


@pytest.mark.parametrize(("type", "double"), TYPES)
def test_layers_of_bitsandbytes_keep_their_bits(type, double):
    quantize = Quantize(type, double_quant=double, skip=quantized.SKIP)
    torch.manual_seed(0)
    model = t5()
    names = [n for n, m in model.named_modules() if type_is_linear(m) and not n.endswith(quantized.SKIP)]
    theirs = expected(model, quantize, names)
    quantized.with_bitsandbytes(model, quantize)

    def rank(comm):
        mine = copies[comm.rank]
        fully_shard(mine, comm)
        return by_weight(quantized.stored(mine))

    for size in (2, 3):
        copies = [copy.deepcopy(model) for _ in range(size)]
        for ours in run_ranks(size, rank):
            assert_bits(ours, theirs)


def type_is_linear(module):
    return type(module) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [64 * 9000, 64 * 9000 + 37, 64, 5])
def test_codes_by_counting_are_those_of_bitsandbytes_search(dtype, weights):
    values = torch.randn(weights, generator=torch.Generator().manual_seed(0)).to(dtype)
    if weights > 1000:
        values[:64] = 0
        values[70], values[200], values[300] = torch.inf, torch.nan, -torch.inf
    codes, largest = NF4(double=False).quantise(values, (1, weights))
    expected, state = bitsandbytes().functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    assert torch.equal(codes, expected.reshape(-1))
    assert torch.equal(largest.nan_to_num(7), state.absmax.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_code_is_of_the_nearest_number(dtype):
    values = torch.randn(64 * 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, largest = NF4(double=False).quantise(values, (500, 64))
    found = torch.stack([codes >> 4, codes & 15], 1).reshape(500, 64)
    table = bitsandbytes().functional.get_4bit_type("nf4", device="cpu").double()
    assert torch.equal(largest, values.view(500, 64).abs().amax(1).float())
    apart = (values.view(500, 64).double() / largest.double().unsqueeze(1)).unsqueeze(2).sub(table).abs()
    chosen = apart.gather(2, found.long().unsqueeze(2)).squeeze(2)
    # Numbers are divided in float32: two roundings of at most 1.
    assert (chosen - apart.amin(2)).max() <= 2**-23


def test_codes_of_numbers_beside_a_bound_are_those_of_bitsandbytes_search():
    map = bitsandbytes().functional.get_4bit_type("nf4", device="cpu")
    bounds = (map[:-1] + map[1:]) / 2
    beside = [torch.nextafter(bounds, torch.full_like(bounds, end)) for end in (-2, 2)]
    near = torch.cat([bounds, *beside, torch.tensor([1.0, -1.0, 0.0, -0.0])])
    values = torch.cat([near, torch.ones(64 - near.numel() % 64)])
    codes, _ = NF4(double=False).quantise(values, (1, values.numel()))
    expected, _ = bitsandbytes().functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    assert torch.equal(codes, expected.reshape(-1))


@pytest.mark.parametrize("numbers", ["finite", "nan", "inf"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("blocks", [1, 255, 256, 257, 1000])
def test_a_part_of_the_scales_is_that_part_of_all_scales(blocks, double, numbers):
    format = NF4(double=double)
    largest = torch.rand(blocks, generator=torch.Generator().manual_seed(0))
    if numbers != "finite":
        largest[blocks // 2] = float(numbers)
    everything = format.pack(largest)
    if double:
        mean = largest.mean()
        codes, outer = bitsandbytes().functional.quantize_blockwise(largest - mean, blocksize=256)
        parts = [outer.absmax.view(torch.uint8), mean.view(1).view(torch.uint8), codes]
        assert torch.equal(everything, torch.cat(parts))
    bounds = [0, 1, 4, 6, 8, 9, 11, 20, 200, 263, 264, 270, 520, 600, everything.numel()]
    for start in bounds:
        for stop in (one for one in bounds if start <= one <= everything.numel()):
            assert torch.equal(format.pack(largest, start, stop), everything[start:stop]), (start, stop)


def test_scales_of_many_layers_are_shared_in_one_collective(tmp_path):
    torch.manual_seed(0)
    model = linears(torch.float32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")

    def rank(comm):
        with torch.device("meta"):
            mine = linears(torch.float32).requires_grad_(requires_grad=False)
        ledger = RecordingComm(comm)
        fully_shard(mine, ledger, wrap=None, weights=Pretrained(tmp_path, quantize=Quantize("nf4")))
        return sum(entry.collective == "all_reduce" for entry in ledger.entries)

    assert max(run_ranks(2, rank)) < len(SHAPES)
