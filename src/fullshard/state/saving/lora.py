"""peft's tensor names: which tensors of a model are its adapter's, and how LoRA factors merge into the base model.

A layer of ``base_model.model.decoder.q`` with LoRA is stored as ``decoder.q.base_layer.weight`` and
``decoder.q.lora_A.default.weight``, ``decoder.q.lora_B.default.weight``; an embedding as ``lora_embedding_A.default``;
a fully trained module as ``head.original_module.weight`` and ``head.modules_to_save.default.weight``. A vector
of IA3 is ``q.ia3_l.default``; those of prompt and prefix tuning, outside of the base model, are
``prompt_encoder.default.embedding.weight``. Trained rows of a table are
``embed_tokens.token_adapter.trainable_tokens_delta.default``, and the table itself is
``embed_tokens.token_adapter.base_layer.weight``.

A checkpoint that holds only an adapter is merged over its base model, whose files are read one weight at a time. A
weight that was quantised is quantised and dequantised again, so that the adapter is added to the numbers it was trained
on; other weights are used as stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullshard.core.policy import Quantize
from fullshard.core.quantized import format_of, rounded
from fullshard.errors import CheckpointError
from fullshard.state.saving.pieces import MODEL
from fullshard.state.storage import Base, TensorEntry, WeightFiles, require_base

ADAPTER_CONFIG_NAME = "adapter_config.json"

TIED_NAME = "adapter_tied.json"
"""Small file of a checkpoint whose adapter has tied copies of layers: see ``tied_copies``."""

_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.(?P<kind>lora_\w+)\.(?P<adapter>[^.]+)(?P<end>(?:\.[^.]+)*)")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<end>.+)")
_VECTORS = re.compile(r"(?P<module>.+)\.(?P<kind>ia3_l)\.(?P<adapter>[^.]+)")
_PROMPT = re.compile(r"prompt_encoder\.(?P<adapter>[^.]+)\.embedding\.weight")
_TOKENS = re.compile(r"(?P<module>.+\.token_adapter)\.(?P<kind>trainable_tokens_delta)\.(?P<adapter>[^.]+)")
_TOKEN_ADAPTER = ".token_adapter"
_PROMPTS = {"PROMPT_TUNING", "PREFIX_TUNING"}
_ADAPTERS = {"LORA", "IA3", *_PROMPTS}
_FACTORS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}
_MAGNITUDE = "lora_magnitude_vector"

_REMEDY = "Export it with --adapter and merge it with peft (PeftModel.from_pretrained(…).merge_and_unload())."

# fmt: off
_HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "trainable_token_indices", "use_rslora",
))
# fmt: on
"""Settings with which merging is W + scaling * B @ A, and rows of tokens; any other would change the merged weight."""


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of a tensor: ``scaling * left @ right``."""

    left: str  # stored name of the factor with the tensor's rows
    right: str  # stored name of the factor with its columns
    # whether ``left`` is stored as (rank, rows) and ``right`` as (columns, rank), as for a tensor that is stored as
    # (inputs, outputs); else (rows, rank) and (rank, columns)
    transposed: bool
    scaling: float  # the scalar factor
    magnitude: str | None = None  # DoRA: stored name of the norms that the sum's rows get; None: the sum stays


@dataclass(frozen=True)
class NewRows:
    """Trained rows of a table, which replace its own."""

    values: str  # stored name of the rows
    indices: tuple[int, ...]  # their places in the table


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an export."""

    name: str  # its name in the exported files
    source: str  # its name in the checkpoint
    update: LowRank | NewRows | None = None  # its change; None: none


def holds_adapter(names: Iterable[str]) -> bool:
    """Return True if any of a model's tensors has a name that peft gives to an adapter's."""
    for name in names:
        match = _LORA.fullmatch(name)
        is_factor = match is not None and match["kind"] in _FACTORS
        if is_factor or any(pattern.fullmatch(name) for pattern in (_VECTORS, _TOKENS, _PROMPT)):
            return True
    return False


def adapter_tensors(tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> list[ExportedTensor]:
    """Return the adapter's tensors as peft saves them: without the base model and without the adapter's name.

    ``tensors`` are those of the checkpoint's model, by name without ``model/``.

    Raises:
        CheckpointError: There is more than one adapter, or it is of a kind that is not exported.
    """
    return [ExportedTensor(saved, MODEL + name) for name, saved in adapter_names(tensors, config).items()]


def adapter_names(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of an adapter's tensors in ``adapter_model.safetensors``, by their names in the model.

    Raises:
        CheckpointError: There is more than one adapter, or it is of a kind that is not exported.
    """
    names = list(names)
    _require_one_adapter(names, config)
    # peft puts no module of its own around a model whose prompt it trains.
    prefix = "" if config["peft_type"] in _PROMPTS else _PREFIX
    found = {}
    for name in names:
        saved = _saved_name(name, config)
        if saved is not None:
            found[name] = prefix + saved.removeprefix(prefix)
    return found


def _saved_name(name: str, config: Mapping[str, Any]) -> str | None:
    """Return a tensor's name without the adapter's name; None if the tensor is the base model's."""
    lora, trained = _LORA.fullmatch(name), _SAVED.fullmatch(name)
    vectors = _VECTORS.fullmatch(name) or _TOKENS.fullmatch(name)
    if _PROMPT.fullmatch(name):
        return "prompt_embeddings"
    if vectors is not None:
        return f"{vectors['module']}.{vectors['kind']}"
    if lora is not None:
        # peft omits the suffix of DoRA's magnitudes.
        end = "" if lora["kind"] == _MAGNITUDE else lora["end"]
        return f"{lora['module']}.{lora['kind']}{end}"
    if trained is not None:
        return f"{trained['module']}.{trained['end']}"
    return name if name.endswith(".bias") and config.get("bias") == "all" else None


def merged_tensors(
    tensors: Mapping[str, TensorEntry], config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> list[ExportedTensor]:
    """Return the base model's tensors with the adapter merged into them.

    Args:
        tensors: Tensors of the checkpoint's model, by name without ``model/``.
        config: The adapter's configuration.
        model_config: The model's configuration; empty if not known.

    Raises:
        CheckpointError: Merging takes more than adding ``scaling * B @ A``; the message states the remedy.
    """
    _require_one_adapter(tensors, config)
    _require_plain_lora(config)
    factors, rows = _factors(tensors), _rows(tensors, config)
    trained = {f"{m['module']}.{m['end']}": name for name in tensors if (m := _SAVED.fullmatch(name)) is not None}
    merged = []
    for name, entry in tensors.items():
        if _LORA.fullmatch(name) or _TOKENS.fullmatch(name) or ".original_module." in name:
            continue
        match = _SAVED.fullmatch(name)
        module, is_base, end = name.rpartition(".base_layer.")
        plain = f"{match['module']}.{match['end']}" if match else f"{module}.{end}" if is_base else name
        update: LowRank | NewRows | None = None
        if is_base and end == "weight" and module in rows:
            update, plain = rows.pop(module), f"{module.removesuffix(_TOKEN_ADAPTER)}.{end}"
        elif is_base and end == "weight" and module in factors:
            update = _low_rank(module, factors.pop(module), entry, tensors, config)
        if match is not None or isinstance(update, LowRank):
            _require_untied(plain, entry, model_config)
        merged.append(ExportedTensor(plain.removeprefix(_PREFIX), MODEL + name, update))
    untrained = {name: re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", name) for name in trained.values()}
    lost = [f"{module}.weight" for module in (*factors, *rows)]
    lost += [plain for plain, name in trained.items() if untrained[name] not in tensors]
    if lost:
        raise CheckpointError(
            f"{lost[0]} shares its base weight with another tensor, so the merged model would have one tensor more "
            f"than the base model: it cannot be merged here. {_REMEDY}"
        )
    return merged


def merged_updates(
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    entry_of: Callable[[str], TensorEntry],
) -> dict[str, LowRank | NewRows]:
    """Return the update of each weight that an adapter changes, by its name in the base model.

    Args:
        tensors: Tensors of a checkpoint without the base model, by name without ``model/``.
        config: The adapter's configuration.
        model_config: The model's configuration; empty if not known.
        entry_of: Returns the shape and dtype of a weight of the base model.

    Raises:
        CheckpointError: Merging takes more than adding ``scaling * B @ A`` and DoRA's magnitudes; the message states
            the remedy.
    """
    _require_one_adapter(tensors, config)
    # Here a weight is merged as one piece, so that the norms of its rows can be computed.
    _require_plain_lora({name: value for name, value in config.items() if name != "use_dora"})
    matches = [match for name in tensors if (match := _LORA.fullmatch(name))]
    magnitudes = {match["module"]: match[0] for match in matches if match["kind"] == _MAGNITUDE}
    updates: dict[str, LowRank | NewRows] = {
        f"{module.removeprefix(_PREFIX).removesuffix(_TOKEN_ADAPTER)}.weight": rows
        for module, rows in _rows(tensors, config).items()
    }
    for module, found in _factors(set(tensors) - set(magnitudes.values())).items():
        name = f"{module.removeprefix(_PREFIX)}.weight"
        entry = entry_of(name)
        update = _low_rank(module, found, entry, tensors, config)
        if module in magnitudes:
            update = _with_magnitude(module, update, magnitudes[module], tensors)
        elif config.get("use_dora"):
            raise CheckpointError(f"{module} has no {_MAGNITUDE}, and use_dora is set: the checkpoint lacks it.")
        updates[name] = update
        _require_untied(name, entry, model_config)
    return updates


def _rows(tensors: Iterable[str], config: Mapping[str, Any]) -> dict[str, NewRows]:
    """Return the trained rows of tables, by the name of peft's layer."""
    given = config.get("trainable_token_indices") or {}
    found = {}
    for match in (match for name in tensors if (match := _TOKENS.fullmatch(name))):
        layer = match["module"].removesuffix(_TOKEN_ADAPTER)
        named = given if isinstance(given, list) else next(ids for key, ids in given.items() if layer.endswith(key))
        found[match["module"]] = NewRows(MODEL + match[0], tuple(named))
    return found


def trained_copies(tensors: Mapping[str, TensorEntry], model_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fully trained tensor for each tensor of the base model that it replaces, by its name there.

    Raises:
        CheckpointError: Other tensors are tied to it.
    """
    found = {
        f"{m['module']}.{m['end']}".removeprefix(_PREFIX): name for name in tensors if (m := _SAVED.fullmatch(name))
    }
    for plain, name in found.items():
        _require_untied(plain, tensors[name], model_config)
    return found


def _require_one_adapter(names: Iterable[str], config: Mapping[str, Any]) -> None:
    if config.get("peft_type") not in _ADAPTERS:
        raise CheckpointError(
            f"{ADAPTER_CONFIG_NAME} has peft_type {config.get('peft_type')!r}; {', '.join(sorted(_ADAPTERS))} are "
            "saved. Load the checkpoint into the model with fullshard.load_checkpoint and save it with peft."
        )
    names = list(names)
    patterns = (_LORA, _SAVED, _VECTORS, _TOKENS, _PROMPT)
    matches = [match for name in names for pattern in patterns if (match := pattern.fullmatch(name))]
    adapters = sorted({match["adapter"] for match in matches})
    if len(adapters) != 1:
        raise CheckpointError(
            f"The model has adapters {', '.join(adapters)}; only a single adapter can be saved. Load the checkpoint "
            "into it with fullshard.load_checkpoint and save it with peft."
        )


def _require_plain_lora(config: Mapping[str, Any]) -> None:
    if config["peft_type"] != "LORA":
        raise CheckpointError(f"The adapter has peft_type {config['peft_type']!r}; only LORA is merged here. {_REMEDY}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"The adapter trains biases (bias={config['bias']!r}), which only peft merges. {_REMEDY}")
    special = sorted(name for name, value in config.items() if value and name not in _HARMLESS)
    if special:
        raise CheckpointError(
            f"The adapter computes more than W + scaling * B @ A ({', '.join(f'{n}={config[n]!r}' for n in special)}); "
            f"only peft merges that. {_REMEDY}"
        )


def _with_magnitude(module: str, update: LowRank, name: str, tensors: Mapping[str, TensorEntry]) -> LowRank:
    """Return an update with DoRA's magnitudes.

    Raises:
        CheckpointError: They are not one for each row of a linear layer's weight.
    """
    rows = tensors[update.left.removeprefix(MODEL)].shape[0]
    if update.transposed or tensors[name].shape != (rows,):
        raise CheckpointError(
            f"{module}: DoRA is merged here only for linear layers, with a magnitude for each of {rows} rows; found "
            f"{tensors[name].shape}. {_REMEDY}"
        )
    return replace(update, magnitude=MODEL + name)


def _factors(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of the factors by module and kind.

    Raises:
        CheckpointError: A module does not have exactly the two factors.
    """
    factors: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _LORA.fullmatch(name)
        if match is not None:
            factors.setdefault(match["module"], {})[match["kind"] + (".bias" if match["end"] == ".bias" else "")] = name
    for module, found in factors.items():
        if set(found) not in ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}):
            raise CheckpointError(f"{module} has {', '.join(sorted(found))}; only A and B can be merged. {_REMEDY}")
    return factors


def _low_rank(
    module: str,
    found: Mapping[str, str],
    base: TensorEntry,
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
) -> LowRank:
    """Return the update that the factors of one module make to its weight.

    Raises:
        CheckpointError: Shapes do not fit, or contradict the configuration.
    """
    a, b = (found[kind] for kind in sorted(found))
    shapes = tensors[a].shape, tensors[b].shape
    # An embedding's weight has a row for each input, like a layer's with fan_in_fan_out.
    transposed = a.rpartition(".lora_")[2].startswith("embedding") or bool(config.get("fan_in_fan_out"))
    fits = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][0] == shapes[1][1]
    expected = None
    if fits:
        expected = (shapes[0][1], shapes[1][0]) if transposed else (shapes[1][0], shapes[0][1])
    if expected != base.shape:
        raise CheckpointError(
            f"{module}: A {shapes[0]} and B {shapes[1]} do not make an update of its weight {base.shape} with "
            f"fan_in_fan_out={config.get('fan_in_fan_out')}: it is not a plain linear layer or embedding. {_REMEDY}"
        )
    scaling = _scaling(module.removeprefix(_PREFIX), shapes[0][0], config)
    left, right = (a, b) if transposed else (b, a)
    return LowRank(MODEL + left, MODEL + right, transposed, scaling)


def _scaling(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return the scaling as peft computes it; ``rank`` is that of the factors, whatever ``rank_pattern`` is."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = next(
        (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)),
        config["lora_alpha"],
    )
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _require_untied(name: str, entry: TensorEntry, model_config: Mapping[str, Any]) -> None:
    """Refuse a trained embedding that shares its weight with the head: merging would change the head too."""
    vocab_size = model_config.get("vocab_size")
    tied = vocab_size is not None and model_config.get("tie_word_embeddings", True)
    if tied and len(entry.shape) == 2 and entry.shape[0] == vocab_size:
        raise CheckpointError(
            f"The adapter trains {name} of shape {entry.shape}, and the model ties its embeddings "
            f"(tie_word_embeddings): merged, a tied one would change with it. {_REMEDY}"
        )


class OverBase:
    """The tensors of a merged model, under the names that they have in the base model's files."""

    def __init__(
        self,
        base: Base,
        moved: Path | None,
        tensors: Mapping[str, TensorEntry],
        config: Mapping[str, Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Open the base model's files and match them with the adapter; no values are read.

        Args:
            base: The base model that the checkpoint names.
            moved: Its directory now; None: where the run read it.
            tensors: Tensors of the checkpoint's model, by name without ``model/``.
            config: The adapter's configuration.
            model_config: The model's configuration; empty if not known.

        Raises:
            CheckpointError: The base model is not there or has changed, or merging takes more than adding
                ``scaling * B @ A`` and DoRA's magnitudes.
            ConfigError: bitsandbytes is missing or too old.
        """
        directory = moved or Path(base.directory)
        remedy = "Give the directory where that model is now (--base DIR), or export with --adapter."
        require_base(directory, base.facts, "The checkpoint, which has the adapter alone,", remedy)
        self.files = WeightFiles(directory)
        self.format = format_of(Quantize(base.type, double_quant=base.double_quant))
        self.quantised = {self._stored(name) for name in base.layers}
        updates = merged_updates(tensors, config, model_config, self._entry)
        self.updates = {self._stored(module): update for module, update in updates.items()}
        for name, update in list(self.updates.items()):
            if isinstance(update, NewRows):  # a tied table may be stored under several names
                shape = self.files.tensors[name].shape
                alike = [one for one, entry in self.files.tensors.items() if entry.shape == shape]
                self.updates |= {
                    one: update for one in alike if one not in self.updates and self.files.equal(name, one)
                }
        self._words: int | None = model_config.get("vocab_size")
        copies = trained_copies(tensors, model_config)
        self.trained = {self._stored(plain): MODEL + name for plain, name in copies.items()}

    def _stored(self, name: str) -> str:
        """Return the stored name of a tensor of the model, which may lack the model's prefix or have another one."""
        if name in self.files.tensors:
            return name
        found = [one for one in self.files.tensors if one.endswith(f".{name}") or name.endswith(f".{one}")]
        if len(found) != 1:
            raise CheckpointError(f"The base model in {self.files.path} has no tensor {name}: it is another model.")
        return found[0]

    def _entry(self, name: str) -> TensorEntry:
        found = self.files.tensors[self._stored(name)]
        return TensorEntry(str(found.dtype).removeprefix("torch."), tuple(found.shape), ())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the merged model, in which tables may have more rows."""
        shape, update = tuple(self.files.tensors[name].shape), self.updates.get(name)
        if isinstance(update, NewRows):
            return max(shape[0], max(update.indices) + 1), *shape[1:]
        return (1, self._words) if name.endswith("final_logits_bias") and self._words else shape

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, flattened: in float32 if it is changed, and dequantised if it was quantised.

        New rows of a table are zero.
        """
        found = self.files.tensors[name]
        changes = name in self.quantised or name in self.updates
        dtype = torch.float32 if changes else found.dtype
        values = torch.zeros(torch.Size(self.shape(name)).numel(), dtype=dtype)
        self.files.read(name, 0, values[: torch.Size(found.shape).numel()])
        if name not in self.quantised:
            return values
        return rounded(self.format, values.view(found.shape), torch.float32).reshape(-1)
