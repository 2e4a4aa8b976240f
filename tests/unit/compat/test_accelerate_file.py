"""Accelerate's configuration files: read as they are, and what is wrong or idle in them is named with its line."""

import os
import warnings

import pytest
import yaml

from fullshard.compat.accelerate_config.environment import launch_environment, launch_warnings
from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.translate import nested, translate
from fullshard.errors import ConfigError

VERSION_1 = yaml.safe_dump(
    {
        "distributed_type": "FSDP",
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "mixed_precision": "no",
        "downcast_bf16": "no",
        "dynamo_backend": "NO",
        "main_training_function": "main",
        "fsdp_config": {
            "fsdp_sharding_strategy": 1,
            "fsdp_offload_params": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "T5Block",
            "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
        "deepspeed_config": {},
        "megatron_lm_config": {},
    }
    | dict.fromkeys(("command_file", "commands", "gpu_ids", "main_process_ip", "main_process_port"))
    | dict.fromkeys(("tpu_name", "tpu_zone"))
)
"""The keys that Accelerate 0.2x writes for FSDP, those of other trainers empty."""

VERSION_2 = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_min_num_params: 2000
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: c10d
same_network: false
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""What the questionnaire of Accelerate 1.15 writes for its FSDP2."""


@pytest.fixture
def read(tmp_path):
    """Reads the file that a text is, or VERSION_1 with changes."""

    def read_text(text=None, fsdp=None, **changes):
        if text is None:
            values = yaml.safe_load(VERSION_1)
            values["fsdp_config"] |= fsdp or {}
            text = yaml.safe_dump(values | changes)
        path = tmp_path / "fsdp_config.yaml"
        path.write_text(text)
        return read_accelerate_file(path)

    return read_text


def settings(file):
    return nested(translate(file).settings)


def test_version_1_is_read_without_a_warning(read):
    file = read(VERSION_1)
    assert (file.distributed_type, file.num_processes, file.num_machines, file.ranks_per_machine) == ("FSDP", 2, 1, 2)
    assert (file.mixed_precision, file.use_cpu, file.gpu_ids) == ("no", False, None)
    assert file.strategy == "FULL_SHARD"
    assert file.backward_prefetch == "BACKWARD_PRE"
    assert file.warnings == ()


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


@pytest.mark.parametrize(
    ("version", "value", "strategy"),
    [
        (1, "SHARD_GRAD_OP", "SHARD_GRAD_OP"),
        (1, 2, "SHARD_GRAD_OP"),
        (1, "HYBRID_SHARD", "HYBRID_SHARD"),
        (2, True, "FULL_SHARD"),
        (2, False, "SHARD_GRAD_OP"),
        (2, "false", "SHARD_GRAD_OP"),
        (2, "true", "FULL_SHARD"),
    ],
)
def test_reshard_after_forward_is_a_strategy_in_either_version(read, version, value, strategy):
    fsdp = {"fsdp_version": version, "fsdp_reshard_after_forward": value, "fsdp_sharding_strategy": None}
    assert read(fsdp=fsdp).strategy == strategy


def test_of_two_names_for_one_thing_accelerates_counts_and_the_other_is_named(read):
    file = read(fsdp={"fsdp_reshard_after_forward": "NO_SHARD", "fsdp_backward_prefetch": "NO_PREFETCH"})
    assert file.strategy == "FULL_SHARD"
    assert file.backward_prefetch == "NO_PREFETCH"
    strategy, prefetch = file.warnings
    assert "fsdp_reshard_after_forward: NO_SHARD" in strategy
    assert "fsdp_sharding_strategy is FULL_SHARD" in strategy
    assert "fsdp_backward_prefetch_policy: BACKWARD_PRE" in prefetch
    assert read(fsdp={"fsdp_reshard_after_forward": True}).warnings == ()
    both = {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    assert read(fsdp=both).strategy == "SHARD_GRAD_OP"


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
    ("line", "told"),
    [
        (
            "fsdp_shrading_strategy: 1",
            "fsdp_config.fsdp_shrading_strategy: unknown key; did you mean fsdp_config.fsdp_s",
        ),
        ("fsdp_sharding_strategy: 6", "expected one of 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD"),
        ("fsdp_sharding_strategy: HALF_SHARD", "got 'HALF_SHARD'"),
        ("fsdp_reshard_after_forward: perhaps", "expected true, false or one of 1 FULL_SHARD"),
        ("fsdp_offload_params: maybe", "expected true or false; got 'maybe'"),
        ("fsdp_min_num_params: -1", "expected a whole number of at least 0; got -1"),
        ("fsdp_transformer_layer_cls_to_wrap: {a: 1}", "expected class names separated by commas"),
        ("fsdp_version: 3", "expected 1 or 2; got 3"),
        ("num_machines: 2", "did you mean num_machines?"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(read, line, told):
    with pytest.raises(ConfigError) as caught:
        read(f"distributed_type: FSDP\nfsdp_config:\n  {line}\n")
    assert told in str(caught.value)
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "distributed_type: FSDP\nfsdp_offload_params: true\n",
            "line 2: fsdp_offload_params: unknown key; did you mean fs",
        ),
        ("distributed_type: FSDP\nnum_process: 2\n", "did you mean num_processes?"),
        ("distributed_type: FSDP\nmachine_rank: 1\n", "machine_rank: must be below num_machines"),
        ("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 3\n", "got 3 on 2 machines"),
        ("distributed_type: FSDP\nnum_processes: 0\n", "num_processes: must be at least 1"),
        ("distributed_type: FSDP\nmixed_precision: fp8\n", "Write bf16"),
        ("distributed_type: FSDP\nmixed_precision: int8\n", "expected one of no, fp16, bf16, fp8; got 'int8'"),
        ("distributed_type: FSDP\nfsdp_config: 3\n", "expected a section of settings; got 3"),
        ("distributed_type: FSDP\nuse_cpu: true\nuse_cpu: false\n", "is given twice, first in line 2"),
        ("distributed_type: DEEPSPEED\n", "zero_stage 3 is fsdp_sharding_strategy: FULL_SHARD"),
        ("distributed_type: MEGATRON_LM\n", "Megatron-LM is not supported"),
        ("distributed_type: XLA\n", "not on TPUs"),
        ("distributed_type: MULTI_XPU\n", "expected FSDP, MULTI_GPU, MULTI_CPU, NO"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n", "Amazon SageMaker"),
        ("num_processes: 2\n", "has no distributed_type"),
        ("distributed_type: [\n", "is not valid YAML"),
        ("- 1\n", "must contain Accelerate's settings"),
        ("", "must contain Accelerate's settings"),
        (
            "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 2\n",
            "line 3: parallelism_config_tp_size: only data parallelism is supported",
        ),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_with_the_remedy(read, text, told):
    with pytest.raises(ConfigError, match=r"fsdp_config\.yaml") as caught:
        read(text)
    assert told in str(caught.value)


def test_all_problems_come_in_one_message(read):
    with pytest.raises(ConfigError, match="3 problems") as caught:
        read("distributed_type: FSDP\nnum_processes: two\nuse_cpu: 7\nfsdp_config:\n  fsdp_versoin: 1\n")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == ["line 2", "line 3", "line 5"]


def test_a_file_that_is_not_there_is_a_users_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_accelerate_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tpu_name": "pod"}, "tpu_name: pod"),
        ({"downcast_bf16": True}, "downcast_bf16: true"),
        ({"main_training_function": "train"}, "main_training_function: train"),
        ({"deepspeed_config": {"zero_stage": 2}}, "distributed_type is not DEEPSPEED"),
        ({"mpirun_config": {"mpirun_hostfile": "h"}}, "not by mpirun"),
        ({"fsdp": {"fsdp_use_orig_params": False}}, "fsdp_config.fsdp_use_orig_params: false"),
        ({"fsdp": {"fsdp_sync_module_states": "false"}}, "fsdp_config.fsdp_sync_module_states"),
        ({"fsdp": {"fsdp_cpu_ram_efficient_loading": False}}, "each rank reads its own part"),
        ({"fsdp": {"fsdp_mixed_precision_policy": "bf16"}}, "mixed_precision counts"),
    ],
)
def test_a_known_key_without_effect_is_named_with_the_reason(read, changes, told):
    (warning,) = read(**changes).warnings
    assert told in warning
    assert "has no effect" in warning
    assert "line " in warning


def test_defaults_of_what_does_not_apply_warn_about_nothing(read):
    idle = {
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_mixed_precision_policy": None,
    }
    empty = {"tpu_vm": [""], "tpu_env": [], "fp8_config": {}, "parallelism_config": {}, "dynamo_config": {}}
    assert read(fsdp=idle, tpu_use_sudo=False, **empty).warnings == ()


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


def test_sharding_of_a_file_that_is_not_for_it_is_named(read):
    (warning,) = read(distributed_type="MULTI_CPU").warnings
    assert "distributed_type is MULTI_CPU, not FSDP" in warning
    assert read(distributed_type="MULTI_CPU").use_cpu


def test_sizes_of_a_mesh_are_the_strategy_of_the_machines(read):
    def mesh(replicas, shards, **changes):
        sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards}
        return settings(read(parallelism_config=sizes, **changes))["sharding"]["strategy"]

    assert mesh(1, 2) == "full_shard"
    assert mesh(2, 1) == "no_shard"
    assert mesh(2, 4, num_machines=2, num_processes=8) == "hybrid_shard"
    with pytest.raises(ConfigError, match="dp_shard_size the number of ranks per machine; got 4 and 2"):
        mesh(4, 2, num_machines=2, num_processes=8)


def launchers_environment(path, monkeypatch):
    """What Accelerate's own launcher sets for a file."""
    launch = pytest.importorskip("accelerate.commands.launch")
    tools = pytest.importorskip("accelerate.utils.launch")
    monkeypatch.setattr(tools, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(os, "environ", {})
    parser = launch.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(path), "script.py"])
    arguments.nondefault = getattr(arguments, "nondefault", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments, *_ = launch._validate_launch_command(arguments)
        if arguments.use_fsdp or arguments.multi_gpu:
            found = tools.prepare_multi_gpu_env(arguments)
        else:
            found = tools.prepare_simple_launcher_cmd_env(arguments)[1]
    left_to_torchrun = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY", "KMP_BLOCKTIME")
    return {name: value for name, value in found.items() if name not in left_to_torchrun}


EQUAL = {
    "version 1 words": {"fsdp": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_backward_prefetch_policy": None}},
    "version 1 numbers": {
        "fsdp": {
            "fsdp_sharding_strategy": 2,
            "fsdp_state_dict_type": 3,
            "fsdp_backward_prefetch": 1,
            "fsdp_backward_prefetch_policy": None,
        }
    },
    "version 1 everything": {
        "debug": True,
        "gpu_ids": "0,1",
        "mixed_precision": "bf16",
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True},
        "dynamo_backend": None,
        "fsdp": {
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 77,
            "fsdp_backward_prefetch_policy": None,
            "fsdp_forward_prefetch": True,
            "fsdp_use_orig_params": False,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_sync_module_states": False,
            "fsdp_activation_checkpointing": True,
            "fsdp_ignored_modules": ".*head",
        },
    },
    "sizes of a mesh": {
        "parallelism_config": {"parallelism_config_dp_shard_size": 2, "dp_replicate_size": 1},
        "fsdp": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_backward_prefetch_policy": None},
    },
    "copies": {"distributed_type": "MULTI_GPU", "fsdp_config": {}, "mixed_precision": "fp16"},
    "one process": {"distributed_type": "NO", "num_processes": 1, "fsdp_config": {}},
    "on the CPU": {"distributed_type": "MULTI_CPU", "use_cpu": True, "fsdp_config": {}},
}


@pytest.mark.parametrize("case", EQUAL)
def test_the_variables_are_those_of_accelerates_own_launcher(read, case, monkeypatch):
    changes = dict(EQUAL[case])
    if changes.get("dynamo_backend", "") is None:  # the newer files have dynamo_config in its place
        values = yaml.safe_load(VERSION_1)
        values.pop("dynamo_backend")
        changes.pop("dynamo_backend")
        values["fsdp_config"] |= changes.pop("fsdp")
        file = read(yaml.safe_dump(values | changes))
    else:
        file = read(**changes)
    assert launch_environment(file) == launchers_environment(file.path, monkeypatch)


def test_version_2s_variables_are_those_of_accelerates_own_launcher(read, monkeypatch):
    file = read(VERSION_2)
    assert launch_environment(file) == launchers_environment(file.path, monkeypatch)


@pytest.mark.parametrize(
    ("fsdp", "name", "theirs", "ours"),
    [
        ({}, "FSDP_BACKWARD_PREFETCH", None, "BACKWARD_PRE"),
        ({"fsdp_auto_wrap_policy": 2}, "FSDP_AUTO_WRAP_POLICY", "2", "SIZE_BASED_WRAP"),
        ({"fsdp_backward_prefetch": 3}, "FSDP_BACKWARD_PREFETCH", "3", "NO_PREFETCH"),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "A, B"},
            "FSDP_TRANSFORMER_CLS_TO_WRAP",
            "A, B",
            "A,B",
        ),
        (
            {"fsdp_sharding_strategy": None, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
            "FSDP_SHARDING_STRATEGY",
            "None",
            "SHARD_GRAD_OP",
        ),
    ],
)
def test_where_accelerates_launcher_drops_what_the_file_says_the_variables_say_it(
    read, fsdp, name, theirs, ours, monkeypatch
):
    file = read(fsdp=fsdp)
    mine = launch_environment(file)
    other = launchers_environment(file.path, monkeypatch)
    assert (other.get(name), mine[name]) == (theirs, ours)
    assert {key: value for key, value in mine.items() if key != name} | {"FSDP_BACKWARD_PREFETCH": ""} == {
        key: value for key, value in other.items() if key != name
    } | {"FSDP_BACKWARD_PREFETCH": ""}


def test_cores_near_the_gpu_reach_the_script_though_accelerates_launcher_drops_them(read, monkeypatch):
    file = read(enable_cpu_affinity=True)
    assert launch_environment(file)["ACCELERATE_CPU_AFFINITY"] == "1"
    assert "ACCELERATE_CPU_AFFINITY" not in launchers_environment(file.path, monkeypatch)


def test_use_cpu_reaches_a_sharded_script(read):
    assert launch_environment(read(use_cpu=True))["ACCELERATE_USE_CPU"] == "True"
    assert "ACCELERATE_USE_CPU" not in launch_environment(read(VERSION_1))


@pytest.mark.parametrize(
    ("version", "strategy", "told"),
    [(2, "HYBRID_SHARD", 1), (2, 3, 1), (2, "SHARD_GRAD_OP", 0), (1, "HYBRID_SHARD", 0)],
)
def test_launch_names_a_strategy_that_version_2_has_no_variable_for(tmp_path, version, strategy, told):
    path = tmp_path / "file.yaml"
    config = {"fsdp_version": version, "fsdp_sharding_strategy": strategy}
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": config}))
    found = launch_warnings(read_accelerate_file(path))
    assert len(found) == told
    assert all(f"fsdp_sharding_strategy: {strategy} in {path}, line" in text for text in found)
