"""Directories that appear complete or not at all.

Three names, all in the same parent so that a rename moves no data::

    best        the complete directory that readers open
    best.tmp    being written; never complete, deleted when found
    best.old    the directory that `best` replaces, between the two renames

A commit is: fsync everything in ``best.tmp``; rename ``best`` to ``best.old``; rename ``best.tmp`` to ``best``; delete
``best.old``. Whenever the process dies, a complete directory is found under ``best`` or, between the two renames only,
under ``best.old``; :func:`recover` puts it back and clears the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullshard.errors import CheckpointError


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Write a directory that appears under its final name only when it is complete; on one rank.

    Args:
        final: Path of the directory. An existing one is replaced at the end, never before.

    Yields:
        An empty directory next to ``final`` to write into.

    Raises:
        CheckpointError: The file system refused (disk full, no permission) or ``final`` is a file, unchanged.
    """
    # A link is followed: the directory it points to is replaced, on the disk that the user chose.
    final = final.resolve()
    temporary = sibling(final, "tmp")
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file where a directory is to be written. Move it or choose another name.")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        recover(final)
        temporary.mkdir()
        yield temporary
        commit(temporary, final)
    except BaseException as error:
        with contextlib.suppress(OSError):
            recover(final)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"Could not write {final}: {error}. Its previous content is unchanged. Free disk space or check that "
                "you can write to its parent directory, then save again."
            ) from error
        raise


def recover(final: Path) -> None:
    """Restore what a killed writer left under the name ``.old``, and delete its leftovers; on one rank.

    ``final`` is the name as in :func:`atomic_directory`, with links followed. It need not exist.

    Raises:
        OSError: The file system refused.
    """
    old = sibling(final, "old")
    if os.path.lexists(old):
        if final.exists():
            delete(old)
        else:
            os.rename(old, final)
            fsync(final.parent)
    temporary = sibling(final, "tmp")
    if os.path.lexists(temporary):
        delete(temporary)


def delete(directory: Path) -> None:
    """Delete a directory; if it is a link to one, only the link: the user owns what it points to.

    Raises:
        OSError: The file system refused.
    """
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)


def publish(source: Path, target: Path, *, entries: Sequence[str], parts: str) -> None:
    """Place the files of one directory in another that also holds other files; on one rank.

    Each file becomes a hard link (a copy if the file system has no links). An entry file is one that a reader opens
    first. Those of ``target`` are removed first, together with the parts they refer to; the entry file of ``source`` is
    placed last. A reader therefore finds an entry file with everything it refers to, or no entry file.

    Args:
        source: Directory of plain files, already complete on disk.
        target: Existing directory.
        entries: Names of entry files, of which ``source`` has one.
        parts: Name pattern of files that are of no use without an entry file.

    Raises:
        CheckpointError: The file system refused; ``source`` is still complete.
    """
    try:
        # A killed call may have left parts of yet another model, also under their temporary names.
        stale = [path for pattern in (parts, f"{parts}.tmp") for path in sorted(target.glob(pattern))]
        for path in [*(target / name for name in entries), *stale]:
            path.unlink(missing_ok=True)
        names = sorted(path.name for path in source.iterdir() if path.is_file())
        for name in sorted(names, key=lambda name: name in entries):
            if name in entries:
                fsync(target)  # the names of its parts must be on disk before the entry file's
            _place(source / name, target / name)
        fsync(target)
    except OSError as error:
        raise CheckpointError(
            f"Could not place {source} in {target}: {error}. Use {source}, which is complete."
        ) from error


def _place(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, atomically."""
    temporary = target.with_name(f"{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        # FAT and some network file systems have no hard links.
        shutil.copyfile(source, temporary)
        fsync(temporary)
    os.replace(temporary, target)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically (temporary file, fsync, rename), in UTF-8; on one rank.

    Raises:
        CheckpointError: The file system refused; the old file is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"Could not write {path}: {error}.") from error


def sibling(final: Path, suffix: str) -> Path:
    """Return the name next to ``final`` for the directory being written (``tmp``) or replaced (``old``)."""
    return final.with_name(f"{final.name}.{suffix}")


def commit(temporary: Path, final: Path) -> None:
    """Make ``temporary`` durable and rename it to ``final``."""
    # Everything reaches the disk before the rename: after a power failure the final name must never show empty files.
    for directory, _, files in os.walk(temporary, topdown=False):
        for name in files:
            fsync(Path(directory, name))
        fsync(Path(directory))
    old = sibling(final, "old")
    # Rename the previous directory aside, never delete it before the commit: a kill between the two renames must leave
    # one complete directory, which recover() finds under ``old`` (tests/dist/saving/test_kill.py).
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    fsync(final.parent)
    # The new directory is committed. Failing to delete the old one is no error: the next writer tries again.
    with contextlib.suppress(OSError):
        delete(old)


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a directory's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
