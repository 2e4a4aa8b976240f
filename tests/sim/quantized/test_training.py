"""LoRA over quantised weights, sharded, equals peft over bitsandbytes' layers, unsharded."""

import copy

import pytest

from fullshard import Quantize
from fullshard.core.testing import run_ranks
from support import quantized
from support.models import batches
from support.parity import ROWS_PER_RANK, train_sharded, train_unsharded

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    ("kind", "type", "double", "size"),
    [
        ("t5", "nf4", True, 1),
        ("t5", "nf4", True, 3),
        ("bart", "nf4", True, 2),
        ("llama", "nf4", True, 2),
        ("t5", "nf4", False, 2),
        ("llama", "int8", False, 2),
        ("bart", "int8", False, 3),
    ],
)
def test_lora_from_files_and_from_bitsandbytes_layers_equals_peft(kind, type, double, size):
    make, loss_of = quantized.MODELS[kind]
    quantize = Quantize(type, double_quant=double, skip=quantized.SKIP)
    model, path = quantized.saved(make)
    plain_model = quantized.reference(model, quantize)
    copies = [copy.deepcopy(plain_model) for _ in range(size)]
    data = batches(4, size * ROWS_PER_RANK)
    plain = train_unsharded(plain_model, loss_of, data)
    for run in run_ranks(size, lambda comm: train_sharded(copies[comm.rank], comm, loss_of, data)):
        quantized.assert_same(run, plain)

    def from_files(comm):
        sharded = quantized.sharded_from_files(make, path, comm, quantize)
        return train_sharded(sharded, comm, loss_of, data, sharded=True)

    for run in run_ranks(size, from_files):
        quantized.assert_same(run, plain)
