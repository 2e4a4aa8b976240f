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
from collections.abc import Iterator, Sequence
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
                f"Could not write {final}: {error}. What was there before is untouched; free space or mend the "
                "permissions of its parent directory, then save again."
            ) from error
        raise


def recover(final: Path) -> None:
    """Bring back what a killed writer left under the name ``.old``, and clear its leftovers; on one rank.

    Args:
        final: The final name, of :func:`atomic_directory` with links followed. Nothing there and no leftovers is fine.

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
    """Delete a directory; where it is a link to one, that link only: what it points to was put there by the user.

    Raises:
        OSError: The file system refused.
    """
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)


def publish(source: Path, target: Path, *, entrances: Sequence[str], parts: str) -> None:
    """Place the files of one directory in another that holds other files too; on one rank.

    Each file becomes a hard link (a copy where the file system has no links). First the entrances that ``target`` has
    are taken away, and the parts that belonged to them; the entrance of ``source`` is placed last. So a reader finds an
    entrance with all the files that belong to it, or no entrance.

    Args:
        source: Directory of plain files, already whole on disk.
        target: Directory that exists.
        entrances: Names of files one of which ``source`` has, and without which its others are of no use.
        parts: Pattern of the names of files that are of no use without an entrance.

    Raises:
        CheckpointError: The file system refused; ``source`` is still whole.
    """
    try:
        # A killed call may have left parts of a third model, also under their temporary names.
        stale = [path for pattern in (parts, f"{parts}.tmp") for path in sorted(target.glob(pattern))]
        for path in [*(target / name for name in entrances), *stale]:
            path.unlink(missing_ok=True)
        names = sorted(path.name for path in source.iterdir() if path.is_file())
        for name in sorted(names, key=lambda name: name in entrances):
            if name in entrances:
                fsync(target)  # the others' names are on the disk before it is
            _place(source / name, target / name)
        fsync(target)
    except OSError as error:
        raise CheckpointError(f"Could not place {source} in {target}: {error}. {source} is whole; use that.") from error


def _place(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, at once."""
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
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"Could not write {path}: {error}.") from error


def sibling(final: Path, suffix: str) -> Path:
    """The name beside ``final`` of what is being written (``tmp``) or replaced (``old``)."""
    return final.with_name(f"{final.name}.{suffix}")


def commit(temporary: Path, final: Path) -> None:
    """Make ``temporary`` durable and give it the final name."""
    for directory, _, files in os.walk(temporary, topdown=False):
        for name in files:
            fsync(Path(directory, name))
        fsync(Path(directory))
    old = sibling(final, "old")
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    fsync(final.parent)
    # The new directory is committed: what cannot be deleted now is no failure, the next writer tries again.
    with contextlib.suppress(OSError):
        delete(old)


def fsync(path: Path) -> None:
    """Have the kernel put a file's bytes, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
