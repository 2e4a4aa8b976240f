"""Laws of the safetensors writer: what the library reads is what was given, run by run, in any order."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fullshard.errors import CheckpointError
from fullshard.state.storage import SafetensorsWriter, TensorSpec, safetensors_file

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]


def spec(name, tensor):
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def example() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, a scalar, an empty tensor, a transposed view, a name beyond ASCII."""
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(3, 5).mul(100).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "signed": torch.arange(3, dtype=torch.int8) - 1,
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "naïve.weight": torch.randn(2),
    }
    return tensors


def test_the_library_reads_back_the_same_bits(tmp_path):
    tensors = example()
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, [spec(n, t) for n, t in tensors.items()]) as writer:
        for name in reversed(tensors):  # any order
            writer.write_run(name, 0, tensors[name].reshape(-1))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_container_is_aligned_and_without_gaps(tmp_path):
    tensors = example()
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, [spec(n, t) for n, t in tensors.items()]) as writer:
        for name, tensor in tensors.items():
            writer.write_run(name, 0, tensor.reshape(-1))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 8 == 0
    entries = json.loads(raw[8 : 8 + length])
    del entries["__metadata__"]
    end = 0
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        assert start == end
        assert (8 + length + start) % tensors[name].dtype.itemsize == 0
        end = stop
    assert len(raw) == 8 + length + end


def test_a_write_cut_short_by_the_kernel_is_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:13], at))
    tensor = torch.randn(50)
    with SafetensorsWriter(tmp_path / "m", [spec("a", tensor)]) as writer:
        writer.write_run("a", 0, tensor)
    assert torch.equal(load_file(tmp_path / "m")["a"], tensor)


W = torch.zeros(2)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 3, 0, 2, 4]])
def test_runs_in_any_order_make_the_tensor(tmp_path, order):
    tensor = torch.randn(11, 10)
    edges = [0, 7, 33, 34, 90, 110]
    with SafetensorsWriter(tmp_path / "m", [spec("other", torch.empty(3)), spec("a", tensor)]) as writer:
        for place in order:
            start, stop = edges[place], edges[place + 1]
            writer.write_run("a", start, tensor.view(-1)[start:stop])
        writer.write_run("other", 0, torch.ones(3))
    read = load_file(tmp_path / "m")
    assert torch.equal(read["a"], tensor)
    assert read["other"].tolist() == [1, 1, 1]


def test_a_run_is_cast_in_pieces_and_never_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "_PIECE_BYTES", 64)
    sizes, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (sizes.append(len(data)), pwrite(fd, data, at))[1])
    tensor = torch.randn(2, 501)
    with SafetensorsWriter(tmp_path / "m", [TensorSpec("a", (2, 501), torch.bfloat16)]) as writer:
        writer.write_run("a", 0, tensor.view(-1)[:500])
        writer.write_run("a", 500, tensor.view(-1)[500:])
    assert torch.equal(load_file(tmp_path / "m")["a"], tensor.bfloat16())
    assert max(sizes[1:]) == 64  # the first is the header


A, B = ("a", 0, 2), ("b", 0, 6)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([A], r"1 of 2 tensors were not written completely: b \(0 of 6 elements\)"),
        ([A, ("b", 0, 2), ("b", 4, 6)], r"b \(4 of 6 elements\)"),
        ([A, B, ("a", 0, 1)], "elements 0 to 1 of tensor 'a' were written before"),
        ([A, ("b", 0, 4), ("b", 3, 6)], "elements 3 to 6 of tensor 'b' were written before"),
        ([A, ("b", 3, 4), ("b", 2, 5)], "elements 2 to 5 of tensor 'b' were written before"),
        ([A, ("b", 0, 2), ("b", 4, 6), ("b", 2, 5)], "elements 2 to 5 of tensor 'b' were written before"),
        ([A, B, ("c", 0, 1)], "'c' was not announced; 2 others were"),
        ([A, ("b", 4, 7)], r"shape \(3,\) from element 4 on does not fit tensor 'b' of shape \(3, 2\)"),
        ([A, ("b", -1, 2)], "from element -1 on does not fit"),
    ],
)
def test_each_element_exactly_once_and_as_announced(tmp_path, runs, message):
    def write(writer):
        for name, start, stop in runs:
            writer.write_run(name, start, torch.zeros(stop - start))

    specs = [spec("a", torch.zeros(2)), spec("b", torch.zeros(3, 2))]
    with pytest.raises(CheckpointError, match=message), SafetensorsWriter(tmp_path / "m", specs) as writer:
        write(writer)


def test_a_run_is_flat(tmp_path):
    with pytest.raises(CheckpointError, match="shape"), SafetensorsWriter(tmp_path / "m", [spec("a", W)]) as writer:
        writer.write_run("a", 0, W.view(1, 2))


def test_names_announced_twice_and_unknown_dtypes_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="occurs twice"):
        SafetensorsWriter(tmp_path / "m", [spec("a", W), spec("a", W)])
    with pytest.raises(CheckpointError, match=r"'a' is torch\.complex128.*view_as_real"):
        SafetensorsWriter(tmp_path / "m", [TensorSpec("a", (2,), torch.complex128)])
