"""The pieces of a saved state that one rank reads, whatever format it was saved in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from fullshard.core.engine import LocalTensor
from fullshard.core.optim.shards import holds_rows
from fullshard.core.optim.walk import require_same_values
from fullshard.core.quantized import quantisations
from fullshard.core.shards import rows_of
from fullshard.errors import CheckpointError
from fullshard.state.saving.parameter_state import ParameterState, saved_options
from fullshard.state.storage import Base, Piece, TensorSpec


class LoadPlan:
    """Pieces that one rank fills from a saved state; planned and checked first, so that a misfit changes nothing.

    fullshard's checkpoints, torch's distributed checkpoints and unsharded optimizer states are all loaded by it: the
    source describes its tensors by :class:`TensorSpec`, the plan lists which run of each goes where, the source reads
    ``constants`` for :meth:`compare` and then ``pieces``, and :meth:`finish` completes the model.

    Attributes:
        pieces: Runs to read, each under the tensor's name in the source, into training's own memory where it fits.
        constants: Runs to read and compare, each with the optimizer's tensor that is kept instead.
        loaded: New state and hyperparameters of each of the optimizer's parameters, for ``load_parameter_states``.
    """

    def __init__(self) -> None:
        """Start with an empty plan."""
        self.pieces: list[Piece] = []
        self.constants: list[tuple[Piece, torch.Tensor]] = []
        self.loaded: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        self._copies: list[LocalTensor] = []

    def add_model(
        self, held: Sequence[LocalTensor], stored: Mapping[str, TensorSpec], source: str, base: Base | None = None
    ) -> None:
        """Add this rank's runs of the model's parameters and buffers.

        Args:
            held: This rank's part of the model.
            stored: The model's tensors in the source, by their name in the model; a tied one under any of its names.
            source: Description of the source, for messages.
            base: Base model whose frozen weights are not stored but read from its files; None: all are stored.

        Raises:
            CheckpointError: Names or shapes do not match the model's.
        """
        ours, theirs = quantisations(local.name for local in held), quantisations(stored)
        if base is not None:
            theirs = [base.quantisation]
            held = [local for local in held if local.param is None or local.param.requires_grad]
        if ours != theirs:
            ours, theirs = (", ".join(one) or "none" for one in (ours, theirs))
            raise CheckpointError(
                f"{source} does not fit the model: its weights' quantisation is {theirs}, the model's {ours}. Build "
                "the model with the same Quantize(…) as before."
            )
        left = set(stored)
        missing, misshaped = [], []
        for local in held:
            names = (local.name, *local.aliases)
            name = next((name for name in names if name in left), None)
            left.difference_update(names)
            if name is None and prod(local.shape) == 0:
                continue  # tensors without elements are not written
            if name is None:
                missing.append(local.name)
            elif stored[name].shape != local.shape:
                misshaped.append(f"{name} {stored[name].shape} instead of {local.shape}")
            elif local.tensor.numel():
                self.pieces.append(Piece(stored[name].name, local.shape, local.start, local.tensor, local.block))
                if local.tensor.data_ptr() != local.home.data_ptr():
                    self._copies.append(local)
        problems = [
            f"{len(names)} {what}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            for what, names in (
                ("missing", missing),
                ("not in the model", sorted(left)),
                ("of another shape", misshaped),
            )
            if names
        ]
        if problems:
            raise CheckpointError(f"{source} does not fit the model. Tensors {'; '.join(problems)}.")

    def add_optimizer(
        self,
        own: Sequence[ParameterState],
        states: Mapping[str, Mapping[str, Any]],
        groups: Iterable[Mapping[str, Any]],
    ) -> None:
        """Add this rank's runs of the optimizer's state.

        Args:
            own: The parameters that the optimizer steps on this rank.
            states: Saved state by parameter name and key: a :class:`TensorSpec` for a tensor, else the value.
            groups: The saved groups: hyperparameters, and the names of their parameters under ``params``.

        Raises:
            CheckpointError: A tensor has another shape than the optimizer's, the state is another optimizer's, or the
                parameters were saved in other groups.
        """
        options = {name: group for group in groups for name in group["params"]}
        for one, its_options in zip(own, saved_options(own, options), strict=True):
            saved = states.get(one.saved_name(states), {})
            self.loaded.append((self._new_state(one, saved, its_options), its_options))

    def _new_state(self, one: ParameterState, saved: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        specs = {key: value for key, value in saved.items() if isinstance(value, TensorSpec)}
        parts = {key: one.part_of_saved(key, spec.shape) for key, spec in specs.items()}
        kinds = {key: specs[key].dtype if key in specs else value for key, value in saved.items()}
        constants = one.require_same_kind(options, kinds)
        if not holds_rows(one.param):
            # A rank without elements of a parameter does not count its steps: a loaded count would differ permanently.
            return dict(one.state)
        state = dict(saved)
        for key, spec in specs.items():
            part = parts[key]
            start, block = (0, None) if part is None else (part.held[0], part.block)
            if key in constants:
                # Every parameter may share this tensor: it is compared and kept, never read into.
                state[key] = constants[key]
                read = torch.empty(constants[key].numel(), dtype=spec.dtype)
                self.constants.append((Piece(spec.name, spec.shape, start, read), constants[key]))
            else:
                state[key] = room = one.room(key, part, spec.dtype, options)
                self.pieces.append(Piece(spec.name, spec.shape, start, rows_of(room).view(-1), block))
        return state

    def compare(self) -> None:
        """Compare ``constants``, once they are read; on every rank before anything is read into place.

        Raises:
            CheckpointError: One has other values than the optimizer's.
        """
        for piece, known in self.constants:
            require_same_values(piece.name, piece.tensor.view(known.shape), known)

    def finish(self) -> None:
        """Complete the model, once all pieces are read: copy what could not be read in place."""
        with torch.no_grad():
            for local in self._copies:
                local.home.copy_(local.tensor.view(local.home.shape))
