"""Values that no writer writes are refused when a checkpoint is read, though checksums fit, at the cost of its bytes.

``verify`` says the same of each.
"""

import functools
import json
import operator
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
from fullshard.state.storage.completion import parse_completion
from fullshard.state.storage.contents import verify
from fullshard.state.storage.index import parse_index
from fullshard.state.storage.json_file import SEAL, seal
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


def change_files(**changes):
    return lambda done: done["files"].update(changes)


INDEX = {
    "negative-step": (change(step=-1), "step is -1: "),
    "step-of-text": (change(step="2"), "step is '2': "),
    "step-of-truth": (change(step=True), "step is True: "),
    "step-of-a-fraction": (change(step=2.0), "step is 2.0: "),
    "huge-step": (change(step=1 << 70), "step is 1180591620717411303424: "),
    "another-step": (change(step=9), "is of step 9, but complete.json is of step 2"),
    "no-ranks": (change(world_size=0), "world_size is 0: "),
    "ranks": (change(world_size=10**9), "world_size is 1000000000: "),
    "nan-metric": (change(metric=float("nan")), "metric is nan: it must be a number or null"),
    "metric-of-text": (change(metric="0.5"), "metric is '0.5': "),
    "huge-metric": (change(metric=10**400), "metric is 1000000"),
    "direction": (change(greater_is_better=1), "greater_is_better is 1: "),
    "serial": (change(serial=-3), "serial is -3: "),
    "nan-rate": (change_group(lr=float("nan")), "no optimizer can step with lr nan"),
    "infinite-rate": (change_group(lr=float("inf")), "no optimizer can step with lr inf"),
    "nan-beta": (change_group(betas=[0.9, float("nan")]), "no optimizer can step with betas [0.9, nan]"),
    "option": (change_group(eps={"a": 1}), "eps must be a plain value"),
    "groups": (change(groups=[3]), "groups.0 is 3: "),
    "group-of-nothing": (change(groups=[{"lr": 0.1}]), "params is None: "),
    "parameters": (change_group(params=[3]), "params.0 is 3: "),
    "scalars": (change(scalars={"a": 3}), "scalars.a is 3: "),
    "values": (change(values=[1]), "values is [1]: "),
    "versions": (change(versions={"torch": 2}), "versions.torch is 2: "),
    "policies": (change(policies="all"), "policies is 'all': "),
    "tensors": (change(tensors=[]), "tensors is []: "),
    "nul": (rename_tensor("model/0\0weight"), r"is 'model/0\x00weight': it must have no NUL"),
    "no-name": (rename_tensor(""), "tensors.'' is '': "),
    "long-name": (rename_tensor("x" * 5000), "xxx': String should have at most 4096 characters"),
    "nul-in-file": (change_piece(0, f"\0{SHARD}"), "it is not a file of the checkpoint"),
    "file-above": (change_piece(0, f"../{SHARD}"), "it is not a file of the checkpoint"),
    "file-of-the-system": (change_piece(0, "/dev/zero"), "is '/dev/zero': it is not a file of the checkpoint"),
    "file-of-another": (
        change_piece(0, "shard-00007-of-00008.safetensors"),
        "in shard-00007-of-00008.safetensors, whi",
    ),
    "start": (change_piece(1, -4), " is -4: "),
    "stop": (change_piece(2, 1 << 80), " is 1208925819614629174706176: "),
    "checksum": (change_piece(3, [1 << 32]), " is 4294967296: "),
    "checksum-of-text": (change_piece(3, ["0"]), " is '0': "),
    "shape": (change_tensor(shape=[-6, -4]), "tensors.'model/0.weight'.shape.0 is -6: "),
    "shape-of-text": (change_tensor(shape="24"), "tensors.'model/0.weight'.shape is '24': "),
    "huge-shape": (change_tensor(shape=[1 << 40, 1 << 40]), "no tensor has so many elements"),
    "dimensions": (change_tensor(shape=[1] * 65), "at most 64 items"),
    "larger-than-the-file": (
        change_tensor(shape=[10**9], pieces=[[SHARD, 0, 10**9, [0]]]),
        f"bytes in {SHARD}, which has ",
    ),
    "dtype": (change_tensor(dtype="load"), "dtype 'load', which this version of torch lacks"),
    "dtype-of-number": (change_tensor(dtype=3), "dtype is 3: "),
    "pieces": (change_tensor(pieces=[[SHARD, 0]]), "it has no tensors.'model/0.weight'.pieces.0.2"),
    "no-tensor": (lambda values: values["tensors"][TENSOR].pop("shape") and None, "'model/0.weight'.shape"),
    "no-step": (lambda values: values.pop("step") and None, "it has no step"),
    "format": (change(format="theirs"), "format is 'theirs': "),
    "version": (change(version=4), "has format version 4; this fullshard reads up to 3. Update it"),
    "divided": (change(divided_by=1), "divided_by is 1: "),
    "version-0": (change(version=0), "version is 0: "),
    "list": (lambda _: "[]", "it is []: "),
    "deep": (lambda values: json.dumps(values)[:-1] + ',"x":' + "[" * 10**5 + "]" * 10**5 + "}", "recursion limit"),
    "no-seal": (lambda values: json.dumps(values), "its last entry is not own_sha256"),
    "digits": (lambda _: '{"step":' + "1" * 10_000 + "}", "number out of range"),
    "bytes": (lambda _: b"\xff\xfe{}", "Invalid JSON"),
    "many": (change(policies=[0] * 2_000), "2,000 of its values are not of their types"),
}
COMPLETION = {
    "negative-step": (change(step=-1), "step is -1: "),
    "nan-metric": (change(metric=float("nan")), "metric is nan: "),
    "serial": (change(serial="7"), "serial is '7': "),
    "direction": (change(greater_is_better="up"), "greater_is_better is 'up': "),
    "hash": (change(index_sha256="../x"), "index_sha256 is '../x': it must be 64 hex digits"),
    "nul": (change_files(**{"a\0b": 1}), r"is 'a\x00b': "),
    "above": (change_files(**{"../../x": 1}), "is '../../x': it is not a file of the checkpoint"),
    "root": (change_files(**{"/dev/zero": 0}), "is '/dev/zero': it is not a file of the checkpoint"),
    "above-small": (change(sha256={"model/../../x": "0" * 64}), "it is not a file of the checkpoint"),
    "size": (change_files(**{SHARD: -1}), " is -1: "),
    "sizes": (change_files(**{SHARD: 1 << 90}), " is 1237940039285380274899124224: "),
    "files": (change(files=[SHARD]), "files is ['shard-0"),
    "list": (lambda _: "[1]", "it is [1]: "),
    "deep": (lambda _: '{"":' * 10**5, "recursion limit"),
    "missing": (lambda done: done.pop("files") and None, "it has no files"),
    "version": (change(version=3), "it has format version 3; this fullshard reads up to 2"),
    "no-seal": (lambda done: json.dumps(done), "its last entry is not own_sha256"),
    "names": (change(files=dict.fromkeys(map(str, range(10**6)), 0)), "names; at most 200,000 are read"),
}
FORGED = [
    pytest.param(file, forge, *row, id=f"{file[:-5]}-{case}")
    for file, forge, rows in (("index.json", forge_index, INDEX), ("complete.json", forge_completion, COMPLETION))
    for case, row in rows.items()
]


@pytest.mark.parametrize(("file", "forge", "change", "words"), FORGED)
def test_forged_files_are_refused_by_value(file, forge, change, words, newest):
    forge(newest, change)
    assert words in refused(newest, file)


JUNK = [None, True, -1, 1 << 70, 0.5, float("nan"), "x", "../x", [], [3], ["x"], {}, {"x": 3}]


def places(values, above=()):
    """Each field, item and nested one of ``values``, as the keys that lead to it."""
    found = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in found:
        yield (*above, key)
        yield from places(value, (*above, key))


@pytest.mark.parametrize("file", ["index.json", "complete.json"])
def test_any_changed_field_is_refused_or_read_as_it_is(file, written):
    """Nothing is converted: ``"2"`` is no step 2, and ``1.0`` no serial number."""
    plain = json.loads((written / "step-00000002" / file).read_text())
    del plain[SEAL]
    outcomes = {True: 0, False: 0}
    for path in places(plain):
        for junk in JUNK:
            values = json.loads(json.dumps(plain))
            functools.reduce(operator.getitem, path[:-1], values)[path[-1]] = junk
            content = seal(json.dumps(values)).encode()
            try:
                if file == "index.json":
                    found = json.loads(parse_index(content, file).as_json())
                else:
                    found = vars(parse_completion(content)) | {"version": values["version"]}
            except (CheckpointError, ValueError):
                outcomes[False] += 1
                continue
            outcomes[True] += 1
            for name, value in values.items():
                assert repr(found[name]) == repr(value), (path, junk)
    assert outcomes[False] > outcomes[True] > 0


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
            with pytest.raises(CheckpointError, match=r"cannot be saved with this index, because .*step with lr nan"):
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
    with pytest.raises(ValueError, match=r"not a file of the checkpoint|no NUL"):
        rules.check(rules.FileName, name, "a file")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match="it is not the name of a file next to it"):
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
