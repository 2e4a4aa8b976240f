"""A directory with a tiny T5 and a tokenizer of T5's kind, as programs load ``t5-base``."""

from collections import Counter

import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer


def pieces(texts, count):
    """The vocabulary, the same in each run: the library's own trainer numbers pieces anew each time."""
    words = Counter(word for text in texts for word in text.split())
    letters = sorted({letter for word in words for letter in word})
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    frequent = sorted((word for word in words if len(word) > 1), key=lambda word: (-words[word], word))
    room = max(count - len(special) - len(letters), 0)
    return special + [(letter, -8.0) for letter in letters] + [("▁" + word, -4.0) for word in frequent[:room]]


def write_t5(directory, texts):
    """Write it; the tokenizer knows the letters and the most frequent words of ``texts``."""
    tokenizer = T5Tokenizer(vocab=pieces(texts, 120), extra_ids=0)
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
