"""The reference of preferences: log-probabilities of all completions under the model at the start of a run.

They are computed once, before the first step, and kept in the data cache; no second model is in memory.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fullshard.core.comm import Comm, together
from fullshard.errors import CheckpointError, DataError, ModelError
from fullshard.program.config import RUN_NAME, RunConfig
from fullshard.program.data import CollateSpec, EpochPlan, TokenizedSet
from fullshard.program.models import SPLIT_BASE, init_of, resolve_adapter, resolve_model, without_adapter
from fullshard.program.train.evaluation.evaluate import evaluation_mode, logps_of_rows
from fullshard.program.train.setup.devices import Devices, smallest_memory, usable
from fullshard.program.train.setup.model import prepare_model, shard_model
from fullshard.program.train.setup.prepare import Prepared, collate_spec
from fullshard.program.train.setup.resume import deciding_settings
from fullshard.state.storage import content_of, read_json
from fullshard.user_cache import default_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DECIDING = ("seed", "training.precision", "training.fp8_scales", "training.tf32", "speed.ways")
"""Settings that log-probabilities depend on, besides all of the model and the data."""


def with_reference(
    model: PreTrainedModel,
    config: RunConfig,
    data: Prepared,
    comm: Comm,
    collate: CollateSpec,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Prepared, str]:
    """Return a run's data with the reference's log-probabilities, and a note for the user; every rank calls it.

    Those in the cache are taken if they are of the same model, data, precision and versions of libraries.

    Args:
        model: The sharded model with the weights that the run starts with.
        config: The run's settings.
        data: The run's data.
        comm: The ranks.
        collate: Padding and the kind of model, as in evaluations.
        progress: Called with this rank's batches done and in total.

    Raises:
        DataError: The cache cannot be written; on every rank.
    """
    sets = [one for one in (data.train_set, data.held_out_set) if one is not None]
    num_rows = sum(map(len, sets))
    file = together(comm, lambda: _file(config, data) if comm.rank == 0 else None)
    found: NDArray[np.float64] | None = comm.all_gather_object(_read(file, num_rows))[0]
    what = "from the cache" if found is not None else "computed before the first step"
    if found is None:
        # As small as both, so that it needs no more memory than the planned step or the planned evaluation.
        size = min(config.training.per_device_train_batch_size, config.training.per_device_eval_batch_size)
        with _reference(model, config):
            found = _computed(model, sets, comm, collate, size, progress)
        values = found
        together(comm, lambda: None if file is None else _write(file, values))
    train, held_out = np.split(found, [len(data.train_set)])
    data = replace(data, train_set=replace(data.train_set, reference=train))
    note = f"reference: {num_rows:,} log-probabilities under the model at the start, {what}"
    return _with_held_out(data, held_out), note


def _reference(model: PreTrainedModel, config: RunConfig) -> AbstractContextManager[None]:
    """Return a context in which ``model``, with the values of the start, is the reference.

    That is the model without a new adapter. With one whose values are factors of the base's weights, what is left of
    these is no model: both together are the base. A trained adapter is part of the reference, as in TRL.
    """
    adapter = config.model.adapter
    if adapter is None or adapter.path is not None or init_of(adapter.options) in SPLIT_BASE:
        return nullcontext()
    return without_adapter(model)


def _with_held_out(data: Prepared, reference: NDArray[np.float64]) -> Prepared:
    """Return the data whose held-out rows, and those of each set of a mixture, have the reference's values."""
    if data.held_out_set is None:
        return data
    rows, sets = data.held_out_set, [one for one in data.sets if one.held_out_set is not None]
    parts = np.split(reference, np.cumsum(rows.set_rows)[:-1]) if rows.set_rows else [reference]
    own = dict(zip((one.name for one in sets), parts, strict=True))
    return replace(
        data,
        held_out_set=replace(rows, reference=reference),
        sets=tuple(
            one
            if one.held_out_set is None
            else replace(one, held_out_set=replace(one.held_out_set, reference=own[one.name]))
            for one in data.sets
        ),
    )


def with_held_out_reference(config: RunConfig, data: Prepared, comm: Comm) -> Prepared:
    """Return rows to evaluate a trained model on with the reference's log-probabilities; every rank calls it.

    The model at the start of the run is read or made again for it, and freed.

    Args:
        config: The settings of the run, with the model that it started with.
        data: The rows, with the trained model's tokenizer.
        comm: The ranks.

    Raises:
        UserError: That model cannot be loaded, or is not what it was; on every rank.
    """
    assert data.held_out_set is not None, "there are rows to evaluate on"
    plain = config.speed.model_copy(update={"ways": ()})  # as the trained model is loaded
    config, _ = usable(config.model_copy(update={"speed": plain}), Devices.of_ranks(comm))
    together(comm, lambda: _require_unchanged(config) if comm.rank == 0 else None)
    memory = smallest_memory(comm)
    ready = together(comm, lambda: prepare_model(config, data.tokenizer, memory_bytes=memory))
    shard_model(ready.model, config, comm, weights=ready.weights)
    collate, size = collate_spec(data.tokenizer, causal=data.causal), config.training.per_device_eval_batch_size
    with _reference(ready.model, config):
        found = _computed(ready.model, [data.held_out_set], comm, collate, size, lambda done, total: None)
    del ready
    gc.collect()  # its hooks make cycles, and its shards would stay beside those of the trained model
    return _with_held_out(data, found)


def _require_unchanged(config: RunConfig) -> None:
    """Raise ModelError if a directory that a run started with has another content now."""
    try:
        content = read_json(config.output_dir / RUN_NAME).get("content", {})
    except FileNotFoundError:  # a run file, before its run
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The record of the run cannot be read: {error}.") from error
    places = {"model.path": (config.model.path, resolve_model)}
    if config.model.adapter is not None:
        places["model.adapter.path"] = (config.model.adapter.path, resolve_adapter)
    for key, (place, resolve) in places.items():
        if place is not None and key in content and content_of(resolve(place)) != content[key]:
            raise ModelError(
                f"{key}: {place} has changed since the run started with it, and is no longer the reference of "
                f"training.objective: {config.training.objective}. It was {content[key]}."
            )


def _computed(
    model: PreTrainedModel,
    sets: list[TokenizedSet],
    comm: Comm,
    collate: CollateSpec,
    batch_size: int,
    progress: Callable[[int, int], None],
) -> NDArray[np.float64]:
    """Return the log-probabilities of all rows of some sets, the same on every rank."""
    plans = [
        EpochPlan(len(one), comm.size, batch_size, training=False, lengths=one.lengths, together=one.together)
        for one in sets
    ]
    done, total = count(1), sum(one.num_batches for one in plans)
    with evaluation_mode(model):
        found = [
            logps_of_rows(model, rows, comm, collate, plan, lambda: progress(next(done), total))[0]
            for rows, plan in zip(sets, plans, strict=True)
        ]
    return torch.cat(found).numpy()


def _file(config: RunConfig, data: Prepared) -> Path:
    """Return the file of the cache whose name stands for everything that the log-probabilities depend on."""
    settings = deciding_settings(config, 1)
    kept = {key: value for key, value in settings.items() if key.startswith(("model.", "data.")) or key in _DECIDING}
    directories = [] if data.model_directory is None else [data.model_directory]
    adapter = config.model.adapter
    directories += [] if adapter is None or adapter.path is None else [resolve_adapter(adapter.path)]
    try:
        contents = [content_of(one) for one in directories]  # of a model on the Hub the settings have the name
    except OSError as error:
        raise DataError(f"The model at the start cannot be read: {error}.") from error
    sets = [one for one in (data.train_set, data.held_out_set) if one is not None]
    rows = [[len(one), one.source_ids.checksum(), one.target_ids.checksum()] for one in sets]
    versions = [version(name) for name in ("torch", "transformers", "tokenizers")]
    versions += [] if adapter is None else [version("peft")]
    parts = json.dumps([2, kept, contents, rows, versions], default=str, sort_keys=True)
    name = f"reference-{blake2b(parts.encode(), digest_size=16).hexdigest()}.npy"
    return (config.data.cache_dir or default_directory()) / name


def _read(file: Path | None, count: int) -> NDArray[np.float64] | None:
    """Return the values in a file; None if there is none, or it does not hold ``count`` finite numbers."""
    try:
        found = None if file is None else np.load(file)
    except (OSError, ValueError, EOFError):
        return None
    return found if found is not None and found.shape == (count,) and np.isfinite(found).all() else None


def _write(file: Path, values: NDArray[np.float64]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{file.stem}.", suffix=".tmp", delete=False) as made:
            np.save(made, values)
        os.replace(made.name, file)
    except OSError as error:
        raise DataError(
            f"The reference cannot be written to {file.parent}: {error}. Set data.cache_dir to a writable directory."
        ) from error
