"""Laws of the safetensors writer: what the library and Hugging Face read is what was given, one tensor at a time."""

import json
import os
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from fullshard.checkpoint import SafetensorsWriter, TensorSpec, write_full
from fullshard.errors import CheckpointError

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
            writer.write(name, tensors[name])
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
            writer.write(name, tensor)
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
        writer.write("a", tensor)
    assert torch.equal(load_file(tmp_path / "m")["a"], tensor)


def test_write_full_casts_floating_tensors_only(tmp_path):
    stream = [("block", {"w": torch.tensor([1.5, 2.5])}), ("", {"count": torch.tensor([3])})]
    specs = [TensorSpec("w", (2,), torch.float32), TensorSpec("count", (1,), torch.int64)]
    size_bytes = write_full(stream, tmp_path, specs=specs, dtype=torch.bfloat16)
    read = load_file(tmp_path / "model.safetensors")
    assert read["w"].dtype == torch.bfloat16
    assert read["w"].tolist() == [1.5, 2.5]
    assert read["count"].dtype == torch.int64
    assert size_bytes == (tmp_path / "model.safetensors").stat().st_size


W = torch.zeros(2)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("u", {"a": W})], "1 of 2 tensors were never written: b"),
        ([("u", {"a": W}), ("v", {"a": W, "b": W})], "'a' came a second time"),
        ([("u", {"a": W, "b": W, "c": W})], "'c' is none of the 2"),
        ([("u", {"a": torch.zeros(3), "b": W})], r"shape \(3,\), announced was \(2,\)"),
        ([("u", {"a": None, "b": W})], "did not reach"),
    ],
)
def test_each_tensor_exactly_once_and_as_announced(tmp_path, stream, message):
    with pytest.raises(CheckpointError, match=message):
        write_full(stream, tmp_path, specs=[spec("a", W), spec("b", W)])


def test_names_announced_twice_and_unknown_dtypes_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="announced twice"):
        SafetensorsWriter(tmp_path / "m", [spec("a", W), spec("a", W)])
    with pytest.raises(CheckpointError, match="complex64"):
        SafetensorsWriter(tmp_path / "m", [TensorSpec("a", (2,), torch.complex64)])


def test_only_one_unit_of_the_stream_is_alive(tmp_path):
    """The writer asks for the next unit only after it let the last one go."""
    alive = weakref.WeakSet()

    def stream():
        for name in ("a", "b", "c"):
            assert not alive
            tensor = torch.zeros(4)
            alive.add(tensor)
            unit = {name: tensor}
            del tensor
            yield name, unit
            del unit

    write_full(stream(), tmp_path, specs=[TensorSpec(n, (4,), torch.float32) for n in ("a", "b", "c")])


def test_hugging_face_loads_a_tied_t5_to_the_bit(tmp_path):
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, tie_word_embeddings=True)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    named = dict(model.named_parameters())  # tied tensors once, under the first name
    write_full(named_units(named), tmp_path, specs=[spec(n, p) for n, p in named.items()])
    config.save_pretrained(tmp_path)
    reference = tmp_path / "reference"
    model.save_pretrained(reference)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(reference / "model.safetensors").keys()
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def named_units(named):
    return ((name, {name: parameter}) for name, parameter in named.items())
