"""Digests of files: every byte counts, and what is kept of a file is used only while it is unchanged."""

import hashlib
import json
import os
import random
import time

import pytest

from fullshard.state.storage import content_of

LARGE = (64 << 20) * 2 + 12345  # blocks that several threads hash, and a rest
KEPT = 16 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fullshard" / "contents"


def sparse(path, size):
    """Make a file that reads as zeros and takes no room."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


def edit(path, place, value=b"\1"):
    """Write a byte into a file, and put back the time that a program can set."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(value)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_each_byte_of_a_large_model_counts(tmp_path):
    path = sparse(tmp_path / "model" / "model.safetensors", LARGE)
    seen = {content_of(path.parent)}
    drawn = random.Random(0)
    places = [0, (64 << 20) - 1, 64 << 20, LARGE - 1, *(drawn.randrange(LARGE) for _ in range(3))]
    for place in places:
        edit(path, place)
        seen.add(content_of(path.parent))
    assert len(seen) == 1 + len(places)


def test_each_file_that_a_model_is_read_from_counts(tmp_path):
    seen = set()
    for name in ("model.safetensors", "model.safetensors.index.json", "chat_template.jinja", "qwen.tiktoken"):
        (tmp_path / name).write_text(name)
        seen.add(content_of(tmp_path))
    (tmp_path / "README.md").write_text("a card")
    assert len(seen) == 4
    assert content_of(tmp_path) in seen


def test_equal_files_elsewhere_are_equal(tmp_path):
    for name in ("a", "b"):
        edit(sparse(tmp_path / name / "model.safetensors", LARGE), 1000)
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")


def test_a_digest_is_kept_until_the_file_changes(tmp_path, cache, monkeypatch):
    path = sparse(tmp_path / "model" / "model.safetensors", KEPT)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60 * 10**9)  # the file is old
    first = content_of(path.parent)
    [kept] = cache.iterdir()
    values = json.loads(kept.read_text())
    kept.write_text(json.dumps(values | {"digest": "0" * 64}))
    assert content_of(path.parent) != first  # it was taken
    edit(path, 7)
    edit(path, 7, b"\0")  # all as before but the time that no program can set
    assert content_of(path.parent) == first


def test_a_digest_of_a_file_that_was_just_written_is_not_kept(tmp_path, cache):
    path = sparse(tmp_path / "model" / "model.safetensors", KEPT)
    content_of(path.parent)
    assert not cache.exists()


def test_a_damaged_entry_and_a_cache_that_cannot_be_written_cost_time_only(tmp_path, cache, monkeypatch):
    path = sparse(tmp_path / "model" / "model.safetensors", KEPT)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60 * 10**9)
    first = content_of(path.parent)
    [kept] = cache.iterdir()
    kept.write_text("{")
    assert content_of(path.parent) == first
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    assert content_of(path.parent) == first


def test_a_single_file_is_hashed_as_ever(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b\n" * 1000)
    assert content_of(path) == f"4,000 bytes, hash {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
