"""Accelerate's configuration files, which ``accelerate config`` writes: keys of both versions of its FSDP, reading."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from fullshard.errors import ConfigError

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Accelerate's default of ``fsdp_min_num_params`` with SIZE_BASED_WRAP."""


Parser = Callable[[Any], Any]
"""Function from what YAML returns to a value; its ``ValueError`` states what is expected."""

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")


def flag(value: Any) -> bool:
    """Parse a switch in any spelling that Accelerate accepts."""
    text = str(value).lower()
    if text not in (*_YES, *_NO):
        raise ValueError("true or false")
    return text in _YES


def integer(least: int) -> Parser:
    """Return a parser of integers of at least ``least``; ``1e8`` is one."""

    def parse(value: Any) -> int:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if isinstance(value, bool) or number != number // 1 or number < least:
            raise ValueError(f"a whole number of at least {least}")
        return int(number)

    return parse


def word(*words: str, numbered: bool = False) -> Parser:
    """Return a parser of one of ``words`` in any case; with ``numbered`` also of its number, counted from 1."""

    def parse(value: Any) -> str:
        text = "no" if value is False else str(value).strip()  # YAML 1.1 reads a bare no as false
        if numbered and text.isdigit() and 1 <= int(text) <= len(words):
            return words[int(text) - 1]
        found = next((name for name in words if name.lower() == text.lower()), None)
        if found is None or value is True:
            shown = [f"{number} {name}" for number, name in enumerate(words, start=1)] if numbered else words
            raise ValueError("one of " + ", ".join(shown))
        return found

    return parse


def names(value: Any) -> tuple[str, ...]:
    """Parse a list of names, or names separated by commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ValueError("class names separated by commas, such as T5Block or BertLayer,BertEmbeddings")
    return tuple(item.strip() for item in items if item.strip())


def text(value: Any) -> str:
    """Parse a string or number."""
    if isinstance(value, (bool, dict, list)):
        raise ValueError("a string")
    return str(value).strip()


def bare_no(value: Any) -> str:
    """Parse a string that may be a bare no, which YAML 1.1 reads as false."""
    return "NO" if value is False else text(value)


def reshard(value: Any) -> str:
    """Parse a strategy's word or number, or version 2's true and false, to a strategy."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false", "yes", "no"):
        return "FULL_SHARD" if flag(value) else "SHARD_GRAD_OP"
    try:
        return word(*STRATEGIES, numbered=True)(value)
    except ValueError as error:
        raise ValueError(f"true, false or {error}") from None


def anything(value: Any) -> Any:
    """Return ``value``."""
    return value


def as_yaml(value: Any) -> str:
    """Return a value as YAML, on one line."""
    plain = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return plain.strip().removesuffix("...").strip()


@dataclass(frozen=True)
class Key:
    """A key of the file."""

    parse: Parser  # parser of its values
    default: Any = None  # Accelerate's default
    # reason why it has no effect in fullshard, for a warning if it is set to another value; None: it has an effect
    ignored: str | None = None


_SPLIT = "context and sequence parallelism are not used"
_TPU = "it is for TPUs; fullshard runs on GPUs and on the CPU"

TOP: Mapping[str, Key] = {
    "compute_environment": Key(word("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "LOCAL_MACHINE"),
    "distributed_type": Key(bare_no),
    "num_machines": Key(integer(1), 1),
    "num_processes": Key(integer(-1)),
    "machine_rank": Key(integer(0), 0),
    "main_process_ip": Key(text),
    "main_process_port": Key(integer(0)),
    "rdzv_backend": Key(text, "static"),
    "same_network": Key(flag, default=False),
    "use_cpu": Key(flag, default=False),
    "gpu_ids": Key(text),
    "mixed_precision": Key(word("no", "fp16", "bf16", "fp8")),
    "fp16": Key(flag, default=False),
    "debug": Key(flag, default=False),
    "enable_cpu_affinity": Key(flag, default=False),
    "dynamo_backend": Key(bare_no, "NO"),
    "main_training_function": Key(text, "main", _TPU),
    **{
        name: Key(flag, default=False, ignored=_TPU)
        for name in ("downcast_bf16", "tpu_use_cluster", "tpu_use_sudo", "tpu_cluster")
    },
    **{
        name: Key(anything, None, _TPU)
        for name in ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "commands", "command_file")
    },
    "deepspeed_config": Key(anything, None, "distributed_type is not DEEPSPEED"),
    "megatron_lm_config": Key(anything, None, "distributed_type is not MEGATRON_LM"),
    "fp8_config": Key(anything, None, "mixed_precision is not fp8"),
    "ipex_config": Key(anything, None, "it is for Intel's extension, which is not used"),
    "mpirun_config": Key(anything, None, "ranks are started by fullshard or torchrun, not by mpirun"),
}
"""Top-level keys, except the sections in ``SECTIONS``."""

FSDP: Mapping[str, Key] = {
    "fsdp_version": Key(integer(1), 1),
    "fsdp_sharding_strategy": Key(word(*STRATEGIES, numbered=True)),
    "fsdp_reshard_after_forward": Key(reshard),
    "fsdp_offload_params": Key(flag, default=False),
    "fsdp_auto_wrap_policy": Key(word("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", numbered=True)),
    "fsdp_transformer_layer_cls_to_wrap": Key(names),
    "fsdp_min_num_params": Key(integer(0)),
    "fsdp_backward_prefetch": Key(word(*PREFETCHES, numbered=True)),
    "fsdp_backward_prefetch_policy": Key(word(*PREFETCHES, numbered=True)),
    "fsdp_state_dict_type": Key(word("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", numbered=True)),
    "fsdp_forward_prefetch": Key(flag, default=False),
    "fsdp_use_orig_params": Key(flag, default=True, ignored="parameters are always the original ones"),
    "fsdp_cpu_ram_efficient_loading": Key(
        flag, default=True, ignored="each rank reads its own part of the model's files, or the script loads the model"
    ),
    "fsdp_sync_module_states": Key(
        flag, default=True, ignored="ranks that hold different weights would train different models"
    ),
    "fsdp_activation_checkpointing": Key(flag, default=False),
    "fsdp_activation_checkpointing_offload": Key(flag, default=False),
    "fsdp_mixed_precision_policy": Key(
        anything, None, "mixed_precision counts, as with accelerate launch, which does not pass on this key"
    ),
    "fsdp_ignored_modules": Key(text),
    "fsdp_limit_all_gathers": Key(flag, default=True, ignored="gathers ahead are always limited"),
}
"""Keys of ``fsdp_config``; the prefix ``fsdp_`` may be left out."""

DYNAMO: Mapping[str, Key] = {
    "dynamo_backend": Key(bare_no, "NO"),
    "dynamo_mode": Key(word("default", "reduce-overhead", "max-autotune"), "default"),
    "dynamo_use_fullgraph": Key(flag, default=False),
    "dynamo_use_dynamic": Key(flag, default=False),
    "dynamo_use_regional_compilation": Key(flag, default=False),
}
"""Keys of ``dynamo_config``."""

PARALLELISM: Mapping[str, Key] = {
    **{
        f"parallelism_config_{axis}_size": Key(integer(1), 1) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    },
    "parallelism_config_cp_backend": Key(text, "torch", _SPLIT),
    "parallelism_config_cp_comm_strategy": Key(text, "allgather", _SPLIT),
    "parallelism_config_sp_backend": Key(text, "deepspeed", _SPLIT),
    "parallelism_config_sp_seq_length": Key(anything, None, _SPLIT),
    "parallelism_config_sp_seq_length_is_variable": Key(flag, default=True, ignored=_SPLIT),
    "parallelism_config_sp_attn_implementation": Key(text, "sdpa", _SPLIT),
}
"""Keys of ``parallelism_config``; sizes of tensor, context and sequence parallelism above 1 are an error."""

SECTIONS: Mapping[str, tuple[str, Mapping[str, Key]]] = {
    "fsdp_config": ("fsdp_", FSDP),
    "dynamo_config": ("dynamo_", DYNAMO),
    "parallelism_config": ("parallelism_config_", PARALLELISM),
}
"""Sections that are read: the prefix of their keys, which may be left out in the file, and the keys."""


RUN_FILE = ("output_dir", "seed", "nproc", "resume", "model", "data", "training", "sharding", "evaluation", "card")
"""Top-level names of a run file, which is no file of Accelerate."""

SHARDED = "FSDP"
"""The distributed type of files whose ``fsdp_config`` is used."""

UNSHARDED = ("MULTI_GPU", "MULTI_CPU", "NO")
"""Distributed types of files that are read but do not configure sharding."""

_UNSUPPORTED: Mapping[str, str] = {
    "DEEPSPEED": (
        "DeepSpeed is not supported. Write distributed_type: FSDP with an fsdp_config: zero_stage 3 is "
        "fsdp_sharding_strategy: FULL_SHARD, zero_stage 2 is SHARD_GRAD_OP"
    ),
    "MEGATRON_LM": "Megatron-LM is not supported. Write distributed_type: FSDP with an fsdp_config",
    "TP": "tensor parallelism is not supported. Write distributed_type: FSDP with an fsdp_config",
    "XLA": "fullshard runs on GPUs and CPUs, not on TPUs",
    "TPU": "fullshard runs on GPUs and CPUs, not on TPUs",
}


@dataclass(frozen=True)
class AccelerateFile:
    """Settings of a configuration file of Accelerate."""

    path: Path  # the file
    distributed_type: str  # ``FSDP``, ``MULTI_GPU``, ``MULTI_CPU`` or ``NO``
    num_machines: int = 1
    num_processes: int | None = None  # number of ranks on all machines; None: not set (or ``-1``)
    machine_rank: int = 0
    main_process_ip: str | None = None  # address of machine 0; None: not set
    main_process_port: int | None = None  # port on machine 0; None: not set, 0: any free one
    rdzv_backend: str = "static"  # ``static``, ``c10d`` or another of torchrun's
    same_network: bool = False  # whether the machines are on one network
    use_cpu: bool = False  # whether to use CPUs even if there are GPUs
    gpu_ids: str | None = None  # numbers of this machine's GPUs to use, such as ``0,2``; None: all
    mixed_precision: str | None = None  # ``no``, ``fp16`` or ``bf16``; None: not set
    debug: bool = False  # whether Accelerate checks its collectives
    enable_cpu_affinity: bool = False  # whether Accelerate binds ranks to cores near their GPU
    dynamo: Mapping[str, Any] = field(default_factory=dict)  # parsed keys of ``dynamo_config``
    # parsed keys of ``fsdp_config``, with their prefix ``fsdp_``; empty unless the type is ``FSDP``
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    parallelism: Mapping[str, Any] = field(default_factory=dict)  # parsed keys of ``parallelism_config``
    # values by dotted key, as YAML returned them, without null and empty ones
    raw: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)  # line of each dotted key, counted from 1
    warnings: tuple[str, ...] = ()  # one message for each key without effect

    @property
    def ranks_per_machine(self) -> int | None:
        """Number of ranks of each machine; None if the number of ranks is not set."""
        return None if self.num_processes is None else self.num_processes // self.num_machines

    @property
    def is_sharded(self) -> bool:
        """True if the file configures sharding."""
        return self.distributed_type == SHARDED

    @property
    def strategy(self) -> str | None:
        """The sharding strategy, from the key that Accelerate prefers in this version; None: not set."""
        return next((self.fsdp[name] for name in _strategy_names(self.fsdp) if name in self.fsdp), None)

    @property
    def backward_prefetch(self) -> str | None:
        """The prefetch policy, from the key that Accelerate reads or from the older one; None: not set."""
        return next((self.fsdp[name] for name in _PREFETCH_NAMES if name in self.fsdp), None)

    def key_of(self, *names: str) -> str:
        """Return the dotted key of the first of ``names`` that ``fsdp_config`` has, or of ``names[0]``."""
        dotted = [f"fsdp_config.{name}" for name in names]
        return next((key for key in dotted if key in self.raw), dotted[0])

    def as_written(self, key: str) -> str:
        """Return a dotted key and its value as in the file, without the section: ``fsdp_sharding_strategy: 1``."""
        return f"{key.rpartition('.')[2]}: {as_yaml(self.raw[key])}"

    def where(self, key: str) -> str:
        """Return the file and line of a dotted key, for messages."""
        return f"{self.path}, line {self.lines[key]}" if self.lines[key] else "the command line"


def read_accelerate_file(path: str | Path | None, options: Mapping[str, Any] | None = None) -> AccelerateFile:
    """Read a configuration file of Accelerate, YAML or JSON; any process, no communication.

    Args:
        path: The file; None: there is none, only ``options``.
        options: Values by dotted key, in place of the file's: options of the command line. Their line is 0.

    Raises:
        ConfigError: The file cannot be read; it has unknown keys or invalid values (one message lists all of them with
            their lines); or it needs something that fullshard does not support.
    """
    reading = _Reading(Path("the command line" if path is None else path))
    entries = [] if path is None else _entries(reading.path)
    _refuse_run_file(reading.path, {key for key, _, _ in entries})
    for key, value, line in _with_options(entries, options or {}):
        reading.take(key, value, line)
    return reading.file()


def _with_options(entries: list[tuple[str, Any, int]], options: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
    """Return the entries of a file with values by dotted key in place of its own."""
    for dotted, value in options.items():
        section, _, key = dotted.rpartition(".")
        found = [entry for entry in entries if entry[0] == (section or key)]
        entries = [entry for entry in entries if entry not in found]
        if section:
            prefix, _ = SECTIONS[section]
            _, inside, line = found[0] if found else (section, None, 0)
            kept = {name: own for name, own in (inside or {}).items() if prefix + name.removeprefix(prefix) != key}
            entries.append((section, kept | {key: (value, 0)}, line))
        else:
            entries.append((key, value, 0))
    return entries


def _at(line: int) -> str:
    """Return the start of a message about a line; 0 is an option of the command line."""
    return f"line {line}: " if line else ""


def _refuse_run_file(path: Path, keys: set[str]) -> None:
    """Raise if the file is a run file of fullshard."""
    ours = [key for key in RUN_FILE if key in keys and key not in TOP]
    if ours and keys <= set(RUN_FILE):
        raise ConfigError(
            f"{path} is a run file of fullshard (it has {', '.join(ours)}), not a configuration file of Accelerate: "
            f"`fullshard train {path}` runs it, `fullshard config check {path}` prints its "
            "settings."
        )


class _Reading:
    """Values of a file, errors and warnings, collected key by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.parsed: dict[str, Any] = {}
        self.problems: list[str] = []
        self.ignored: list[str] = []

    def take(self, key: str, value: Any, line: int) -> None:
        """Parse one top-level key or section."""
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
        if value is None or value == "" or (isinstance(value, (list, dict)) and not any(value)):
            return
        try:
            parsed = keys[key].parse(value)
        except ValueError as error:
            self.problems.append(f"{_at(line)}{shown}: expected {error}; got {value!r}")
            return
        self.raw[dotted], self.parsed[dotted] = value, parsed
        reason = keys[key].ignored
        if reason is not None and parsed != keys[key].default:
            place = f"{self.path}, line {line}" if line else "the command line"
            self.ignored.append(f"{shown}: {as_yaml(value)} in {place}, has no effect: {reason}")

    def file(self) -> AccelerateFile:
        """Return the complete file.

        Raises:
            ConfigError: It has errors; the message lists all of them.
        """
        self._raise_problems()
        top = {key: value for key, value in self.parsed.items() if "." not in key}
        kind = self._distributed_type(top)
        number = top.get("num_processes", 1 if kind == "NO" else None)
        file = AccelerateFile(
            path=self.path,
            distributed_type=kind,
            **{name: top[name] for name in _PLAIN if name in top},
            use_cpu=kind == "MULTI_CPU" or top.get("use_cpu", False),
            num_processes=None if number == -1 else number,
            gpu_ids=None if top.get("gpu_ids") in (None, "all") else top["gpu_ids"],
            mixed_precision=top.get("mixed_precision") or ("fp16" if top.get("fp16") else None),
            dynamo=_dynamo(top, self._section("dynamo_config")),
            fsdp=self._section("fsdp_config") if kind == SHARDED else MappingProxyType({}),
            parallelism=self._section("parallelism_config"),
            raw=MappingProxyType(self.raw),
            lines=MappingProxyType(self.lines),
            warnings=(*self.ignored, *self._ignored_section(kind)),
        )
        self.problems += _contradictions(file)
        self._raise_problems()
        return replace(file, warnings=(*file.warnings, *_overruled(file)))

    def _section(self, name: str) -> Mapping[str, Any]:
        inside = {key.partition(".")[2]: value for key, value in self.parsed.items() if key.startswith(f"{name}.")}
        return MappingProxyType(inside)

    def _ignored_section(self, kind: str) -> list[str]:
        """Return a warning if there is an ``fsdp_config`` but the type is not FSDP."""
        if kind == SHARDED or not self._section("fsdp_config"):
            return []
        return [
            f"fsdp_config in {self.path}, {_at(self.lines['fsdp_config']).replace(': ', ', ')}has no effect: "
            f"distributed_type is {kind}, not FSDP (--use_fsdp)"
        ]

    def _distributed_type(self, top: Mapping[str, Any]) -> str:
        """Return the distributed type in capitals.

        Raises:
            ConfigError: It is missing or not supported.
        """
        if top.get("compute_environment") == "AMAZON_SAGEMAKER":
            raise ConfigError(
                f"{self.path} is for Amazon SageMaker (compute_environment), which fullshard does not support. "
                "Create a file for the machine itself with `fullshard config`."
            )
        kind = str(top.get("distributed_type", "")).upper()
        if kind == SHARDED or kind in UNSHARDED:
            return kind
        if not kind:
            raise ConfigError(f"{self.path} has no distributed_type. Write distributed_type: FSDP.")
        line = self.lines["distributed_type"]
        reason = _UNSUPPORTED.get(kind) or f"expected FSDP, {', '.join(UNSHARDED)}: fullshard runs on GPUs and CPUs"
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
"""Fields of :class:`AccelerateFile` that are top-level keys with the same value."""


_PREFETCH_NAMES = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
"""Keys of the prefetch policy; Accelerate reads the first."""


def _strategy_names(fsdp: Mapping[str, Any]) -> tuple[str, str]:
    """Return the keys of the sharding strategy; Accelerate prefers the first in this version."""
    older, newer = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
    return (newer, older) if fsdp.get("fsdp_version", 1) == 2 else (older, newer)


def _overruled(file: AccelerateFile) -> list[str]:
    """Return warnings about keys that a preferred key for the same setting contradicts."""
    found = []
    for first, second in (_strategy_names(file.fsdp), _PREFETCH_NAMES):
        if first not in file.fsdp or second not in file.fsdp or _agree(file, first, second):
            continue
        loser = f"fsdp_config.{second}"
        found.append(
            f"{file.as_written(loser)} in {file.where(loser)}, has no effect: {first} is {file.fsdp[first]} and takes "
            "precedence, as in Accelerate"
        )
    return found


def _agree(file: AccelerateFile, first: str, second: str) -> bool:
    """Return whether two keys have the same meaning; true and false only set whether parameters are kept."""
    keeps = {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD"}
    if isinstance(file.raw[f"fsdp_config.{second}"], bool):
        return (file.fsdp[first] in keeps) == (file.fsdp[second] in keeps)
    return file.fsdp[first] == file.fsdp[second]


def _dynamo(top: Mapping[str, Any], section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``dynamo_config``, with the top-level ``dynamo_backend`` of older files."""
    settings = {**({"dynamo_backend": top["dynamo_backend"]} if "dynamo_backend" in top else {}), **section}
    if "dynamo_backend" in settings:
        settings["dynamo_backend"] = settings["dynamo_backend"].upper()
    return MappingProxyType(settings)


def _contradictions(file: AccelerateFile) -> list[str]:
    """Return errors about values that are valid one by one but not together, or not supported."""
    problems = []
    if file.machine_rank >= file.num_machines:
        problems.append(
            f"machine_rank: must be below num_machines, counted from 0; got {file.machine_rank} of {file.num_machines}"
        )
    if file.num_processes == 0:
        problems.append("num_processes: must be at least 1; got 0")
    elif file.num_processes is not None and file.num_processes % file.num_machines:
        problems.append(
            "num_processes: must be a multiple of num_machines, as it counts the ranks of all machines; "
            f"got {file.num_processes} on {file.num_machines} machines"
        )
    if file.mixed_precision == "fp8":
        problems.append(
            f"{_at(file.lines['mixed_precision'])}mixed_precision: fullshard computes in fp32, bf16 or fp16; "
            "got fp8. Write bf16"
        )
    version = file.fsdp.get("fsdp_version", 1)
    if version not in (1, 2):
        problems.append(f"{_at(file.lines['fsdp_config.fsdp_version'])}fsdp_version: expected 1 or 2; got {version}")
    for axis in ("tp", "cp", "sp"):
        key = f"parallelism_config_{axis}_size"
        if file.parallelism.get(key, 1) > 1:
            line = file.lines[f"parallelism_config.{key}"]
            problems.append(
                f"{_at(line)}{key}: only data parallelism is supported; got {file.parallelism[key]}. Write 1"
            )
    return problems


def _nearest(key: str, section: str) -> str:
    """Return a hint about an unknown key: the nearest key, or all keys of its section."""
    homes = {"": TOP, **{name: keys for name, (_, keys) in SECTIONS.items()}}
    for name in (section, *(other for other in homes if other != section)):
        known = [*homes[name], *(SECTIONS if not name else ())]
        close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
        if close:
            return f"did you mean {name + '.' if name else ''}{close[0]}?"
    return f"{section or 'the file'} has {', '.join(sorted(homes[section]))}"


def _entries(path: Path) -> list[tuple[str, Any, int]]:
    """Return key, value and line of each top-level entry; a section's value maps its keys to values and lines.

    Raises:
        ConfigError: The file cannot be read or holds no settings.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory, not a configuration file of Accelerate (YAML). Pass the file itself, such as "
            f"{path / 'fsdp_config.yaml'}; `fullshard config --config_file FILE` creates one."
        )
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path} must contain Accelerate's settings (key: value). `fullshard config --config_file {path}` creates "
            "such a file."
        )
    entries: list[tuple[str, Any, int]] = []
    for key_node, value_node in node.value:
        key = str(key_node.value)
        value = _value(value_node)
        if key in SECTIONS and isinstance(value_node, yaml.MappingNode):  # its values, with their lines
            value = {str(name.value): (_value(inside), name.start_mark.line + 1) for name, inside in value_node.value}
        entries.append((key, value, key_node.start_mark.line + 1))
    return entries


def _value(node: yaml.Node) -> Any:
    """Return the Python value of a node."""
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        line = node.start_mark.line + 1
        raise ConfigError(f"Line {line} of the configuration file cannot be parsed: {error}") from error
    finally:
        loader.dispose()
