"""Loading of pretrained weights into a sharded model: each rank reads its own elements of the files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from fullshard.core.engine import WantedTensor, load_weights, wanted_tensors
from fullshard.core.policy import Quantize
from fullshard.core.transformers_private import may_be_left_over, may_be_missing
from fullshard.errors import CheckpointError
from fullshard.state.storage import WeightFiles

_SHOWN = 5
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Pretrained:
    """Weights on this rank's disk, for ``fully_shard(model, weights=Pretrained(path))``; every rank makes its own.

    Tensor names are the model's, with or without a Hugging Face model's ``base_model_prefix``; a tied tensor may have
    any of its names. Tensors that the model ignores on purpose, such as buffers that it computes, may also be stored.
    Safetensors are read into place: a rank reads the bytes of its shards and needs 16 MiB in addition. ``.bin``,
    ``.pt`` and ``.pth`` files are mapped into memory: pages that a rank has read count as its memory until this object
    is freed, up to the size of its shards. Files from before torch 1.6 cannot be mapped: every rank reads all of them,
    with a warning.

    Attributes:
        path: The directory or file of the weights.
        quantize: How frozen linear layers are quantised, or None.
    """

    def __init__(self, path: str | Path, *, quantize: Quantize | None = None) -> None:
        """Set the path; nothing is read yet.

        Args:
            path: A local Hugging Face directory (safetensors first, then ``.bin``, one file or several with an index),
                or one ``.safetensors``, ``.bin``, ``.pt`` or ``.pth`` file.
            quantize: Quantise frozen linear layers of a model on the meta device, each rank the blocks of its shards.
        """
        self.path = Path(path)
        self.quantize = quantize
        self._files: WeightFiles | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this rank has read so far."""
        return 0 if self._files is None else self._files.bytes_read

    def names(self) -> list[str]:
        """Return the names of the stored tensors.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        return list(self._open_files().tensors)

    def open(self, model: nn.Module, wanted: list[WantedTensor]) -> FittedWeights:
        """Check names, shapes and dtypes against a model without reading values; no communication.

        Raises:
            CheckpointError: A file is missing or damaged, or names, shapes or dtypes do not fit the model.
        """
        files = self._open_files()
        fit = _match(files, model, wanted)
        problems = fit.name_problems()
        problems += [f"{_names(fit.misshapen)} of another shape or kind"] if fit.misshapen else []
        if problems:
            raise CheckpointError(
                f"The weights in {self.path} do not fit {type(model).__name__}: {'; '.join(problems)}. Nothing was "
                "changed. Build the model that was saved there (its config.json), or choose other weights."
            )
        return FittedWeights(files, fit.found)

    def misfit(self, model: nn.Module) -> str | None:
        """Return why the stored names are not the model's, or None; shapes are compared by :meth:`open`. Any rank.

        Args:
            model: An unsharded model; it is not changed.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        problems = _match(self._open_files(), model, wanted_tensors(model)).name_problems()
        return "; ".join(problems) or None

    def _open_files(self) -> WeightFiles:
        if self._files is None:
            self._files = WeightFiles(self.path)
        return self._files


class FittedWeights:
    """Stored weights under the names of one model."""

    def __init__(self, files: WeightFiles, found: dict[str, str]) -> None:
        """Read from ``files``; ``found`` maps the model's names to stored ones."""
        self._files = files
        self._found = found

    def has(self, name: str) -> bool:
        """See :meth:`fullshard.core.engine.WeightReader.has`."""
        return name in self._found

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See :meth:`fullshard.core.engine.WeightReader.read`.

        Raises:
            CheckpointError: A file changed, ends early, or cannot be read.
        """
        self._files.read(self._found[name], start, out)


def load(model: nn.Module, path: str | Path) -> None:
    """Replace the weights of a sharded model by pretrained ones, in place; every rank calls it.

    Each rank reads its own elements into its shards, so existing optimizers stay valid. See :class:`Pretrained`.

    Args:
        model: The sharded model.
        path: A local Hugging Face directory, or one ``.safetensors``, ``.bin``, ``.pt`` or ``.pth`` file.

    Raises:
        ShardingError: The model is not sharded.
        CheckpointError: The weights do not fit, and nothing has changed; or they cannot be read completely, and part of
            the model has changed. On every rank, with the same text.
    """
    load_weights(model, Pretrained(path))


@dataclass
class _Fit:
    """The match between stored tensors and a model's."""

    found: dict[str, str] = field(default_factory=dict)  # the stored name of each of the model's names that was found
    missing: list[str] = field(default_factory=list)  # the model's names that are not stored
    unexpected: list[str] = field(default_factory=list)  # stored names that are not the model's
    # names that are tied in the model but whose stored tensors differ
    differing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)  # tensors of another shape, or of a dtype that is not converted

    def name_problems(self) -> list[str]:
        """Describe mismatches of names."""
        problems = []
        if self.missing:
            problems.append(f"{_names(self.missing)} missing")
        if self.unexpected:
            problems.append(f"{_names(self.unexpected)} not the model's")
        if self.differing:
            problems.append(
                f"{_names(self.differing)} tied in the model but differently stored (tie_word_embeddings=False in its "
                "config unties embeddings)"
            )
        return problems


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"{len(names):,} tensor{'s' if len(names) > 1 else ''} ({shown}) {'are' if len(names) > 1 else 'is'}"


def _match(files: WeightFiles, model: nn.Module, wanted: list[WantedTensor]) -> _Fit:
    """Match stored tensors with requested ones; values are read only if one tied tensor is stored twice."""
    stored_as, unclaimed = _by_model_name(files.tensors, model, {name for one in wanted for name in one.names})
    ignored = _ignored_names(model)
    fit = _Fit(unexpected=[name for name in unclaimed if not ignored.search(name)])
    optional = _any_of(may_be_missing(model))
    for one in wanted:
        stored = list(dict.fromkeys(stored_as[name] for name in one.names if name in stored_as))
        if not stored:
            if one.required and not (one.buffer and optional.search(one.names[0])):
                fit.missing.append(one.names[0])
            continue
        fit.found |= dict.fromkeys(one.names, stored[0])
        wrong = [text for name in stored if (text := _misshape(files, name, one)) is not None]
        if wrong:
            fit.misshapen += wrong[:1]
        elif not all(files.equal(stored[0], other) for other in stored[1:]):
            fit.differing.append(" = ".join(stored))
    return fit


def _by_model_name(stored: Iterable[str], model: nn.Module, names: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return the stored name of each of the model's names, with or without the base model's prefix, and the rest."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    stored = list(stored)
    found = {name: name for name in stored if name in names}
    unclaimed = []
    for name in stored:
        if name in found:
            continue
        renamed = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        if renamed in names and renamed not in found:
            found[renamed] = name
        else:
            unclaimed.append(name)
    return found, unclaimed


def _misshape(files: WeightFiles, name: str, one: WantedTensor) -> str | None:
    """Return why a stored tensor cannot be read into the model's, or None."""
    stored = files.tensors[name]
    if stored.shape != one.shape:
        return f"{name}: {stored.shape} in the file, {one.shape} in the model"
    if stored.dtype != one.dtype and not {stored.dtype, one.dtype} <= _FLOATS:
        return f"{name}: {stored.dtype} in the file, {one.dtype} in the model"
    return None


def _ignored_names(model: nn.Module) -> re.Pattern[str]:
    """Return a pattern of names that may be stored unrequested: those the class lists, and computed buffers."""
    computed = set()
    for path, module in model.named_modules():
        owner = path.rpartition(".")[2]
        for key in module._non_persistent_buffers_set:
            # Old checkpoints store them in every layer, although the model has only one for all.
            computed.add(rf"(^|\.){re.escape(f'{owner}.{key}' if owner else key)}$")
    return _any_of([*may_be_left_over(model), *sorted(computed)])


def _any_of(patterns: list[str]) -> re.Pattern[str]:
    """Return one pattern that matches what any of ``patterns`` matches; nothing if there are none."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
