"""The training loss of a Hugging Face model: of its logits, or computed in its output head without them.

The loss itself is ``core/engine/tables/loss.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullshard.core.engine.tables.loss import (
    IGNORED,
    PLAIN as PLAIN,
    Objective as Objective,
    Terms,
    linear_loss,
    linear_losses,
    summed_loss as summed_loss,
)
from fullshard.core.shards import table_of
from fullshard.errors import ModelError
from fullshard.program.models.adapters import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fuse_head(model: PreTrainedModel, *, fuses: bool = True) -> FusedHead:
    """Make a model compute the loss in its output head, in place; every rank calls it, before adapters and sharding.

    Parameters, names and outputs do not change, but inside :meth:`FusedHead.loss_context` the model returns the loss
    in place of logits. The model may be on the meta device.

    Args:
        model: The model.
        fuses: If True, the head avoids logits wherever it can; otherwise only while its rows stay home.

    Raises:
        ModelError: The head is not a plain linear layer, or the model changes logits after it, as soft-capping does.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"fused_cross_entropy needs a plain linear output layer; that of {type(model).__name__} is "
            f"{type(head).__name__}. Set training.fused_cross_entropy to false."
        )
    _require_untouched_logits(model, head)
    fused = FusedHead(head, fuses=fuses)
    head.forward = fused
    return fused


def can_fuse(model: PreTrainedModel) -> bool:
    """Return True if :func:`fuse_head` can make a model compute the loss in its head; any rank."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    try:
        _require_untouched_logits(model, head)
    except ModelError:
        return False
    return True


def fused_head_of(model: Any) -> FusedHead | None:
    """Return the fused head of a model, which may be sharded or have an adapter; None if its head is not fused."""
    fused = getattr(model.get_output_embeddings(), "forward", None)
    return fused if isinstance(fused, FusedHead) else None


def model_loss(
    model: Any,
    forward: Callable[[], Tensor],
    labels_BT: Tensor,
    objective: Objective = PLAIN,
    *,
    expected_gradient: float | Tensor = 1.0,
    weights_BT: Tensor | None = None,
    targets: int | None = None,
) -> Tensor:
    """Return the loss of one forward, summed over targets; computed by the head if it is fused.

    Args:
        model: A Hugging Face model, with an adapter or without, sharded or not.
        forward: Runs the model and returns its logits, (B, T or more, V).
        labels_BT: int64, on the model's device; labels of the last T positions, -100 where there is no target.
        objective: Label smoothing and z-loss.
        expected_gradient: Expected factor of the loss before backward, 0-d if a tensor. Another factor is correct as
            well, but with the expected one a fused head rounds 16-bit gradients only once, as an unfused head does.
        weights_BT: float32, factor on the loss of each target; None: 1.
        targets: Number of labels that are not -100; None: counted, for which a fused head waits for the device.

    Returns:
        0-d, float32 or wider.

    Raises:
        ModelError: The head is fused, and the model adds a bias to the logits that is not zero.
    """
    fused = fused_head_of(model)
    if fused is None:
        return summed_loss(forward()[:, -labels_BT.shape[1] :], labels_BT, objective, weights_BT)
    fused.choose(labels_BT.numel())
    with fused.loss_context(labels_BT, objective, expected_gradient, weights_BT, targets):
        return _returned(model, fused, forward())


def row_loss(
    model: Any,
    forward: Callable[[], Tensor],
    labels_BT: Tensor,
    of_rows: OfRows,
    *,
    targets: int | None = None,
    packed: PackedLabels | None = None,
) -> Tensor:
    """Return a function of the log-probabilities of the rows of one forward, computed by the head if it is fused.

    ``of_rows`` gets each row's log-probability, summed over its targets, (B,), float32 or wider, and returns the loss.
    With ``packed`` the rows are those that it names; else each of ``labels_BT`` is one.
    The other arguments, and the errors, are those of :func:`model_loss`.
    """
    fused = fused_head_of(model)
    if fused is not None and fused.fuses:
        with fused.row_context(labels_BT, of_rows, targets, packed):
            return _returned(model, fused, forward())
    logits = forward()[:, -labels_BT.shape[1] :]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(wide.transpose(1, 2), labels_BT, ignore_index=IGNORED, reduction="none")
    return of_rows(-losses.sum(1) if packed is None else -row_sums(losses, packed))


def row_sums(values: Tensor, packed: PackedLabels) -> Tensor:
    """Return the sum of each row's values, (B,), of one for each label; any rank, alone."""
    rows, count = packed
    own = rows.flatten() == torch.arange(count, device=rows.device)[:, None]
    return torch.where(own, values.flatten(), 0).sum(1)  # index_add sums in any order on CUDA


def _returned(model: Any, fused: FusedHead, returned: Tensor) -> Tensor:
    """Return the loss that a model returned in place of logits.

    Raises:
        ModelError: The model adds a bias to it that is not zero.
    """
    bias = _logits_bias(base_of(model))
    if bias is not None and not fused.bias_is_zero:
        if bias.any():
            raise ModelError(
                f"fused_cross_entropy computes the loss in the output layer, and {type(model).__name__} adds a bias to "
                "the logits after it (final_logits_bias) that is not zero. Set training.fused_cross_entropy to false."
            )
        fused.bias_is_zero = True
    # Adding the bias, which is zero, broadcast the loss to its shape.
    return returned.flatten()[0] if returned.dim() else returned


OfRows = Callable[[Tensor], Tensor]
"""Returns a loss, 0-d, of the log-probabilities of a forward's rows, (B,)."""

PackedLabels = tuple[Tensor, int]
"""The row of each label, int64 of the labels' shape, from 0, any other number where there is no target; and B."""


@dataclass(frozen=True)
class _LossSpec:
    """The loss that a head computes in place of logits; see :func:`model_loss` and :func:`row_loss`."""

    labels_BT: Tensor
    objective: Objective = PLAIN
    expected_gradient: float | Tensor = 1.0
    weights_BT: Tensor | None = None
    targets: int | None = None
    of_rows: OfRows | None = None
    packed: PackedLabels | None = None


class FusedHead:
    """Replacement of an output head's ``forward`` that can compute the loss.

    Only hidden states with a target are multiplied, a few hundred at a time. The gradients are computed together with
    the loss, so that logits are neither kept for backward nor computed twice; only the gradients of the hidden states
    and of the weight are kept.

    Attributes:
        fuses: See :func:`fuse_head`.
    """

    def __init__(self, head: nn.Linear, *, fuses: bool = True) -> None:
        """Wrap ``head``; outside :meth:`loss_context` it returns logits."""
        self._head = head
        self.fuses = fuses
        self._spec: _LossSpec | None = None
        self.bias_is_zero = False

    @contextmanager
    def loss_context(
        self,
        labels_BT: Tensor,
        objective: Objective,
        expected_gradient: float | Tensor = 1.0,
        weights_BT: Tensor | None = None,
        targets: int | None = None,
    ) -> Iterator[None]:
        """Return the loss, summed over ``labels_BT``, in place of logits inside the context.

        The arguments are those of :func:`model_loss`.
        """
        with self._computing(_LossSpec(labels_BT, objective, expected_gradient, weights_BT, targets)):
            yield

    @contextmanager
    def row_context(
        self, labels_BT: Tensor, of_rows: OfRows, targets: int | None = None, packed: PackedLabels | None = None
    ) -> Iterator[None]:
        """Return a function of the rows' log-probabilities in place of logits inside the context.

        The arguments are those of :func:`row_loss`. The weight must be gathered.
        """
        with self._computing(_LossSpec(labels_BT, targets=targets, of_rows=of_rows, packed=packed)):
            yield

    @contextmanager
    def _computing(self, spec: _LossSpec) -> Iterator[None]:
        self._spec = spec
        try:
            yield
        finally:
            self._spec = None

    def __call__(self, input: Tensor) -> Tensor:
        """Return logits, (B, T, V), of the last hidden states; inside :meth:`loss_context` the loss, 0-d."""
        if self._spec is None:
            return nn.Linear.forward(self._head, input)
        spec, weight, bias = self._spec, self._head.weight, self._head.bias
        if spec.of_rows is not None:
            return spec.of_rows(self._row_logps(input, spec))
        table = table_of(weight)
        if table is not None and table.is_home and bias is not None:
            table.gather()
        home = table if table is not None and table.is_home else None
        if home is None and not self.fuses:
            logits = nn.Linear.forward(self._head, input)
            return summed_loss(logits[:, -spec.labels_BT.shape[1] :], spec.labels_BT, spec.objective, spec.weights_BT)
        rows, labels, weights = self._counted(input, spec)
        terms = Terms(spec.objective, spec.expected_gradient, weights)
        return linear_loss(rows, weight, bias, labels, terms) if home is None else home.loss(rows, labels, terms)

    def choose(self, tokens: int) -> None:
        """Decide before a forward whether ranks exchange ``tokens`` for head rows that stay home."""
        table = table_of(self._head.weight)
        if table is not None and self._head.bias is None:
            table.choose(tokens)

    def _row_logps(self, input: Tensor, spec: _LossSpec) -> Tensor:
        """Return the log-probability of each row's targets, (B,)."""
        weight, bias, (batch, length) = self._head.weight, self._head.bias, spec.labels_BT.shape
        rows, labels, counted = self._at_targets(input, spec)
        losses = linear_losses(rows, weight, bias, labels)
        packed = counted // length, batch
        if spec.packed is not None:
            rows_BT, batch = spec.packed
            packed = rows_BT.flatten()[counted], batch
        return -row_sums(losses, packed)

    def _counted(self, input: Tensor, spec: _LossSpec) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, (T, d), labels and weights, (T,), of the positions that have a target."""
        rows, labels, counted = self._at_targets(input, spec)
        return rows, labels, None if spec.weights_BT is None else spec.weights_BT.flatten()[counted]

    def _at_targets(self, input: Tensor, spec: _LossSpec) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, (T, d), labels and places, (T,), of the positions that have a target."""
        labels = spec.labels_BT.flatten()
        ignored = labels == IGNORED
        count = int((~ignored).sum()) if spec.targets is None else spec.targets
        # A stable sort keeps the order, and unlike nonzero it does not wait for the device to know the number.
        counted = ignored.to(torch.uint8).argsort(stable=True)[:count]
        rows = input[:, -spec.labels_BT.shape[1] :].flatten(0, 1).index_select(0, counted)
        return rows, labels[counted], counted


class _LogitsMarker(torch.Tensor):
    """Placeholder for logits; adding the given bias returns the placeholder, any other operation returns a tensor."""

    bias: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.add, torch.Tensor.__add__, torch.add) and not kwargs and len(args) == 2:
            sign, other = args
            if isinstance(sign, _LogitsMarker) and other is sign.bias:
                return sign
        return super().__torch_function__(func, types, args, kwargs)


class _Output(dict[str, Any]):
    """Output of a stubbed module: hidden states as its first element, None as all others."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)
        self.hidden = hidden

    def __getitem__(self, key: Any) -> Any:
        return self.hidden if key in (0, "last_hidden_state") else () if isinstance(key, slice) else None

    def __getattr__(self, name: str) -> Any:
        return self.hidden if name == "last_hidden_state" else None


def _logits_bias(model: nn.Module) -> Tensor | None:
    """Return the bias that models like BART add to logits; it is zero except in some converted checkpoints."""
    return model._buffers.get("final_logits_bias")


def _require_untouched_logits(model: PreTrainedModel, head: nn.Linear) -> None:
    """Raise unless a model returns the tensor that its head returned.

    All submodules are stubs in this forward, so that it needs neither memory nor weights.

    Raises:
        ModelError: It returns another tensor, or its forward fails with stubs.
    """
    device = head.weight.device
    sign = torch.zeros(1, device=device).as_subclass(_LogitsMarker)
    sign.bias = _logits_bias(model)
    output = _Output(torch.zeros(1, 2, head.in_features, device=device))
    stubs: dict[nn.Module, Any] = {child: lambda *_args, **_kwargs: output for child in model.children()}
    stubs[head] = lambda *_args, **_kwargs: sign
    inputs: dict[str, Any] = {"input_ids": torch.zeros((1, 2), dtype=torch.int64, device=device), "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    for module, stub in stubs.items():
        module.forward = stub
    problem = "changes the logits after it (soft-capping, scaling or a bias)"
    try:
        with torch.no_grad():
            untouched = model(**inputs).logits is sign
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        untouched, problem = False, f"has a forward that cannot be checked ({error})"
    finally:
        for module in stubs:
            del module.forward
    if not untouched:
        raise ModelError(
            f"fused_cross_entropy computes the loss in the output layer, and {type(model).__name__} {problem}. "
            "Set training.fused_cross_entropy to false."
        )
