"""Rows of preferences: their columns, two rows of ids for each, and pairs that no batch takes apart."""

import csv
import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from fullshard.errors import DataError
from fullshard.program.data import (
    CollateSpec,
    Conversation,
    EpochPlan,
    Example,
    LengthStats,
    RowRef,
    SourceSpec,
    TokenizedSet,
    TokenizeSpec,
    batches,
    collate,
    fingerprint,
    in_pairs,
    padding_share,
    read_inputs,
    read_split,
    tokenize,
    with_unrelated,
)
from support.trained_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STATS = LengthStats(1.0, 1, 0, 8)


def spec_of(path, **changes):
    return SourceSpec(train_file=path, preferences="pairs", **changes)


def written(tmp_path, columns, cells, suffix="jsonl"):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in cells))
    else:
        path.write_text("\n".join([",".join(columns), *(",".join(row) for row in cells)]) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("prompt", ["prompt", "Question", "instruction", "input"])
def test_columns_are_found_by_their_names(tmp_path, prompt, suffix):
    path = written(tmp_path, [prompt, "other", "Chosen", "rejected"], [["p", "o", "c", "r"]], suffix)
    table = read_split(spec_of(path), "train")
    line = 2 if suffix == "csv" else 1
    assert table.examples == [Example("p", ("c",), line, rejected=Example("p", ("r",), line))]
    assert f"prompt is {prompt!r}, chosen 'Chosen', rejected 'rejected'" in table.notes[0]


def test_columns_can_be_named_and_prompts_filled_in(tmp_path):
    path = written(tmp_path, ["a", "b", "good", "bad"], [["p", "q", "c", "r"]])
    names = {"target_column": "good", "rejected_column": "bad"}
    (named,) = read_split(spec_of(path, source_column="b", **names), "train").examples
    (filled,) = read_split(spec_of(path, template="{a}-{b}", **names), "train").examples
    assert (named.source, filled.source) == ("q", "p-q")
    assert named.target == filled.target == "c"
    assert (named.rejected.target, filled.rejected.target) == ("r", "r")
    assert (named.rejected.source, filled.rejected.source) == ("q", "p-q")


def test_missing_columns_are_named(tmp_path):
    path = written(tmp_path, ["prompt", "good", "rejected"], [["p", "c", "r"]])
    with pytest.raises(DataError, match=r"set data.target_column. Its columns: 'prompt', 'good', 'rejected'"):
        read_split(spec_of(path), "train")
    with pytest.raises(DataError, match="it has no column 'worse'"):
        read_split(spec_of(path, target_column="good", rejected_column="worse"), "train")


@pytest.mark.parametrize("cell", ["c", [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]])
def test_one_column_cannot_be_both_completions(tmp_path, cell):
    path = written(tmp_path, ["prompt", "chosen"], [["p", cell]])
    with pytest.raises(DataError, match="'chosen' is both of them"):
        read_split(spec_of(path, rejected_column="chosen"), "train")


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (" ", "column 'rejected' is empty"),
        (None, "column 'rejected' is missing"),
        ([{"role": "assistant", "content": "r"}], "column 'rejected' holds a list"),
    ],
)
def test_a_row_that_is_no_preference_is_unusable(tmp_path, cell, problem):
    path = written(tmp_path, ["prompt", "chosen", "rejected"], [["p", "c", "r"], ["p", "c", cell]])
    with pytest.raises(DataError, match=problem):
        read_split(spec_of(path), "train")
    assert len(read_split(spec_of(path, max_bad_rows=1), "train").examples) == 1


ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "one"}]
GOOD, BAD, MORE = (
    {"role": role, "content": text} for role, text in (("assistant", "1"), ("assistant", "uno"), ("user", "why?"))
)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": "one", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": ASKED, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"system": "Be short.", "prompt": ASKED[1:], "chosen": [GOOD], "rejected": [BAD]},
        {"system": "Be short.", "chosen": [ASKED[1], GOOD], "rejected": [ASKED[1], BAD]},
    ],
    ids=["explicit", "implicit", "text prompt", "repeated prompt", "system", "implicit system"],
)
def test_conversations_begin_with_their_prompt_or_follow_it(tmp_path, row, suffix):
    rows = [row, row]
    path = written(tmp_path, list(row), [list(one.values()) for one in rows])
    if suffix == "csv":
        path = tmp_path / "rows.csv"
        with path.open("w", newline="") as file:
            cells = [[one if isinstance(one, str) else json.dumps(one) for one in row.values()] for row in rows]
            csv.writer(file).writerows([list(row), *cells])
    table = read_split(spec_of(path), "train")
    example = table.examples[1]
    for side, turn in ((example, GOOD), (example.rejected, BAD)):
        assert side.conversation.messages == (*ASKED, turn)
        assert (side.conversation.answers, side.source, side.target) == (
            (2,),
            "system: Be short.\nuser: one",
            turn["content"],
        )
    assert (
        "chosen and rejected: 2 conversations of 3.0 turns on average, loss on every assistant turn" in table.notes[0]
    )


def test_the_longest_common_beginning_is_the_prompt_as_in_trl(tmp_path):
    sides = [[*ASKED, GOOD, MORE, GOOD], [*ASKED, GOOD, MORE, BAD]]
    path = written(tmp_path, ["chosen", "rejected"], [sides, [sides[0], sides[0][:3]], [sides[0], sides[0]]])
    later, shorter, equal = read_split(spec_of(path), "train").examples
    assert later.conversation.answers == later.rejected.conversation.answers == (4,)
    assert (shorter.conversation.answers, shorter.rejected.conversation.answers) == ((2, 4), (2,))
    assert equal.conversation.answers == equal.rejected.conversation.answers == (4,)
    (last, *_) = read_split(spec_of(path, train_on="last", max_bad_rows=2), "train").examples[1:2]
    assert last.conversation.answers == (4,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": [*ASKED, GOOD], "rejected": [MORE, BAD]}, "column 'chosen' has no answer of the assistant to the"),
        (
            {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, MORE, BAD]},
            "column 'rejected' has no answer of the assistant",
        ),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "column 'chosen' has no answer of the assistant to the"),
        ({"chosen": [*ASKED, GOOD], "rejected": "text"}, "column 'rejected' holds a str, not a list of turns"),
        ({"chosen": [*ASKED, GOOD], "rejected": None}, "column 'rejected' is missing"),
    ],
)
def test_conversations_that_are_no_pair_are_unusable(tmp_path, row, problem):
    good = {"prompt": None, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
    path = written(tmp_path, list(good), [list(good.values()), list(({"prompt": None} | row).values())])
    with pytest.raises(DataError, match=problem):
        read_split(spec_of(path), "train")


def test_pairs_of_conversations_are_rendered_by_the_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    sides = [Example("", (turn["content"],), 1, Conversation((*ASKED, turn), (2,))) for turn in (GOOD, BAD)]
    rows = in_pairs([replace(sides[0], rejected=sides[1])])
    found = tokenize(rows, tokenizer, TokenizeSpec(64, 64, causal=True))
    for row, turn in enumerate((GOOD, BAD)):
        prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        full = tokenizer.apply_chat_template([*ASKED, turn], return_dict=False)
        assert found.source_ids[row].tolist() == prompt
        assert found.target_ids[row].tolist() == full[len(prompt) :]
        assert found.spans[row].tolist() == [len(prompt), len(full)]


def labelled(path, **changes):
    return SourceSpec(train_file=path, preferences="labels", **changes)


@pytest.mark.parametrize(
    ("suffix", "labels"), [("csv", ("True", "0")), ("jsonl", (True, False)), ("jsonl", (1, "false"))]
)
def test_rows_with_labels_are_desirable_or_not(tmp_path, suffix, labels):
    path = written(tmp_path, ["Prompt", "completion", "label"], [["p", "c", labels[0]], ["q", "d", labels[1]]], suffix)
    first, second = read_split(labelled(path), "train").examples
    assert (first.source, first.target, first.desirable) == ("p", "c", True)
    assert (second.source, second.target, second.desirable) == ("q", "d", False)


def test_conversations_have_labels_too(tmp_path):
    path = written(tmp_path, ["prompt", "completion", "label"], [[ASKED, [GOOD], True]])
    table = read_split(labelled(path), "train")
    assert (table.examples[0].conversation.messages, table.examples[0].desirable) == ((*ASKED, GOOD), True)
    assert "1 conversations of 3.0 turns" in table.notes[0]


def test_labels_are_required(tmp_path):
    path = written(tmp_path, ["prompt", "completion", "good"], [["p", "c", True]])
    with pytest.raises(DataError, match=r"in columns named prompt, completion and label\. Its columns: 'prompt'"):
        read_split(labelled(path), "train")
    path = written(tmp_path, ["prompt", "completion", "label"], [["p", "c", "maybe"]])
    with pytest.raises(DataError, match="column 'label' holds 'maybe', which is neither true nor false"):
        read_split(labelled(path), "train")


def test_each_prompt_also_has_the_completion_of_another_prompt():
    rows = [Example(source, (target,), 1, desirable=True) for source, target in ("pa", "pb", "qc", "pd", "pe")]
    found = with_unrelated(rows)
    assert found[::2] == rows
    assert [(one.source, one.target) for one in found[1::2]] == [
        ("p", "c"),
        ("p", "c"),
        ("q", "d"),
        ("p", "c"),
        ("p", "c"),
    ]
    talks = [
        Example("p", ("1",), 1, Conversation((*ASKED, GOOD), (2,))),
        Example("q", ("uno",), 2, Conversation((MORE, BAD), (1,))),
    ]
    assert [one.conversation.messages for one in with_unrelated(talks)[1::2]] == [(*ASKED, BAD), (MORE, GOOD)]
    with pytest.raises(DataError, match="All rows have the same prompt"):
        with_unrelated(rows[:2])


def test_a_batch_of_labels_has_unrelated_completions_beside_it():
    rows = replace(pairs_of([1, 2, 3, 4], np.array([-1.0, -2.0, -3.0, -4.0])), desirable=np.array([True, False]))
    batch = collate([RowRef(2), RowRef(3), RowRef(0, filler=True), RowRef(1, filler=True)], rows, CollateSpec(0))
    assert (batch.indices, batch.target_tokens, batch.target_weight) == ((2, 0), 3, 1)
    pairs = batch.to("meta").pairs
    assert pairs.unrelated.input_ids_BS.device.type == pairs.unrelated.pairs.reference_B.device.type == "meta"
    pairs = batch.pairs
    assert pairs.desirable_P.tolist() == [False, True]
    assert pairs.reference_B.tolist() == [-3, -1]
    assert (pairs.unrelated.indices, pairs.unrelated.target_tokens) == ((3, 1), 4)
    assert pairs.unrelated.pairs.reference_B.tolist() == [-4, -2]


def test_the_cache_tells_preferences_from_rows_of_targets(tmp_path):
    path = written(tmp_path, ["prompt", "completion", "chosen", "rejected"], [["p", "t", "c", "r"]])
    kinds = [SourceSpec(train_file=path), spec_of(path), spec_of(path, rejected_column="completion"), labelled(path)]
    assert len({fingerprint(one, "train") for one in kinds}) == 4


def test_a_preference_is_two_rows_of_one_prompt():
    others = [Example("p", ("r",), 1), Example("q", ("s",), 2)]
    rows = in_pairs([Example("p", ("c",), 1, rejected=others[0]), Example("q", ("d", "e"), 2, rejected=others[1])])
    assert [(one.source, one.references, one.line) for one in rows] == [
        ("p", ("c",), 1),
        ("p", ("r",), 1),
        ("q", ("d",), 2),
        ("q", ("s",), 2),
    ]


def pairs_of(lengths, reference=None):
    """Rows whose targets have these lengths, two for each pair."""
    targets = [[7] * length for length in lengths]
    return TokenizedSet([[5, 6]] * len(lengths), targets, STATS, STATS, together=2, reference=reference)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("grouped", [True, False])
def test_no_batch_takes_a_pair_apart_and_each_counts_once(world, grouped):
    rows = pairs_of(np.random.default_rng(0).integers(1, 9, 26).tolist())
    lengths = rows.lengths if grouped else None
    for training in (True, False):
        plan = EpochPlan(26, world, 2, training=training, lengths=lengths, together=2, accumulation=2)
        found = []
        for rank in range(world):
            for step in range(plan.num_steps):
                for indices, fillers in plan.step_places(step, rank):
                    assert len(indices) <= 4
                    assert (indices[::2] % 2 == 0).all()
                    assert (indices[1::2] == indices[::2] + 1).all()
                    assert (fillers[::2] == fillers[1::2]).all()
                    found += indices[~fillers].tolist()
        assert sorted(found) == list(range(26))
        weights = [batch.target_weight for rank in range(world) for batch in batches(rows, plan, rank, CollateSpec(0))]
        assert sum(weights) == 13


def test_the_pairs_of_a_step_do_not_depend_on_how_ranks_divide_it():
    lengths = np.random.default_rng(1).integers(1, 9, 26)
    partitions = [(1, 6, 1), (2, 1, 3), (3, 2, 1)]
    steps = []
    for world, each, accumulation in partitions:
        plan = EpochPlan(26, world, each, lengths=lengths, together=2, accumulation=accumulation)
        places = [chain.from_iterable(plan.step_places(0, rank) for rank in range(world))]
        steps.append(sorted(row for one in places for indices, fillers in one for row in indices[~fillers].tolist()))
    assert steps[0] == steps[1] == steps[2]


def test_a_batch_of_pairs_has_their_reference_and_counts():
    rows = pairs_of([1, 2, 3, 4], np.array([-1.0, -2.0, -3.0, -4.0]))
    batch = collate([RowRef(2), RowRef(3), RowRef(0, filler=True), RowRef(1, filler=True)], rows, CollateSpec(0))
    assert batch.pairs is not None
    assert torch.equal(batch.pairs.counts_P, torch.tensor([1.0, 0.0]))
    assert torch.equal(batch.pairs.reference_B, torch.tensor([-3.0, -4.0, -1.0, -2.0]))
    assert batch.target_weight == 1
    assert batch.target_tokens == 7
    assert batch.to("meta").pairs.reference_B.device.type == "meta"
    assert padding_share(EpochPlan(4, 1, 2, together=2), rows, CollateSpec(0)) == 0.25


FURTHER = {"instruction": "do it", "input": "this one", "question": "why", "context": "because"}


@pytest.mark.parametrize("names", [("instruction", "input"), ("instruction", "context"), ("question", "context")])
@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_prompts_are_joined_as_the_sources_of_other_rows(tmp_path, names, kind):
    """The reference is what rows of a known shape with a target are read as."""
    prompt = {name: FURTHER[name] for name in names}
    target = "answer" if "question" in names else "output" if "input" in names else "response"
    write = lambda row, name: written(tmp_path / name, list(row), [list(row.values())] * 2)  # noqa: E731
    for name in ("sft", "mine"):
        (tmp_path / name).mkdir()
    plain = read_split(SourceSpec(train_file=write({**prompt, target: "c"}, "sft")), "train").examples[0]
    more = {"chosen": "c", "rejected": "r"} if kind == "pairs" else {target: "c", "label": True}
    path = write({**prompt, **more}, "mine")
    found = read_split(SourceSpec(train_file=path, preferences=kind), "train").examples[0]
    assert (found.source, found.target) == (plain.source, plain.target)
    asked = read_inputs(path, SourceSpec(preferences=kind)).rows[0]
    assert asked.source == plain.source


def test_a_prompt_that_data_joins_in_two_ways_is_asked_for(tmp_path):
    path = written(tmp_path, ["instruction", "input", "context", "chosen", "rejected"], [list("abcde")])
    with pytest.raises(DataError, match=r"data\.template"):
        read_split(spec_of(path), "train")


def trl_extract_prompt(chosen, rejected):
    """TRL's rule for texts: the common beginning, without a blank at its end."""
    for place in range(min(len(chosen), len(rejected))):
        if chosen[place] != rejected[place]:
            place -= chosen[place - 1] == " "
            break
    return chosen[:place], chosen[place:], rejected[place:]


@pytest.mark.parametrize(
    ("answers", "prompt"),
    [
        ((" today please yes", " no"), "\n\nHuman: q\n\nAssistant:"),
        ((" today yes", " today no"), "\n\nHuman: q\n\nAssistant: today"),
        (("\n- a", "\n* b"), "\n\nHuman: q\n\nAssistant:\n"),
    ],
)
def test_transcripts_begin_with_their_prompt_as_in_trl(tmp_path, answers, prompt):
    sides = [f"\n\nHuman: q\n\nAssistant:{answer}" for answer in answers]
    path = written(tmp_path, ["chosen", "rejected"], [sides, sides])
    found = read_split(spec_of(path), "train").examples[0]
    assert (found.source, found.target, found.rejected.target) == trl_extract_prompt(*sides)
    assert found.source == prompt
    assert read_inputs(path, SourceSpec(preferences="pairs")).rows[0].source == prompt


def test_a_prompt_of_transcripts_does_not_end_inside_a_word(tmp_path):
    rows = [["Q: a A: today", "Q: a A: tomorrow"], ["Q: b A: yes please", "Q: b A: yes"], ["Q: c A:", "Q: c A: no"]]
    table = read_split(spec_of(written(tmp_path, ["chosen", "rejected"], rows), max_bad_rows=1), "train")
    assert [(one.source, one.target, one.rejected.target) for one in table.examples] == [
        ("Q: a A:", " today", " tomorrow"),
        ("Q: b A:", " yes please", " yes"),
    ]
    assert "column 'chosen' has no answer" in table.notes[-1]


def test_answers_that_begin_alike_are_no_transcripts_beside_a_prompt_of_another_name(tmp_path):
    path = written(tmp_path, ["query", "chosen", "rejected"], [["what is it", "The good", "The bad"]])
    with pytest.raises(DataError, match=r"set data\.source_column"):
        read_split(spec_of(path), "train")


SHARED = [{"from": "human", "value": "one"}]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED, "chosen": {"from": "gpt", "value": "1"}, "rejected": {"from": "gpt", "value": "uno"}},
        {"messages": ASKED[1:], "chosen": [GOOD], "rejected": [BAD]},
        {"conversations": SHARED, "chosen": "1", "rejected": "uno"},
        {"prompt": "one", "chosen": GOOD, "rejected": BAD},
        {"question": "one", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*ASKED[1:], GOOD], "rejected": [*ASKED[1:], BAD]},
    ],
)
def test_turns_follow_the_prompt_of_another_column(tmp_path, row):
    path = written(tmp_path, list(row), [list(row.values())])
    found = read_split(spec_of(path), "train").examples[0]
    assert found.conversation.messages == (ASKED[1], GOOD)
    assert found.rejected.conversation.messages == (ASKED[1], BAD)
    assert found.conversation.answers == found.rejected.conversation.answers == (1,)


def test_a_conversation_that_ends_with_an_answer_is_no_prompt(tmp_path):
    path = written(tmp_path, ["messages", "chosen", "rejected"], [[[*ASKED, GOOD], [GOOD], [BAD]]])
    with pytest.raises(DataError, match="column 'messages' ends with an answer"):
        read_split(spec_of(path), "train")


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("response_0", "response_1"), (0, 1)),
        (("response_0", "response_1"), ("response_0", "response_1")),
        (("output_a", "output_b"), ("A", "B")),
        (("output_a", "output_b"), (1, 2)),
        (("output_a", "output_b"), (0, 1)),
        (("answer1", "answer2"), (1.0, 2.0)),
        (("reply_1", "reply_2"), ("a", "b")),
        (("conversation_a", "conversation_b"), ("model_a", "model_b")),
    ],
)
def test_a_label_says_which_of_two_is_better(tmp_path, names, labels):
    rows = [["p", "first", "second", labels[0]], ["q", "third", "fourth", labels[1]]]
    if "conversation_a" in names:
        turns = lambda text, answer: [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]  # noqa: E731
        rows = [["x", turns(row[0], row[1]), turns(row[0], row[2]), row[3]] for row in rows]
    path = written(tmp_path, ["prompt", *names, "winner"], [*rows, [*rows[0][:3], "tie"]])
    for more in ({}, {"target_column": names[0], "rejected_column": names[1]}):
        found = read_split(spec_of(path, label_column="winner", max_bad_rows=1, **more), "train").examples
        assert [(one.target, one.rejected.target) for one in found] == [("first", "second"), ("fourth", "third")]
        assert all(one.rejected.rejected is None for one in found)


@pytest.mark.parametrize("labels", [(0, 1), (True, False), (3, 4)])
def test_labels_that_do_not_tell_are_refused(tmp_path, labels):
    rows = [["p", "first", "second", label] for label in labels]
    path = written(tmp_path, ["prompt", "answer1", "answer2", "label"], rows)
    with pytest.raises(DataError, match=r"does not tell which of 'answer1' and 'answer2' is better"):
        read_split(spec_of(path, label_column="label"), "train")
    with pytest.raises(DataError, match=r"equal rank: set data\.label_column"):
        read_split(spec_of(path), "train")


@pytest.mark.parametrize(
    ("good", "bad"), [("thumbs_up", "thumbs_down"), ("Good", "bad"), (1.0, 0.0), (1, -1), ("👍", "👎")]
)
def test_a_label_of_another_name_and_spelling(tmp_path, good, bad):
    path = written(tmp_path, ["question", "answer", "feedback"], [["q", "a", good], ["r", "b", bad]])
    found = read_split(labelled(path, label_column="feedback"), "train").examples
    assert [one.desirable for one in found] == [True, False]
