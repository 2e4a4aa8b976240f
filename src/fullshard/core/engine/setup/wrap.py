"""Choice of the modules that become units, and of each parameter's unit. Reads the module tree, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from fullshard.core.engine.extension.extension import METHODS, Extension, extension_of
from fullshard.core.engine.parallel.parallel import Parallel, is_distributed
from fullshard.core.engine.step.unit import is_plain_embedding, plain_type
from fullshard.core.layout.names import plain_name
from fullshard.core.policy import MinNumel, Named, TransformerBlocks, WrapPolicy
from fullshard.core.torch_private import is_traceable_wrapper
from fullshard.errors import WrapError

ROOT_NAME = "(root)"
TINY_NUMEL = 1_000_000
"""Under ``wrap="auto"``, neighbours are merged up to this many elements: a unit costs a collective's latency and some
microseconds of Python twice a step, more than a gather of a few megabytes."""

ONE_UNIT_NUMEL = 1_000_000
"""Elements of a model without blocks up to which ``wrap="auto"`` makes one unit of it without being asked."""

LARGE_NUMEL = 1 << 20
"""Smallest number of elements of an embedding or head outside the blocks that becomes a unit."""

ONE_UNIT = "pass wrap=None"
BY_CLASS = "wrap=TransformerBlocks({...})"
"""Remedies that errors name in the library's terms; the program replaces them by a run file's."""

Found = tuple[str, tuple[nn.Module, ...]]
"""A unit's name and its modules, in the order they run in; nearly always one."""


class NoRepeatedBlocksError(WrapError):
    """``wrap="auto"`` found no repeated blocks in a model that is too large for one unit."""


@dataclass
class ParamSpec:
    """A parameter and every place where it is registered.

    Attributes:
        param: The unsharded parameter; of one with an extension, the plain tensor inside.
        names: Fully qualified names; several when it is tied.
        slots: ``(module, key)`` of each registration, on distinct modules.
        extension: The tensor subclass around it that says what is gathered; None for plain parameters.
        parallel: How tensor parallelism divides it; None if it does not. Then ``param`` is this rank's block.
    """

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    extension: Extension | None = None
    parallel: Parallel | None = None

    def take_apart(self) -> None:
        """Find the extension of the parameter, if its class has one, or how tensor parallelism divides it.

        Raises:
            WrapError: It is made of other tensors, and cannot be gathered; or it is divided in a way that is not known.
        """
        if is_distributed(self.param):
            self.parallel = Parallel(self.names[0], self.param)
            self.param = nn.Parameter(self.parallel.values, self.param.requires_grad)
            return
        if not is_traceable_wrapper(self.param) and not any(hasattr(self.param, name) for name in METHODS):
            return
        self.extension = extension_of(self.names[0], self.param, self.slots[0][0])
        self.param = nn.Parameter(self.extension.values, self.param.requires_grad)


@dataclass
class UnitSpec:
    """A unit to be built: its modules and parameters."""

    name: str
    modules: tuple[nn.Module, ...]
    params: list[ParamSpec] = field(default_factory=list)

    def sent_numel(self, *, frozen_too: bool) -> int:
        """Return the elements that are gathered; ``frozen_too``: frozen parameters are gathered too."""
        return sum(spec.param.numel() for spec in self.params if frozen_too or spec.param.requires_grad)


def is_table(spec: ParamSpec) -> bool:
    """Return whether the parameter is a large embedding, possibly tied to linear heads, and nothing else."""
    if spec.parallel is not None:
        return False
    modules = [module for module, key in spec.slots if key == "weight"]
    known = all(is_plain_embedding(module) or plain_type(module) is nn.Linear for module in modules)
    embeds = any(is_plain_embedding(module) for module in modules)
    return len(modules) == len(spec.slots) and known and embeds and spec.param.numel() >= LARGE_NUMEL


def can_stay_home(spec: ParamSpec, unit: UnitSpec) -> bool:
    """Return True if tokens may travel to the parameter: a large embedding, or a large head in a unit of its own."""
    modules = [module for module, key in spec.slots if key == "weight"]
    if spec.param.ndim != 2 or spec.param.numel() < LARGE_NUMEL or not modules or spec.parallel is not None:
        return False
    is_head = len(spec.slots) == 1 and unit.modules == (modules[0],) and plain_type(modules[0]) is nn.Linear
    return is_head or any(isinstance(module, nn.Embedding) for module in modules)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules in a container that holds another module of their class, or that are alone in one.

    Those that are alone, as in a model of one layer, are blocks only where no larger modules than leaves repeat; those
    in a ModuleDict only if they are not leaves: it may hold anything.
    """
    repeated: list[tuple[str, nn.Module]] = []
    alone: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, module: nn.Module, *, inside: bool) -> None:
        members = list(_members(prefix, module))
        counts: Counter[type] = Counter()
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            counts.update(type(child) for _, child in members)
        elif isinstance(module, nn.ModuleDict):
            counts.update(type(child) for _, child in members if _is_composite(child))
        for name, child in members:
            if counts[type(child)] > 1:
                repeated.append((name, child))
                continue
            single = len(members) == 1 and isinstance(module, nn.ModuleList) and _is_composite(child) and not inside
            if single:
                alone.append((name, child))
            visit(f"{name}.", child, inside=inside or single)

    visit("", model, inside=False)
    return [block for block in repeated if _is_composite(block[1])] or alone or repeated


def _members(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children that have parameters; of lists and dicts in a list their own, since those have no forward."""
    for name, child in module.named_children():
        nested = isinstance(module, nn.ModuleList) and isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if nested:
            yield from _members(f"{prefix}{name}.", child)
        elif _has_parameters(child):
            yield f"{prefix}{name}", child


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def candidate_classes(model: nn.Module) -> list[str]:
    """Return class names in ``model`` that a wrap policy can name, most frequent first, with their counts."""
    counts = Counter(
        type(m).__name__
        for m in model.modules()
        if m is not model and _has_parameters(m) and any(True for _ in m.children())
    )
    return [f"{name} (x{count})" for name, count in counts.most_common() if not name.startswith("Module")]


def find_units(model: nn.Module, wrap: WrapPolicy) -> list[Found]:
    """Return the modules that become units, in the order of the module tree, without the root.

    Args:
        model: The root module.
        wrap: ``"auto"`` (repeated blocks; none in a small model without any), :class:`TransformerBlocks`,
            :class:`MinNumel`, :class:`Named`, a predicate over modules, or None (none).

    Raises:
        WrapError: The policy names a class or module that does not exist, matches nothing, or finds no
            repeated blocks in a large model.
    """
    if isinstance(wrap, Named):
        return _find_named(model, wrap)
    return [(plain_name(name), (module,)) for name, module in _find_modules(model, wrap)]


def _find_modules(model: nn.Module, wrap: WrapPolicy) -> list[tuple[str, nn.Module]]:
    if wrap is None:
        return []
    if wrap == "auto":
        found, numel = _repeated_blocks(model), sum(p.numel() for p in model.parameters())
        if not found and numel > ONE_UNIT_NUMEL:
            raise NoRepeatedBlocksError(
                f"{type(model).__name__} has no repeated blocks, so all of its {numel:,} parameters would be one unit, "
                f"gathered at once on every rank; above {ONE_UNIT_NUMEL:,} that must be asked for. If you want that, "
                f"{ONE_UNIT}; otherwise name the classes to wrap: {BY_CLASS}. Classes in this model: "
                f"{', '.join(candidate_classes(model)) or 'none with submodules'}."
            )
        return _with_large_leaves(model, found)
    modules = [(name, module) for name, module in model.named_modules() if name]
    if isinstance(wrap, TransformerBlocks):
        return _find_classes(model, modules, wrap)
    if isinstance(wrap, MinNumel):
        return _find_large(model, wrap.numel)
    if not callable(wrap):
        raise WrapError(
            f"wrap must be 'auto', TransformerBlocks, MinNumel, Named, a predicate over modules or None; got {wrap!r}."
        )
    found = [(name, module) for name, module in modules if wrap(module)]
    if not found:
        raise WrapError(f"The wrap predicate is true for none of the {len(modules)} modules of {type(model).__name__}.")
    return found


def _with_large_leaves(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Add large embeddings and heads outside the blocks; parameters tied across them stay with the root."""
    inside = {id(part) for _, block in blocks for part in block.modules()}
    chosen = {id(block) for _, block in blocks}
    for module in model.modules():
        large = isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.numel() >= LARGE_NUMEL
        if large and id(module) not in inside and module is not model:
            chosen.add(id(module))
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen]


def _find_named(model: nn.Module, wrap: Named) -> list[Found]:
    modules = dict(model.named_modules())
    unknown = sorted({name for group in wrap.units for name in group if name not in modules or not name})
    if unknown:
        raise WrapError(
            f"{type(model).__name__} has no module named {', '.join(map(repr, unknown))}. Names are those of "
            "model.named_modules(), without the root."
        )
    counts = Counter(name for group in wrap.units for name in group)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise WrapError(f"Named() lists {', '.join(twice)} more than once; a module belongs to one unit.")
    return [(" + ".join(group), tuple(modules[name] for name in group)) for group in wrap.units]


def _find_large(model: nn.Module, numel: int) -> list[tuple[str, nn.Module]]:
    """Return modules with at least ``numel`` elements outside inner units, as FSDP1's size-based policy counts."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> int:
        """Return the elements of ``module`` that are in no inner unit."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        for child_name, child in module.named_children():
            left += visit(f"{name}.{child_name}" if name else child_name, child)
        # A container has no forward to gather for.
        if not name or left < numel or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return left
        found.append((name, module))
        return 0

    visit("", model)
    if not found:
        raise WrapError(
            f"MinNumel({numel:,}) makes no unit: no module of {type(model).__name__} has that many elements. "
            f"The model has {sum(p.numel() for p in model.parameters()):,} in total; choose a "
            f"smaller number, or {ONE_UNIT}."
        )
    return found


def _find_classes(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]], wrap: TransformerBlocks
) -> list[tuple[str, nn.Module]]:
    classes = tuple(c for c in wrap.classes if isinstance(c, type))
    names = {c for c in wrap.classes if isinstance(c, str)}
    found = [(n, m) for n, m in modules if isinstance(m, classes) or type(m).__name__ in names]
    present = {type(m).__name__ for _, m in found} | {c.__name__ for c in classes for _, m in found if isinstance(m, c)}
    unknown = sorted(wrap.names - present)
    if unknown:
        raise WrapError(
            f"No module of class {', '.join(unknown)} in {type(model).__name__}. Classes to choose from: "
            f"{', '.join(candidate_classes(model)) or 'none with submodules'}."
        )
    return found


def assign_parameters(model: nn.Module, found: list[Found], ignored: frozenset[nn.Parameter]) -> list[UnitSpec]:
    """Assign each parameter to the innermost unit that contains all its registrations.

    Args:
        model: The root, which becomes unit 0.
        found: The result of :func:`find_units`.
        ignored: Parameters that stay unsharded, or are sharded already.

    Returns:
        The root's unit first, then the others in the order of the module tree; units without parameters are left out.
    """
    units = [UnitSpec(ROOT_NAME, (model,)), *(UnitSpec(name, modules) for name, modules in found)]
    unit_of = {id(module): index for index, unit in enumerate(units) for module in unit.modules}
    specs: dict[object, ParamSpec] = {}
    chains: dict[object, list[tuple[int, ...]]] = {}
    by_path = dict(model.named_modules(remove_duplicate=False))
    for path, module in by_path.items():
        chain = _enclosing_units(path, by_path, unit_of)
        for key, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            identity = _memory(param)
            spec = specs.setdefault(identity, ParamSpec(param))
            spec.names.append(plain_name(f"{path}.{key}" if path else key))
            if not any(m is module and k == key for m, k in spec.slots):
                spec.slots.append((module, key))
            chains.setdefault(identity, []).append(chain)
    for key, spec in specs.items():
        units[_deepest_common(chains[key])].params.append(spec)
    return [units[0], *(unit for unit in units[1:] if unit.params)]


def _memory(param: nn.Parameter) -> object:
    """Return a key shared by registrations of one parameter: two Parameters of the same memory are tied as well."""
    if param.is_meta or param.layout != torch.strided or param.data_ptr() == 0 or type(param) is not nn.Parameter:
        return id(param)
    return param.data_ptr(), tuple(param.shape), param.stride(), param.dtype, param.requires_grad


def merge_tiny(units: list[UnitSpec], *, frozen_too: bool) -> list[UnitSpec]:
    """Merge neighbours in one container, such as small blocks of a list, up to ``TINY_NUMEL`` elements a unit.

    Args:
        units: The result of :func:`assign_parameters`.
        frozen_too: Whether frozen parameters count; they do not where they are replicated and never sent.
    """
    merged: list[UnitSpec] = units[:1]
    parents: list[str] = [""]
    for unit in units[1:]:
        parent, _, leaf = unit.name.rpartition(".")
        last = merged[-1]
        if (
            len(merged) > 1
            and parents[-1] == parent
            and last.sent_numel(frozen_too=frozen_too) + unit.sent_numel(frozen_too=frozen_too) <= TINY_NUMEL
        ):
            name = f"{last.name.partition(' .. ')[0]} .. {leaf}"
            merged[-1] = UnitSpec(name, last.modules + unit.modules, last.params + unit.params)
        else:
            merged.append(unit)
            parents.append(parent)
    return merged


def modules_kept(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Return the outermost modules whose class or last name component is in ``names``, in tree order.

    Raises:
        WrapError: A name matches no module.
    """
    kept: list[nn.Module] = []
    inside: set[int] = set()
    matched: set[str] = set()
    for path, module in model.named_modules():
        fits = {plain_name(path).rpartition(".")[2], type(module).__name__} & set(names)
        matched |= fits
        if fits and id(module) not in inside:
            kept.append(module)
            inside |= {id(child) for child in module.modules()}
    lacking = sorted(set(names) - matched)
    if lacking:
        raise WrapError(f"keep_fp32 names {', '.join(lacking)}, which matches no module of {type(model).__name__}.")
    return kept


def _enclosing_units(path: str, by_path: dict[str, nn.Module], unit_of: dict[int, int]) -> tuple[int, ...]:
    """Return the indices of the units around ``path``, outermost first."""
    parts = path.split(".") if path else []
    prefixes = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
    return tuple(unit_of[id(by_path[p])] for p in prefixes if id(by_path[p]) in unit_of)


def _deepest_common(chains: list[tuple[int, ...]]) -> int:
    """Return the last element of the longest common prefix."""
    common = 0
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        common = level[0]
    return common


def check_parameters(units: list[UnitSpec], *, sharded: int = 0) -> None:
    """Refuse parameters that cannot be sharded, before memory moves; ``sharded``: number sharded before.

    Raises:
        WrapError: There are no parameters, one has no elements or is not strided, or two of them, of which one is
            trained, are different views of the same memory.
    """
    specs = [spec for unit in units for spec in unit.params]
    if not specs and not sharded:
        raise WrapError("The model has no parameters to shard.")
    for spec in specs:
        if spec.param.numel() == 0:
            raise WrapError(
                f"Parameter {spec.names[0]} has shape {tuple(spec.param.shape)}: no elements. "
                "Is the model sharded already?"
            )
        if spec.param.layout != torch.strided:
            raise WrapError(
                f"Parameter {spec.names[0]} has layout {spec.param.layout}; only strided ones can be sharded."
            )
    views: dict[int, ParamSpec] = {}
    for spec in specs:
        memory = _memory(spec.param)
        other = views.setdefault(memory[0], spec) if isinstance(memory, tuple) else spec
        if other is not spec and (spec.param.requires_grad or other.param.requires_grad):
            raise WrapError(
                f"Parameters {other.names[0]} {tuple(other.param.shape)} and {spec.names[0]} "
                f"{tuple(spec.param.shape)} are different views of the same memory. Each would have shards of its own, "
                "and they would drift apart. Use one Parameter for both, or freeze both."
            )


def refuse_distributed(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters, given with their names, that torch has divided over ranks; any rank.

    Raises:
        WrapError: One is a DTensor.
    """
    for name, param in params:
        if is_distributed(param):
            raise WrapError(
                f"Parameter {name} is a DTensor: torch has divided the model over ranks already. Here fullshard shards "
                "plain parameters: leave out what divided these, which is distributed_config= or tp_plan= of "
                "from_pretrained, parallelize_module or torch's own fully_shard. Or call fullshard.fully_shard or "
                "fully_shard of fullshard.compat.torch_fsdp, which take parameters divided by tensor parallelism."
            )
