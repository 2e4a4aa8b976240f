"""Accelerate's file beside a run file: its settings are the run's, contradictions are refused."""

import json
from pathlib import Path

import pytest
import yaml

from fullshard.program.cli import accelerate as config_file, common, main as cli
from fullshard.program.config import RunConfig, load_run
from support.tiny_run import QUICK, write_run_file


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_file(directory, fsdp=None, **changes):
    fsdp = {"fsdp_sharding_strategy": 2, "fsdp_auto_wrap_policy": 2, "fsdp_min_num_params": 2000} | (fsdp or {})
    values = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "fsdp_config": fsdp}
    path = directory / "fsdp_config.yaml"
    path.write_text(yaml.safe_dump(values | changes, sort_keys=False))
    return path


def check(capsys, *arguments):
    assert cli.main(["config", "check", *map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_files_settings_are_the_runs(tmp_path, capsys):
    run, file = write_run_file(tmp_path), write_file(tmp_path)
    settings, said = check(capsys, run, "--config_file", file)
    assert settings["sharding"]["strategy"] == "shard_grad_op"
    assert settings["sharding"]["wrap"] == 2000
    assert settings["training"]["precision"] == "bf16"
    assert settings["nproc"] == 2
    assert settings["training"]["learning_rate"] == 1e-2
    assert said == ""


def test_options_of_a_dry_run_are_refused_without_it(tmp_path, refused):
    for option, value in (("--gpu", "h100"), ("--world-size", "2")):
        assert f"{option} needs --dry-run" in refused(
            2, "config", "check", str(write_run_file(tmp_path)), option, value
        )


@pytest.mark.parametrize(
    ("on", "precision", "tables"),
    [
        ([], "fp32 (ranks compute on CPUs)", "home or gather"),
        (["--world-size", "1", "--gpu", "h100"], "bf16 (h100 computes it in hardware)", "gather"),
        pytest.param(
            *(["--world-size", "8", "--gpu", "a10g"], "bf16 (a10g computes it in hardware)", "gather"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dry_run_prints_what_was_chosen_and_why(tmp_path, on, precision, tables, done):
    run = str(write_run_file(tmp_path, **QUICK))
    chosen = done("config", "check", run, "--dry-run", *on).partition("chosen:\n")[2].splitlines()
    found = dict(line.strip().split(": ", 1) for line in chosen if line.startswith("  "))
    assert found["training.precision"] == precision
    assert found["training.tf32"].startswith("true (")
    assert ("without effect" in found["training.tf32"]) is (not on)
    assert found["training.fused_cross_entropy"].startswith("false (logits of up to 7.5 KiB, within 5 % of ")
    assert found["sharding.tables"].startswith(f"{tables} (")
    assert found["speed.ways"].startswith("[t5_attention] (") is bool(on)


@pytest.mark.parametrize(
    "own", ["model.attn_implementation=sdpa", pytest.param("speed.ways=[bias_sdpa]", marks=pytest.mark.slow)]
)
def test_an_attention_of_the_run_file_is_kept(tmp_path, own, done):
    run = str(write_run_file(tmp_path, **QUICK))
    said = done("config", "check", run, own, "--dry-run", "--world-size", "1", "--gpu", "h100")
    assert "model.attn_implementation: eager" not in said


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_an_adapter_of_a_new_model_is_refused_as_train_refuses_it(tmp_path, more, refused):
    run = write_run_file(tmp_path, model__adapter={"type": "lora"})
    said = refused(2, "config", "check", run, *more)
    assert "model.adapter needs model.path" in said
    assert "Remove model.adapter" in said


def test_a_run_file_in_the_place_of_accelerates_is_told(tmp_path, capsys):
    run = write_run_file(tmp_path)
    assert cli.main(["config", "check", str(run), "--config_file", str(run)]) == 2
    said = capsys.readouterr().err
    assert "is a run file of fullshard (it has output_dir," in said
    assert f"`fullshard train {run}`" in said
    assert "unknown key" not in said


def test_what_both_say_alike_may_stand_in_both(tmp_path, capsys):
    run = write_run_file(tmp_path, sharding__strategy="shard_grad_op", training__precision="bf16")
    settings, _ = check(capsys, run, "sharding.wrap=2000", "--config_file", write_file(tmp_path))
    assert settings["sharding"]["strategy"] == "shard_grad_op"


def test_all_that_they_say_differently_is_one_error_that_names_both(tmp_path, refused):
    run = write_run_file(tmp_path, sharding__strategy="no_shard")
    arguments = [str(run), "training.precision=fp32", "--config_file", str(write_file(tmp_path))]
    error = refused(2, "config", "check", *arguments)
    assert 'sharding.strategy: "no_shard" in the run file' in error
    assert "fsdp_sharding_strategy: 2 in " in error
    assert "line 5" in error
    assert 'training.precision: "fp32"' in error
    assert "mixed_precision: bf16" in error
    assert cli.main(["train", *arguments]) == 2


def test_a_run_that_only_the_file_makes_right_is_right(tmp_path, capsys):
    run = write_run_file(tmp_path, training__allow_fp16=True)
    settings, _ = check(capsys, run, "--config_file", write_file(tmp_path, mixed_precision="fp16"))
    assert settings["training"]["precision"] == "fp16"


def test_what_has_no_effect_is_a_warning_on_standard_error(tmp_path, capsys):
    file = write_file(tmp_path, {"fsdp_use_orig_params": False}, tpu_name="pod", debug=True)
    _, said = check(capsys, write_run_file(tmp_path), "--config_file", file)
    lines = said.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("fullshard: warning: ") for line in lines)


def test_train_starts_ranks_with_the_files_settings(tmp_path, monkeypatch):
    run, file, started = write_run_file(tmp_path, nproc=3), write_file(tmp_path, num_processes=3), []
    monkeypatch.setattr(common, "launch", lambda command, nproc, **_: started.append((command, nproc)))
    assert cli.main(["train", str(run), "seed=4", "--config_file", str(file)]) == 0
    ((command, nproc),) = started
    assert nproc == 3
    overrides = command[4:]
    assert overrides[0] == "seed=4"
    config = load_run(command[3], overrides)
    assert (config.sharding.strategy, config.sharding.wrap, config.training.precision) == (
        "shard_grad_op",
        2000,
        "bf16",
    )


@pytest.mark.parametrize(("changes", "visible"), [({"use_cpu": True}, ""), ({"gpu_ids": "0,2"}, "0,2"), ({}, "1")])
def test_gpus_that_the_file_leaves_out_are_hidden(tmp_path, monkeypatch, changes, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    options = cli.parse(["train", str(write_run_file(tmp_path)), "--config_file", str(write_file(tmp_path, **changes))])
    config_file.file_overrides(options)
    assert config_file.os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_a_file_for_several_machines_is_told_how_to_start_them(tmp_path, refused):
    changes = {"num_machines": 2, "num_processes": 4, "main_process_ip": "10.0.0.1", "machine_rank": 1}
    run, file = write_run_file(tmp_path), write_file(tmp_path, **changes)
    error = refused(2, "train", run, "--config_file", file)
    assert "num_machines: 2 in " in error
    assert f"fullshard launch --config_file {file} -m fullshard train {run} --config_file {file}" in error


def test_under_another_launcher_the_ranks_are_those_that_are_there(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    run, file = write_run_file(tmp_path, nproc=7), write_file(tmp_path, num_machines=2, num_processes=2)
    options = cli.parse(["train", str(run), "--config_file", str(file)])
    overrides = config_file.file_overrides(options)
    assert not any(text.startswith("nproc") for text in overrides)
    assert "num_processes: 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    config_file.file_overrides(options)
    assert capsys.readouterr().err == ""


def test_a_wrong_file_is_one_message(tmp_path, refused):
    file = write_file(tmp_path, {"fsdp_shard": 1})
    error = refused(2, "train", write_run_file(tmp_path), "--config_file", file)
    assert "fsdp_config.fsdp_shard: unknown key" in error
    assert "Traceback" not in error


def test_a_run_file_without_problems_is_said_so_in_few_lines(tmp_path, capsys, done):
    run = str(write_run_file(tmp_path, training__weight_decay=0.25))
    lines = done("config", "check", run).splitlines()
    assert lines[-1].startswith(f"no problem found in {run}")
    assert "  training.weight_decay: 0.25" in lines
    assert "training.precision: auto is fp32 on this machine: ranks compute on CPUs" in lines
    assert len(lines) < 40
    assert not any("max_grad_norm" in line for line in lines), "the default"
    every = done("config", "check", run, "--all")
    assert every.endswith("# no problem found\n")
    assert RunConfig.model_validate(yaml.safe_load(every)) == load_run(Path(run), ())
    assert cli.main(["config", "check", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(every)


def test_a_schedule_is_checked_without_the_data(tmp_path, refused):
    given = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 3.0}}
    run = str(write_run_file(tmp_path, training=given))
    assert "lr_end (3.0) must be smaller than initial lr" in refused(2, "config", "check", run)


def test_t5_in_fp16_is_refused_by_its_configuration_alone(tmp_path, refused):
    run = str(write_run_file(tmp_path, training__precision="fp16"))
    assert "training.allow_fp16" in refused(4, "config", "check", run)
    assert cli.main(["config", "check", run, "training.allow_fp16=true"]) == 0
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    path = ["model.config=null", "model.tokenizer=null", f"model.path={tmp_path / 'model'}"]
    assert cli.main(["config", "check", run, *path]) == 0
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mt5"}')
    assert cli.main(["config", "check", run, *path]) == 4
