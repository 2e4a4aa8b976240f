"""A streamed run takes the steps of the run that tokenizes first, and resumes with the same weights, bit for bit."""

import hashlib
import json

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from fullshard.program.config import RunConfig
from fullshard.program.train.run_plan import at_limits, longest_batch
from fullshard.program.train.setup.prepare import prepare
from support.interrupted_run import SMALL, Director, KilledError, kill, run
from support.t5_directory import write_t5
from support.tiny_run import WORDS, settings

RANDOM = {"training__train_sampling_strategy": "random", "data__streaming": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t5")
    write_t5(directory, [*WORDS, *WORDS.values(), "0123456789"])
    return {"model": {"path": str(directory)}}


def losses(memory):
    return [step.loss for step in memory.steps]


def weights(directory):
    return load_file(directory / "out" / "model.safetensors")


def digest(directory):
    return hashlib.sha256((directory / "out" / "model.safetensors").read_bytes()).hexdigest()


def predictions(directory):
    """The written texts of the held-out rows."""
    return (directory / "out" / "predictions.jsonl").read_text()


def folder(parent, name):
    (parent / name).mkdir()
    return parent / name


def test_its_steps_are_those_of_the_run_that_tokenizes_first(model, tmp_path):
    first, streamed = folder(tmp_path, "first"), folder(tmp_path, "streamed")
    theirs = run(first, **model | RANDOM | {"data__streaming": False})
    mine = run(streamed, **model | RANDOM)
    assert losses(mine) == losses(theirs)
    assert all(value.equal(weights(first)[name]) for name, value in weights(streamed).items())


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 5])
def test_a_killed_run_resumes_with_the_same_weights(model, tmp_path, after):
    changes = model | RANDOM | {"training__save_strategy": "steps", "training__save_steps": 1}
    changes |= {"training__train_sampling_strategy": "group_by_length"}
    straight, killed = folder(tmp_path, "straight"), folder(tmp_path, "killed")
    expected = run(straight, **changes)
    with pytest.raises(KilledError):
        run(killed, Director(("step", after), kill), **changes)
    resumed = run(killed, **changes)
    assert 0 < len(resumed.steps) < len(expected.steps)
    assert losses(resumed) == losses(expected)[-len(resumed.steps) :]
    assert all(value.equal(weights(straight)[name]) for name, value in weights(killed).items())


OTHERS = {
    "a budget of tokens": {
        "training__per_device_train_batch_tokens": 40,
        "training__per_device_train_batch_size": 8,
        "training__train_sampling_strategy": "group_by_length",
    },
    "held out by a hash": {"data__validation_file": None, "data__validation_fraction": 0.3},
    "a tokenizer of the rows": {"model": SMALL["model"]},
}
OTHERS["all of them"] = {name: value for changes in OTHERS.values() for name, value in changes.items()}
NO_LIMIT = {"data__max_train_samples": None, "training__train_sampling_strategy": "random", "training__max_steps": 6}


def tokenized_when_needed(directory):
    """Whether the cache of a run has no ids of training rows, but an index."""
    names = {path.name for path in (directory / "cache").rglob("*")}
    return "starts" in names


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what == "all of them" else pytest.mark.slow) for what in OTHERS]
)
def test_whatever_rows_a_step_has_the_weights_are_those_of_the_run_that_tokenizes_first(model, tmp_path, what):
    changes = model | NO_LIMIT | OTHERS[what]
    first, streamed = folder(tmp_path, "first"), folder(tmp_path, "streamed")
    theirs = run(first, **changes)
    mine = run(streamed, **changes | {"data__streaming": True})
    assert (tokenized_when_needed(first), tokenized_when_needed(streamed)) == (False, True)
    assert losses(mine) == losses(theirs)
    assert digest(streamed) == digest(first)
    assert predictions(streamed) == predictions(first)


@pytest.mark.parametrize("after", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_run_with_all_of_them_resumes_with_the_same_weights(model, tmp_path, after):
    changes = model | NO_LIMIT | OTHERS["all of them"] | {"data__streaming": True}
    changes |= {"training__save_strategy": "steps", "training__save_steps": 1}
    straight, killed = folder(tmp_path, "straight"), folder(tmp_path, "killed")
    run(straight, **changes)
    with pytest.raises(KilledError):
        run(killed, Director(("step", after), kill), **changes)
    assert 0 < len(run(killed, **changes).steps) < 6
    assert digest(killed) == digest(straight)


def test_a_budget_is_planned_by_exact_lengths_without_ids_in_the_cache(model, tmp_path):
    changes = model | NO_LIMIT | OTHERS["a budget of tokens"]
    config = RunConfig.model_validate(settings(tmp_path, **changes | {"data__streaming": True}))
    first = prepare(RunConfig.model_validate(settings(tmp_path, **changes)))
    mine = prepare(config)
    assert at_limits(mine) is mine
    for name in ("source_ids", "target_ids"):
        assert getattr(mine.train_set, name).lengths.tolist() == getattr(first.train_set, name).lengths.tolist()
    assert mine.train_set.source_stats == first.train_set.source_stats
    assert any("25 rows, tokenized when a step needs them, mean source" in note for note in mine.notes)


def test_a_plan_takes_each_row_at_its_limit(model, tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, **model | RANDOM))
    prepared = prepare(config)
    assert any("tokenized when a step needs them" in note for note in prepared.notes)
    batch = longest_batch(config, at_limits(prepared), 1)
    assert (tuple(batch.input_ids_BS.shape), tuple(batch.labels_BT.shape)) == ((4, 12), (4, 8))
    assert len(at_limits(prepared).train_set) == len(prepared.train_set) == 25


def test_json_in_one_piece_is_refused_by_name(model, tmp_path):
    with pytest.raises(ValidationError, match="json is read as a whole"):
        RunConfig.model_validate(settings(tmp_path, **model | RANDOM | {"data__format": "json"}))


@pytest.mark.parametrize("limit", [7, pytest.param(None, marks=pytest.mark.slow)])
def test_each_answer_of_a_conversation_is_a_row_of_an_encoder_decoder(model, tmp_path, limit):
    def talk(row):
        turns = [("user", f"where is {row}"), ("assistant", "here"), ("user", "and"), ("assistant", f"at {row}")]
        return {"messages": [{"role": role, "content": text} for role, text in turns[: 2 + row % 2 * 2]]}

    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(talk(row)) + "\n" for row in range(20)))
    rows = {"train_file": str(path), "source_column": None, "target_column": None, "validation_file": None}
    rows |= {"validation_fraction": 0.3, "max_train_samples": limit}
    changes = model | NO_LIMIT | {f"data__{name}": value for name, value in rows.items()}
    first, streamed = folder(tmp_path, "first"), folder(tmp_path, "streamed")
    theirs = run(first, **changes)
    assert theirs.begun[0].train_rows > (limit or 14)
    mine = run(streamed, **changes | {"data__streaming": True})
    assert mine.begun[0].train_rows == theirs.begun[0].train_rows
    assert digest(streamed) == digest(first)
    assert predictions(streamed) == predictions(first)
