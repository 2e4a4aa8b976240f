"""Adapters of peft: a few new parameters that are trained instead of the model's own, and where weights come from."""

from __future__ import annotations

import copy
import importlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fullshard.core.comm import Comm, together
from fullshard.core.engine import WantedTensor, WeightReader, WeightSource, wanted_tensors
from fullshard.core.engine.setup.weights import quantize_of
from fullshard.core.policy import Quantize
from fullshard.core.quantized import chosen_layers, format_of, keep_quiet, rounded
from fullshard.core.transformers_private import one_at_a_time
from fullshard.errors import InvariantError, ModelError
from fullshard.state.storage.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MISUSE = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, ImportError, AssertionError)
"""Exceptions that peft raises if its configuration does not match the model."""


COPY = re.compile(r"\.modules_to_save\.[^.]+\.")
"""Marks, in a parameter's name, a trained copy of a layer of the base model."""

_MERGE = (
    "Merge it into the model that it was trained over (peft: merge_and_unload(), then save_pretrained), name the "
    "result as the model, and train a new adapter over that."
)

_UNDER_ADAPTER = re.compile(r"(\.token_adapter)?\.base_layer\.|\.original_module\.")
"""Stands, in a parameter's name, for a dot of the base model's: the layer is under one of peft's."""


_AT_ONCE = 1 << 20  # elements


@dataclass(frozen=True)
class AdapterSpec:
    """Type and options of an adapter."""

    type: str  # ``lora``, ``dora``, ``ia3``, ``prompt`` or ``prefix``
    base: str  # directory or id of the model, recorded in the saved adapter
    r: int = 8  # rank of lora and dora
    lora_alpha: float = 16.0  # lora and dora are scaled by ``lora_alpha / r``
    lora_dropout: float = 0.0  # dropout before lora and dora
    # names of the modules that lora, dora and ia3 change, or ``all-linear``; None: peft's choice
    target_modules: tuple[str, ...] | str | None = None
    num_virtual_tokens: int = 20  # number of vectors of prompt and prefix
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of peft's configuration
    new_tokens: tuple[int, ...] = ()  # lora and dora: ids whose rows in the tables are trained too
    path: Path | None = None  # directory of a trained adapter to go on with, whose own settings apply; None: a new one


@dataclass(frozen=True)
class Adapted:
    """A model with its adapter."""

    model: Any  # peft's model around the base model, which is frozen
    # the adapter's initial values by their names in ``model``, if the base model is on the meta device; DoRA's
    # magnitudes, which are computed from the base's weights, are NaN, and copies of base layers are not among them;
    # tables of the base model that a trained adapter's file holds are
    values: Mapping[str, Tensor]
    # an adapter parameter without initial values, because peft computes them from weights and the base model is on the
    # meta device; None: there is none
    lacking: str | None
    trainable: int  # number of trainable elements
    total: int  # number of elements of all parameters, including the adapter's


def base_of(model: Any) -> PreTrainedModel:
    """Return the Hugging Face model inside an adapter, or the model itself if it has no adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def add_adapter(model: PreTrainedModel, spec: AdapterSpec, *, seed: int) -> Adapted:
    """Freeze a model and add an adapter to it, in place; any rank. The same seed gives the same values.

    Torch's global random state does not change. The adapter's parameters are on the CPU, even if the model is on the
    meta device.

    Args:
        model: On the CPU or the meta device, not sharded.
        spec: Type and options of the adapter.
        seed: Seed of the adapter's values.

    Raises:
        ModelError: peft is not installed, or the adapter does not match the model.
    """
    peft = import_peft("model.adapter")
    config = _peft_config(peft, spec, model) if spec.path is None else _saved_config(peft, spec.path, model)
    buffers = {id(buffer) for buffer in model.buffers()}
    stand_ins = _StandIns(model, spec.path)
    with _peft_context(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if spec.path is None:
                adapted = peft.get_peft_model(model, config)
            else:
                given = {"config": config, "is_trainable": True, "local_files_only": True}
                adapted = peft.PeftModel.from_pretrained(model, str(spec.path), **given)
        except (OSError, UserWarning, *_MISUSE) as error:
            if spec.path is not None:
                raise ModelError(f"The adapter in {spec.path} cannot be loaded: {error}") from error
            if stand_ins.exist:
                return Adapted(None, {}, f"{spec.type} ({error})", 0, 0)
            raise ModelError(
                f"peft cannot add {spec.type} to {type(model).__name__}: {error}. See model.adapter in the run file."
            ) from error
    stand_ins.require_unchanged()
    _require_parameters(adapted, config, buffers)
    _ignore_position_warning()
    config.base_model_name_or_path = spec.base
    values = stand_ins.replace(adapted)
    magnitudes = magnitude_layers(adapted)
    lacking = next((name for name, value in values.items() if value.isnan().any() and name not in magnitudes), None)
    counts = [(p.numel(), p.requires_grad) for p in adapted.parameters()]
    trainable = sum(numel for numel, trained in counts if trained)
    return Adapted(adapted.train(), values, lacking, trainable, sum(numel for numel, _ in counts))


def _row_targets(model: PreTrainedModel, spec: AdapterSpec) -> dict[str, list[int]]:
    """Return peft's ``trainable_token_indices`` for new tokens: the modules that have rows of them, by name.

    Raises:
        ModelError: peft would compute something else, or another option trains the table.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied, kind = getattr(model.config, "tie_word_embeddings", False), type(model).__name__
    # peft follows the configuration, by which every T5 is tied; in files with two tables transformers unties them.
    if (getattr(head, "weight", None) is table.weight) != tied or (model.config.is_encoder_decoder and not tied):
        raise ModelError(
            f"model.new_tokens: this {kind} has an output layer of its own, whose rows peft would not train apart from "
            "the embeddings. Train without an adapter, or leave new_tokens out."
        )
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            f"model.new_tokens: the output layer of {kind} has a bias, which peft leaves out of a layer with trained "
            "rows. Train without an adapter, or leave new_tokens out."
        )
    found = [name for name, one in model.named_modules() if one is table or (one is head and not tied)]
    targets = spec.target_modules if isinstance(spec.target_modules, tuple) else ()
    in_full = [*targets, *(spec.options.get("modules_to_save") or ())]
    twice = [one for one in in_full if any(f".{name}".endswith(f".{one}") for name in [*found, "lm_head"])]
    if twice:
        raise ModelError(
            f"model.new_tokens trains single rows of a table that model.adapter changes too, in {twice[0]}. Take that "
            "out of target_modules and modules_to_save, or leave new_tokens out."
        )
    return {name: list(spec.new_tokens) for name in found}


def _require_parameters(adapted: Any, config: Any, buffers: set[int]) -> None:
    """Raise if a part of the adapter cannot be sharded; ``buffers`` are the ids of the base model's."""
    if getattr(config, "target_modules_to_tie", None):
        raise ModelError(
            "model.adapter.options: ensure_weight_tying ties the factors of the embeddings and of "
            f"{', '.join(sorted(config.target_modules_to_tie))} by transposed views of the same memory, but each shard "
            "has memory of its own, so they would drift apart. Train the table itself (modules_to_save: "
            "[embed_tokens], with ensure_weight_tying), or take the embeddings out of target_modules."
        )
    kept = [
        f"{path}.{key}"
        for path, module in adapted.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and id(buffer) not in buffers and key not in module._non_persistent_buffers_set
    ]
    if kept:
        raise ModelError(
            f"model.adapter.options: this adapter changes {len(kept)} buffers in its forward, such as {kept[0]}. Each "
            "rank would change them by its own rows, so the result would differ from unsharded training. Choose an "
            "adapter whose state is in its parameters."
        )


def magnitude_layers(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Return, by name of each DoRA magnitude parameter over a matrix, peft's layer and its adapter's name."""
    found = {}
    for path, module in model.named_modules():
        layer: Any = module
        for adapter in getattr(layer, "lora_magnitude_vector", ()):
            # Embeddings are excluded because peft keeps their factors elsewhere, and convolutions are not matrices.
            if adapter in layer.lora_A and layer.get_base_layer().weight.dim() == 2:
                found[f"{path}.lora_magnitude_vector.{adapter}.weight"] = layer, adapter
    return found


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Compute with the base model alone inside the context; ``model`` is peft's, and may be sharded.

    peft's own ``disable_adapter`` changes which parameters are trained, which a sharded model refuses.
    """
    config = model.peft_config[model.active_adapter]
    if config.is_prompt_learning:
        with model.disable_adapter():
            yield
        return
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


def load_adapter(model: PreTrainedModel, directory: Path) -> tuple[Any, Mapping[str, Tensor]]:
    """Load the adapter that peft saved in a directory, around the base model on the CPU or the meta device; any rank.

    Returns:
        peft's model and, if the base model is on the meta device, the adapter's values by their names in it.

    Raises:
        ModelError: peft is not installed, or the adapter does not match the model.
    """
    peft = import_peft(f"{directory} is an adapter, which")
    stand_ins = _StandIns(model, directory)
    try:
        with _peft_context():
            adapted = peft.PeftModel.from_pretrained(model, str(directory), local_files_only=True)
    except (OSError, *_MISUSE) as error:
        raise ModelError(f"The adapter in {directory} cannot be loaded: {error}") from error
    _ignore_position_warning()
    return adapted, stand_ins.replace(adapted)


def _ignore_position_warning() -> None:
    """Suppress peft's warning, at each token, that positions are ignored; callers ensure they do not matter."""
    warnings.filterwarnings("ignore", message="Position ids are not supported for parameter efficient tuning")


@contextmanager
def _peft_context() -> Iterator[None]:
    """Run peft one thread at a time inside the context, without warnings that users cannot act on."""
    with one_at_a_time, warnings.catch_warnings():
        # peft sets the first automatically and warns about it; the second is peft's own use of a deprecated name.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        # They would keep random values.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        yield


class _StandIns:
    """Temporary CPU tensors with the shapes of a model's meta parameters, each a single NaN in memory.

    peft makes its parameters on the device of the model's and initializes them there. A NaN among their values means
    that peft computed them from the model's weights.
    """

    def __init__(self, model: nn.Module, directory: Path | None) -> None:
        """Put them into ``model``; those of tables that the adapter in ``directory`` holds get memory, to be loaded.

        Raises:
            ModelError: It holds a table of another shape than the model's.
        """
        self._originals: dict[int, nn.Parameter] = {}
        made: dict[int, nn.Parameter] = {}
        filled = set() if directory is None else _base_layers_in(directory, model)
        named = dict(model.named_parameters())
        self._before = {n: one.detach().clone() for n, one in named.items() if id(one) in filled and not one.is_meta}
        self._named = {name: named[name] for name in self._before}
        for module in model.modules():
            for key, param in module._parameters.items():
                if param is None or not param.is_meta:
                    continue
                if id(param) not in made:
                    # torch copies into memory that every element has of its own.
                    nan = torch.full(param.shape if id(param) in filled else (), math.nan, dtype=param.dtype)
                    made[id(param)] = nn.Parameter(nan.expand(param.shape))
                    self._originals[id(made[id(param)])] = param
                module._parameters[key] = made[id(param)]
        self._kept = list(made.values())

    @property
    def exist(self) -> bool:
        """True if the model had meta parameters."""
        return bool(self._kept)

    def require_unchanged(self) -> None:
        """Raise if loading the adapter has changed a layer of a base model that had values."""
        for name, before in self._before.items():
            if not torch.equal(before, self._named[name]):
                raise ModelError(_another(name))

    def replace(self, adapted: nn.Module) -> dict[str, Tensor]:
        """Restore the meta parameters; if there were stand-ins, return the others by name, and what was loaded."""
        loaded = {
            name: param.detach()
            for name, param in adapted.named_parameters(remove_duplicate=False)
            if id(param) in self._originals and param.is_contiguous() and not param.isnan().any()
        }
        for module in adapted.modules():
            for key, param in module._parameters.items():
                original = self._originals.get(id(param))
                if original is not None and param is not None:
                    original.requires_grad_(param.requires_grad)
                    module._parameters[key] = original
        copies: dict[int, nn.Parameter] = {}
        for name, module in adapted.named_modules():
            if COPY.search(f"{name}."):
                _without_memory(module, copies)
        if not self._kept:
            return {}
        named = adapted.named_parameters(remove_duplicate=False)
        return loaded | {name: param.detach() for name, param in named if not param.is_meta}


def _base_layers_in(directory: Path, model: nn.Module) -> set[int]:
    """Return the ids of the base model's parameters that an adapter's file holds.

    peft adds the tables if the adapter changes them, or if they were resized.

    Raises:
        ModelError: One has another shape in the file.
    """
    names = ("adapter_model.safetensors", "adapter_model.bin")
    file = next((directory / name for name in names if (directory / name).is_file()), None)
    if file is None:
        return set()  # peft says so
    held, found = dict(model.named_parameters(remove_duplicate=False)), set()
    for name, tensor in WeightFiles(file).tensors.items():
        plain = _UNDER_ADAPTER.sub(".", name).removeprefix("base_model.model.")
        param = held.get(plain)
        if param is None:
            continue
        if tuple(tensor.shape) != tuple(param.shape):
            raise ModelError(
                f"The adapter in {directory} holds {plain} of its base model with shape {tuple(tensor.shape)}, and the "
                f"model here has {tuple(param.shape)}: the adapter was trained after that table was resized. {_MERGE}"
            )
        found.add(id(param))
    return found


def _without_memory(copy: nn.Module, moved: dict[int, nn.Parameter]) -> None:
    """Move the parameters of a copied base layer that have no values yet to the meta device.

    ``moved`` has those that were moved before, by the old parameter's id: copies that peft tied stay tied.
    """
    for key, param in copy._parameters.items():
        if param is not None and param.isnan().any():
            if id(param) not in moved:
                moved[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            copy._parameters[key] = moved[id(param)]


def import_peft(what: str) -> Any:
    """Import peft on demand, because it takes more than a second; ``what`` names its user in the error. Any process.

    Raises:
        ModelError: It is not installed.
    """
    keep_quiet()
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ModelError(f"{what} needs peft: pip install peft ({error}).") from error


def _peft_config(peft: Any, spec: AdapterSpec, model: PreTrainedModel) -> Any:
    """Return peft's configuration of the adapter."""
    targets = spec.target_modules
    tuned = {"target_modules": list(targets) if isinstance(targets, tuple) else targets}
    virtual = {"num_virtual_tokens": spec.num_virtual_tokens}
    rows = {"trainable_token_indices": _row_targets(model, spec)} if spec.new_tokens else {}
    low_rank = {**rows, "r": spec.r, "lora_alpha": spec.lora_alpha, "lora_dropout": spec.lora_dropout, **tuned}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "lora": ("LoraConfig", low_rank),
        "dora": ("LoraConfig", {**low_rank, "use_dora": True}),
        "ia3": ("IA3Config", tuned),
        "prompt": ("PromptTuningConfig", virtual),
        "prefix": ("PrefixTuningConfig", {**virtual, **_prefix_shape(model)}),
    }
    class_name, values = kinds[spec.type]
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    twice = sorted((values.keys() | {"task_type", "inference_mode"}) & spec.options.keys())
    if twice:
        raise ModelError(f"model.adapter.options has {', '.join(twice)}, which {spec.type} sets itself. Remove it.")
    _require_supported(spec.options)
    # peft changes lists that it is given, and the run's settings are compared and recorded.
    options = copy.deepcopy(dict(spec.options))
    try:
        return getattr(peft, class_name)(task_type=task, **values, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise ModelError(f"peft's {class_name} does not accept model.adapter.options: {error}.") from error


def saved_adapter(directory: Path) -> tuple[str, str | None]:
    """Return the type of the adapter that peft saved in a directory, and its base model's name; any process.

    Raises:
        ModelError: Its ``adapter_config.json`` cannot be read, or it is of a type that is not trained here.
    """
    path = directory / "adapter_config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind, base = str(values["peft_type"]), values.get("base_model_name_or_path")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}.") from error
    lora = "dora" if values.get("use_dora") else "lora"
    found = {"LORA": lora, "IA3": "ia3", "PROMPT_TUNING": "prompt", "PREFIX_TUNING": "prefix"}.get(kind)
    if found is None:
        raise ModelError(f"{directory} is a {kind} adapter; a run can go on with lora, dora and ia3.")
    return found, base


def trains_rows(directory: Path) -> bool:
    """Return whether the adapter that peft saved in a directory has rows of single tokens; any process."""
    try:
        values = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the error comes where the adapter is loaded
    return isinstance(values, dict) and bool(values.get("trainable_token_indices"))


def _saved_config(peft: Any, directory: Path, model: PreTrainedModel) -> Any:
    """Return peft's configuration of a trained adapter."""
    try:
        config = peft.PeftConfig.from_pretrained(str(directory), local_files_only=True)
    except (OSError, *_MISUSE) as error:
        raise ModelError(f"peft cannot read {directory / 'adapter_config.json'}: {error}") from error
    _require_supported(config.to_dict())
    init = str(getattr(config, "init_lora_weights", None)).lower()
    if init not in ("none", "true", "false", "gaussian", "orthogonal"):
        raise ModelError(
            f"The adapter in {directory} was made with init_lora_weights: {init}, which changes the base model's "
            "weights too; a run cannot go on with it. Merge it into its base, and train a new adapter over that."
        )
    if config.is_prompt_learning:
        raise ModelError(
            f"The adapter in {directory} is a {config.peft_type.value} adapter, which peft loads for inference only; a "
            "run can go on with lora, dora and ia3."
        )
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    if str(config.task_type or task).rpartition(".")[2] != task:
        raise ModelError(f"The adapter in {directory} is for {config.task_type}, and {type(model).__name__} is {task}.")
    config.task_type = task
    return config


SPLIT_BASE = ("pissa", "olora")
"""Values of ``init_lora_weights`` that take the adapter's values out of the base's weights."""


def init_of(options: Mapping[str, Any]) -> str:
    """Return ``init_lora_weights`` of an adapter's options in lower case; ``none`` if it is not given."""
    return str(options.get("init_lora_weights")).lower()


def _require_supported(options: Mapping[str, Any]) -> None:
    """Raise if an option would be ignored, or would make an adapter that cannot be loaded again."""
    if str(options.get("bias", "none")).endswith("_only"):
        raise ModelError("model.adapter.options: bias must be none or all; fullshard does not save other choices.")
    if options.get("prefix_projection"):
        raise ModelError("model.adapter.options: prefix_projection is not supported; train the prefix itself.")
    init = str(options.get("init_lora_weights")).lower()
    if init in ("corda", "eva", "lora_ga"):
        raise ModelError(
            f"model.adapter.options: init_lora_weights: {init} takes its values from a pass over training rows, which "
            "fullshard does not make. Use pissa or olora, or leave it out."
        )
    if init.startswith("pissa_niter"):
        raise ModelError(
            f"model.adapter.options: init_lora_weights: {init} draws random numbers, which peft draws again when the "
            "adapter is loaded, over another base model then. Use pissa, which draws none."
        )


def _prefix_shape(model: PreTrainedModel) -> dict[str, int]:
    """Return the shape of the prefix of an encoder-decoder's decoder: peft would use the encoder's."""
    config = model.config
    if not config.is_encoder_decoder:
        return {}
    layers = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
    width = heads * config.d_kv if hasattr(config, "d_kv") else config.d_model
    return {"num_layers": layers or config.num_hidden_layers, "num_attention_heads": heads, "token_dim": width}


class AdapterWeights:
    """Weight source for ``fully_shard(peft_model, weights=AdapterWeights(Pretrained(path), values))``, one per rank."""

    def __init__(self, base: WeightSource, values: Mapping[str, Tensor]) -> None:
        """Keep the adapter's values as long as this object exists.

        ``base`` has the tensor names of the model without an adapter. ``values`` have those of peft's model; they are
        the same on every rank. Copies of base layers that are trained are read from ``base`` if they are not among
        them.
        """
        self._base, self._values = base, values

    @property
    def quantize(self) -> Quantize | None:
        """Quantisation of the base model's linear layers."""
        return quantize_of(self._base)

    def open(self, model: Any, wanted: list[WantedTensor]) -> WeightReader:
        """See :meth:`fullshard.core.engine.WeightSource.open`; CheckpointError if the files do not fit the base."""
        under = model.get_base_model()
        prefix = next(f"{path}." for path, module in model.named_modules() if module is under)
        plain: dict[str, str] = {}
        of_base, held = [], {}
        names_of = {name: one.names for one in wanted for name in one.names}
        for one in wanted:
            # A copy begins with the values of the layer that it copies, to which other layers may be tied.
            original = COPY.sub(".original_module.", one.names[0])
            loaded = one.names[0] in self._values
            # peft may register the input embedding a second time, outside of the model.
            inside = [n.removeprefix(prefix) for n in names_of.get(original, one.names) if n.startswith(prefix)]
            renamed = [_UNDER_ADAPTER.sub(".", name) for name in inside]
            if loaded and renamed and original == one.names[0]:
                held[renamed[0]] = self._values[original]
                of_base.append(replace(one, names=renamed, required=False))
            if loaded:
                continue
            if not renamed:
                raise InvariantError(f"{one.names[0]} belongs neither to the adapter nor to its base model.")
            plain |= dict.fromkeys(one.names, renamed[0])
            of_base.append(replace(one, names=renamed))
        reader = self._base.open(under, of_base)
        for name, values in held.items():
            if reader.has(name):
                _require_same_layer(name, values, reader)
        return _Reader(reader, plain, self._values)

    def compute_magnitudes(self, model: Any, comm: Comm) -> None:
        """Compute DoRA's magnitudes, the norms of the weights as training sees them; every rank, before sharding.

        Each rank reads the weights of some layers, one at a time, and quantises and dequantises those that will be
        quantised. Magnitudes that already have values, such as a trained adapter's, are kept.

        Args:
            model: peft's model on the meta device, with the adapter on the CPU.
            comm: The ranks to shard over.

        Raises:
            CheckpointError: The files do not fit the base model, or cannot be read.
        """
        layers = magnitude_layers(model)
        due = [name for name in layers if name in self._values and self._values[name].isnan().any()]
        if not due:
            return
        found: dict[str, Tensor] = {}
        mine = together(comm, lambda: self._magnitudes(model, due[comm.rank :: comm.size]))
        for part in comm.all_gather_object(mine):
            found |= part
        for name in due:
            self._values[name].copy_(found[name])

    def _magnitudes(self, model: Any, names: list[str]) -> dict[str, Tensor]:
        """Return the magnitudes with these names."""
        layers, wanted = magnitude_layers(model), wanted_tensors(model)
        reader = self.open(model, wanted)
        name_of = {id(layer): path for path, layer in model.named_modules()}
        quantised = set() if self.quantize is None else {id(one) for one in chosen_layers(model, self.quantize)}
        found = {}
        for name in names:
            layer, adapter = layers[name]
            base = layer.get_base_layer()
            values = torch.empty(base.weight.shape, dtype=base.weight.dtype)
            reader.read(f"{name_of[id(base)]}.weight", 0, values.view(-1))
            if self.quantize is not None and id(base) in quantised:
                values = rounded(format_of(self.quantize), values, values.dtype)
            holder = nn.Module()
            holder.weight = nn.Parameter(values, requires_grad=False)
            factors = {"lora_A": layer.lora_A[adapter].weight, "lora_B": layer.lora_B[adapter].weight}
            magnitude = layer.lora_magnitude_vector[adapter]
            kept = magnitude.weight
            # peft's own formula, which is also that of its layers over bitsandbytes'.
            with torch.no_grad():
                magnitude.update_layer(base_layer=holder, scaling=layer.scaling[adapter], **factors)
            found[name], magnitude.weight = magnitude.weight.detach(), kept
        return found


def _require_same_layer(name: str, values: Tensor, base: WeightReader) -> None:
    """Raise if a layer that the adapter's file holds is another in the ``base``: a run saves its adapter without it."""
    for low in range(0, values.numel(), _AT_ONCE):
        here = values.view(-1)[low : low + _AT_ONCE]
        base.read(name, low, there := torch.empty_like(here))
        if not torch.equal(there, here):
            raise ModelError(_another(name))


def _another(name: str) -> str:
    """Return the error for a layer of the base model that the adapter's file holds with other values."""
    return (
        f"The adapter holds {name} of its base model with other values than the model has that is named here: it was "
        f"trained over another one, or with a changed table. {_MERGE}"
    )


class _Reader:
    """Reads each tensor from the files or from the adapter's values."""

    def __init__(self, base: WeightReader, plain: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
        """Read from ``base`` under the names that ``plain`` gives, or from ``values``."""
        self._base, self._plain, self._values = base, plain, values

    def has(self, name: str) -> bool:
        """See :meth:`fullshard.core.engine.WeightReader.has`."""
        return name in self._values or (name in self._plain and self._base.has(self._plain[name]))

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See :meth:`fullshard.core.engine.WeightReader.read`."""
        if name in self._values:
            out.copy_(self._values[name].reshape(-1)[start : start + out.numel()])
        else:
            self._base.read(self._plain[name], start, out)
