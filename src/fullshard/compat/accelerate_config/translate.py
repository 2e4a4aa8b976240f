"""From a configuration file of Accelerate to the settings of our run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.errors import ConfigError

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""What Accelerate's launcher takes for SIZE_BASED_WRAP without fsdp_min_num_params."""

_PREFETCH = {"BACKWARD_PRE": "backward_pre", "BACKWARD_POST": "backward_post", "NO_PREFETCH": "none"}
_WRAP_KEYS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")


@dataclass(frozen=True)
class Setting:
    """One setting of the run file, and where it comes from.

    Attributes:
        value: As YAML and JSON hold it.
        origin: The dotted key of Accelerate's file.
        said: That key and its value there, such as ``mixed_precision: bf16``.
    """

    value: Any
    origin: str
    said: str


@dataclass(frozen=True)
class Translation:
    """What a file means to ``fullshard train``.

    Attributes:
        settings: By dotted key of the run file; keys that Accelerate's file leaves open are not there.
        warnings: What of the file has no effect there, and why; those of the file itself too.
    """

    settings: Mapping[str, Setting]
    warnings: tuple[str, ...]


def nested(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Settings by dotted key as the run file has them."""
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = setting.value
    return values


def translate(file: AccelerateFile) -> Translation:
    """What a file means to ``fullshard train``; any process, alone.

    Args:
        file: The file.

    Raises:
        ConfigError: The file asks for a mesh that its machines do not make.
    """
    found = _Found(file)
    if file.ranks_here is not None:
        found.add("nproc", file.ranks_here, "num_processes")
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
            f"{file.said('distributed_type')} in {file.where('distributed_type')}, says nothing of sharding: the run "
            "file's sharding section counts, full_shard where it has none. Copies of the whole model on every rank, as "
            "Accelerate makes them, are sharding.strategy: no_shard"
        )
    _launcher_keys(found)
    return Translation(found.settings, (*file.warnings, *found.warnings))


class _Found:
    """Settings and warnings as they are found."""

    def __init__(self, file: AccelerateFile) -> None:
        self.file = file
        self.settings: dict[str, Setting] = {}
        self.warnings: list[str] = []

    def add(self, key: str, value: Any, origin: str) -> None:
        """One setting; ``origin`` is dotted."""
        self.settings[key] = Setting(value, origin, self.file.said(origin) if origin in self.file.raw else origin)

    def warn(self, text: str) -> None:
        """What has no effect."""
        self.warnings.append(text)

    def idle(self, origin: str, reason: str) -> None:
        """A given key that ``fullshard train`` has no use for."""
        self.warn(f"{self.file.said(origin)} in {self.file.where(origin)}, has no effect on fullshard train: {reason}")


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
    """The strategy of a file that crosses copies and shards by numbers.

    Raises:
        ConfigError: The numbers are not those of the machines.
    """
    shards = file.parallelism.get("parallelism_config_dp_shard_size", 1)
    if shards == 1:
        return "NO_SHARD"
    if replicas == file.num_machines and file.ranks_here in (None, shards):
        return "HYBRID_SHARD_ZERO2" if file.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "HYBRID_SHARD"
    raise ConfigError(
        f"{file.path}: fullshard train shards inside each machine and copies across machines, so dp_replicate_size is "
        f"the number of machines and dp_shard_size that of each one's ranks; got {replicas} and {shards} with "
        f"num_machines: {file.num_machines}, num_processes: {file.num_processes}. A script chooses its own mesh: "
        "fully_shard(model, mesh=…)."
    )


def _wrap(found: _Found) -> None:
    """The wrap policy; a policy that is not given leaves the run file's."""
    file = found.file
    policy, origin = file.fsdp.get("fsdp_auto_wrap_policy"), "fsdp_config.fsdp_auto_wrap_policy"
    used = {"TRANSFORMER_BASED_WRAP": _WRAP_KEYS[0], "SIZE_BASED_WRAP": _WRAP_KEYS[1]}.get(str(policy))
    for key in _WRAP_KEYS:
        if key in file.fsdp and key != used:
            needs = "TRANSFORMER_BASED_WRAP" if key == _WRAP_KEYS[0] else "SIZE_BASED_WRAP"
            found.idle(f"fsdp_config.{key}", f"fsdp_auto_wrap_policy is not {needs}")
    if policy is None:
        return
    if policy == "TRANSFORMER_BASED_WRAP":
        classes = list(file.fsdp.get(_WRAP_KEYS[0], ()))
        found.add("sharding.wrap", classes or "auto", f"fsdp_config.{_WRAP_KEYS[0]}" if classes else origin)
    elif policy == "SIZE_BASED_WRAP" and (least := file.fsdp.get(_WRAP_KEYS[1], DEFAULT_MIN_NUM_PARAMS)):
        found.add("sharding.wrap", least, f"fsdp_config.{_WRAP_KEYS[1]}" if _WRAP_KEYS[1] in file.fsdp else origin)
    else:  # NO_WRAP; a smallest size of 0 is that too
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
        found.idle(
            "fsdp_config.fsdp_state_dict_type",
            "checkpoints are always sharded, and the model in output_dir is always whole",
        )
    for key, reason in _IDLE_FSDP.items():
        if file.fsdp.get(key):
            found.idle(f"fsdp_config.{key}", reason)


_IDLE_FSDP = {
    "fsdp_activation_checkpointing_offload": "activations that are kept stay on the device",
    "fsdp_ignored_modules": "every module is sharded, which changes nothing of what is computed",
}
"""Keys that mean something to a script, where they are switched on."""


def _dynamo(found: _Found) -> None:
    """INDUCTOR is torch.compile as we do it; anything else of it is named."""
    dynamo = found.file.dynamo
    backend = dynamo.get("dynamo_backend", "NO")
    origin = "dynamo_config.dynamo_backend"
    origin = origin if origin in found.file.raw else "dynamo_backend"
    if backend == "INDUCTOR":
        found.add("training.torch_compile", True, origin)  # noqa: FBT003
    elif backend != "NO":
        found.idle(origin, "training.torch_compile compiles with inductor")
    ordinary: Sequence[tuple[str, Any]] = (
        ("dynamo_mode", "default"),
        ("dynamo_use_fullgraph", False),
        ("dynamo_use_dynamic", False),
    )
    for key, default in ordinary:
        if dynamo.get(key, default) != default:
            found.idle(f"dynamo_config.{key}", "training.torch_compile compiles each block with torch's own choices")


def _launcher_keys(found: _Found) -> None:
    """Keys for Accelerate's own object or for another launcher."""
    file = found.file
    if file.debug:
        found.idle("debug", "ranks that part are always told, with what each was doing")
    if file.enable_cpu_affinity:
        found.idle("enable_cpu_affinity", "ranks are not bound to cores")
    if file.num_machines == 1:
        for key in ("main_process_ip", "main_process_port"):
            if key in file.raw:
                found.idle(key, "ranks of one machine meet on a free port")
