"""The phases of a run around its steps, without memory or files: evaluation, text, saving, resuming; for its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fullshard.core.comm import Comm
from fullshard.core.engine import has_tables_at_home, mesh_of, unsharded
from fullshard.core.optim import ExponentialMovingAverage
from fullshard.core.torch_private import in_backward
from fullshard.planner import MemoryTracker
from fullshard.program.config import RunConfig
from fullshard.program.data import Batch
from fullshard.program.metrics import needs_text
from fullshard.program.models import base_of
from fullshard.program.train.evaluation.evaluate import evaluation_mode
from fullshard.program.train.evaluation.generation import GenerationSpec, generate
from fullshard.program.train.run.loop import saves_between_steps
from fullshard.program.train.setup.model import loss_sum
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.quantization import describe_quantization
from fullshard.state.saving.full import stream_start
from fullshard.state.saving.loading import resume_unread
from fullshard.state.saving.memory import needed_bytes, plan_rank
from fullshard.state.saving.pieces import HostCopies, plan_save, rng_piece
from fullshard.state.storage import Piece

_FULL_SAVE_STEPS = 16
"""Steps of a full save that are planned; all its buffers exist from the first one on."""

AT_ONCE = " at once"
"""End of the names of the phases of an evaluation in which all units stay gathered."""

_TOKENS = 3
"""Tokens whose memory determines that of all later ones: caches grow linearly, and masks at most quadratically."""


def assumed() -> float:
    """Return the assumed value of a number that a plan does not know.

    In backward a fused loss reads whether its gradients already include the expected factor: assume so. Elsewhere fp16
    reads whether anything overflowed: assume not, so that the step is not skipped.
    """
    return 1.0 if in_backward() else 0.0


class AroundSteps:
    """The phases of a run before, between and after its steps, for one rank whose tensors have no memory."""

    def __init__(self, config: RunConfig, data: Prepared, held_out: HeldOutBatches | None) -> None:
        """Store the run's data; ``held_out`` is None if it never evaluates."""
        self._config, self._data, self._held_out = config, data, held_out
        self._frozen = describe_quantization(config) is None
        self._writes = _Writing(GenerationSpec.of(data.settled(config)))

    def phases(
        self, model: Any, optimizer: Any, comm: Comm, average: ExponentialMovingAverage | None = None
    ) -> Mapping[str, Callable[[MemoryTracker], None]]:
        """Return the phases to plan after the steps of ``model``, by name."""
        averaged = nullcontext if average is None else average.applied
        held_out, causal = self._held_out, self._data.causal

        @torch.no_grad()
        def evaluate(_tracker: MemoryTracker) -> None:
            assert held_out is not None, "else there is no such phase"
            with evaluation_mode(model):
                loss_sum(model, held_out.loss.to(comm.device), causal=causal)

        def write(tracker: MemoryTracker) -> None:
            assert held_out is not None, "else there is no such phase"
            with evaluation_mode(model):
                self._writes.run(model, self._data.tokenizer, held_out.text.to(comm.device), tracker)

        def save(_tracker: MemoryTracker) -> None:
            self._pieces(model, optimizer, comm, average)
            with averaged():
                stream_start(model, _FULL_SAVE_STEPS)

        def resume(tracker: MemoryTracker) -> None:
            read = resume_unread(model, optimizer)
            tracker.restart(tracker.phase, lambda: None)  # without the state that was there
            read()

        settings = self._config.evaluation
        writes = held_out is not None and needs_text(settings.every_metric)
        found = {"evaluation": evaluate} if held_out is not None else {}
        found |= {"generation": write} if writes else {}
        if writes:
            kept = {"generation": write} if has_tables_at_home(model) else found
            found = {**found, **{name + AT_ONCE: partial(self._at_once, model, run) for name, run in kept.items()}}
        found = {name: partial(self._averaged, averaged, run) for name, run in found.items()}
        return {**found, "saving": save, "resuming": resume}

    @staticmethod
    def _averaged(
        averaged: Callable[[], AbstractContextManager[None]],
        run: Callable[[MemoryTracker], None],
        tracker: MemoryTracker,
    ) -> None:
        with averaged():
            run(tracker)

    @staticmethod
    def _at_once(model: Any, run: Callable[[MemoryTracker], None], tracker: MemoryTracker) -> None:
        with unsharded(model, write_back=False):
            run(tracker)

    def host(
        self, model: Any, optimizer: Any, comm: Comm, average: ExponentialMovingAverage | None = None
    ) -> Mapping[str, Callable[[], int]]:
        """Return functions for the bytes that the host additionally keeps for ``model``, by kind."""

        def copies() -> int:
            pairs = HostCopies(mesh_of(model)).pairs(self._pieces(model, optimizer, comm, average))
            return sum(host.nbytes for host, _ in pairs)

        def snapshots() -> int:
            # Frozen parameters are as files or seeds made them, so snapshots hold only their digest.
            return needed_bytes(plan_rank(model, optimizer, average, comm.device, frozen=False))

        saves = saves_between_steps(self._config.training, evaluates=self._held_out is not None)
        return {**({"checkpoint_copies": copies} if saves else {}), "snapshots": snapshots}

    def assumed(self) -> float:
        """See :func:`assumed`; generation continues to its limit."""
        return 1.0 if self._writes.asks_whether_it_goes_on else assumed()

    def _pieces(self, model: Any, optimizer: Any, comm: Comm, average: ExponentialMovingAverage | None) -> list[Piece]:
        plan = plan_save(model, optimizer, gradients=False, average=average, frozen=self._frozen)
        return [*plan.pieces, rng_piece(comm.rank, comm.device)]


@dataclass(frozen=True)
class HeldOutBatches:
    """The largest batches of an evaluation."""

    loss: Batch  # the one with most tokens
    text: Batch  # with the longest prompts


class _EnoughError(Exception):
    """Raised once enough tokens were generated to know the memory of all others."""


class _Writing:
    """Generation up to the limit of tokens, of which a few are generated."""

    def __init__(self, spec: GenerationSpec) -> None:
        self.asks_whether_it_goes_on = False
        self._spec = spec
        self._tokens: list[list[int]] = []  # of each token the bytes alive after each change
        self._highest = 0  # at the fullest moment of the last token

    def run(self, model: Any, tokenizer: Any, batch: Batch, tracker: MemoryTracker) -> None:
        """Generate for ``batch``, and have ``tracker`` count the fullest moment of the last token."""
        # generate calls this module for every token, also inside an adapter.
        hook = base_of(model).register_forward_pre_hook(lambda *_: self._token_begins(tracker))
        changed = tracker.on_change

        def note() -> None:
            if self._tokens:
                self._tokens[-1].append(tracker.live)

        tracker.on_change = note
        # A beam search asks whether to continue, a greedy one whether all rows are finished.
        self.asks_whether_it_goes_on = self._spec.num_beams > 1
        try:
            generate(model, tokenizer, batch, self._spec)
        except _EnoughError:
            tracker.touch(max(0, self._highest - tracker.live))
        finally:
            self.asks_whether_it_goes_on = False
            tracker.on_change = changed
            hook.remove()

    def _token_begins(self, tracker: MemoryTracker) -> None:
        """Stop at the limit, which no value reveals, or once the tokens so far determine the remaining ones."""
        equal = len({len(one) for one in self._tokens[-_TOKENS:]}) == 1
        if (equal and len(self._tokens) > _TOKENS) or len(self._tokens) == self._spec.max_new_tokens:
            self._highest = self._last_token()
            raise _EnoughError
        self._tokens.append([tracker.live])

    def _last_token(self) -> int:
        """Return the live bytes at the fullest moment of the last token, extrapolated by moments from three tokens."""
        left = self._spec.max_new_tokens - len(self._tokens)
        if not left:
            return 0
        moments = zip(*self._tokens[-_TOKENS:], strict=True)
        return max(
            last + left * (last - before) + left * (left + 1) // 2 * (last - 2 * before + first)
            for first, before, last in moments
        )
