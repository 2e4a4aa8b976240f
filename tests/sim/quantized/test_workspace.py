"""Large weights are dequantised into memory that is kept: the same bits, one weight's memory, and none on a GPU."""

import copy
import threading

import pytest
import torch
from torch import nn

from fullshard import Quantize, TransformerBlocks, fully_shard
from fullshard.core.quantized import QuantizedLinear, formats, linear
from fullshard.core.quantized.formats import format_of
from fullshard.core.quantized.linear import Held
from fullshard.core.testing import run_ranks
from fullshard.planner import PlannedStep, simulate
from support import quantized
from support.models import batches, seq2seq_loss
from support.quantized import NF4, t5

SHAPES = [(64, 64), (320, 640), (48, 40), (33, 96), (7, 10), (5, 33), (1, 100)]


@pytest.fixture
def _every_weight_is_large(monkeypatch):
    monkeypatch.setattr(linear, "RECYCLED_BELOW", 0)
    monkeypatch.setattr(formats, "_DEQUANTISED", 1 << 10)


@pytest.mark.usefixtures("_every_weight_is_large")
@pytest.mark.parametrize(("type", "double"), [("nf4", True), ("nf4", False), ("int8", False)])
@pytest.mark.parametrize(("own", "dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_weight_has_the_bits_of_one_dequantised_at_once(type, double, own, dtype):
    own, dtype = getattr(torch, own), getattr(torch, dtype)
    format = format_of(Quantize(type, double_quant=double))
    kept = linear.Workspace(max(rows * width for rows, width in SHAPES))
    addresses = set()
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        codes, largest = format.quantise(weight.reshape(-1), shape)
        stored = codes.reshape(format.codes_shape(shape)), format.pack(largest)
        made = kept.weight(format, stored, shape, own, dtype)
        assert made.dtype == dtype
        assert torch.equal(made, format.weight_in_backward(*stored, shape, own, dtype))
        addresses.add(made.data_ptr())
        forward = kept.weight(format, stored, shape, dtype, dtype)
        x = torch.eye(shape[1], dtype=dtype)
        assert torch.equal(forward.T, format.linear(x, *stored, shape, None)), shape
    assert len(addresses) == 1


def layer(width, seed):
    """A layer in nf4."""
    format, made = format_of(Quantize("nf4")), nn.Linear(width, width)
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    codes, largest = format.quantise(weight.reshape(-1), (width, width))
    stored = codes.reshape(format.codes_shape((width, width))), format.pack(largest)
    QuantizedLinear.take_over(made, Held(format, *stored, torch.float32, None))
    return made


@pytest.mark.usefixtures("_every_weight_is_large")
def test_a_thread_does_not_write_over_the_weight_of_another(monkeypatch):
    """The second thread dequantises its weight while the first one multiplies with its own."""
    one, other = layer(64, 0), layer(64, 1)
    other.workspace = one.workspace
    x = torch.eye(64)
    with torch.no_grad():
        expected = one(x), other(x)
    linear, found, both = torch.nn.functional.linear, {}, threading.Barrier(2)

    def late(*arguments):
        both.wait(60)
        return linear(*arguments)

    def run(name, layer):
        with torch.no_grad():
            found[name] = layer(x)

    monkeypatch.setattr(torch.nn.functional, "linear", late)
    threads = [threading.Thread(target=run, args=one) for one in (("one", one), ("other", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found["one"], expected[0])
    assert torch.equal(found["other"], expected[1])


@pytest.mark.usefixtures("_every_weight_is_large")
def test_training_goes_on_after_an_evaluation_in_inference_mode():
    one, x = layer(64, 0), torch.randn(3, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    with torch.inference_mode():
        evaluated = one(x)
    assert torch.equal(one(x), evaluated)
    one(x).sum().backward()
    torch.testing.assert_close(x.grad, one.weight.sum(0).expand(3, -1), atol=1e-5, rtol=1e-5)


def trained(large, monkeypatch):
    monkeypatch.setattr(linear, "RECYCLED_BELOW", 0 if large else 1 << 60)
    plain = quantized.reference(quantized.saved(t5)[0], NF4)
    copies = [copy.deepcopy(plain) for _ in range(2)]

    def rank(comm):
        model = fully_shard(copies[comm.rank], comm, wrap=TransformerBlocks({"T5Block"}))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for tokens in batches(3, 2):
            loss = seq2seq_loss(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        assert len({id(layer.workspace) for layer in layers}) == 1
        held = layers[0].workspace._kept.memory
        return losses, None if held is None else (held.numel(), max(layer.before.numel() for layer in layers))

    return run_ranks(2, rank)


def test_training_with_kept_memory_is_the_same_to_the_bit_and_keeps_one_weight(monkeypatch):
    kept, fresh = trained(True, monkeypatch), trained(False, monkeypatch)
    for (losses, held), (others, none) in zip(kept, fresh, strict=True):
        assert losses == others
        assert none is None
        assert held[0] == held[1]


def test_blocks_that_were_sharded_before_share_the_memory_and_a_copy_has_none(monkeypatch):
    monkeypatch.setattr(linear, "RECYCLED_BELOW", 0)
    plain = quantized.reference(quantized.saved(t5)[0], NF4)

    def rank(comm):
        for block in plain.get_submodule("base_model.model.encoder.block"):
            fully_shard(block, comm)
        model = fully_shard(plain, comm)
        seq2seq_loss(model, batches(1, 1)[0])
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        copied = copy.deepcopy(layers[0].workspace)
        return (
            len({id(layer.workspace) for layer in layers}),
            layers[0].workspace._kept.memory is None,
            copied._kept.memory is None,
        )

    assert run_ranks(1, rank) == [(1, False, True)]


@pytest.mark.parametrize("gpu", [False, True])
def test_only_the_plan_of_a_cpu_rank_has_kept_memory(gpu, monkeypatch):
    monkeypatch.setattr(linear, "RECYCLED_BELOW", 0)
    format, shape, made = format_of(Quantize("nf4")), (64, 128), []

    def build(comm):
        frozen, trained = nn.Linear(128, 64, bias=False), nn.Linear(64, 8)
        stored = [
            torch.zeros(size, dtype=torch.uint8) for size in (format.codes_shape(shape), format.scales_bytes(shape))
        ]
        QuantizedLinear.take_over(frozen, Held(format, *stored, torch.float32, None))
        model = fully_shard(nn.Sequential(frozen, trained), comm, wrap=None)
        made.append(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        return PlannedStep(model, optimizer, lambda: model(torch.zeros(4, 128)).sum().backward())

    simulate(build, 0, 2, has_host=gpu)
    assert (made[0][0].workspace._kept.memory is None) == gpu
