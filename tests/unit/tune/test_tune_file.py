"""A choice written into a user's run file."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import yaml

from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.config import load_run
from fullshard.program.config.load import read_values
from fullshard.program.launch.programs import tune
from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.run_file import as_yaml, changes, edited, write_choice
from support.tiny_run import write_rows

VALUES = {
    "speed.ways": ["flex", "compile"],
    "training.gradient_checkpointing": 3,
    "training.per_device_train_batch_size": 2,
    "training.gradient_accumulation_steps": 4,
}

FILE = """\
# A run of mine.
output_dir: runs/mine   # kept
model:
  config: {model_type: t5}
  tokenizer: {vocab_size: 60}
data: {train_file: train.csv, source_column: text, target_column: category}
training:
    # why eight
    per_device_train_batch_size: 8   # rows
    gradient_checkpointing: auto
    eval_strategy: "no"

# the end
"""

WRITTEN = """\
# A run of mine.
output_dir: runs/mine   # kept
model:
  config: {model_type: t5}
  tokenizer: {vocab_size: 60}
data: {train_file: train.csv, source_column: text, target_column: category}
training:
    gradient_accumulation_steps: 4
    # why eight
    per_device_train_batch_size: 2   # rows
    gradient_checkpointing: 3
    eval_strategy: "no"

# the end
speed:
  ways: [flex, compile]
"""


@pytest.fixture
def path(tmp_path):
    write_rows(tmp_path / "train.csv", 8)
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_only_the_lines_of_the_choice_change(path):
    path.chmod(0o640)
    write_choice(path, VALUES)
    assert path.read_text() == WRITTEN
    assert path.stat().st_mode & 0o777 == 0o640
    assert changes(Setting(("flex", "compile"), "3", 2, 4), load_run(path)) == {}


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("training: {seed: 1}\n", "training: {per_device_train_batch_size: 2, seed: 1}\n"),
        ("training: {}\n", "training: {per_device_train_batch_size: 2}\n"),
        ("training:\nseed: 1", "training:\n  per_device_train_batch_size: 2\nseed: 1"),
        ("training:", "training:\n  per_device_train_batch_size: 2\n"),
        ("seed: 1", "seed: 1\ntraining:\n  per_device_train_batch_size: 2\n"),
        ("training: # mine\n    a: 1\n", "training: # mine\n    per_device_train_batch_size: 2\n    a: 1\n"),
        ("training:\r\n  a: 1\r\n", "training:\r\n  per_device_train_batch_size: 2\n  a: 1\r\n"),
        ('training: {"per_device_train_batch_size": 8}', 'training: {"per_device_train_batch_size": 2}'),
    ],
)
def test_a_section_of_any_form_gets_the_option(text, new):
    assert edited(text, {"training.per_device_train_batch_size": 2}) == new
    assert yaml.safe_load(new)["training"]["per_device_train_batch_size"] == 2


@pytest.mark.parametrize(
    "text",
    [
        FILE[: FILE.index("training:")] + "card: &none {}\ntraining: *none\n",
        "own: &own {per_device_train_batch_size: 8, gradient_accumulation_steps: 1, gradient_checkpointing: auto}\n"
        "training: *own\n",
        '{"output_dir": "runs/mine", "data": {}}\n',
        FILE + "---\n",
        "- 1\n",
    ],
)
def test_a_file_that_cannot_be_edited_line_by_line_stays_and_the_error_has_what_to_add(path, text):
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)is as it was: .*Add it by hand:") as caught:
        write_choice(path, VALUES)
    assert str(caught.value).endswith(as_yaml(VALUES))
    assert path.read_text() == text


def test_an_override_that_hides_the_choice_is_refused(path):
    with pytest.raises(ConfigError, match="an override of the command line"):
        write_choice(path, VALUES, ["training.gradient_checkpointing=true"])
    assert path.read_text() == FILE


def test_a_read_only_file_is_not_replaced_and_a_full_disk_names_what_to_add(path, monkeypatch):
    path.chmod(0o444)
    with pytest.raises(ConfigError, match=r"(?s)it is read-only.*Add it by hand:"):
        write_choice(path, VALUES)
    path.chmod(0o644)

    def refuse(*arguments):
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr("fullshard.program.tune.run_file.write_text", refuse)
    with pytest.raises(ConfigError, match=r"(?s)No space left.*Add it by hand:"):
        write_choice(path, VALUES)
    assert path.read_text() == FILE


def test_a_file_that_changed_while_ranks_measured_stays(path, capsys):
    before = read_values(path)
    path.write_text(FILE.replace("batch_size: 8", "batch_size: 64"))
    options = Namespace(config=path, overrides=[])
    found = SimpleNamespace(chosen=Setting(("flex",), "3", 2, 4), kept="somewhere")
    with pytest.raises(ConfigError, match=r"(?s)has changed since it was read.*per_device_train_batch_size: 2"):
        tune._write(options, before, found)
    assert "batch_size: 64" in path.read_text()
    tune._write(options, read_values(path), found)
    assert load_run(path).ways == ("flex",)
    tune._write(options, read_values(path), found)
    said = capsys.readouterr().out
    assert "it already says the fastest" in said
    assert "not varied, as the run file sets it: speed.ways, training.gradient_checkpointing" in said


def test_ways_by_hand_stay_as_they_are_written(path):
    overrides = ["speed.ways=[flex]", "training.torch_compile=true", "training.gradient_checkpointing=false"]
    assert changes(Setting(("flex", "compile"), "false", 8, 1), load_run(path, overrides)) == {}
