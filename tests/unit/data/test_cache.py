"""What is tokenized is tokenized once, whoever asks at once, and whatever was killed before."""

import fcntl
import subprocess
import sys
import threading

import numpy as np
import pytest

from fullshard.errors import DataError
from fullshard.program.data.examples import Example
from fullshard.program.data.tokenizing import cache
from fullshard.program.data.tokenizing.cache import CONTENTS_NAME, cached, open_tokens, tokenize_to
from fullshard.program.data.tokenizing.ragged import Ragged
from fullshard.program.data.tokenizing.tokenize import TokenizeSpec, tokenize
from fullshard.user_cache import default_directory

ROWS = [Example("a b", ("label",), 2), Example("a b c d e", ("label label label",), 3), Example("c", ("b",), 4)]


def entry_of(directory, text="content"):
    """Build an entry with one file."""
    return cached(directory, "key", lambda path: (path / "file").write_text(text) and {"text": text})


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_from_the_cache_are_those_in_memory(tmp_path, t5_like, causal, monkeypatch):
    spec = TokenizeSpec(4, 3, source_prefix="prefix: ", causal=causal)
    expected = tokenize(ROWS, t5_like, spec)
    monkeypatch.setattr(sys.modules["fullshard.program.data.tokenizing.tokenize"], "CHUNK_ROWS", 2)
    told = []
    stats = tokenize_to(tmp_path, ROWS, t5_like, spec, lambda *where: told.append(where))
    mapped = open_tokens(tmp_path, stats)
    assert told == [(0, 3), (2, 3), (3, 3)]
    assert isinstance(mapped.source_ids.ids, np.memmap)
    for side in ("source", "target"):
        ours, theirs = (getattr(tokens, f"{side}_ids") for tokens in (mapped, expected))
        assert ours.tolist() == theirs.tolist()
        assert (ours.ids.dtype, ours.offsets.dtype) == (np.int32, np.int64)
        assert getattr(mapped, f"{side}_stats") == getattr(expected, f"{side}_stats")
    assert mapped.lengths.tolist() == expected.lengths.tolist()
    assert tokenize(ROWS, t5_like, spec).source_ids.tolist() == expected.source_ids.tolist()


def test_rows_without_tokens_are_rows():
    rows = Ragged.from_rows([[], [1, 2], []])
    assert (rows.tolist(), rows.lengths.tolist(), len(rows)) == ([[], [1, 2], []], [0, 2, 0], 3)
    assert Ragged.joined([rows, Ragged.from_rows([[3]])]).tolist() == [[], [1, 2], [], [3]]
    with pytest.raises(IndexError, match="no row 3: rows are 0 to 2"):
        rows[3]


def test_threads_that_ask_at_once_build_once_and_get_the_same(tmp_path):
    begin, built, waited, found = threading.Barrier(4), [], [], []
    waiters = threading.Semaphore(0)

    def waiting():
        waited.append(1)
        waiters.release()

    def build(path):
        for _ in range(3):  # until all others wait
            waiters.acquire()
        built.append(path)
        return {"number": len(built)}

    def ask():
        begin.wait()
        found.append(cached(tmp_path, "key", build, waiting))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(waited) == 3
    assert found == [(tmp_path / "key", {"number": 1})] * 4


OTHER_PROCESS = """
import fcntl, json, pathlib, sys
directory = pathlib.Path(sys.argv[1])
with (directory / "key.lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "builds":
        (directory / "key").mkdir()
        (directory / "key" / "contents.json").write_text(json.dumps({"sizes": {}, "kept": {"by": "other"}}))
"""


@pytest.mark.parametrize(("other", "by"), [("builds", "other"), ("fails", "us")])
def test_a_process_waits_for_another_one_and_builds_only_what_that_did_not(tmp_path, other, by):
    command = [sys.executable, "-S", "-c", OTHER_PROCESS, str(tmp_path), other]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        goes_on = lambda: process.stdin.write("go on\n") and process.stdin.flush()  # noqa: E731
        found = cached(tmp_path, "key", lambda path: {"by": "us"}, waiting=goes_on)
    assert found == (tmp_path / "key", {"by": by})
    assert process.returncode == 0


@pytest.mark.parametrize(("holder", "said"), [("127.0.0.1:1234", 0), ("127.0.0.1:9", 1), (None, 1)])
def test_a_rank_does_not_report_that_it_waits_for_another_of_its_run(tmp_path, holder, said, monkeypatch):
    calls = []

    def act_as(address):
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), (address or "x:1").split(":"), strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0") if address else monkeypatch.delenv("RANK", raising=False)

    class GivenUpError(Exception):
        pass

    def give_up(file, how):
        if how == fcntl.LOCK_EX:
            raise GivenUpError  # in place of waiting
        flock(file, how)

    flock = fcntl.flock
    act_as(holder)
    with cache._locked(tmp_path / "lock", calls.append):
        act_as("127.0.0.1:1234")
        monkeypatch.setattr(fcntl, "flock", give_up)
        with pytest.raises(GivenUpError), cache._locked(tmp_path / "lock", lambda: calls.append(1)):
            pass
    assert len(calls) == said


def test_what_is_there_is_not_built_again(tmp_path):
    assert entry_of(tmp_path) == (tmp_path / "key", {"text": "content"})
    assert entry_of(tmp_path, "other") == (tmp_path / "key", {"text": "content"})


class KilledError(BaseException):
    """What a kill is here."""


def test_a_killed_build_leaves_no_entry_and_is_swept_away(tmp_path, monkeypatch):
    def build(path):
        (path / "file").write_text("half")
        raise KilledError

    # A real kill would not clean up.
    monkeypatch.setattr(cache.tempfile.TemporaryDirectory, "__exit__", lambda *_: None)
    monkeypatch.setattr(cache.tempfile.TemporaryDirectory, "_cleanup", lambda *_, **__: None)
    with pytest.raises(KilledError):
        cached(tmp_path, "key", build)
    assert not (tmp_path / "key").exists()
    assert len(list(tmp_path.glob("key.building-*"))) == 1
    monkeypatch.undo()
    assert entry_of(tmp_path)[1] == {"text": "content"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


@pytest.mark.parametrize("damage", ["file shorter", "file gone", "contents gone", "contents torn"])
def test_a_damaged_entry_is_built_again(tmp_path, damage):
    entry, _ = entry_of(tmp_path)
    file = entry / (CONTENTS_NAME if "contents" in damage else "file")
    if "gone" in damage:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert entry_of(tmp_path, "again") == (entry, {"text": "again"})
    assert (entry / "file").read_text() == "again"


def test_a_directory_that_cannot_be_written_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be used: .*Set data.cache_dir to a writable"):
        entry_of(tmp_path / "file" / "cache")


def test_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "fullshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "fullshard"
