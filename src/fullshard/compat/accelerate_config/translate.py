"""Translation of Accelerate's configuration files to settings of a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.errors import ConfigError

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Accelerate's default of fsdp_min_num_params with SIZE_BASED_WRAP."""

_PREFETCH = {"BACKWARD_PRE": "backward_pre", "BACKWARD_POST": "backward_post", "NO_PREFETCH": "none"}
_WRAP_KEYS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")


@dataclass(frozen=True)
class Setting:
    """One setting of the run file, and where it comes from.

    Attributes:
        value: Its value, of a type that YAML and JSON have.
        origin: The dotted key of Accelerate's file.
        as_written: That key and its value there, such as ``mixed_precision: bf16``.
    """

    value: Any
    origin: str
    as_written: str


@dataclass(frozen=True)
class Translation:
    """Settings that a file has for ``fullshard train``.

    Attributes:
        settings: Settings by dotted key of the run file, without keys that Accelerate's file does not set.
        warnings: The file's own warnings, and one for each key that has no effect on ``fullshard train``.
    """

    settings: Mapping[str, Setting]
    warnings: tuple[str, ...]


def nested(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Convert settings by dotted key to the nested values of a run file."""
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = setting.value
    return values


def translate(file: AccelerateFile) -> Translation:
    """Translate a file for ``fullshard train``; any process, no communication.

    Raises:
        ConfigError: The mesh sizes do not match the numbers of machines and ranks.
    """
    found = _Found(file)
    if file.ranks_per_machine is not None:
        found.add("nproc", file.ranks_per_machine, "num_processes")
    if file.mixed_precision is not None:
        origin = "mixed_precision" if "mixed_precision" in file.raw else "fp16"
        precision = "fp32" if file.mixed_precision == "no" else file.mixed_precision
        found.add("training.precision", precision, origin)
    _dynamo(found)
    if file.is_sharded:
        _strategy(found)
        _wrap(found)
        _rest(found)
    elif file.distributed_type != "NO":
        found.warn(
            f"{file.as_written('distributed_type')} in {file.where('distributed_type')}, does not configure sharding: "
            "the run file's sharding section is used, by default full_shard. To replicate the model on every rank, as "
            "Accelerate does, set sharding.strategy: no_shard"
        )
    _launcher_keys(found)
    return Translation(found.settings, (*file.warnings, *found.warnings))


class _Found:
    """Settings and warnings, collected while translating a file."""

    def __init__(self, file: AccelerateFile) -> None:
        self.file = file
        self.settings: dict[str, Setting] = {}
        self.warnings: list[str] = []

    def add(self, key: str, value: Any, origin: str) -> None:
        """Add a setting; ``origin`` is a dotted key of Accelerate's file."""
        self.settings[key] = Setting(value, origin, self.file.as_written(origin) if origin in self.file.raw else origin)

    def warn(self, text: str) -> None:
        """Add a warning."""
        self.warnings.append(text)

    def no_effect(self, origin: str, reason: str) -> None:
        """Add a warning that a key has no effect on ``fullshard train``."""
        self.warn(
            f"{self.file.as_written(origin)} in {self.file.where(origin)}, has no effect on fullshard train: {reason}"
        )


def _strategy(found: _Found) -> None:
    file = found.file
    replicas = file.parallelism.get("parallelism_config_dp_replicate_size", 1)
    strategy = file.strategy
    origin = file.key_of("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    if replicas > 1:
        strategy = _mesh_strategy(file, replicas)
        origin = "parallelism_config.parallelism_config_dp_replicate_size"
    if strategy is not None:
        found.add("sharding.strategy", strategy.lower(), origin)


def _mesh_strategy(file: AccelerateFile, replicas: int) -> str:
    """Return the strategy of a file that sets the sizes of replicas and shards.

    Raises:
        ConfigError: The sizes do not match the numbers of machines and ranks.
    """
    shards = file.parallelism.get("parallelism_config_dp_shard_size", 1)
    if shards == 1:
        return "NO_SHARD"
    if replicas == file.num_machines and file.ranks_per_machine in (None, shards):
        return "HYBRID_SHARD_ZERO2" if file.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "HYBRID_SHARD"
    raise ConfigError(
        f"{file.path}: fullshard train shards inside each machine and replicates across machines, so dp_replicate_size "
        "must be the number of machines and dp_shard_size the number of ranks per machine; got "
        f"{replicas} and {shards} with num_machines: {file.num_machines}, num_processes: {file.num_processes}. For "
        "another mesh use a script: fully_shard(model, mesh=…)."
    )


def _wrap(found: _Found) -> None:
    """Add the wrap policy, if the file sets one."""
    file = found.file
    policy, origin = file.fsdp.get("fsdp_auto_wrap_policy"), "fsdp_config.fsdp_auto_wrap_policy"
    used = {"TRANSFORMER_BASED_WRAP": _WRAP_KEYS[0], "SIZE_BASED_WRAP": _WRAP_KEYS[1]}.get(str(policy))
    for key in _WRAP_KEYS:
        if key in file.fsdp and key != used:
            needs = "TRANSFORMER_BASED_WRAP" if key == _WRAP_KEYS[0] else "SIZE_BASED_WRAP"
            found.no_effect(f"fsdp_config.{key}", f"fsdp_auto_wrap_policy is not {needs}")
    if policy is None:
        return
    if policy == "TRANSFORMER_BASED_WRAP":
        classes = list(file.fsdp.get(_WRAP_KEYS[0], ()))
        found.add("sharding.wrap", classes or "auto", f"fsdp_config.{_WRAP_KEYS[0]}" if classes else origin)
    elif policy == "SIZE_BASED_WRAP" and (least := file.fsdp.get(_WRAP_KEYS[1], DEFAULT_MIN_NUM_PARAMS)):
        found.add("sharding.wrap", least, f"fsdp_config.{_WRAP_KEYS[1]}" if _WRAP_KEYS[1] in file.fsdp else origin)
    else:  # NO_WRAP, or a smallest size of 0
        found.add("sharding.wrap", "none", origin)


def _rest(found: _Found) -> None:
    file = found.file
    if file.backward_prefetch is not None:
        origin = file.key_of("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
        found.add("sharding.prefetch", _PREFETCH[file.backward_prefetch], origin)
    for key, ours in (
        ("fsdp_offload_params", "sharding.cpu_offload"),
        ("fsdp_activation_checkpointing", "training.gradient_checkpointing"),
    ):
        if key in file.fsdp:
            found.add(ours, file.fsdp[key], f"fsdp_config.{key}")
    if "fsdp_state_dict_type" in file.fsdp:
        found.no_effect(
            "fsdp_config.fsdp_state_dict_type",
            "checkpoints are always sharded, and the model in output_dir is always a full one",
        )
    for key, reason in _SCRIPTS_ONLY.items():
        if file.fsdp.get(key):
            found.no_effect(f"fsdp_config.{key}", reason)


_SCRIPTS_ONLY = {
    "fsdp_activation_checkpointing_offload": "activations that are kept stay on the device",
    "fsdp_ignored_modules": "every module is sharded, with the same results",
}
"""Keys that only have an effect in scripts, and why."""


def _dynamo(found: _Found) -> None:
    """Add torch_compile for the backend INDUCTOR, and warnings about other compile settings."""
    dynamo = found.file.dynamo
    backend = dynamo.get("dynamo_backend", "NO")
    origin = "dynamo_config.dynamo_backend"
    origin = origin if origin in found.file.raw else "dynamo_backend"
    if backend == "INDUCTOR":
        found.add("training.torch_compile", True, origin)  # noqa: FBT003
    elif backend != "NO":
        found.no_effect(origin, "training.torch_compile compiles with inductor")
    defaults: Sequence[tuple[str, Any]] = (
        ("dynamo_mode", "default"),
        ("dynamo_use_fullgraph", False),
        ("dynamo_use_dynamic", False),
    )
    for key, default in defaults:
        if dynamo.get(key, default) != default:
            found.no_effect(f"dynamo_config.{key}", "training.torch_compile compiles each block with torch's defaults")


def _launcher_keys(found: _Found) -> None:
    """Add warnings about keys for Accelerate's own object or for another launcher."""
    file = found.file
    if file.debug:
        found.no_effect("debug", "diverged ranks always raise an error that names each rank's operation")
    if file.enable_cpu_affinity:
        found.no_effect("enable_cpu_affinity", "ranks are not bound to cores")
    if file.num_machines == 1:
        for key in ("main_process_ip", "main_process_port"):
            if key in file.raw:
                found.no_effect(key, "ranks of one machine connect through a free port")
