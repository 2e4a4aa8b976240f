"""Variables of Accelerate's launcher for a configuration file, compared with its own."""

import argparse
import os
import warnings

import pytest
import yaml
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from fullshard.compat.accelerate_config.file import read_accelerate_file
from fullshard.compat.accelerate_config.options import (
    add_options,
    bare_environment,
    environment_of,
    launch_environment,
    launch_warnings,
    read_settings,
    warnings_of,
)
from fullshard.errors import ConfigError
from support.accelerate_files import VERSION_1, VERSION_2
from support.releases import as_accelerate_1_15


def launchers_environment(path, monkeypatch, *flags):
    """What Accelerate's own launcher sets for a file, for options alone, or without either."""
    launch = pytest.importorskip("accelerate.commands.launch")
    tools = pytest.importorskip("accelerate.utils.launch")
    monkeypatch.setattr(tools, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(os, "environ", {})
    parser = launch.launch_command_parser()
    file = ["--config_file", str(path)] if path else []
    monkeypatch.setattr(launch, "default_config_file", str(path))
    arguments = parser.parse_args([*file, *flags, "script.py"])
    arguments.nondefault = getattr(arguments, "nondefault", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments, *_ = launch._validate_launch_command(arguments)
        if arguments.use_fsdp or arguments.multi_gpu:
            found = tools.prepare_multi_gpu_env(arguments)
        else:
            found = tools.prepare_simple_launcher_cmd_env(arguments)[1]
    left_to_torchrun = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY", "KMP_BLOCKTIME")
    if found.get("FSDP_SHARDING_STRATEGY", "").isdigit():  # its plugin takes either
        found["FSDP_SHARDING_STRATEGY"] = FSDP_SHARDING_STRATEGY[int(found["FSDP_SHARDING_STRATEGY"]) - 1]
    return {name: value for name, value in found.items() if name not in left_to_torchrun}


EQUAL = {
    "version 1 words": {"fsdp": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_backward_prefetch_policy": None}},
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


@as_accelerate_1_15
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


@as_accelerate_1_15
def test_version_2s_variables_are_those_of_accelerates_own_launcher(read, monkeypatch):
    file = read(VERSION_2)
    assert launch_environment(file) == launchers_environment(file.path, monkeypatch)


@as_accelerate_1_15
@pytest.mark.parametrize(
    ("fsdp", "name", "theirs", "ours"),
    [
        ({}, "FSDP_BACKWARD_PREFETCH", None, "BACKWARD_PRE"),
        ({"fsdp_state_dict_type": 3}, "FSDP_STATE_DICT_TYPE", "3", "SHARDED_STATE_DICT"),
        ({"fsdp_auto_wrap_policy": 2}, "FSDP_AUTO_WRAP_POLICY", "2", "SIZE_BASED_WRAP"),
        ({"fsdp_backward_prefetch": 3}, "FSDP_BACKWARD_PREFETCH", "3", "NO_PREFETCH"),
        ({"fsdp_transformer_layer_cls_to_wrap": "A, B"}, "FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B", "A,B"),
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


def test_a_launch_without_a_file_sets_what_accelerates_does_and_keeps_what_is_given(monkeypatch, tmp_path):
    monkeypatch.setattr("accelerate.commands.launch.default_config_file", str(tmp_path / "none.yaml"))
    theirs = launchers_environment(None, monkeypatch)
    theirs.pop("ACCELERATE_USE_CPU", None)  # depends on the machine; CPUs are used where there is no GPU
    assert bare_environment({}) == theirs | {"FSDP_SYNC_MODULE_STATES": "true"}
    given = bare_environment({"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_SYNC_MODULE_STATES": "false"})
    assert not given.keys() & {"ACCELERATE_MIXED_PRECISION", "FSDP_SYNC_MODULE_STATES"}


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


def parsed(path, *flags):
    """The settings of ``fullshard launch`` for a file, or None, and options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    options = parser.parse_args(flags)
    return read_settings(path, options), options


SHARDED = ["--use_fsdp", "--num_processes", "2"]
FLAGS = {
    "precision": ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16", "--debug", "--gpu_ids", "0,1"],
    "defaults": SHARDED,
    "version 2": [
        *SHARDED,
        *("--fsdp_version", "2", "--fsdp_reshard_after_forward", "false", "--fsdp_state_dict_type", "FULL_STATE_DICT"),
        *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "T5Block,Other"),
    ],
    "every option of version 1": [
        *SHARDED,
        *("--fsdp_version", "1", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--fsdp_offload_params", "true"),
        *("--fsdp_min_num_params", "77", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        *("--fsdp_backward_prefetch", "BACKWARD_POST", "--fsdp_forward_prefetch", "true"),
        *("--fsdp_use_orig_params", "false", "--fsdp_cpu_ram_efficient_loading", "false"),
        *("--fsdp_sync_module_states", "false", "--fsdp_activation_checkpointing", "true"),
        *("--dynamo_backend", "inductor", "--dynamo_mode", "max-autotune", "--dynamo_use_dynamic"),
    ],
    "sizes of a mesh": [
        *SHARDED,
        *("--fsdp_version", "2", "--use_parallelism_config"),
        *("--parallelism_config_dp_shard_size", "2", "--parallelism_config_dp_replicate_size", "1"),
    ],
}


@as_accelerate_1_15
@pytest.mark.parametrize("case", FLAGS)
@pytest.mark.parametrize("hyphens", [False, True])
def test_options_set_the_variables_of_accelerates_own_launcher(case, hyphens, monkeypatch):
    flags = [word.replace("_", "-") if hyphens and word[:2] == "--" else word for word in FLAGS[case]]
    rest = [flag for flag in flags if flag not in ("--num_processes", "--num-processes")]
    if rest != flags:
        rest.remove("2")  # the number of ranks, which fullshard launch itself reads
    file, _ = parsed(None, *rest)
    expected = launchers_environment(None, monkeypatch, *flags)
    assert launch_environment(file) == expected


def test_options_override_the_file(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(VERSION_1.replace("mixed_precision: 'no'", "mixed_precision: fp16"))
    before, _ = parsed(path)
    file, _ = parsed(path, "--mixed_precision", "bf16", "--fsdp_sharding_strategy", "3", "--cpu")
    assert (file.mixed_precision, file.strategy, file.use_cpu) == ("bf16", "NO_SHARD", True)
    assert file.fsdp | {"fsdp_sharding_strategy": 0} == before.fsdp | {"fsdp_sharding_strategy": 0}
    assert file.num_processes == before.num_processes


def test_no_option_and_no_file_set_nothing():
    file, options = parsed(None, "--multi_gpu", "--standalone")
    assert file is None
    assert environment_of(options) == {}
    assert warnings_of(options) == []
    _, options = parsed(None, "--num_cpu_threads_per_process", "3", "--gradient_clipping", "1.0")
    assert environment_of(options) == {"OMP_NUM_THREADS": "3"}
    assert [text[:40] for text in warnings_of(options)] == ["--gradient_clipping 1.0 has no effect: A"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--fsdp_sharding_strategy", "ALL"], "--fsdp_sharding_strategy/--fsdp-sharding-strategy: expected one"),
        (["--mixed_precision", "fp8"], "the command line: 1 problem:\n  mixed_precision: fullshard computes in fp32"),
        (["--use_fsdp", "--fsdp_version", "3"], "  fsdp_version: expected 1 or 2; got 3"),
        (["--parallelism_config_tp_size", "2"], "  parallelism_config_tp_size: only data parallelism"),
    ],
)
def test_a_wrong_option_is_named(flags, text, capsys):
    with pytest.raises((ConfigError, SystemExit)) as caught:
        parsed(None, *flags)
    assert text in str(caught.value) + capsys.readouterr().err


def test_options_without_effect_are_told():
    file, _ = parsed(None, "--fsdp_version", "2", "--fsdp_use_orig_params", "false", "--downcast_bf16")
    assert [text.partition(" in the command line")[0] for text in file.warnings] == [
        "downcast_bf16: 'true'",
        "fsdp_config.fsdp_use_orig_params: 'false'",
        "fsdp_config",
    ]
    file, _ = parsed(
        None, "--use_fsdp", "--fsdp_backward_prefetch", "BACKWARD_PRE", "--fsdp_backward_prefetch_policy", "3"
    )
    assert file.warnings[0].startswith("fsdp_backward_prefetch_policy: '3' in the command line, has no effect")
