"""A run over quantised weights: its checkpoints have the adapter alone, and name the base that it goes with."""

import json
import re
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from fullshard import Quantize
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, ModelError
from fullshard.program.cli import main as cli
from fullshard.program.config import recorded_run
from fullshard.program.data.examples import InputRow
from fullshard.program.report.files import read_run as read_run_files
from fullshard.program.report.page import make_page
from fullshard.program.train.evaluation.predict import predict
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.reporting.card import CardSink
from fullshard.state.saving.export import ExportOptions, export
from fullshard.state.storage import content_of, find_checkpoints, read_index
from fullshard.state.storage.contents import Kind, inspect_path, verify
from support.interrupted_run import OFTEN, metrics, run, run_until_killed, run_until_stopped
from support.quantized import bitsandbytes_stored
from support.t5_directory import write_t5
from support.tiny_run import WORDS

pytestmark = [
    pytest.mark.usefixtures("unmetered"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

ADAPTER = "adapter_model.safetensors"
LAST = "checkpoints/step-00000004"


def options(base, **quantization):
    adapter = {"type": "lora", "r": 4, "lora_alpha": 32}
    quantization = {"type": "nf4", **quantization}
    return {"model": {"path": str(base), "adapter": adapter, "quantization": quantization}, **OFTEN}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    write_t5(directory, [*WORDS, *WORDS.values()] * 30)
    return directory


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory, unmetered):
    directory = tmp_path_factory.mktemp("finished")
    return directory, run(directory, CardSink(directory / "out", print), ranks=2, **options(base))


def test_a_checkpoint_has_the_adapter_alone_and_names_its_base(finished, base):
    directory, _ = finished
    index = read_index(directory / "out" / LAST)
    assert all("lora_" in name for name in index.tensors if name.startswith("model/"))
    assert (index.base.name, index.base.directory, index.base.quantisation) == (str(base), str(base), "nf4 (double)")
    assert "decoder.block.0.layer.1.EncDecAttention.q.weight" in index.base.layers
    assert not any("lm_head" in name or "base_layer" in name for name in index.base.layers)
    assert inspect_path(directory / "out" / LAST).facts["base"]["quantisation"] == "nf4 (double)"
    found = verify(directory / "out")
    assert found.problems == 0
    assert [one.base for one in found.results] == [
        index.base.facts if one.kind is Kind.CHECKPOINT else None for one in found.results
    ]


def test_verify_and_the_report_name_the_base_with_its_digest(finished, base, capsys):
    directory, _ = finished
    described = f"{base} ({content_of(base)}), not in the checkpoint, quantised: nf4 (double)"
    assert cli.main(["verify", str(directory / "out" / LAST)]) == 0
    assert f"  base: {described}" in capsys.readouterr().out
    assert cli.main(["inspect", str(directory / "out" / LAST)]) == 0
    assert f"  base: {described}" in capsys.readouterr().out
    page = make_page(read_run_files(directory / "out"))
    assert all(text in page for text in ("base model", str(base), content_of(base), "quantised: nf4 (double)"))


def test_stopped_it_goes_on_to_the_bit(base, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory in (whole, parts):
        directory.mkdir()
    run(whole, **options(base))
    assert run_until_stopped(parts, ("step", 3), **options(base)).step == 4
    memory = run(parts, **options(base))
    assert memory.begun[0].resumed_step == 4
    assert metrics(parts) == metrics(whole)
    ours, theirs = (load_file(directory / "out" / ADAPTER) for directory in (parts, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_killed_it_goes_on_from_memory_to_the_bit_without_a_copy_of_its_base(base, tmp_path, monkeypatch):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for directory in (calm, killed):
        directory.mkdir()
    run(calm, **options(base))
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "0")
    run_until_killed(killed, ("step", 4), training__save_strategy="no", **options(base))
    kept = [read_index(path) for rank in (tmp_path / "keep").glob("*/rank-*") for path in find_checkpoints(rank)]
    assert kept
    assert all("lora_" in name for one in kept for name in one.tensors if name.startswith("model/"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    memory = run(killed, training__save_strategy="no", **options(base))
    assert memory.begun[0].resumed_step == max(one.step for one in kept) > 0
    assert metrics(killed) == metrics(calm)
    assert (killed / "out" / ADAPTER).read_bytes() == (calm / "out" / ADAPTER).read_bytes()


def test_with_another_quantisation_or_base_it_does_not_go_on(base, tmp_path):
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    run_until_stopped(tmp_path, ("step", 2), **options(moved))
    with pytest.raises(ConfigError, match=r"model\.quantization\.type: int8; in the checkpoint nf4"):
        run(tmp_path, **options(moved, type="int8"))
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000002"
    with pytest.raises(ConfigError, match=r"model\.quantization\.double_quant: False; in the checkpoint True"):
        run(tmp_path, resume=str(checkpoint), **options(moved, double_quant=False))
    write_t5(moved, ["another model"])
    with pytest.raises(ConfigError, match=r"model\.path: .*sha256"):
        run(tmp_path, **options(moved))


def merged_by_peft(base, adapter):
    """The base with the quantised layers' weights as bitsandbytes dequantises them, merged by peft."""
    model = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if type(layer) is torch.nn.Linear and name != "lm_head":
                # As one row: of these widths bitsandbytes' kernel for CPUs takes wrong scales.
                made = bitsandbytes_stored(layer.weight.reshape(1, -1), Quantize("nf4"))[2]
                layer.weight.copy_(made.reshape(layer.weight.shape))
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()


@pytest.mark.parity
def test_merged_it_is_the_dequantised_base_with_the_adapter_as_peft_merges_it(finished, base, tmp_path):
    directory, _ = finished
    report = export(directory / "out" / LAST, tmp_path / "merged", ExportOptions(lora="merge"))
    export(directory / "out" / LAST, tmp_path / "adapter", ExportOptions(lora="adapter"))
    export(directory / "out" / LAST, tmp_path / "exact", ExportOptions(lora="merge", dtype="fp32"))
    expected = merged_by_peft(base, tmp_path / "adapter").state_dict()
    ours, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "exact"))
    assert report.tensors == len(ours)
    for name, tensor in exact.items():
        assert (tensor - expected[name]).abs().max() <= 1e-6, name
        assert torch.equal(ours[name], tensor.bfloat16()), name
    # Without it: what was rounded away shows.
    plain = AutoModelForSeq2SeqLM.from_pretrained(base).state_dict()
    assert max((tensor - plain[name]).abs().max() for name, tensor in exact.items()) > 1e-3
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "adapter",
    [{"type": "dora", "r": 4}, {"type": "lora", "r": 4, "options": {"modules_to_save": ["final_layer_norm", "wo"]}}],
    ids=["dora", "in full"],
)
@pytest.mark.slow
def test_dora_and_modules_trained_in_full_resume_predict_and_merge(base, adapter, tmp_path):
    settings = options(base)
    settings["model"] = settings["model"] | {"adapter": adapter}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory in (whole, parts):
        directory.mkdir()
    run(whole, **settings)  # of two threads as ranks dropout differs from run to run
    run_until_stopped(parts, ("step", 3), **settings)
    run(parts, **settings)
    ours, theirs = (load_file(directory / "out" / ADAPTER) for directory in (parts, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert_predicts_as_in_training(whole / "out")
    checkpoint, how = whole / "out" / LAST, ExportOptions(lora="merge", dtype="fp32")
    export(checkpoint, tmp_path / "merged", how)
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))
    expected = merged_by_peft(base, tmp_path / "adapter").state_dict()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert any("wo" in name for name in merged)
    if adapter["type"] == "dora":
        trained = load_file(tmp_path / "adapter" / ADAPTER)
        assert any("magnitude" in name and tensor.std() > 0 for name, tensor in trained.items())
        export(checkpoint, tmp_path / "short", ExportOptions(lora="merge"))
        short = load_file(tmp_path / "short" / "model.safetensors")
        assert all(torch.equal(short[name], tensor.bfloat16()) for name, tensor in merged.items())
    for name, tensor in merged.items():
        assert (tensor - expected[name]).abs().max() <= 1e-6, name


def test_without_its_base_only_the_adapter_is_exported(base, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    run(tmp_path, ranks=2, **options(moved))
    checkpoint = tmp_path / "out" / LAST
    write_t5(moved, ["another model"])
    digests = rf"{re.escape(content_of(base))}.*other files.*{re.escape(content_of(moved))}.*--base DIR"
    with pytest.raises(CheckpointError, match=digests):
        export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge"))
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match=r"is not there\. Give the directory where .*--base DIR"):
        export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge"))
    assert not (tmp_path / "merged").exists()
    export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge", base=base))
    assert (tmp_path / "merged" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match=r"--base applies to merging.*add --merge"):
        export(checkpoint, tmp_path / "other", ExportOptions(lora="adapter", base=base))
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))
    assert (tmp_path / "adapter" / ADAPTER).exists()


def test_every_verb_that_reads_a_base_which_was_moved_asks_for_its_directory(base, tmp_path, capfd, monkeypatch):
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    run(tmp_path, **options(moved))
    out, rows = str(tmp_path / "out"), tmp_path / "rows.csv"
    rows.write_text("source\nred\n")
    shutil.rmtree(moved)
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("evaluate", out),
        ("predict", out, str(rows), "-o", "predictions.jsonl"),
        ("chat", out),
        ("export", out, "--merge", "-o", "merged"),
    ):
        assert cli.main([*arguments, "--json"] if arguments[0] != "chat" else list(arguments)) != 0
        told = capfd.readouterr()
        assert "--base DIR" in told.out + told.err, (arguments, told)


def test_predictions_are_those_of_the_quantised_model(finished):
    assert_predicts_as_in_training(finished[0] / "out")


def assert_predicts_as_in_training(out):
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    trained = find_trained(str(out), recorded_run(out))

    def write(comm):
        model, tokenizer, notes = load_trained(trained, comm)
        rows = [InputRow(line["input"], number) for number, line in enumerate(lines, start=1)]
        return notes, [one.text for part in predict(model, tokenizer, rows, trained.config, comm) for one in part]

    for notes, texts in run_ranks(2, write):
        assert notes == ("frozen linear layers are quantised: nf4 (double)",)
        assert texts == [line["prediction"] for line in lines]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trained_model_reads_no_other_base_and_one_that_was_moved_if_it_is_given(finished, base, ranks, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished[0] / "out", out)
    # As if the run had read a directory that is gone.
    config = json.loads((out / "adapter_config.json").read_text())
    gone = tmp_path / "gone"
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(gone)}))
    with pytest.raises(ModelError, match=r"over .*gone, which is not found.*--base DIR"):
        find_trained(str(out), recorded_run(out))
    write_t5(tmp_path / "other", ["another model"])

    def load(directory):
        trained = find_trained(str(out), recorded_run(out), directory)
        run_ranks(ranks, lambda comm: load_trained(trained, comm))

    digests = rf"{re.escape(content_of(base))}.*other files.*{re.escape(content_of(tmp_path / 'other'))}.*--base DIR"
    with pytest.raises(CheckpointError, match=digests):
        load(tmp_path / "other")
    load(base)
    with pytest.raises(ConfigError, match="--base is for an adapter"):
        find_trained(str(base), None, base)


def test_card_names_the_quantisation(finished):
    text = (finished[0] / "out" / "README.md").read_text()
    assert "its linear layers were quantised: nf4 (double)" in text
    assert "| frozen weights | quantised: nf4 (double) |" in text
