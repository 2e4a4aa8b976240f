"""A quantised model is written dequantised, whatever the runs it is streamed in; a merge equals peft's."""

import copy
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5ForConditionalGeneration

from fullshard import Pretrained, Quantize, fully_shard, save, unsharded
from fullshard.core.quantized import format_of
from fullshard.core.testing import run_ranks
from fullshard.state.saving import full
from support import quantized
from support.quantized import NF4, t5

SHAPES = [(64, 64), (48, 40), (33, 96), (7, 10), (5, 33), (130, 2)]


@pytest.mark.parametrize("quantize", [Quantize("nf4", double_quant=double) for double in (True, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_run_of_codes_is_dequantised_as_in_the_full_weight(quantize, shape):
    check_runs(quantize, shape)


def test_any_run_of_rows_is_dequantised_as_in_the_full_weight():
    for shape in SHAPES:
        check_runs(Quantize("int8"), shape)


def check_runs(quantize, shape):
    torch.manual_seed(0)
    format = format_of(quantize)
    codes, largest = format.quantise(torch.randn(shape).reshape(-1), shape)
    scales = format.pack(largest)
    full_weight = format.dequantise(codes.view(format.codes_shape(shape)), scales, shape, torch.float32).reshape(-1)
    for step in (1, 7, 32, 50, codes.numel()):
        for start in range(0, codes.numel(), step):
            first, values = format.dequantise_run(codes[start : start + step], start, scales, shape, torch.float32)
            assert torch.equal(values, full_weight[first : first + values.numel()])


def test_a_quantised_model_is_saved_dequantised(tmp_path, monkeypatch):
    monkeypatch.setattr(full, "_STREAM_BYTES", 3 * 1500)  # runs end inside blocks
    model, path = quantized.saved(t5, tmp_path / "model")
    expected = model.state_dict()
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and not name.endswith(quantized.SKIP):
            expected[f"{name}.weight"] = quantized.bitsandbytes_stored(layer.weight.data, NF4)[2]

    def rank(comm):
        with torch.device("meta"):
            mine = t5()
        mine.tie_weights()
        mine.requires_grad_(requires_grad=False)
        fully_shard(mine, comm, weights=Pretrained(path, quantize=NF4))
        save(mine, tmp_path / "saved")

    run_ranks(2, rank)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "saved").state_dict()
    assert loaded.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(loaded[name], value)] == []


def test_a_dequantised_weight_with_the_adapter_is_what_peft_merges(tmp_path):
    model, path = quantized.saved(t5, tmp_path)
    names = {n: m.weight.detach().clone() for n, m in model.named_modules() if n.endswith((".q", ".v"))}
    adapted = quantized.reference(copy.deepcopy(model), NF4)
    deltas = {n: adapted.base_model.model.get_submodule(n).get_delta_weight("default").detach() for n in names}
    dequantised = model
    for name, weight in names.items():
        dequantised.get_submodule(name).weight.data = quantized.bitsandbytes_stored(weight, NF4)[2]
    values = {n: p.detach().clone() for n, p in adapted.named_parameters() if "lora_" in n}
    merged = peft_merged(dequantised, values)

    def rank(comm):
        mine = quantized.sharded_from_files(t5, path, comm, NF4)
        with unsharded(mine), torch.no_grad():
            inside = mine.base_model.model
            return {n: inside.get_submodule(n).base_layer.weight + deltas[n] for n in names}

    for ours in run_ranks(2, rank):
        for name, weight in ours.items():
            assert torch.equal(weight, merged.get_submodule(name).weight), name


def peft_merged(model, values):
    """peft's merge of an adapter with these values into a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, lora_alpha=8)
        adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if name in values:
                param.copy_(values[name])
    return adapted.merge_and_unload()


def test_small_stored_weights_of_any_kind_are_read(tmp_path):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False, dtype=torch.float16)])
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    half = load_file(tmp_path / "model.safetensors")["0.weight"]

    def rank(comm):
        with torch.device("meta"):  # stored in another dtype than the model's: cast, then quantised
            mine = nn.ModuleList([nn.Linear(64, 64, bias=False)]).requires_grad_(requires_grad=False)
        fully_shard(mine, comm, wrap=None, weights=Pretrained(tmp_path, quantize=Quantize("nf4")))
        return quantized.stored(mine)["0"][2]

    expected = quantized.bitsandbytes_stored(half.float(), Quantize("nf4"))[2]
    assert all(torch.equal(ours, expected) for ours in run_ranks(2, rank))
