"""Where T5's kernel is refused; what it computes is tested where Triton is: tests/kernels."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5Attention

from fullshard.errors import ModelError
from fullshard.program.speed import WAYS, Facts, apply_ways
from support.packed_models import T5, build

FACTS = Facts(torch.device("cpu"), torch.bfloat16, packing=False, longest=10)
WAY = WAYS["t5_attention"]


def t5(**changes):
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **T5 | changes))


def first_layer(model):
    return model.encoder.block[0].layer[0].SelfAttention


@pytest.mark.parametrize(
    ("installed", "device", "why"),
    [(False, "cuda", "pip install triton"), (True, "cpu", "on CUDA devices, and this run computes on cpu")],
)
def test_it_is_refused_where_its_kernel_cannot_run(monkeypatch, installed, device, why):
    spec = ModuleSpec("triton", None) if installed else None
    found = lambda name, *of: spec if name == "triton" else find_spec(name, *of)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", found)
    runtime = SimpleNamespace(interpret=False)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    with pytest.raises(ModelError, match=f"t5_attention does not apply: .*{why}"):
        apply_ways(t5(), ["t5_attention"], replace(FACTS, device=torch.device(device)))


def test_models_without_its_bias_and_other_dtypes_and_heads_are_refused():
    assert "this one is llama" in WAY.misfit(build("llama", "sdpa"), FACTS)
    assert "float64" in WAY.misfit(t5(), replace(FACTS, dtype=torch.float64))
    assert "at most 256 elements, and this model's d_kv is 320" in WAY.misfit(t5(d_kv=320), FACTS)


def test_layers_whose_buckets_are_not_t5s_are_refused():
    class Other(T5Attention):
        @staticmethod
        def _relative_position_bucket(places, **how):
            return T5Attention._relative_position_bucket(places + 1, **how)

    model = t5()
    first_layer(model).__class__ = Other
    assert "do not divide distances into buckets as T5's do" in WAY.misfit(model, FACTS)
