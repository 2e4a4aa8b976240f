"""Of torch's distributed checkpoints what torch's writer writes is read; anything else is refused before it runs."""

import collections
import contextlib
import io
import os
import pathlib
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard import fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.saving.dcp import load_dcp, save_dcp
from fullshard.state.saving.dcp_reader import read_metadata


class Ran:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dcp") / "saved"

    def work(comm):
        model = fully_shard(linear(), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        save_dcp(model, optimizer, directory)

    run_ranks(1, work)
    return directory


@pytest.fixture
def saved(written, tmp_path):
    return shutil.copytree(written, tmp_path / "saved")


def load(path):
    def work(comm):
        model = fully_shard(nn.Linear(4, 3), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        load_dcp(model, optimizer, path)
        return [parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()

    return run_ranks(1, work)[0]


def metadata_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def put(path, metadata):
    (path / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))


def test_what_torchs_writer_writes_is_read_field_by_field(saved):
    ours, theirs = read_metadata(saved), metadata_of(saved)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert {index: vars(place) for index, place in ours.storage_data.items()} == {
        index: {"transform_descriptors": None, **vars(place)} for index, place in theirs.storage_data.items()
    }
    weights, state = load(saved)
    assert len(weights) == 2
    assert state["param_groups"][0]["lr"] == 0.5


def test_a_plain_torch_checkpoint_of_everything_is_read(tmp_path):
    model = linear()
    state = {"model": model.state_dict(), "number": 3, "nested": {"list": [1, 2.5, "x", None, (1, 2)]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "text"), no_dist=True)
        dcp.save(state, checkpoint_id=tmp_path / "path", no_dist=True)
    for name in ("text", "path"):
        theirs = metadata_of(tmp_path / name)
        assert read_metadata(tmp_path / name).state_dict_metadata == theirs.state_dict_metadata


@pytest.mark.parametrize("protocol", [4, 5])
def test_every_protocol_that_torch_writes(protocol, saved):
    theirs = metadata_of(saved)
    put(saved, pickle.dumps(theirs, protocol=protocol))
    assert read_metadata(saved).planner_data == theirs.planner_data


def poisoned_value(saved, poison):
    """As the value of an option of the optimizer, in torch's own form."""
    theirs = metadata_of(saved)
    (index,) = [index for index in theirs.storage_data if index.fqn.endswith(".weight_decay")]
    buffer = io.BytesIO()
    torch.save(poison, buffer)
    (saved / "poison.distcp").write_bytes(buffer.getvalue())
    place = theirs.storage_data[index]
    place.relative_path, place.offset, place.length = "poison.distcp", 0, buffer.tell()
    put(saved, theirs)


def in_planner(theirs, poison):
    theirs.planner_data["x"] = poison


def in_key(theirs, poison):
    theirs.state_dict_metadata["x"] = poison


def in_meta(theirs, poison):
    theirs.storage_meta = StorageMeta(checkpoint_id=poison)


@pytest.mark.parametrize("place", [in_planner, in_key, in_meta, lambda *_: None])
def test_poison_is_refused_by_name_before_it_runs(place, saved, tmp_path):
    theirs = metadata_of(saved)
    place(theirs, Ran(tmp_path / "ran"))
    put(saved, theirs if place.__name__ != "<lambda>" else Ran(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"\.metadata is not metadata .* no code of it was run: .* posix\.mkdir"):
        load(saved)
    assert not (tmp_path / "ran").exists()
    metadata_of(saved)  # what torch does
    assert (tmp_path / "ran").exists()


def test_poison_in_a_value_is_refused_by_name_before_it_runs(saved, tmp_path):
    poisoned_value(saved, Ran(tmp_path / "ran"))
    with pytest.raises(
        CheckpointError, match=r"weight_decay .* is not a plain value: it names posix\.mkdir, .*add_safe_globals"
    ):
        load(saved)
    assert not (tmp_path / "ran").exists()


def named(module, name):
    """A pickle that calls a name without arguments."""
    texts = b"".join(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + pickle.STACK_GLOBAL + pickle.EMPTY_TUPLE + pickle.REDUCE + b"."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("fullshard.state.saving.dcp_reader", "read_metadata"),
        ("pathlib", "Path.rmdir"),
        ("collections", "OrderedDict.fromkeys"),
    ],
)
def test_no_other_name_is_looked_up(module, name, tmp_path):
    put(tmp_path, named(module, name))
    with pytest.raises(CheckpointError, match=f"it names {module}.{name}, which was not looked up"):
        read_metadata(tmp_path)


def test_classes_of_torch_stay_as_they_are_whatever_a_file_sets(tmp_path):
    """BUILD with a pair sets attributes of what is on the stack, also of a class."""
    key = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    state = b"N}\x8c\x06poison\x8c\x01x" + pickle.SETITEM + pickle.TUPLE2
    put(tmp_path, b"\x80\x04" + key + state + pickle.BUILD + b".")
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path)
    assert not hasattr(Metadata, "poison")
    assert not hasattr(pathlib.PosixPath, "poison")
    assert not hasattr(collections.OrderedDict, "poison")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04N" + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f" + b".",  # 34 GB
        b"\x80\x04" + pickle.BYTEARRAY8 + (1 << 60).to_bytes(8, "little") + b".",
        b"\x80\x04" + pickle.BINPERSID + b".",
        b"\x80\x04" + pickle.EXT1 + b"\x01.",
        b"cos\nsystem\n.",
    ],
    ids=["memo", "bytes", "outside", "extension", "global"],
)
def test_other_opcodes_are_refused_before_anything_is_unpickled(content, tmp_path):
    put(tmp_path, content)
    with pytest.raises(CheckpointError, match=r"it has the opcode b'.*', which torch's writer does not use"):
        read_metadata(tmp_path)


def change_first(field, of, value):
    def change(metadata):
        setattr(next(iter(getattr(metadata, field).values())), of, value)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_first("storage_data", "relative_path", "../../secret"), "'../../secret': it is not a file of the"),
        (change_first("storage_data", "relative_path", "/dev/zero"), "'/dev/zero': it is not a file of the"),
        (change_first("storage_data", "relative_path", "a\0b"), "it must have no NUL"),
        (change_first("storage_data", "offset", -1), "an offset in '__0_0.distcp' is -1"),
        (change_first("storage_data", "length", 1 << 70), "a length in '__0_0.distcp' is 118059162071741"),
        (change_first("state_dict_metadata", "size", (-1, 2)), "a size.0 is -1: "),
        (change_first("state_dict_metadata", "chunks", 3), "not iterable"),
        (change_first("state_dict_metadata", "properties", 3), "no attribute 'state'"),
        (lambda metadata: metadata.planner_data.update(x=(1.5,)), "is not of names and numbers"),
        (lambda metadata: metadata.planner_data.update({"a\0": ("model",)}), "a key is"),
        (lambda metadata: setattr(metadata, "storage_data", None), "storage_data is None"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", [1]), "state_dict_metadata is"),
        (lambda metadata: metadata.storage_data.update({"x": 3}), "no attribute"),
        (
            lambda metadata: metadata.storage_data.update({MetadataIndex("x"): BytesStorageMetadata()}),
            "it has a BytesStorageMetadata where a _StorageInfo is expected",
        ),
        (
            lambda metadata: metadata.state_dict_metadata.update(
                x=TensorStorageMetadata(TensorProperties(), torch.Size([1]), [ChunkStorageMetadata((0,), 3)])
            ),
            "not iterable",
        ),
    ],
)
def test_forged_fields_are_refused(change, words, saved):
    theirs = metadata_of(saved)
    change(theirs)
    put(saved, theirs)
    with pytest.raises(CheckpointError) as info:
        read_metadata(saved)
    assert words in str(info.value)
    assert str(saved / ".metadata") in str(info.value)


def test_every_cut_and_many_flips_are_errors_of_the_checkpoint_or_read_the_same(saved):
    content = (saved / ".metadata").read_bytes()
    for stop in range(0, len(content), 7):
        put(saved, content[:stop])
        with pytest.raises(CheckpointError):
            read_metadata(saved)
    for position in range(0, len(content), 5):
        flipped = bytearray(content)
        flipped[position] ^= 0x15
        put(saved, bytes(flipped))
        with contextlib.suppress(CheckpointError):
            read_metadata(saved)


class Turned(nn.Module):
    """One with a transposed parameter and a transposed buffer, which are left out of sharding."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.register_buffer("table", torch.arange(8.0).view(2, 4).t())


def test_left_out_parameters_that_are_not_contiguous_are_written_and_filled(tmp_path):
    def made(comm):
        model = Turned()
        return fully_shard(model, comm, wrap=None, ignored_params=[model.turned])

    def work(comm):
        model = made(comm)
        assert not model.turned.is_contiguous()
        save_dcp(model, None, tmp_path)
        other = made(comm)
        with torch.no_grad():
            other.turned.fill_(-1)
            other.table.fill_(-1)
        places = [tensor.data_ptr() for tensor in (other.turned, other.table)]
        load_dcp(other, None, tmp_path)
        assert places == [tensor.data_ptr() for tensor in (other.turned, other.table)]
        assert torch.equal(other.turned, torch.arange(6.0).view(2, 3).t())
        assert torch.equal(other.table, torch.arange(8.0).view(2, 4).t())
        assert torch.equal(other.linear.weight, model.linear.weight)

    run_ranks(1, work)
    state = {"model": Turned().state_dict()}
    for tensor in state["model"].values():
        tensor.fill_(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["model"]["turned"], torch.arange(6.0).view(2, 3).t())
