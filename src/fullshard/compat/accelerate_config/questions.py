"""The questions of ``fullshard config`` as data: what is asked, when, what may be answered, and what is meant."""

from __future__ import annotations

import difflib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.compat.accelerate_config.keys import (
    PREFETCHES,
    STATE_DICT_TYPES,
    STRATEGIES,
    WRAP_POLICIES,
    flag,
    names,
    whole,
    word,
)

Answers = Mapping[str, Any]
"""Answers so far, by the question's key."""

MODEL = "model"
"""The one answer that is not written to the file."""

LAYER_CLASSES = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"


@dataclass(frozen=True)
class Machine:
    """This machine, on which defaults depend.

    Attributes:
        gpus: How many GPUs it shows.
        bf16: Whether they compute in bfloat16.
        name: By which other machines reach it.
    """

    gpus: int
    bf16: bool
    name: str


def this_machine(gpus: int, *, bf16: bool) -> Machine:
    """The machine this runs on, with so many GPUs."""
    return Machine(gpus, bf16, socket.gethostname())


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        key: Dotted key of Accelerate's file that the answer goes to.
        text: The question.
        reason: Why the default is what it is, in a line.
        explain: What ``?`` shows.
        parse: From the answer's text, with the answers before it, to the value; a ``ValueError`` says the rule.
        default: What Enter means, by the answers before it and the machine; None: it must be answered.
        choices: Words that may be answered, each with what it means; they may be answered by number too.
        asked: Whether it is asked at all, by the answers before it.
    """

    key: str
    text: str
    reason: str
    explain: str
    parse: Callable[[str, Answers, Machine], Any]
    default: Callable[[Answers, Machine], Any]
    choices: tuple[tuple[str, str], ...] = ()
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
    number, count = whole(0)(text), answers["num_machines"]
    if number >= count:
        raise ValueError(f"a whole number from 0 to {count - 1}, as there are {count} machines")
    return number


def _address(text: str, answers: Answers, machine: Machine) -> str:
    if not text or any(character.isspace() or character == "/" for character in text):
        raise ValueError("a host name or an IP address, such as 10.0.0.1")
    return text


def _port(text: str, answers: Answers, machine: Machine) -> int:
    number = whole(1)(text)
    if number > 65535:
        raise ValueError("a port from 1 to 65535")
    return number


def _ranks(text: str, answers: Answers, machine: Machine) -> int:
    number, machines = whole(1)(text), answers["num_machines"]
    if number % machines:
        raise ValueError(f"a multiple of {machines}: each of the {machines} machines has as many ranks")
    if machines == 1 and not answers["use_cpu"] and 0 < machine.gpus < number:
        raise ValueError(f"at most {machine.gpus}: each rank needs a GPU of its own, and this machine has no more")
    return number


def _default_ranks(answers: Answers, machine: Machine) -> int:
    each = 2 if answers["use_cpu"] else machine.gpus or 1
    return each * answers["num_machines"]


def _wraps(policy: str) -> Callable[[Answers], bool]:
    return lambda answers: answers["fsdp_config.fsdp_auto_wrap_policy"] == policy


def pick_classes(text: str, offered: Sequence[str]) -> tuple[str, ...]:
    """Layer classes by name, or by number among those offered.

    Args:
        text: What was typed, separated by commas.
        offered: The model's classes; none where no model was named, and any name will do.

    Raises:
        ValueError: The rule.
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
    "parameters, gradients and optimizer state are cut over all ranks: least memory",
    "as FULL_SHARD, but what forward gathered stays until backward: fewer gathers, more memory",
    "every rank holds the whole model: for models that fit with their optimizer",
    "FULL_SHARD inside each machine, copies across machines: less traffic between machines",
    "SHARD_GRAD_OP inside each machine, copies across machines",
)
_WRAP_MEANINGS = (
    "each layer of a named class is gathered as one unit",
    "each module of at least so many parameters is one unit",
    "the whole model is one unit, gathered at once: only for small models",
)
_PREFETCH_MEANINGS = (
    "the next unit is gathered before this one's backward: fastest, two units in memory",
    "the next unit is gathered after this one's gradients went out",
    "each unit is gathered when it is needed: least memory, slowest",
)
_STATE_DICT_MEANINGS = (
    "a script's state_dict() is the whole model, on rank 0",
    "a script's state_dict() is what its rank holds, as it is",
    "a script's state_dict() is what its rank holds, with names and places",
)
_PRECISION_MEANINGS = (
    ("no", "float32 throughout"),
    ("fp16", "compute in float16 with a scaled loss; T5 overflows in it"),
    ("bf16", "compute in bfloat16; needs a GPU of 2020 or later"),
)

QUESTIONS: tuple[Question, ...] = (
    Question(
        "num_machines",
        "How many machines take part?",
        "one machine needs no network set-up",
        "Each machine runs the same command with its own machine rank.",
        _plain(whole(1)),
        lambda answers, machine: 1,
    ),
    Question(
        "machine_rank",
        "Which of them is this one, counted from 0?",
        "machine 0 is where the others meet",
        "The file differs between machines in this line only.",
        _rank_of_machine,
        lambda answers, machine: 0,
        asked=_several,
    ),
    Question(
        "main_process_ip",
        "Address of machine 0, by which every machine reaches it?",
        "on machine 0: its own name, if the others can resolve it; elsewhere there is no default",
        "A host name or an IP address. The same on every machine; localhost and 127.0.0.1 reach no other one.",
        _address,
        lambda answers, machine: None if answers["machine_rank"] else machine.name,
        asked=_several,
    ),
    Question(
        "main_process_port",
        "Port on machine 0 where ranks meet?",
        "torchrun's own choice",
        "Any port that nobody listens on, and that no firewall closes.",
        _port,
        lambda answers, machine: 29500,
        asked=_several,
    ),
    _switch(
        "use_cpu",
        "Train on the CPU, even where there are GPUs?",
        "GPUs are used where there are any",
        "On the CPU ranks are processes of this machine; good for trying a script out.",
        default=lambda answers, machine: machine.gpus == 0,
    ),
    Question(
        "num_processes",
        "How many ranks on all machines together?",
        "one for each GPU, or 2 on a machine's CPU",
        "A rank is a process that holds its share of the model and trains on its share of the rows.",
        _ranks,
        _default_ranks,
    ),
    _choice(
        "fsdp_config.fsdp_sharding_strategy",
        "Sharding strategy?",
        "sharding everything is why one is here",
        tuple(zip(STRATEGIES, _STRATEGY_MEANINGS, strict=True)),
    ),
    _switch(
        "fsdp_config.fsdp_offload_params",
        "Keep shards, gradients and optimizer state in host memory?",
        "it is slower; for models that do not fit otherwise",
        "Units are copied to the GPU when they are gathered, gradients back; the optimizer steps on the CPU.",
        asked=lambda answers: not answers["use_cpu"],
    ),
    _choice(
        "fsdp_config.fsdp_auto_wrap_policy",
        "Wrap policy: what becomes a unit that is gathered at once?",
        "layers of a transformer are alike, and one is small beside the model",
        tuple(zip(WRAP_POLICIES, _WRAP_MEANINGS, strict=True)),
    ),
    Question(
        MODEL,
        "Directory or Hub id of your model, to choose from its layer classes? (Enter: skip)",
        "it is only looked at, and no weights are read",
        "Its config.json is read from the directory, or from the Hugging Face cache, where it must be already.",
        _plain(str),
        lambda answers, machine: "",
        asked=_wraps("TRANSFORMER_BASED_WRAP"),
    ),
    Question(
        LAYER_CLASSES,
        "Layer class to wrap? (several: separated by commas)",
        "the model's repeated blocks",
        "The class name of the model's repeated layer, such as T5Block, BertLayer or LlamaDecoderLayer.",
        lambda text, answers, machine: pick_classes(text, ()),
        lambda answers, machine: (),
        asked=_wraps("TRANSFORMER_BASED_WRAP"),
    ),
    Question(
        "fsdp_config.fsdp_min_num_params",
        "Parameters from which on a module is a unit?",
        "as Accelerate has it; smaller models need a smaller number",
        "Counted are a module's parameters beside those of units inside it. 1e6 is a number too.",
        _plain(whole(1)),
        lambda answers, machine: 100_000_000,
        asked=_wraps("SIZE_BASED_WRAP"),
    ),
    _choice(
        "fsdp_config.fsdp_backward_prefetch",
        "Backward prefetch?",
        "communication runs beside compute",
        tuple(zip(PREFETCHES, _PREFETCH_MEANINGS, strict=True)),
    ),
    _choice(
        "fsdp_config.fsdp_state_dict_type",
        "State-dict type of a script's own saves?",
        "whole files load anywhere; fullshard train has its own way",
        tuple(zip(STATE_DICT_TYPES, _STATE_DICT_MEANINGS, strict=True)),
    ),
    _switch(
        "fsdp_config.fsdp_activation_checkpointing",
        "Recompute activations in backward instead of keeping them?",
        "it costs a third more compute; for long texts or large batches",
        "Each block's activations are thrown away after its forward and computed again before its backward.",
    ),
    _choice(
        "mixed_precision",
        "Precision?",
        "bf16 where the GPU has it, else float32",
        _PRECISION_MEANINGS,
        default=lambda answers, machine: "bf16" if machine.bf16 and not answers["use_cpu"] else "no",
    ),
)


def default_answers(machine: Machine) -> dict[str, Any]:
    """What Enter on every question gives."""
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.asked(answers):
            answers[question.key] = question.default(answers, machine)
    return answers
