"""A directory with a tiny T5 and a tokenizer of T5's kind, as programs load ``t5-base``."""

import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer


def write_t5(directory, texts):
    """Write it; the tokenizer knows the words of ``texts``."""
    tokenizer = T5Tokenizer(extra_ids=0).train_new_from_iterator(texts, vocab_size=120)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    T5ForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
