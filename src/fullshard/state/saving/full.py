"""Writing a sharded model as a Hugging Face directory, streamed through one rank a few megabytes at a time.

A thread of that rank writes, so that ranks never wait for a disk inside a collective; quantised weights are dequantised
while they are streamed.
"""

from __future__ import annotations

import copy
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from fullshard.core.comm import Mesh, await_all
from fullshard.core.engine import RUNS_BYTES, Run, SavedTensor, full_runs, mesh_of, plain_name, saved_tensors
from fullshard.core.policy import dtype_name
from fullshard.core.quantized import QuantizedLinear
from fullshard.errors import CheckpointError
from fullshard.state.saving.earlier_names import add_earlier_names
from fullshard.state.saving.lora import TIED_NAME, adapter_names
from fullshard.state.saving.pieces import plan_save
from fullshard.state.saving.read_back import read_back
from fullshard.state.storage import (
    ADAPTER_NAME,
    SafetensorsWriter,
    TensorSpec,
    WeightsWriter,
    atomic_directory,
    parse_size,
)

T = TypeVar("T")

JOIN_SECONDS = 10.0
"""Seconds that an abandoned writer waits for its thread to delete what it has written."""


class _GivenUpError(Exception):
    """Raised in the thread when the caller has failed and no longer needs what it writes."""


class BackgroundWriter(Generic[T]):
    """One thread that writes items in the order they are given; a context manager, on the rank that writes.

    Attributes:
        done_bytes: Bytes written so far.
        failure: The exception that ended the thread; None while it runs and after success.
    """

    def __init__(self, opened: AbstractContextManager[Callable[[T], int]], *, most: int) -> None:
        """Prepare; the thread starts on entry.

        Args:
            opened: Entered and exited in the thread; yields a function that writes one item and returns its bytes.
            most: Most items that may be waiting or being written when :meth:`room` reports room for another one.
        """
        self.done_bytes = 0
        self.failure: BaseException | None = None
        self._opened = opened
        self._most = most
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._given = self._finished = 0
        self._given_up = self._ended = False
        self._changed = threading.Condition()
        # Daemon: a disk that never responds must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="fullshard-writer", daemon=True)

    def __enter__(self) -> BackgroundWriter[T]:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the thread; after an error, including Ctrl-C, make it stop and delete what it has written."""
        self._given_up = kind is not None
        self.end()
        self._thread.join(JOIN_SECONDS)

    def give(self, item: T) -> None:
        """Queue an item, which must not change before it is written."""
        self._given += 1
        self._queue.put(item)

    def end(self) -> None:
        """Signal that no more items follow."""
        self._queue.put(None)

    def room(self, seconds: float) -> str | None:
        """Wait for at most ``seconds`` until another item may be given.

        Returns:
            ``""`` if it may; None if not yet; the error's text if the thread has failed.
        """
        return self._wait(lambda: self._given - self._finished <= self._most, seconds)

    def outcome(self, seconds: float) -> str | None:
        """Wait for at most ``seconds`` until everything is written; only after :meth:`end`.

        Returns:
            ``""`` if it is; None if not yet; the error's text if the thread has failed.
        """
        return self._wait(lambda: False, seconds)

    def _wait(self, enough: Callable[[], bool], seconds: float) -> str | None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self._ended or enough(), timeout=seconds)
        if self.failure is None:
            return "" if reached else None
        known = isinstance(self.failure, CheckpointError)
        return str(self.failure) if known else f"Rank 0 could not write the model: {self.failure!r}."

    def _run(self) -> None:
        """Write items until the end; runs in the thread."""
        try:
            with self._opened as write:
                while True:
                    item = self._queue.get()
                    if self._given_up:
                        raise _GivenUpError
                    if item is None:
                        break
                    nbytes = write(item)
                    with self._changed:
                        self.done_bytes += nbytes
                        self._finished += 1
                        self._changed.notify_all()
        except BaseException as error:
            self.failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass(frozen=True)
class _Layer:
    """A quantised layer, by its names in the model."""

    module: QuantizedLinear
    weight: str
    scales: str


class Dequantised:
    """The quantised layers of a model that is written in its unquantised form."""

    def __init__(self, model: nn.Module) -> None:
        """Find the quantised layers; any rank."""
        self._layers: dict[str, _Layer] = {}
        self._scales: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                prefix = plain_name(f"{path}." if path else "")
                names = prefix + "weight", prefix + module.format.scales
                self._layers[prefix + module.format.codes] = _Layer(module, *names)

    def tensors(self, saved: list[SavedTensor]) -> dict[str, SavedTensor]:
        """Return the tensors of the files by the name of the model's tensor that is streamed for each."""
        scales = {layer.scales for layer in self._layers.values()}
        found = {one.names[0]: one for one in saved if one.names[0] not in scales}
        for name, layer in self._layers.items():
            found[name] = SavedTensor((layer.weight,), layer.module.shape, layer.module.weight_dtype, is_parameter=True)
        return found

    def collect(self, model: nn.Module, limit_bytes: int) -> None:
        """Gather the complete scales on rank 0, which keeps them; every rank calls it.

        Their size is 1/31 of the codes with double quantisation, otherwise 1/8.
        """
        if not self._layers:
            return
        wanted = {layer.scales: layer.module.format.scales_bytes(layer.module.shape) for layer in self._layers.values()}
        for runs in full_runs(model, limit_bytes, names=frozenset(wanted)):
            for name, start, flat in runs:
                if name in wanted:
                    held = self._scales.setdefault(name, torch.empty(wanted[name], dtype=torch.uint8))
                    held[start : start + flat.numel()].copy_(flat)

    def run(self, run: Run) -> Run:
        """Return a streamed run of codes as the run of weights that it encodes; others unchanged; rank 0."""
        name, start, flat = run
        layer = self._layers.get(name)
        if layer is None:
            return run
        module = layer.module
        scales = self._scales[layer.scales]
        return name, *module.format.dequantise_run(flat, start, scales, module.shape, module.weight_dtype)


_STREAM_BYTES = RUNS_BYTES * 3 // 4
"""Size of the stream's buffers; the remainder is for casts."""

_WAITING = 2
"""Steps that may be waiting or being written while the next one is gathered."""


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "50GB",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the full model in Hugging Face's format, for ``from_pretrained(directory)``; every rank calls it.

    The files are those of ``save_pretrained``: ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``, with each parameter once, under its first name, and the persistent buffers; and
    the configuration of a Hugging Face model. Of a model with a peft adapter only the adapter is written, for
    ``PeftModel.from_pretrained(base, directory)``. Quantised weights are written dequantised, without an adapter's.

    Rank 0 writes in a thread, with 64 MB in addition to its shards, whatever the size of the model. The directory
    appears, or is replaced, atomically at the end. No collective lasts as long as the disk takes.

    Args:
        model: The sharded model.
        directory: The model's directory, on rank 0's file system.
        tokenizer: Also saved by its own ``save_pretrained``, if given.
        dtype: Dtype of floating tensors in the files, such as ``torch.bfloat16`` or ``"bf16"``; None: the shards'.
        max_shard_size: Most bytes of tensors in a file (a larger tensor has its own), or text such as ``"5GB"``.
        progress: Called repeatedly with the bytes written and the total bytes, on rank 0, in this thread.

    Raises:
        ShardingError: The model is not sharded.
        ConfigError: ``dtype`` is not a floating dtype, or ``max_shard_size`` not a size.
        CheckpointError: Rank 0 could not write, there is more than one adapter, or ``from_pretrained`` would not give
            this model: the files of a Hugging Face model are read back, without values. On every rank, with the same
            text. The directory's previous content is unchanged.
    """
    mesh = mesh_of(model)
    content = _content(model, dtype, parse_size(max_shard_size))
    if mesh.rank != 0:
        problem = _stream(model, mesh, content, None, None)
        if problem:
            raise CheckpointError(problem)
        return
    opened = _open_directory(model, Path(directory), tokenizer, content)
    with BackgroundWriter(opened, most=_WAITING) as writer:

        def report() -> None:
            if progress is not None:
                progress(writer.done_bytes, content.total_bytes)

        problem = _stream(model, mesh, content, writer, report)
    if problem:
        raise CheckpointError(problem) from writer.failure


def write_assets(model: Any, directory: Path, *, tokenizer: Any = None, dtype: torch.dtype | None = None) -> None:
    """Write the files that ``from_pretrained`` needs besides weights: configuration, generation settings, tokenizer.

    For a model with peft adapters these are the base model's configuration and ``adapter_config.json``.

    Args:
        model: The sharded model; one that is not from transformers has no configuration to write.
        directory: Existing directory.
        tokenizer: Saved by its own ``save_pretrained``, if given.
        dtype: Dtype of the weights in the configuration; None: that of the first floating parameter.

    Raises:
        OSError: The file system refused. Hugging Face's writers may raise others.
    """
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        kept = (one.dtype for one in saved_tensors(model) if one.is_parameter and one.dtype.is_floating_point)
        dtype = dtype or next(kept, None)
        # As save_pretrained records it, but in a copy, because training continues with the model's own configuration.
        config = copy.deepcopy(model.config)
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        config.architectures = [type(base).__name__]
        config.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        config.save_pretrained(directory)
        _tell_other_readers(directory / "config.json", model)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    _write_adapter_config(model, directory)
    tied = tied_copies(model)
    if tied:
        (directory / TIED_NAME).write_text(json.dumps(tied, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _tell_other_readers(path: Path, model: Any) -> None:
    """Add to a saved configuration what only transformers 5 finds out by itself; it reads it as its own.

    Others tie an output layer by the configuration, by which every T5 is tied, even if the files have two tables, and
    they look for the base of rotary embeddings under its earlier names.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    if _has_own_head(model) and not values.get("scale_decoder_outputs"):
        values["tie_word_embeddings"] = False
    add_earlier_names(model.config, values)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _has_own_head(model: Any) -> bool:
    """Return whether the output layer has weights of its own, that no other layer has too."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if not hasattr(base, "get_output_embeddings") or base.get_output_embeddings() is None:
        return False
    head = base.get_output_embeddings()
    if head is base.get_input_embeddings():
        return False
    paths = tuple(
        f"{plain_name(path)}." for path, module in model.named_modules(remove_duplicate=False) if module is head
    )
    own = [[name.startswith(paths) for name in one.names] for one in saved_tensors(model)]
    return not any(any(inside) and not all(inside) for inside in own)


def check_saving(model: Any, tokenizer: Any) -> None:
    """Save a model that has no values, to nowhere; one process, without communication.

    Raises:
        CheckpointError: A checkpoint or the finished model could not be saved.
    """
    plan_save(model, None, gradients=False)
    if _adapters(model):
        _adapter_names(model, {one.names[0]: one for one in saved_tensors(model)})
    try:
        with tempfile.TemporaryDirectory() as directory:
            write_assets(model, Path(directory), tokenizer=tokenizer)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"The configuration or the tokenizer cannot be saved, and so neither could the trained model: {error}"
        ) from error


def tied_copies(model: Any) -> dict[str, str]:
    """Return each name in an adapter's file whose tensor has another name before it, with the first name in the model.

    peft ties trained copies of layers (``ensure_weight_tying``) and expects each of them in the file.
    """
    if not _adapters(model):
        return {}
    names = _adapter_names(model, {one.names[0]: one for one in saved_tensors(model)})
    return {alias: first for first, (_, *others) in names.items() for alias in others}


def _adapter_names(model: Any, saved: Mapping[str, SavedTensor]) -> dict[str, list[str]]:
    """Return the names of each of the adapter's tensors in its file, by the tensor's first name in the model."""
    # A module that is registered twice is saved once; two modules of one parameter are two entries.
    modules = {plain_name(path) for path, _ in model.named_modules()}
    wanted = {
        first: [name for name in one.names if name == first or name.rpartition(".")[0] in modules]
        for first, one in saved.items()
    }
    config = model.peft_config[_adapters(model)[0]].to_dict()
    found = adapter_names([name for names in wanted.values() for name in names], config)
    kept = {first: [found[name] for name in names if name in found] for first, names in wanted.items()}
    return {first: names for first, names in kept.items() if names}


def _write_adapter_config(model: Any, directory: Path) -> None:
    for adapter in _adapters(model):
        config = copy.copy(model.peft_config[adapter])
        config.inference_mode = True  # as peft writes it
        config.save_pretrained(directory)


def _adapters(model: Any) -> list[str]:
    """Return the names of the active adapters; none for a model without peft."""
    return list(model.active_adapters) if hasattr(model, "peft_config") else []


@dataclass(frozen=True)
class _Content:
    """The full tensors that a save writes, unlike the pieces of a checkpoint."""

    dequantised: Dequantised  # quantised layers, which are written as plain ones
    # the stored tensors by the first name in the model: a tied one once, but each copy of an adapter's
    specs: dict[str, list[TensorSpec]]
    adapter: bool  # whether only an adapter is written
    dtype: torch.dtype | None  # dtype of floating tensors in the files; None: each one's own
    max_file_bytes: int  # most bytes of tensors in a file
    parameters: int  # number of elements of the model's parameters

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(spec.size_bytes for spec in self.ordered)

    @property
    def ordered(self) -> list[TensorSpec]:
        """All stored tensors, in the order of the files."""
        return [spec for specs in self.specs.values() for spec in specs]


def stream_start(model: nn.Module, steps: int) -> None:
    """Stream the first ``steps`` steps of a full save to rank 0 and write nothing, for plans; every rank calls it.

    All buffers exist from the first step on.
    """
    for _ in islice(_runs(model, _content(model, None, parse_size("50GB"))), steps):
        pass


def _runs(model: nn.Module, content: _Content) -> Iterator[list[Run]]:
    return full_runs(model, _STREAM_BYTES, ahead=_WAITING, names=frozenset(content.specs))


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of tensors that :func:`save` writes of a sharded model; any rank, no communication."""
    return _described(model, None, parse_size("50GB")).total_bytes


def _content(model: Any, dtype: torch.dtype | str | None, max_file_bytes: int) -> _Content:
    """Return what a save writes; every rank calls it, because scales of quantised weights are gathered on rank 0."""
    content = _described(model, dtype, max_file_bytes)
    if not content.adapter:
        content.dequantised.collect(model, _STREAM_BYTES)
    return content


def _described(model: Any, dtype: torch.dtype | str | None, max_file_bytes: int) -> _Content:
    """Return what a save writes, without the scales of quantised weights; no communication."""
    name = dtype_name(dtype)
    wanted: torch.dtype | None = None if name is None else getattr(torch, name)

    dequantised = Dequantised(model)
    saved = dequantised.tensors(saved_tensors(model))  # by the streamed name
    names = {name: [tensor.names[0]] for name, tensor in saved.items()}
    adapters = _adapters(model)
    if adapters:
        names = _adapter_names(model, saved)
    saved = {name: tensor for name, tensor in saved.items() if name in names}

    def specs_of(name: str, tensor: SavedTensor) -> list[TensorSpec]:
        cast = wanted if tensor.dtype.is_floating_point else None
        return [TensorSpec(stored, tensor.shape, cast or tensor.dtype) for stored in names[name]]

    parameters = sum(prod(tensor.shape) for tensor in saved.values() if tensor.is_parameter)
    specs = {name: specs_of(name, tensor) for name, tensor in saved.items()}
    return _Content(dequantised, specs, bool(adapters), wanted, max_file_bytes, parameters)


@contextmanager
def _open_directory(
    model: Any, directory: Path, tokenizer: Any, content: _Content
) -> Iterator[Callable[[list[Run]], int]]:
    """Create the directory on exit without an error; yields a function that writes runs and returns their bytes."""
    specs, ordered = content.specs, content.ordered
    with atomic_directory(directory) as temporary:
        if content.adapter:
            _write_adapter_config(model, temporary)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            files = SafetensorsWriter(temporary / ADAPTER_NAME, ordered)
        else:
            write_assets(model, temporary, tokenizer=tokenizer, dtype=content.dtype)
            files = WeightsWriter(
                temporary, ordered, max_file_bytes=content.max_file_bytes, parameters=content.parameters
            )
        with files:

            def write(runs: list[Run]) -> int:
                wanted = [content.dequantised.run(run) for run in runs if run[0] in specs]
                done = 0
                for name, start, flat in wanted:
                    for spec in specs[name]:
                        files.write_run(spec.name, start, flat)
                        done += flat.numel() * spec.dtype.itemsize
                return done

            yield write
        read_back(temporary, model)


def _stream(
    model: nn.Module,
    mesh: Mesh,
    content: _Content,
    writer: BackgroundWriter[list[Run]] | None,
    report: Callable[[], None] | None,
) -> str:
    """Stream the content to rank 0's ``writer``, and wait until it is on disk.

    Returns:
        Rank 0's error text, the same on every rank; ``""`` if there was none.
    """

    def agree(ask: Callable[[float], str | None] | None) -> str:
        """Wait in short exchanges until rank 0's writer has an answer, so that no collective waits for the disk."""

        def poll(seconds: float) -> str | None:
            answer = "" if ask is None else ask(seconds)
            if report is not None:
                report()
            return answer

        return await_all(mesh, poll)[0]

    for runs in _runs(model, content):
        if writer is not None:
            writer.give(runs)
        problem = agree(writer.room if writer else None)
        if problem:
            return problem
    if writer is not None:
        writer.end()
    return agree(writer.outcome if writer else None)
