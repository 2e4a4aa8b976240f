"""Checkpoints in object stores: fsspec's memory, and S3 where a local server is installed."""

import json

import pytest
import torch

from fullshard import Checkpoints, fully_shard, load_checkpoint
from fullshard.core.comm import SoloComm
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, StoreError
from fullshard.state.saving.export import ExportOptions, choose_checkpoint, export
from fullshard.state.storage import as_place, find_checkpoints, object_path, object_store, read_index
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.contents import inspect_path, verify
from support import object_stores
from support.models import TinyLM, batches, lm_loss, t5
from support.parity import replicas
from support.states import assert_same_bits, rank_runs, whole

ROWS = 2


NEEDS_S3 = pytest.mark.skipif(not object_stores.HAS_S3, reason="needs s3fs, moto and flask")
S3 = pytest.param("s3", marks=NEEDS_S3)
SLOW_S3 = pytest.param("s3", marks=[NEEDS_S3, pytest.mark.slow])
"""A server takes a second or more in each test; the other tests of it are of what S3 does otherwise than memory."""


@pytest.fixture(params=["memory", S3])
def url(request, monkeypatch):
    monkeypatch.setattr(object_path, "FIRST_WAIT_SECONDS", 0.0)
    with object_stores.memory() if request.param == "memory" else object_stores.s3(monkeypatch) as prefix:
        yield prefix


def on_ranks(size, work, make=TinyLM):
    _, models = replicas(make, size)
    return run_ranks(size, lambda comm: work(models[comm.rank], comm))


def trained(model, comm, steps=2):
    model = fully_shard(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens in batches(steps, ROWS * comm.size):
        lm_loss(model, tokens[comm.rank * ROWS : (comm.rank + 1) * ROWS]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_steps(url, size, steps, *, make=TinyLM, background=False, **options):
    """Save the same state under each of ``steps``; the state."""

    def work(model, comm):
        model, optimizer = trained(model, comm, steps=2 if make is TinyLM else 0)
        with Checkpoints(url, ranks=comm, **options) as checkpoints:
            for step in steps:
                checkpoints.save(model, optimizer, step=step, values={"epoch": 1}, metric=step, background=background)
        return rank_runs(model, optimizer)

    return whole(on_ranks(size, work, make))


def load(url, size, path=None):
    def work(model, comm):
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(-7)
        model = fully_shard(model, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with Checkpoints(url, ranks=comm) as checkpoints:
            restored = checkpoints.load(model, optimizer, path=path)
        assert restored.values == {"epoch": 1}
        return rank_runs(model, optimizer)

    return whole(on_ranks(size, work))


def objects(url):
    return as_place(url).sizes()


@pytest.mark.parametrize(
    ("url", "before", "after", "background"),
    [
        *(("memory", *case) for case in ((2, 2, False), (2, 3, True), (3, 1, False), (1, 2, True))),
        pytest.param("s3", 2, 3, True, marks=NEEDS_S3),
    ],
    indirect=["url"],
)
def test_what_is_loaded_is_what_was_saved_at_any_world_size(url, before, after, background):
    saved = save_steps(url, before, [1], background=background)
    assert_same_bits(load(url, after), saved)


@pytest.mark.parametrize("url", ["memory", SLOW_S3], indirect=True)
def test_the_newest_is_kept_and_another_save_of_its_step_replaces_it(url):
    save_steps(url, 1, [1, 2, 3], keep_last=2)
    assert [path.name.partition(".")[0] for path in find_checkpoints(as_place(url))] == [
        "step-00000002", "step-00000003",
    ]  # fmt: skip
    first = find_checkpoints(as_place(url))[-1]
    saved = save_steps(url, 1, [3], keep_last=None)
    newest = find_checkpoints(as_place(url))
    assert [path.name[:13] for path in newest] == ["step-00000002", "step-00000003"]
    assert newest[-1] != first, "it was written under the name of the one it replaces"
    assert not any(name.startswith(first.name) for name in objects(url))
    assert not any(name.startswith("lock") for name in objects(url))
    assert_same_bits(load(url, 1, path=str(newest[-1])), saved)


def test_the_marker_is_put_last_and_deleted_first(url, monkeypatch):
    events = []
    files = object_path.file_system(url)
    for name in ("pipe_file", "rm_file"):
        do = getattr(files, name)

        def noted(path, *rest, do=do, name=name, **more):
            events.append((name, path))
            return do(path, *rest, **more)

        monkeypatch.setattr(files, name, noted)
    save_steps(url, 1, [1, 2], keep_last=1)
    events = [(name, path) for name, path in events if not path.endswith("lock")]
    puts = {
        step: [path for name, path in events if name == "pipe_file" and f"step-0000000{step}" in path]
        for step in (1, 2)
    }
    assert all(paths[-1].endswith("complete.json") for paths in puts.values())
    deleted = [path for name, path in events if name == "rm_file" and "step-00000001" in path]
    after = deleted[[path.endswith("complete.json") for path in deleted].index(True) :]
    assert all(not path.endswith(".safetensors") for path in deleted[: len(deleted) - len(after)])
    assert sum(path.endswith(".safetensors") for path in after) == 1


@pytest.mark.parametrize("url", ["memory", SLOW_S3], indirect=True)
def test_without_its_marker_nothing_is_a_checkpoint_and_the_next_run_clears_it(url):
    save_steps(url, 1, [1, 2])
    one, two = find_checkpoints(as_place(url))
    (two / "complete.json").unlink()
    assert find_checkpoints(as_place(url)) == [one]
    notes = verify(url).notes
    assert any(two.name in note and "left by a killed process" in note for note in notes)
    with Checkpoints(url, ranks=SoloComm(torch.device("cpu"))) as checkpoints:
        assert checkpoints.latest() == one
    assert not any(name.startswith(two.name) for name in objects(url))


def test_a_second_run_is_refused_while_the_first_one_lives(url, monkeypatch):
    solo = SoloComm(torch.device("cpu"))
    place = as_place(url)
    with Checkpoints(url, ranks=solo):
        content = json.loads(object_path.request(url, lambda files: files.cat_file((place / "lock").key)))
        assert content["renewals"] == 1
        with pytest.raises(CheckpointError, match=r"Another run is writing to .* \(process \d+ on "):
            Checkpoints(url, ranks=solo)
    # One of another machine, which is gone, does not change: it is taken over. One that changes is not.
    foreign = {"token": "x", "renewals": 1, "process": ["another boot", "pid:[1]", 1], "host": "far"}
    monkeypatch.setattr(object_store, "RENEW_SECONDS", 0.0)  # as for a process that was stopped between two looks

    def put(renewals):
        text = json.dumps({**foreign, "renewals": renewals}).encode()
        object_path.request(url, lambda files: files.pipe_file((place / "lock").key, text))

    put(1)
    monkeypatch.setattr(object_store.time, "sleep", lambda _: put(2))
    with pytest.raises(CheckpointError, match=r"Another run is writing to .* \(process 1 on far\)"):
        Checkpoints(url, ranks=solo)
    monkeypatch.undo()
    monkeypatch.setattr(object_store, "RENEW_SECONDS", 0.02)
    if not url.startswith("memory"):
        return
    with Checkpoints(url, ranks=solo):
        pass


def test_a_run_that_lost_its_lock_marks_nothing(url):
    place = as_place(url)

    def work(model, comm):
        model, optimizer = trained(model, comm)
        checkpoints = Checkpoints(url, ranks=comm)
        checkpoints.save(model, optimizer, step=1)
        foreign = json.dumps({"token": "x", "renewals": 1, "process": [], "host": "far"}).encode()
        object_path.request(url, lambda files: files.pipe_file((place / "lock").key, foreign))
        with pytest.raises(CheckpointError, match=r"Another run \(far\) has taken the lock"):
            checkpoints.save(model, optimizer, step=2)
        checkpoints.close()

    on_ranks(2, work)
    assert [path.name[:13] for path in find_checkpoints(place)] == ["step-00000001"]
    assert "lock" in objects(url), "it is the other run's"


@pytest.mark.parametrize("url", ["memory", SLOW_S3], indirect=True)
def test_a_damaged_one_is_an_error_and_going_back_sets_it_aside(url):
    save_steps(url, 1, [1, 2])
    one, two = find_checkpoints(as_place(url))
    (two / "index.json").unlink()

    def work(model, comm):
        model = fully_shard(model, comm)
        with Checkpoints(url, ranks=comm) as checkpoints:
            with pytest.raises(CheckpointError, match=r"is the newest checkpoint .* The newest good one is"):
                checkpoints.load(model)
            assert checkpoints.load(model, previous=True).path == one
            assert checkpoints.latest() == one
        return True

    assert on_ranks(2, work)
    assert inspect_path(url).set_aside == (two,)


@pytest.mark.parametrize("url", ["memory", SLOW_S3], indirect=True)
def test_damage_in_a_tensor_is_found(url):
    save_steps(url, 2, [1, 2])
    path = find_checkpoints(as_place(url))[-1]
    shard = path / "shard-00001-of-00002.safetensors"
    content = bytearray(object_path.request(url, lambda files: files.cat_file(shard.key)))
    content[-5] ^= 1
    object_path.request(url, lambda files: files.pipe_file(shard.key, bytes(content)))
    with pytest.raises(CheckpointError, match=r"is damaged: block 0 of .* The newest other complete one is"):
        load(url, 2)
    assert verify(url).problems == 1


def test_a_rank_fetches_only_what_it_needs(url, monkeypatch):
    save_steps(url, 1, [1])
    files, fetched = object_path.file_system(url), []
    do = files.cat_file

    def noted(path, start=None, end=None, **more):
        content = do(path, start=start, end=end, **more)
        fetched.append((path.rpartition("/")[2], len(content)))
        return content

    monkeypatch.setattr(files, "cat_file", noted)
    path = find_checkpoints(as_place(url))[-1]
    size = (path / "shard-00000-of-00001.safetensors").size()
    fetched.clear()

    def work(model, comm):
        load_checkpoint(fully_shard(model, comm), None, str(path))

    on_ranks(1, work)
    shard = sum(nbytes for name, nbytes in fetched if name.startswith("shard"))
    left_out = sum(entry.numel * 4 for name, entry in read_index(path).tensors.items() if name.startswith("optimizer/"))
    assert left_out > size / 3
    assert shard <= size - left_out, "the optimizer's state was not asked for"


def test_the_verbs_take_a_url(url, tmp_path):
    saved = save_steps(url, 2, [1, 2], make=t5)
    backend_of(as_place(url)).write_text(as_place(url) / "metrics.jsonl", "{}")  # its own, or another program's
    found = verify(url)
    assert not found.problems
    assert [one.checksums > 0 for one in found.results] == [True, True]
    listing = inspect_path(url)
    assert [(entry.step, entry.problem) for entry in listing.entries] == [(1, None), (2, None)]
    newest = choose_checkpoint(url)
    assert inspect_path(str(newest)).facts["step"] == 2
    assert choose_checkpoint(url, "best") == newest
    assert choose_checkpoint(url, "1") != newest
    report = export(newest, tmp_path / "out", ExportOptions())
    assert "config.json" in report.files
    model = type(t5()).from_pretrained(tmp_path / "out")
    assert torch.equal(model.state_dict()["shared.weight"].view(-1), saved["model/shared.weight"])


class Refusing:
    """Fails a number of requests."""

    def __init__(self, error, times=10**6):
        self.error, self.times = error, times

    def __call__(self, *_, **__):
        if self.times:
            self.times -= 1
            raise self.error
        return {}


class NoCredentialsError(Exception):
    """As botocore's."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoCredentialsError("Unable to locate credentials"), "There are no credentials for .* AWS_ACCESS_KEY_ID"),
        (PermissionError("Forbidden"), r"The store refuses access to .* \(403\): Forbidden\. Checkpoints need"),
        (OSError("503 Service Unavailable"), "could not be reached in 4 attempts: OSError: 503 Service Unavailable"),
        (ConnectionResetError("cut"), "could not be reached in 4 attempts: ConnectionResetError: cut"),
    ],
)
def test_a_refusal_is_one_sentence_on_every_rank(error, text, monkeypatch):
    monkeypatch.setattr(object_path, "FIRST_WAIT_SECONDS", 0.0)
    with object_stores.memory() as url:
        monkeypatch.setattr(object_path.file_system(url), "cat_file", Refusing(error))
        texts = []

        def work(_, comm):
            with pytest.raises(StoreError, match=text) as caught:
                Checkpoints(url, ranks=comm)
            texts.append(str(caught.value))

        on_ranks(2, work)
        assert len(set(texts)) == 1


def test_one_that_passes_is_repeated(monkeypatch):
    monkeypatch.setattr(object_path, "FIRST_WAIT_SECONDS", 0.0)
    with object_stores.memory() as url:
        refusing = Refusing(OSError("503"), times=3)
        assert object_path.request(url, lambda _: refusing()) == {}


def test_the_store_failing_during_a_save_leaves_the_earlier_one(monkeypatch):
    monkeypatch.setattr(object_path, "FIRST_WAIT_SECONDS", 0.0)
    with object_stores.memory() as url:
        save_steps(url, 2, [1])

        def work(model, comm):
            model, optimizer = trained(model, comm)
            with Checkpoints(url, ranks=comm) as checkpoints:
                files = object_path.file_system(url)
                with monkeypatch.context() as patch:
                    comm.barrier()
                    if comm.rank == 0:
                        patch.setattr(files, "open", Refusing(OSError("500")))
                    comm.barrier()
                    with pytest.raises(
                        StoreError if comm.rank < 0 else CheckpointError, match="4 attempts: OSError: 500"
                    ):
                        checkpoints.save(model, optimizer, step=2)
                    comm.barrier()
                assert checkpoints.latest().name.startswith("step-00000001")

        on_ranks(2, work)
        assert not any(name.startswith("step-00000002") for name in objects(url))


def test_a_place_must_be_named_and_its_package_installed():
    with pytest.raises(ConfigError, match="names no place in an object store"):
        as_place("s3://")
    with pytest.raises(StoreError, match=r"nothing:// .*: correct the URL, or install the package"):
        Checkpoints("nothing://bucket/run", ranks=SoloComm(torch.device("cpu")))
    if not object_stores.HAS_S3:
        with pytest.raises(StoreError, match=r"s3:// cannot be opened: .*pip install 'fullshard\[s3\]'"):
            Checkpoints("s3://bucket/run", ranks=SoloComm(torch.device("cpu")))
