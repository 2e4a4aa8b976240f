"""A conversation with a trained model: what it reads, what it writes, and where an answer stops."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, DataError
from fullshard.program.data import add_plain_template
from fullshard.program.models import build_model, train_tokenizer
from fullshard.program.train.evaluation.chat import Talk
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from support.tiny_run import MODEL

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 96, "initializer_range": 0.5}
LINES = ["where is my card", "i lost it", "what is the rate of exchange today"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*LINES, "user: route: ", "assistant: \n"], 70)


def saved(kind, tokenizer, directory, *, chats=False):
    tokenizer = copy.deepcopy(tokenizer)
    if chats:
        add_plain_template(tokenizer)
    build_model(kind, tokenizer, seed=3).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, tokenizer


def with_talk(directory, work, *, data=None, evaluation=None, **options):
    """What ``work`` returns of a conversation with the model in ``directory``."""

    def rank(comm):
        trained = find_trained(str(directory))
        config = trained.config.model_copy(
            update={
                "data": trained.config.data.model_copy(update=data or {}),
                "evaluation": trained.config.evaluation.model_copy(update={"max_new_tokens": 6, **(evaluation or {})}),
            }
        )
        model, its_tokenizer, _ = load_trained(replace(trained, config=config), comm)
        return work(Talk(model, its_tokenizer, config, comm, **options))

    return run_ranks(1, rank)[0]


@torch.no_grad()
def written_alone(model, tokenizer, prompt, **options):
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens="assistant:" not in prompt).input_ids
    row = model.eval().generate(input_ids=ids, **{"max_new_tokens": 6, "do_sample": False, **options})[0]
    row = row if model.config.is_encoder_decoder else row[ids.shape[1] :]
    return tokenizer.decode(row, skip_special_tokens=True).strip()


def asked(talk, lines=LINES):
    """The answers, and their parts joined."""
    found = []
    for line in lines:
        parts = []
        found.append((talk.answer(line, parts.append), "".join(parts)))
    return found


@pytest.mark.parametrize("beams", [1, 2])
def test_without_a_template_each_line_is_a_source_of_its_own(beams, tokenizer, tmp_path):
    directory, _ = saved(GPT2, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    expected = [written_alone(plain, tokenizer, "route: " + line, num_beams=beams) for line in LINES]

    def work(talk):
        assert not talk.remembers
        assert talk.streams == (beams == 1)
        return asked(talk)

    data = {"source_prefix": "route: "}
    found = with_talk(directory, work, data=data, evaluation={"num_beams": beams})
    assert [answer.text for answer, _ in found] == expected
    assert [parts.rstrip() for _, parts in found] == expected
    assert [answer.prompt for answer, _ in found] == [
        tokenizer.decode(tokenizer(f"route: {x}").input_ids) for x in LINES
    ]


def test_with_a_template_the_model_reads_the_conversation_so_far(tokenizer, tmp_path):
    directory, chatting = saved(GPT2, tokenizer, tmp_path, chats=True)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    turns, expected = [], []
    for line in LINES:
        turns.append({"role": "user", "content": line})
        prompt = chatting.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        expected.append(written_alone(plain, chatting, prompt))
        turns.append({"role": "assistant", "content": expected[-1]})

    def work(talk):
        assert talk.remembers
        first = asked(talk)
        talk.reset()
        return first, asked(talk)

    first, again = with_talk(directory, work)
    assert [answer.text for answer, _ in first] == expected
    assert again == first
    assert all(line in first[2][0].prompt for line in LINES)
    assert not any(answer.cut for answer, _ in first)


def test_an_encoder_decoder_of_conversations_gets_them_as_its_source(tokenizer, tmp_path):
    directory, _ = saved(MODEL, tokenizer, tmp_path)
    plain = AutoModelForSeq2SeqLM.from_pretrained(directory)
    (first, _), (second, _) = with_talk(directory, lambda talk: asked(talk, LINES[:2]), system_turns=())
    assert first.text == written_alone(plain, tokenizer, f"user: {LINES[0]}")
    history = f"user: {LINES[0]}\nassistant: {first.text}\nuser: {LINES[1]}"
    assert second.text == written_alone(plain, tokenizer, history)
    (_, (second, _)) = with_talk(directory, lambda talk: asked(talk, LINES[:2]))
    assert second.text == written_alone(plain, tokenizer, LINES[1])


def test_a_long_conversation_loses_its_oldest_turns_and_says_so(tokenizer, tmp_path):
    directory, _ = saved(GPT2, tokenizer, tmp_path, chats=True)
    found = with_talk(directory, asked, data={"max_source_length": 30}, evaluation={"max_new_tokens": 2})
    assert [answer.cut for answer, _ in found] == [False, False, True]
    assert LINES[0] in found[1][0].prompt
    assert LINES[0] not in found[2][0].prompt
    assert LINES[2] in found[2][0].prompt


def test_an_answer_stops_where_it_is_told_to(tokenizer, tmp_path):
    directory, _ = saved(GPT2, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    calls = []

    def stopped():
        calls.append(None)
        return len(calls) == 2

    answer = with_talk(directory, lambda talk: talk.answer(LINES[2], stopped=stopped))
    assert answer.text == written_alone(plain, tokenizer, LINES[2], max_new_tokens=2)
    assert len(calls) == 2


def test_a_temperature_draws_from_the_models_own_choice(tokenizer, tmp_path):
    directory, _ = saved(GPT2, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    plain.generation_config.update(top_k=7, do_sample=True)
    plain.save_pretrained(directory)
    torch.manual_seed(0)
    expected = written_alone(plain, tokenizer, LINES[0], do_sample=True, temperature=1.5, max_new_tokens=20)
    greedy = written_alone(plain, tokenizer, LINES[0], max_new_tokens=20)

    def drawn(talk):
        torch.manual_seed(0)
        return talk.answer(LINES[0]).text

    assert with_talk(directory, drawn, evaluation={"max_new_tokens": 20}, temperature=1.5) == expected != greedy
    with pytest.raises(ConfigError, match="beam search of width 2 does not"):
        with_talk(directory, drawn, evaluation={"num_beams": 2}, temperature=1.5)


def test_a_text_that_cannot_be_read_is_forgotten(tokenizer, tmp_path):
    directory, _ = saved(GPT2, tokenizer, tmp_path, chats=True)

    def work(talk):
        with pytest.raises(DataError, match="leaves no room"):
            talk.answer(LINES[0])
        return talk._turns

    assert with_talk(directory, work, data={"max_source_length": 2}) == []
