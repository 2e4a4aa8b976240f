"""Linear layers that multiply in fp8 while training, by torchao: which of a model's do, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fullshard.core.quantized import adapter_modules, not_tied
from fullshard.errors import ConfigError, ModelError
from fullshard.program.models.blocks import blocks_of

_MULTIPLE = 16
"""Both sides of a weight are multiples of it: the rule of the GPUs' products in fp8."""


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of a model.

    Attributes:
        chosen: Those that compute in fp8, by name.
        left_out: Why each of the others does not, by name. An adapter's own are not counted.
    """

    chosen: Mapping[str, nn.Linear]
    left_out: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Float8Layers:
        """Choose those of the blocks that are plain and large enough; any process, before sharding or after."""
        in_blocks = {id(inside) for block in blocks_of(model) for inside in block.modules()}
        adapters, alone = adapter_modules(model), not_tied(model)
        chosen, left_out = {}, {}
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or id(layer) in adapters:
                continue
            if id(layer) not in in_blocks:
                left_out[name] = "outside of the blocks"
            elif any("router" in part or part == "gate" for part in name.split(".")):
                left_out[name] = "in a router"
            elif layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
                left_out[name] = f"with a side that is no multiple of {_MULTIPLE}"
            elif not (type(layer) is nn.Linear or is_float8(layer)) or "forward" in vars(layer):
                left_out[name] = "of another kind"
            elif not alone(layer.weight):
                left_out[name] = "with a tied weight"
            else:
                chosen[name] = layer
        return cls(chosen, left_out)

    def __str__(self) -> str:
        text = f"{len(self.chosen)} of {len(self.chosen) + len(self.left_out)} linear layers compute in fp8"
        first = {why: name for name, why in reversed([*self.left_out.items()])}
        counts = Counter(self.left_out.values())
        rest = [f"{count} {why} ({first[why]}{', …' if count > 1 else ''})" for why, count in counts.items()]
        return "; in bf16: ".join([text, *([", ".join(rest)] if rest else [])])

    def require_any(self, model: nn.Module) -> None:
        """Check that there is at least one; any process.

        Raises:
            ModelError: There is none.
        """
        if not self.chosen:
            raise ModelError(
                f"training.precision: fp8 is for linear layers (nn.Linear) in a model's blocks whose sides are "
                f"multiples of {_MULTIPLE}. {type(model).__name__} has none: {self}. Set training.precision: bf16."
            )


def require_torchao() -> None:
    """Check that torchao is installed; any process. It is not imported: that takes seconds.

    Raises:
        ConfigError: It is not.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            "training.precision: fp8 computes by torchao, which is not installed: pip install 'fullshard[fp8]', or set "
            "training.precision: bf16."
        )


def import_float8() -> Any:
    """Return torchao's module of fp8 training.

    Raises:
        ConfigError: torchao is not installed.
    """
    require_torchao()
    return import_module("torchao.float8")


def is_float8(layer: nn.Module) -> bool:
    """Return whether a layer was converted by :func:`compute_in_float8`."""
    return hasattr(layer, "linear_mm_config")


def compute_in_float8(model: nn.Module, *, scales: str, emulate: bool, ranks: int | None = None) -> None:
    """Convert a model's linear layers in place, before it is sharded; every rank calls it. Names do not change.

    In evaluation mode they compute in the dtype of their weights: in fp8 all rows of a batch would share a scale, so a
    row's result would depend on the others.

    Args:
        model: With its adapter, if it has one; on the CPU or the meta device.
        scales: ``tensorwise`` or ``rowwise``, of dynamic scales.
        emulate: Compute products in float32 from rounded numbers, as on CPUs.
        ranks: Gather weights in fp8 whose rows are equally many on so many ranks; None: none, as with ``rowwise``.

    Raises:
        ConfigError: torchao is not installed.
        ModelError: No layer of the model can.
    """
    float8 = import_float8()
    layers = Float8Layers.of(model)
    layers.require_any(model)
    config = float8.Float8LinearConfig.from_recipe_name(scales)
    # Products of weights' gradients need a multiple of 16 tokens; fewer are padded.
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    made: dict[int, nn.Module] = {}
    for layer in layers.chosen.values():
        gathered = ranks is not None and layer.out_features % ranks == 0
        own = replace(config, enable_fsdp_float8_all_gather=gathered)
        made[id(layer)] = converted = float8.convert_to_float8_training(layer, config=own)
        converted.__class__ = _kind()
        converted.train(layer.training)
    for module in model.modules():
        module._modules.update({key: made[id(one)] for key, one in module._modules.items() if id(one) in made})


@cache
def _kind() -> type[nn.Module]:
    """Return the class of converted layers. It is made when first needed: importing torchao takes seconds."""
    theirs: Any = import_module("torchao.float8.float8_linear").Float8Linear
    gathered: Any = import_module("torchao.float8.float8_training_tensor").Float8TrainingTensor

    class Float8InTraining(theirs):
        """torchao's layer while training, a plain one in evaluation mode."""

        def forward(self, input: Tensor) -> Tensor:
            """Return the product, in the dtype of the input."""
            if self.training:
                return theirs.forward(self, input)
            weight = self.weight
            if isinstance(weight, gathered):  # in fp8; asked for its methods, the compiler says that it has none
                weight = weight.to_original_precision()
            return functional.linear(input, weight, self.bias)

    return Float8InTraining
