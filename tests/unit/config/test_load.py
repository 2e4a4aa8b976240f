"""Overrides, paths, and one message that names every problem by its dotted key."""

import shlex
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
from pydantic import BaseModel

from fullshard.errors import ConfigError
from fullshard.program.config import EvaluationConfig, RunConfig, load_run, read_run, require_output_dir
from fullshard.program.config.schema import ShardingConfig
from fullshard.program.metrics import METRICS

NAMES = " or ".join([", ".join(map(repr, list(METRICS)[:-1])), repr(list(METRICS)[-1])])


def problems(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_values_defaults_and_exponents_without_a_point(run_file):
    run = load_run(run_file)
    assert run.training.learning_rate == 2e-3
    assert run.training.max_grad_norm == 1.0
    assert run.model.model_class == "auto"
    assert run.output_dir == Path("runs/x")


def test_sharding_auto_as_an_override_takes_settings_after_it_as_in_a_file(run_file):
    run = load_run(run_file, ["sharding=auto", "sharding.strategy=no_shard"])
    assert (run.sharding.auto, run.sharding.strategy) == (True, "no_shard")


def test_overrides_win_in_order_and_take_yaml_values(run_file):
    run = load_run(
        run_file,
        [
            "training.learning_rate=1e-3",
            "training.learning_rate=5e-4",
            "training.max_grad_norm=null",
            "model.config.d_model=32",
            "data.source_prefix=classify=yes",
            "evaluation.num_samples_shown=0",
            "sharding.wrap=[T5Block, Other]",
            "seed = 3",
        ],
    )
    assert run.training.learning_rate == 5e-4
    assert run.training.max_grad_norm is None
    assert run.model.config["d_model"] == 32
    assert run.model.config["model_type"] == "t5"
    assert run.evaluation.num_samples_shown == 0
    assert run.sharding.wrap == ("T5Block", "Other")
    assert run.seed == 3


def without_null(section, prefix=""):
    """Yield the options that do not take null, with their defaults."""
    for name, field in section.model_fields.items():
        key, kinds = prefix + (field.alias or name), (field.annotation, *get_args(field.annotation))
        nested = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if NoneType not in kinds and not field.is_required():
            yield key, field.get_default(call_default_factory=True)
        if nested is not None and NoneType not in kinds:
            yield from without_null(nested, f"{key}.")


UNSET = dict(without_null(RunConfig))


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_unsets_every_option(run_file, null):
    """Those that the run file sets, and those that the command line set before."""
    run_file.write_text(run_file.read_text() + "evaluation:\n  num_beams: 3\n")
    assert len(UNSET) > 50
    for key, default in UNSET.items():
        value = load_run(run_file, [f"{key}=[wrong]", f"{key}={null}"])
        for part in key.split("."):
            value = getattr(value, {"class": "model_class"}.get(part, part))
        assert value == default, key


def test_null_unsets_an_option_and_a_section_in_the_file_too(run_file):
    """As YAML reads a section whose lines are all comments."""
    run_file.write_text(run_file.read_text() + "evaluation:\nsharding:\n  wrap:\n")
    run = load_run(run_file)
    assert (run.evaluation, run.sharding) == (EvaluationConfig(), ShardingConfig())


def test_null_unsets_no_option_that_is_needed(run_file):
    assert problems(run_file, "output_dir=null")[1:] == ["output_dir: is required"]


def test_override_value_may_hold_equals_signs(run_file):
    assert load_run(run_file, ["data.source_prefix='a=b: '"]).data.source_prefix == "a=b: "


@pytest.mark.parametrize("override", ["seed", "=3", "training.=3", ".seed=3"])
def test_malformed_override(run_file, override):
    with pytest.raises(ConfigError, match=r"An override has the form section\.key=value.*got '" + override):
        load_run(run_file, [override])


def test_override_whose_value_is_not_yaml(run_file):
    with pytest.raises(ConfigError, match=r"The value of the override 'seed=\[1' is not valid YAML"):
        load_run(run_file, ["seed=[1"])
    with pytest.raises(ConfigError, match=r"write 'data\.template=\"{question} of {topic}\"'"):
        load_run(run_file, ["data.template={question} of {topic}"])


@pytest.mark.parametrize("text", ["yes", "2024-01-01", "1.5e+5", "017", "summarize: ", "{a}", 'it\'s: "so"'])
def test_what_the_answer_says_to_write_gives_the_text(run_file, text):
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, [f"data.source_prefix={text}"])
    (typed,) = shlex.split(str(caught.value).partition("as text, write ")[2])
    assert load_run(run_file, [typed]).data.source_prefix == text


def run_in(run_file, place, *overrides):
    return load_run(run_file, [f"output_dir={place}", *overrides])


def test_where_a_run_could_not_write_is_said_and_nothing_is_made(run_file, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("")
    for place in ("file", "file/runs/x"):
        with pytest.raises(ConfigError, match=rf"output_dir: .*{place} cannot be written to: .*file is a file\. Set"):
            require_output_dir(run_in(run_file, here / place))
    require_output_dir(run_in(run_file, here / "new" / "x"))
    assert [path.name for path in here.iterdir()] == ["file"]


def test_a_closed_directory_is_no_place_to_write(run_file, tmp_path, monkeypatch):
    config = run_in(run_file, tmp_path / "x")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # whoever runs the tests may write anywhere
    with pytest.raises(ConfigError, match=rf"no permission to write in {tmp_path}"):
        require_output_dir(config)


@pytest.mark.parametrize("inside", ["", "best"])
def test_a_run_does_not_replace_the_model_that_it_trains(run_file, tmp_path, inside):
    base = tmp_path / "mine" / inside
    base.mkdir(parents=True)
    (base / "model.safetensors").write_text("")
    (tmp_path / "mine" / "run.json").write_text("{}")
    config = run_in(run_file, tmp_path / "mine", f"model={{path: {base}}}")
    with pytest.raises(ConfigError, match=r"output_dir: .*mine is or contains model\.path"):
        require_output_dir(config)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "adapter_model.safetensors"])
def test_a_run_replaces_no_model_but_a_runs(run_file, tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("")
    config = run_in(run_file, tmp_path / "mine")
    with pytest.raises(ConfigError, match="holds a model that no run of fullshard train has left"):
        require_output_dir(config)
    (tmp_path / "mine" / "run.json").write_text("{}")
    require_output_dir(config)


def test_override_through_a_value(run_file):
    rule = "The override 'output_dir.x=1' needs output_dir to be a section; it is 'runs/x'"
    with pytest.raises(ConfigError, match=rule):
        load_run(run_file, ["output_dir.x=1"])


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("training.learning_rat=1", "training.learning_rate"),
        ("learning_rate=1", "training.learning_rate"),
        ("training.vocab_size=1", "model.tokenizer.vocab_size"),
        ("model.tokenizer.vocabsize=1", "model.tokenizer.vocab_size"),
        ("model.clas=causal", "model.class"),
        ("nprocs=2", "nproc"),
        ("Data.train_file=x", "data"),
        ("sharding.warp=auto", "sharding.wrap"),
    ],
)
def test_unknown_key_names_the_nearest_real_one(run_file, override, nearest):
    key = override.partition("=")[0].removesuffix(".train_file")
    assert problems(run_file, override)[1:] == [f"{key}: unknown key; did you mean {nearest}?"]


def test_unknown_key_like_no_other_lists_what_there_is(run_file):
    assert problems(run_file, "zzz=1")[1] == (
        "zzz: unknown key; the run file has output_dir, seed, nproc, resume, model, data, training, speed, "
        "sharding, evaluation, card"
    )
    assert problems(run_file, "model.tokenizer.zzz=1")[1] == (
        "model.tokenizer.zzz: unknown key; model.tokenizer has model.tokenizer.vocab_size"
    )


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "training.num_train_epochs=five",
            "training.num_train_epochs: expected a valid number, unable to parse string as a number; got 'five'",
        ),
        ("training.learning_rate=-1", "training.learning_rate: expected greater than 0; got -1"),
        ("training.learning_rate=.nan", "training.learning_rate: expected a finite number; got nan"),
        ("training.adam_beta1=1.0", "training.adam_beta1: expected less than 1; got 1.0"),
        ("training.eval_strategy=daily", "training.eval_strategy: expected 'epoch', 'steps' or 'no'; got 'daily'"),
        (
            "evaluation.metric=f1",
            f"evaluation.metric: expected {NAMES}; got 'f1'",
        ),
        ("data.source_column=3", "data.source_column: expected a valid string; got 3 (as YAML reads 3). If it is "
         "meant as text, write 'data.source_column=\"3\"'"),
        ("data.source_prefix=yes", "data.source_prefix: expected a valid string; got True (as YAML reads yes). "
         "If it is meant as text, write 'data.source_prefix=\"yes\"'"),
        ("data.source_prefix=it's: ", "data.source_prefix: expected a valid string; got {\"it's\": None} (as YAML "
         "reads it's: ). If it is meant as text, write 'data.source_prefix=\"it'\"'\"'s: \"'"),
        ("training.warmup_steps=1.5", "training.warmup_steps: expected a whole number of steps, or a share of all "
         "steps below 1; got 1.5"),
        ("training.evaluation_strategy=steps", "training.evaluation_strategy: is called training.eval_strategy here; "
         "write training.eval_strategy: steps"),
        ("training.warmup_ratio=0.1", "training.warmup_ratio: is called training.warmup_steps here; "
         "write training.warmup_steps: 0.1"),
        ("training.optim=adamw_torch_fused", "training.optim: is called training.optimizer here; "
         "write training.optimizer: adamw"),
        ("training.optim=paged_adamw_8bit", "training.optim: is called training.optimizer here; "
         "write training.optimizer: adamw_8bit"),
        ("training.optim=lion_32bit", "training.optim: is called training.optimizer here, and there is no lion_32bit: "
         "it is one of adafactor, adamw, adamw_8bit, adamw_bf16, muon"),
        ("training.optimizer=adafacter", "training.optimizer: expected 'adamw', 'adafactor', 'muon', 'adamw_8bit' or "
         "'adamw_bf16'; got 'adafacter'; did you mean adafactor?"),
        ("evaluation.metric=RougeLSum", f"evaluation.metric: expected {NAMES}; got 'RougeLSum'; did you mean "
         "rougeLsum?"),
        ("training.optimizer=sgd", "training.optimizer: expected 'adamw', 'adafactor', 'muon', 'adamw_8bit' or "
         "'adamw_bf16'; got 'sgd'"),
        ("training={optimizer: adafactor, adam_beta2: 0.999, adam_epsilon: 1e-8}", "adafactor does not use adam_beta2 "
         "and adam_epsilon. Change it in the file, or on the command line: training.adam_beta2=null"),
        ("training.learning_rate=null", "null needs optimizer: adafactor, which has relative steps; got adamw; "),
        ("training.learning_rate=null", "warmup_steps: 0; got linear and 0. Change it in the file, or on the command "
         "line: training.optimizer=adafactor training.lr_scheduler_type=constant training.warmup_steps=0"),
        ("training={optimizer: adafactor, learning_rate: null, lr_scheduler_type: constant, warmup_steps: 0.1}",
         "it needs lr_scheduler_type: constant and warmup_steps: 0; got constant and 0.1. Change it"),
        ("training.fp16=true", "training.fp16: is not an option here; write training.precision: fp16, or bf16, "
         "which T5 needs"),
        ("model.adapter={type: ia3, r: 4}", "model.adapter: r is an option of lora and dora; got type: ia3"),
        ("model.adapter={target_modules: q}", "model.adapter.target_modules: expected all-linear or a list of module "
         "names such as [q, v]; got 'q'"),
        ("model.adapter={path: there/it, type: lora, r: 4}", "model.adapter: path takes the settings of the adapter's "
         "own adapter_config.json; remove r, type"),
        ("data.template='{a}'", "data: template and source_column both set the source; give one"),
        ("sharding.wrap=T5Block", "sharding.wrap: expected auto, none, a list of class names such as [T5Block] or a "),
        ("sharding.wrap=0", "number of parameters such as 100000000; got 0"),
        ("model.path=.", "model: exactly one of path and config must be given; got both"),
        ("model.config=null", "model: exactly one of path and config must be given; got neither"),
        ("model={path: ., config: null, tokenizer: null, freeze: encoder.*, train: [decoder.*]}", "model: freeze and "
         "train both say which parameters are trained; give one"),
        ("model={path: ., config: null, tokenizer: null, freeze: [encoder.*], adapter: {}}", "model: freeze needs a "
         "model without adapter, which freezes the whole model"),
        ("model.tokenizer=null", "model: config needs a tokenizer section too, such as tokenizer: {vocab_size: 2000}"),
        ("training.lr_gamma=0.5", "training: lr_gamma need lr_scheduler_type: step; got linear"),
        ("training.lr_scheduler_type=greedy", "training.lr_scheduler_type: greedy follows a metric, and schedules here "
         "are known before the first step"),
        ("training.lr_scheduler_type=polinomial", "got 'polinomial'; did you mean polynomial?"),
        ("training.lr_scheduler_kwargs={num_cycles: 2}", "training: lr_scheduler_kwargs has num_cycles, and "
         "lr_scheduler_type: linear has no options"),
        ("training.lr_scheduler_type=warmup_stable_decay", "training: lr_scheduler_type: warmup_stable_decay needs "
         "num_decay_steps in lr_scheduler_kwargs"),
        *((f"training.{kind}_strategy=steps", f"training: {kind}_steps is set if, and only if, {kind}_strategy is "
           f"steps; got {kind}_strategy: steps, {kind}_steps: None") for kind in ("eval", "save")),
        *((f"training.{kind}_steps=5", f"got {kind}_strategy: epoch, {kind}_steps: 5") for kind in ("eval", "save")),
        ("evaluation={min_new_tokens: 9, max_new_tokens: 4}", "evaluation: min_new_tokens must be at most "
         "max_new_tokens; got 9 and 4"),
        ("training.save_total_limit=0", "training.save_total_limit: expected greater than 0; got 0"),
        ("resume=no", "resume: expected auto, previous, never or the path of a checkpoint; got False"),
        ("resume=''", "resume: expected auto, previous, never or the path of a checkpoint; got ''"),
        ("data.validation_file=null", "training.eval_strategy: epoch needs held-out rows: give "
         "data.validation_file or data.validation_fraction, or set training.eval_strategy: no"),
    ],
)  # fmt: skip
def test_wrong_value_names_key_expectation_and_value(run_file, override, problem):
    (found,) = problems(run_file, override)[1:]
    assert problem in found


def test_path_with_a_tokenizer_section(run_file):
    found = problems(run_file, "model.config=null", "model.path=.")
    assert found[1:] == ["model: tokenizer needs config: a model loaded from path has its own tokenizer"]


def test_options_that_go_together_are_accepted(run_file):
    step = load_run(run_file, ["training.lr_scheduler_type=step", "training.lr_gamma=0.5"])
    assert step.training.lr_gamma == 0.5
    more = {"polynomial": "{lr_end: 1e-7}", "cosine_with_min_lr": "{min_lr: 1e-7}"}
    for kind, options in more.items():
        run = load_run(run_file, [f"training.lr_scheduler_type={kind}", f"training.lr_scheduler_kwargs={options}"])
        assert [*run.training.lr_scheduler_kwargs.values()] == [1e-7]
    no = load_run(run_file, ["training.eval_strategy=no", "data.validation_file=null"])
    assert no.training.eval_strategy == "no"
    assert no.data.validation_file is None
    assert load_run(run_file, ["training.eval_strategy=steps", "training.eval_steps=2"]).training.eval_steps == 2
    assert load_run(run_file, ["training.save_strategy=steps", "training.save_steps=2"]).training.save_steps == 2


def test_when_to_save_and_where_to_go_on(run_file):
    run = load_run(run_file)
    assert (run.training.save_strategy, run.training.save_total_limit, run.resume) == ("epoch", 2, "auto")
    run = load_run(run_file, ["training.save_strategy=no", "training.save_total_limit=null", "resume=never"])
    assert (run.training.save_strategy, run.training.save_total_limit, run.resume) == ("no", None, "never")
    assert load_run(run_file, ["resume=runs/x/checkpoints/step-00000004"]).resume == Path(
        "runs/x/checkpoints/step-00000004"
    )


def test_all_problems_are_in_one_message(run_file):
    found = problems(run_file, "seed=-1", "training.learnin_rate=1", "data.train_file=no.csv", "output_dir=null")
    assert found[0] == f"{run_file}: 4 problems:"
    assert {line.partition(":")[0] for line in found[1:]} == {
        "seed", "training.learnin_rate", "data.train_file", "output_dir"
    }  # fmt: skip


def test_missing_required_keys(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    found = problems(tmp_path / "run.yaml")
    assert found[1:] == ["output_dir: is required", "model: is required", "data: is required"]


def test_files_are_found_beside_the_run_file_then_in_the_working_directory(run_file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "rows").mkdir(parents=True)
    (elsewhere / "rows" / "train.csv").write_text("x")
    (elsewhere / "rows" / "other.csv").write_text("x")
    monkeypatch.chdir(elsewhere)
    run = load_run(run_file, ["data.validation_file=rows/other.csv"])
    assert run.data.train_file == tmp_path / "rows" / "train.csv"
    assert run.data.validation_file == elsewhere / "rows" / "other.csv"


def test_file_that_is_nowhere_lists_both_places(run_file, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert problems(run_file, "data.train_file=no.csv")[1:] == [
        f"data.train_file: 'no.csv' does not exist; tried {tmp_path / 'no.csv'} and {tmp_path / 'elsewhere' / 'no.csv'}"
    ]


def test_model_path_is_resolved_like_a_file(run_file, tmp_path):
    (tmp_path / "model").mkdir()
    overrides = ["model.config=null", "model.tokenizer=null"]
    assert load_run(run_file, [*overrides, "model.path=model"]).model.path == str(tmp_path / "model")
    assert problems(run_file, *overrides, "model.path=./t5-small")[1].startswith(
        f"model.path: './t5-small' does not exist; tried {tmp_path / 't5-small'}"
    )


def test_what_may_be_on_the_hub_is_left_as_it_is(run_file):
    overrides = ["model.config=null", "model.tokenizer=null", "model.path=google-t5/t5-small"]
    assert load_run(run_file, overrides).model.path == "google-t5/t5-small"


def test_key_given_twice(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 1\noutput_dir: x\nseed: 2\n")
    assert "the key 'seed' is given twice" in " ".join(problems(tmp_path / "run.yaml"))
    assert "line 3" in " ".join(problems(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("a: [1\n", "is not valid YAML"),
        ("", r"must contain settings \(key: value\); it contains nothing"),
        ("- 1\n", r"must contain settings \(key: value\); it contains a list"),
    ],
)
def test_unreadable_content(tmp_path, content, rule):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ConfigError, match=rule):
        load_run(tmp_path / "run.yaml")


def test_missing_run_file(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no .*no\.yaml: give the path of a run file"):
        load_run(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=r"There is no .*gone: give a run file \(YAML\), or the output_dir"):
        read_run(tmp_path / "gone")


def test_an_optimizer_takes_its_own_options_only_and_nothing_else_is_recorded(run_file):
    adam = ["training.adam_beta1=0.8", "training.adam_beta2=0.95", "training.adam_epsilon=1e-6"]
    for name in ("adamw", "muon", "adamw_8bit", "adamw_bf16"):
        training = load_run(run_file, [f"training.optimizer={name}", *adam]).as_plain()["training"]
        assert (training["optimizer"], training["adam_beta1"], training["adam_epsilon"]) == (name, 0.8, 1e-6)
    run = load_run(run_file, ["training.optimizer=adafactor", "training.weight_decay=0.1"])
    assert not any(key.startswith("training.adam_") for key in run.as_flat())
    assert RunConfig.model_validate(run.as_plain()) == run
    taken_back = load_run(run_file, ["training.adam_beta2=0.5", "training.adam_beta2=null"])
    assert taken_back == load_run(run_file)
    own = ["training.learning_rate=null", "training.lr_scheduler_type=constant"]
    assert load_run(run_file, ["training.optimizer=adafactor", *own]).training.learning_rate is None


def test_what_relative_steps_do_not_go_with_is_told_at_once_and_the_answer_is_taken(run_file):
    run_file.write_text(run_file.read_text() + "  adam_beta2: 0.99\n  adam_epsilon: 1e-6\n  warmup_steps: 50\n")
    asked = ["training.learning_rate=null"]
    (_, told) = problems(run_file, *asked)
    answer = told.partition("on the command line: ")[2].split()
    assert len(answer) == 5
    training = load_run(run_file, [*asked, *answer]).training
    assert (training.optimizer, training.learning_rate) == ("adafactor", None)
