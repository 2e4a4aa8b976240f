"""``fullshard export --merge`` of an adapter that has no checkpoint beside it."""

import json
import shutil

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fullshard.core.testing import run_ranks
from fullshard.program.cli.main import main
from fullshard.program.config import RunConfig
from fullshard.program.train import FileSink, train
from support.preference_runs import pair_settings, saved_start


def test_a_finished_adapter_without_checkpoints_is_merged_into_its_base(tmp_path, capsys):
    base = saved_start(tmp_path, "llama")
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    settings = pair_settings(tmp_path, "llama", training__objective="orpo", model={"path": base, "adapter": adapter})
    config = RunConfig.model_validate(settings)
    run_ranks(1, lambda comm: train(config, comm, [FileSink(config.output_dir)]))
    shutil.rmtree(config.output_dir / "checkpoints", ignore_errors=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):  # as peft alone would have saved it
        shutil.copyfile(config.output_dir / name, tmp_path / "elsewhere" / name)

    before, trained = load_file(f"{base}/model.safetensors"), load_file(config.output_dir / "adapter_model.safetensors")
    assert any(name.endswith("lora_B.weight") and value.any() for name, value in trained.items())
    for number, directory in enumerate([config.output_dir, tmp_path / "elsewhere"]):
        merged = tmp_path / f"merged-{number}"
        main(["export", str(directory), "--merge", "-o", str(merged), "--json"])
        assert json.loads(capsys.readouterr().out)["tensors"] == len(before)
        found = load_file(merged / "model.safetensors")
        assert found.keys() == before.keys()
        for name, weight in before.items():
            parts = [trained.get(f"base_model.model.{name[:-7]}.lora_{one}.weight") for one in "AB"]
            expected = weight if parts[0] is None else weight + 8 / 4 * parts[1] @ parts[0]
            assert torch.allclose(found[name], expected, atol=1e-6), name
        assert not (merged / "adapter_config.json").exists()
        _, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    assert (tmp_path / "merged-0" / "fullshard_prompt.json").is_file()
    assert not list(tmp_path.glob(".merging-*"))
