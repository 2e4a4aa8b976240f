"""Two real processes quantise and train what bitsandbytes and peft do in one, unsharded."""

import hashlib
from pathlib import Path

import pytest
import torch

from support import quantized
from support.models import batches, seq2seq_loss
from support.parity import ROWS_PER_RANK, train_unsharded
from support.processes import run_processes
from support.quantized import t5

pytestmark = [pytest.mark.dist, pytest.mark.parity]


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_two_processes_have_bitsandbytes_bits_and_pefts_run(tmp_path):
    model, path = quantized.saved(t5, tmp_path)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    plain = train_unsharded(quantized.reference(model, quantized.NF4), seq2seq_loss, batches(10, 2 * ROWS_PER_RANK))
    run = run_processes(2, Path(__file__).with_name("quantized_main.py"), str(path))
    assert len(run["bits"]) == 28
    for name, (codes, _, weight) in run["bits"].items():
        expected = quantized.bitsandbytes_stored(weights[f"{name}.weight"], quantized.NF4)
        assert (codes, weight) == (digest(expected[0]), digest(expected[2])), name
    adapter = {name: torch.tensor(value) for name, value in run["adapter"].items()}
    quantized.assert_same((run["losses"], run["norms"], adapter), plain)
