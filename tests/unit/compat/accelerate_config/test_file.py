"""Reading of Accelerate's configuration files: values, errors with their lines, and warnings."""

import pytest

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.errors import ConfigError
from support.accelerate_files import VERSION_1


def test_version_1_is_read_without_a_warning(read):
    file = read(VERSION_1)
    assert (file.distributed_type, file.num_processes, file.num_machines, file.ranks_per_machine) == ("FSDP", 2, 1, 2)
    assert (file.mixed_precision, file.use_cpu, file.gpu_ids) == ("no", False, None)
    assert file.strategy == "FULL_SHARD"
    assert file.backward_prefetch == "BACKWARD_PRE"
    assert file.warnings == ()


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


def test_sharding_of_a_file_that_is_not_for_it_is_named(read):
    (warning,) = read(distributed_type="MULTI_CPU").warnings
    assert "distributed_type is MULTI_CPU, not FSDP" in warning
    assert read(distributed_type="MULTI_CPU").use_cpu
