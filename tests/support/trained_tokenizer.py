"""Tokenizers small enough to count by hand."""

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(tail=(), drops_breaks=False):
    """One id per character; ``tail``: special tokens after each text."""
    specials = ["<pad>", "</s>", "<unk>", "<s>"]
    alphabet = {chr(code): code for code in range(4, 128)}
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(specials)} | alphabet, unk_token="<unk>")
    )
    if drops_breaks:
        tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(["<s>", "$A", *tail]), special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
