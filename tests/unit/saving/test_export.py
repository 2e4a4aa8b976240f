"""An exported checkpoint is the model that was saved, to the bit, and a LoRA adapter is what peft makes of it."""

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard import Checkpoints, MixedPrecision, fully_shard, save
from fullshard.core.comm import MemoryMeter
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.saving import export as exporting
from fullshard.state.saving.export import ExportOptions, choose_checkpoint, describe_choice, export
from support.models import bart, gpt2, t5, t5_untied
from support.parity import replicas


def save_checkpoint(size, make, directory, *, beside=None, assets=None, steps=(1,), **options):
    """The reference model, and checkpoints of equal ones on ``size`` ranks; ``beside``: also what ``save`` writes."""
    reference, models = replicas(make, size)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **options)
        with Checkpoints(directory, ranks=comm, keep_last=None) as checkpoints:
            for step in steps:
                metric = None if step == 4 else -abs(step - 2.0)
                own = None if assets is None else lambda path: assets(model, path)
                checkpoints.save(model, step=step, metric=metric, assets=own)
        if beside is not None:
            save(model, beside)

    run_ranks(size, work)
    return reference


def assert_equal(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


def load(directory, reference, **options):
    auto = AutoModelForSeq2SeqLM if reference.config.is_encoder_decoder else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(directory, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return loaded


@pytest.mark.parametrize(
    ("make", "size", "max_shard_size"),
    [(t5, 1, "50GB"), (t5, 3, "20KB"), (t5_untied, 3, "50GB"), (bart, 3, "20KB"), (gpt2, 1, "50GB")],
)
def test_from_pretrained_loads_what_was_trained_and_what_save_would_have_written(make, size, max_shard_size, tmp_path):
    reference = save_checkpoint(size, make, tmp_path / "run" / "checkpoints", beside=tmp_path / "saved")
    told = []
    report = export(
        tmp_path / "run" / "checkpoints" / "step-00000001",
        tmp_path / "exported",
        ExportOptions(max_shard_size=max_shard_size),
        lambda done, total: told.append((done, total)),
    )
    assert_equal(load(tmp_path / "exported", reference, dtype="auto"), reference)
    parts = sorted((tmp_path / "exported").glob("*.safetensors"))
    assert (len(parts) > 1) == (max_shard_size == "20KB")
    ours = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    theirs = load_file(tmp_path / "saved" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert report.tensors == len(ours)
    assert report.nbytes == sum(tensor.nbytes for tensor in ours.values())
    assert told == sorted(told)
    assert told[-1] == (report.nbytes, report.nbytes)
    assert set(report.files) == {path.name for path in (tmp_path / "exported").iterdir()}
    assert (tmp_path / "exported" / "config.json").read_text() == (tmp_path / "saved" / "config.json").read_text()


def test_in_another_dtype_as_save_would_write_it(tmp_path):
    save_checkpoint(2, t5, tmp_path / "checkpoints")
    _, models = replicas(t5, 1)
    run_ranks(1, lambda comm: save(fully_shard(models[0], comm), tmp_path / "saved", dtype="bf16"))
    export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "exported", ExportOptions(dtype="bf16"))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "saved"))
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "exported" / "config.json").read_text() == (tmp_path / "saved" / "config.json").read_text()


def test_shards_in_bf16_stay_bf16(tmp_path):
    reference = save_checkpoint(2, lambda: t5().bfloat16(), tmp_path / "checkpoints", mp_policy=MixedPrecision())
    export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "exported", ExportOptions())
    assert_equal(load(tmp_path / "exported", reference, dtype="auto"), reference)


class Table(nn.Module):
    """A tensor that is larger than what may be in memory, and a buffer of numbers that are not floating."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500_000, 16)
        self.register_buffer("seen", torch.arange(5))


def test_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "RUN_BYTES", 4 << 20)
    reference = save_checkpoint(2, Table, tmp_path / "checkpoints", assets=None, wrap=None)
    with MemoryMeter(torch.device("cpu")) as meter:
        report = export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "exported", ExportOptions())
    assert reference.table.weight.nbytes == 32_000_000
    assert meter.peak_bytes - meter.start_bytes < 13 << 20  # a run, a block, and what is cast
    saved = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(saved["table.weight"], reference.table.weight)
    assert torch.equal(saved["seen"], reference.seen)
    assert "config.json" in report.notes[0]


def test_which_checkpoint(tmp_path):
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    save_checkpoint(1, t5, checkpoints, assets=None, steps=(1, 2, 3, 4))
    torn = checkpoints / "step-00000004"
    for path in (run, checkpoints):
        assert choose_checkpoint(path) == torn
        assert choose_checkpoint(path, "latest") == torn
        assert choose_checkpoint(path, "best") == checkpoints / "step-00000002"
    (torn / "complete.json").unlink()
    for path in (run, checkpoints):
        for which in (None, "latest"):
            with pytest.raises(CheckpointError, match=rf"step-00000004 is the newest .* {checkpoints}/step-00000003\."):
                choose_checkpoint(path, which)
        with pytest.raises(CheckpointError, match=rf"step-00000004 may be the best .* {checkpoints}/step-00000002: "):
            choose_checkpoint(path, "best")
        assert choose_checkpoint(path, "1") == checkpoints / "step-00000001"
    assert choose_checkpoint(checkpoints / "step-00000002") == checkpoints / "step-00000002"
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 4 in .*; there are 1, 2, 3\."):
        choose_checkpoint(run, "4")
    with pytest.raises(ConfigError, match="is one checkpoint"):
        choose_checkpoint(checkpoints / "step-00000002", "latest")
    with pytest.raises(ConfigError, match="latest, best or a step"):
        choose_checkpoint(run, "lastest")


def test_a_finished_run_exports_its_own_model(tmp_path):
    """That of its best step by its summary, also where the metrics of checkpoints would choose another."""
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    save_checkpoint(1, t5, checkpoints, assets=None, steps=(1, 2, 3))
    (run / "summary.json").write_text('{"metric": "exact_match", "best_step": 1}')
    assert choose_checkpoint(run) == checkpoints / "step-00000003"  # not finished: the summary is an earlier run's
    (checkpoints / "finished.json").write_text("{}")
    assert choose_checkpoint(run) == checkpoints / "step-00000001"
    assert choose_checkpoint(run, "latest") == choose_checkpoint(checkpoints) == checkpoints / "step-00000003"
    for step, text in (
        (1, "; the best)"),
        (2, "; not the best, which is step-00000001)"),
        (3, "; the latest, not the best, "),
    ):
        described = describe_choice(checkpoints / f"step-{step:08d}")
        assert described.startswith(f"step {step} (exact_match -")
        assert text in described
    shutil.rmtree(checkpoints / "step-00000001")
    with pytest.raises(CheckpointError, match=r"step 1, the best by exact_match, .* there are 2, 3\. That model is in"):
        choose_checkpoint(run)
    (run / "summary.json").write_text('{"metric": null, "best_step": 3}')
    assert choose_checkpoint(run) == checkpoints / "step-00000003"
    assert describe_choice(checkpoints / "step-00000003").endswith(
        "; the latest, not the best, which is step-00000002)"
    )


def test_no_checkpoint_to_choose(tmp_path):
    with pytest.raises(CheckpointError, match="There is no"):
        choose_checkpoint(tmp_path / "none")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        choose_checkpoint(tmp_path / "run")
    save_checkpoint(1, t5, tmp_path / "run" / "checkpoints", assets=None, steps=(4,))
    with pytest.raises(CheckpointError, match=r"None of the 1 checkpoints .* metric"):
        choose_checkpoint(tmp_path / "run", "best")
    t5().save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="already"):
        choose_checkpoint(tmp_path / "model")


def test_a_directory_with_anything_in_it_is_left_alone(tmp_path):
    save_checkpoint(1, t5, tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export(checkpoint, tmp_path / "mine", ExportOptions())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    export(checkpoint, tmp_path / "empty", ExportOptions())
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path):
    save_checkpoint(1, t5, tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    file = checkpoint / "shard-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: block 0 of"):
        export(checkpoint, tmp_path / "exported", ExportOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


# LoRA


def with_lora(make, **options):
    """A peft model whose adapter does something."""

    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft on Conv1D and on tied embeddings; transformers on what peft calls
            model = get_peft_model(make(), LoraConfig(**options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    parameter.normal_(std=0.3)
        return model

    return made


def save_lora(tmp_path, make, size=2, **options):
    reference = save_checkpoint(size, make, tmp_path / "checkpoints", **options)
    return reference, tmp_path / "checkpoints" / "step-00000001"


def untied_gpt2():
    model = gpt2()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


PATTERNS = {"rank_pattern": {"decoder.*q": 2}, "alpha_pattern": {"encoder.*v": 32}}
LORA = {
    "t5": with_lora(t5, target_modules=["q", "v", "wi", "wo"], r=4, lora_alpha=16),
    "patterns": with_lora(t5, target_modules=["q", "v"], r=4, lora_alpha=8, **PATTERNS),
    "rslora": with_lora(bart, target_modules=["q_proj", "fc1"], r=4, lora_alpha=3, use_rslora=True),
    "conv1d": with_lora(gpt2, target_modules=["c_attn", "c_fc", "c_proj"], r=3, fan_in_fan_out=True),
    "modules_to_save": with_lora(untied_gpt2, target_modules=["c_attn"], r=2, modules_to_save=["lm_head", "ln_f"]),
    "embedding": with_lora(untied_gpt2, target_modules=["wte", "c_attn"], r=2),
}


@pytest.mark.parametrize(("name", "run_bytes"), [("t5", 16 << 20), *((name, 1000) for name in LORA)])
def test_merged_is_what_peft_merges(name, run_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "RUN_BYTES", run_bytes)
    model, checkpoint = save_lora(tmp_path, LORA[name], size=3)
    export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge"))
    merged = model.merge_and_unload()
    loaded = load(tmp_path / "merged", merged)
    ours, theirs = loaded.state_dict(), merged.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, atol=1e-6, rtol=1e-6)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_a_base_that_the_run_held_in_16_bits_is_merged_so_with_a_note(tmp_path):
    def frozen_in_bf16():
        model = LORA["t5"]()
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
        return model

    _, checkpoint = save_lora(tmp_path, frozen_in_bf16)
    (note,) = export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge")).notes
    assert "in bfloat16, as the run computed with them" in note
    assert not export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter")).notes
    _, exact = save_lora(tmp_path / "exact", LORA["t5"])
    assert not export(exact, tmp_path / "exact" / "merged", ExportOptions(lora="merge")).notes


@pytest.mark.parametrize("name", LORA)
def test_the_adapter_is_what_peft_saves_and_loads(name, tmp_path):
    model, checkpoint = save_lora(tmp_path, LORA[name])
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("adapter", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    trained = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = PeftModel.from_pretrained(model.unload(), tmp_path / "adapter")
    for key, tensor in again.state_dict().items():
        if "lora_" in key or "modules_to_save" in key:
            assert torch.equal(tensor, trained[key]), key


def test_dora_is_for_peft_to_merge(tmp_path):
    model, checkpoint = save_lora(tmp_path, with_lora(t5, target_modules=["q"], r=2, use_dora=True))
    with pytest.raises(CheckpointError, match=r"use_dora=True.*--adapter and merge it with peft"):
        export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge"))
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("adapter", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (with_lora(t5, target_modules=["q"], bias="all"), "bias='all'"),
        (with_lora(gpt2, target_modules=["wte", "c_attn"]), "ties its embeddings"),
        (with_lora(gpt2, target_modules=["lm_head"]), "shares its base weight with another tensor"),
        (with_lora(t5, target_modules=["q"], modules_to_save=["lm_head"]), "ties its embeddings"),
        (with_lora(t5, target_modules=["q"], lora_bias=True), "lora_bias"),
    ],
    ids=["bias", "tied_embedding", "tied_head", "tied_module", "lora_bias"],
)
def test_what_adding_the_product_would_get_wrong_is_refused(make, text, tmp_path):
    _, checkpoint = save_lora(tmp_path, make)
    with pytest.raises(CheckpointError, match=text) as refused:
        export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge"))
    assert "merge_and_unload" in str(refused.value)
    assert not (tmp_path / "merged").exists()
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))


def test_lora_is_not_exported_by_accident(tmp_path):
    _, checkpoint = save_lora(tmp_path, LORA["t5"], size=1)
    with pytest.raises(ConfigError, match=r"--merge .* or --adapter"):
        export(checkpoint, tmp_path / "exported", ExportOptions())
    save_checkpoint(1, t5, tmp_path / "plain")
    for lora in ("merge", "adapter"):
        with pytest.raises(ConfigError, match=f"--{lora} is for a model with an adapter"):
            export(tmp_path / "plain" / "step-00000001", tmp_path / "exported", ExportOptions(lora=lora))


def test_without_its_configuration_an_adapter_has_no_scale(tmp_path):
    make = LORA["t5"]
    save_checkpoint(1, make, tmp_path / "checkpoints", assets=lambda model, path: None)
    for lora in ("merge", "adapter"):
        with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
            export(tmp_path / "checkpoints" / "step-00000001", tmp_path / "exported", ExportOptions(lora=lora))
