"""Hooks around every optimizer step: refuse optimizers that are not elementwise, record what ranks compare.

An elementwise optimizer (SGD, Adam, Lion…) computes each element's update from that element's gradients alone, so it
can step a shard of the parameter like the full one. Others use rows, columns, norms or products of a full matrix: given
a part of one, they run and compute something else. torch calls the hooks of this module around every optimizer's step;
the cost is a look-up of the class. An unknown class is tried once, on a small matrix.

An elementwise optimizer needs no other ranks, so no step would notice that a rank has put a parameter into another
group than the others (for instance by the size of its own rows) and decays half a matrix. What an optimizer steps is
therefore recorded; the records enter the checksum that ranks exchange anyway, so no collective is added.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.core.comm import Labels
from fullshard.core.layout import Fingerprint, ShardMeta
from fullshard.core.optim.shards import is_shared, is_split, meta_of
from fullshard.core.optim.trial import (
    STEPS,
    Split,
    maker_like,
    steps_params_alone,
    steps_parts_equally,
    why_not_on_shards,
)
from fullshard.core.shards import Shard, as_shard, on_rows, restore, restore_all, strip
from fullshard.core.torch_private import hooks_around_every_step, is_inside_step
from fullshard.errors import ConfigError, ShardingError

# Stored on the optimizer: parameters may refer to their optimizer, as with step_in_backward, so the entries of a
# separate table, which hold parameters, would keep both alive forever.
_NAME = "_fullshard_members"


@dataclass(frozen=True)
class Members:
    """The sharded parameters of an optimizer.

    Attributes:
        key: What the entry was computed from: for each group its parameters' identities, their units, and whether
            backward steps them.
        given: The optimizer's parameters, kept alive so that their identities are not reused.
        sharded: Those that are sharded.
        split: True if several ranks hold parts of one of them.
        units: Their units, as weak references; without parameters that are stepped in backward.
        groups: For each group, and each sharded model that it steps and whose learning rates are compared, the checksum
            of its parameters' names and the first of them.
        stripped: The shards that are made plain during a step, with their gradients.
        labels: The label of a running step in a profiler's trace.
    """

    key: list[list[object]]
    given: list[nn.Parameter]
    sharded: list[nn.Parameter]
    split: bool
    units: list[Callable[[], Any]]
    groups: list[list[tuple[int, nn.Parameter]]]
    stripped: list[tuple[nn.Parameter, torch.Tensor | None]] = field(default_factory=list)
    labels: Labels = field(default_factory=Labels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce to None in a copy or a pickle of the optimizer, whose parameters differ."""
        return type(None), ()


def members_of(optimizer: Optimizer) -> Members:
    """Return the facts about an optimizer's parameters; any rank, no communication."""
    key = [_identity(group["params"]) for group in optimizer.param_groups]
    known: Members | None = vars(optimizer).get(_NAME)
    if known is None or known.key != key:
        known = vars(optimizer)[_NAME] = _look_up(optimizer, key)
    return known


def _identity(params: list[nn.Parameter]) -> list[object]:
    # Runs at each step, so it builds no tuple for each parameter. Sharding again makes new units.
    attributes = list(map(vars, params))
    units = [known.get("shard_unit") for known in attributes]
    return [list(map(id, params)), units, ["shard_optimizer" in known for known in attributes]]


def members_before(optimizer: Optimizer) -> Members:
    """Return the result of :func:`members_of` from before the step, whatever the step has changed since."""
    return vars(optimizer)[_NAME]


def _look_up(optimizer: Optimizer, key: list[list[object]]) -> Members:
    given = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = [param for param in given if hasattr(param, "shard_meta")]
    after_backward = (vars(p)["shard_unit"] for p in sharded if "shard_unit" in vars(p) and not _in_backward(p))
    units = {id(unit()): unit for unit in after_backward}
    groups = [_compared(group["params"]) for group in optimizer.param_groups]
    return Members(key, given, sharded, any(map(is_split, sharded)), list(units.values()), groups)


def _compared(params: list[nn.Parameter]) -> list[tuple[int, nn.Parameter]]:
    # By model: ranks may list the parameters in different orders, and so begin with different models.
    of_model: dict[int, list[nn.Parameter]] = {}
    for param in params:
        if "shard_rates" in vars(param) and not _in_backward(param):
            of_model.setdefault(id(vars(param)["shard_rates"]), []).append(param)
    return [
        (sum(zlib.crc32(meta_of(p).name.encode()) for p in compared), compared[0]) for compared in of_model.values()
    ]


def _in_backward(param: nn.Parameter) -> bool:
    return hasattr(param, "shard_optimizer")


_NOT_COMPARED = ("params", "param_names", "lr", "initial_lr")

_PLAIN = (bool, int, float, str, type(None))

_noted: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()
"""Sizes of the groups that were recorded."""


def refuse_unreduced(members: Members) -> None:
    """Refuse to step while gradients of ``no_sync`` or ``no_all_reduce`` are unreduced: they would be left out.

    Raises:
        ShardingError: Some gradients are unreduced.
    """
    units = [unit for reference in members.units if (unit := reference()) is not None]
    waiting = [
        unit.name for unit in units if unit.holds_gradient or any(lane.partial is not None for lane in unit.lanes)
    ]
    if waiting:
        raise ShardingError(
            f"The optimizer would step without the gradients of {len(waiting)} units, such as {waiting[0]}: they were "
            "computed inside no_sync or no_all_reduce and wait to be summed over ranks. Run the last backward before a "
            "step outside of both."
        )


def note_fingerprint(optimizer: Optimizer) -> None:
    """Record the sharded parameters of an optimizer and their groups, on each rank alone, without communication.

    Recorded are the numbers of groups, which distinguish learning rates, and options that are plain values except
    learning rates: at the first step, and when parameters were added. Optimizers that step in backward are left out.
    """
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    if _noted.get(optimizer) == sizes:
        return
    of_model: dict[int, tuple[list[Fingerprint], Fingerprint]] = {}
    number = 0
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if hasattr(p, "shard_fingerprints") and not _steps_in_backward(p)]
        if not params:
            continue
        options = tuple(f"{key}={value!r}" for key, value in group.items() if _is_compared(key, value))
        for param in params:
            fingerprints: list[Fingerprint] = param.shard_fingerprints
            of_model.setdefault(id(fingerprints), (fingerprints, {}))[1][meta_of(param).name] = (number, options)
        number += 1
    for fingerprints, new in of_model.values():
        fingerprints.append(new)
    if of_model:
        _noted[optimizer] = sizes


def note_rates(optimizer: Optimizer, members: Members) -> None:
    """Record the learning rates of a step, which ranks compare at the end of the next backward.

    The record of a group is a product of its rate and its parameters' names, so ranks may group differently.
    """
    for group, compared in zip(optimizer.param_groups, members.groups, strict=True):
        rate = group.get("lr")
        on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"  # reading it would wait for the device
        if rate is None or on_device:
            continue
        for names, first in compared:
            rates: list[tuple[int, str, float]] = vars(first)["shard_rates"]
            rates.append((names * zlib.crc32(repr(float(rate)).encode()), meta_of(first).name, float(rate)))


def _steps_in_backward(param: Parameter) -> bool:
    """Return whether a parameter is stepped when its gradient arrives."""
    return hasattr(param, "shard_optimizer") or bool(param._post_accumulate_grad_hooks)


def _is_compared(key: str, value: object) -> bool:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return key not in _NOT_COMPARED and all(isinstance(one, _PLAIN) for one in values)


BLOCK = 256
"""Elements that bitsandbytes (``blocksize``) and torchao (``block_size``; 128 for 4 bits) quantise together."""

_NOT_OPTIONS = ("params", "param_names", "initial_lr")

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
_OURS = {
    "transformers.optimization.Adafactor": "fullshard.optim.Adafactor, which has transformers' arguments",
    "torch.optim.Adafactor": "fullshard.optim.TorchAdafactor, which has torch's arguments",
    "torch.optim.Muon": "fullshard.optim.Muon",
}
_OURS_BY_NAME = {
    "adafactor": "fullshard.optim.Adafactor or TorchAdafactor",
    "muon": "fullshard.optim.Muon",
    "normuon": "fullshard.optim.Muon",
}
_ELSE = "an elementwise one (AdamW, SGD, Lion, Sophia…), or fullshard.optim's Adafactor or Muon"
_MATRICES = frozenset(
    (
        *("adamp", "sgdp", "scalableshampoo"),  # rows and columns count at rare gradients, or from the 25th step on
        *("adamuon", "dion", "distributedmuon", "distributedshampoo", "muon", "muonwithauxadam", "normuon"),  # send
        *("fusedlamb", "fusednovograd", "galoreadamw8bit"),  # run on a GPU only
    )
)
"""Names in lower case of classes that use a full parameter and that a trial cannot judge, or must not run."""

_Verdicts = dict[Split | None, bool | str]
"""Verdict by how parameters are split (None: not split): whether a class may step them, or why it is unknown."""

_tried: WeakKeyDictionary[Optimizer, _Verdicts] = WeakKeyDictionary()
_plain: WeakSet[Optimizer] = WeakSet()
"""Optimizers of tried classes that cannot step shards."""
_trusted: WeakSet[type[Optimizer]] = WeakSet()
_of_rows: WeakSet[type[Optimizer]] = WeakSet()
"""Trusted classes whose steps get plain rows."""


def trust(optimizer_class: type[Optimizer], *, plain_rows: bool = False) -> None:
    """Accept a class of optimizers that would be refused on shards; every rank calls it.

    Its step then gets shards as they are: elementwise functions compute on this rank's rows, norms and sums on the full
    tensors, and functions that need the full tensor are refused by name. ``p.shape`` is the shape of the rows.

    Args:
        optimizer_class: The class, not an optimizer.
        plain_rows: Give its step this rank's rows as plain tensors, which costs nothing for each function that it
            calls. It must be elementwise in every step: a norm or sum would be that of the rows here.

    Raises:
        ConfigError: It is not a class of optimizers.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigError(f"trust() takes a class of optimizers; got {optimizer_class!r}. Pass type(optimizer).")
    _trusted.add(optimizer_class)
    (_of_rows.add if plain_rows else _of_rows.discard)(optimizer_class)


def _name(optimizer_class: type[Optimizer]) -> str:
    return optimizer_class.__name__.lower().replace("_", "")


def _remedy_for(optimizer_class: type[Optimizer]) -> str:
    path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    return _OURS.get(path) or _OURS_BY_NAME.get(_name(optimizer_class), _ELSE)


def refuse_equal_names(params: Iterable[nn.Parameter]) -> None:
    """Refuse equal names among sharded parameters: a name identifies a parameter within one model only.

    Raises:
        ConfigError: There are equal names; on every rank.
    """
    counts = Counter(meta_of(param).name for param in params)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{count} parameters are called {name!r}: they belong to several sharded models. Make one for each model."
        )


def _knows_shards(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is fullshard's, or describes the parts of its state itself."""
    return type(optimizer).__module__.startswith("fullshard.") or hasattr(optimizer, "state_part")


def refuse_parts(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is not elementwise if it would step parts of matrices.

    The class, its options and the layout decide, so ranks with the same parameters decide alike, including ranks that
    hold no rows.

    Raises:
        ConfigError: It would step parts; nothing has changed.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or kind in _trusted or _knows_shards(optimizer):
        return
    sums = _name(kind) == "lbfgs"  # its step takes a closure, which a trial has not
    settings = getattr(optimizer, "args", None) if kind.__module__.startswith("bitsandbytes.") else None
    if sums or _name(kind) in _MATRICES or getattr(settings, "max_unorm", 0) > 0:
        used = "sums over all parameters of the model" if sums else "full matrices"
        concerned = [p for p in _sharded(optimizer) if is_split(p) or (sums and is_shared(p))]
        rule = f"{kind.__name__} uses {used}, and ranks hold parts of them"
        _refuse(concerned, rule, _remedy_for(kind))
    elif _is_of_blocks(optimizer):
        rule = f"{kind.__name__} quantises blocks of {BLOCK} elements, and ranks hold parts of blocks"
        metas = [(p, meta_of(p)) for p in _sharded(optimizer)]
        shared = [
            p
            for p, m in metas
            if m.block is not None or any(m.layout.local_range(m.placement, rank)[0] % BLOCK for rank in m.owners)
        ]
        _refuse(shared, rule, "fullshard.optim.AdamW8bit")
    elif settings is None and not kind.__module__.startswith("torchao."):  # on the CPU theirs fail, or compile kernels
        _judge(optimizer)


def _judge(optimizer: Optimizer) -> None:
    """Refuse an unknown class that did not pass its trial."""
    kind, verdicts = type(optimizer).__name__, _on_trial(optimizer)
    for split, verdict in verdicts.items():
        if split is None:
            concerned = [p for p in _sharded(optimizer) if is_shared(p)]
            rule = f"{kind} uses several parameters at once, and each rank has different ones"
        else:
            concerned = [p for p in _sharded(optimizer) if is_split(p) and _split(meta_of(p)) is split]
            rule = f"{kind} is not elementwise (in a trial a matrix and its parts were stepped differently)"
        if isinstance(verdict, str):
            rule = f"Whether {kind} is elementwise could not be tested ({verdict})"
            remedy = f"{_remedy_for(type(optimizer))}; or call fullshard.optim.trust({kind}) if you know that it is "
            remedy += "correct on shards"
            _refuse(concerned, rule, remedy, result="might")
        elif not verdict:
            _refuse(concerned, rule, _remedy_for(type(optimizer)))


def _on_trial(optimizer: Optimizer) -> _Verdicts:
    """Return the verdict for each way in which the parameters are divided; empty if one rank has all.

    The trial runs once, before the first step. The trial's own optimizers also call the hooks of this module, but have
    no shards.
    """
    verdicts = _tried.get(optimizer)
    if verdicts is None:
        sharded = [param for param in _sharded(optimizer) if is_shared(param)]
        splits: set[Split | None] = {_split(meta_of(param)) for param in sharded if is_split(param)}
        splits |= {None} if sharded else set()
        options = [
            {**optimizer.defaults, **{key: value for key, value in group.items() if key not in _NOT_OPTIONS}}
            for group in optimizer.param_groups
        ]
        verdicts = {}
        for split in sorted(splits, key=str):
            found = [_once(_try, type(optimizer), one, split) for one in options]
            verdicts[split] = next((one for one in found if isinstance(one, str)), all(found))
        if verdicts:
            _tried[optimizer] = verdicts
        if verdicts and all(one is True for one in verdicts.values()) and not _steps_as_torchs(type(optimizer)):
            _choose_rows(optimizer, [(one, split) for one in options for split in verdicts if split is not None])
    return verdicts


def _choose_rows(optimizer: Optimizer, trials: Iterable[tuple[dict[str, Any], Split]]) -> None:
    """Let an optimizer that cannot step shards get this rank's rows as plain tensors, with a warning."""
    kind = type(optimizer)
    found = (_once(_try_on_shards, kind, options, split) for options, split in trials)
    why = next((one for one in found if one is not None), None)
    if why is not None:
        _plain.add(optimizer)
        warnings.warn(
            f"{kind.__name__} cannot step shards ({why}), so it gets this rank's rows as plain tensors. In a trial of "
            f"{STEPS} steps it was elementwise; a norm or sum that it computes only later would be that of this rank's "
            f"rows. If it never does, call fullshard.optim.trust({kind.__name__}, plain_rows=True).",
            stacklevel=2,
        )


def _once(function: Callable[..., Any], kind: type[Optimizer], options: dict[str, Any], split: Split | None) -> Any:
    """Call ``function`` once for equal arguments: stepping in backward makes an optimizer for each parameter."""
    given = tuple(options.items())
    try:
        hash(given)
    except TypeError:
        return function(kind, given, split)
    return _cached(function, kind, given, split)


@lru_cache(maxsize=128)
def _cached(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


def _try(kind: type[Optimizer], options: tuple[tuple[str, Any], ...], split: Split | None) -> bool | str:
    make = maker_like(kind, dict(options))
    try:
        return steps_params_alone(make) if split is None else steps_parts_equally(make, split)
    except Exception as error:
        # A class of another library may raise anything; it then counts as untried.
        return f"{type(error).__name__}: {error}"[:200]


def _try_on_shards(kind: type[Optimizer], options: tuple[tuple[str, Any], ...], split: Split) -> str | None:
    return why_not_on_shards(maker_like(kind, dict(options)), split)


def _split(meta: ShardMeta) -> Split:
    """Return how ranks hold a parameter; the same on every rank."""
    if len(meta.global_shape) == 1:
        return Split.VECTOR
    full_rows = meta.row_range is not None and (meta.block is None or meta.block.dim == 0)
    return Split.ROWS if full_rows else Split.WITHIN_ROWS


def _refuse(params: list[nn.Parameter], rule: str, remedy: str, result: str = "would") -> None:
    if not params:
        return
    first = meta_of(params[0])
    remedy = remedy if first.block is None else "an elementwise optimizer of torch, such as torch.optim.AdamW"
    blocks = "" if first.block is None else f", each of {first.block.count} blocks (tensor parallel)"
    raise ConfigError(
        f"{rule}: {len(params)} of its parameters are sharded, such as {first.name}, {first.global_shape}, over "
        f"{len(first.owners)} of {first.layout.world_size} ranks{blocks}. It would run, but the result {result} differ "
        f"from unsharded training. Use {remedy}."
    )


def _sharded(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "shard_meta"))


def _is_of_blocks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of bitsandbytes' or torchao's whose states are quantised in blocks."""
    kind = type(optimizer)
    if kind.__module__.startswith("torchao."):
        return _name(kind).endswith(("8bit", "4bit", "fp8"))
    if not kind.__module__.startswith("bitsandbytes."):
        return False
    return getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def _only_steps(optimizer: Optimizer, members: Members, given: Iterable[object]) -> bool:
    """Return True if a step treats each rank's rows alone and runs no user code, which must see shards as shards.

    True for torch's elementwise classes, tried ones that cannot step shards, and any class if each rank has full
    matrices; but only if no closure is among the step's arguments, ``given``, and no hook but fullshard's is
    registered. Other tried classes get shards, whose norms are the full tensors': the trial saw only the first steps.
    """
    own = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    hooks = (*own, *hooks_around_every_step())
    if any(one is not None for one in given):
        return False
    if any(not str(getattr(hook, "__module__", "")).startswith("fullshard.") for hook in hooks):
        return False
    kind = type(optimizer)
    return (
        _steps_as_torchs(kind)
        or optimizer in _plain
        or kind in _of_rows
        or (kind not in _trusted and not members.split)
    )


@lru_cache
def _steps_as_torchs(kind: type[Optimizer]) -> bool:
    """Return True for torch's elementwise classes and subclasses that leave their step as it is."""
    base = next((base for base in kind.__mro__ if base in _ELEMENTWISE), None)
    of_step = ("step", "_init_group")
    return base is not None and all(_function(kind, name) is _function(base, name) for name in of_step)


def _function(kind: type[Optimizer], name: str) -> object:
    return inspect.unwrap(getattr(kind, name, None) or _function)  # torch wraps the step of each class


@on_rows
def _mark_states(optimizer: Optimizer, members: Members, *, as_shards: bool) -> None:
    """Make states of the parameters' rows shards for a step, or plain again: they are saved, copied and pickled."""
    for param in () if _knows_shards(optimizer) else members.sharded:
        for value in optimizer.state.get(param, {}).values():
            if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != param.shape:
                continue
            if as_shards:
                as_shard(value, param.row_split)  # type: ignore[attr-defined]
            elif type(value) is Shard:
                value.__class__ = torch.Tensor  # pyright: ignore[reportAttributeAccessIssue]


class _CheckedClosure:
    """A closure that may run the backward which reduces waiting gradients, as Lightning's does; checked afterwards."""

    def __init__(self, members: Members, given: Any) -> None:
        self.members = members
        self.given = given
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.given(*args, **kwargs)
        self.called = True
        refuse_unreduced(self.members)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.given, name)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    if is_inside_step(optimizer):  # what follows ``super().step()`` sees the same parameters as what comes before it
        return None
    refuse_parts(optimizer)
    members = members_of(optimizer)
    optimizer_itself, *given = args
    closure = given[0] if given else kwargs.get("closure")
    if not callable(closure):
        refuse_unreduced(members)
    note_fingerprint(optimizer)
    note_rates(optimizer, members)
    restore_all(param for param, _ in members.stripped)
    if members.sharded:
        members.labels.begin("optimizer_step", type(optimizer).__name__)
    if _only_steps(optimizer, members, (*given, *kwargs.values())):
        members.stripped[:] = strip(members.sharded)
    else:
        members.stripped.clear()
        _mark_states(optimizer, members, as_shards=True)
    if not callable(closure):
        return None
    checked = _CheckedClosure(members, closure)
    if given:
        return (optimizer_itself, checked, *given[1:]), kwargs
    return args, {**kwargs, "closure": checked}


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_inside_step(optimizer):
        return
    members = members_before(optimizer)
    members.labels.end("optimizer_step", type(optimizer).__name__)
    restore(members.stripped)
    if not members.stripped:
        _mark_states(optimizer, members, as_shards=False)
    members.stripped.clear()
    for one in (*args, *kwargs.values()):
        if isinstance(one, _CheckedClosure) and not one.called:  # the step does not use its closure
            refuse_unreduced(members)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
