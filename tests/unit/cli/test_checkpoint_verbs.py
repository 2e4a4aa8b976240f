"""What export, verify and inspect say of checkpoints and models, and how they end."""

import io
import itertools
import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.program.cli import common
from fullshard.program.launch import progress as launch_progress
from fullshard.sizes import format_bytes
from fullshard.state.saving.full import write_assets
from support.forged import forge_completion
from support.models import t5
from support.parity import replicas


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run's directory: two checkpoints of two ranks, the later one the worse, and the best model."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    reference, models = replicas(t5, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with Checkpoints(run / "checkpoints", ranks=comm) as checkpoints:
            for step in (10, 20):
                checkpoints.save(
                    model,
                    optimizer,
                    step=step,
                    metric=1 / step,
                    values={"epoch": step},
                    assets=lambda directory: write_assets(model, directory),
                )

    run_ranks(2, work)
    reference.save_pretrained(run / "best")
    return run


@pytest.fixture
def run(written, tmp_path):
    return shutil.copytree(written, tmp_path / "mine")


def flip(file):
    """Damage the first tensor in a file, which is the model's."""
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    file.write_bytes(content)


def test_export_writes_what_was_asked_for_and_says_so(run, tmp_path, call):
    target = tmp_path / "exported"
    arguments = ("export", run, "-o", target, "--checkpoint", "best", "--dtype", "bf16", "--max-shard-size", "30KB")
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith(f"{target} written: ")
    assert "of step 10 " in out
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"ConfigError: {target} is not empty")


def test_export_passes_over_no_damaged_checkpoint_and_says_which_is_good(run, tmp_path, call, refused):
    good, damaged = (run / "checkpoints" / f"step-000000{step}" for step in (10, 20))
    (damaged / "index.json").unlink()
    for which in ((), ("--checkpoint", "latest")):
        err = refused(9, "export", run, "-o", tmp_path / "exported", *which)
        assert f"{damaged} is not complete: index.json is missing. {damaged.name} is the newest checkpoint" in err
        assert f"The newest good one is {good}." in err
    err = refused(9, "export", run, "-o", tmp_path / "exported", "--checkpoint", "20")
    assert "there are 10. " in err
    assert "index.json is missing" in err
    code, out, _ = call("export", run, "-o", tmp_path / "exported", "--checkpoint", "best")
    assert (code, "of step 10 " in out) == (0, True)  # the damaged one is known not to be the best
    (damaged / "complete.json").write_text("{")
    err = refused(9, "export", run, "-o", tmp_path / "other", "--checkpoint", "best")
    assert f"{damaged.name} may be the best checkpoint" in err
    assert f"The best good one is {good}" in err


def test_export_as_json(run, tmp_path, call):
    code, out, err = call("export", run / "checkpoints", "-o", tmp_path / "exported", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["step"], result["directory"]) == (20, str(tmp_path / "exported"))
    assert result["files"] == sorted(os.listdir(tmp_path / "exported"))


def test_export_of_weights_alone_says_what_is_missing(run, tmp_path, call):
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    checkpoint = run / "checkpoints" / "step-00000010"
    forge_completion(checkpoint, lambda done: [done["files"].pop(name) for name in done.pop("sha256")] and None)
    shutil.rmtree(checkpoint / "model")
    err = call("export", run, "-o", tmp_path / "exported")[2]
    assert "no config.json" in err


def test_export_of_damage_ends_with_9(run, tmp_path, call):
    flip(run / "checkpoints" / "step-00000020" / "shard-00001-of-00002.safetensors")
    code, out, err = call("export", run, "-o", tmp_path / "exported", "--json")
    assert code == 9
    assert err.startswith("CheckpointError: ")
    assert json.loads(out)["error"]["exit_code"] == 9
    assert not (tmp_path / "exported").exists()


def test_verify_of_what_is_whole(run, call):
    (run / "checkpoints" / "step-00000030.tmp").mkdir()
    code, out, err = call("verify", run)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split(": ")[1].split(";")[0] for line in lines[:2]] == ["complete", "complete"]
    assert "checksums match" in lines[0]
    assert lines[2].startswith(f"{run / 'best'}: complete, but without checksums, so the bytes were not checked; ")
    assert lines[3].startswith(f"note: {run / 'checkpoints' / 'step-00000030.tmp'} is being written")


def test_verify_of_what_is_not(run, call):
    flip(run / "checkpoints" / "step-00000010" / "shard-00000-of-00002.safetensors")
    (run / "checkpoints" / "step-00000020" / "complete.json").unlink()
    code, out, err = call("verify", run)
    assert code == 9
    assert err == f"CheckpointError: 2 of 3 in {run} are damaged or incomplete: 2 problems.\n"
    assert out.count(": DAMAGED\n") == 2
    assert "  shard-00000-of-00002.safetensors: bytes " in out
    assert "  complete.json: is missing" in out
    code, out, _ = call("verify", run, "--json")
    result = json.loads(out)
    assert code == 9
    assert not result["whole"]
    assert [one["whole"] for one in result["checked"]] == [False, False, True]
    assert [one["checked"] for one in result["checked"]] == ["checksums", "checksums", "structure"]
    (problem,) = result["checked"][0]["problems"]
    assert problem["file"] == "shard-00000-of-00002.safetensors"
    assert problem["tensor"].startswith("model/")
    assert 0 < problem["start"] < problem["stop"]


def test_verify_of_nothing_ends_with_9(tmp_path, refused):
    err = refused(9, "verify", tmp_path / "none")
    assert err.startswith("CheckpointError: There is no ")


def test_inspect_of_a_checkpoint(run, monkeypatch, call):
    monkeypatch.setenv("COLUMNS", "90")
    path = run / "checkpoints" / "step-00000010"
    monkeypatch.chdir(run)
    code, out, err = call("inspect", path.relative_to(run))
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 90
    monkeypatch.setenv("COLUMNS", "60")  # narrower than a name and what stands beside it
    _, narrow, _ = call("inspect", path)
    tables = narrow[narrow.index("tensors by group") :].splitlines()
    assert max(len(line) for line in tables) <= 60
    folded = [line.split() for line in tables]
    name = "model/decoder.block.0.layer.2.DenseReluDense.wi.weight"
    parts = [words[0] for words in folded if words]
    assert any(one != name and one + other == name for one, other in itertools.pairwise(parts))
    words = [line.split() for line in out.splitlines()]
    assert ["step:", "10"] in words
    assert ["world", "size:", "2"] in words
    assert ["metric:", "0.1,", "higher", "is", "better"] in words
    numel = sum(parameter.numel() for parameter in t5().parameters())
    (model,) = [row for row in words if row and row[0] == "model"]
    assert model[2:] == [f"{numel:,}", "float32", *format_bytes(numel * 4).split()]
    assert any(row and row[0] == "optimizer" for row in words)
    assert "model/encoder.block.0.layer.1.DenseReluDense.wi.weight" in out.replace("\n", "")
    assert "shard-00001-of-00002.safetensors" in out


def test_inspect_of_a_checkpoint_as_json(run, done):
    path = run / "checkpoints" / "step-00000010"
    out = done("inspect", path, "--json")
    found = json.loads(out)
    assert (found["kind"], found["step"], found["world_size"], found["metric"]) == ("checkpoint", 10, 2, 0.1)
    assert found["values"] == {"epoch": 10}
    assert found["versions"]["torch"] == torch.__version__
    assert found["tensors"]["model/shared.weight"] == {"dtype": "float32", "shape": [50, 32], "bytes": 6400}
    assert set(found["groups"]) == {"model", "optimizer", "rank"}
    assert found["groups"]["model"]["bytes"] == sum(parameter.nbytes for parameter in t5().parameters())
    files = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    assert found["files"] == files


def test_inspect_of_a_run_lists_what_is_whole_and_what_is_torn(run, monkeypatch, call):
    monkeypatch.setenv("COLUMNS", "80")
    (run / "checkpoints" / "step-00000020" / "complete.json").unlink()
    (run / "checkpoints" / "step-00000030.tmp").mkdir()
    code, out, err = call("inspect", run)
    assert (code, err) == (0, "")
    rows = {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}
    assert rows["checkpoints/step-00000010"][:2] == ["10", "0.1"]
    assert rows["checkpoints/step-00000010"][-2:] == ["complete,", "best"]
    assert "best: by the metric, higher is better\n" in out
    assert rows["checkpoints/step-00000020"][-1] == "INCOMPLETE"
    assert rows["best"][-1] == "complete"
    assert "complete.json, which is written last, is missing" in " ".join(out.split())
    assert "step-00000030.tmp is being written" in out
    code, out, _ = call("inspect", run, "--json")
    found = json.loads(out)
    assert [(entry["step"], entry["whole"]) for entry in found["entries"]] == [(10, True), (20, False), (None, True)]
    assert found["unfinished"] == [str(run / "checkpoints" / "step-00000030.tmp")]
    code, out, _ = call("inspect", run / "checkpoints", "--json")
    assert len(json.loads(out)["entries"]) == 2


def rewrite_marker(checkpoint, **changes):
    """Change ``complete.json``; None takes a fact away, as it is in checkpoints of earlier versions."""

    def change(values):
        values.update(changes)
        for name in [name for name in changes if changes[name] is None]:
            del values[name]

    forge_completion(checkpoint, change)


def test_the_best_of_a_perplexity_is_the_smallest(run, tmp_path, call):
    for path in (run / "checkpoints").glob("step-*"):
        rewrite_marker(path, greater_is_better=False)
    found = json.loads(call("inspect", run, "--json")[1])
    assert [entry["best"] for entry in found["entries"]] == [False, True, False]
    assert (found["greater_is_better"], found["greater_is_better_recorded"]) == (False, True)
    _, out, err = call("export", run, "-o", tmp_path / "exported", "--checkpoint", "best")
    assert "of step 20 " in out
    assert err == ""


def test_a_direction_that_was_not_recorded_is_assumed_and_said(run, tmp_path, call, done):
    for path in (run / "checkpoints").glob("step-*"):
        rewrite_marker(path, greater_is_better=None)
    out = done("inspect", run)
    assert "best: by the metric, higher is better (assumed: " in out
    code, out, err = call("export", run, "-o", tmp_path / "exported", "--checkpoint", "best")
    assert (code, "of step 10 " in out) == (0, True)
    assert err.startswith("fullshard: step-00000010 has the greatest metric. Whether greater is better")


def test_a_letter_changed_in_a_small_file_is_found(run, tmp_path, call, refused):
    config = run / "checkpoints" / "step-00000020" / "model" / "config.json"
    config.write_text(config.read_text().replace("relu", "reLu", 1))
    code, out, _ = call("verify", run / "checkpoints" / "step-00000020")
    assert code == 9
    assert "  model/config.json: has SHA-256 " in out
    err = refused(9, "export", run, "-o", tmp_path / "exported")
    assert f"{config} is damaged: it has SHA-256 " in err
    assert f"The newest other complete one is {run / 'checkpoints' / 'step-00000010'}." in err
    assert not (tmp_path / "exported").exists()


def test_small_files_without_checksums_are_counted(run, done):
    rewrite_marker(run / "checkpoints" / "step-00000020", sha256=None)
    out = done("verify", run / "checkpoints" / "step-00000020")
    assert "checksums match; 2 small files have no checksums, saved by an earlier version" in out


def test_a_file_in_a_directorys_place_and_a_directory_in_a_files(run, tmp_path, refused):
    checkpoint = run / "checkpoints" / "step-00000020"
    err = refused(9, "export", checkpoint / "index.json", "-o", tmp_path / "exported")
    assert f"it is in {checkpoint}, a checkpoint." in err
    err = refused(9, "export", next(checkpoint.glob("shard-*")), "-o", tmp_path / "exported")
    assert f"is one rank's part of the checkpoint {checkpoint}: export the checkpoint." in err
    (tmp_path / "rows").mkdir()
    for verb in (["train"], ["config", "check"], ["evaluate", "--data", "x"]):
        err = refused(2, *verb, tmp_path / "rows")
        assert "Errno" not in err
    (tmp_path / "rows" / "mine.yaml").write_text("")
    err = refused(2, "train", tmp_path / "rows")
    assert err == (
        f"ConfigError: {tmp_path / 'rows'} is a directory; a run file (YAML) is expected. "
        f"Give the file itself, such as {tmp_path / 'rows' / 'mine.yaml'}.\n"
    )
    err = refused(2, "train", tmp_path / "rows" / "mine.yaml", "--config_file", tmp_path / "rows")
    assert "is a directory, not a configuration file of Accelerate (YAML)" in err
    err = refused(3, "predict", run / "best", tmp_path / "rows")
    assert "is a directory; name a file of rows" in err
    err = refused(9, "report", tmp_path / "rows" / "mine.yaml")
    assert "is a file; the output_dir of a run is expected" in err


def test_inspect_of_weights(run, call):
    numel = sum(parameter.numel() for parameter in t5().parameters())
    for path, kind in ((run / "best", "model"), (run / "best" / "model.safetensors", "weights")):
        code, out, _ = call("inspect", path, "--json")
        found = json.loads(out)
        assert (code, found["kind"]) == (0, kind)
        assert found["groups"]["model"]["elements"] == numel
        assert "model.safetensors" in found["files"]
        assert call("inspect", path)[0] == 0
    assert json.loads(call("inspect", run / "best", "--json")[1])["model_type"] == "t5"


def test_inspect_of_a_torn_checkpoint_ends_with_9(run, refused):
    (run / "checkpoints" / "step-00000020" / "index.json").unlink()
    err = refused(9, "inspect", run / "checkpoints" / "step-00000020")
    assert "index.json is missing" in err


@pytest.mark.parametrize("extra", [("--world-size", "2"), ("seed=3",)])
def test_what_is_for_run_files_is_refused_elsewhere(extra, run, refused):
    err = refused(2, "inspect", run, *extra)
    assert err.startswith(f"ConfigError: {run} is not a run file; {extra[0]} applies to")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("total", "seconds", "terminal", "shown"),
    [(1 << 30, 0.0, True, True), (1 << 20, 3.0, True, True), (1 << 20, 0.1, True, False), (1 << 30, 9.0, False, True)],
)
def test_a_bar_is_shown_on_a_terminal_and_lines_elsewhere_for_what_takes_a_while(
    total, seconds, terminal, shown, monkeypatch
):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as many a build service does, whose logs are no terminals
    now = [100.0]
    monkeypatch.setattr(launch_progress.time, "monotonic", lambda: now[0])
    with common.ByteProgress("exporting") as tell:
        now[0] += seconds
        for done in (0, total // 8, total // 4):
            tell(done, total)
        tell(total // 2, total)
    assert ("exporting" in stream.getvalue()) == shown
    assert ("512.0 MiB of 1.00 GiB\n" in stream.getvalue()) == (shown and not terminal)
    if terminal and total == 1 << 30:
        assert "0.5/1.0 GiB" in stream.getvalue()
        assert "/s" in stream.getvalue()


def test_nothing_but_json_on_standard_output_and_no_bar_in_a_pipe(run, call):
    _, out, err = call("verify", run, "--json")
    assert out.count("\n") == 1
    assert err == ""
