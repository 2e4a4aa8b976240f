"""Accelerate's configuration files (``accelerate config`` writes them), read as they are."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from fullshard.compat.accelerate_config.keys import SECTIONS, TOP, Key, as_yaml
from fullshard.config import RunConfig
from fullshard.errors import ConfigError

SHARDED = "FSDP"
"""The distributed type whose ``fsdp_config`` counts."""

UNSHARDED = ("MULTI_GPU", "MULTI_CPU", "NO")
"""Distributed types that are read too: they say nothing of sharding."""

_REFUSED: Mapping[str, str] = {
    "DEEPSPEED": (
        "DeepSpeed is not used here. Write distributed_type: FSDP with an fsdp_config: zero_stage 3 is "
        "fsdp_sharding_strategy: FULL_SHARD, zero_stage 2 is SHARD_GRAD_OP"
    ),
    "MEGATRON_LM": "Megatron-LM is not used here. Write distributed_type: FSDP with an fsdp_config",
    "TP": "tensor parallelism is not done here. Write distributed_type: FSDP with an fsdp_config",
    "XLA": "fullshard runs on GPUs and on the CPU, not on TPUs",
    "TPU": "fullshard runs on GPUs and on the CPU, not on TPUs",
}


@dataclass(frozen=True)
class AccelerateFile:
    """What a configuration file of Accelerate says.

    Attributes:
        path: The file.
        distributed_type: ``FSDP``, ``MULTI_GPU``, ``MULTI_CPU`` or ``NO``.
        num_machines: How many machines take part.
        num_processes: Ranks on all machines together; None: the file does not say (Accelerate's ``-1`` too).
        machine_rank: Number of this machine.
        main_process_ip: Address of machine 0; None where not said.
        main_process_port: Port there; None where not said, 0 for any free one.
        rdzv_backend: ``static``, ``c10d`` or another one of torchrun's.
        same_network: Whether the machines are on one network.
        use_cpu: Whether to leave GPUs alone.
        gpu_ids: GPUs of this machine by number, such as ``0,2``; None: all.
        mixed_precision: ``no``, ``fp16`` or ``bf16``; None: the file does not say.
        debug: Whether Accelerate is to check its collectives.
        enable_cpu_affinity: Whether Accelerate is to bind ranks to cores near their GPU.
        dynamo: Given keys of ``dynamo_config``, parsed.
        fsdp: Given keys of ``fsdp_config``, parsed, all with their ``fsdp_``; empty unless the type is ``FSDP``.
        parallelism: Given keys of ``parallelism_config``, parsed.
        raw: Given keys by dotted name, as YAML gave them; without null and empty ones.
        lines: Line of each key by dotted name, counted from 1.
        warnings: Keys that have no effect, and why; one text each.
    """

    path: Path
    distributed_type: str
    num_machines: int = 1
    num_processes: int | None = None
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    same_network: bool = False
    use_cpu: bool = False
    gpu_ids: str | None = None
    mixed_precision: str | None = None
    debug: bool = False
    enable_cpu_affinity: bool = False
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def ranks_here(self) -> int | None:
        """Ranks of each machine; None where the file does not say how many there are."""
        return None if self.num_processes is None else self.num_processes // self.num_machines

    @property
    def is_sharded(self) -> bool:
        """Whether the file says how a model is sharded."""
        return self.distributed_type == SHARDED

    @property
    def strategy(self) -> str | None:
        """The sharding strategy, under the name that Accelerate reads first in this version; None where not said."""
        return next((self.fsdp[name] for name in _strategy_names(self.fsdp) if name in self.fsdp), None)

    @property
    def backward_prefetch(self) -> str | None:
        """The prefetch policy, under the name that Accelerate reads or the older one; None where not said."""
        return next((self.fsdp[name] for name in _PREFETCH_NAMES if name in self.fsdp), None)

    def key_of(self, *names: str) -> str:
        """The first of several keys of ``fsdp_config`` that is given, dotted; the first one where none is."""
        dotted = [f"fsdp_config.{name}" for name in names]
        return next((key for key in dotted if key in self.raw), dotted[0])

    def said(self, key: str) -> str:
        """A dotted key and its value as the file has them, without the section: ``fsdp_sharding_strategy: 1``."""
        return f"{key.rpartition('.')[2]}: {as_yaml(self.raw[key])}"

    def where(self, key: str) -> str:
        """The file and the line of a dotted key, for messages."""
        return f"{self.path}, line {self.lines[key]}"


def read_accelerate_file(path: str | Path) -> AccelerateFile:
    """Read a configuration file of Accelerate, YAML or JSON; any process, alone.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read; a key is unknown or its value is not allowed, all of them in one message, each
            with its line; or it is for something that fullshard does not do.
    """
    path = Path(path)
    reading = _Reading(path)
    entries = _entries(path)
    _refuse_run_file(path, {key for key, _, _ in entries})
    for key, value, line in entries:
        reading.take(key, value, line)
    return reading.file()


def _refuse_run_file(path: Path, keys: set[str]) -> None:
    """Tell whoever gives our own file where Accelerate's is wanted."""
    ours = [key for key in RunConfig.model_fields if key in keys and key not in TOP]
    if ours and keys <= set(RunConfig.model_fields):
        raise ConfigError(
            f"{path} is a run file of fullshard's own (it has {', '.join(ours)}), and Accelerate's configuration file "
            f"is wanted here. There is nothing to convert: `fullshard train {path}` trains by it, `fullshard config "
            f"check {path}` shows what it says."
        )


class _Reading:
    """A file on its way in: values, and what is wrong or without effect."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.parsed: dict[str, Any] = {}
        self.problems: list[str] = []
        self.idle: list[str] = []

    def take(self, key: str, value: Any, line: int) -> None:
        """One top-level key, or a section of the file."""
        if key not in SECTIONS:
            self._take(key, value, line, TOP)
            return
        self.lines[key] = line
        if value is not None and not isinstance(value, dict):
            self.problems.append(f"line {line}: {key}: expected a section of settings; got {value!r}")
            return
        prefix, keys = SECTIONS[key]
        for name, (inner, inner_line) in (value or {}).items():
            full = name if name.startswith(prefix) else prefix + name
            self._take(full, inner, inner_line, keys, section=key, written=name)

    def _take(
        self, key: str, value: Any, line: int, keys: Mapping[str, Key], section: str = "", written: str = ""
    ) -> None:
        dotted = f"{section}.{key}" if section else key
        shown = f"{section}.{written}" if section else key
        if key not in keys:
            self.problems.append(f"line {line}: {shown}: unknown key; {_nearest(key, section)}")
            return
        if dotted in self.lines:
            self.problems.append(f"line {line}: {shown}: is given twice, first in line {self.lines[dotted]}")
            return
        self.lines[dotted] = line
        if _is_empty(value):
            return
        try:
            parsed = keys[key].parse(value)
        except ValueError as error:
            self.problems.append(f"line {line}: {shown}: expected {error}; got {value!r}")
            return
        self.raw[dotted], self.parsed[dotted] = value, parsed
        self._note_idle(keys[key], shown, parsed, value, line)

    def _note_idle(self, key: Key, shown: str, parsed: Any, value: Any, line: int) -> None:
        if key.idle is not None and parsed != key.default:
            self.idle.append(f"{shown}: {as_yaml(value)} in {self.path}, line {line}, has no effect: {key.idle}")

    def file(self) -> AccelerateFile:
        """The file as a whole.

        Raises:
            ConfigError: Something is wrong with it.
        """
        self._raise_problems()
        top = {key: value for key, value in self.parsed.items() if "." not in key}
        kind = self._distributed_type(top)
        file = AccelerateFile(
            path=self.path,
            distributed_type=kind,
            **{name: top[name] for name in _PLAIN if name in top},
            use_cpu=kind == "MULTI_CPU" or top.get("use_cpu", False),
            num_processes=_processes(top, kind),
            gpu_ids=None if top.get("gpu_ids") in (None, "all") else top["gpu_ids"],
            mixed_precision=top.get("mixed_precision") or ("fp16" if top.get("fp16") else None),
            dynamo=_dynamo(top, self._section("dynamo_config")),
            fsdp=self._section("fsdp_config") if kind == SHARDED else MappingProxyType({}),
            parallelism=self._section("parallelism_config"),
            raw=MappingProxyType(self.raw),
            lines=MappingProxyType(self.lines),
            warnings=(*self.idle, *self._idle_section(kind)),
        )
        self.problems += _contradictions(file)
        self._raise_problems()
        return replace(file, warnings=(*file.warnings, *_overruled(file)))

    def _section(self, name: str) -> Mapping[str, Any]:
        inside = {key.partition(".")[2]: value for key, value in self.parsed.items() if key.startswith(f"{name}.")}
        return MappingProxyType(inside)

    def _idle_section(self, kind: str) -> list[str]:
        """An ``fsdp_config`` of a file that is not for FSDP."""
        if kind == SHARDED or not self._section("fsdp_config"):
            return []
        return [
            f"fsdp_config in {self.path}, line {self.lines['fsdp_config']}, has no effect: distributed_type is {kind}, "
            "not FSDP"
        ]

    def _distributed_type(self, top: Mapping[str, Any]) -> str:
        """The file's type, in capitals.

        Raises:
            ConfigError: There is none, or fullshard does not do it.
        """
        if top.get("compute_environment") == "AMAZON_SAGEMAKER":
            raise ConfigError(
                f"{self.path} is for Amazon SageMaker (compute_environment), which fullshard does not start jobs on. "
                "Write a file for the machine itself with `fullshard config`."
            )
        kind = str(top.get("distributed_type", "")).upper()
        if kind == SHARDED or kind in UNSHARDED:
            return kind
        if not kind:
            raise ConfigError(f"{self.path} has no distributed_type. Write distributed_type: FSDP.")
        line = self.lines["distributed_type"]
        reason = _REFUSED.get(kind) or f"expected FSDP, {', '.join(UNSHARDED)}: fullshard runs on GPUs and on the CPU"
        raise ConfigError(f"{self.path}, line {line}: distributed_type: {top['distributed_type']}: {reason}.")

    def _raise_problems(self) -> None:
        if self.problems:
            count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            raise ConfigError("\n".join([f"{self.path}: {count}:", *(f"  {problem}" for problem in self.problems)]))


_PLAIN = (
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "same_network",
    "debug",
    "enable_cpu_affinity",
)
"""Fields that are keys as they are."""


_PREFETCH_NAMES = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
"""Names of one thing, the one that Accelerate reads first."""


def _strategy_names(fsdp: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the sharding strategy, the one that Accelerate reads in this version first."""
    older, newer = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
    return (newer, older) if fsdp.get("fsdp_version", 1) == 2 else (older, newer)


def _overruled(file: AccelerateFile) -> list[str]:
    """Keys that another one for the same thing contradicts."""
    found = []
    for first, second in (_strategy_names(file.fsdp), _PREFETCH_NAMES):
        if first not in file.fsdp or second not in file.fsdp or _agree(file, first, second):
            continue
        loser = f"fsdp_config.{second}"
        found.append(
            f"{file.said(loser)} in {file.where(loser)}, has no effect: {first} says {file.fsdp[first]}, and counts, "
            "as in Accelerate"
        )
    return found


def _agree(file: AccelerateFile, first: str, second: str) -> bool:
    """Whether two keys say the same; true and false say less than a strategy's word."""
    keeps = {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD"}
    if isinstance(file.raw[f"fsdp_config.{second}"], bool):
        return (file.fsdp[first] in keeps) == (file.fsdp[second] in keeps)
    return file.fsdp[first] == file.fsdp[second]


def _processes(top: Mapping[str, Any], kind: str) -> int | None:
    number = top.get("num_processes", 1 if kind == "NO" else None)
    return None if number == -1 else number


def _dynamo(top: Mapping[str, Any], section: Mapping[str, Any]) -> Mapping[str, Any]:
    """``dynamo_config``, with the backend of older files, which stands beside it."""
    settings = {**({"dynamo_backend": top["dynamo_backend"]} if "dynamo_backend" in top else {}), **section}
    if "dynamo_backend" in settings:
        settings["dynamo_backend"] = settings["dynamo_backend"].upper()
    return MappingProxyType(settings)


def _contradictions(file: AccelerateFile) -> list[str]:
    """What is wrong with keys that are right one by one."""
    problems = []
    if file.machine_rank >= file.num_machines:
        problems.append(
            f"machine_rank: must be below num_machines, counted from 0; got {file.machine_rank} of {file.num_machines}"
        )
    if file.num_processes == 0:
        problems.append("num_processes: must be at least 1; got 0")
    elif file.num_processes is not None and file.num_processes % file.num_machines:
        problems.append(
            "num_processes: counts the ranks of all machines, and each machine has as many; "
            f"got {file.num_processes} on {file.num_machines} machines"
        )
    if file.mixed_precision == "fp8":
        problems.append(
            f"line {file.lines['mixed_precision']}: mixed_precision: fullshard computes in fp32, bf16 or fp16; "
            "got fp8. Write bf16"
        )
    version = file.fsdp.get("fsdp_version", 1)
    if version not in (1, 2):
        problems.append(f"line {file.lines['fsdp_config.fsdp_version']}: fsdp_version: expected 1 or 2; got {version}")
    for axis in ("tp", "cp", "sp"):
        key = f"parallelism_config_{axis}_size"
        if file.parallelism.get(key, 1) > 1:
            line = file.lines[f"parallelism_config.{key}"]
            problems.append(
                f"line {line}: {key}: fullshard splits models over data parallel ranks only; got "
                f"{file.parallelism[key]}. Write 1"
            )
    return problems


def _nearest(key: str, section: str) -> str:
    """What an unknown key may be meant to be."""
    homes = {"": TOP, **{name: keys for name, (_, keys) in SECTIONS.items()}}
    for name in (section, *(other for other in homes if other != section)):
        known = [*homes[name], *(SECTIONS if not name else ())]
        close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
        if close:
            return f"did you mean {name + '.' if name else ''}{close[0]}?"
    return f"{section or 'the file'} has {', '.join(sorted(homes[section]))}"


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, (list, dict)) and not any(value))


def _entries(path: Path) -> list[tuple[str, Any, int]]:
    """Key, value and line of each top-level entry; of sections that are read, the same of each of their entries.

    Raises:
        ConfigError: The file cannot be read or holds no settings.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory where Accelerate's configuration file (YAML) is expected. Give the file itself, "
            f"such as {path / 'fsdp_config.yaml'}; `fullshard config --config_file FILE` makes one."
        )
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path} must hold Accelerate's settings (key: value). `fullshard config --config_file {path}` makes one."
        )
    entries: list[tuple[str, Any, int]] = []
    for key_node, value_node in node.value:
        key = str(key_node.value)
        value = _section_of(value_node) if key in SECTIONS else _value(value_node)
        entries.append((key, value, key_node.start_mark.line + 1))
    return entries


def _section_of(node: yaml.Node) -> Any:
    """A section's entries with their lines; of anything else its value."""
    if not isinstance(node, yaml.MappingNode):
        return _value(node)
    return {
        str(key_node.value): (_value(value_node), key_node.start_mark.line + 1) for key_node, value_node in node.value
    }


def _value(node: yaml.Node) -> Any:
    """What a node stands for."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        line = node.start_mark.line + 1
        raise ConfigError(f"Line {line} of the configuration file is not understood: {error}") from error
    finally:
        loader.dispose()
