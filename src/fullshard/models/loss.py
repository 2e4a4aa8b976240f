"""The training loss, from logits or, without ever holding all of them, from the last hidden states.

For a target y with logits z over V pieces, in natural logarithms::

    cross-entropy    lse(z) - (1 - e) z[y] - e mean(z)     e: label smoothing, as torch's cross_entropy has it
    z-loss           w lse(z)^2                            w: its weight, as in PaLM and T5X
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullshard.errors import ModelError
from fullshard.models.adapters import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
"""Label of positions that are not targets."""

_CHUNK_NUMEL = 1 << 23
"""Logits at once: 32 MB in float32."""


@dataclass(frozen=True)
class Objective:
    """What is minimised beside the plain cross-entropy.

    Attributes:
        label_smoothing: Share of each target's probability that is spread over the vocabulary.
        z_loss: Weight of the squared logarithm of the softmax's normaliser.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Objective()


def summed_loss(logits_BTV: Tensor, labels_BT: Tensor, objective: Objective = PLAIN) -> Tensor:
    """The loss summed over targets.

    Args:
        logits_BTV: Of any floating dtype; computed with in at least float32.
        labels_BT: int64, -100 where there is no target.
        objective: What is minimised.

    Returns:
        0-d, float32 or wider; zero where there is no target.
    """
    logits = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)).flatten(0, 1)
    labels = labels_BT.flatten()
    loss = functional.cross_entropy(
        logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=objective.label_smoothing
    )
    if objective.z_loss:
        loss = loss + objective.z_loss * logits[labels != IGNORED].logsumexp(-1).square().sum()
    return loss


def fuse_head(model: PreTrainedModel) -> FusedHead:
    """Let a model compute the loss in its output head, in place; every rank calls it, before adapters and sharding.

    Parameters and names stay, and so does what the model returns; but inside :meth:`FusedHead.aimed` its logits are the
    loss.

    Args:
        model: On any device; the meta device will do.

    Raises:
        ModelError: The head is no plain linear layer, or the model changes logits after it, as soft-capping does.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"fused_cross_entropy needs a plain linear output layer; that of {type(model).__name__} is "
            f"{type(head).__name__}. Set training.fused_cross_entropy to false."
        )
    _require_untouched_logits(model, head)
    fused = FusedHead(head)
    head.forward = fused
    return fused


def fused_head_of(model: Any) -> FusedHead | None:
    """What :func:`fuse_head` made of a model's head; None where it was not called. Sharded or not, adapted or not."""
    fused = getattr(model.get_output_embeddings(), "forward", None)
    return fused if isinstance(fused, FusedHead) else None


def model_loss(
    model: Any,
    forward: Callable[[], Tensor],
    labels_BT: Tensor,
    objective: Objective = PLAIN,
    *,
    expected_gradient: float = 1.0,
) -> Tensor:
    """The loss of one forward pass, summed over targets; by the model's head where that is fused.

    Args:
        model: A Hugging Face model, with an adapter or without, sharded or not.
        forward: Runs it and returns what it gives as logits, (B, T or more, V).
        labels_BT: int64, on the model's device; what each of the last T positions is to predict, -100 for nothing.
        objective: What is minimised.
        expected_gradient: What the loss will be multiplied by before backward. Another gradient is right too; with this
            one a fused head rounds gradients of 16 bits once, as an unfused one does.

    Returns:
        0-d, float32 or wider.

    Raises:
        ModelError: The head is fused and the model adds a bias to logits that is not zero.
    """
    fused = fused_head_of(model)
    if fused is None:
        return summed_loss(forward()[:, -labels_BT.shape[1] :], labels_BT, objective)
    with fused.aimed(labels_BT, objective, expected_gradient):
        returned = forward()
    bias = _logits_bias(base_of(model))
    if bias is not None and not fused.bias_is_zero:
        if bias.any():
            raise ModelError(
                f"fused_cross_entropy computes the loss in the output layer, and {type(model).__name__} adds a bias to "
                "the logits after it (final_logits_bias) that is not zero. Set training.fused_cross_entropy to false."
            )
        fused.bias_is_zero = True
    # Adding zeros to the loss has given it the shape of the bias.
    return returned.flatten()[0] if returned.dim() else returned


@dataclass(frozen=True)
class _Aim:
    """What a head computes in place of logits; see :func:`model_loss`."""

    labels_BT: Tensor
    objective: Objective
    expected_gradient: float


class FusedHead:
    """Takes the place of an output head's ``forward``.

    Only rows of hidden states with a target are multiplied, a few hundred at a time. The gradients are computed beside
    the loss, so that logits are neither kept for backward nor computed twice: what is kept is the gradient of those
    rows and of the weight.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Compute as ``head`` does."""
        self._head = head
        self._aim: _Aim | None = None
        self.bias_is_zero = False

    @contextmanager
    def aimed(self, labels_BT: Tensor, objective: Objective, expected_gradient: float = 1.0) -> Iterator[None]:
        """Context in which the head returns the loss, summed over ``labels_BT``, in place of logits.

        The labels are those of the last T positions; -100 where there is no target. See :func:`model_loss`.
        """
        self._aim = _Aim(labels_BT, objective, expected_gradient)
        try:
            yield
        finally:
            self._aim = None

    def __call__(self, input: Tensor) -> Tensor:
        """Logits, (B, T, V), of the last hidden states, as the head computes them; or the loss, 0-d."""
        if self._aim is None:
            return nn.Linear.forward(self._head, input)
        aim, labels = self._aim, self._aim.labels_BT.flatten()
        counted = (labels != IGNORED).nonzero().squeeze(1)
        rows = input[:, -aim.labels_BT.shape[1] :].flatten(0, 1).index_select(0, counted)
        weight, bias = self._head.weight, self._head.bias
        records = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():
            return _LinearCrossEntropy.apply(rows, weight, bias, labels[counted], aim, records)  # type: ignore[return-value]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        aim: _Aim,
        records: bool,  # noqa: FBT001 (autograd passes by position)
    ) -> Tensor:
        wants_rows, wants_weight, wants_bias = (records and wanted for wanted in ctx.needs_input_grad[:3])
        wide = torch.promote_types(rows.dtype, torch.float32)
        # Before gradients are rounded, if they are.
        ctx.factor = 1.0 if wide == rows.dtype else aim.expected_gradient
        sums = _Sums(weight, wide, weight=wants_weight, bias=wants_bias)
        loss = torch.zeros((), dtype=wide, device=rows.device)
        row_gradients = torch.empty_like(rows) if wants_rows else None
        step = max(64, _CHUNK_NUMEL // weight.shape[0])
        for start in range(0, rows.shape[0], step):
            part = slice(start, start + step)
            chunk_loss, chunk = _chunk(rows[part], weight, bias, labels[part], aim.objective, ctx.factor)
            loss += chunk_loss
            if row_gradients is not None:
                torch.mm(chunk, weight, out=row_gradients[part])
            sums.add(chunk, rows[part])
        ctx.gradients = (row_gradients, *sums.finish(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("Backward through a fused loss runs once: its gradients are given away, not kept.")
        # With a dimension it keeps its dtype in the product: in 16 bits it would put all gradients off alike.
        left = (gradient / ctx.factor).reshape(1)
        one = left.device.type == "cpu" and left.item() == 1
        scaled = (g if g is None or one else g.mul_(left) for g in gradients)
        return (*scaled, None, None, None)


class _Sums:
    """Gradients of the head's parameters, added up over chunks in float32 or wider."""

    def __init__(self, like: Tensor, dtype: torch.dtype, *, weight: bool, bias: bool) -> None:
        self.weight = torch.zeros(like.shape, dtype=dtype, device=like.device) if weight else None
        self.bias = torch.zeros(like.shape[0], dtype=dtype, device=like.device) if bias else None

    def add(self, chunk: Tensor, rows: Tensor) -> None:
        """Add those of one chunk; ``chunk`` is the loss's gradient of its logits, (rows, V)."""
        if self.weight is not None:
            if self.weight.dtype == chunk.dtype:
                self.weight.addmm_(chunk.t(), rows)
            else:
                self.weight += chunk.t() @ rows
        if self.bias is not None:
            self.bias += chunk.sum(0, dtype=self.bias.dtype)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Both in the parameters' dtype."""
        weight, bias = (None if one is None else one.to(dtype) for one in (self.weight, self.bias))
        return weight, bias


def _chunk(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective, factor: float
) -> tuple[Tensor, Tensor]:
    """The summed loss of a few rows, 0-d, and in their dtype its gradient of their logits times a factor, (rows, V)."""
    logits = functional.linear(rows, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = wide.gather(1, labels[:, None]).squeeze(1)
    share, pieces = objective.label_smoothing, weight.shape[0]
    mean = wide.mean(1) if share else 0.0
    highest = wide.amax(1)
    gradient = torch.softmax(wide, 1)
    # The largest probability is at least 1 / V, so that its logarithm is exact.
    lse = highest - gradient.amax(1).log()
    loss = lse - (1 - share) * picked - share * mean + objective.z_loss * lse.square()
    if objective.z_loss:
        gradient.mul_(1 + 2 * objective.z_loss * lse[:, None])
    if share:
        gradient.sub_(share / pieces)
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((1, 1), share - 1).expand(len(labels), 1))
    if gradient.dtype == rows.dtype:
        return loss.sum(), gradient
    return loss.sum(), torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=rows.dtype))


class _Sign(torch.Tensor):
    """Stands for logits: adding a given buffer to it gives it back, anything else gives something else."""

    bias: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.add, torch.Tensor.__add__, torch.add) and not kwargs and len(args) == 2:
            sign, other = args
            if isinstance(sign, _Sign) and other is sign.bias:
                return sign
        return super().__torch_function__(func, types, args, kwargs)


class _Output(dict[str, Any]):
    """What a part of a model that was left out returns: hidden states in the first place, None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)
        self.hidden = hidden

    def __getitem__(self, key: Any) -> Any:
        return self.hidden if key in (0, "last_hidden_state") else () if isinstance(key, slice) else None

    def __getattr__(self, name: str) -> Any:
        return self.hidden if name == "last_hidden_state" else None


def _logits_bias(model: nn.Module) -> Tensor | None:
    """What BART's kin add to logits: zeros, but in converted checkpoints."""
    return model._buffers.get("final_logits_bias")


def _require_untouched_logits(model: PreTrainedModel, head: nn.Linear) -> None:
    """Refuse a model that does not return what its head returned: the very tensor, whatever its values.

    All parts but the head are left out of that forward, so that it needs neither memory nor values.

    Raises:
        ModelError: It does not, or its forward cannot be followed.
    """
    device = head.weight.device
    sign = torch.zeros(1, device=device).as_subclass(_Sign)
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
        untouched, problem = False, f"has a forward that cannot be followed ({error})"
    finally:
        for module in stubs:
            del module.forward
    if not untouched:
        raise ModelError(
            f"fused_cross_entropy computes the loss in the output layer, and {type(model).__name__} {problem}. "
            "Set training.fused_cross_entropy to false."
        )
