"""Targets that a tokenizer cannot write: counted and shown, and a model that repeats the others is right."""

# ruff: noqa: RUF001 (the fraction's slash of NFKC)

import string

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Tokenizer

from fullshard.program.data import TokenizeSpec, Unwritten, find_unwritten, references_of, written_forms
from fullshard.program.metrics import score
from fullshard.program.models.new_tokens import add_tokens

TARGETS = ["5 m²", "CO₂", "½", "plain", '{"a": 1}', "red\nblue", "CO₂"]


@pytest.fixture
def t5():
    """Letters of T5's kind: NFKC, white space as one space, no braces."""
    letters = string.ascii_letters + string.digits + "\"':,.⁄"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((one, -3.0) for one in letters)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


@pytest.fixture
def bytes_of_gpt():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def found(tokenizer, texts, *, causal=False):
    forms = written_forms(texts, tokenizer, TokenizeSpec(9, 9, causal=causal))
    return forms, find_unwritten(texts, forms)


def test_what_t5_cannot_write_is_counted_by_rows_with_examples_and_lost_characters(t5):
    forms, values = found(t5, TARGETS)
    assert forms == {
        **{"5 m²": "5 m2", "CO₂": "CO2", "½": "1⁄2", "plain": "plain"},
        **{'{"a": 1}': '"a": 1', "red\nblue": "red blue"},
    }
    assert (values["rows"], values["total"]) == (6, 7)
    assert set(values["lost"]) == {"²", "₂", "½", "{", "}", "\n"}
    assert values["lost"][0] == "₂"  # of two rows
    note = Unwritten(**values).note("training")
    assert note.startswith("6 of 7 training targets")
    assert note.count(" becomes ") == 3
    assert "'CO₂' becomes 'CO2'" in note
    assert r'model.new_tokens: ["₂", "\n", ' in note


def test_tokens_for_the_lost_characters_keep_them_and_leave_others_alone(t5):
    lost = found(t5, TARGETS)[1]["lost"]
    add_tokens(t5, list(lost))
    forms, values = found(t5, [*TARGETS, "2 a 1 2"])
    assert not values or values["lost"] == ""  # white space beside a new token may differ
    assert forms["2 a 1 2"] == "2 a 1 2"
    assert all("".join(form.split()) == "".join(text.split()) for text, form in forms.items() if "\n" not in text)
    assert "\n" in forms["red\nblue"]


def test_a_tokenizer_of_bytes_writes_everything(bytes_of_gpt):
    forms, values = found(bytes_of_gpt, [*TARGETS, "  a  b\t\n"], causal=True)
    assert values is None
    assert forms["red\nblue"] == "red\nblue"


def test_other_composition_and_white_space_around_a_text_are_no_loss(bytes_of_gpt):
    assert found(bytes_of_gpt, [" e\u0301 ", "a\n"], causal=True)[1] is None


def test_a_model_that_repeats_what_the_tokenizer_writes_is_right(t5):
    forms, _ = found(t5, TARGETS)
    written = [t5.decode(t5(text)["input_ids"], skip_special_tokens=True) for text in TARGETS]  # as a model would
    references = [(forms[text],) for text in TARGETS]
    assert score(["exact_match"], written, references).values["exact_match"] == 1.0
    assert score(["exact_match"], written, [(text,) for text in TARGETS]).values["exact_match"] < 0.5


def test_a_target_of_which_nothing_is_written_is_counted_and_an_empty_prediction_is_not_right(t5):
    targets = ["{}", "{}", "a", "²{"]
    forms, values = found(t5, targets)
    assert (forms["{}"], values["rows"], values["nothing"]) == ("", 3, 2)
    assert "of 2 nothing is left" in Unwritten(**values).note("training")
    references = [(references_of(forms)[text],) for text in targets]
    assert score(["exact_match"], ["", "", "a", "2"], references).values["exact_match"] == 0.5
