"""A chat's prompt and answer are together what the tokenizer makes of the whole conversation."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fullshard.data.batching.collate import CollateSpec, RowRef, collate
from fullshard.data.examples import Example
from fullshard.data.tokenizing.tokenize import TokenizeSpec, tokenize
from fullshard.errors import DataError

WORDS = ("<pad>", "</s>", "<unk>", "<s>", "<user>", "<bot>", "<end>", "a", "b", "c", "d", "e", "\n", "label")
TEMPLATE = (
    "<s>{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
ROWS = [Example("a b", ("label",), 2), Example("a b c d e", ("label a b",), 3)]


@pytest.fixture
def chatter():
    """Adds <s> to every text by itself, as many do."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>", "<end>", "\n"]})
    fast.chat_template = TEMPLATE
    return fast


def ids_of(tokenizer, source, target=None):
    turns = [{"role": "user", "content": source}]
    if target is not None:
        turns.append({"role": "assistant", "content": target})
    options = {"add_generation_prompt": target is None, "return_dict": False}
    return tokenizer.apply_chat_template(turns, **options)


@pytest.mark.parametrize("asked", [None, True])
def test_prompt_and_completion_are_the_template_of_the_whole_conversation(chatter, asked):
    spec = TokenizeSpec(20, 20, source_prefix="c ", causal=True, chat_template=asked)
    tokenized = tokenize(ROWS, chatter, spec)
    for row, source, target in zip(ROWS, tokenized.source_ids, tokenized.target_ids, strict=True):
        assert source.tolist() == ids_of(chatter, f"c {row.source}")
        assert [*source, *target] == ids_of(chatter, f"c {row.source}", row.target)
        assert [*source, *target].count(3) == 1
    assert tokenized.target_ids[0].tolist() == [13, 6, 12]


def test_the_prompt_is_masked_and_the_answer_with_its_end_is_learned(chatter):
    tokenized = tokenize(ROWS, chatter, TokenizeSpec(20, 20, causal=True))
    batch = collate([RowRef(0)], tokenized, CollateSpec(0, causal=True))
    assert batch.labels_BT.tolist() == [[-100] * 7 + [13, 6, 12]]


def test_without_a_template_or_told_so_there_is_no_chat(chatter, gpt_like):
    spec = TokenizeSpec(20, 20, causal=True, chat_template=False)
    assert tokenize(ROWS, chatter, spec).source_ids[0].tolist() == [3, 7, 8]
    assert tokenize(ROWS, gpt_like, TokenizeSpec(20, 20, causal=True)).source_ids[0].tolist() == [3, 4]
    assert tokenize(ROWS, chatter, TokenizeSpec(20, 20)).source_ids[0].tolist() == [3, 7, 8]


def test_texts_are_cut_and_the_template_is_not(chatter):
    tokenized = tokenize(ROWS, chatter, TokenizeSpec(8, 4, causal=True))
    assert tokenized.source_ids.tolist()[1] == ids_of(chatter, "a b c")
    assert [*tokenized.source_ids[1], *tokenized.target_ids[1]] == ids_of(chatter, "a b c", "label a")
    assert (tokenized.source_stats.longest, tokenized.source_stats.truncated) == (10, 1)
    assert (tokenized.target_stats.longest, tokenized.target_stats.truncated) == (5, 1)


def test_a_limit_that_the_template_fills(chatter):
    with pytest.raises(DataError, match=r"max_source_length of 5 leaves no room for text: .* Use at least 6\."):
        tokenize(ROWS, chatter, TokenizeSpec(5, 9, causal=True))
    assert tokenize(ROWS, chatter, TokenizeSpec(6, 9, causal=True)).source_ids[0].tolist() == ids_of(chatter, "a")


def test_a_token_over_the_border_belongs_to_the_answer(chatter):
    chatter.chat_template = TEMPLATE.replace("<bot>{% endif", "<bot>b{% endif").replace("<bot>' }}", "<bot>b' }}")
    rows = [Example("a", ("c",), 2)]
    tokenized = tokenize(rows, chatter, TokenizeSpec(20, 20, causal=True))
    whole = ids_of(chatter, "a", "c")
    assert whole != [*ids_of(chatter, "a"), 9, 6, 12], "the border is inside a token"
    assert [*tokenized.source_ids[0], *tokenized.target_ids[0]] == whole
    assert tokenized.source_ids[0].tolist() == ids_of(chatter, "a")[:-1]


def test_templates_that_cannot_be_trained_on(chatter, gpt_like):
    chatter.chat_template = TEMPLATE.replace("<bot>{% endif", "<bot>a{% endif")
    with pytest.raises(DataError, match=r"must begin with its prompt.* ends with '.*<bot>a'.*chat_template: false"):
        tokenize(ROWS, chatter, TokenizeSpec(20, 20, causal=True))
    chatter.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="template failed: roles must alternate"):
        tokenize(ROWS, chatter, TokenizeSpec(20, 20, causal=True))
    with pytest.raises(DataError, match="needs a tokenizer with a chat template; this one has none"):
        tokenize(ROWS, gpt_like, TokenizeSpec(20, 20, causal=True, chat_template=True))
    with pytest.raises(DataError, match="needs a causal model; this one is an encoder-decoder"):
        tokenize(ROWS, chatter, TokenizeSpec(20, 20, chat_template=True))
