"""The models of the measurements: published shapes, random weights, generated token ids."""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from benchmarks.gpu import ROOT
from benchmarks.gpu.record import Lacking
from fullshard.program.models.blocks import compile_blocks, enable_activation_checkpointing

_T5 = {"d_model": 1024, "num_layers": 24, "vocab_size": 32128, "dropout_rate": 0.0, "decoder_start_token_id": 0}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_FULL_STATE_BYTES = 16
"""Of a trained parameter in fp32: itself, its gradient and AdamW's two moments."""


@dataclass(frozen=True)
class Shape:
    """A model and one rank's batch; ``target`` is 0 for a causal model."""

    name: str
    config: dict[str, Any]
    batch: int
    source: int
    target: int = 0

    @property
    def block(self) -> type[nn.Module]:
        """The class of the blocks that every engine wraps."""
        return T5Block if self.target else LlamaDecoderLayer

    @property
    def tokens(self) -> int:
        """All tokens of a step on one rank."""
        return self.batch * (self.source + self.target)

    def bare(self, device: str | torch.device) -> nn.Module:
        """Return the model with random weights on ``device``, the same on every rank."""
        torch.manual_seed(0)
        with torch.device(device):
            if self.target:
                model: Any = T5ForConditionalGeneration  # a run's own choice on GPUs
                return model._from_config(T5Config(**self.config, use_cache=False), attn_implementation="eager")
            return LlamaForCausalLM(LlamaConfig(**self.config, use_cache=False))

    def inputs(self, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return token ids and labels, different on every rank."""
        generator = torch.Generator().manual_seed(100 + rank)
        sizes = {"input_ids": self.source, "labels": self.target or self.source}
        words = self.config["vocab_size"]
        return {
            name: torch.randint(2, words, (self.batch, length), generator=generator).to(device)
            for name, length in sizes.items()
        }

    def state_bytes(self, *, lora: bool) -> int:
        """Return about how many bytes parameters, gradients and optimizer state take on all ranks together."""
        numel = sum(param.numel() for param in self.bare("meta").parameters())
        return numel * (4 if lora else _FULL_STATE_BYTES)


@dataclass(frozen=True)
class Method:
    """How a model is trained.

    Attributes:
        lora: Whether only an adapter is.
        checkpointing: Whether blocks recompute their activations in backward.
        backend: What compiles the blocks, such as ``"inductor"``; empty: nothing does.
    """

    lora: bool = False
    checkpointing: bool = False
    backend: str = ""

    def __str__(self) -> str:
        """Return the method as in a case's name."""
        parts = ["LoRA" if self.lora else "full"]
        parts += ["checkpointed"] * self.checkpointing + ["compiled"] * bool(self.backend)
        return ", ".join(parts)

    def model(self, shape: Shape, device: torch.device) -> nn.Module:
        """Return the model before an engine takes it.

        Raises:
            Lacking: There is no peft for an adapter.
        """
        model: Any = shape.bare(device)
        if self.checkpointing:
            enable_activation_checkpointing(model)
        if self.lora:
            model = _adapted(model, shape)
        if self.backend:
            compile_blocks(model, backend=self.backend)
        return model


def _adapted(model: nn.Module, shape: Shape) -> nn.Module:
    check_lora()
    peft: Any = importlib.import_module("peft")
    kind, targets = ("SEQ_2_SEQ_LM", ["q", "v"]) if shape.target else ("CAUSAL_LM", ["q_proj", "v_proj"])
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets, task_type=kind)
    return peft.get_peft_model(model, config)


def check_lora() -> None:
    """Raise ``Lacking`` if there is no peft."""
    if importlib.util.find_spec("peft") is None:
        raise Lacking("peft is not installed, which LoRA needs")


def _t5(name: str, batch: int, source: int, target: int, **shapes: Any) -> Shape:
    return Shape(name, _T5 | shapes, batch, source, target)


# Batches that keep the GPU busy: with half of them a step of T5-large takes as long as the CPU needs to issue it.
SHAPES = {
    "t5-large": _t5("t5-large", 32, 512, 128, d_kv=64, d_ff=4096, num_heads=16),
    "t5-3b": _t5("t5-3b", 32, 512, 128, d_kv=128, d_ff=16384, num_heads=32),
    "llama-3-8b": Shape("llama-3-8b", _LLAMA, 4, 2048),
}
_TINY_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
_TINY_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
TINY = {"t5-large": _t5("t5-tiny", 2, 8, 4, **_TINY_T5), "llama-3-8b": Shape("llama-tiny", _TINY_LLAMA, 1, 16)}
"""What a dry run takes in their place."""


def flops_module() -> ModuleType:
    """Return ``fullshard.program.train.reporting.flops``, loaded by its path: only its package imports pydantic."""
    path = ROOT / "src/fullshard/program/train/reporting/flops.py"
    spec = importlib.util.spec_from_file_location("fullshard_flops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module
