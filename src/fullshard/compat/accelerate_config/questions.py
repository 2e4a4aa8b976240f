"""The questions of ``fullshard config``, as data."""

from __future__ import annotations

import difflib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.compat.accelerate_config.keys import (
    DEFAULT_MIN_NUM_PARAMS,
    PREFETCHES,
    STATE_DICT_TYPES,
    STRATEGIES,
    WRAP_POLICIES,
    flag,
    integer,
    names,
    word,
)

Answers = Mapping[str, Any]
"""Previous answers, by the question's key."""

MODEL = "model"
"""Key of the only answer that is not written to the file."""

LAYER_CLASSES = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"


@dataclass(frozen=True)
class Machine:
    """Properties of this machine that defaults depend on."""

    gpus: int  # number of visible GPUs
    bf16: bool  # whether they support bfloat16
    name: str  # host name


def this_machine(gpus: int, *, bf16: bool) -> Machine:
    """Return this machine with the given GPUs."""
    return Machine(gpus, bf16, socket.gethostname())


@dataclass(frozen=True)
class Question:
    """One question."""

    key: str  # dotted key of Accelerate's file that the answer is written to
    text: str  # the question
    reason: str  # reason for the default, in one line
    explain: str  # text printed for the answer ``?``
    # converts the answer's text, the previous answers and the machine to the value; its ``ValueError`` states the
    # rule
    parse: Callable[[str, Answers, Machine], Any]
    # computes the default for Enter from the previous answers and the machine; None: an answer is required
    default: Callable[[Answers, Machine], Any]
    choices: tuple[tuple[str, str], ...] = ()  # allowed words with their explanations; their numbers are allowed too
    # decides from the previous answers whether the question is asked
    asked: Callable[[Answers], bool] = lambda answers: True


def _plain(parser: Callable[[Any], Any]) -> Callable[[str, Answers, Machine], Any]:
    return lambda text, answers, machine: parser(text)


def _switch(key: str, text: str, reason: str, explain: str, **rest: Any) -> Question:
    rest.setdefault("default", lambda answers, machine: False)
    return Question(key, text, reason, explain, _yes_or_no, choices=(), **rest)


def _yes_or_no(text: str, answers: Answers, machine: Machine) -> bool:
    short = {"y": "yes", "n": "no"}.get(text.lower(), text)
    try:
        return flag(short)
    except ValueError:
        raise ValueError("yes or no") from None


def _choice(key: str, text: str, reason: str, choices: Sequence[tuple[str, str]], **rest: Any) -> Question:
    words = [name for name, _ in choices]
    rest.setdefault("default", lambda answers, machine: words[0])
    explain = "\n".join(f"{name}: {meaning}." for name, meaning in choices)
    parse = _plain(word(*words, numbered=True))
    return Question(key, text, reason, explain, parse, choices=tuple(choices), **rest)


def _several(answers: Answers) -> bool:
    return answers["num_machines"] > 1


def _rank_of_machine(text: str, answers: Answers, machine: Machine) -> int:
    number, count = integer(0)(text), answers["num_machines"]
    if number >= count:
        raise ValueError(f"a whole number from 0 to {count - 1}, as there are {count} machines")
    return number


def _address(text: str, answers: Answers, machine: Machine) -> str:
    if not text or any(character.isspace() or character == "/" for character in text):
        raise ValueError("a host name or an IP address, such as 10.0.0.1")
    return text


def _port(text: str, answers: Answers, machine: Machine) -> int:
    number = integer(1)(text)
    if number > 65535:
        raise ValueError("a port from 1 to 65535")
    return number


def _ranks(text: str, answers: Answers, machine: Machine) -> int:
    number, machines = integer(1)(text), answers["num_machines"]
    if number % machines:
        raise ValueError(f"a multiple of {machines}: each of the {machines} machines has the same number of ranks")
    if machines == 1 and not answers["use_cpu"] and 0 < machine.gpus < number:
        raise ValueError(f"at most {machine.gpus}, the number of GPUs of this machine: each rank needs its own GPU")
    return number


def _default_ranks(answers: Answers, machine: Machine) -> int:
    each = 2 if answers["use_cpu"] else machine.gpus or 1
    return each * answers["num_machines"]


def _wraps(policy: str) -> Callable[[Answers], bool]:
    return lambda answers: answers["fsdp_config.fsdp_auto_wrap_policy"] == policy


def pick_classes(text: str, offered: Sequence[str]) -> tuple[str, ...]:
    """Parse names or numbers of layer classes.

    Args:
        text: The answer, separated by commas.
        offered: The model's classes, numbered from 1; if empty, any name is allowed.

    Raises:
        ValueError: An item is not allowed; the message states the rule.
    """
    chosen = []
    for item in names(text):
        if item.isdigit() and 1 <= int(item) <= len(offered):
            item = offered[int(item) - 1]
        if offered and item not in offered:
            near = difflib.get_close_matches(item, offered, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"classes of the model, by name or number: {', '.join(offered)}{hint}")
        if not item.isidentifier():
            raise ValueError("class names separated by commas, such as T5Block")
        chosen.append(item)
    return tuple(dict.fromkeys(chosen))


_STRATEGY_MEANINGS = (
    "parameters, gradients and optimizer state are sharded over all ranks: least memory",
    "as FULL_SHARD, but parameters stay gathered between forward and backward: fewer gathers, more memory",
    "every rank holds the full model: for models that fit on one GPU with their optimizer",
    "FULL_SHARD inside each machine, replicated across machines: less traffic between machines",
    "SHARD_GRAD_OP inside each machine, replicated across machines",
)
_WRAP_MEANINGS = (
    "each layer of a named class is one unit",
    "each module with at least a given number of parameters is one unit",
    "the model is one unit, gathered at once: only for small models",
)
_PREFETCH_MEANINGS = (
    "the next unit is gathered before this one's backward: fastest, two units in memory",
    "the next unit is gathered after this one's gradients are sent",
    "each unit is gathered when it is needed: least memory, slowest",
)
_STATE_DICT_MEANINGS = (
    "a script's state_dict() is the full model, on rank 0",
    "a script's state_dict() is this rank's shards, as plain tensors",
    "a script's state_dict() is this rank's shards and their places: any number of ranks can load it",
)
_PRECISION_MEANINGS = (
    ("no", "float32 throughout"),
    ("fp16", "compute in float16 with loss scaling; T5 overflows in it"),
    ("bf16", "compute in bfloat16; needs a GPU from 2020 or later"),
)

QUESTIONS: tuple[Question, ...] = (
    Question(
        "num_machines",
        "How many machines?",
        "one machine needs no network setup",
        "Each machine runs the same command with its own machine rank.",
        _plain(integer(1)),
        lambda answers, machine: 1,
    ),
    Question(
        "machine_rank",
        "Number of this machine, counted from 0?",
        "the others connect to machine 0",
        "The files of the machines differ only in this line.",
        _rank_of_machine,
        lambda answers, machine: 0,
        asked=_several,
    ),
    Question(
        "main_process_ip",
        "Address of machine 0, reachable from every machine?",
        "on machine 0 its host name, if the others can resolve it; no default on other machines",
        "A host name or an IP address, the same on every machine. Not localhost or 127.0.0.1.",
        _address,
        lambda answers, machine: None if answers["machine_rank"] else machine.name,
        asked=_several,
    ),
    Question(
        "main_process_port",
        "Port on machine 0 that ranks connect to?",
        "torchrun's default",
        "Any port that is free and not blocked by a firewall.",
        _port,
        lambda answers, machine: 29500,
        asked=_several,
    ),
    _switch(
        "use_cpu",
        "Train on the CPU, even if there are GPUs?",
        "GPUs are used if there are any",
        "On the CPU, ranks are processes on this machine. Useful for trying out a script.",
        default=lambda answers, machine: machine.gpus == 0,
    ),
    Question(
        "num_processes",
        "How many ranks in total, on all machines?",
        "one per GPU, or 2 per machine on CPUs",
        "A rank is a process that holds its shards of the model and trains on its share of the data.",
        _ranks,
        _default_ranks,
    ),
    _choice(
        "fsdp_config.fsdp_sharding_strategy",
        "Sharding strategy?",
        "FULL_SHARD needs the least memory",
        tuple(zip(STRATEGIES, _STRATEGY_MEANINGS, strict=True)),
    ),
    _switch(
        "fsdp_config.fsdp_offload_params",
        "Keep shards, gradients and optimizer state in host memory?",
        "it is slower; for models that do not fit otherwise",
        "Units are copied to the GPU when they are gathered, and gradients back. The optimizer steps on the CPU.",
        asked=lambda answers: not answers["use_cpu"],
    ),
    _choice(
        "fsdp_config.fsdp_auto_wrap_policy",
        "Wrap policy: which modules become units, each gathered at once?",
        "the layers of a transformer are of the same, small size",
        tuple(zip(WRAP_POLICIES, _WRAP_MEANINGS, strict=True)),
    ),
    Question(
        MODEL,
        "Directory or Hub id of your model, to list its layer classes? (Enter: skip)",
        "no weights are read",
        "Its config.json is read from the directory, or from the Hugging Face cache. Nothing is downloaded.",
        _plain(str),
        lambda answers, machine: "",
        asked=_wraps("TRANSFORMER_BASED_WRAP"),
    ),
    Question(
        LAYER_CLASSES,
        "Layer classes to wrap, separated by commas?",
        "the model's repeated blocks",
        "The class names of the model's repeated layers, such as T5Block, BertLayer or LlamaDecoderLayer.",
        lambda text, answers, machine: pick_classes(text, ()),
        lambda answers, machine: (),
        asked=_wraps("TRANSFORMER_BASED_WRAP"),
    ),
    Question(
        "fsdp_config.fsdp_min_num_params",
        "Smallest number of parameters of a unit?",
        "Accelerate's default; smaller models need a smaller number",
        "Parameters of units inside a module are not counted. May be written 1e6.",
        _plain(integer(1)),
        lambda answers, machine: DEFAULT_MIN_NUM_PARAMS,
        asked=_wraps("SIZE_BASED_WRAP"),
    ),
    _choice(
        "fsdp_config.fsdp_backward_prefetch",
        "Backward prefetch?",
        "communication overlaps with compute",
        tuple(zip(PREFETCHES, _PREFETCH_MEANINGS, strict=True)),
    ),
    _choice(
        "fsdp_config.fsdp_state_dict_type",
        "State-dict type of a script's own saves?",
        "full files load anywhere; not used by fullshard train",
        tuple(zip(STATE_DICT_TYPES, _STATE_DICT_MEANINGS, strict=True)),
    ),
    _switch(
        "fsdp_config.fsdp_activation_checkpointing",
        "Recompute activations in backward instead of keeping them?",
        "it costs a third more compute; for long texts or large batches",
        "Each block's activations are freed after its forward and recomputed before its backward.",
    ),
    _choice(
        "mixed_precision",
        "Precision?",
        "bf16 if the GPU supports it, otherwise float32",
        _PRECISION_MEANINGS,
        default=lambda answers, machine: "bf16" if machine.bf16 and not answers["use_cpu"] else "no",
    ),
)


def default_answers(machine: Machine) -> dict[str, Any]:
    """Return the answers if every question is answered with Enter."""
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.asked(answers):
            answers[question.key] = question.default(answers, machine)
    return answers
