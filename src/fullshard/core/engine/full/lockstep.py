"""Generation in lockstep: ranks run the same number of forwards, whatever number of tokens each needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.core.comm import settle
from fullshard.core.engine.full.state import RootHeld
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Keep

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_INPUT_NAMES = ("decoder_input_ids", "input_ids", "inputs_embeds")


class Lockstep:
    """Context in which every rank of a sharded model generates its own rows, and the root stays gathered.

    Every token is a forward, which gathers units, so all ranks must run it together. Before each forward, ranks
    exchange whether they still generate. A rank that is finished runs forwards of one dummy token until all are.
    Inside ``unsharded(model)`` nothing is gathered, and a rank may generate alone.
    """

    def __init__(self, runtime: Runtime, model: nn.Module) -> None:
        """Follow the forwards of ``model``, or of the model inside a peft adapter, which runs once for each token."""
        self._mesh = runtime.mesh
        self._writer = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._held = RootHeld(runtime)
        shown = runtime.root.summoned is not None or Keep.CONTEXT in runtime.root.keep
        self._follows = self._mesh.size > 1 and not shown
        self._idle: _Inputs = (), {}

    def __enter__(self) -> None:
        """Meet the other ranks, gather the root, and start counting ranks before each forward."""
        if self._follows:
            # Before anything is gathered: another rank that trains meanwhile would mistake it for its own collective.
            self._count("the start of generate()", writes=True)
        self._held.__enter__()
        if self._follows:
            self._hook = self._writer.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Run dummy forwards until all ranks are finished; not after an error, which is reported to the other ranks."""
        try:
            if self._follows:
                self._hook.remove()
                with torch.no_grad():
                    while kind is None and int(self._count("whether a rank still generates", writes=False)):
                        args, inputs = self._idle
                        self._writer(*args, **inputs)
        finally:
            self._idle = (), {}
            self._held.__exit__()

    def _before(self, _module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        self._idle = _one_token(args, inputs)
        self._count("whether a rank still generates", writes=True)  # not read: that would make a GPU wait

    def _count(self, what: str, *, writes: bool) -> torch.Tensor:
        """Return how many ranks generate. All-gathers of different purposes do not meet, unlike all-reduces."""
        shards, replicas = self._mesh.shard_group, self._mesh.replica_group
        ranks = torch.empty(shards.size, device=shards.device)
        shards.announce(what)
        mine = torch.tensor([float(writes)], device=shards.device)
        work = shards.all_gather(ranks, mine)
        work.wait()
        settle(work)  # until then other ranks may read ``mine``
        count = ranks.sum()
        if replicas.size > 1:  # the ranks of a mesh run the same forwards; the checksum of their order covers all
            replicas.announce(what)
            replicas.all_reduce(count).wait()
        return count


def _one_token(args: tuple[Any, ...], inputs: dict[str, Any]) -> _Inputs:
    """Return the inputs of a dummy forward that runs the same units: the last token, without the cache.

    For a model whose inputs have other names than transformers', all inputs of this forward.
    """
    name = next((name for name in _INPUT_NAMES if inputs.get(name) is not None), None)
    if args or name is None:
        return args, inputs
    call = {name: inputs[name][:, -1:]}
    if "use_cache" in inputs:
        call["use_cache"] = False
    if inputs.get("encoder_outputs") is not None:
        call |= {"encoder_outputs": inputs["encoder_outputs"], "attention_mask": inputs.get("attention_mask")}
    return (), call
