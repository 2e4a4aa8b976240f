"""Hints of a run file's errors: the key they name exists, and what they say to write is accepted."""

import ast
import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import fullshard
from fullshard.errors import ConfigError
from fullshard.program.config import load_run, options
from fullshard.program.config.schema import RunConfig
from fullshard.program.config.section import section_in

KEY, VALUE = r"([a-z_]+(?:\.[a-z_]+)+)", r"(\{[^}]*\}|[\w./-]+)"
ADVICE = re.compile(rf"\b(?:[Ss]et|[Ww]rite|[Uu]se) {KEY}(?:: |=){VALUE}")


def hints(run_file, override):
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, [override])
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.seed=3", "did you mean seed?"),
        ("data.seed=3", "did you mean seed?"),
        ("training.Output_Dir=out", "did you mean output_dir?"),
        ("training.strategy=full_shard", "did you mean sharding.strategy?"),
        ("training.objectiv=dpo", "did you mean training.objective?"),
        ("model.name=t5-small", "did you mean model.path?"),
        ("data.text_field=text", "write data.text_column: text"),
        ("data.dataset_text_fields=text", "did you mean data.text_column?"),
        ("model.adapter.lora_rank=4", "write model.adapter.r: 4"),
        ("training.metric_for_best_model=loss", "write evaluation.metric: perplexity"),
        ("training.metric_for_best_model=eval_loss", "write evaluation.metric: perplexity"),
        ("training.metric_for_best_model=eval_rougeL", "write evaluation.metric: rougeL"),
        ("training.metric_for_best_model=f1", "got 'f1'"),
        ("evaluation.metric=loss", "did you mean perplexity?"),
        ("training.precision=bfloat16", "did you mean bf16?"),
        ("resume_from_checkpoint=true", "write resume: auto"),
        ("model.bnb_4bit_compute_dtype=bfloat16", "write model.quantization.compute_dtype: bf16"),
        ("training.lr=fast", "training.learning_rate here, and that does not take it"),
    ],
)
def test_a_hint_names_the_key_and_a_value_that_it_takes(run_file, override, hint):
    assert hint in hints(run_file, override)


def accepted(key, value):
    """Whether the section takes the value, as YAML has it, apart from other options."""
    section = RunConfig
    *inside, name = key.split(".")
    for part in inside:
        section = section_in(section.model_fields[part]) or section
    value = yaml.safe_load(value)
    for one in (value, [value]):  # of a list, a message may name one
        try:
            section.model_validate({name: one})
        except ValidationError as error:
            if any(problem["loc"][:1] == (name,) for problem in error.errors()):
                continue
        return True
    return False


@pytest.mark.parametrize("value", ["steps", "loss", "true", "bfloat16", "0.1", "8", "cosine", "nf4", "a/b"])
def test_whatever_another_programs_option_is_set_to_the_advice_is_accepted(run_file, value):
    names = sorted({name for option in options().values() for name in option.also})
    for name in names:
        text = hints(run_file, f"training.{name}={value}")
        for key, written in re.findall(r"write ([a-z_.]+): (.+)", text):
            assert accepted(key, written), (name, text)


def test_every_setting_that_a_message_of_the_program_proposes_exists_and_is_accepted():
    root, known = Path(fullshard.__file__).parent / "program", options()
    found = 0
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            for key, value in ADVICE.findall(node.value):
                found += 1
                assert key in known, (file.name, key)
                value = value.rstrip(".").replace("{}", "name")
                assert accepted(key, value), (file.name, key, value)
    assert found > 25
