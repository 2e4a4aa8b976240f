"""The schema: frozen, complete in its explanations, and strict about options that would do nothing."""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from fullshard.errors import ConfigError
from fullshard.program.config import changed_settings, load_run
from fullshard.program.config.schema import RunConfig, TrainingConfig
from support.tiny_run import settings

EXAMPLE = Path(__file__).parents[3] / "examples" / "banking77_tiny.yaml"


def sections(model):
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation)


def test_configuration_is_frozen(run_file):
    run = load_run(run_file)
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        run.training.learning_rate = 1.0
    with pytest.raises(TypeError):
        run.model.config["d_model"] = 32


def test_every_option_is_explained():
    unexplained = [
        f"{section.__name__}.{name}"
        for section in sections(RunConfig)
        for name, field in section.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and field.annotation.__doc__)
    ]
    assert unexplained == []


def test_defaults_are_those_of_hugging_face():
    defaults = TrainingConfig()
    assert (defaults.per_device_train_batch_size, defaults.num_train_epochs, defaults.learning_rate) == (8, 3, 5e-5)
    assert (defaults.adam_beta1, defaults.adam_beta2, defaults.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert (defaults.max_grad_norm, defaults.weight_decay, defaults.lr_scheduler_type) == (1.0, 0.0, "linear")


def test_plain_values_round_trip_through_json(run_file):
    run = load_run(run_file, ["sharding.wrap=[T5Block]", "model.class=seq2seq", "resume=runs/c"])
    plain = json.loads(json.dumps(run.as_plain()))
    assert plain["model"]["class"] == "seq2seq"
    assert plain["resume"] == "runs/c"
    assert plain["model"]["config"] == {"model_type": "t5", "d_model": 16}
    assert RunConfig.model_validate(plain) == run


def test_the_example_run_file_loads():
    run = load_run(EXAMPLE)
    assert run.data.train_file.is_file()
    assert run.data.validation_file.is_file()
    assert run.nproc is None


def test_rows_are_held_out_in_one_way_only(run_file):
    data = "data={dataset_name: rows/of, validation_fraction: 0.1, validation_split: "
    with pytest.raises(ConfigError, match=r"validation_fraction .* cannot be combined with validation_split"):
        load_run(run_file, [data + "test}"])
    assert load_run(run_file, [data + "null}"]).data.validation_fraction == 0.1


def test_a_delimiter_is_one_character_of_csv_files(run_file, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "rows.csv.gz").touch()
    jsonl = f"data.train_file={tmp_path / 'rows.jsonl'}"
    for value in ("';'", r'"\t"'):
        gzipped = [f"data.train_file={tmp_path / 'rows.csv.gz'}", f"data.delimiter={value}"]
        assert len(load_run(run_file, gzipped).data.delimiter) == 1
    assert load_run(run_file, [jsonl, "data.format=csv", "data.delimiter=^"]).data.delimiter == "^"
    for overrides, problem in (
        (["data.delimiter=|"], "must be one character .* got ''"),
        (["data.delimiter=';;'"], "must be one character .* got ';;'"),
        ([jsonl, "data.validation_file=null", "data.delimiter=;"], "applies to CSV files; rows.jsonl is not one"),
        (["data.format=tsv", "data.delimiter=;"], "applies to CSV files, but format is tsv"),
        (["data={dataset_name: rows/of, delimiter: ;}"], "delimiter need.? train_file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_run(run_file, overrides)


def mixture_of(sets, **data):
    return {"output_dir": "out", "model": {"path": "m"}, "data": {"sets": sets, **data}}


@pytest.mark.parametrize(
    ("sets", "data", "message"),
    [
        ({"a": {"train_file": "a.csv", "weight": 1}, "b": {"train_file": "b.csv"}}, {}, "1 of 2 have no weight: b"),
        ({"a": {"train_file": "a.csv", "weight": 0}}, {}, "greater than 0"),
        ({"a b": {"train_file": "a.csv"}}, {}, "match pattern"),
        ({"a": {"train_file": "a.csv"}}, {"train_file": "b.csv"}, "train_file of each set is given inside sets"),
        ({"a": {}}, {}, "sets.a: exactly one of train_file and dataset_name must be given; got neither"),
        ({"a": {"train_file": "a.csv", "format": "xls"}}, {}, "sets.a.format: Input should be"),
        ({"a": {"train_file": "a.jsonl", "delimiter": ";"}}, {}, "sets.a: delimiter applies to CSV files"),
    ],
)
def test_sets_that_cannot_be_a_mixture(sets, data, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        RunConfig.model_validate(mixture_of(sets, validation_fraction=0.1, **data))


def test_a_set_that_yaml_reads_as_a_number_is_no_name(run_file):
    with pytest.raises(ConfigError, match=r"data\.sets\.7"):
        load_run(run_file, ["data={sets: {7: {train_file: rows/train.csv}}}"])


def test_a_set_has_what_it_leaves_out_from_the_mixture_and_replaces_what_it_says_otherwise():
    sets = {
        "a": {"train_file": "a.csv"},
        "b": {"train_file": "b.csv", "template": "{x}: {y}", "validation_file": "c.csv", "source_prefix": "b: "},
    }
    data = RunConfig.model_validate(mixture_of(sets, source_column="text", validation_fraction=0.2)).data
    a, b = data.parts.values()
    assert (a.source_column, a.template, a.validation_fraction, a.source_prefix) == ("text", None, 0.2, "")
    assert (b.source_column, b.template, b.validation_fraction, b.source_prefix) == (None, "{x}: {y}", 0.0, "b: ")
    assert data.holds_out


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"source_column": "q"}, "text_column is for plain text, and source_column for rows with a source"),
        ("data", {"target_column": "a", "source_prefix": "x: "}, "target_column and source_prefix for rows"),
        ("data", {"template": "{q}"}, "and template for rows"),
        ("data", {"weight_column": "w"}, "and weight_column for rows"),
        ("data", {"separator": "->"}, "and separator for rows"),
        ("data", {"chat_template": True}, "and chat_template for rows"),
        ("data", {"max_target_length": 8}, "and max_target_length for rows"),
        ("data", {"streaming": True}, "the rows of text_column are cut out of all texts joined"),
        ("data", {"format": "wikihow"}, "format: wikihow has fixed columns; leave out text_column"),
        ("training", {"packing": True}, "training.packing joins rows that are shorter"),
        ("evaluation", {"metric": "rougeL"}, "evaluation.metric: rougeL of generated texts"),
        ("evaluation", {}, "evaluation.metric: exact_match of generated texts"),
        ("evaluation", {"metric": "perplexity", "metrics": ["bleu"]}, "Set evaluation.metric: perplexity"),
    ],
)
def test_plain_text_has_no_options_of_pairs(section, values, message):
    data = {"train_file": "a.csv", "text_column": "text", "validation_fraction": 0.1}
    run = {"output_dir": "out", "model": {"path": "m"}, "data": data, "evaluation": {"metric": "perplexity"}}
    assert RunConfig.model_validate(run).data.text_column == "text"
    changed = {**run, section: values if section == "evaluation" else {**run.get(section, {}), **values}}
    with pytest.raises(ValidationError, match=re.escape(message)):
        RunConfig.model_validate(changed)


def test_sets_of_plain_text_are_all_of_it():
    sets = {"a": {"train_file": "a.csv"}, "b": {"train_file": "b.csv", "source_column": "q"}}
    with pytest.raises(ValidationError, match=r"sets\.b: text_column is for plain text"):
        RunConfig.model_validate(mixture_of(sets, text_column="text"))


def test_weights_need_batches_of_rows():
    sets = {name: {"train_file": f"{name}.csv", "weight": 1} for name in "ab"}
    values = mixture_of(sets, validation_fraction=0.1) | {"training": {"per_device_train_batch_tokens": 64}}
    with pytest.raises(ValidationError, match="a set with a weight gives other rows to each"):
        RunConfig.model_validate(values)


@pytest.mark.parametrize("given", ["speed.ways=[liger,compile]", "training.torch_compile=true"])
def test_ligers_kernels_are_refused_in_compiled_blocks(run_file, given):
    with pytest.raises(ConfigError, match="liger and compile"):
        load_run(run_file, ["speed.ways=[liger]", given])


def test_what_a_run_file_does_not_name_has_not_changed(tmp_path):
    """Independent of the schema: the run file's own keys."""
    values = settings(tmp_path, model={"path": "my-t5", "adapter": {"type": "lora", "r": 4}})
    values["training"]["weight_decay"] = RunConfig.model_validate(values).training.weight_decay  # the default
    found = changed_settings(RunConfig.model_validate(values).as_plain())
    named = {"output_dir", "seed", "nproc", "model.path", "model.adapter.type", "model.adapter.r"}
    named |= {f"{section}.{key}" for section in ("data", "training", "evaluation") for key in values[section]}
    assert set(found) <= named - {"training.weight_decay"}
    assert {"model.path", "model.adapter.r", "training.learning_rate", "data.max_source_length", "nproc"} <= set(found)


def test_a_key_of_another_version_is_shown_unless_it_is_empty():
    found = changed_settings({"training": {"bygone": 3, "empty": None, "learning_rate": 5e-5}})
    assert found["training.bygone"] == 3
    assert "training.empty" not in found
