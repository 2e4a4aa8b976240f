"""Configuration files written from the answers of the questionnaire, with a comment on every line.

Accelerate reads them too.
"""

from __future__ import annotations

from typing import Any

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.compat.accelerate_config.keys import as_yaml
from fullshard.compat.accelerate_config.questions import QUESTIONS, Answers

_HEAD = """\
# Written by `fullshard config`. Read by `fullshard train` and `fullshard launch`, and by `accelerate launch`.
"""
_DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("compute_environment", "LOCAL_MACHINE", "machines that you log in to"),
    ("distributed_type", "FSDP", "uses fsdp_config below"),
    ("num_machines", None, ""),
    ("machine_rank", 0, "number of this machine, counted from 0"),
    ("main_process_ip", None, "not needed with one machine"),
    ("main_process_port", None, "one machine: any free port"),
    ("rdzv_backend", "static", "the numbers of machines and ranks are fixed"),
    ("same_network", True, "machines reach each other directly"),
    ("num_processes", None, ""),
    ("use_cpu", None, ""),
    ("mixed_precision", None, ""),
    ("fsdp_config.fsdp_version", 1, "names of the keys below; the engine is fullshard's either way"),
)
"""Keys in the order of the file, each with its value and comment if there was no answer."""

_MEANINGS = {
    "num_machines": "number of machines",
    "machine_rank": "number of this machine, counted from 0; differs between machines",
    "main_process_ip": "address of machine 0",
    "main_process_port": "port on machine 0 that ranks connect to",
    "num_processes": "number of ranks on all machines",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "each layer of these classes is a unit",
    "fsdp_config.fsdp_min_num_params": "modules with at least this many parameters are units",
}
_SWITCHES = {
    "use_cpu": ("the CPU, even if there are GPUs", "GPUs if there are any"),
    "fsdp_config.fsdp_offload_params": ("shards live in host memory", "shards live on the device"),
    "fsdp_config.fsdp_activation_checkpointing": ("blocks are recomputed in backward", "activations are kept"),
}


def file_values(answers: Answers) -> dict[str, Any]:
    """Return the values of the file by dotted key, in its order."""
    values = {key: answers.get(key, default) for key, default, _ in _DEFAULTS}
    values |= {key: value for key, value in answers.items() if key.startswith("fsdp_config.")}
    values.setdefault("fsdp_config.fsdp_offload_params", False)
    layers = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
    if layers in values:
        values[layers] = ",".join(values[layers]) or None
    return values


def file_text(answers: Answers) -> str:
    """Return the file as YAML with a comment on every line."""
    lines = [_HEAD.rstrip()]
    for key, value in file_values(answers).items():
        section, _, name = key.rpartition(".")
        if section and "fsdp_config:" not in lines:
            lines.append("fsdp_config:")
        lines.append(f"{'  ' if section else ''}{name}: {as_yaml(value)}  # {_comment(key, value, answers)}")
    return "\n".join(lines) + "\n"


def _comment(key: str, value: Any, answers: Answers) -> str:
    if key in _SWITCHES:
        return _SWITCHES[key][0 if value else 1]
    if key in answers:
        question = next(question for question in QUESTIONS if question.key == key)
        meaning = dict(question.choices).get(value) or _MEANINGS[key]
        return "the model's own repeated blocks" if value is None else meaning
    return next(comment for known, _, comment in _DEFAULTS if known == key)


def summary(file: AccelerateFile) -> list[str]:
    """Return a summary of a file, one sentence per item, for the user who has just created it."""
    where = "the CPU" if file.use_cpu else "one GPU each"
    machines = "this machine" if file.num_machines == 1 else f"each of {file.num_machines} machines"
    count = file.ranks_per_machine
    lines = [f"{count} rank{'s' if count != 1 else ''} on {machines}, on {where}, computing in {_precision(file)}."]
    for question in QUESTIONS:
        value = file.fsdp.get(question.key.rpartition(".")[2])
        explanation = dict(question.choices).get(str(value))
        if explanation is not None:
            lines.append(f"{value}: {explanation}.")
    layers = file.fsdp.get("fsdp_transformer_layer_cls_to_wrap")
    if layers:
        lines.append(f"Units are layers of class {', '.join(layers)}.")
    if file.use_cpu:
        lines.append("On CPUs only fullshard shards; Accelerate's own launcher shards on GPUs only.")
    return lines


def _precision(file: AccelerateFile) -> str:
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(file.mixed_precision), "float32")


def next_commands(file: AccelerateFile) -> list[str]:
    """Return commands that use the file."""
    launch = f"fullshard launch --config_file {file.path} script.py"
    if file.num_machines > 1:
        return [f"{launch}  # on every machine, with its own machine_rank"]
    return [f"fullshard train run.yaml --config_file {file.path}", launch, f"fullshard config convert {file.path}"]
