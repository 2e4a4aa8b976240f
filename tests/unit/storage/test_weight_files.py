"""Weights in one file or several, in safetensors or torch's own format: one set of names, or one clear error."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from fullshard.errors import CheckpointError
from fullshard.state.storage import WeightFiles

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5.0) + 100}


def split(directory, names=("x-1.safetensors", "x-2.safetensors"), save=save_file):
    """Each tensor in a file of its own, and an index."""
    for (key, tensor), name in zip(TENSORS.items(), names, strict=True):
        save({key: tensor}, directory / name)
    return write_index(directory, dict(zip(TENSORS, names, strict=True)))


def write_index(directory, weight_map, name="model.safetensors.index.json"):
    path = directory / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def read_all(files):
    out = {}
    for name, stored in files.tensors.items():
        out[name] = torch.zeros(torch.Size(stored.shape).numel(), dtype=stored.dtype)
        files.read(name, 0, out[name])
        out[name] = out[name].view(stored.shape)
    return out


def assert_holds(path, expected=TENSORS):
    files = WeightFiles(path)
    found = read_all(files)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert files.bytes_read == sum(tensor.nbytes for tensor in expected.values())


def test_one_file_and_several_with_an_index(tmp_path):
    (tmp_path / "several").mkdir()
    save_file(TENSORS, tmp_path / "model.safetensors")
    index = split(tmp_path / "several")
    for path in (tmp_path, tmp_path / "model.safetensors", index.parent, index):
        assert_holds(path)


def test_safetensors_come_before_bin(tmp_path):
    torch.save({"other": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert_holds(tmp_path, {"other": torch.zeros(2)})
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_holds(tmp_path)


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth"])
def test_files_of_torch_save(tmp_path, name):
    torch.save(TENSORS, tmp_path / name)
    assert_holds(tmp_path / name)


def test_indexed_bin_files(tmp_path):
    split(tmp_path, ("x-1.bin", "x-2.bin"), torch.save).rename(tmp_path / "pytorch_model.bin.index.json")
    assert_holds(tmp_path)


def test_runs_of_a_transposed_tensor_in_another_dtype(tmp_path):
    torch.save({"a": TENSORS["a"].t()}, tmp_path / "x.bin")
    out = torch.zeros(5, dtype=torch.bfloat16)
    WeightFiles(tmp_path / "x.bin").read("a", 2, out)
    assert torch.equal(out, TENSORS["a"].t().reshape(-1)[2:7].bfloat16())


def test_the_format_that_cannot_be_mapped_is_read_with_a_warning_that_names_the_cost(tmp_path):
    torch.save(TENSORS, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match=r"old\.bin cannot be mapped .* every rank reads all of its [0-9.]+ (B|KiB)"):
        found = read_all(WeightFiles(tmp_path / "old.bin"))
    assert torch.equal(found["a"], TENSORS["a"])


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def test_code_in_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Malicious()}, tmp_path / "x.bin")
    with pytest.raises(
        CheckpointError, match=r"holds Python objects in addition to tensors.*If you trust .* convert it once"
    ):
        WeightFiles(tmp_path / "x.bin")
    assert not (tmp_path / "ran").exists()


def damaged(tmp_path, damage):
    torch.save(TENSORS, tmp_path / "x.bin")
    content = bytearray((tmp_path / "x.bin").read_bytes())
    if damage == "cut":
        content = content[:300]
    elif damage == "empty":
        content = b""
    elif damage == "garbage":
        content = b"garbage" * 9
    else:  # a byte of the pickle
        content[content.find(b"ctorch") + 2] ^= 0xFF
    (tmp_path / "x.bin").write_bytes(content)
    return tmp_path / "x.bin"


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "pickle"])
def test_damaged_files_of_torch(tmp_path, damage):
    path = damaged(tmp_path, damage)
    with pytest.raises(CheckpointError, match=r"x\.bin is not a complete file of torch\.save \("):
        WeightFiles(path)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns when it loads a sparse tensor
@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (torch.zeros(3), "holds a Tensor; a state dict is needed"),
        ({"epoch": 3, "model": {"a": torch.zeros(1)}}, r"entry 'epoch' is a int; a state dict"),
        ({1: torch.zeros(1)}, "entry 1 is a Tensor"),
        ({"a": torch.zeros(3).to_sparse()}, "entry 'a' is a Tensor; a state dict of names and strided"),
    ],
)
def test_files_that_are_no_state_dict(tmp_path, content, rule):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rule):
        WeightFiles(tmp_path / "x.pt")


def test_indices_that_do_not_fit_their_files(tmp_path):
    index = split(tmp_path)
    names = {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    for content, rule in (
        ("{", "Invalid JSON"),
        ("[]", r"it is \[\]: "),
        ('{"weight_map": {}}', r"weight_map is \{\}: "),
        (
            json.dumps({"weight_map": names | {"b": "../x-2.safetensors"}}),
            r"weight_map.b is '\.\./x-2\.safetensors': it is not",
        ),
        (json.dumps({"weight_map": names | {"b": 3}}), "weight_map.b is 3: "),
        (
            json.dumps({"weight_map": names | {"b": "x-3.safetensors"}}),
            r"names x-3\.safetensors, which is not next to it",
        ),
        (
            json.dumps({"weight_map": names | {"c": "x-2.safetensors"}}),
            "'c' in x-2.safetensors, which does not contain it",
        ),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=rule):
            WeightFiles(tmp_path)


def test_what_a_file_holds_beside_the_index_is_known(tmp_path):
    split(tmp_path)
    write_index(tmp_path, {"a": "x-1.safetensors"})
    save_file(TENSORS, tmp_path / "x-1.safetensors")
    assert_holds(tmp_path)


def test_paths_without_weights(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"holds no weights: none of model\.safetensors, model\.safetensors\.index"
    ):
        WeightFiles(tmp_path)
    with pytest.raises(CheckpointError, match=r"There is no .*t5-small"):
        WeightFiles(tmp_path / "t5-small")
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x\.gguf is not a weight file"):
        WeightFiles(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_equal_tensors_are_told_from_others(tmp_path, name):
    one = torch.randn(50, generator=torch.Generator().manual_seed(0))
    tensors = {"one": one, "same": one.clone(), "other": one + 1, "shape": one.clone().view(5, 10)}
    (save_file if name == "x.safetensors" else torch.save)(tensors, tmp_path / name)
    files = WeightFiles(tmp_path / name)
    assert [files.equal("one", other) for other in ("same", "other", "shape")] == [True, False, False]


def test_a_tied_tensor_of_torch_save_is_equal_without_being_read(tmp_path):
    torch.save({"one": TENSORS["a"], "tied": TENSORS["a"]}, tmp_path / "x.bin")
    files = WeightFiles(tmp_path / "x.bin")
    assert files.equal("one", "tied")
    assert files.bytes_read == 0
