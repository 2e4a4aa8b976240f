"""Accelerate's configuration files as settings of a run."""

import pytest
import yaml
from accelerate.commands.config import config_args

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.translate import default_values, nested, next_commands, summary, translate
from fullshard.errors import ConfigError
from support.accelerate_files import VERSION_1, VERSION_2


def settings(file):
    return nested(translate(file).settings)


def test_version_1_is_these_settings_of_a_run(read):
    assert settings(read(VERSION_1)) == {
        "nproc": 2,
        "training": {"precision": "fp32"},
        "sharding": {"strategy": "full_shard", "wrap": ["T5Block"], "prefetch": "backward_pre", "cpu_offload": True},
    }


def test_version_2_is_these_settings_of_a_run(read):
    file = read(VERSION_2)
    assert (file.main_process_ip, file.main_process_port, file.machine_rank) == ("10.0.0.1", 29501, 1)
    assert (file.rdzv_backend, file.same_network, file.ranks_per_machine) == ("c10d", False, 4)
    assert file.warnings == ()
    assert settings(file) == {
        "nproc": 4,
        "training": {"precision": "bf16", "gradient_checkpointing": True},
        "sharding": {"strategy": "shard_grad_op", "wrap": 2000, "cpu_offload": False},
    }


@pytest.mark.parametrize(
    ("key", "number", "word", "setting", "value"),
    [
        ("fsdp_sharding_strategy", 1, "FULL_SHARD", "strategy", "full_shard"),
        ("fsdp_sharding_strategy", "2", "shard_grad_op", "strategy", "shard_grad_op"),
        ("fsdp_sharding_strategy", 3, "NO_SHARD", "strategy", "no_shard"),
        ("fsdp_sharding_strategy", 4, "HYBRID_SHARD", "strategy", "hybrid_shard"),
        ("fsdp_sharding_strategy", 5, "HYBRID_SHARD_ZERO2", "strategy", "hybrid_shard_zero2"),
        ("fsdp_auto_wrap_policy", 1, "TRANSFORMER_BASED_WRAP", "wrap", ["T5Block"]),
        ("fsdp_auto_wrap_policy", 2, "SIZE_BASED_WRAP", "wrap", 100_000_000),
        ("fsdp_auto_wrap_policy", 3, "NO_WRAP", "wrap", "none"),
        ("fsdp_backward_prefetch", 2, "BACKWARD_POST", "prefetch", "backward_post"),
        ("fsdp_backward_prefetch_policy", 3, "NO_PREFETCH", "prefetch", "none"),
    ],
)
def test_numbers_and_words_are_the_same(read, key, number, word, setting, value):
    for given in (number, word):
        changes = {key: given}
        if key == "fsdp_backward_prefetch":
            changes["fsdp_backward_prefetch_policy"] = None
        assert settings(read(fsdp=changes))["sharding"][setting] == value


@pytest.mark.parametrize("given", ["T5Block,T5LayerNorm", "T5Block, T5LayerNorm", ["T5Block", "T5LayerNorm"]])
def test_layer_classes_are_a_list_or_separated_by_commas(read, given):
    file = read(fsdp={"fsdp_transformer_layer_cls_to_wrap": given})
    assert settings(file)["sharding"]["wrap"] == ["T5Block", "T5LayerNorm"]


def test_without_a_layer_class_the_repeated_blocks_are_wrapped(read):
    assert settings(read(fsdp={"fsdp_transformer_layer_cls_to_wrap": None}))["sharding"]["wrap"] == "auto"


def test_keys_of_a_section_may_leave_out_its_prefix(read):
    file = read("distributed_type: FSDP\nfsdp_config:\n  sharding_strategy: 3\n  offload_params: 'no'\n")
    assert settings(file)["sharding"] == {"strategy": "no_shard", "cpu_offload": False}


def test_a_number_of_parameters_may_be_written_1e8(read):
    fsdp = {"fsdp_auto_wrap_policy": 2, "fsdp_min_num_params": "1e8"}
    assert settings(read(fsdp=fsdp))["sharding"]["wrap"] == 10**8
    assert settings(read(fsdp=fsdp | {"fsdp_min_num_params": 0}))["sharding"]["wrap"] == "none"  # as Accelerate


def test_json_is_read_too(tmp_path):
    path = tmp_path / "default_config.json"
    path.write_text('{"distributed_type": "FSDP", "num_processes": 3, "fsdp_config": {"fsdp_sharding_strategy": 2}}')
    assert settings(read_accelerate_file(path)) == {"nproc": 3, "sharding": {"strategy": "shard_grad_op"}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "fsdp_state_dict_type: FULL_STATE_DICT"),
        ({"debug": True}, "debug: true"),
        ({"enable_cpu_affinity": True}, "enable_cpu_affinity: true"),
        ({"main_process_port": 29600}, "main_process_port: 29600"),
        ({"fsdp": {"fsdp_min_num_params": 5}}, "fsdp_auto_wrap_policy is not SIZE_BASED_WRAP"),
        ({"fsdp": {"fsdp_auto_wrap_policy": "NO_WRAP"}}, "fsdp_auto_wrap_policy is not TRANSFORMER_BASED_WRAP"),
        ({"fsdp": {"fsdp_ignored_modules": "head"}}, "fsdp_ignored_modules: head"),
        ({"fsdp": {"fsdp_activation_checkpointing_offload": True}}, "stay on the device"),
        ({"dynamo_config": {"dynamo_backend": "TVM"}}, "compiles with inductor"),
        ({"dynamo_config": {"dynamo_mode": "max-autotune"}}, "dynamo_mode: max-autotune"),
    ],
)
def test_what_train_has_no_use_for_is_named(read, changes, told):
    assert any(told in warning for warning in translate(read(**changes)).warnings)


def test_inductor_is_torch_compile(read):
    for changes in ({"dynamo_backend": "INDUCTOR"}, {"dynamo_config": {"dynamo_backend": "inductor"}}):
        assert settings(read(**changes))["training"] == {"precision": "fp32", "torch_compile": True}


def test_a_file_for_copies_leaves_sharding_to_the_run_file_and_says_so(read):
    translation = translate(read("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\n"))
    assert nested(translation.settings) == {"nproc": 2, "training": {"precision": "fp16"}}
    (warning,) = translation.warnings
    assert "sharding.strategy: no_shard" in warning


def test_a_file_for_one_process_is_one_rank(read):
    translation = translate(read("distributed_type: 'NO'\nuse_cpu: true\n"))
    assert nested(translation.settings) == {"nproc": 1}
    assert translation.warnings == ()
    assert read("distributed_type: NO\n").distributed_type == "NO"  # which YAML takes for false


def test_sizes_of_a_mesh_are_the_strategy_of_the_machines(read):
    def mesh(replicas, shards, **changes):
        sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards}
        return settings(read(parallelism_config=sizes, **changes))["sharding"]["strategy"]

    assert mesh(1, 2) == "full_shard"
    assert mesh(2, 1) == "no_shard"
    assert mesh(2, 4, num_machines=2, num_processes=8) == "hybrid_shard"
    with pytest.raises(ConfigError, match="dp_shard_size the number of ranks per machine; got 4 and 2"):
        mesh(4, 2, num_machines=2, num_processes=8)


@pytest.mark.parametrize(("gpus", "bf16"), [(0, False), (8, True)])
def test_the_default_file_is_the_machines_and_read_by_accelerate_too(gpus, bf16, tmp_path):
    path, values = tmp_path / "f.yaml", default_values(gpus, bf16=bf16)
    path.write_text(yaml.safe_dump(values))
    file, theirs = read_accelerate_file(path), config_args.load_config_from_file(str(path))
    assert (file.use_cpu, file.num_processes, file.mixed_precision) == (not gpus, gpus or 2, "bf16" if bf16 else "no")
    assert (file.warnings, file.is_sharded, file.strategy) == ((), True, "FULL_SHARD")
    assert (theirs.distributed_type, theirs.num_processes) == ("FSDP", gpus or 2)
    assert (theirs.mixed_precision, theirs.fsdp_config) == (file.mixed_precision, values["fsdp_config"])


def test_a_file_is_explained_with_the_commands_that_use_it(tmp_path, read):
    path = tmp_path / "two.yaml"
    path.write_text(VERSION_2)
    file = read_accelerate_file(path)
    shown = "\n".join(summary(file))
    assert "4 ranks on each of 2 machines, on one GPU each, computing in bfloat16" in shown
    for word in ("SHARD_GRAD_OP: ", "SIZE_BASED_WRAP: ", "SHARDED_STATE_DICT: ", "2,000 parameters", "recomputed"):
        assert word in shown
    (command,) = next_commands(file)
    assert f"fullshard launch --config_file {path} script.py" in command
    shown = "\n".join(summary(read(use_cpu=True)))
    for word in (
        "2 ranks on this machine, on the CPU, computing in float32",
        "class T5Block",
        "host memory",
        "On CPUs",
    ):
        assert word in shown
    shown = "\n".join(summary(read("distributed_type: MULTI_CPU\nnum_processes: 2\n")))
    assert "MULTI_CPU does not configure sharding" in shown
    assert len(next_commands(read())) == 2
