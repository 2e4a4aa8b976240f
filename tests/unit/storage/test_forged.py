"""Values that no writer writes are refused when a checkpoint is read, though checksums fit, at the cost of its bytes.

``verify`` says the same of each.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.file_names import stays_inside
from fullshard.state.storage import completion, copy_small_files, find_checkpoints, read_index, rules, survey
from fullshard.state.storage.contents import verify
from fullshard.state.storage.object_path import ObjectPath
from fullshard.state.storage.weight_files import WeightFiles
from support.forged import as_version_1, forge_completion, forge_index, put_index
from support.parity import replicas

TENSOR = "model/0.weight"
SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")

    def work(comm):
        model = fully_shard(nn.Sequential(nn.Linear(6, 4)), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Checkpoints(directory, ranks=comm) as checkpoints:
            for step in (1, 2):
                checkpoints.save(model, optimizer, step=step, metric=0.5)

    run_ranks(1, work)
    return directory


@pytest.fixture
def directory(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


@pytest.fixture
def newest(directory):
    return directory / "step-00000002"


def refused(newest, file):
    """The problem that everybody states: reading, the choice of the newest one, and ``verify``."""
    with pytest.raises(CheckpointError) as info:
        read_index(newest)
    good = newest.with_name("step-00000001")
    problem, _, rest = str(info.value).partition(" The newest other complete one is ")
    assert rest.startswith(f"{good}.")
    assert str(newest / file) in problem
    with pytest.raises(CheckpointError) as info:
        survey(newest.parent, parse_newest=True).newest()
    assert str(info.value).startswith(problem)
    assert f"The newest good one is {good}. To go back to it, set resume=previous" in str(info.value)
    found = verify(newest.parent)
    whole, damaged = found.results
    assert not whole.problems
    said = problem.removeprefix(str(newest / file)).lstrip(": ")
    assert said.rstrip(".") in " ".join(one.text for one in damaged.problems if one.file == file)
    assert any(problem in note for note in found.notes)
    return said


def change_tensor(**changes):
    return lambda values: values["tensors"][TENSOR].update(changes)


def change_group(**changes):
    return lambda values: values["groups"][0].update(changes)


def change_piece(place, value):
    return lambda values: values["tensors"][TENSOR]["pieces"][0].__setitem__(place, value)


def rename_tensor(name):
    return lambda values: values["tensors"].update({name: values["tensors"].pop(TENSOR)})


def change(**changes):
    return lambda values: values.update(changes)


INDEX = {
    "negative-step": (change(step=-1), "step is -1; it must be a whole number of at least 0"),
    "step-of-text": (change(step="2"), "step is '2'"),
    "step-of-truth": (change(step=True), "step is True"),
    "huge-step": (change(step=1 << 70), "step is 1180591620717411303424"),
    "another-step": (change(step=9), "is of step 9, but complete.json is of step 2"),
    "no-ranks": (change(world_size=0), "world_size is 0"),
    "ranks": (change(world_size=10**9), "world_size is 1000000000"),
    "nan-metric": (change(metric=float("nan")), "metric is nan; it must be a number or null"),
    "metric-of-text": (change(metric="0.5"), "metric is '0.5'"),
    "huge-metric": (change(metric=10**400), "metric is 1000000"),
    "direction": (change(greater_is_better=1), "greater_is_better is 1"),
    "serial": (change(serial=-3), "serial is -3"),
    "nan-rate": (change_group(lr=float("nan")), "lr of group 0 is nan, which no optimizer can step with"),
    "infinite-rate": (change_group(lr=float("inf")), "lr of group 0 is inf"),
    "nan-beta": (change_group(betas=[0.9, float("nan")]), "betas of group 0 is [0.9, nan]"),
    "option": (change_group(eps={"a": 1}), "eps of group 0 is {'a': 1}; it must be a plain value"),
    "groups": (change(groups=[3]), "group 0 is 3; it must be an object"),
    "group-of-nothing": (change(groups=[{"lr": 0.1}]), "group 0 has no params"),
    "parameters": (change_group(params=[3]), "params of group 0 is 3"),
    "scalars": (change(scalars={"a": 3}), "scalars of 'a' is 3"),
    "values": (change(values=[1]), "values is [1]; it must be an object"),
    "versions": (change(versions={"torch": 2}), "a name in versions is 2"),
    "policies": (change(policies="all"), "policies is 'all'; it must be a list of names"),
    "tensors": (change(tensors=[]), "tensors is []; it must be an object"),
    "nul": (rename_tensor("model/0\0weight"), r"the name of a tensor is 'model/0\x00weight'; it must be a text of"),
    "no-name": (rename_tensor(""), "the name of a tensor is ''"),
    "long-name": (rename_tensor("x" * 5000), "the name of a tensor is 'xxxxx"),
    "nul-in-file": (change_piece(0, f"\0{SHARD}"), "which is not a file of the checkpoint"),
    "file-above": (change_piece(0, f"../{SHARD}"), "which is not a file of the checkpoint"),
    "file-of-the-system": (change_piece(0, "/dev/zero"), "is stored in '/dev/zero', which is not a file of the"),
    "file-of-another": (
        change_piece(0, "shard-00007-of-00008.safetensors"),
        "in shard-00007-of-00008.safetensors, whi",
    ),
    "start": (change_piece(1, -4), "an end of a run of 'model/0.weight' is -4"),
    "stop": (change_piece(2, 1 << 80), "an end of a run of 'model/0.weight' is 12089258196146291747061"),
    "checksum": (change_piece(3, [1 << 32]), "its numbers must be from 0 to 4294967295"),
    "checksum-of-text": (change_piece(3, ["0"]), "a checksum of 'model/0.weight' is ['0']"),
    "shape": (change_tensor(shape=[-6, -4]), "the shape of 'model/0.weight' is [-6, -4]"),
    "shape-of-text": (change_tensor(shape="24"), "the shape of 'model/0.weight' is '24'"),
    "huge-shape": (change_tensor(shape=[1 << 40, 1 << 40]), "no tensor has so many elements"),
    "dimensions": (change_tensor(shape=[1] * 65), "no tensor has so many elements"),
    "larger-than-the-file": (
        change_tensor(shape=[10**9], pieces=[[SHARD, 0, 10**9, [0]]]),
        f"bytes in {SHARD}, which has ",
    ),
    "dtype": (change_tensor(dtype="load"), "dtype 'load', which this version of torch lacks"),
    "dtype-of-number": (change_tensor(dtype=3), "the dtype of 'model/0.weight' is 3"),
    "pieces": (change_tensor(pieces=[[SHARD, 0]]), "not enough values to unpack"),
    "no-tensor": (lambda values: values["tensors"][TENSOR].pop("shape") and None, "it has no 'shape'"),
    "no-step": (lambda values: values.pop("step") and None, "it has no 'step'"),
    "format": (change(format="theirs"), "its format is 'theirs'"),
    "version": (change(version=4), "has format version 4; this fullshard reads up to 3. Update it"),
    "divided": (change(divided_by=1), "divided_by is 1"),
    "version-0": (change(version=0), "version is 0"),
    "list": (lambda _: "[]", "it is []; it must be an object"),
    "deep": (lambda values: json.dumps(values)[:-1] + ',"x":' + "[" * 10**5 + "]" * 10**5 + "}", "nested too deeply"),
    "no-seal": (lambda values: json.dumps(values), "its last entry is not own_sha256"),
    "digits": (lambda _: '{"step":' + "1" * 10_000 + "}", "Exceeds the limit"),
    "bytes": (lambda _: b"\xff\xfe{}", "codec can't decode"),
}


@pytest.mark.parametrize("case", INDEX)
def test_forged_indices_are_refused_by_value(case, newest):
    change, words = INDEX[case]
    forge_index(newest, change)
    assert words in refused(newest, "index.json")


def change_files(**changes):
    return lambda done: done["files"].update(changes)


COMPLETION = {
    "negative-step": (change(step=-1), "step is -1"),
    "nan-metric": (change(metric=float("nan")), "metric is nan"),
    "serial": (change(serial="7"), "serial is '7'"),
    "direction": (change(greater_is_better="up"), "greater_is_better is 'up'"),
    "hash": (change(index_sha256="../x"), "the hash of 'index.json' is '../x'; it must be 64 hex digits"),
    "nul": (change_files(**{"a\0b": 1}), r"the name of a file is 'a\x00b'"),
    "above": (change_files(**{"../../x": 1}), "'../../x', which is not a file of the checkpoint"),
    "root": (change_files(**{"/dev/zero": 0}), "'/dev/zero', which is not a file of the checkpoint"),
    "above-small": (change(sha256={"model/../../x": "0" * 64}), "which is not a file of the checkpoint"),
    "size": (change_files(**{SHARD: -1}), "is -1; it must be a whole number"),
    "sizes": (change_files(**{SHARD: 1 << 90}), "it must be a whole number"),
    "files": (change(files=[SHARD]), "files is ['shard-0"),
    "list": (lambda _: "[1]", "it is [1]; it must be an object"),
    "deep": (lambda _: '{"":' * 10**5, "nested too deeply"),
    "missing": (lambda done: done.pop("files") and None, "it has no files"),
    "version": (change(version=3), "it has format version 3; this fullshard reads up to 2"),
    "no-seal": (lambda done: json.dumps(done), "its last entry is not own_sha256"),
    "names": (change(files=dict.fromkeys(map(str, range(10**6)), 0)), "names; at most 200,000 are read"),
}


@pytest.mark.parametrize("case", COMPLETION)
def test_forged_completions_are_refused_by_value(case, newest):
    change, words = COMPLETION[case]
    forge_completion(newest, change)
    assert words in refused(newest, "complete.json")


def test_a_long_name_of_a_file_is_missing_and_no_error_of_the_system(newest):
    forge_completion(newest, change_files(**{"x" * 3000: 1}))
    with pytest.raises(CheckpointError, match="x is missing"):
        read_index(newest)
    assert verify(newest).problems == 1


@pytest.mark.parametrize("file", ["index.json", "complete.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(file, newest):
    (newest / file).unlink()
    os.mkfifo(newest / file)
    with pytest.raises(CheckpointError):
        read_index(newest)
    assert verify(newest).problems
    assert [path.name for path in find_checkpoints(newest.parent)] == ["step-00000001"]


@pytest.mark.parametrize("file", ["index.json", "complete.json"])
def test_a_flipped_bit_is_found_by_the_file_alone(file, newest):
    """Where it says so itself, without the hash in the other file."""
    content = bytearray((newest / file).read_bytes())
    place = content.index(b'"metric"') + len('"metric": ')
    content[content.index(b"5", place)] ^= 1
    if file == "index.json":
        put_index(newest, bytes(content))
    else:
        (newest / file).write_bytes(content)
    assert "it was changed after it was written: it has SHA-256" in refused(newest, file)


def test_a_checkpoint_of_version_1_needs_no_seal_and_one_that_it_has_must_fit(newest):
    as_version_1(newest)
    assert read_index(newest).serial is None
    assert not verify(newest.parent).problems

    def sealed(values):
        values.update(version=1, policies=[])

    forge_index(newest, sealed)
    assert read_index(newest).policies == []
    content = (newest / "index.json").read_bytes()
    put_index(newest, content.replace(b'"world_size":1', b'"world_size":3'))
    with pytest.raises(CheckpointError, match="changed after it was written"):
        read_index(newest)


def test_an_index_that_would_be_refused_is_not_written(tmp_path):
    _, models = replicas(lambda: nn.Sequential(nn.Linear(6, 4)), 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=1)
            optimizer.param_groups[0]["lr"] = float("nan")
            with pytest.raises(CheckpointError, match="cannot be saved with this index, because lr of group 0 is nan"):
                checkpoints.save(model, optimizer, step=2)
            return str(checkpoints.latest())

    assert run_ranks(2, work) == [str(tmp_path / "step-00000001")] * 2


CHEAP = """
import resource, sys, time
from pathlib import Path
from fullshard.errors import CheckpointError
from fullshard.state.storage import read_index
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    read_index(Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(used // 1024, time.process_time() - start)
"""


@pytest.mark.parametrize(
    "kind", ["names", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("values", "bytes"))]
)
def test_what_is_too_much_costs_no_more_than_its_bytes(kind, newest):
    entry = '{"dtype":"uint8","shape":[1],"pieces":[["shard-00000-of-00001.safetensors",0,1,[0]]]}'
    if kind == "names":
        text = '{"tensors":{' + ",".join(f'"model/{number}":{entry}' for number in range(10**6)) + "}}"
        words = "names; at most 4,000,000 are read"
    elif kind == "values":
        text = '{"values":[' + "[]," * 17_000_000 + "[]]}"
        words = "values; at most 16,000,000 are read"
    else:
        text = ""
        words = "it has 1,099,511,627,776 bytes; at most 268,435,456 are read"
    put_index(newest, text.encode())
    if kind == "bytes":
        os.truncate(newest / "index.json", 1 << 40)  # a file of holes, which takes no room
        forge_completion(newest, change_files(**{"index.json": 1 << 40}))
    ran = subprocess.run([sys.executable, "-c", CHEAP, newest], capture_output=True, text=True, timeout=100)
    assert not ran.stderr
    said, cost = ran.stdout.splitlines()
    megabytes, seconds = map(float, cost.split())
    assert words in said
    assert megabytes < 1.5 * len(text) / (1 << 20) + 30
    assert seconds < 10


HOSTILE = ["../escaped", "model/../../escaped", "/escaped", "a//b", "./a", "..", "a/..", "a\0b"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_out_is_refused_wherever_it_comes_from(name, tmp_path):
    assert not stays_inside(name)
    with pytest.raises(ValueError, match=r"not a file of the checkpoint|without NUL"):
        rules.file_name(name, "a file")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match="which is not the name of a file next to it"):
        WeightFiles(index)
    assert verify(index).results[0].problems


@pytest.mark.parametrize("name", HOSTILE)
def test_a_buckets_listing_with_a_hostile_name_writes_nothing(name, tmp_path, monkeypatch):
    """Reached by ``export s3://…``; a bucket may list any key, and other writers may have put one."""
    listed = {"model/config.json": 2, f"model/{name}": 2}
    monkeypatch.setattr(ObjectPath, "sizes", lambda path: listed)
    monkeypatch.setattr(completion, "read_bounded", lambda path, nbytes: b"{}")
    target = tmp_path / "inside" / "target"
    with pytest.raises(CheckpointError, match=r"outside of .*target. Nothing was written"):
        copy_small_files(ObjectPath("s3://bucket/run"), target)
    assert not list(tmp_path.rglob("*"))
    assert not os.path.exists("/escaped")
    del listed[f"model/{name}"]
    copy_small_files(ObjectPath("s3://bucket/run"), target)
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_names_of_files_that_are_written_stay_inside():
    assert all(map(stays_inside, ["config.json", "model/config.json", "a..b", "..a/b", "…", "-", "a b/c"]))
