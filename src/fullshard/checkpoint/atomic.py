"""Directories that appear whole or not at all.

Three names, all in the same parent so that a rename moves no data::

    best        the whole directory, as readers know it
    best.tmp    being written; never whole, deleted when found
    best.old    the directory that `best` replaces, for the moment between two renames

A commit is: fsync everything in ``best.tmp``; rename ``best`` to ``best.old``; rename ``best.tmp`` to ``best``; delete
``best.old``. Whatever instant the process dies at, a whole directory is found under ``best`` or, between the two
renames only, under ``best.old``; :func:`recover` puts it back and clears the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fullshard.errors import CheckpointError


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Write a directory that appears under its final name only when it is whole; on one rank.

    Args:
        final: Where the directory shall be. What is there already is replaced at the end, never before.

    Yields:
        An empty directory beside ``final`` to write into.

    Raises:
        CheckpointError: The file system refused (disk full, no permission) or ``final`` is a file; it is as before.
    """
    # A link is followed: what it points to is replaced, on the disk that the user chose.
    final = final.resolve()
    temporary = _sibling(final, "tmp")
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file where a directory is to be written. Move it or choose another name.")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        recover(final)
        temporary.mkdir()
        yield temporary
        _commit(temporary, final)
    except BaseException as error:
        with contextlib.suppress(OSError):
            recover(final)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"Could not write {final}: {error}. What was there before is untouched; free space or mend the "
                "permissions of its parent directory, then save again."
            ) from error
        raise


def recover(final: Path) -> None:
    """Bring back what a killed writer left under the name ``.old``, and clear its leftovers; on one rank.

    Args:
        final: The final name that was given to :func:`atomic_directory`. Nothing there and no leftovers is fine.

    Raises:
        OSError: The file system refused.
    """
    final = final.resolve()
    old = _sibling(final, "old")
    if old.exists():
        if final.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, final)
            _fsync(final.parent)
    temporary = _sibling(final, "tmp")
    if temporary.exists():
        shutil.rmtree(temporary)


def publish(source: Path, target: Path, *, last: str) -> None:
    """Place the files of one directory in another that holds other files too; on one rank.

    Each file becomes a hard link (a copy where the file system has no links). ``last`` is taken away first and placed
    last, so a reader that needs it finds all the files that belong to it, or none of it.

    Args:
        source: Directory of plain files, already whole on disk.
        target: Directory that exists.
        last: Name of the file of ``source`` without which the others are of no use: the weights.

    Raises:
        CheckpointError: The file system refused; ``source`` is still whole.
    """
    try:
        (target / last).unlink(missing_ok=True)
        names = sorted(path.name for path in source.iterdir() if path.is_file() and path.name != last)
        for name in [*names, last]:
            temporary = target / f"{name}.tmp"
            temporary.unlink(missing_ok=True)
            try:
                os.link(source / name, temporary)
            except OSError:
                # FAT and some network file systems have no hard links.
                shutil.copyfile(source / name, temporary)
                _fsync(temporary)
            os.replace(temporary, target / name)
        _fsync(target)
    except OSError as error:
        raise CheckpointError(f"Could not place {source} in {target}: {error}. {source} is whole; use that.") from error


def write_text(path: Path, text: str) -> None:
    """Replace a small text file whole (temporary file, fsync, rename); on one rank.

    Args:
        path: File to write; its directory exists.
        text: The whole content, written as UTF-8.

    Raises:
        CheckpointError: The file system refused; the old file is untouched.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"Could not write {path}: {error}.") from error


def _sibling(final: Path, suffix: str) -> Path:
    return final.with_name(f"{final.name}.{suffix}")


def _commit(temporary: Path, final: Path) -> None:
    """Make ``temporary`` durable and give it the final name."""
    for directory, _, files in os.walk(temporary, topdown=False):
        for name in files:
            _fsync(Path(directory, name))
        _fsync(Path(directory))
    old = _sibling(final, "old")
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    _fsync(final.parent)
    # The new directory is committed: what cannot be deleted now is no failure, the next writer tries again.
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Have the kernel put a file's bytes, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
