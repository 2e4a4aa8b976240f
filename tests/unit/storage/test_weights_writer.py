"""Laws of the weight files: split as Hugging Face splits them, whole, and found by its loader."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.storage import TensorSpec, WeightsWriter, holds_model, parse_size, publish_model
from support.models import bart, gpt2, t5, t5_untied


def stored(model):
    """Every tensor of a model, a tied one once, in the order of its state dict."""
    found = {}
    for name, tensor in model.state_dict().items():
        if not any(tensor.data_ptr() == other.data_ptr() for other in found.values()):
            found[name] = tensor
    return found


def write(directory, tensors, max_file_bytes, parameters=0):
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with WeightsWriter(directory, specs, max_file_bytes=max_file_bytes, parameters=parameters) as writer:
        for name in reversed(tensors):
            writer.write_run(name, 0, tensors[name].reshape(-1))


@pytest.mark.parametrize("make", [t5, t5_untied, bart, gpt2])
@pytest.mark.parametrize("size", ["5GB", "20KB", "3KB"])
def test_the_files_are_those_of_save_pretrained(make, size, tmp_path):
    torch.manual_seed(0)
    model = make()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model.save_pretrained(theirs, max_shard_size=size)
    ours.mkdir()
    write(ours, stored(model), parse_size(size), model.num_parameters())
    names = sorted(path.name for path in theirs.glob("model*"))
    assert sorted(path.name for path in ours.iterdir()) == names
    assert (len(names) > 1) == (size != "5GB")
    for name in names:
        if name.endswith(".json"):
            assert (ours / name).read_text() == (theirs / name).read_text()
        else:
            mine, other = load_file(ours / name), load_file(theirs / name)
            assert mine.keys() == other.keys()
            assert all(torch.equal(tensor, other[key]) for key, tensor in mine.items())


def test_hugging_face_loads_several_files_to_the_bit(tmp_path):
    torch.manual_seed(0)
    model = t5()
    write(tmp_path, stored(model), 20_000)
    model.config.save_pretrained(tmp_path)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_no_index_is_left_by_files_that_are_not_whole(tmp_path):
    specs = [TensorSpec(name, (4,), torch.float32) for name in "ab"]
    with (
        pytest.raises(CheckpointError, match="b \\(0 of 4 elements\\)"),
        WeightsWriter(tmp_path, specs, max_file_bytes=16, parameters=8) as writer,
    ):
        writer.write_run("a", 0, torch.zeros(4))
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_a_model_without_tensors_is_one_file(tmp_path):
    write(tmp_path, {}, 10)
    assert load_file(tmp_path / "model.safetensors") == {}


def test_holds_model_knows_both_layouts(tmp_path):
    assert not holds_model(tmp_path)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text(json.dumps({}))
        assert holds_model(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("size", "nbytes"), [(1, 1), ("5GB", 5 * 10**9), ("1.5mb", 1_500_000), (" 2 KB ", 2000), ("1TB", 10**12)]
)
def test_sizes_are_read_as_hugging_face_reads_them(size, nbytes):
    assert parse_size(size) == nbytes


@pytest.mark.parametrize("size", [0, -3, "", "GB", "5", "5GiB", "many", "-1MB", "nanGB", "infGB", None, 1.5])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ConfigError, match="such as '5GB'"):
        parse_size(size)


def test_a_model_leaves_nothing_of_an_adapter_beside_itself_and_the_other_way_round(tmp_path):
    whole = ("config.json", "generation_config.json", "model.safetensors")
    adapter = ("adapter_config.json", "adapter_model.safetensors")
    target = tmp_path / "run"
    target.mkdir()
    (target / "metrics.jsonl").touch()
    for number, names in enumerate((whole, adapter, whole)):
        source = tmp_path / str(number)
        source.mkdir()
        for name in names:
            (source / name).write_text(str(number))
        publish_model(source, target)
        assert {path.name for path in target.iterdir()} == {*names, "metrics.jsonl"}
        assert holds_model(target)
