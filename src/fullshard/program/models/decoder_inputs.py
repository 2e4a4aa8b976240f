"""The decoder's inputs of an encoder-decoder in training: its labels, one position later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fullshard.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_inputs(model: PreTrainedModel, labels_BT: Tensor) -> Tensor:
    """Return the inputs that transformers makes of labels, int64 of their shape; any rank.

    Some models, such as M2M100 (NLLB) and Blenderbot, have no method for it and shift labels inside their forward,
    which would compute a loss of its own as well.

    Args:
        model: An encoder-decoder, sharded or not, with an adapter or without.
        labels_BT: int64, -100 where there is no target.

    Raises:
        ModelError: The model's configuration names no token that the decoder starts with, or no padding.
    """
    own: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        return own(labels=labels_BT.clone())  # FSMT replaces -100 in the labels that it is given
    config: Any = model.config
    start, padding = config.decoder_start_token_id, config.pad_token_id
    if start is None or padding is None:
        raise ModelError(
            f"The decoder of a {config.model_type} model starts with decoder_start_token_id and is padded with "
            f"pad_token_id; its config has {start} and {padding}. Set both in config.json."
        )
    shifted = labels_BT.new_full(labels_BT.shape, start)
    shifted[:, 1:] = labels_BT[:, :-1]
    return shifted.masked_fill(shifted == -100, padding)
