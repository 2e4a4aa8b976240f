"""From a batch to what a model is called with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fullshard.data import Batch
from fullshard.models.packing import PackedRows, packed_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_inputs(model: PreTrainedModel, batch: Batch, *, causal: bool) -> dict[str, Any]:
    """The keywords of the model's forward whose logits are those of ``batch.labels_BT``, packed or padded; any rank.

    A causal model's logits at position t are those of label t + 1.

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
    shifted = model.prepare_decoder_input_ids_from_labels(labels=batch.labels_BT)  # type: ignore[operator]
    return {**inputs, "decoder_input_ids": shifted}
