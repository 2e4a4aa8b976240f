"""A run over several sets: each with its own columns and prefix, scored apart and together, resumed to the bit."""

import json
from pathlib import Path

import pytest

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, MismatchError
from fullshard.program.config import RunConfig
from fullshard.program.report.files import read_run
from fullshard.program.report.page import make_page
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.run.assemble import require_same_rows
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.steps import make_plan
from support.interrupted_run import OFTEN, SMALL, assert_same, run, run_until_killed, run_until_stopped
from support.tiny_run import settings, write_rows

pytestmark = pytest.mark.usefixtures("unmetered")


def mixture(directory, weights=(3.0, 1.0)):
    """The data section of two sets, whose files have other columns: 5 and 11 training rows, 3 and 4 held out."""
    write_rows(directory / "short.csv", 5)
    write_rows(directory / "short_held_out.csv", 3, start=5)
    lines = [{"question": f"how much is {row}", "answer": ("a lot", "little")[row % 3 > 0]} for row in range(15)]
    for name, part in (("long", lines[:11]), ("long_held_out", lines[11:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in part))
    sets = {
        "short": {"train_file": "short.csv", "validation_file": "short_held_out.csv", "source_prefix": "label: "},
        "long": {"train_file": "long.jsonl", "validation_file": "long_held_out.jsonl", "source_column": "question"},
    }
    for one, weight in zip(sets.values(), weights or (), strict=False):
        one["weight"] = weight
    for one in sets.values():
        one |= {key: str(directory / one[key]) for key in ("train_file", "validation_file")}
    return {"sets": sets, "max_source_length": 16, "max_target_length": 8, "cache_dir": str(directory / "cache")}


def config_of(directory, weights=(3.0, 1.0), **changes):
    return RunConfig.model_validate(settings(directory, **SMALL | {"data": mixture(directory, weights)} | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, unmetered):
    directory = tmp_path_factory.mktemp("mixture")
    said = []
    memory = run(directory, CardSink(directory / "out", said.append), data=mixture(directory), **OFTEN)
    assert said == []
    return directory, memory


def test_each_set_has_its_prefix_and_columns_and_rows_follow_one_another(tmp_path):
    config = config_of(tmp_path, weights=None)
    data = prepare(config)
    texts = data.tokenizer.batch_decode(data.train_set.source_ids.tolist(), skip_special_tokens=True)
    assert texts[0].startswith("label: ")
    assert [text.startswith("label") for text in texts] == [True] * 5 + [False] * 11
    assert [(one.name, len(one.train_set), len(one.held_out)) for one in data.sets] == [
        ("short", 5, 3),
        ("long", 11, 4),
    ]
    plan = make_plan(config, data.train_set, 1, causal=data.causal)
    rows = [row for step in range(plan.num_steps) for places, _ in plan.step_places(step, 0) for row in places.tolist()]
    assert sorted(rows) == list(range(16))  # without weights each row once


def test_a_weight_is_the_share_of_an_epochs_rows(tmp_path):
    config = config_of(tmp_path)
    data = prepare(config)
    for ranks in (1, 2):
        plan = make_plan(config, data.train_set, ranks, causal=data.causal).for_epoch(1)
        rows = [
            row
            for rank in range(ranks)
            for step in range(plan.num_steps)
            for places, fillers in plan.step_places(step, rank)
            for row in places[~fillers].tolist()
        ]
        assert (len(rows), sum(row < 5 for row in rows)) == (16, 12)


def test_sets_are_scored_apart_and_together(finished):
    _, memory = finished
    report = memory.evaluations[-1][0]
    sets = report.sets
    assert {name: one["rows"] for name, one in sets.items()} == {"short": 3, "long": 4}
    for joint, kind in ((report.value, "metrics"), (report.baseline, "baselines")):
        apart = [3 * sets["short"][kind]["exact_match"], 4 * sets["long"][kind]["exact_match"]]
        assert joint == pytest.approx(sum(apart) / 7)
    assert sets["short"]["loss"] != sets["long"]["loss"]
    assert min(one["loss"] for one in sets.values()) < report.loss < max(one["loss"] for one in sets.values())
    assert len(report.predictions) == 7
    assert report.baseline_name == "always the most frequent target of a row's set"


def test_files_tell_the_sets(finished):
    directory, _ = finished
    out = directory / "out"
    start, end = (json.loads((out / name).read_text()) for name in ("run.json", "summary.json"))
    found = [
        (one["name"], one["weight"], one["train_rows"], one["epoch_rows"], one["validation_rows"])
        for one in start["sets"]
    ]
    assert found == [("short", 3.0, 5, 12, 3), ("long", 1.0, 11, 4, 4)]
    assert all(len(one["content"]) == 32 for one in start["sets"])
    assert (
        "mixture: an epoch of 16 rows has short 12 (75.0%, 2.40 times its 5), long 4 (25.0%, 0.36 times its 11)"
        in str(start["notes"])
    )
    assert set(start["content"]) >= {"data.sets.short.train_file", "data.sets.long.validation_file"}
    assert end["sets"]["long"]["rows"] == 4
    card, page = (out / "README.md").read_text(), make_page(read_run(out))
    assert "| short | short.csv | 3 | 5 | 12 | 3 |" in card
    assert "| exact\\_match (long) |" in card or "| exact_match (long) |" in card
    assert "--set short" in card
    assert "Sets of the mixture" in page


@pytest.mark.parametrize("place", [("step", 2), ("step", 5), ("evaluation", 6)])
def test_killed_or_stopped_it_resumes_to_the_bit(tmp_path, finished, place):
    changes = {"data": mixture(tmp_path), "training__save_strategy": "steps", "training__save_steps": 3, **OFTEN}
    run_until_killed(tmp_path, place, **changes)
    run_until_stopped(tmp_path, ("step", 7), **changes)
    run(tmp_path, **changes)
    assert_same(tmp_path, finished[0])


def test_other_weights_or_another_file_of_a_set_do_not_resume(tmp_path):
    run_until_stopped(tmp_path, ("step", 3), data=mixture(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.sets\.long\.weight: 2\.0; in the checkpoint 1\.0"):
        run(tmp_path, data=mixture(tmp_path, weights=(3.0, 2.0)))
    data = mixture(tmp_path)
    write_rows(tmp_path / "short.csv", 6)
    with pytest.raises(ConfigError, match=r"data\.sets\.short\.train_file: .* bytes, hash"):
        run(tmp_path, data=data)


def test_a_set_gives_new_rows_its_columns_and_prefix(tmp_path):
    config = config_of(tmp_path)
    assert config.of_set("short").data.source_prefix == "label: "
    assert config.of_set("long").data.source_column == "question"
    with pytest.raises(ConfigError, match="name the one whose columns and prefix apply, --set short or long"):
        config.of_set(None)
    with pytest.raises(ConfigError, match="no set other: name the one"):
        config.of_set("other")
    alone = RunConfig.model_validate(settings(tmp_path))
    assert alone.of_set(None) == alone
    with pytest.raises(ConfigError, match="the run has one set"):
        alone.of_set("short")


def weighted(directory, weight):
    """Two sets, of which the second has rows with weights; its last row's is given."""
    data = mixture(directory)
    rows = [{"question": f"q {row}", "answer": "a", "w": 2 if row < 4 else weight} for row in range(5)]
    Path(data["sets"]["long"]["train_file"]).write_text("".join(json.dumps(one) + "\n" for one in rows))
    data["sets"]["long"]["weight_column"] = "w"
    return data


def test_weights_of_rows_go_with_their_set(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, **SMALL | {"data": weighted(tmp_path, 0.5)}))
    found = prepare(config)
    assert found.train_set.weights.tolist() == [1.0] * 5 + [2.0] * 4 + [0.5]
    assert found.held_out_set.weights is None
    assert "weights of long from column 'w': 0.5 to 2, mean 1.7 (data.weight_column)" in found.notes
    memory = run(tmp_path, data=weighted(tmp_path, 0.5), training__max_steps=2)
    assert len(memory.steps) == 2


def test_two_ranks_train_and_score_as_one(tmp_path, one_at_a_time):
    """Shares, weights of rows, and scores of each set, without dropout, over three epochs of other rows."""
    model = {**SMALL["model"], "config": {**SMALL["model"]["config"], "dropout_rate": 0.0}}
    found = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        data = weighted(tmp_path / str(ranks), 0.5)
        each = {"training__per_device_train_batch_size": 2 // ranks, "training__num_train_epochs": 3}
        found.append(run(tmp_path / str(ranks), ranks=ranks, data=data, model=model, **each))
    losses = [[report.loss for report in memory.steps] for memory in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(losses[0]) == 9
    one, two = (memory.evaluations[-1][0].sets for memory in found)
    for name in ("short", "long"):
        assert one[name]["loss"] == pytest.approx(two[name]["loss"], abs=1e-5)
        assert one[name]["rows"] == two[name]["rows"]


def test_ranks_with_other_weights_are_refused(tmp_path):
    ready = []
    for name, weight in (("a", 0.5), ("b", 0.75)):
        (tmp_path / name).mkdir()
        data = weighted(tmp_path / name, weight)
        ready.append(prepare(RunConfig.model_validate(settings(tmp_path / name, **SMALL | {"data": data}))))
    with pytest.raises(MismatchError, match=r"weights 13\.5\), rank 1 has .*weights 13\.75\)"):
        run_ranks(2, lambda comm: require_same_rows(comm, ready[comm.rank]))


def test_all_ranks_compare_the_chained_rows(tmp_path):
    """Two ranks with other files are refused, as with one set."""
    configs = []
    for name, count in (("a", 5), ("b", 6)):
        (tmp_path / name).mkdir()
        configs.append(config_of(tmp_path / name))
        write_rows(tmp_path / name / "short.csv", count)
    ready = [prepare(config) for config in configs]

    def work(comm):
        require_same_rows(comm, ready[comm.rank])

    with pytest.raises(MismatchError, match="training rows differ between ranks"):
        run_ranks(2, work)
