"""Accelerate's configuration files in plain words, and as settings of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullshard.compat.accelerate_config.file import DEFAULT_MIN_NUM_PARAMS, AccelerateFile
from fullshard.errors import ConfigError

_MEANINGS = {
    "FULL_SHARD": "parameters, gradients and optimizer state are sharded over all ranks: least memory",
    "SHARD_GRAD_OP": "as FULL_SHARD, but parameters stay gathered between forward and backward: fewer gathers, more "
    "memory",
    "NO_SHARD": "every rank holds the full model: for models that fit on one GPU with their optimizer",
    "HYBRID_SHARD": "FULL_SHARD inside each machine, replicated across machines: less traffic between machines",
    "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP inside each machine, replicated across machines",
    "TRANSFORMER_BASED_WRAP": "each layer of a named class is one unit; without names, each of the model's repeated "
    "blocks",
    "SIZE_BASED_WRAP": "each module with at least a given number of parameters is one unit",
    "NO_WRAP": "the model is one unit, gathered at once: only for small models",
    "BACKWARD_PRE": "the next unit is gathered before this one's backward: fastest, two units in memory",
    "BACKWARD_POST": "the next unit is gathered after this one's gradients are sent",
    "NO_PREFETCH": "each unit is gathered when it is needed: least memory, slowest",
    "FULL_STATE_DICT": "a script's state_dict() is the full model, on rank 0",
    "LOCAL_STATE_DICT": "a script's state_dict() is this rank's shards, as plain tensors",
    "SHARDED_STATE_DICT": "a script's state_dict() is this rank's shards and their places: any number of ranks can "
    "load it",
}


def default_values(gpus: int, *, bf16: bool) -> dict[str, Any]:
    """Return the values of a file for this machine: one rank per GPU, or 2 on the CPU; sharded, in bf16 if possible."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": gpus or 2,
        "use_cpu": gpus == 0,
        "mixed_precision": "bf16" if bf16 else "no",
        "rdzv_backend": "static",
        "same_network": True,
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_offload_params": False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_activation_checkpointing": False,
        },
    }


def summary(file: AccelerateFile) -> list[str]:
    """Return a summary of a file, one sentence per item, for the user who has just created it."""
    where = "the CPU" if file.use_cpu else "one GPU each"
    machines = "this machine" if file.num_machines == 1 else f"each of {file.num_machines} machines"
    count = file.ranks_per_machine
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(str(file.mixed_precision), "float32")
    lines = [f"{count} rank{'s' if count != 1 else ''} on {machines}, on {where}, computing in {precision}."]
    if not file.is_sharded:
        lines.append(
            f"distributed_type {file.distributed_type} does not configure sharding (Accelerate asks about it for "
            "multi-GPU only): fullshard train shards as the run file sets it, a script's Accelerator by the model's "
            "repeated blocks."
        )
    words = (file.strategy, file.fsdp.get("fsdp_auto_wrap_policy"), file.backward_prefetch)
    for word in (*words, file.fsdp.get("fsdp_state_dict_type")):
        if word is not None:
            lines.append(f"{word}: {_MEANINGS[word]}.")
    layers = file.fsdp.get("fsdp_transformer_layer_cls_to_wrap")
    if layers:
        lines.append(f"Units are layers of class {', '.join(layers)}.")
    if file.fsdp.get("fsdp_min_num_params"):
        lines.append(f"Units are modules with at least {file.fsdp['fsdp_min_num_params']:,} parameters.")
    if file.fsdp.get("fsdp_offload_params"):
        lines.append("Shards, gradients and optimizer state live in host memory; the optimizer steps on the CPU.")
    if file.fsdp.get("fsdp_activation_checkpointing"):
        lines.append("Each unit's activations are freed after its forward and recomputed before its backward.")
    if file.use_cpu and file.is_sharded:
        lines.append("On CPUs only fullshard shards; Accelerate's own launcher shards on GPUs only.")
    return lines


def next_commands(file: AccelerateFile) -> list[str]:
    """Return commands that use the file."""
    launch = f"fullshard launch --config_file {file.path} script.py"
    if file.num_machines > 1:
        return [f"{launch}  # on every machine, with its own machine_rank"]
    return [f"fullshard train run.yaml --config_file {file.path}", launch]


_PREFETCH = {"BACKWARD_PRE": "backward_pre", "BACKWARD_POST": "backward_post", "NO_PREFETCH": "none"}
_WRAP_KEYS = {"fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP", "fsdp_min_num_params": "SIZE_BASED_WRAP"}
"""Keys that belong to one wrap policy."""

_DYNAMO_DEFAULTS = {"dynamo_mode": "default", "dynamo_use_fullgraph": False, "dynamo_use_dynamic": False}

_SCRIPTS_ONLY = {
    "fsdp_state_dict_type": "checkpoints are always sharded, and the model in output_dir is always a full one",
    "fsdp_activation_checkpointing_offload": "activations that are kept stay on the device",
    "fsdp_ignored_modules": "every module is sharded, with the same results",
}
"""Keys that only have an effect in scripts, and why."""


@dataclass(frozen=True)
class Setting:
    """One setting of the run file, and where it comes from."""

    value: Any  # its value, of a type that YAML and JSON have
    origin: str  # the dotted key of Accelerate's file
    as_written: str  # that key and its value there, such as ``mixed_precision: bf16``


@dataclass(frozen=True)
class Translation:
    """Settings that a file has for ``fullshard train``."""

    # settings by dotted key of the run file, without keys that Accelerate's file does not set
    settings: Mapping[str, Setting]
    warnings: tuple[str, ...]  # the file's own warnings, and one for each key that has no effect on ``fullshard train``


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
    translator = _Translator(file)
    translator.ranks_and_precision()
    translator.dynamo_keys()
    if file.is_sharded:
        translator.strategy()
        translator.wrap_policy()
        translator.other_fsdp_keys()
    translator.other_top_level_keys()
    return Translation(translator.settings, (*file.warnings, *translator.warnings))


class _Translator:
    """Settings and warnings, collected while translating a file."""

    def __init__(self, file: AccelerateFile) -> None:
        self.file = file
        self.settings: dict[str, Setting] = {}
        self.warnings: list[str] = []

    def _add(self, key: str, value: Any, origin: str) -> None:
        """Add a setting; ``origin`` is a dotted key of Accelerate's file."""
        self.settings[key] = Setting(value, origin, self.file.as_written(origin) if origin in self.file.raw else origin)

    def _warn(self, origin: str, text: str) -> None:
        """Add a warning about a key."""
        self.warnings.append(f"{self.file.as_written(origin)} in {self.file.where(origin)}, {text}")

    def _no_effect(self, origin: str, reason: str) -> None:
        """Add a warning that a key has no effect on ``fullshard train``."""
        self._warn(origin, f"has no effect on fullshard train: {reason}")

    def ranks_and_precision(self) -> None:
        """Translate the number of ranks and the precision."""
        file = self.file
        if file.ranks_per_machine is not None:
            self._add("nproc", file.ranks_per_machine, "num_processes")
        if file.mixed_precision is not None:
            origin = "mixed_precision" if "mixed_precision" in file.raw else "fp16"
            precision = "fp32" if file.mixed_precision == "no" else file.mixed_precision
            self._add("training.precision", precision, origin)

    def dynamo_keys(self) -> None:
        """Translate the backend INDUCTOR; warn about other compile settings."""
        dynamo = self.file.dynamo
        backend = dynamo.get("dynamo_backend", "NO")
        origin = "dynamo_config.dynamo_backend"
        origin = origin if origin in self.file.raw else "dynamo_backend"
        if backend == "INDUCTOR":
            self._add("training.torch_compile", True, origin)  # noqa: FBT003
        elif backend != "NO":
            self._no_effect(origin, "training.torch_compile compiles with inductor")
        for key, default in _DYNAMO_DEFAULTS.items():
            if dynamo.get(key, default) != default:
                reason = "training.torch_compile compiles each block with torch's defaults"
                self._no_effect(f"dynamo_config.{key}", reason)

    def strategy(self) -> None:
        """Translate the sharding strategy, or the sizes of replicas and shards."""
        file = self.file
        replicas = file.parallelism.get("parallelism_config_dp_replicate_size", 1)
        strategy = file.strategy
        origin = file.key_of("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
        if replicas > 1:
            strategy = _mesh_strategy(file, replicas)
            origin = "parallelism_config.parallelism_config_dp_replicate_size"
        if strategy is not None:
            self._add("sharding.strategy", strategy.lower(), origin)

    def wrap_policy(self) -> None:
        """Translate the wrap policy; warn about keys of other policies."""
        fsdp = self.file.fsdp
        policy = fsdp.get("fsdp_auto_wrap_policy")
        for key, needed in _WRAP_KEYS.items():
            if key in fsdp and policy != needed:
                self._no_effect(f"fsdp_config.{key}", f"fsdp_auto_wrap_policy is not {needed}")
        if policy is None:
            return
        wrap: Any = "none"  # NO_WRAP, or a smallest size of 0
        key = "fsdp_auto_wrap_policy"
        if policy == "TRANSFORMER_BASED_WRAP":
            wrap = list(fsdp.get("fsdp_transformer_layer_cls_to_wrap", ())) or "auto"
            key = key if wrap == "auto" else "fsdp_transformer_layer_cls_to_wrap"
        elif policy == "SIZE_BASED_WRAP" and (least := fsdp.get("fsdp_min_num_params", DEFAULT_MIN_NUM_PARAMS)):
            wrap = least
            key = "fsdp_min_num_params" if "fsdp_min_num_params" in fsdp else key
        self._add("sharding.wrap", wrap, f"fsdp_config.{key}")

    def other_fsdp_keys(self) -> None:
        """Translate the remaining keys of ``fsdp_config``; warn about those for scripts."""
        file = self.file
        if file.backward_prefetch is not None:
            origin = file.key_of("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
            self._add("sharding.prefetch", _PREFETCH[file.backward_prefetch], origin)
        for key, ours in (
            ("fsdp_offload_params", "sharding.cpu_offload"),
            ("fsdp_activation_checkpointing", "training.gradient_checkpointing"),
        ):
            if key in file.fsdp:
                self._add(ours, file.fsdp[key], f"fsdp_config.{key}")
        for key, reason in _SCRIPTS_ONLY.items():
            if file.fsdp.get(key):
                self._no_effect(f"fsdp_config.{key}", reason)

    def other_top_level_keys(self) -> None:
        """Warn about keys for other launchers, for scripts, or for unsharded training."""
        file = self.file
        if not file.is_sharded and file.distributed_type != "NO":
            self._warn(
                "distributed_type",
                "does not configure sharding: the run file's sharding section is used, by default full_shard. To "
                "replicate the model on every rank, as Accelerate does, set sharding.strategy: no_shard",
            )
        if file.debug:
            self._no_effect("debug", "diverged ranks always raise an error that names each rank's operation")
        if file.enable_cpu_affinity:
            self._no_effect("enable_cpu_affinity", "ranks are not bound to cores")
        if file.num_machines == 1:
            for key in ("main_process_ip", "main_process_port"):
                if key in file.raw:
                    self._no_effect(key, "ranks of one machine connect through a free port")


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
