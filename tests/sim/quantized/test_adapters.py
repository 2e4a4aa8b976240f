"""Adapters of peft over quantised layers; models that transformers quantised."""

import copy
import warnings

import peft
import pytest
import torch
from transformers import BitsAndBytesConfig

from fullshard.core.testing import run_ranks
from support import quantized
from support.models import batches, causal_loss, seq2seq_loss
from support.parity import ROWS_PER_RANK, train_sharded, train_unsharded
from support.quantized import NF4, t5

pytestmark = pytest.mark.parity


def compare(plain_model, loss_of, steps=4):
    """Train a model, and two shards of a copy."""
    copies = [copy.deepcopy(plain_model) for _ in range(2)]
    data = batches(steps, 2 * ROWS_PER_RANK)
    plain = train_unsharded(plain_model, loss_of, data)
    for run in run_ranks(2, lambda comm: train_sharded(copies[comm.rank], comm, loss_of, data)):
        quantized.assert_same(run, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"adapter": "ia3"},
        {"use_dora": True},
        {"use_rslora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_an_adapter_over_quantised_layers_equals_peft(options):
    model, _ = quantized.saved(t5)
    compare(quantized.reference(model, NF4, **options), seq2seq_loss)


@pytest.mark.parametrize(
    ("make", "loss_of", "four_bits"),
    [(t5, seq2seq_loss, True), (quantized.gpt2, causal_loss, True), (quantized.gpt2, causal_loss, False)],
)
def test_a_model_that_transformers_quantised_is_sharded_as_it_is(make, loss_of, four_bits):
    _, path = quantized.saved(make)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    settings |= {"bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(**settings) if four_bits else BitsAndBytesConfig(load_in_8bit=True)
    model = make().__class__.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, r=4, lora_alpha=8, init_lora_weights=False))
    compare(model.train(), loss_of)
