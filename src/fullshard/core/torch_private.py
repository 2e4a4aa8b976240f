"""Every private name of torch that fullshard uses, in one place, and what breaks when it is gone.

``import fullshard`` works without any of them. What needs a missing one raises a ConfigError with the name and torch's
version. Attributes of torch's own objects that are read where they are needed are listed in ``ATTRIBUTES``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable

from fullshard.errors import ConfigError, private_name

ATTRIBUTES = {
    "torch.nn.Module": {
        "_parameters": "no model can be sharded: full parameters and shards take each other's place there",
        "_buffers": "no model can be sharded: buffers are moved and cast there",
        "_modules": "no model with shared or quantised modules can be sharded",
        "_non_persistent_buffers_set": "weights cannot be loaded or saved: which buffers are saved is not known",
        "_compiled_call_impl": "a model with compiled blocks cannot run",
        "_call_impl": "blocks cannot be compiled",
    },
    "torch.Tensor": {
        "_version": "changes of shards between forward and backward are not noticed",
        "_backward_hooks": "hooks on parameters that were replaced are not moved",
        "_post_accumulate_grad_hooks": "hooks that step a parameter in backward are not recognised",
        "_make_subclass": "views of quantised weights cannot be read",
        "_make_wrapper_subclass": "quantised layers have no ``weight``",
        "_use_count": "nothing can be planned: gradients that autograd adds in place are not known",
    },
    "torch.amp.GradScaler": {
        "_scale": "with CPU offload a scaler's step is refused: the scale cannot be moved to the host",
        "_growth_tracker": "the same",
        "_unscale_grads_": "ranks do not learn of each other's infinite gradients",
    },
    "torch._ops.OpOverload": {
        "_schema": "a quantised weight cannot be read, nothing planned: which arguments are written is not known",
        "_overloadpacket": "no step's time can be planned or measured",
        "_op_dk": "steps with quantised layers or some losses cannot be planned",
    },
    "torch.UntypedStorage": {
        "_cdata": "a unit that returns a view of its parameters is not refused, and nothing can be planned"
    },
    "torch.optim.SGD": {
        "_optimizer_step_pre_hooks": "no optimizer steps shards",
        "_optimizer_step_post_hooks": "no optimizer steps shards",
    },
    "torch.distributed.device_mesh.DeviceMesh": {
        "_concatenate": "FSDP2's ``device_mesh`` of tensor parallel parameters cannot be read"
    },
    "torch.distributed.fsdp.MixedPrecision": {"_module_classes_to_ignore": "FSDP1's wrapper takes no MixedPrecision"},
    "torch.distributed.fsdp.ShardingStrategy": {"_HYBRID_SHARD_ZERO2": "``fullshard.compat.torch_fsdp`` fails"},
    "torch.distributed.fsdp.wrap.ModuleWrapPolicy": {"_run_policy": "wrap policies that are objects are refused"},
}
"""Private attributes by the class that has them: what breaks when one is gone, with torch's own AttributeError."""


def _needed(module: str, name: str) -> Any:
    """Return ``module.name``; raise a ConfigError if it is gone."""
    try:
        owner = importlib.import_module(module)
    except ImportError:
        parent, _, name = module.rpartition(".")
        owner = importlib.import_module(parent)
    return private_name(owner, name, "torch")


def _named(module: str, name: str) -> Any:
    """Return ``module.name``; if it is gone, a class that may be derived from, and raises when it is called."""
    try:
        return _needed(module, name)
    except ConfigError as error:
        message = str(error)

        def gone(_cls: type, *_args: Any, **_kwargs: Any) -> Any:
            raise ConfigError(message)

        return type(name, (), {"__new__": gone})


plain_functions = _named("torch._C", "DisableTorchFunctionSubclass")
"""Context in which shards are plain tensors. Gone: no model can be sharded."""

plain_subclass = _named("torch._C", "_disabled_torch_function_impl")
"""``__torch_function__`` of a class that does nothing there. Gone: shards and quantised weights cannot be used."""

in_functorch = _named("torch._C", "_are_functorch_transforms_active")
"""Whether a functorch transform runs, whose tensors have no memory. Gone: no forward of a sharded model runs."""

set_eval_frame = _named("torch._C._dynamo.eval_frame", "set_eval_frame")
"""Turns torch.compile's tracing off and on, without importing the compiler. Gone: no forward runs."""

is_traceable_wrapper = _named("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")
"""Whether a tensor has parts in place of memory, as a DTensor. Gone: no memory can be metered on the CPU."""

dispatch_mode = _named("torch.utils._python_dispatch", "TorchDispatchMode")
"""Class of contexts that see each operator. Gone: nothing can be planned or measured."""

without_modes = _named("torch.utils._python_dispatch", "_disable_current_modes")
"""Context without these contexts. Gone: no step with values beside those of the model can be planned or measured."""

storage_references = _named("torch._C", "_storage_Use_Count")
"""How many tensors share a storage. Gone: nothing can be planned."""

tree_leaves = _named("torch.utils._pytree", "tree_leaves")
tree_map = _named("torch.utils._pytree", "tree_map")
"""Walk the arguments of an operator. Gone: quantised weights cannot be read, and nothing can be planned."""

tree_flatten = _named("torch.utils._pytree", "tree_flatten")
tree_unflatten = _named("torch.utils._pytree", "tree_unflatten")
"""Take nested results of an operator apart and put them together. Gone: nothing can be planned."""

foreach_copy = _named("torch", "_foreach_copy_")
"""Copies and casts many tensors at once. Gone: gradients of a unit cannot be collected."""

foreach_zero = _named("torch", "_foreach_zero_")
"""Zeroes many tensors at once. Gone: gradients of a unit cannot be collected."""

foreach_norm = _named("torch", "_foreach_norm")
"""Norms of many tensors at once. Gone: scales of float8 weights cannot be computed ahead."""

will_execute: Callable[[Any], bool] = _named("torch._C", "_will_engine_execute_node")
"""Whether the running backward executes a node, or was asked for other inputs only. Gone: no backward runs."""

can_take_data: Callable[[torch.Tensor, torch.Tensor], bool] = _named("torch", "_has_compatible_shallow_copy_type")
"""Whether ``tensor.data = data`` is possible: between CPU and CUDA, not with the meta device. Gone: a sharded model
cannot be moved."""

fan_in_and_out = _named("torch.nn.init", "_calculate_fan_in_and_fan_out")
"""Fans of a shape, for initialisers of shards. Gone: parameters cannot be initialised."""


limits_each_function = "recompile_limit" in inspect.signature(torch.compile).parameters
"""Whether ``torch.compile`` takes a limit of graphs; torch 2.11 has one for all functions only."""


def compiled(call: Callable[..., Any], *, graphs: int, **how: Any) -> Callable[..., Any]:
    """Return ``torch.compile`` of a function of which the compiler makes up to so many graphs before it gives up.

    Where the limit is that of all functions, it is raised while this one runs; gone: compiled blocks cannot run.
    """
    # The engine's hooks are outside of graphs by this function; the compiler warns that it cannot trace it.
    warnings.filterwarnings("ignore", "(?s).*builtin `torch._C._dynamo.eval_frame.set_eval_frame")
    if limits_each_function:
        how["recompile_limit"] = graphs
        return torch.compile(call, **how)
    inner: Callable[..., Any] = torch.compile(call, **how)

    @functools.wraps(call)
    def limited(*args: Any, **kwargs: Any) -> Any:
        with _needed("torch._dynamo", "config").patch(recompile_limit=graphs):
            return inner(*args, **kwargs)

    return limited


@contextmanager
def compiler_watched(begins: Callable[[Any], None], ends: Callable[[Any], None]) -> Iterator[None]:
    """Call functions before and after each run of the compiler inside the context. Gone: nobody is told of it."""
    handler = getattr(importlib.import_module("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:
        yield
        return
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        yield
    finally:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)


def graphs_compiled() -> int:
    """Return how many graphs this process has compiled. Gone: always 0."""
    counters = getattr(importlib.import_module("torch._dynamo.utils"), "counters", {"stats": {}})
    return int(counters["stats"].get("unique_graphs", 0))


profiler_runs: Callable[[], bool] = _named("torch.autograd", "_profiler_enabled")
"""Whether a profiler records this thread. Gone: no sharded model runs."""

_task = _named("torch._C", "_current_graph_task_id")


def in_backward() -> bool:
    """Return whether this thread is inside ``backward()``, where a forward recomputes. Gone: no forward runs."""
    return _task() >= 0


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the running ``backward()``, in this thread. Gone: no backward runs."""
    private_name(Variable, "_execution_engine", "torch").queue_callback(callback)


def timeout_s(group: Any, device: torch.device) -> float:
    """Return the time limit of a process group's collectives, in seconds. Gone: gloo cannot be used."""
    options = private_name(group, "_get_backend", "torch")(device).options
    return private_name(options, "_timeout", "torch").total_seconds()


def lists_of_fast_types() -> list[list[type]]:
    """Return the lists of classes that optimizers and clipping compute many at once. Gone: one by one, more slowly."""
    modules = ("torch.optim.optimizer", "torch.utils._foreach_utils")
    found = (getattr(sys.modules.get(name), "_foreach_supported_types", None) for name in modules)
    return [one for one in found if one is not None]


def fake_tensors() -> Any:
    """Return torch's module that computes shapes without values. Gone, or a name in it: nothing can be planned."""
    names = ("FakeTensor", "FakeTensorMode", "DataDependentOutputException")
    for name in (*names, "DynamicOutputShapeException", "UnsupportedOperatorException"):
        _needed("torch._subclasses.fake_tensor", name)
    return sys.modules["torch._subclasses.fake_tensor"]


def operator(name: str, overload: str = "default") -> Any:
    """Return a private operator of torch; None if it is gone, as then no step calls it."""
    return getattr(getattr(torch.ops.aten, name, None), overload, None)


def run_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operators that an operator's own kernel calls. Gone: see ``OpOverload._op_dk``."""
    return func._op_dk(_needed("torch._C", "DispatchKey").CompositeExplicitAutograd, *args, **kwargs)


def is_composite(func: Any) -> bool:
    """Return whether an operator is made of others on every device. Gone: steps in fp8 cannot be planned."""
    return _needed("torch._C", "_dispatch_has_kernel_for_dispatch_key")(func.name(), "CompositeImplicitAutograd")


def checkpoint_wrappers() -> list[Any]:
    """Return ``ActivationWrapper``, ``CheckpointImpl`` and ``CheckpointWrapper``, which have no public place.

    Gone: ``fullshard.compat.torch_fsdp`` cannot be imported.
    """
    module = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    return [_needed(module, name) for name in ("ActivationWrapper", "CheckpointImpl", "CheckpointWrapper")]


def composed(module: torch.nn.Module) -> dict[str, Any]:
    """Return torch's composable APIs that were applied to a module, by name.

    Gone, here or in :func:`note_composed`: version 2's ``fully_shard`` cannot be called.
    """
    return vars(module).get(_needed("torch.distributed._composable.contract", "REGISTRY_KEY"), {})


def note_composed(module: torch.nn.Module, name: str) -> None:
    """Note that a composable API was applied to a module, where torch's others look."""
    module_name = "torch.distributed._composable.contract"
    registry = vars(module).setdefault(_needed(module_name, "REGISTRY_KEY"), {})
    registry[name] = _needed(module_name, "RegistryItem")()


def joined_mesh(data: Any, tensor: Any) -> Any:
    """Return the DeviceMesh of the axes of two slices of one mesh; None if they are of different meshes or unnamed."""
    try:
        return type(tensor)._concatenate([data, tensor])
    except (RuntimeError, TypeError, AssertionError):
        return None


DDP_ASKS = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a model that DistributedDataParallel asks for first; nothing else of torch reads it."""


def is_ddp(frame: Any) -> bool:
    """Return True if ``frame`` is code of DistributedDataParallel."""
    return frame.f_globals.get("__name__") == "torch.nn.parallel.distributed"


def wrap_state_getters(ask: Callable[[Any], Any], finish: Callable[[Any], Any]) -> None:
    """Wrap the two functions by which torch's getters and setters ask for a state dict, and make a full one of it.

    Gone: ``fullshard.compat.torch_fsdp`` cannot be imported, because getters would take parts for full tensors.
    """
    module = "torch.distributed.checkpoint.state_dict"
    asked, finished = _needed(module, "_state_dict_fn"), _needed(module, "_maybe_full_or_cpu_state_dict")
    setattr(sys.modules[module], "_state_dict_fn", ask(asked))  # noqa: B010
    setattr(sys.modules[module], "_maybe_full_or_cpu_state_dict", finish(finished))  # noqa: B010


def unflatten(state: dict[str, Any], paths: dict[str, Any]) -> Any:
    """Nest values by their paths in a distributed checkpoint. Gone: no optimizer's state is read before its step."""
    return _needed("torch.distributed.checkpoint._nested_dict", "unflatten_state_dict")(state, paths)


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """Return what ``Module.load_state_dict`` returns. Gone: it cannot be called on a sharded model."""
    return _named("torch.nn.modules.module", "_IncompatibleKeys")(missing, unexpected)


def is_inside_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook is called for a step inside the step of the same optimizer, as ``super().step()``.

    torch calls hooks for a class's own ``step`` only once an instance of just that class was made in the process.
    """
    calls, frame = 0, sys._getframe(1)
    while frame is not None and calls < 2:
        code = frame.f_code
        is_call = code.co_name == "wrapper" and code.co_filename == sys.modules["torch.optim.optimizer"].__file__
        calls += is_call and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return calls == 2


def hooks_around_every_step() -> list[Any]:
    """Return the hooks that run around the steps of all optimizers. Gone: no optimizer steps shards."""
    module = sys.modules["torch.optim.optimizer"]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return [hook for name in names for hook in private_name(module, name, "torch").values()]
