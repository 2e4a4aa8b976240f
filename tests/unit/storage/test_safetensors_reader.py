"""One safetensors file: the bytes that are asked for come out, and no header that cannot be true is believed."""

import contextlib
import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fullshard.errors import CheckpointError
from fullshard.state.storage import safetensors_file
from fullshard.state.storage.safetensors_file import SafetensorsFile

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values(numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.fixture
def path(tmp_path):
    tensors = {
        "a": values(60).view(12, 5),
        "b": values(7, torch.bfloat16),
        "c": torch.arange(9),
        "s": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def raw_file(path, header, data=b""):
    """A file with a header of any text or object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_names_shapes_and_dtypes_are_the_librarys(path):
    file = SafetensorsFile(path)
    with safe_open(path, "pt") as theirs:
        assert file.tensors.keys() == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118 (no mapping)
            tensor = theirs.get_tensor(name)
            assert (file.tensors[name].shape, file.tensors[name].dtype) == (tuple(tensor.shape), tensor.dtype)


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (0, 1), (17, 42), (59, 60), (30, 30)])
def test_a_run_of_elements(path, start, stop):
    out = torch.full((stop - start,), 9.0)
    SafetensorsFile(path).read("a", start, out)
    assert torch.equal(out, values(60)[start:stop])


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_dtypes_are_converted_piece_by_piece_as_torch_does(tmp_path, stored, wanted, monkeypatch):
    monkeypatch.setattr(safetensors_file, "STAGING_BYTES", 64)
    save_file({"a": values(101, stored)}, tmp_path / "x.safetensors")
    out = torch.zeros(90, dtype=wanted)
    SafetensorsFile(tmp_path / "x.safetensors").read("a", 5, out)
    assert torch.equal(out, values(101, stored)[5:95].to(wanted))


def test_equal_integers_and_scalars_are_read(path):
    file = SafetensorsFile(path)
    integers, scalar = torch.zeros(4, dtype=torch.int64), torch.zeros(1)
    file.read("c", 3, integers)
    file.read("s", 0, scalar)
    assert (integers.tolist(), scalar.item()) == ([3, 4, 5, 6], 2.5)


def test_only_its_place_in_a_larger_buffer_is_written_and_autograd_is_told(path):
    buffer = torch.zeros(20, requires_grad=True)
    before = buffer._version
    SafetensorsFile(path).read("a", 10, buffer.detach()[5:9])
    assert torch.equal(buffer.detach(), torch.cat([torch.zeros(5), values(60)[10:14], torch.zeros(11)]))
    assert buffer._version > before


def test_reads_that_bring_less_than_asked_for_go_on(path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: preadv(descriptor, [views[0][:3]], at))
    out = torch.zeros(60)
    SafetensorsFile(path).read("a", 0, out)
    assert torch.equal(out, values(60))


def test_a_file_that_shrinks_or_is_replaced_after_its_header_was_read(path):
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        file.read("a", 0, torch.zeros(60))
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        file.read("a", 0, torch.zeros(60))


def test_an_end_inside_a_tensor_is_an_error(path, monkeypatch):
    file = SafetensorsFile(path)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(
        CheckpointError, match=r"ends at byte [\d,]+, inside a tensor that ends at byte [\d,]+\. The file"
    ):
        file.read("a", 0, torch.zeros(60))


def test_what_the_file_system_refuses(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # is not waited for
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="cannot be read: it is not a regular file"):
            SafetensorsFile(path)
    with pytest.raises(CheckpointError, match=r"missing\.safetensors cannot be read: No such file"):
        SafetensorsFile(tmp_path / "missing.safetensors")


FAULTS = {
    "not JSON": (b"{nonsense", b"", "is not JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", "is not JSON"),
    "too deep": (b"[" * 100_000, b"", "is not JSON"),
    "a list": ([], b"", "header is not a JSON object"),
    "metadata": ({"__metadata__": 3}, b"", "__metadata__ in the header is not a JSON object"),
    "twice": (b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 4)).encode(),) * 2), b"1234", "names 'a' twice"),
    "entry": ({"a": 3}, b"", "tensor 'a' is 3: "),
    "without shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "it has no tensor 'a'.shape"),
    "dtype": ({"a": entry(0, 4, dtype="F31")}, b"1234", "dtype is 'F31': known are F64, F32"),
    "dtype of no text": ({"a": entry(0, 4, dtype=[1])}, b"1234", r"dtype is \[1\]: "),
    "shape of texts": ({"a": entry(0, 4, ["1"])}, b"1234", r"shape\.0 is '1': "),
    "shape of truths": ({"a": entry(0, 4, [True])}, b"1234", r"shape\.0 is True: "),
    "negative shape": ({"a": entry(0, 4, [-1, -1])}, b"1234", r"shape\.0 is -1: "),
    "negative offsets": ({"a": entry(-4, 0)}, b"", r"data_offsets\.0 is -4: "),
    "three offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, b"1234", "at most 2 items"),
    "offsets backwards": ({"a": entry(8, 4, [0])}, b"12345678", r"takes 0 bytes, but its data_offsets \[8, 4\] give"),
    "shape and length": ({"a": entry(0, 8, [3])}, b"12345678", r"takes 12 bytes, .* \[0, 8\] give it 8"),
    "overflow": ({"a": entry(0, 8, [1 << 62, 1 << 62])}, b"12345678", r"takes [\d,]+ bytes, but"),
    "beyond the file": ({"a": entry(0, 400)}, b"1234", "ends at byte 400 of the data, which has 4"),
    "far beyond": ({"a": entry(1 << 62, (1 << 62) + 4, [1])}, b"1234", r"ends at byte 4,611,[\d,]+ of the data"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"1" * 12, "'b' begins at byte 4 of the data and overlaps 'a'"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, b"1" * 12, "'b' begins at byte 8 of the data and leaves a gap"),
    "gap in front": ({"a": entry(4, 8)}, b"1" * 8, "'a' begins at byte 4 .* leaves a gap after 'the header'"),
    "left over": ({"a": entry(0, 4)}, b"1" * 9, "accounts for 4 bytes of data, and the file has 9"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_headers_that_cannot_be_true(tmp_path, fault):
    header, data, rule = FAULTS[fault]
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rule) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "has 0 bytes; a safetensors file begins with 8"),
        (b"1234567", "has 7 bytes"),
        (struct.pack("<Q", 20) + b"{}", r"announces a header of 20 bytes, but has only 10 bytes\. The file is damaged"),
        (struct.pack("<Q", 5 << 30) + b"{}", r"header of 5,368,709,120 bytes; the limit is 100,000,000\. Is it"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "header of 18,446,744,073,709,551,615 bytes; the limit"),
    ],
)
def test_lengths_that_cannot_be_true(tmp_path, content, rule):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rule):
        SafetensorsFile(path)


def test_a_file_without_tensors_is_whole(tmp_path):
    assert SafetensorsFile(raw_file(tmp_path / "empty.safetensors", {})).tensors == {}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_file_cut_or_changed_anywhere_is_refused_or_reads_within_its_bounds(tmp_path_factory, data):
    """Whatever single byte of the header changes: a clear error, or a file whose tensors still lie inside it."""
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": values(6).view(2, 3), "b": values(3)}, path)
    content = bytearray(path.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans(), "cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1), "length")]
    else:
        content[data.draw(st.integers(0, header_bytes - 1), "place")] = data.draw(st.integers(0, 255), "byte")
    path.write_bytes(content)
    tensors = {}
    with contextlib.suppress(CheckpointError):
        file = SafetensorsFile(path)
        tensors = file.tensors
    for name, stored in tensors.items():
        file.read(name, 0, torch.zeros(torch.Size(stored.shape).numel(), dtype=stored.dtype))
