"""Accelerate's configuration files in plain words, and the file of ``fullshard config --default``."""

from __future__ import annotations

from typing import Any

from fullshard.compat.accelerate_config.file import AccelerateFile

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
    return [f"fullshard train run.yaml --config_file {file.path}", launch, f"fullshard config convert {file.path}"]
