"""A trained model: finding it, the settings it was trained with, and loading it over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.core.comm import Comm, together
from fullshard.errors import ConfigError, ModelError
from fullshard.program.config import ModelConfig, RunConfig, option_of, recorded_base
from fullshard.program.models import AdapterWeights, load_adapter, load_model, resolve_model, tokenizer_of, trains_rows
from fullshard.program.train.setup.devices import Devices, usable
from fullshard.program.train.setup.model import choose_loader, make_model, shard_model
from fullshard.program.train.setup.quantization import quantization_notes
from fullshard.state.storage import require_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BEST_NAME = "best"
"""Directory in a run's ``output_dir`` with its best model so far."""

ADAPTER_NAME = "adapter_config.json"
"""File that peft writes with an adapter."""


@dataclass(frozen=True)
class Trained:
    """A trained model on disk."""

    directory: Path  # directory of the model or the adapter
    base: Path  # directory of the model, or of an adapter's base model; it has the tokenizer
    config: RunConfig  # the settings it was trained with, except that ``model`` names this model
    # what the run recorded of the quantised base model: name, digest; None: there is none or nothing was recorded
    recorded: Mapping[str, str] | None = None


def find_trained(path_or_id: str, config: RunConfig | None = None, moved: Path | None = None) -> Trained:
    """Find a model; any process, before there are ranks, because a model on the Hub may be downloaded.

    Args:
        path_or_id: Directory of a model or of a peft adapter, or the id of a model on the Hub.
        config: The settings it was trained with; None: not known.
        moved: Where an adapter's quantised base model is now; None: where the adapter says.

    Raises:
        ConfigError: ``moved`` is given, but the model is not an adapter over a quantised base model.
        ModelError: There is no model.
    """
    directory = resolve_model(path_or_id)
    if not _holds_model(directory):
        best = directory / BEST_NAME
        if _holds_model(best):
            raise ModelError(
                f"{directory} is a run that has not finished and has no model yet. Pass its best model so far: {best}."
            )
        raise ModelError(
            f"{directory} has no model (neither config.json nor {ADAPTER_NAME}). A run saves its model there at its "
            "end. Give the directory of a model."
        )
    base, recorded = directory, None
    if (directory / ADAPTER_NAME).is_file():
        recorded = recorded_base(directory)
        base = _find_base(directory, moved if recorded is not None else None)
    if moved is not None and recorded is None:
        raise ConfigError(
            f"--base is for an adapter that a run trained over a quantised base model. {directory} is not one."
        )
    values: dict[str, Any] = {"path": str(base)}
    if config is None:
        plain = {"output_dir": directory, "model": values, "data": {"train_file": "-", "separator": ""}}
        config = RunConfig.model_validate({**plain, "training": {"eval_strategy": "no"}})
    else:
        before = config.model.model_dump(by_alias=True)
        kept = [name for name in before if option_of(f"model.{name}").travels]
        if base != directory and (config.model.quantization is not None or trains_rows(directory)):
            values["adapter"] = {"path": str(directory)}  # rows are read with the tokens that it brings
            kept += ["quantization"]
        model = ModelConfig.model_validate({**values, **{name: before[name] for name in kept}})
        config = config.model_copy(update={"model": model})
    return Trained(directory, base, config, recorded)


def _find_base(directory: Path, moved: Path | None) -> Path:
    """Return the directory of an adapter's base model."""
    if moved is not None:
        return moved
    name = str(_read_adapter_config(directory / ADAPTER_NAME)["base_model_name_or_path"])
    try:
        return resolve_model(name)
    except ModelError as error:
        raise ModelError(
            f"{directory} is an adapter over {name}, which is not found. If that model was quantised and has moved, "
            f"give the directory where it is now: --base DIR. {error}"
        ) from error


def _holds_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", ADAPTER_NAME))


def load_trained(trained: Trained, comm: Comm) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[str, ...]]:
    """Load a model sharded as in training, in evaluation mode, with its tokenizer and notes; every rank calls it.

    Raises:
        UserError: It cannot be loaded or sharded; on every rank, with the same text.
    """
    recorded = trained.recorded
    config, told = usable(trained.config, Devices.of_ranks(comm))
    plain = config.speed.model_copy(update={"ways": ()})  # ways are for training, perhaps on another device
    full_rows = config.sharding.model_copy(update={"sequence_parallel": 1})  # nothing is kept for a backward
    config = config.model_copy(update={"speed": plain, "sharding": full_rows})
    if recorded is not None:
        together(comm, lambda: _require_base(trained, recorded) if comm.rank == 0 else None)
    tokenizer = together(comm, lambda: _tokenizer_of(trained))
    if config.model.quantization is not None:
        model, weights = together(comm, lambda: _over_quantised(trained, tokenizer))
        notes = quantization_notes(config)
        shard_model(model, config, comm, weights=weights)
    elif trained.directory != trained.base:
        model = together(comm, lambda: _with_adapter(trained, tokenizer))
        notes = (f"{trained.directory} is an adapter; its base model {trained.base} was loaded in full on every rank",)
        shard_model(model, config, comm)
    else:
        skeleton = together(comm, lambda: make_model(config, tokenizer))
        model, weights, notes = together(comm, lambda: choose_loader(skeleton, config, tokenizer))
        shard_model(model, config, comm, weights=weights)
    return model.eval(), tokenizer, (*told, *notes)


def _require_base(trained: Trained, recorded: Mapping[str, str]) -> None:
    """Check on rank 0, for all ranks, that the base model's files are those that the run quantised."""
    remedy = "Give the directory where that model is now: --base DIR."
    require_base(trained.base, recorded, f"The adapter in {trained.directory}", remedy)


def _tokenizer_of(trained: Trained) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; if an adapter's base has no chat template, use the one saved with the adapter."""
    tokenizer = tokenizer_of(trained.base, trained.directory)
    own = trained.directory / "chat_template.jinja"
    if tokenizer.chat_template is None and own.is_file():
        try:
            tokenizer.chat_template = own.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{own} cannot be read: {error}.") from error
    return tokenizer


def _with_adapter(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load the full model on the CPU, with its adapter."""
    settings = trained.config.model
    kind, attention = settings.model_class, settings.attn_implementation
    grow = trained.config.seed if trains_rows(trained.directory) else None  # its own values replace those of new rows
    model = load_model(trained.base, tokenizer, model_class=kind, attention=attention, grow=grow)
    return load_adapter(model, trained.directory)[0]


def _over_quantised(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, AdapterWeights]:
    """Load the adapter over the base's skeleton, whose weights are read and quantised by shards."""
    skeleton = make_model(trained.config, tokenizer)
    skeleton, weights, _ = choose_loader(skeleton, trained.config, tokenizer)
    assert weights is not None, "a base that is loaded in full is refused"
    model, values = load_adapter(skeleton, trained.directory)
    return model, AdapterWeights(weights, values)


def _read_adapter_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict) or "base_model_name_or_path" not in values:
        raise ModelError(f"{path} does not name the adapter's base model (base_model_name_or_path).")
    return values
