"""The models, batches and engines under comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

import fullshard
from fullshard.program.models.loss import fuse_head, model_loss

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Task:
    """The sizes of one rank's batch and of the model."""

    batch: int
    source: int
    target: int
    small: bool

    def model(self) -> nn.Module:
        """Return a T5 with random weights, the same on every rank: t5-small's shapes, or tiny ones if ``small``."""
        shapes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
        if self.small:
            shapes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
        torch.manual_seed(0)
        fixed: dict[str, Any] = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": True}
        config = T5Config(**shapes, **fixed)
        with torch.device("meta"):  # plain random numbers take a fifth of the time of T5's own initialization
            model = T5ForConditionalGeneration(config)
        model.to_empty(device="cpu")
        model.tie_weights()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0) if param.ndim == 1 else param.uniform_(-0.05, 0.05)
        return model

    def inputs(self, rank: int) -> dict[str, torch.Tensor]:
        """Return token ids, ``(batch, source)`` and ``(batch, target)``, different on every rank."""
        generator = torch.Generator().manual_seed(100 + rank)
        sizes = {"input_ids": (self.batch, self.source), "labels": (self.batch, self.target)}
        words = 1000 if self.small else 32000
        return {name: torch.randint(2, words, size, generator=generator) for name, size in sizes.items()}


@dataclass(frozen=True)
class LargeVocabulary(Task):
    """A Llama of 8 blocks whose tables, of 128,256 rows, are most of it."""

    def model(self) -> nn.Module:
        """Return it with random weights, the same on every rank."""
        torch.manual_seed(0)
        words, width = (1000, 64) if self.small else (128_256, 1024)
        sizes = {"hidden_size": width, "intermediate_size": 7 * width // 2, "num_attention_heads": width // 64}
        return LlamaForCausalLM(LlamaConfig(vocab_size=words, num_hidden_layers=8, num_key_value_heads=1, **sizes))

    def inputs(self, rank: int) -> dict[str, torch.Tensor]:
        """Return token ids, ``(batch, source)``, different on every rank."""
        ids = super().inputs(rank)["input_ids"]
        return {"input_ids": ids, "labels": ids}


def _unsharded(model: nn.Module, mesh: Any) -> nn.Module:
    return model


def _ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp1(model: nn.Module, mesh: Any) -> nn.Module:
    policy = ModuleWrapPolicy({T5Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    options["mesh"] = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in model.modules():
        if isinstance(module, (T5Block, LlamaDecoderLayer)):
            torch_fully_shard(module, **options)
    torch_fully_shard(model, **options)
    return model


def _fsdp2_no_reshard(model: nn.Module, mesh: Any) -> nn.Module:
    return _fsdp2(model, mesh, reshard_after_forward=False)


def _fullshard(model: nn.Module, mesh: Any) -> nn.Module:
    return fullshard.fully_shard(model, mesh)


def _fullshard_home(model: nn.Module, mesh: Any) -> nn.Module:
    fuse_head(model)
    return fullshard.fully_shard(model, mesh, tables="auto")


def _fullshard_zero2_home(model: nn.Module, mesh: Any) -> nn.Module:
    fuse_head(model)
    strategy = fullshard.ShardingStrategy.SHARD_GRAD_OP
    return fullshard.fully_shard(model, mesh, strategy=strategy, tables="auto")


def _fullshard_replicated(model: nn.Module, mesh: Any) -> nn.Module:
    return fullshard.fully_shard(model, mesh, frozen="replicate")


def _fullshard_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    return fullshard.fully_shard(model, mesh, frozen="shard")


ENGINES: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "floor": _unsharded,
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2_no_reshard": _fsdp2_no_reshard,
    "fullshard": _fullshard,
    "fullshard_home": _fullshard_home,
    "fullshard_zero2_home": _fullshard_zero2_home,
    "fullshard_replicated": _fullshard_replicated,
    "fullshard_sharded": _fullshard_sharded,
}


class Contender:
    """One engine, with its own copy of the model and its own optimizer."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        mesh: Any,
        *,
        engine: Callable[[nn.Module, Any], nn.Module] | None = None,
        **adamw: Any,
    ) -> None:
        """Wrap ``model`` with engine ``name``, or with ``engine``; ``adamw`` are further options of the optimizer."""
        self.name = name
        self.model = (engine or ENGINES[name])(model, mesh)
        self.inputs = inputs
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, **adamw)

    def forward(self) -> torch.Tensor:
        """Return the loss only, so that other outputs are freed."""
        if self.name.endswith("_home"):
            return self._fused_loss()
        return self.model(**self.inputs).loss

    def _fused_loss(self) -> torch.Tensor:
        """Return the same loss, computed in the head, as the program's objective does."""
        labels = self.inputs["labels"]
        if self.model.config.is_encoder_decoder:
            shifted = self.model._shift_right(labels)
            inputs = {"input_ids": self.inputs["input_ids"], "decoder_input_ids": shifted}
        else:
            inputs, labels = {"input_ids": self.inputs["input_ids"][:, :-1]}, labels[:, 1:]
        summed = model_loss(self.model, lambda: self.model(**inputs, use_cache=False).logits, labels)
        return summed / labels.numel()

    def forward_backward(self) -> float:
        """Compute the gradients of one batch and return its loss."""
        loss = self.forward()
        loss.backward()
        return loss.item()

    def step(self) -> float:
        """Run one training step and return this rank's loss."""
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
