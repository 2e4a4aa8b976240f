"""Answers of the questionnaire as a configuration file that Accelerate reads too, each line with what it means."""

from __future__ import annotations

from typing import Any

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.compat.accelerate_config.keys import as_yaml
from fullshard.compat.accelerate_config.questions import QUESTIONS, Answers

_HEAD = """\
# Written by `fullshard config`. Read by `fullshard train` and `fullshard launch`, and by `accelerate launch`.
"""
_GIVEN: tuple[tuple[str, Any, str], ...] = (
    ("compute_environment", "LOCAL_MACHINE", "machines that you log in to"),
    ("distributed_type", "FSDP", "fsdp_config below counts"),
    ("num_machines", None, ""),
    ("machine_rank", 0, "number of this machine, counted from 0"),
    ("main_process_ip", None, "one machine: its ranks find each other"),
    ("main_process_port", None, "one machine: any free port"),
    ("rdzv_backend", "static", "machines and ranks are those named here"),
    ("same_network", True, "machines reach each other directly"),
    ("num_processes", None, ""),
    ("use_cpu", None, ""),
    ("mixed_precision", None, ""),
    ("fsdp_config.fsdp_version", 1, "the names of the keys below; the engine is fullshard's either way"),
)
"""Keys in the order of the file, with what stands there where nothing was answered."""

_MEANINGS = {
    "num_machines": "machines that take part",
    "machine_rank": "number of this machine, counted from 0: the line that differs between machines",
    "main_process_ip": "address of machine 0",
    "main_process_port": "port there where ranks meet",
    "num_processes": "ranks on all machines together",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "each layer of these classes is a unit",
    "fsdp_config.fsdp_min_num_params": "modules with so many parameters of their own are units",
}
_SWITCHES = {
    "use_cpu": ("the CPU, even where there are GPUs", "GPUs where there are any"),
    "fsdp_config.fsdp_offload_params": ("shards live in host memory", "shards live on the device"),
    "fsdp_config.fsdp_activation_checkpointing": ("blocks are computed again in backward", "activations are kept"),
}


def file_values(answers: Answers) -> dict[str, Any]:
    """What the file holds, by dotted key, in its order."""
    values = {key: answers.get(key, given) for key, given, _ in _GIVEN}
    values |= {key: value for key, value in answers.items() if key.startswith("fsdp_config.")}
    values.setdefault("fsdp_config.fsdp_offload_params", False)
    layers = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
    if layers in values:
        values[layers] = ",".join(values[layers]) or None
    return values


def file_text(answers: Answers) -> str:
    """The file: YAML with a comment on every line."""
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
    return next(comment for known, _, comment in _GIVEN if known == key)


def meaning(file: AccelerateFile) -> list[str]:
    """What a file means, a sentence each, for the user who has just written it."""
    where = "the CPU" if file.use_cpu else "a GPU each"
    machines = "this machine" if file.num_machines == 1 else f"each of {file.num_machines} machines"
    count = file.ranks_here
    said = [f"{count} rank{'s' if count != 1 else ''} on {machines}, on {where}, computing in {_precision(file)}."]
    for question in QUESTIONS:
        value = file.fsdp.get(question.key.rpartition(".")[2])
        told = dict(question.choices).get(str(value))
        if told is not None:
            said.append(f"{value}: {told}.")
    layers = file.fsdp.get("fsdp_transformer_layer_cls_to_wrap")
    if layers:
        said.append(f"Units are layers of class {', '.join(layers)}.")
    if file.use_cpu:
        said.append("On the CPU only fullshard shards: Accelerate's own launcher does it on GPUs.")
    return said


def _precision(file: AccelerateFile) -> str:
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(file.mixed_precision), "float32")


def next_commands(file: AccelerateFile) -> list[str]:
    """What to type next."""
    launch = f"fullshard launch --config_file {file.path} script.py"
    if file.num_machines > 1:
        return [f"{launch}  # on every machine, with its own machine_rank"]
    return [f"fullshard train run.yaml --config_file {file.path}", launch, f"fullshard config convert {file.path}"]
