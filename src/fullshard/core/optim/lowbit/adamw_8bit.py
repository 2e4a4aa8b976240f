"""AdamW with 8-bit states: a quarter of AdamW's memory for moments, with the same results sharded and unsharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm
from fullshard.core.layout import ShardMeta, StatePart, by_block, on_all_owners
from fullshard.core.optim.lowbit.blockwise import (
    BLOCK,
    CodeBook,
    CutBlock,
    any_block_is_cut,
    block_maxima,
    chunks,
    cut_blocks,
    dequantise,
    dynamic_codes,
    quantise,
)
from fullshard.core.optim.lowbit.narrow import NarrowAdamW, advance, descend, flat, widened
from fullshard.core.optim.owner_reduce import OwnerReduce, OwnerValue
from fullshard.core.optim.shards import by_comm, meta_of, refuse_torch_options, require_same_parameters
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError

SMALLEST = 4096
"""Smallest number of elements, unsharded, of a parameter with 8-bit moments; the same in bitsandbytes and torchao."""

_WRAPPED = "__bnb_optimizer_quant_state__"
"""The key that holds a parameter's tensors in bitsandbytes' ``state_dict()``; it also loads them without that key."""

_Cuts = list[tuple[nn.Parameter, CutBlock]]
_Plan = tuple[list[tuple[int, ShardMeta | None]], list[tuple[Comm, _Cuts]]]


@dataclass(frozen=True)
class _ElementRun:
    """Elements ``first`` to ``end`` of a flattened parameter whose elements this rank holds from ``start`` on."""

    start: int
    first: int
    end: int

    @property
    def elements(self) -> slice:
        """Positions of the vectors' elements among this rank's."""
        return slice(self.first - self.start, self.end - self.start)

    @property
    def blocks(self) -> slice:
        """The blocks that they are in, among the blocks of which this rank holds any elements."""
        before = self.start // BLOCK
        return slice(self.first_block - before, -(-self.end // BLOCK) - before)

    @property
    def first_block(self) -> int:
        """The first block that they are in, among all blocks."""
        return self.first // BLOCK

    @property
    def lead(self) -> int:
        """Elements of that block before the run."""
        return self.first % BLOCK


class AdamW8bit(NarrowAdamW):
    """AdamW whose moments are 8-bit codes with a float32 scale for each 256 elements: about 2.03 bytes a parameter.

    The method and the state's format are those of bitsandbytes' ``AdamW8bit`` (Dettmers et al.,
    https://arxiv.org/abs/2110.02861): a parameter's state is ``step`` (int), ``state1`` and ``state2`` (uint8, the
    shard's shape), ``qmap1`` and ``qmap2`` (float32, (256,), the values of the codes) and ``absmax1`` and ``absmax2``
    (float32, one for each block); below 4096 elements it is ``step`` and float32 ``state1`` and ``state2``. State dicts
    can be exchanged with it in both directions.

    Blocks are those of the flattened *unsharded* parameter. If a shard boundary splits one, the ranks that hold parts
    of it share its scale, two numbers for each block in one exchange a step; if rows are multiples of 256 elements, as
    in most models, no block is split and nothing is exchanged. So the results do not depend on the number of ranks, and
    states reshard exactly.

    Comparison: the step is that of bitsandbytes' plain PyTorch path and of torchao's ``AdamW8bit``, up to the rounding
    of float32. bitsandbytes' CUDA kernel decays the weight after the update instead of before, gives the first moment
    the code next to zero if the nearest one is zero, and skips elements whose gradient is not finite; its CPU kernel
    takes a code next to the nearest one for 1 in 700 elements. torchao quantises only parameters with a multiple of 256
    elements *on the rank*, with scales of at least 1e-12. Here a gradient that is not finite corrupts its block: clip
    with ``error_if_nonfinite``, or use a gradient scaler, which skips such steps.

    Args:
        params: Parameters or groups of them, as in any torch optimizer; under sharding all of ``model.parameters()``,
            in the same order on every rank.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, times the learning rate.

    Raises:
        ConfigError: A number is out of range; or, if ranks share blocks, at the first step and on every rank,
            parameters differ between ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Make the optimizer; see the class."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._books: dict[torch.device, tuple[CodeBook, CodeBook]] = {}
        self._plan: _Plan = ([], [])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes that a copy lacks: torch copies groups and state only."""
        super().__setstate__({"_books": {}, "_plan": ([], [])} | self.__dict__ | state)

    @on_rows
    def communicates(self, param: nn.Parameter) -> bool:
        """Return whether ranks communicate about a parameter in a step."""
        return _is_8bit(param) and any_block_is_cut(meta_of(param))

    @on_rows
    def state_part(self, param: nn.Parameter, key: str) -> StatePart | None:
        """Return which part of the unsharded optimizer's state a tensor is; None if it is elementwise."""
        meta = meta_of(param)
        if key in ("qmap1", "qmap2"):
            return on_all_owners(meta, (256,))
        return by_block(meta, BLOCK) if key in ("absmax1", "absmax2") else None

    @on_rows
    def state_kinds(
        self, param: nn.Parameter, group: Mapping[str, Any]
    ) -> dict[str, torch.dtype | torch.Tensor | None]:
        """Return the state of a parameter after a step: dtypes, the code books themselves, None for the step.

        Raises:
            CheckpointError: The group has an option that is not implemented.
        """
        refuse_torch_options(group, "AdamW8bit", CheckpointError)
        if not _is_8bit(param):
            return {"step": None, "state1": torch.float32, "state2": torch.float32}
        kinds: dict[str, torch.dtype | torch.Tensor | None] = {"step": None}
        for number, book in enumerate(self._books_on(param.device), 1):
            kinds |= {f"state{number}": torch.uint8, f"absmax{number}": torch.float32, f"qmap{number}": book.values}
        return kinds

    def _update_all(self) -> None:
        groups = {param: group for _, param, group in self._to_update()}
        shared, reduces = self._share_scales(groups)
        for param, group in groups.items():
            if param not in shared:
                self._update(param, group, {})
        for one in reduces:
            one.wait()
        for param, scales in shared.items():
            self._update(param, groups[param], scales)

    def _share_scales(
        self, groups: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> tuple[dict[nn.Parameter, dict[int, torch.Tensor]], list[OwnerReduce]]:
        """Start to reduce the new scales of blocks that several ranks hold.

        Returns:
            For the parameters to update, by block number, the scales of both moments, (2,), valid after the reductions;
            and the reductions.
        """
        shared: dict[nn.Parameter, dict[int, torch.Tensor]] = {}
        reduces = []
        for comm, cuts in self._cuts_by_comm():
            values = []
            for param, cut in cuts:
                # On the device of the collectives, even if shards are elsewhere. Zeros if there is no gradient here.
                value = torch.zeros(2, device=comm.device)
                if param in groups:
                    run = _ElementRun(_range(param)[0], *cut.held)
                    moments = self._moments(param, run, groups[param]["betas"])
                    value.copy_(torch.stack([moment.abs().amax() for moment in moments]))
                    shared.setdefault(param, {})[cut.index] = value
                values.append(OwnerValue(cut.owners, value))
            reduces.append(OwnerReduce(comm, values, "scales of 8-bit blocks", op="max", at_once=True))
        return shared, reduces

    def _cuts_by_comm(self) -> list[tuple[Comm, _Cuts]]:
        """Return the blocks whose scales this rank shares; planned again when parameters or their shards have changed.

        Only layouts decide, so the plan is the same on every rank, whichever parameters have a gradient.
        """
        params = list(self._params())
        now: list[tuple[int, ShardMeta | None]] = [(id(param), getattr(param, "shard_meta", None)) for param in params]
        if self._plan[0] != now:
            plan = []
            for comm, of_comm in by_comm(params):
                cut = [param for param in of_comm if self.communicates(param)]
                if cut:
                    require_same_parameters(comm, of_comm, "AdamW8bit")
                    plan.append((comm, [(param, block) for param in cut for block in cut_blocks(meta_of(param))]))
            self._plan = (now, plan)
        return self._plan[1]

    def _update(self, param: nn.Parameter, group: Mapping[str, Any], shared: Mapping[int, torch.Tensor]) -> None:
        """Step one parameter; ``shared`` has the new scales of blocks that other ranks hold parts of."""
        state = self._state_of(param)
        state["step"] += 1
        weights, (start, stop) = flat(param), _range(param)
        for first, end in chunks(start, stop):
            run = _ElementRun(start, first, end)
            moments = self._moments(param, run, group["betas"])
            here = weights[run.elements]
            wide = widened(here)
            descend(wide, *moments, group, state["step"])
            if wide is not here:
                here.copy_(wide)
            if _is_8bit(param):
                self._keep(state, run, moments, shared)

    def _moments(
        self, param: nn.Parameter, run: _ElementRun, betas: tuple[float, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the moments of a run of elements with the new gradient, float32; float32 states change in place."""
        state = self._state_of(param)
        assert param.grad is not None
        grad = param.grad.detach().reshape(-1)[run.elements].float()
        kept = [state[key].view(-1)[run.elements] for key in ("state1", "state2")]
        if _is_8bit(param):
            kept = [
                dequantise(codes, state[f"absmax{n}"][run.blocks], state[f"qmap{n}"], run.lead)
                for n, codes in enumerate(kept, 1)
            ]
        return advance(kept[0], kept[1], grad, betas)

    def _keep(
        self,
        state: Mapping[str, Any],
        run: _ElementRun,
        moments: Sequence[torch.Tensor],
        shared: Mapping[int, torch.Tensor],
    ) -> None:
        """Store codes and scales of a run's moments in the state."""
        for number, (moment, book) in enumerate(zip(moments, self._books_on(moments[0].device), strict=True)):
            scales = block_maxima(moment, run.lead)
            for index, both in shared.items():
                if run.first_block <= index < run.first_block + scales.numel():
                    scales[index - run.first_block] = both[number]
            state[f"state{number + 1}"].view(-1)[run.elements] = quantise(moment, scales, book, run.lead)
            state[f"absmax{number + 1}"][run.blocks] = scales

    def _state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's state; zeros before its first step."""
        state = self.state[param]
        if not state:
            is_8bit = _is_8bit(param)
            state["step"] = 0
            for number in (1, 2):
                state[f"state{number}"] = torch.zeros(
                    param.shape, dtype=torch.uint8 if is_8bit else torch.float32, device=param.device
                )
                if is_8bit:
                    state[f"qmap{number}"] = self._books_on(param.device)[number - 1].values
                    blocks = by_block(meta_of(param), BLOCK).numel
                    state[f"absmax{number}"] = torch.zeros(blocks, device=param.device, dtype=torch.float32)
        return state

    def _books_on(self, device: torch.device) -> tuple[CodeBook, CodeBook]:
        """Return the code books of the first and the second moment, shared by all parameters of a device."""
        if device not in self._books:
            signed, unsigned = (CodeBook.of(dynamic_codes(signed=signed).to(device)) for signed in (True, False))
            self._books[device] = signed, unsigned
        return self._books[device]

    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        bare = {key: value for key, value in state.items() if key != _WRAPPED} | dict(state.get(_WRAPPED, {}))
        if not bare or not param.numel():
            return {}
        loaded = {k: v.to(param.device) if isinstance(v, torch.Tensor) else v for k, v in bare.items()}
        kept = torch.uint8 if _is_8bit(param) else torch.float32
        found = [getattr(loaded.get(key), "dtype", None) for key in ("state1", "state2")]
        if found != [kept, kept]:
            raise CheckpointError(
                f"AdamW8bit keeps state1 and state2 as uint8 for parameters of {SMALLEST} elements or more, as "
                f"float32 for smaller ones; for one of {meta_of(param).placement.numel} the loaded ones are {found}. "
                "Load a state dict of AdamW8bit, fullshard's or bitsandbytes', for the same parameters."
            )
        for number, book in enumerate(self._books_on(param.device) if _is_8bit(param) else (), 1):
            codes = loaded.get(f"qmap{number}", torch.empty(0))
            if codes.shape != book.values.shape or not torch.allclose(codes, book.values, rtol=1e-6, atol=0):
                raise CheckpointError(
                    f"AdamW8bit's codes have the values of dynamic quantisation; qmap{number} in the loaded state has "
                    "others. Load a state dict of AdamW8bit, fullshard's or bitsandbytes'."
                )
            loaded[f"qmap{number}"] = book.values  # one for all parameters
        return loaded | {"step": int(loaded["step"])}


def _is_8bit(param: nn.Parameter) -> bool:
    return meta_of(param).placement.numel >= SMALLEST


def _range(param: nn.Parameter) -> tuple[int, int]:
    return meta_of(param).element_range
