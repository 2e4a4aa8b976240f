"""Where a run starts: which checkpoints it resumes from, which settings must match, and what it deletes."""

import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch

from fullshard.core.optim import decay_groups
from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.train.run import assemble, loop
from fullshard.program.train.setup.resume import TITLE_LISTS, choose_starting_point, deciding_settings, mark_finished
from fullshard.state.storage import Completion, Survey, find_checkpoints
from support.forged import forge_index
from support.interrupted_run import OFTEN, SMALL, assert_same, before, files, run, run_until_stopped
from support.tiny_run import settings, write_rows

pytestmark = pytest.mark.usefixtures("unmetered")


def test_a_finished_run_is_replaced_on_purpose_only_and_its_checkpoints_go(tmp_path, uninterrupted):
    run(tmp_path, training__save_strategy="steps", training__save_steps=1, training__max_steps=3, **OFTEN)
    model = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"holds a finished run.*resume=.*step-00000003 with a higher training.max_steps.*resume=never",
    ):
        run(tmp_path, **OFTEN)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == model
    memory = run(tmp_path, resume="never", **OFTEN)
    assert memory.begun[0].resumed_step == 0
    assert "holds an earlier run's model; this run's model replaces it" in memory.begun[0].notes[-1]
    names = [path.name for path in find_checkpoints(tmp_path / "out" / "checkpoints")]
    assert names == ["step-00000004", "step-00000008"]
    assert_same(tmp_path, uninterrupted)


def test_never_starts_anew_and_says_what_it_deletes(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, ("step", 5), training__learning_rate=0.5, **OFTEN)
    memory = run(tmp_path, resume="never", **OFTEN)
    assert memory.begun[0].resumed_step == 0
    directory = tmp_path / "out" / "checkpoints"
    assert f"resume=never: step-00000004, step-00000006 in {directory} deleted" in memory.begun[0].notes
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("resume", "text"),
    [
        ("nevr", "auto, previous, never or"),
        ("out", r"name one of them, such as resume=.*/out/checkpoints/step-00000006\."),
        ("out/checkpoints", "name one of them"),
        ("out/checkpoints/step-00000006/index.json", r"is a file\. Give .* resume=.*/step-00000006\."),
    ],
)
def test_what_is_no_checkpoint_is_not_resumed_from(tmp_path, resume, text):
    run_until_stopped(tmp_path, ("step", 5), **OFTEN)
    with pytest.raises(ConfigError, match=text):
        run(tmp_path, resume=tmp_path / resume, **OFTEN)


def test_a_stop_says_how_to_go_on_where_the_same_command_would_not(tmp_path):
    stopped = run_until_stopped(tmp_path, None, resume="never")
    assert "The same command with resume=auto resumes" in str(stopped)


@pytest.mark.parametrize("inside", [True, False])
def test_a_named_checkpoint_is_gone_on_from_and_later_ones_go(tmp_path, uninterrupted, inside):
    changes = {
        "training__save_strategy": "steps",
        "training__save_steps": 1,
        "training__save_total_limit": None,
    } | OFTEN
    run(tmp_path, **changes)
    directory = tmp_path / "out" / "checkpoints"
    path = directory / "step-00000003"
    if not inside:
        path = Path(shutil.move(path, tmp_path / "mine"))
        shutil.rmtree(tmp_path / "out")
        write_rows(tmp_path / "train.csv", 25)
    stopped = run_until_stopped(tmp_path, before(5), resume=str(path), **changes)
    assert stopped.step == 5
    left = [int(found.name[-1]) for found in find_checkpoints(directory)]
    assert left == ([1, 2, 3, 4, 5] if inside else [4, 5])
    run(tmp_path, **changes)
    if inside:
        assert_same(tmp_path, uninterrupted)


def test_settings_that_decide_training_must_be_the_checkpoints(tmp_path):
    run_until_stopped(tmp_path, None)
    changes = {
        "training__learning_rate": 0.5,
        "training__num_train_epochs": 3,
        "data__max_source_length": 11,
        "training__per_device_train_batch_size": 3,
        "seed": 4,
    }
    found = files(tmp_path / "out")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, **changes)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"The run in {tmp_path / 'out'} was interrupted and would resume from step-00000001")
    assert sorted(line.strip() for line in lines[1:-1]) == [
        "data.max_source_length: 11; in the checkpoint 12",
        "global batch (ranks x training.per_device_train_batch_size x training.gradient_accumulation_steps): "
        "6; in the checkpoint 4",
        "seed: 4; in the checkpoint 3",
        "training.learning_rate: 0.5; in the checkpoint 0.01",
        "training.num_train_epochs: 3.0; in the checkpoint 2.0",
    ]
    assert "resume=never" in lines[-1]
    assert "another output_dir" in lines[-1]
    assert files(tmp_path / "out") == found


def test_a_run_that_took_the_first_rows_does_not_go_on_with_drawn_ones(tmp_path):
    run_until_stopped(tmp_path, None)

    def as_before(index):  # earlier versions took the first rows
        assert index["values"]["settings"]["data.max_train_samples"] == "13 drawn by hash"
        index["values"]["settings"]["data.max_train_samples"] = 13

    forge_index(tmp_path / "out" / "checkpoints" / "step-00000001", as_before)
    with pytest.raises(ConfigError, match=r"data\.max_train_samples: 13 drawn by hash; in the checkpoint 13\n") as info:
        run(tmp_path)
    assert "restore" not in str(info.value)  # nobody can
    assert "resume=never" in str(info.value)
    with pytest.raises(ConfigError, match=r"and restore the other settings"):
        run(tmp_path, training__learning_rate=1)
    remedy = re.search(r"To resume, set resume=(\S+?):", str(info.value))[1]
    assert run(tmp_path, resume=remedy).begun[0].resumed_step == 1


def test_a_file_is_what_it_holds_wherever_it_is(tmp_path, monkeypatch):
    run_until_stopped(tmp_path, None)
    moved = shutil.copy(tmp_path / "train.csv", tmp_path / "moved.csv")
    assert run(tmp_path, data__train_file=str(moved), training__max_steps=None).begun[0].resumed_step == 1
    shutil.rmtree(tmp_path / "out")
    run_until_stopped(tmp_path, None)
    changed = (tmp_path / "train.csv").read_text().replace("card", "cart", 1)
    (tmp_path / "changed.csv").write_text(changed)
    with pytest.raises(ConfigError, match=r"data\.train_file: [\d,]+ bytes, hash \w+; in the checkpoint [\d,]+ bytes"):
        run(tmp_path, data__train_file=str(tmp_path / "changed.csv"))


@pytest.mark.parametrize("finished", [True, False])
def test_a_refusal_names_the_data_of_both_runs(tmp_path, finished):
    """As with two tables of one name, whose first run files write to the same directory."""
    if finished:
        run(tmp_path, training__max_steps=1)
    else:
        run_until_stopped(tmp_path, None, training__max_steps=3)
    most = {"training__max_steps": 1 if finished else 3}
    other = tmp_path / "other" / "train.csv"
    other.parent.mkdir()
    other.write_bytes((tmp_path / "train.csv").read_bytes().replace(b"card", b"cart", 1))
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, data__train_file=str(other), **most)
    size = f"{other.stat().st_size:,} bytes, hash "
    assert f"of other data (data.train_file was {tmp_path / 'train.csv'} ({size}" in str(caught.value)
    assert f") and is {other} ({size}" in str(caught.value)
    same = shutil.copy(tmp_path / "train.csv", tmp_path / "same.csv")
    if finished:
        with pytest.raises(ConfigError, match=r"holds a finished run\. Set another"):
            run(tmp_path, data__train_file=str(same), **most)
    else:
        assert run(tmp_path, data__train_file=str(same), **most).begun[0].resumed_step == 1


def test_what_does_not_decide_training_may_change(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(3), **OFTEN)
    run(
        tmp_path,
        training__per_device_eval_batch_size=3,
        training__save_strategy="no",
        training__logging_steps=1,
        evaluation__num_samples_shown=0,
        nproc=1,
        **OFTEN,
    )
    ours, theirs = (directory / "out" / "model.safetensors" for directory in (tmp_path, uninterrupted))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_named_checkpoint_takes_changed_settings_but_no_other_model_or_global_batch(tmp_path, monkeypatch):
    decays = []
    issue_step = loop.issue_step

    def spy(model, optimizer, *rest, late):
        decays.append(optimizer.param_groups[0]["weight_decay"])
        return issue_step(model, optimizer, *rest, late=late)

    monkeypatch.setattr(loop, "issue_step", spy)
    path = run_until_stopped(tmp_path, ("step", 2)).checkpoint
    shutil.copytree(path, tmp_path / "mine")
    path = str(tmp_path / "mine")
    memory = run(tmp_path, resume=path, training__learning_rate=0.5, training__weight_decay=0.25)
    assert "changed: training.learning_rate: 0.5; in the checkpoint 0.01" in memory.begun[0].notes
    assert memory.steps[0].step == 4
    assert decays == [0.0] * 3 + [0.25] * 5
    assert memory.steps[0].learning_rate == pytest.approx(0.5 * 5 / 7)
    with pytest.raises(ConfigError, match=r"global batch .*: 6; in the checkpoint 4"):
        run(tmp_path, resume=path, training__gradient_accumulation_steps=3)
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.vocab_size: 61; in the checkpoint 60"):
        run(tmp_path, resume=path, model={**SMALL["model"], "tokenizer": {"vocab_size": 61}})
    with pytest.raises(ConfigError, match="was saved after step 3, but with these settings the run has only 2 steps"):
        run(tmp_path, resume=path, training__max_steps=2)


@pytest.mark.parametrize("file", ["shard-00000-of-00001.safetensors", "index.json", "complete.json"])
def test_a_damaged_newest_checkpoint_is_an_error_and_going_back_is_a_choice(file, tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    good, damaged = (tmp_path / "out" / "checkpoints" / f"step-0000000{step}" for step in (4, 6))
    (damaged / file).write_bytes((damaged / file).read_bytes()[:-2])
    found = files(tmp_path / "out")
    for resume in ("auto", str(damaged)):
        with pytest.raises(CheckpointError) as info:
            run(tmp_path, resume=resume, **OFTEN)
        assert str(damaged) in str(info.value)
        assert file in str(info.value)
        assert str(good) in str(info.value)
    assert "resume=previous" not in str(info.value)
    assert files(tmp_path / "out") == found
    memory = run(tmp_path, resume="previous", **OFTEN)
    assert memory.begun[0].resumed_step == 4
    note = "step-00000006 is damaged and is renamed to step-00000006.damaged; delete that if you do not need it"
    assert note in memory.begun[0].notes
    assert damaged.with_name("step-00000006.damaged").is_dir()
    assert_same(tmp_path, uninterrupted)


def test_previous_is_auto_where_nothing_is_damaged(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), resume="previous", **OFTEN)
    memory = run(tmp_path, resume="previous", **OFTEN)
    assert memory.begun[0].resumed_step == 6
    with pytest.raises(ConfigError, match="holds a finished run"):
        run(tmp_path, resume="previous", **OFTEN)
    assert_same(tmp_path, uninterrupted)


def test_a_damaged_older_checkpoint_is_said_and_stands_in_nobodys_way(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    older = tmp_path / "out" / "checkpoints" / "step-00000004"
    (older / "index.json").unlink()
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == 6
    assert any(f"{older} is not complete: index.json is missing. It is older than" in n for n in memory.begun[0].notes)
    assert_same(tmp_path, uninterrupted)


def test_never_deletes_damaged_checkpoints_too(tmp_path):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    damaged = tmp_path / "out" / "checkpoints" / "step-00000006"
    assert damaged.is_dir()
    (damaged / "index.json").unlink()
    stopped = run_until_stopped(tmp_path, None, resume="never", **OFTEN)
    assert stopped.step == 1
    assert not damaged.exists()
    assert run(tmp_path, **OFTEN).begun[0].resumed_step == 1


def test_a_named_earlier_checkpoint_sets_damaged_later_ones_aside(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    directory = tmp_path / "out" / "checkpoints"
    (directory / "step-00000006" / "complete.json").write_text("{")
    (directory / "step-00000006" / "index.json").write_text("{")
    memory = run(tmp_path, resume=directory / "step-00000004", **OFTEN)
    assert memory.begun[0].resumed_step == 4
    assert (directory / "step-00000006.damaged").is_dir()
    assert not (directory / "step-00000006").exists()
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.update(group_rows=-4), "group_rows is -4"),
        (lambda values: values.update(group_rows=True), "group_rows is True"),
        (lambda values: values.pop("record") and None, "record is None"),
        (lambda values: values.update(settings=[1]), r"settings is \[1\]"),
        (lambda values: values.update(scaler={"scale": float("nan")}), "scaler is {'scale': nan}"),
        (lambda values: values.update(record={"last": None}), "The record of the run in .*step-.* is damaged"),
    ],
)
def test_values_that_no_run_saves_are_refused(change, words, tmp_path):
    path = Path(run_until_stopped(tmp_path, None).checkpoint)
    forge_index(path, lambda index: change(index["values"]))
    with pytest.raises(CheckpointError, match=words):
        run(tmp_path)


def test_a_flipped_bit_names_another_checkpoint_that_goes_on_when_typed(tmp_path, uninterrupted):
    run_until_stopped(tmp_path, before(6), **OFTEN)
    shard = tmp_path / "out" / "checkpoints" / "step-00000006" / "shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: block 0 of ") as info:
        run(tmp_path, **OFTEN)
    other = re.search(r"pass resume=(\S+) to fullshard train", str(info.value))[1]
    memory = run(tmp_path, resume=other, **OFTEN)
    assert memory.begun[0].resumed_step == 4
    assert_same(tmp_path, uninterrupted)


def test_torn_checkpoints_alone_are_an_error_and_not_a_new_run(tmp_path):
    path = run_until_stopped(tmp_path, None).checkpoint
    Path(path, "complete.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"complete\.json.* is the newest .* No checkpoint there is complete.*resume=never"
    ):
        run(tmp_path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = Path(run_until_stopped(tmp_path, None).checkpoint)
    shutil.copytree(path / "model", tmp_path / "model")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        run(tmp_path, resume=str(tmp_path / "model"))


def test_a_saved_dataset_is_what_it_holds_wherever_it_is(tmp_path):
    def deciding(name, texts):
        rows = datasets.Dataset.from_dict({"text": texts, "label": ["a"] * len(texts)})
        if not (tmp_path / name).exists():
            datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / name)
        data = {"dataset_name": str(tmp_path / name)}
        return deciding_settings(RunConfig.model_validate({**settings(tmp_path), "data": data}), 1)

    first = deciding("one", ["a", "b"])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert deciding("two", []) == first
    shutil.rmtree(tmp_path / "one")
    assert deciding("one", ["c", "d", "e"]) != first


def test_wikihows_title_lists_decide_where_they_split_the_rows(tmp_path):
    data = {"train_file": str(tmp_path / "wikihowAll.csv"), "format": "wikihow"}
    (tmp_path / "wikihowAll.csv").write_text("headline,title,text\n")

    def deciding(**more):
        return deciding_settings(RunConfig.model_validate({**settings(tmp_path), "data": data | more}), 1)

    by_hash = deciding()
    for name in ("train", "val"):
        (tmp_path / f"all_{name}.txt").write_text("HowtoA\n")
    by_lists = deciding()
    (tmp_path / "all_val.txt").write_text("HowtoB\n")
    moved = deciding()
    assert by_lists == by_hash | {TITLE_LISTS: by_lists[TITLE_LISTS]}
    assert moved == by_lists | {TITLE_LISTS: moved[TITLE_LISTS]} != by_lists
    assert by_lists[TITLE_LISTS].startswith("all_train.txt 7 bytes, hash ")
    assert TITLE_LISTS not in deciding(validation_file=str(tmp_path / "held_out.csv"))


@pytest.mark.parametrize(
    ("ended_by", "steps", "limit"),
    [
        ("steps", 3, "training.max_steps"),
        ("steps", 2, "training.num_train_epochs"),
        ("time", 2, "training.max_train_minutes"),
        ("early_stopping", 2, "training.early_stopping_patience"),
    ],
)
def test_a_finished_run_says_what_ended_it(tmp_path, monkeypatch, ended_by, steps, limit):
    config = RunConfig.model_validate(settings(tmp_path, training__max_steps=3))
    directory = tmp_path / "out" / "checkpoints"
    directory.mkdir(parents=True)
    mark_finished(config, steps, ended_by)
    found = Survey(directory, ((Completion(2, None, "", {}), directory / "step-00000002"),), ())
    monkeypatch.setattr("fullshard.program.train.setup.resume.survey", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=rf"resume={directory}/step-00000002 with a higher {limit}, or resume=never"):
        choose_starting_point(config, 1)
    (directory / "finished.json").write_text('{"steps": 2}')
    with pytest.raises(ConfigError, match=r"with a higher training\.num_train_epochs, or"):
        choose_starting_point(config, 1)


DECAYING = {"training__weight_decay": 0.1, "training__learning_rate": 1e-2} | OFTEN


def without_rules(path):
    """Leave out of a checkpoint what earlier versions did not record."""
    forge_index(Path(path), lambda index: index["values"].pop("rules", None) and None)


@pytest.fixture
def whole(tmp_path):
    """The directory of the run that is not interrupted."""
    (tmp_path / "whole").mkdir()
    return tmp_path / "whole"


@pytest.fixture
def by_dimensions(monkeypatch):
    """Optimizers as earlier versions made them: all matrices decay, T5's table of relative positions too."""

    def make(model, config, **_):
        training = config.training
        betas = (training.adam_beta1, training.adam_beta2)
        options = {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon, "fused": True}
        return torch.optim.AdamW(decay_groups(model, training.weight_decay), **options)

    with monkeypatch.context() as patch:
        patch.setattr(assemble, "make_optimizer", make)
        yield patch


@pytest.mark.parametrize("by_name", [False, True])
def test_weight_decay_goes_on_by_dimensions_also_when_it_resumes_twice(tmp_path, whole, by_dimensions, by_name):
    run(whole, **DECAYING)
    stopped = run_until_stopped(tmp_path, ("step", 3), **DECAYING)
    by_dimensions.undo()
    without_rules(stopped.checkpoint)
    more = {"resume": str(stopped.checkpoint)} if by_name else {}
    again = run_until_stopped(tmp_path, ("step", 5), **DECAYING | more)
    assert again.step > stopped.step
    run(tmp_path, **DECAYING)
    assert_same(tmp_path, whole)


def test_a_run_that_begins_now_goes_on_by_names(tmp_path, whole):
    run(whole, **DECAYING)
    run_until_stopped(tmp_path, ("step", 3), **DECAYING)
    run(tmp_path, **DECAYING)
    assert_same(tmp_path, whole)


def test_epochs_go_on_to_limit_max_steps_unless_one_of_them_is_changed(tmp_path):
    """Two epochs of four steps, and max_steps above: earlier versions took the smaller number."""
    stopped = run_until_stopped(tmp_path, ("step", 1), training__max_steps=30, training__warmup_steps=0, **OFTEN)
    without_rules(stopped.checkpoint)
    stopped = run_until_stopped(tmp_path, ("step", 3), training__max_steps=30, training__warmup_steps=0, **OFTEN)
    memory = run(tmp_path, training__max_steps=30, training__warmup_steps=0, **OFTEN)
    assert (memory.begun[0].total_steps, memory.ended[0].steps) == (8, 8)
    other = {"training__max_steps": 10, "training__warmup_steps": 0, "resume": str(stopped.checkpoint)}
    assert run(tmp_path, **OFTEN | other).begun[0].total_steps == 10


@pytest.mark.parametrize("rules", [None, {}, {"weight_decay": "dimensions"}, {"weight_decay": "n", "steps": "smaller"}])
def test_rules_that_no_run_saves_are_refused(tmp_path, rules):
    path = Path(run_until_stopped(tmp_path, None).checkpoint)
    forge_index(path, lambda index: index["values"].update(rules=rules))
    with pytest.raises(CheckpointError, match="rules is"):
        run(tmp_path)


FREE = OFTEN | {"evaluation__max_new_tokens": None, "data__max_target_length": 40}


@pytest.mark.parametrize(("changes", "comparable"), [({}, True), ({"max_new_tokens": 6}, False), (None, False)])
def test_evaluations_of_texts_of_other_lengths_are_not_compared(tmp_path, changes, comparable):
    """Without the setting, earlier versions wrote up to data.max_target_length (40), now it is the longest target."""
    path = Path(run_until_stopped(tmp_path, before(6), **FREE).checkpoint)

    def change(index):
        longest = index["values"].pop("max_new_tokens", None)
        assert longest is None or 6 < longest < 40
        index["values"].update({} if changes is None else {"max_new_tokens": longest} | changes)

    forge_index(path, change)
    notes = run(tmp_path, **FREE).begun[0].notes
    assert any("was evaluated with other settings" in note for note in notes) is not comparable


def test_other_data_with_longer_targets_makes_other_evaluations(tmp_path):
    path = run_until_stopped(tmp_path, before(6), **FREE).checkpoint
    more = tmp_path / "more.csv"
    more.write_text((tmp_path / "train.csv").read_text() + "it is long,joy joy joy joy joy\n")
    other = {"data__train_file": str(more), "data__max_train_samples": None, "resume": str(path)}
    notes = run(tmp_path, **FREE | other).begun[0].notes
    assert any("was evaluated with other settings" in note for note in notes)
