"""A model's forward on a batch: its inputs and its summed loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from fullshard.program.data import IGNORED_LABEL, Batch
from fullshard.program.models import PLAIN, Objective, RouterLoss, decoder_inputs, model_loss
from fullshard.program.models.packing import PackedRows, packed_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_inputs(model: PreTrainedModel, batch: Batch, *, causal: bool) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for a packed or padded batch; any rank.

    The logits are for ``batch.labels_BT``; a causal model's logits at position t are for label t + 1.

    Args:
        model: The model, sharded or not.
        batch: On the model's device.
        causal: Whether source and target are one sequence (decoder-only).
    """
    if batch.packing is not None:
        packing = batch.packing
        rows = PackedRows(
            input_ids_BS=batch.input_ids_BS,
            labels_BT=batch.labels_BT,
            segments_BS=packing.segments_BS,
            target_segments_BT=packing.target_segments_BT,
            positions_BS=packing.positions_BS,
        )
        return packed_inputs(model, rows)
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "use_cache": False}
    if causal:
        return inputs
    return {**inputs, "decoder_input_ids": decoder_inputs(model, batch.labels_BT)}


def loss_sum(
    model: PreTrainedModel,
    batch: Batch,
    *,
    causal: bool,
    objective: Objective = PLAIN,
    expected_gradient: float | Tensor = 1.0,
) -> Tensor:
    """Return the loss summed over the target tokens of one batch; every rank calls it, as it runs a forward.

    Args:
        model: The sharded model.
        batch: On the model's device.
        causal: Whether source and target are one sequence (decoder-only).
        objective: Label smoothing and z-loss; the default is the plain cross-entropy.
        expected_gradient: Factor that the loss is multiplied by before backward; see ``model_loss``.

    Returns:
        0-d float32; zero for a batch of filler rows.
    """
    return losses(model, batch, None, causal=causal, objective=objective, expected_gradient=expected_gradient)[0]


def losses(
    model: PreTrainedModel,
    batch: Batch,
    router: RouterLoss | None,
    *,
    causal: bool,
    objective: Objective = PLAIN,
    expected_gradient: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of :func:`loss_sum`, and of the same forward the routers' own loss, 0-d, or None."""
    inputs = model_inputs(model, batch, causal=causal)
    own: list[Tensor] = []
    labels_BT, weights_BT = batch.labels_BT, batch.weights_BT
    if causal:
        # Position t predicts label t + 1; the last position predicts nothing.
        labels_BT = functional.pad(labels_BT[:, 1:], (0, 1), value=IGNORED_LABEL)
        weights_BT = None if weights_BT is None else functional.pad(weights_BT[:, 1:], (0, 1), value=1.0)

    def forward() -> Tensor:
        if router is None:
            return model(**inputs).logits
        output = model(**inputs, output_router_logits=True)
        own.append(router.of(output))
        return output.logits

    loss = model_loss(
        model,
        forward,
        labels_BT,
        objective,
        expected_gradient=expected_gradient,
        weights_BT=weights_BT,
        targets=batch.target_tokens,
    )
    return loss, own[0] if own else None
