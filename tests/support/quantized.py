"""Tiny models on disk, the same models of bitsandbytes' layers with peft's adapters, and their sharded counterparts."""

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import T5ForConditionalGeneration

from fullshard import Pretrained, Quantize, fully_shard, unsharded
from fullshard.core.quantized import QuantizedLinear
from fullshard.core.quantized.formats import bitsandbytes
from fullshard.program.models import AdapterSpec, AdapterWeights, add_adapter
from support import models

SKIP = ("lm_head", "wo")
"""``wo`` as transformers does: of T5's, which asks for its weight's dtype, bitsandbytes' layer would give bytes."""


def gpt2():
    """GPT-2, whose blocks have no nn.Linear: transposed ones, which are quantised in bitsandbytes' models only."""
    return models.gpt2(n_embd=64, n_layer=2, tie_word_embeddings=False)


def t5():
    """A T5 whose widths are multiples of 64: of others, bitsandbytes' kernel for CPUs takes wrong scales."""
    return T5ForConditionalGeneration(models.tiny_t5_config(d_model=64, d_kv=16, d_ff=128))


def bart():
    """The same of BART; its layers have biases."""
    return models.bart(d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, forced_eos_token_id=None)


def llama():
    """The same of Llama, with fewer heads of keys than of queries."""
    return models.llama(hidden_size=64, intermediate_size=128)


MODELS = {"t5": (t5, models.seq2seq_loss), "bart": (bart, models.seq2seq_loss), "llama": (llama, models.causal_loss)}


def saved(make, folder=None):
    """Save a model with random weights; returns it and its directory."""
    torch.manual_seed(0)
    model = make()
    path = Path(folder or tempfile.mkdtemp())
    model.save_pretrained(path)
    return model, path


def with_bitsandbytes(model, quantize):
    """Replace frozen linear layers by bitsandbytes' own, quantised on the CPU."""
    library = bitsandbytes()
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or any(f".{one}." in f".{name}." for one in quantize.skip):
            continue
        has_bias = layer.bias is not None
        if quantize.type == "int8":
            made = library.nn.Linear8bitLt(layer.in_features, layer.out_features, has_bias, has_fp16_weights=False)
            made.weight = library.nn.Int8Params(layer.weight.data, requires_grad=False)
        else:
            made = library.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                has_bias,
                compress_statistics=quantize.double_quant,
                quant_type=quantize.type,
            )
            made.weight = library.nn.Params4bit(
                layer.weight.data,
                requires_grad=False,
                compress_statistics=quantize.double_quant,
                quant_type=quantize.type,
                module=made,
            )
            # In eval mode on some CPUs bitsandbytes computes in bfloat16, and fails for layers as narrow as these.
            made.support_avx512bf16_for_cpu = False
        made.bias = layer.bias
        model.set_submodule(name, made.to("cpu"))
    return model.requires_grad_(requires_grad=False)


def lora_values(model, seed=1):
    """Return values for the adapter's parameters: random, so that the adapter does something from the first step."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(param.shape, generator=generator) * 0.1
        for name, param in model.named_parameters()
        if "lora_" in name
    }


def reference(model, quantize, adapter="lora", **options):
    """Return peft's model over bitsandbytes' layers, with random values in the adapter."""
    config = {"lora": peft.LoraConfig, "ia3": peft.IA3Config}[adapter]
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    low_rank = {"r": 4, "lora_alpha": 8} if adapter == "lora" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(with_bitsandbytes(model, quantize), config(task_type=kind, **low_rank, **options))
    values = lora_values(made)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if name in values:
                param.copy_(values[name])
    return made.train()


def sharded_from_files(make, path, comm, quantize, *, targets=None, **options):
    """Return the sharded peft model whose base is read and quantised by shards."""
    with torch.device("meta"):
        model = make()
    model.tie_weights()
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    quantize = replace(quantize, skip=tuple(one for one in quantize.skip if one in names))  # wo is T5's alone
    adapted = add_adapter(model, AdapterSpec("lora", str(path), r=4, lora_alpha=8, target_modules=targets), seed=0)
    weights = AdapterWeights(Pretrained(path, quantize=quantize), lora_values(adapted.model))
    return fully_shard(adapted.model, comm, weights=weights, **options)


def stored(model):
    """Return codes, scales and the dequantised weight of each quantised layer; every rank calls it."""
    with unsharded(model), torch.no_grad():
        return {
            name.replace(".base_layer", "").removeprefix("base_model.model."): (
                *(part.as_subclass(torch.Tensor).clone() for part in layer.stored),
                layer.dequantised(),
            )
            for name, layer in model.named_modules()
            if isinstance(layer, QuantizedLinear)
        }


def bitsandbytes_stored(weight, quantize):
    """Return bitsandbytes' codes, its state, and the dequantised weight, of an unsharded weight."""
    functional = bitsandbytes().functional
    if quantize.type == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return codes, scales, functional.int8_vectorwise_dequant(codes, scales)
    codes, state = functional.quantize_4bit(weight, quant_type=quantize.type, compress_statistics=quantize.double_quant)
    return codes, state, functional.dequantize_4bit(codes, state)


def assert_same(run, plain, tolerance=1e-5):
    """Losses, norms and adapters agree; quantised weights have other names in the two models."""
    for ours, theirs in zip(run[:2], plain[:2], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    trained = [name for name in plain[2] if "lora_" in name or "ia3_" in name]
    assert trained
    for name in trained:
        assert (run[2][name] - plain[2][name]).abs().max().item() <= tolerance, name


NF4 = Quantize("nf4", skip=SKIP)
