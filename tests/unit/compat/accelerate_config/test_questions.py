"""The questionnaire's questions as data: defaults, rules of answers, and the file that the answers make."""

import pytest
import yaml

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.keys import FSDP, TOP
from fullshard.compat.accelerate_config.model_classes import layer_classes
from fullshard.compat.accelerate_config.questions import (
    LAYER_CLASSES,
    MODEL,
    QUESTIONS,
    Machine,
    default_answers,
    pick_classes,
)
from fullshard.compat.accelerate_config.write import file_text, next_commands, summary
from fullshard.errors import ModelError

CPU = Machine(gpus=0, bf16=False, name="here")
EIGHT_GPUS = Machine(gpus=8, bf16=True, name="here")
BY_KEY = {question.key: question for question in QUESTIONS}

T5 = """{"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "vocab_size": 64}"""


def parse(key, text, machine=CPU, **answers):
    return BY_KEY[key].parse(text, {"num_machines": 1, "use_cpu": False, **answers}, machine)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.key)
def test_every_question_has_a_reason_an_explanation_and_a_key_of_accelerates(question):
    assert question.reason
    assert "\n" not in question.reason
    assert question.explain
    assert question.key == MODEL or question.key in TOP or question.key.rpartition(".")[2] in FSDP


@pytest.mark.parametrize("machine", [CPU, EIGHT_GPUS])
def test_every_default_is_an_answer_that_would_be_taken(machine):
    answers = default_answers(machine)
    for key, value in answers.items():
        if isinstance(value, str) and value:
            assert BY_KEY[key].parse(value, answers, machine) == value


def test_defaults_are_those_of_the_machine():
    small, large = default_answers(CPU), default_answers(EIGHT_GPUS)
    assert (small["use_cpu"], small["num_processes"], small["mixed_precision"]) == (True, 2, "no")
    assert (large["use_cpu"], large["num_processes"], large["mixed_precision"]) == (False, 8, "bf16")


@pytest.mark.parametrize(
    ("key", "answers"),
    [
        ("fsdp_config.fsdp_sharding_strategy", {"4": "HYBRID_SHARD", "no_shard": "NO_SHARD", "1": "FULL_SHARD"}),
        ("fsdp_config.fsdp_auto_wrap_policy", {"3": "NO_WRAP", "size_based_wrap": "SIZE_BASED_WRAP"}),
        ("fsdp_config.fsdp_backward_prefetch", {"3": "NO_PREFETCH", "BACKWARD_POST": "BACKWARD_POST"}),
        ("fsdp_config.fsdp_state_dict_type", {"2": "LOCAL_STATE_DICT"}),
        ("mixed_precision", {"1": "no", "bf16": "bf16", "2": "fp16"}),
        ("use_cpu", {"y": True, "No": False, "yes": True}),
        ("fsdp_config.fsdp_min_num_params", {"1e6": 10**6, "5": 5}),
        ("num_processes", {"3": 3}),
    ],
)
def test_answers_are_words_or_numbers(key, answers):
    for text, value in answers.items():
        assert parse(key, text) == value


@pytest.mark.parametrize(
    ("key", "text", "answers", "rule"),
    [
        ("num_machines", "0", {}, "a whole number of at least 1"),
        ("num_machines", "two", {}, "a whole number of at least 1"),
        ("machine_rank", "2", {"num_machines": 2}, "from 0 to 1"),
        ("main_process_ip", "10.0.0.1 or so", {}, "a host name or an IP address"),
        ("main_process_port", "70000", {}, "from 1 to 65535"),
        ("use_cpu", "perhaps", {}, "yes or no"),
        ("num_processes", "3", {"num_machines": 2}, "a multiple of 2"),
        ("num_processes", "9", {}, "at most 8"),
        ("fsdp_config.fsdp_sharding_strategy", "6", {}, "one of 1 FULL_SHARD"),
        ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "T5 Block", {}, "class names separated by commas"),
        ("fsdp_config.fsdp_min_num_params", "0", {}, "at least 1"),
        ("mixed_precision", "fp8", {}, "one of 1 no, 2 fp16, 3 bf16"),
    ],
)
def test_a_wrong_answer_is_told_the_rule(key, text, answers, rule):
    with pytest.raises(ValueError, match=rule):
        parse(key, text, EIGHT_GPUS, **answers)


def test_layer_classes_are_picked_by_name_or_number_among_the_models():
    offered = ["T5Block", "T5Stack"]
    assert pick_classes("1", offered) == ("T5Block",)
    assert pick_classes("2, T5Block,1", offered) == ("T5Stack", "T5Block")
    assert pick_classes("Mine", []) == ("Mine",)
    with pytest.raises(ValueError, match="T5Block, T5Stack; did you mean T5Block"):
        pick_classes("T5Blok", offered)


def test_only_what_matters_is_asked():
    asked = set(default_answers(CPU))
    assert "machine_rank" not in asked
    assert "fsdp_config.fsdp_min_num_params" not in asked
    assert "fsdp_config.fsdp_offload_params" not in asked  # shards are in host memory already
    assert "fsdp_config.fsdp_offload_params" in default_answers(EIGHT_GPUS)


ANSWERS = {
    "num_machines": 2,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
    "use_cpu": False,
    "num_processes": 8,
    "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD",
    "fsdp_config.fsdp_offload_params": True,
    "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    MODEL: "t5",
    LAYER_CLASSES: ("T5Block", "T5Stack"),
    "fsdp_config.fsdp_backward_prefetch": "NO_PREFETCH",
    "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_config.fsdp_activation_checkpointing": True,
    "mixed_precision": "no",
}


def cases():
    size_based = {key: value for key, value in ANSWERS.items() if key not in (MODEL, LAYER_CLASSES)} | {
        "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_config.fsdp_min_num_params": 10**6,
    }
    return {"cpu": default_answers(CPU), "gpus": default_answers(EIGHT_GPUS), "two": ANSWERS, "by size": size_based}


@pytest.mark.parametrize("case", cases())
def test_the_file_holds_the_answers_explains_each_line_and_is_read_without_a_warning(case, tmp_path):
    answers, path = cases()[case], tmp_path / "f.yaml"
    path.write_text(file_text(answers))
    for line in path.read_text().splitlines()[1:]:
        assert "  # " in line or line == "fsdp_config:"
    file = read_accelerate_file(path)
    assert file.warnings == ()
    for key, value in answers.items():
        if key == MODEL or value == ():
            continue
        found = file.fsdp[key.rpartition(".")[2]] if "." in key else getattr(file, key)
        assert found == value, key
    assert summary(file)
    assert str(path) in next_commands(file)[0]


@pytest.mark.parametrize("case", cases())
def test_accelerate_reads_the_file_too(case, tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    answers, path = cases()[case], tmp_path / "f.yaml"
    path.write_text(file_text(answers))
    cluster = config_args.load_config_from_file(str(path))
    assert type(cluster).__name__ == "ClusterConfig"
    assert cluster.distributed_type == "FSDP"
    assert cluster.num_processes == answers["num_processes"]
    assert cluster.mixed_precision == answers["mixed_precision"]
    assert cluster.fsdp_config == yaml.safe_load(path.read_text())["fsdp_config"]


def test_a_models_layer_classes_are_found_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(T5)
    block, *others = layer_classes(str(tmp_path))
    assert (block.name, block.count, block.repeated) == ("T5Block", 6, True)
    assert block.numel > 0
    assert "T5Stack" in [layer.name for layer in others]
    assert not any(layer.repeated or layer.name == "ModuleList" for layer in others)
    with pytest.raises(ModelError, match=r"must be a directory with a config\.json"):
        layer_classes(str(tmp_path / "none"))
