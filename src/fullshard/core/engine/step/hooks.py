"""Where PyTorch calls the engine: before and after a unit's forward and backward, and in fused weight gradients.

Autograd allocates a weight's gradient, sums the uses of a tied weight in further tensors (three at once for T5's shared
table), and only then passes it on. Here, the backward of ``nn.Linear`` multiplies straight into the lane
(``mm(out=)``, then ``addmm_``) and that of ``nn.Embedding`` adds only the rows that were looked up. No gradient-sized
temporary exists and nothing is copied; on t5-small's shapes the step's peak fell from 513 to 349 MB above the static
part. Values are those of autograd, up to the order of additions.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.core.comm import add_rows
from fullshard.core.engine.step.param import CREATE_GRAPH_REFUSED, ShardedParam
from fullshard.core.engine.step.precision import (
    cast_floats,
    map_tensors,
    markable_tensors,
    replace_markable,
    tensors_in,
)
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.schedule import Call
from fullshard.core.engine.step.unit import Keep, Unit
from fullshard.core.shards import untraced
from fullshard.core.torch_private import in_backward, in_functorch, plain_functions, will_execute
from fullshard.errors import ShardingError


class _InputNode(torch.autograd.Function):
    """Identity on the inputs of a call; its backward runs when the call's own backward is complete.

    It is the first node of the call, so autograd runs it last, when nothing needs the parameters any more. Counting
    gradients would not do: a frozen weight's input gradient may be computed after the last trainable gradient.
    """

    @staticmethod
    def forward(ctx: Any, hooks: UnitHooks, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks, ctx.call = hooks, call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.hooks.backward_ends(ctx.call)
        return (None, None, *gradients)


class UnitHooks:
    """The hooks of one unit on its modules, and guards on the submodules that own its parameters.

    A unit of several modules is one call from the first module's forward to the last one's: it stays gathered between
    them. Where the last one does not run, the call ends when another unit's forward starts, or the root's is over.
    """

    def __init__(self, unit: Unit, kept: frozenset[int]) -> None:
        """Register the hooks; ``kept`` are the ids of modules that compute in float32."""
        self.unit = unit
        self.warned = False
        self.kept = kept
        self.left = False  # after_forward has run, so that after_failure does nothing
        self.compiled = False  # the module whose forward ran last is compiled
        self.passing = False  # a registered method calls the module's forward: one call, not two
        self.handles: list[RemovableHandle] = []
        members = {id(module) for module in unit.modules}
        for module in unit.modules:
            self.handles += [
                module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.after_forward),
                module.register_forward_hook(self.after_failure, always_call=True),
            ]
        guarded = {id(owner): owner for param in unit.params for owner, _ in param.slots if id(owner) not in members}
        self.handles += [owner.register_forward_pre_hook(self.guard, prepend=True) for owner in guarded.values()]

    @property
    def runtime(self) -> Runtime:
        """The runtime of the model that the unit belongs to."""
        return self.unit.runtime

    @property
    def is_root(self) -> bool:
        """True for the unit of the model itself."""
        return self.unit is self.runtime.root

    @property
    def casts_inputs(self) -> bool:
        """True if floating inputs are cast to the compute dtype."""
        precision = self.unit.policy.precision
        of_root = precision.cast_root_forward_inputs if self.is_root else None
        return precision.cast_forward_inputs if of_root is None else of_root

    # Forward

    @untraced
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the unit, cast the inputs, and mark them so that the end of their backward is noticed."""
        runtime, recompute = self.runtime, in_backward()
        self.compiled = module._compiled_call_impl is not None
        if self._steps_aside(recompute=recompute):
            return args, kwargs
        if not recompute:
            runtime.forward_event()
        if self.is_root and not recompute:
            device = runtime.device.device  # inputs move to it, as with FSDP
            moved = map_tensors((args, kwargs), lambda t: t if t.device == device else t.to(device, non_blocking=True))
            args, kwargs = moved
        precision = self.unit.policy.precision
        if self.casts_inputs and id(module) not in self.kept:
            args, kwargs = cast_floats((args, kwargs), precision.param)
        needs_node = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
        if recompute:
            return self._recompute(args, kwargs, needs_node=needs_node)
        if self.unit.group_call is not None and not self.unit.open_calls:  # a further module of the group
            runtime.close_groups(until=self.unit.group_call)
            self.unit.open_calls += 1
            runtime.recorder.begin(self.unit.name, "forward")
            return args, kwargs
        runtime.close_groups()
        enclosed = bool(runtime.open_calls)
        if self.is_root:
            runtime.begin_pass()
        elif not enclosed:
            runtime.begin_direct_call(self.unit)
        self.unit.open_calls += 1
        alone = not enclosed and not self.is_root
        call, actions = runtime.schedule.forward_begins(self.unit.index, input_node=needs_node, alone=alone)
        runtime.open_calls.append(call)
        runtime.perform(actions)
        runtime.recorder.begin(self.unit.name, "forward")
        if len(self.unit.modules) > 1 and enclosed:  # otherwise nothing shows whether another member follows
            self.unit.group_call, self.unit.group_needs_backward = call, False
        return self._mark_inputs(call, args, kwargs) if needs_node else (args, kwargs)

    def _steps_aside(self, *, recompute: bool) -> bool:
        """Return True if the engine has nothing to do: the unit runs as a plain module, or a call of it is running.

        Raises:
            ShardingError: The unit runs as a plain module, and only rank 0 has its parameters.
        """
        if self.unit.summoned is not None:
            self.unit.summoned.require_here()
            return True
        return self.passing and not recompute

    def _recompute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, needs_node: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare a forward inside backward, which recomputes activations."""
        runtime, unit = self.runtime, self.unit
        unit.open_calls = 0  # recomputation may stop early, without an after_forward
        runtime.backward_event()
        runtime.gather(unit)
        # In a reentrant checkpoint this is the forward whose graph counts; in the other kind the first one was.
        if needs_node and not runtime.schedule.awaits_backward(unit.index):
            unit.recomputed += 1
            return self._mark_inputs(Call(unit.index), args, kwargs)
        return args, kwargs

    def _mark_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # Lists and dicts are not rebuilt: they are the caller's, and the module may append to them. A call with tensors
        # in such inputs has no node at its end; the schedule releases it when backward has passed it.
        originals = {id(t): t for t in markable_tensors((*args, *kwargs.values()))}
        if len(originals) < len({id(t) for t in tensors_in((args, kwargs)) if t.requires_grad}):
            return args, kwargs
        marked = _InputNode.apply(self, call, *originals.values())
        replacement = dict(zip(originals, marked, strict=True))
        named = {key: replace_markable(value, replacement) for key, value in kwargs.items()}
        return replace_markable(args, replacement), named

    @untraced
    def after_forward(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Hook the outputs, to be called when backward reaches them, then release the parameters."""
        if in_backward() or self.passing or self.unit.summoned is not None:
            return None
        runtime, unit = self.runtime, self.unit
        runtime.recorder.end(unit.name, "forward")
        runtime.close_groups(until=unit.group_call)
        call = runtime.open_calls[-1]
        unit.open_calls -= 1
        grad_enabled = torch.is_grad_enabled()
        if unit.options.casts_output and unit.policy.precision.output is not None:
            output = cast_floats(output, self.unit.policy.precision.output)
        tensors = list(tensors_in(output))
        unit.refuse_writes()
        self._refuse_views_of_parameters(tensors)
        hooked = [t for t in tensors if t.requires_grad] if grad_enabled else []
        token = _GraphToken()
        for tensor in hooked:
            tensor.register_hook(_BackwardBegins(self, call, token))
        if grad_enabled and not tensors and (self.unit.trainable or call.input_node):
            self._keep_until_backward_is_over(output)
        call.version = unit.version()
        if unit.group_call is not None:
            if hooked:
                unit.group_needs_backward, call.graph = True, weakref.ref(token)
            if module is unit.modules[-1]:
                runtime.close_groups(until=None, last=call)
            self.left = True
            return output
        call.graph = weakref.ref(token)
        runtime.open_calls.pop()
        runtime.perform(runtime.schedule.forward_ends(call, needs_backward=bool(hooked)))
        if self.is_root:
            runtime.end_pass(training=bool(hooked))
        elif not runtime.open_calls:
            runtime.drop_guesses()
        self.left = True
        return output

    @untraced
    def after_failure(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """Clean up after a forward that failed: no unit stays open and no full parameter visible.

        It runs after every forward and must not raise: torch would show its error in place of the first one.
        """
        if in_backward() or self.passing or self.unit.summoned is not None:
            return
        if self.left:
            self.left = False
        elif self.unit.open_calls or self.is_root:
            self.runtime.abandon(self.unit)

    def _refuse_views_of_parameters(self, tensors: list[torch.Tensor]) -> None:
        if in_functorch():  # their tensors have no storage
            return
        buffers = {lane.full.tensor.untyped_storage()._cdata for lane in self.unit.lanes}
        for tensor in tensors:
            if tensor.layout == torch.strided and not tensor.is_meta and tensor.untyped_storage()._cdata in buffers:
                raise ShardingError(
                    f"Unit {self.unit.name} returned a view of one of its parameters, shape {tuple(tensor.shape)}, "
                    "whose memory is freed after forward. Return a copy: `return weight[:n].clone()`."
                )

    def _keep_until_backward_is_over(self, output: object) -> None:
        self.unit.keep.add(Keep.OUTPUT)
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"Unit {self.unit.name} returned {type(output).__name__}, in which fullshard finds no tensors, so it "
                "cannot detect when backward reaches the unit: its parameters stay gathered until backward ends. "
                "Return tensors in tuples, lists, dicts or dataclasses to save that memory.",
                stacklevel=2,
            )

    # Backward

    def backward_begins(self, call: Call) -> None:
        """Gather the unit: backward has reached an output of ``call``.

        Raises:
            ShardingError: The unit's shards were changed since its forward.
        """
        if call.version not in (None, self.unit.version()):
            raise ShardingError(
                f"Parameters of unit {self.unit.name} were changed between its forward and its backward (by a step, or "
                "load_state_dict): gradients would be those of neither. Finish backward first."
            )
        self.runtime.backward_event()
        self.runtime.perform(self.runtime.schedule.backward_begins(call))
        self.runtime.recorder.begin(self.unit.name, "backward")

    def backward_ends(self, call: Call) -> None:
        """Reduce and release the unit: backward has left ``call``."""
        self.runtime.backward_event()
        self.runtime.recorder.end(self.unit.name, "backward")
        if not call.planned:  # of a reentrant checkpoint, which may hold several calls of the unit
            self.unit.recomputed -= 1
            if self.unit.recomputed > 0:
                return
        self.runtime.perform(self.runtime.schedule.backward_ends(call))

    # Calls from outside

    def guard(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Gather on demand when a submodule is called outside its unit's forward (``generate`` calls the encoder)."""
        # The hooks of a compiled block gather before its graph runs; a call in the graph would cut it in two.
        # (A flag: asking the unit's first module would give that module another graph than the unit's other ones.)
        if torch.compiler.is_compiling() and self.unit.unsharded and self.compiled:
            return
        self._gather_on_demand(module)

    @untraced
    def _gather_on_demand(self, module: nn.Module) -> None:
        runtime, unit = self.runtime, self.unit
        if (unit.open_calls and unit.unsharded) or self._steps_aside(recompute=True):
            return
        if in_backward():
            unit.reclaim()
            runtime.gather(unit)
            return
        runtime.forward_event()
        if not runtime.open_calls:
            runtime.begin_direct_call(unit)
        runtime.gather(unit)

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            handle.remove()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(_BackwardBegins(self, Call(unit.index), None))
            if not unit.open_calls:
                runtime.release(unit)

        handle = module.register_forward_hook(after)


class _GraphToken:
    """Held by the hooks of a call's outputs, so it is freed with the call's autograd graph."""


class _BackwardBegins:
    """The hook on an output tensor; an object, so that copying a sharded model reaches it and is refused."""

    def __init__(self, hooks: UnitHooks, call: Call, token: _GraphToken | None) -> None:
        self.hooks, self.call, self.token = hooks, call, token

    def __call__(self, _gradient: torch.Tensor) -> None:
        self.hooks.backward_begins(self.call)


class _Site:
    """A module whose weight is a sharded parameter, with the function that replaces its class's ``forward``."""

    def __init__(self, hooks: UnitHooks, param: ShardedParam, module: nn.Module) -> None:
        self.hooks = hooks
        self.unit = hooks.unit
        self.param = param
        self.module = module
        self.plain = type(module).forward

    def applies(self) -> bool:
        """Return True if this call can bypass autograd: recording, with the full weight in its slot."""
        device = self.param.lane.full.tensor.device.type
        return (
            torch.is_grad_enabled()
            and self.param.trainable
            and self.module._parameters["weight"] is self.param.full
            and not in_functorch()
            and not torch.is_autocast_enabled(device)
        )

    def receive(self, write: Callable[[], None]) -> None:
        """Let ``write`` put the weight's gradient into the lane, if this backward computes it.

        ``torch.autograd.grad(loss, x)`` and ``backward(inputs=[x])`` do not.

        Raises:
            ShardingError: Inside ``backward(create_graph=True)``.
        """
        if torch.is_grad_enabled():
            raise ShardingError(CREATE_GRAPH_REFUSED)
        if will_execute(self.param.accumulate):
            self.hooks.runtime.receive(self.unit, self.param, write)


class LinearSite(_Site):
    """Call of an ``nn.Linear``."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output."""
        dtypes = self.param.lane.dtypes
        if not self.applies() or input.dtype != dtypes.reduce or dtypes.compute != dtypes.reduce:
            return self.plain(self.module, input)
        # Backward reads the weight only for the input's gradient; a recomputation repeats a use counted before.
        reads = input.requires_grad and not in_backward()
        self.param.reads += reads
        with plain_functions():
            return _Linear.apply(input, self.param.full, self.module.bias, self, reads)  # type: ignore[return-value]

    def input_gradient(self, out_gradient: torch.Tensor, *, was_counted: bool) -> torch.Tensor:
        """Return ``out_gradient @ weight``, and free the weight early if this was its last read."""
        runtime, param = self.hooks.runtime, self.param
        runtime.need(self.unit, param)
        with plain_functions():
            result = out_gradient @ param.full
        if was_counted:
            param.reads -= 1
            runtime.read_for_the_last_time(self.unit, param)
        return result

    def write(self, out_gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``out_gradient.T @ x``, (out, in), to the lane."""
        view, empty = self.param.lane.gradient_of(self.param.place)
        if empty:
            torch.mm(out_gradient.t(), x, out=view)
        else:
            view.addmm_(out_gradient.t(), x)


class EmbeddingSite(_Site):
    """Call of a plain ``nn.Embedding``."""

    @property
    def padding_index(self) -> int | None:
        """Index of the row without gradient, or None."""
        return self.module.padding_idx  # type: ignore[return-value]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return the module's output."""
        if not self.applies():
            return self.plain(self.module, input)
        with plain_functions():
            return _Embedding.apply(input, self.param.full, self)  # type: ignore[return-value]

    def write(self, out_gradient: torch.Tensor, indices: torch.Tensor) -> None:
        """Add the rows of ``out_gradient``, (lookups, width), to the rows of the lane that were looked up."""
        view, empty = self.param.lane.gradient_of(self.param.place)
        if empty:
            view.zero_()
        rows = out_gradient.to(view.dtype)
        if self.padding_index is not None:
            rows = rows.masked_fill(torch.eq(indices, self.padding_index).unsqueeze(1), 0)
        add_rows(view, indices, rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: LinearSite,
        reads: bool,  # noqa: FBT001 (autograd passes by position)
    ) -> torch.Tensor:
        ctx.site, ctx.reads = site, reads
        ctx.save_for_backward(x)
        if x.dim() <= 2:
            return F.linear(x, weight, bias)
        # Not F.linear: with a bias it returns a view, and in-place changes of a view made here are refused.
        rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        site: LinearSite = ctx.site
        rows = gradient.reshape(-1, gradient.shape[-1])
        # The input's gradient first: the weight's may complete the unit, which then releases its parameters.
        x_gradient = site.input_gradient(gradient, was_counted=ctx.reads) if ctx.needs_input_grad[0] else None
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[2] else None
        site.receive(lambda: site.write(rows, x.reshape(-1, x.shape[-1])))
        return x_gradient, None, bias_gradient, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor, site: EmbeddingSite) -> torch.Tensor:
        ctx.site = site
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        site: EmbeddingSite = ctx.site
        rows = gradient.reshape(-1, gradient.shape[-1])
        site.receive(lambda: site.write(rows, indices.reshape(-1)))
        return None, None, None
