"""Verifying tells all that is wrong and where, and of what is whole that it is."""

import json
import shutil

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.storage import contents, read_index, shard_file
from fullshard.state.storage.contents import Kind, verify as verify_path
from support.forged import as_version_1, forge_completion, forge_index
from support.models import t5
from support.parity import replicas

FIRST, SECOND = (f"shard-0000{rank}-of-00002.safetensors" for rank in range(2))


def small():
    return nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))


def write_checkpoints(directory, steps=(1,)):
    _, models = replicas(small, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpoints(directory, ranks=comm, keep_last=None) as checkpoints:
            for step in steps:
                checkpoints.save(model, optimizer, step=step, assets=lambda d: (d / "config.json").write_text("{}"))

    run_ranks(2, work)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint with several blocks in a tensor."""
    directory = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "BLOCK_BYTES", 1024)
        write_checkpoints(directory)
    return directory / "step-00000001"


@pytest.fixture
def checkpoint(written, tmp_path, monkeypatch):
    """A copy of it to damage."""
    monkeypatch.setattr(contents, "BLOCK_BYTES", 1024)
    return shutil.copytree(written, tmp_path / "step-00000001")


def problems_of(path):
    (result,) = verify_path(path).results
    return result.problems


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_a_whole_checkpoint_is_read_to_its_last_byte(checkpoint):
    told = []
    found = verify_path(checkpoint, lambda done, total: told.append((done, total)))
    (result,) = found.results
    index = read_index(checkpoint)
    assert found.problems == 0
    assert (result.kind, result.tensors) == (Kind.CHECKPOINT, len(index.tensors))
    pieces = [piece for entry in index.tensors.values() for piece in entry.pieces]
    assert result.checksums == sum(len(piece.crcs) for piece in pieces)
    itemsizes = {"float32": 4, "uint8": 1}
    assert result.nbytes == sum(entry.numel * itemsizes[entry.dtype] for entry in index.tensors.values())
    assert told == sorted(told)
    assert told[-1] == (told[-1][1], sum((checkpoint / name).stat().st_size for name in (FIRST, SECOND)))


def test_every_flipped_byte_is_told_with_file_tensor_and_bytes(checkpoint):
    """Two in different blocks of one tensor, one in the other file."""
    (last,) = [piece for piece in read_index(checkpoint).tensors["model/0.weight"].pieces if piece.file == SECOND]
    assert len(last.crcs) == 3
    with (checkpoint / SECOND).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.tell()
    start = data + header["model/0.weight"]["data_offsets"][0]
    flip(checkpoint / SECOND, start + 5)
    flip(checkpoint / SECOND, start + 2 * 1024)
    flip(checkpoint / FIRST, (checkpoint / FIRST).stat().st_size - 1)
    problems = problems_of(checkpoint)
    assert len(problems) == 3
    in_second = [(p.tensor, p.start, p.stop) for p in problems if p.file == SECOND]
    assert in_second == [("model/0.weight", start + at, start + at + 1024) for at in (0, 2048)]
    (in_first,) = [problem for problem in problems if problem.file == FIRST]
    assert in_first.start < (checkpoint / FIRST).stat().st_size == in_first.stop
    assert "have checksum" in in_first.text
    assert in_first.tensor in in_first.text


def test_bytes_all_over_the_files_matter(checkpoint):
    for name in (FIRST, "index.json"):
        content = (checkpoint / name).read_bytes()
        for position in range(0, len(content), len(content) // 23):
            (checkpoint / name).write_bytes(
                content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
            )
            assert problems_of(checkpoint), f"byte {position} of {name}"
        (checkpoint / name).write_bytes(content)
    assert not problems_of(checkpoint)


def test_a_missing_file_of_a_rank_is_told_once_and_the_others_are_still_read(checkpoint):
    (checkpoint / FIRST).unlink()
    flip(checkpoint / SECOND, (checkpoint / SECOND).stat().st_size - 1)
    missing, flipped = problems_of(checkpoint)
    assert (missing.file, missing.text[:10]) == (FIRST, "is missing")
    assert (flipped.file, flipped.stop) == (SECOND, (checkpoint / SECOND).stat().st_size)


def test_a_truncated_file_is_told_by_size_and_header(checkpoint):
    with (checkpoint / FIRST).open("r+b") as file:
        file.truncate(3000)
    texts = [problem.text for problem in problems_of(checkpoint) if problem.file == FIRST]
    assert "has 3,000 bytes, expected" in texts[0]
    assert len(texts) == 2


def test_a_cut_index_is_told_and_headers_are_still_checked(checkpoint):
    content = (checkpoint / "index.json").read_bytes()
    (checkpoint / "index.json").write_bytes(content[: len(content) // 2])
    (checkpoint / SECOND).write_bytes(b"\xff" * (checkpoint / SECOND).stat().st_size)
    found = [(problem.file, problem.text.split()[0]) for problem in problems_of(checkpoint)]
    assert found[:3] == [("index.json", "has"), ("index.json", "has"), ("index.json", "cannot")]
    assert found[3] == (SECOND, "announces")
    (checkpoint / "index.json").unlink()
    assert [problem.file for problem in problems_of(checkpoint)] == ["index.json", SECOND]


@pytest.mark.parametrize(
    ("change", "file", "text"),
    [
        (lambda t: t["model/0.weight"]["pieces"].pop(), "index.json", "do not cover its 3,072 elements"),
        (lambda t: t["model/0.weight"].update(dtype="float64"), FIRST, "the index lists float64"),
        (lambda t: t["model/0.weight"]["pieces"][0][3].pop(), "index.json", "checksums for the"),
        (lambda t: t["model/0.weight"]["pieces"][0].__setitem__(0, SECOND), SECOND, "contains model/0.weight as"),
        (lambda t: t.update(other=t.pop("model/0.bias")), FIRST, "does not contain other"),
        (lambda t: t.pop("model/0.bias"), FIRST, "contains model/0.bias, which the index does not list"),
    ],
    ids=["gap", "dtype", "checksums", "file", "name", "extra"],
)
def test_an_index_that_does_not_fit_the_files(change, file, text, checkpoint):
    forge_index(checkpoint, lambda values: change(values["tensors"]) and None)
    assert any(problem.file == file and text in problem.text for problem in problems_of(checkpoint))


def test_the_marker_and_the_small_files(checkpoint):
    (checkpoint / "model" / "config.json").write_text("[]")  # one letter's change of a tokenizer is no larger
    assert [(p.file, p.text[:11]) for p in problems_of(checkpoint)] == [("model/config.json", "has SHA-256")]
    (checkpoint / "model" / "config.json").unlink()
    assert [(p.file, p.text[:10]) for p in problems_of(checkpoint)] == [("model/config.json", "is missing")]
    (checkpoint / "complete.json").write_text("{")
    assert [(p.file, p.text[:14]) for p in problems_of(checkpoint)] == [("complete.json", "cannot be read")]
    (checkpoint / "complete.json").unlink()
    assert [(p.file, p.text[:10]) for p in problems_of(checkpoint)] == [("complete.json", "is missing")]


def test_small_files_of_an_earlier_version_are_said_to_have_no_checksums(checkpoint):
    (whole,) = verify_path(checkpoint).results
    assert whole.unhashed == ()
    as_version_1(checkpoint)
    forge_completion(checkpoint, lambda done: json.dumps({name: done[name] for name in done if name != "sha256"}))
    (result,) = verify_path(checkpoint).results
    assert (result.unhashed, result.problems) == (("model/config.json",), ())
    assert result.as_dict()["files_without_checksums"] == ["model/config.json"]
    (checkpoint / "model" / "config.json").write_text("{[")
    assert [(p.file, p.text[:11]) for p in problems_of(checkpoint)] == [("model/config.json", "is not JSON")]


def test_one_ranks_file_is_compared_with_the_index_beside_it(checkpoint):
    pieces = [
        piece for entry in read_index(checkpoint).tensors.values() for piece in entry.pieces if piece.file == SECOND
    ]
    (checkpoint / FIRST).unlink()  # says nothing of the second
    (result,) = verify_path(checkpoint / SECOND).results
    assert (result.kind, result.problems) == (Kind.WEIGHTS, ())
    assert (result.checksums, result.tensors) == (sum(len(piece.crcs) for piece in pieces), len(pieces))
    flip(checkpoint / SECOND, (checkpoint / SECOND).stat().st_size - 1)
    (problem,) = problems_of(checkpoint / SECOND)
    assert (problem.file, problem.stop) == (SECOND, (checkpoint / SECOND).stat().st_size)
    (checkpoint / "complete.json").unlink()
    (checkpoint / "index.json").write_text("{")
    assert [problem.file for problem in problems_of(checkpoint / SECOND)] == ["complete.json", "index.json"]
    (checkpoint / "index.json").unlink()
    assert problems_of(checkpoint / SECOND) == ()  # without it there is nothing to compare with


def test_a_run_with_all_that_is_in_it(tmp_path):
    run = tmp_path / "run"
    write_checkpoints(run / "checkpoints", steps=(1, 2, 3))
    for name in ("best", "best.step-00000001", "best.next"):
        t5().save_pretrained(run / name)
    t5().save_pretrained(run)
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000002" / "complete.json").unlink()
    (checkpoints / "step-00000003").rename(checkpoints / "step-00000003.old")
    shutil.copytree(checkpoints / "step-00000001", checkpoints / "step-00000004.tmp")
    found = verify_path(run)
    state = {str(result.path.relative_to(run)): not result.problems for result in found.results}
    assert state == {
        "checkpoints/step-00000001": True,
        "checkpoints/step-00000002": False,
        "checkpoints/step-00000003.old": True,  # nothing has taken its place
        "best": True,
        "best.step-00000001": True,
        ".": True,
    }
    assert found.problems == 1
    assert [note.split()[0] for note in found.notes] == [str(checkpoints / "step-00000004.tmp"), str(run / "best.next")]
    assert [result.path for result in verify_path(checkpoints).results] == [v.path for v in found.results[:3]]
    kinds = {result.kind: result.checksums > 0 for result in found.results if not result.problems}
    assert kinds == {Kind.CHECKPOINT: True, Kind.MODEL: False}


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_damage(tmp_path):
    write_checkpoints(tmp_path / "checkpoints", steps=(1, 2))
    first = tmp_path / "checkpoints" / "step-00000001"

    def progress(done, total):
        if first.exists():
            shutil.rmtree(first)

    found = verify_path(tmp_path / "checkpoints", progress)
    assert [result.path.name for result in found.results] == ["step-00000002"]
    assert found.problems == 0
    assert found.notes == (f"{first} was deleted while it was being verified",)


@pytest.fixture
def model_directory(tmp_path):
    t5().save_pretrained(tmp_path / "model", max_shard_size="30KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


def test_a_model_is_read_and_said_to_have_no_checksums(model_directory):
    (result,) = verify_path(model_directory).results
    assert (result.kind, result.checksums, result.problems) == (Kind.MODEL, 0, ())
    assert result.as_dict()["checked"] == "structure"
    assert result.nbytes == sum(p.nbytes for p in t5().parameters())


def test_all_files_of_a_model_that_are_damaged_are_told(model_directory):
    first, second, third, *_ = sorted(model_directory.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-4])
    content = second.read_bytes()
    second.write_bytes(content[:8] + content[8:].replace(b'"F32"', b'"F64"', 1))
    (model_directory / "config.json").write_text("{")
    found = {problem.file: problem.text for problem in problems_of(model_directory)}
    assert found.keys() == {"config.json", first.name, second.name}
    assert "torch.float64 takes" in found[second.name]
    third.unlink()
    assert [problem.file for problem in problems_of(model_directory)] == [
        "config.json",
        third.name,
        first.name,
        second.name,
    ]
    (model_directory / "model.safetensors.index.json").write_text("{")
    found = [(problem.file, problem.text) for problem in problems_of(model_directory)]
    assert [file for file, _ in found] == ["config.json", "model", first.name, second.name]
    assert found[1][1].startswith("model.safetensors.index.json is not an index of weight files: Invalid JSON")


def test_one_file_and_an_index(model_directory):
    file = min(model_directory.glob("*.safetensors"))
    index = model_directory / "model.safetensors.index.json"
    assert not problems_of(file)
    assert not problems_of(index)
    file.write_bytes(file.read_bytes() + b"\0")
    assert [problem.file for problem in problems_of(file)] == [file.name]
    assert [problem.file for problem in problems_of(index)] == [file.name]
    torch.save(t5().state_dict(), model_directory / "model.pt")
    assert not problems_of(model_directory / "model.pt")


def test_nothing_to_verify(tmp_path):
    with pytest.raises(CheckpointError, match="There is no"):
        verify_path(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is nothing that fullshard"):
        verify_path(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="is not a weight file"):
        verify_path(tmp_path / "notes.txt")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="nothing to verify"):
        verify_path(tmp_path)
