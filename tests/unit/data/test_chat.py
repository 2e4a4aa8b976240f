"""A chat's prompt and answer are together what the tokenizer makes of the whole conversation."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fullshard.errors import DataError
from fullshard.program.data.batching.collate import CollateSpec, RowRef, collate
from fullshard.program.data.examples import Conversation, Example
from fullshard.program.data.tokenizing.cache import open_tokens, tokenize_to
from fullshard.program.data.tokenizing.chat import add_plain_template
from fullshard.program.data.tokenizing.tokenize import TokenizeSpec, show_row, tokenize
from support.trained_tokenizer import byte_tokenizer

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
    chatter.chat_template = TEMPLATE + "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}"
    rows = [Example("a", ("c",), 5), Example("b", ("c",), 7)]
    with pytest.raises(DataError, match=r"Line 7 of the data: .*template failed: no b"):
        tokenize(rows, chatter, TokenizeSpec(20, 20, causal=True))
    with pytest.raises(DataError, match="needs a tokenizer with a chat template; this one has none"):
        tokenize(ROWS, gpt_like, TokenizeSpec(20, 20, causal=True, chat_template=True))
    with pytest.raises(DataError, match="needs a causal model; this one is an encoder-decoder"):
        tokenize(ROWS, chatter, TokenizeSpec(20, 20, chat_template=True))


TURNS = (("system", "e"), ("user", "a b"), ("assistant", "label"), ("user", "c"), ("assistant", "label d"))
MARKED = TEMPLATE.replace(
    "{{ m.content }}<end>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>{% endgeneration %}"
    "{% else %}{{ m.content }}<end>{% endif %}{{ '\n' }}",
)


def talk(answers=(2, 4), turns=TURNS):
    messages = tuple({"role": role, "content": text} for role, text in turns)
    conversation = Conversation(messages, answers)
    return Example(conversation.history_text, (turns[-1][1],), 2, conversation)


def labels_of(tokenized, row=0):
    batch = collate([RowRef(row)], tokenized, CollateSpec(0, causal=True))
    return batch.input_ids_BS[0].tolist(), batch.labels_BT[0].tolist()


def kept(labels):
    return [label for label in labels if label != -100]


def test_all_answers_are_learned_or_the_last(chatter):
    chats = tokenize([talk(), talk((4,))], chatter, TokenizeSpec(40, 40, causal=True))
    messages = [{"role": role, "content": text} for role, text in TURNS]
    ids, labels = labels_of(chats)
    assert ids == chatter.apply_chat_template(messages, return_dict=False)
    assert kept(labels) == [13, 6, 12, 13, 10, 6, 12]
    assert all(label in (-100, id_) for id_, label in zip(ids, labels, strict=True))
    prompt = chatter.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert chats.source_ids[0].tolist() == prompt
    assert kept(labels_of(chats, 1)[1]) == [13, 10, 6, 12]


def test_what_the_template_marks_is_learned(chatter):
    offsets = tokenize([talk()], chatter, TokenizeSpec(40, 40, causal=True))
    chatter.chat_template = MARKED
    marks = tokenize([talk(), talk((4,))], chatter, TokenizeSpec(40, 40, causal=True))
    messages = [{"role": role, "content": text} for role, text in TURNS]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = chatter.apply_chat_template(messages, **options)
    ids, labels = labels_of(marks)
    assert ids == theirs["input_ids"] == labels_of(offsets)[0]
    assert [label != -100 for label in labels] == [bool(one) for one in theirs["assistant_masks"]]
    assert kept(labels) == [13, 6, 13, 10, 6]
    assert kept(labels_of(marks, 1)[1]) == [13, 10, 6]
    chatter.chat_template = MARKED.replace("m.role == 'assistant'", "loop.last")
    with pytest.raises(DataError, match=r"marks 1 answers .* has 2 turns of the assistant"):
        tokenize([talk()], chatter, TokenizeSpec(40, 40, causal=True))


def test_a_filler_has_no_labels_and_packed_rows_keep_theirs(chatter):
    chats = tokenize([talk(), talk((4,))], chatter, TokenizeSpec(40, 40, causal=True))
    batch = collate([RowRef(0), RowRef(1, filler=True)], chats, CollateSpec(0, causal=True))
    assert kept(batch.labels_BT[1].tolist()) == []
    assert batch.target_tokens == 7
    packed = collate([RowRef(0), RowRef(1)], chats, CollateSpec(0, causal=True, packed=True))
    assert packed.target_tokens == 7 + 4


def test_a_template_that_changes_what_it_wrote_is_refused_by_name(chatter):
    # As templates that leave the thoughts of earlier answers out.
    chatter.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ 'e' if m.role == 'assistant' and not loop.last else m.content }}"
    )
    with pytest.raises(DataError, match=r"must begin with its prompt.*data.train_on: last.*\{% generation %\}"):
        tokenize([talk()], chatter, TokenizeSpec(40, 40, causal=True))
    assert kept(labels_of(tokenize([talk((4,))], chatter, TokenizeSpec(40, 40, causal=True)))[1]) == [13, 10, 6, 12]


def test_the_oldest_turns_make_room(chatter, t5_like):
    full = tokenize([talk()], chatter, TokenizeSpec(40, 40, causal=True))
    limit = len(full.source_ids[0]) - 1
    short = tokenize([talk()], chatter, TokenizeSpec(limit, 40, causal=True))
    left = [{"role": role, "content": text} for role, text in (TURNS[0], *TURNS[3:])]
    assert labels_of(short)[0] == chatter.apply_chat_template(left, return_dict=False)
    assert kept(labels_of(short)[1]) == [13, 10, 6, 12]
    assert (short.source_stats.truncated, short.cut) == (1, (True,))
    reads = tokenize([talk()], t5_like, TokenizeSpec(5, 40))
    assert reads.source_ids[0].tolist() == t5_like("system: e\nuser: c")["input_ids"]
    assert (reads.source_stats.truncated, reads.cut) == (1, (True,))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["offsets", "marks"])
def test_answers_that_remain_are_learned(chatter, template):
    chatter.chat_template = template
    turns = (*TURNS, ("user", "a"), ("assistant", "b"))
    full = tokenize([talk((2, 4, 6), turns)], chatter, TokenizeSpec(40, 40, causal=True))
    short = tokenize([talk((2, 4, 6), turns)], chatter, TokenizeSpec(len(full.source_ids[0]) - 1, 40, causal=True))
    left = tokenize([talk((2, 4), (TURNS[0], *turns[3:]))], chatter, TokenizeSpec(40, 40, causal=True))
    assert labels_of(short) == labels_of(left)


def test_a_history_is_a_prompt_without_an_answer(chatter):
    whole = talk()
    history = Conversation(whole.conversation.history, ())
    rows = [Example(history.history_text, ("",), 2, history)]
    tokenized = tokenize(rows, chatter, TokenizeSpec(40, 40, source_prefix="c ", causal=True))
    assert tokenized.source_ids[0].tolist() == ids_of_turns(chatter, ("e", "c a b", "label", "c"))
    assert tokenized.target_ids[0].tolist() == []


def ids_of_turns(tokenizer, texts):
    turns = [{"role": role, "content": text} for (role, _), text in zip(TURNS, texts, strict=False)]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def test_tokens_of_conversations_from_the_cache_are_those_in_memory(tmp_path, chatter):
    spec, rows = TokenizeSpec(40, 40, causal=True), [talk(), talk((4,)), ROWS[0]]
    expected = tokenize(rows, chatter, spec)
    mapped = open_tokens(tmp_path, tokenize_to(tmp_path, rows, chatter, spec))
    assert mapped.spans.tolist() == expected.spans.tolist()
    assert [labels_of(mapped, row) for row in range(3)] == [labels_of(expected, row) for row in range(3)]


def test_the_plain_template_writes_roles_as_lines():
    tokenizer = byte_tokenizer()
    note = add_plain_template(tokenizer)
    assert "user: …\\nassistant: …</s>" in note
    turns = (("system", "S"), ("user", "hi"), ("assistant", "yo"), ("user", "a"), ("assistant", "b"))
    tokenized = tokenize([talk((2, 4), turns)], tokenizer, TokenizeSpec(90, 90, causal=True))
    ids, labels = labels_of(tokenized)
    assert tokenizer.decode(ids).replace(" ", "") == "<s>system:S\nuser:hi\nassistant:yo</s>\nuser:a\nassistant:b</s>"
    assert tokenizer.decode(kept(labels)).replace(" ", "") == "yo</s>b</s>"


def test_a_row_is_shown_with_what_is_masked(chatter, t5_like):
    chats = tokenize([talk()], chatter, TokenizeSpec(40, 40, causal=True))
    names = [line.split("|")[0].strip() for line in show_row(chats, 0, chatter, causal=True).splitlines()[1:]]
    assert names == ["masked", "target", "prompt", "target"]
    shown = show_row(tokenize(ROWS, t5_like, TokenizeSpec(9, 9)), 0, t5_like, causal=False)
    assert shown.splitlines()[1:] == ["  source | 'a b </s>'", "  target | 'label </s>'"]
    long = tokenize([Example("a " * 600, ("label",), 2)], t5_like, TokenizeSpec(2000, 9))
    text = show_row(long, 0, t5_like, causal=False)
    assert len(text) < 600
    assert " characters ... " in text
