"""Reading a run file and overrides into one frozen, validated configuration; all problems in one message."""

from __future__ import annotations

import copy
import difflib
import json
import os
import re
import shlex
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fullshard.errors import ConfigError
from fullshard.program.config.schema import RunConfig, options
from fullshard.program.config.section import fields_of, section_in

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""An id as in huggingface_hub: a name, or an owner and a name."""


def is_hub_id(name: str) -> bool:
    """Return True if a name is an owner's model on the Hub, and no path: nothing is there, nor its directory."""
    path = Path(name)
    return HUB_ID.fullmatch(name) is not None and "/" in name and not path.exists() and not path.parent.is_dir()


_TEXT_WANTED = ("string_type", "path_type")
"""pydantic's error types for a value that is not text."""


def load_run(
    path: str | Path, overrides: Sequence[str] = (), *, under: Mapping[str, Any] | None = None, reads_data: bool = True
) -> RunConfig:
    """Read a run file. Every rank may call it; it only reads the file and checks the paths in it.

    Args:
        path: The YAML file.
        overrides: Settings of the form ``section.key=value``, the value in YAML, applied in order. Null (``null``,
            ``~`` or nothing) unsets: an option that does not take null, or a section, has its default.
        under: Nested settings used where neither the file nor the overrides set a value.
        reads_data: Whether the data will be read; False: it may be missing.

    Returns:
        The configuration. The files it names exist and are absolute paths.

    Raises:
        ConfigError: The file cannot be read, an override is malformed, or a setting is unknown, of the wrong type, out
            of range, contradicts another or names a file that does not exist. The message holds all problems.
    """
    path = Path(path)
    return check_run(_merged(under or {}, read_values(path)), path, overrides, reads_data=reads_data)


def check_run(
    values: Mapping[str, Any], path: Path, overrides: Sequence[str] = (), *, reads_data: bool = True
) -> RunConfig:
    """Validate the values of a run file.

    Args:
        values: Nested settings, as read from YAML.
        path: The run file, for messages and relative paths.
        overrides: As for :func:`load_run`.
        reads_data: As for :func:`load_run`.

    Returns:
        The configuration, as from :func:`load_run`.

    Raises:
        ConfigError: As from :func:`load_run`.
    """
    values = copy.deepcopy(dict(values))
    if values.get("sharding") == "auto":
        values["sharding"] = {"auto": True}  # so that an override can add a setting
    typed = dict(_apply(values, override) for override in overrides)
    resolved, problems = _resolve_files(_without_unset(values, RunConfig), path.parent, reads_data=reads_data)
    try:
        run = RunConfig.model_validate(resolved)
    except ValidationError as error:
        problems = [_explain(details, typed) for details in error.errors()] + problems
    else:
        if not problems:
            return run
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError("\n".join([f"{path}: {count}:", *(f"  {problem}" for problem in problems)]))


def require_output_dir(config: RunConfig) -> None:
    """Check that a run can write to its directory and replaces no model but a run's, without creating it; any process.

    Raises:
        ConfigError: It cannot, or it would replace the model that it trains, or one that no run has left there.
    """
    directory = config.output_dir
    _require_writable(directory)
    adapter = None if config.model.adapter is None else config.model.adapter.path
    for key, base in (("model.path", config.model.path), ("model.adapter.path", adapter)):
        if base is not None and Path(base).is_dir() and Path(base).resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"output_dir: {directory} is or contains {key} ({base}), which the run's model would replace. Set "
                "output_dir to another directory."
            )
    holds_model = any(
        next(directory.glob(names), None) for names in ("*.safetensors", "pytorch_model*", "adapter_model*")
    )
    if holds_model and not any((directory / name).exists() for name in ("run.json", "summary.json", "checkpoints")):
        raise ConfigError(
            f"output_dir: {directory} holds a model that no run of fullshard train has left there, and the run's model "
            "would replace it. Set output_dir to another directory, or move that model away."
        )


def _require_writable(directory: Path) -> None:
    place = directory.absolute()
    nearest = next(one for one in (place, *place.parents) if os.path.exists(one))
    if not nearest.is_dir():
        problem = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"no permission to write in {nearest}"
    else:
        return
    raise ConfigError(f"output_dir: {directory} cannot be written to: {problem}. Set output_dir to another directory.")


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that a duplicate key is an error; PyYAML silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Build a mapping; refuse duplicate keys."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_values(path: Path) -> dict[str, Any]:
    """Return the settings in a run file as it has them, unchecked; any rank.

    Raises:
        ConfigError: It cannot be read.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; a run file (YAML) is expected. {_run_files_in(path)}")
    if not path.exists():
        raise ConfigError(f"There is no {path}: give the path of a run file (YAML), such as run.yaml.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The run file {path} cannot be read: {error}.") from error
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path} must contain settings (key: value); it contains {found}.")
    return values


def _run_files_in(directory: Path) -> str:
    """Return a hint which file in a directory to give instead."""
    found = sorted(path for path in directory.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
    if not found:
        return "There is no .yaml file in it: give the path of the run file itself, such as run.yaml."
    others = f" ({len(found)} .yaml files are in it)" if len(found) > 1 else ""
    return f"Give the file itself, such as {found[0]}{others}."


def _merged(under: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; ``values`` win over ``under``."""
    merged = dict(values)
    for key, value in under.items():
        own = merged.get(key)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            merged[key] = _merged(value, own)
        elif key not in merged or (isinstance(value, Mapping) and own is None):
            merged[key] = value
    return merged


def _apply(values: dict[str, Any], override: str) -> tuple[str, str]:
    """Apply one ``section.key=value`` to the settings in place; return the key and the value as typed."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"An override has the form section.key=value, such as training.max_steps=3; got {override!r}."
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of the override {override!r} is not valid YAML: {error}\n{_as_text('.'.join(keys), text)}"
        ) from error
    target = values
    for depth, key in enumerate(keys[:-1], start=1):
        if target.get(key) is None:
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict):
            section = ".".join(keys[:depth])
            raise ConfigError(f"The override {override!r} needs {section} to be a section; it is {target!r}.")
    # As in a run file: so that a later override can add a setting.
    target[keys[-1]] = {"auto": True} if keys == ["sharding"] and value == "auto" else value
    return ".".join(keys), text


def _without_unset(values: Mapping[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Return the settings without each null of an option or section that does not take null: it has its default."""
    kept = dict(values)
    for name, field in section.model_fields.items():
        key = field.alias or name
        if key not in kept:
            continue
        nested = section_in(field)
        if kept[key] is None and types.NoneType not in get_args(field.annotation):
            del kept[key]
        elif nested is not None and isinstance(kept[key], Mapping):
            kept[key] = _without_unset(kept[key], nested)
    return kept


def _as_text(key: str, typed: str) -> str:
    """Return a hint how to write an override whose value is text that YAML would parse differently."""
    quoted = json.dumps(typed, ensure_ascii=False)
    return f"If it is meant as text, write {shlex.quote(f'{key}={quoted}')}"


def _resolve_files(values: Mapping[str, Any], directory: Path, *, reads_data: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with absolute paths, and a problem for each path that does not exist and will be read."""
    resolved, known = copy.deepcopy(dict(values)), options()
    problems = []
    for key, settings, name in list(_leaves(resolved)):
        option, value = known.get(re.sub(r"^data\.sets\.[^.]+", "data.sets.*", key)), settings[name]
        if option is None or option.names in (None, "place") or not isinstance(value, str):
            continue
        candidates = list(dict.fromkeys(Path(base, value).absolute() for base in (directory, Path.cwd())))
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        if found is not None:
            settings[name] = str(found)
        elif option.names != "model" and not reads_data:
            continue
        elif option.names == "file" or not HUB_ID.fullmatch(value):
            tried = " and ".join(str(candidate) for candidate in candidates)
            problems.append(f"{key}: {value!r} does not exist; tried {tried}")
    return resolved, problems


def _leaves(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yield the dotted key of each plain setting, the section that holds it, and its name there."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", values, name


def _explain(details: Any, typed: Mapping[str, str]) -> str:
    """Describe one problem: key, expected value and actual value; ``typed`` are the overrides."""
    key = ".".join(str(part) for part in details["loc"])
    kind = details["type"]
    if kind == "extra_forbidden":
        return _explain_unknown(key, details["input"])
    if kind == "missing":
        return f"{key}: is required"
    message = details["msg"].removeprefix("Value error, ")
    if kind == "value_error":  # raised by the schema's own checks, whose message contains the values
        return f"{key}: {message}" if key else message
    message = message.removeprefix("Input should be ")
    problem = f"{key}: expected {message}; got {details['input']!r}"
    if kind == "literal_error":
        choices, given = re.findall(r"'([^']*)'", details["ctx"]["expected"]), str(details["input"])
        other = _VALUES.get(given.lower())
        near = other if other in choices else _nearest_choice(given, choices)
        return problem if near is None else f"{problem}; did you mean {near}?"
    if kind not in _TEXT_WANTED or key not in typed:
        return problem
    return f"{problem} (as YAML reads {typed[key]}). {_as_text(key, typed[key])}"


def _explain_unknown(key: str, value: Any) -> str:
    """Describe an unknown key, with its name here or the most similar key."""
    if (answer := _other_name(key, value)) is not None:
        return f"{key}: {answer}"
    section = key.rpartition(".")[0]
    known = [other for other, _ in fields_of(RunConfig)]
    if of_set := re.match(r"data\.sets\.[^.]+", section):
        known = [other.replace("data.sets.*", of_set.group()) for other in known if "*" in other]
    known = [other for other in known if "*" not in other]
    nearest = _nearest_key(key, known)
    if nearest is None:
        siblings = [other for other in known if other.rpartition(".")[0] == section]
        return f"{key}: unknown key; {section or 'the run file'} has {', '.join(siblings)}"
    return f"{key}: unknown key; did you mean {nearest}?"


_ALIKE, _ALIKE_ELSEWHERE = 0.6, 0.75
"""How similar a name must be to one of the same section, and of another, from 0 to 1."""


def _nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the key of any section whose name, or name in other programs, is most similar; None if none is.

    The same name in another section is nearer than a similar one in the same.
    """
    section, _, name = key.lower().rpartition(".")
    asked = {name, f"{section.rpartition('.')[2]}_{name}"}  # model.name is model_name in other programs
    best, nearest = 0.0, None
    for other in known:
        where, _, leaf = other.rpartition(".")
        option = options().get(re.sub(r"^data\.sets\.[^.]+", "data.sets.*", other))
        names = (leaf.lower(), *(() if option is None else option.also))
        alike = max(difflib.SequenceMatcher(None, one, there).ratio() for one in asked for there in names)
        beside = where.lower() == section
        if section.startswith(f"{other.lower()}.") or section == other.lower():
            continue  # the key is in that section
        if alike >= (_ALIKE if beside else _ALIKE_ELSEWHERE) and (rank := alike + 0.01 * beside) > best:
            best, nearest = rank, other
    return nearest


def _nearest_choice(value: str, known: Iterable[str]) -> str | None:
    """Return the choice that is most similar to a value; None if none is."""
    by_case = {other.lower(): other for other in known}
    close = difflib.get_close_matches(value.lower(), by_case, n=1)
    return by_case[close[0]] if close else None


_REPLACED: Mapping[str, str] = {
    "bf16": "write training.precision: bf16",
    "dataloader_num_workers": "leave it out: batches are made from token ids in memory-mapped files",
    "deepspeed": "leave it out: the sharding section sets how the model is sharded",
    "do_eval": "leave it out: training.eval_strategy sets when to evaluate; fullshard evaluate only evaluates",
    "do_predict": "leave it out: fullshard predict writes predictions for a file",
    "do_train": "leave it out: fullshard train trains",
    "dtype": "write training.precision: fp32, bf16 or fp16",
    "fp16": "write training.precision: fp16, or bf16, which T5 needs",
    "fsdp": "leave it out: the sharding section sets how the model is sharded",
    "fsdp_config": "pass Accelerate's file as --config_file",
    "greater_is_better": "leave it out: it follows from the metric",
    "group_by_length": "write training.train_sampling_strategy: group_by_length, which is the default, or random",
    "ignore_pad_token_for_loss": "leave it out: padding never counts in the loss",
    "length_column_name": "leave it out: lengths are counted when the data is tokenized",
    "hub_model_id": "write training.push_to_hub: owner/name",
    "hub_private_repo": "write training.push_to_hub: {repo: owner/name, private: true}",
    "hub_token": "leave it out: the token is taken from HF_TOKEN or from hf auth login",
    "load_best_model_at_end": "leave it out: the best model by evaluation.metric is always kept",
    "load_in_4bit": "write model.quantization: nf4",
    "load_in_8bit": "write model.quantization: int8",
    "logging_dir": "leave it out: everything is written to output_dir",
    "no_cuda": "leave it out: without a GPU the run uses the CPU",
    "optim_args": "set the optimizer's options in training, such as training.adam_beta2",
    "overwrite_cache": "leave it out: the cache identifies data, tokenizer and settings by their content",
    "overwrite_output_dir": "write resume: never",
    "pad_to_max_length": "leave it out: batches are padded to their longest row, or not at all with training.packing",
    "predict_with_generate": "leave it out: metrics of text need generation, perplexity does not",
    "preprocessing_num_workers": "leave it out: tokenizing uses all cores",
    "save_safetensors": "leave it out: weights are always safetensors",
    "tf32": "leave it out: set torch's own variable in the environment",
    "tokenizer_name": "leave it out: a model's directory contains its tokenizer",
    "torch_dtype": "write training.precision: fp32, bf16 or fp16",
    "use_fast_tokenizer": "leave it out: the fast tokenizer is used if there is one",
    "use_peft": "write a model.adapter section",
}
"""Options that do not exist here, with what to do instead."""

_OPTIMIZERS: Mapping[str, str] = {
    "adafactor": "adafactor",
    "adamw": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_anyprecision": "adamw_bf16",
    "adamw_apex_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_fused": "adamw",
    "muon": "muon",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
}
"""Optimizer names of Hugging Face's Trainer, with their names here."""


def _other_name(key: str, value: Any) -> str | None:
    """Return what to write instead of another program's option, a dotted key and its value; None if none has it."""
    name = key.rpartition(".")[2].lower()
    if name == "optim":
        return _optimizer_name(value)
    if name in _REPLACED:
        return f"is not an option here; {_REPLACED[name]}"
    here = next((other for other, option in options().items() if name in option.also and other != key), None)
    if here is None:
        return None
    if isinstance(value, Mapping):
        return f"is called {here} here; write {here}"
    values = list(_values_here(here, value))
    refused = [_refusal(here, tried) for tried in values]
    fitting = next((tried for tried, why in zip(values, refused, strict=True) if why is None), None)
    if fitting is None:
        return f"is called {here} here, and that does not take it: {refused[0]}"
    return f"is called {here} here; write {here}: {_as_yaml(fitting)}"


_VALUES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "eval_loss": "perplexity",
    "float16": "fp16",
    "float32": "fp32",
    "loss": "perplexity",
    "true": "auto",  # of resume_from_checkpoint
}
"""Values of other programs' options, with those that mean the same here."""


def _values_here(key: str, value: Any) -> Iterator[Any]:
    """Yield what another program's value may be here: itself, without the prefix of metrics, or its name here."""
    text = str(value)
    yield value
    if isinstance(value, str):
        yield text.removeprefix("eval_")
    if text.lower() in _VALUES:
        yield _VALUES[text.lower()]
    if (choice := _nearest_choice(text.removeprefix("eval_"), _choices(key))) is not None:
        yield choice


def _choices(key: str) -> list[str]:
    field = next(field for other, field in fields_of(RunConfig) if other == key)
    return [choice for choice in get_args(field.annotation) if isinstance(choice, str)]


def _refusal(key: str, value: Any) -> str | None:
    """Return why an option does not take a value, by itself; None if it does."""
    parts, section = key.split("."), RunConfig
    for part in parts[:-1]:
        section = section_in(section.model_fields[part]) or section
    try:
        section.model_validate({parts[-1]: value})
    except ValidationError as error:
        found = next((one for one in error.errors() if one["loc"][:1] == (parts[-1],)), None)
        return None if found is None else _explain(found, {}).partition(": ")[2]
    return None


def _as_yaml(value: Any) -> str:
    """Return a plain value as a run file has it."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _optimizer_name(value: Any) -> str:
    """Return what to write instead of Hugging Face's ``optim: value``."""
    known = _OPTIMIZERS.get(str(value).lower())
    if known is not None:
        return f"is called training.optimizer here; write training.optimizer: {known}"
    there = ", ".join(dict.fromkeys(_OPTIMIZERS.values()))
    return f"is called training.optimizer here, and there is no {value}: it is one of {there}"
