"""AdamW with bfloat16 states, stochastically rounded: half of AdamW's memory for moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.core.optim.lowbit.blockwise import chunks
from fullshard.core.optim.lowbit.narrow import NarrowAdamW, advance, descend, flat, widened
from fullshard.core.optim.lowbit.rounding import random_words, round_to_bfloat16, sixteen_bits, stream_key
from fullshard.core.optim.shards import meta_of, refuse_torch_options
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError


class AdamWBF16(NarrowAdamW):
    """AdamW whose moments, and bfloat16 weights, are kept in bfloat16 by stochastic rounding.

    Rounded to nearest, a bfloat16 second moment stops changing: with the usual 0.999 it should change by a thousandth
    of itself a step, and neighbors in bfloat16 are 1/256 to 1/128 apart. Rounded up or down at random, more often to
    the nearer one, it is right on average, and so are bfloat16 weights.

    The random bits of an element are a hash of the seed, the step, the number of the parameter in the optimizer and the
    number of the element in the *unsharded* parameter: the same under any sharding and after a resume, and no generator
    state is saved. Optimizers of one parameter each, as ``step_in_backward`` makes them, number their parameters as one
    optimizer of ``model.parameters()`` would, and round as that one; those made by hand all round with the same bits
    unless each has its own seed.

    The state's keys are those of ``torch.optim.AdamW``: ``step`` (float32, 0-d, on the CPU), ``exp_avg`` and
    ``exp_avg_sq`` (bfloat16, the shard's shape), all elementwise. State dicts and checkpoints of ``torch.optim.AdamW``
    can be loaded; their moments are rounded to nearest when loaded, or at the first step.

    float32 and float64 weights are not rounded, float16 ones to nearest.

    Args:
        params: Parameters or groups of them, as in any torch optimizer; under sharding all of ``model.parameters()``.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, times the learning rate.
        seed: Seed of the rounding; stored in the groups.

    Attributes:
        first_number: The number of its first parameter, if it is one of several optimizers of a model.

    Raises:
        ConfigError: A number is out of range.
    """

    first_number = 0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    @on_rows
    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """Return the keys of a parameter's state after a step.

        Raises:
            CheckpointError: The group has an option that is not implemented.
        """
        refuse_torch_options(group, "AdamWBF16", CheckpointError)
        return dict.fromkeys(("step", "exp_avg", "exp_avg_sq"))

    def _update_all(self) -> None:
        for number, param, group in self._to_update():
            self._update(self.first_number + number, param, group)

    def _update(self, number: int, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros(param.shape, dtype=torch.bfloat16, device=param.device)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        for field in ("exp_avg", "exp_avg_sq"):  # wider if loaded from a checkpoint of torch.optim.AdamW
            state[field] = state[field].to(torch.bfloat16)
        state["step"] += 1
        step = int(state["step"])
        assert param.grad is not None
        weights, grad = flat(param), param.grad.detach().reshape(-1)
        kept = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        start, stop = meta_of(param).element_range
        key = stream_key(group["seed"], step, number)
        for first, end in chunks(start, stop):
            run = slice(first - start, end - start)
            moments = advance(kept[0][run].float(), kept[1][run].float(), grad[run].float(), group["betas"])
            wide = widened(weights[run])
            descend(wide, *moments, group, step)
            words = random_words(key, first, end, param.device)
            if param.dtype == torch.bfloat16:
                weights[run] = round_to_bfloat16(wide, sixteen_bits(words, 2))
            elif param.dtype == torch.float16:
                weights[run] = wide.half()
            for field, moment in enumerate(moments):
                kept[field][run] = round_to_bfloat16(moment, sixteen_bits(words, field))

    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        loaded = {k: v.to(param.device, torch.bfloat16) for k, v in state.items() if k != "step"}
        return loaded | {"step": torch.tensor(float(state["step"]), device="cpu")} if "step" in state else loaded
