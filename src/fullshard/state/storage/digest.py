"""Digests of files and model directories, of every byte; those of large files are kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.sizes import format_bytes
from fullshard.state.storage.atomic import write_text
from fullshard.user_cache import default_directory

_MODEL_FILES = ("*.safetensors", "*.bin", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_MODEL_FILES += ("*.index.json", "*config.json", "*token*.json", "*vocab*.json")

_BLOCK = 64 << 20
"""Bytes that one thread hashes; the digest of a larger file is that of its blocks' digests."""

_READ = 1 << 20
_MOST_THREADS = 16
_KEPT_FROM = 16 << 20
"""Size from which on a file's digest is kept."""

_SETTLED_NS = 2_000_000_000
"""Age of a file from which on its digest is kept: another write in the same tick leaves its times as they are."""

_SAID_AFTER_S = 2.0


def content_of(path: Path) -> str:
    """Return a digest of all bytes of a file or of a model directory's files; any process.

    Files are hashed by several threads. The digests of large ones are kept in the user's cache by path, size, inode and
    times of change, also the one that a program cannot set. What takes over 2 s is said on stderr.

    Raises:
        OSError: It cannot be read.
    """
    if path.is_dir():
        return directory_content(path, _MODEL_FILES)
    [digest] = _digests(path, [path], in_blocks=False)
    return f"{path.stat().st_size:,} bytes, hash {digest[:16]}"


def directory_content(path: Path, patterns: Sequence[str]) -> str:
    """Return a digest of all bytes of a directory's files that match ``patterns``, as :func:`content_of`.

    Raises:
        OSError: One cannot be read.
    """
    files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    sizes = [file.stat().st_size for file in files]
    digests = _digests(path, files, in_blocks=True)
    lines = [f"{f.relative_to(path)} {size} {one}" for f, size, one in zip(files, sizes, digests, strict=True)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{len(files)} files, {sum(sizes):,} bytes, sha256 {digest[:16]}"


def _digests(path: Path, files: Sequence[Path], *, in_blocks: bool) -> list[str]:
    """Return the SHA-256 of each file, or that of its blocks' digests; ``path`` is what the user knows of them."""
    found = {file: kept for file in files if (kept := _kept(file, in_blocks=in_blocks)) is not None}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(_MOST_THREADS, cores)) as pool:
        asked: dict[Path, tuple[os.stat_result, list[Future[bytes]]]] = {}
        for file in files:
            if file not in found:
                _settle(file)
                status = file.stat()
                size = status.st_size
                starts = range(0, max(size, 1), _BLOCK if in_blocks else max(size, 1))
                length = _BLOCK if in_blocks else size
                asked[file] = status, [pool.submit(_hash_of_range, file, start, length) for start in starts]
        _say_if_slow(path, asked)
        for file, (status, blocks) in asked.items():
            parts = [block.result() for block in blocks]
            found[file] = (hashlib.sha256(b"".join(parts)).digest() if in_blocks else parts[0]).hex()
            _keep(file, status, found[file], in_blocks=in_blocks)
    return [found[file] for file in files]


def _say_if_slow(path: Path, asked: dict[Path, tuple[os.stat_result, list[Future[bytes]]]]) -> None:
    blocks = [block for _, of_file in asked.values() for block in of_file]
    if wait(blocks, _SAID_AFTER_S).not_done:
        size = sum(status.st_size for status, _ in asked.values())
        print(
            f"fullshard: reading all {format_bytes(size)} of {path}, to know whether they are the same another time",
            file=sys.stderr,
            flush=True,
        )


def _hash_of_range(path: Path, start: int, length: int) -> bytes:
    digest, view = hashlib.sha256(), memoryview(bytearray(min(_READ, max(length, 1))))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length > 0 and (count := file.readinto(view[: min(length, len(view))])):
            digest.update(view[:count])
            length -= count
    return digest.digest()


# In the user's cache


def _place(path: Path, *, in_blocks: bool) -> Path:
    name = hashlib.sha256(f"{path.resolve()} {in_blocks}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return default_directory() / "contents" / f"{name}.json"


def _settle(path: Path) -> None:
    """Write what is in memory of a large file, after which a write through a mapping changes the file's times again."""
    if path.stat().st_size >= _KEPT_FROM:
        with path.open("rb") as file, suppress(OSError):  # a file system without it
            os.fsync(file.fileno())


def _stamp(status: os.stat_result) -> list[int]:
    # No program can set the time of the last change of a file's status, which each write changes too.
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _kept(path: Path, *, in_blocks: bool) -> str | None:
    """Return the file's digest if it is kept and the file was not written since."""
    status = path.stat()
    if status.st_size < _KEPT_FROM:
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):  # nothing is kept, or it is damaged
        kept = json.loads(_place(path, in_blocks=in_blocks).read_text(encoding="utf-8"))
        if kept["path"] == str(path.resolve()) and kept["stamp"] == _stamp(status):
            return str(kept["digest"])
    return None


def _keep(path: Path, before: os.stat_result, digest: str, *, in_blocks: bool) -> None:
    """Keep a digest of the bytes that a file had, unless it may have been written meanwhile or is in a moment."""
    young = time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) < _SETTLED_NS
    if before.st_size < _KEPT_FROM or young or _stamp(path.stat()) != _stamp(before):
        return
    place = _place(path, in_blocks=in_blocks)
    with suppress(OSError, CheckpointError):  # a cache that cannot be written costs time only
        place.parent.mkdir(parents=True, exist_ok=True)
        kept = {"path": str(path.resolve()), "stamp": _stamp(before), "digest": digest}
        write_text(place, json.dumps(kept) + "\n")
