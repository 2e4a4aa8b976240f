"""A word-level tokenizer small enough to count by hand."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("<pad>", "</s>", "<unk>", "a", "b", "c", "d", "e", "label", "prefix:")


def make_tokenizer(ends_with_eos):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends_with_eos:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=4
    )


@pytest.fixture(scope="session")
def t5_like():
    return make_tokenizer(ends_with_eos=True)


@pytest.fixture(scope="session")
def gpt_like():
    return make_tokenizer(ends_with_eos=False)
