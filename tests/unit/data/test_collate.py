"""Padding, masks and the labels that count."""

import torch

from fullshard.program.data.batching.collate import CollateSpec, RowRef, collate
from fullshard.program.data.examples import Example
from fullshard.program.data.tokenizing.tokenize import TokenizeSpec, tokenize

ROWS = [Example("a b c", ("label",), 2), Example("a", ("label label",), 3)]
BOTH = [RowRef(0), RowRef(1)]


def test_encoder_decoder_batch(t5_like):
    batch = collate(BOTH, tokenize(ROWS, t5_like, TokenizeSpec(8, 8)), CollateSpec(pad_token_id=0))
    assert batch.input_ids_BS.tolist() == [[3, 4, 5, 1], [3, 1, 0, 0]]
    assert batch.attention_mask_BS.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels_BT.tolist() == [[8, 1, -100], [8, 8, 1]]
    assert batch.target_tokens == 5
    assert batch.targets_T == (2, 2, 1)
    assert batch.indices == (0, 1)
    assert batch.fillers == (False, False)
    assert batch.prompt_ids_BP is batch.input_ids_BS
    assert batch.prompt_mask_BP is batch.attention_mask_BS
    assert {tensor.dtype for tensor in (batch.input_ids_BS, batch.attention_mask_BS, batch.labels_BT)} == {torch.int64}


def test_padding_is_only_to_the_longest_row_of_the_batch(t5_like):
    batch = collate([RowRef(1)], tokenize(ROWS, t5_like, TokenizeSpec(8, 8)), CollateSpec(pad_token_id=0))
    assert batch.input_ids_BS.shape == (1, 2)
    assert batch.indices == (1,)


def test_padding_is_masked_by_length_even_where_pad_is_eos(t5_like):
    batch = collate(BOTH, tokenize(ROWS, t5_like, TokenizeSpec(8, 8)), CollateSpec(pad_token_id=1))
    assert batch.input_ids_BS.tolist() == [[3, 4, 5, 1], [3, 1, 1, 1]]
    assert batch.attention_mask_BS.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_fillers_have_no_labels_but_keep_attention(t5_like):
    tokenized = tokenize(ROWS, t5_like, TokenizeSpec(8, 8))
    batch = collate([RowRef(0), RowRef(1, filler=True)], tokenized, CollateSpec(pad_token_id=0))
    assert batch.labels_BT.tolist() == [[8, 1, -100], [-100, -100, -100]]
    assert batch.target_tokens == 2
    assert batch.fillers == (False, True)
    assert batch.attention_mask_BS[1].tolist() == [1, 1, 0, 0]


def test_causal_batch_joins_masks_the_prompt_and_pads_prompts_on_the_left(gpt_like):
    tokenized = tokenize(ROWS, gpt_like, TokenizeSpec(8, 8, causal=True))
    batch = collate(BOTH, tokenized, CollateSpec(pad_token_id=0, causal=True))
    assert batch.input_ids_BS.tolist() == [[3, 4, 5, 8, 1], [3, 8, 8, 1, 0]]
    assert batch.attention_mask_BS.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.labels_BT.tolist() == [[-100, -100, -100, 8, 1], [-100, 8, 8, 1, -100]]
    assert batch.prompt_ids_BP.tolist() == [[3, 4, 5], [0, 0, 3]]
    assert batch.prompt_mask_BP.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.target_tokens == 5
    assert batch.targets_T == (1, 1, 2, 1)


def test_causal_filler_has_no_labels(gpt_like):
    tokenized = tokenize(ROWS, gpt_like, TokenizeSpec(8, 8, causal=True))
    batch = collate([RowRef(0, filler=True)], tokenized, CollateSpec(pad_token_id=0, causal=True))
    assert batch.labels_BT.tolist() == [[-100] * 5]
    assert batch.target_tokens == 0


def test_to_moves_every_tensor_and_keeps_shared_ones_shared(t5_like, gpt_like):
    for tokenizer, causal in ((t5_like, False), (gpt_like, True)):
        tokenized = tokenize(ROWS, tokenizer, TokenizeSpec(8, 8, causal=causal))
        batch = collate(BOTH, tokenized, CollateSpec(pad_token_id=0, causal=causal)).to("meta")
        names = ("input_ids_BS", "attention_mask_BS", "labels_BT", "prompt_ids_BP", "prompt_mask_BP")
        assert {getattr(batch, name).device.type for name in names} == {"meta"}
        assert (batch.prompt_ids_BP is batch.input_ids_BS) is not causal
        assert batch.indices == (0, 1)


def test_what_training_does_not_read_is_not_made(gpt_like):
    tokenized = tokenize(ROWS, gpt_like, TokenizeSpec(8, 8, causal=True))
    whole, lean = (
        collate(BOTH, tokenized, CollateSpec(pad_token_id=0, causal=True, **how))
        for how in ({}, {"prompts": False, "masked": False})
    )
    assert torch.equal(whole.input_ids_BS, lean.input_ids_BS)
    assert torch.equal(whole.labels_BT, lean.labels_BT)
    assert (lean.attention_mask_BS, lean.prompt_ids_BP, lean.prompt_mask_BP) == (None, None, None)
