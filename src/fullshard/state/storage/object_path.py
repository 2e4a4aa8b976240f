"""Paths of objects and prefixes in an object store, with the part of pathlib's interface that is needed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.storage.object_client import request


@dataclass(frozen=True, order=True)
class ObjectPath:
    """A URL such as ``s3://bucket/run/step-00000100.3f2a``; picklable, and equal if the URLs are.

    There are no directories in an object store: a "directory" is a prefix under which there is an object.
    """

    url: str  # without a slash at the end

    def __truediv__(self, name: str | Path) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def key(self) -> str:
        """The path in the form that fsspec's file systems take."""
        return self.url.partition("://")[2]

    @property
    def name(self) -> str:
        """The last component."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last component's suffix."""
        return Path(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        """The prefix one component shorter; that of a bucket is the bucket."""
        head = self.url.rpartition("/")[0]
        return self if head.endswith("/") else ObjectPath(head)

    def resolve(self) -> ObjectPath:
        """Return self: there are no links."""
        return self

    def sizes(self) -> dict[str, int]:
        """List all objects under this prefix.

        Returns:
            Size in bytes of each, by its path relative to this one, without objects that mark directories; nothing if
            there is none.

        Raises:
            StoreError: See :func:`~fullshard.state.storage.object_client.request`.
        """
        try:
            found = request(self.url, lambda files: _fresh(files).find(self.key, detail=True))
        except FileNotFoundError:
            return {}
        # Some file systems begin their keys with a slash. One object of just this name is not under the prefix.
        prefix = self.key.strip("/") + "/"
        named = {key.lstrip("/"): facts for key, facts in found.items()}
        listed = {key[len(prefix) :]: facts["size"] for key, facts in named.items() if key.startswith(prefix)}
        # Consoles and sync tools mark a directory with an empty object "sub/", which some file systems list as "sub".
        above = {name[:end] for name in listed for end, sign in enumerate(name) if sign == "/"}
        is_mark = {name: name.endswith("/") or (name in above and not size) for name, size in listed.items()}
        return {name: size for name, size in listed.items() if name and not is_mark[name]}

    def size(self) -> int | None:
        """Return the size of the object in bytes; None if there is none.

        Raises:
            StoreError: See :func:`~fullshard.state.storage.object_client.request`.
        """
        try:
            found = request(self.url, lambda files: _fresh(files).info(self.key))
        except FileNotFoundError:
            return None
        return found["size"] if found["type"] == "file" else None

    def is_file(self) -> bool:
        """Return whether there is such an object."""
        return self.size() is not None

    def is_dir(self) -> bool:
        """Return whether there is an object under this prefix."""
        return bool(self.sizes())

    def exists(self) -> bool:
        """Return whether there is such an object, or one under this prefix."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the objects and prefixes that are one component longer, by name."""
        yield from (self / name for name in sorted({name.partition("/")[0] for name in self.sizes()}))

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Yield those of :meth:`iterdir` whose names match a pattern of one component."""
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete the object.

        Raises:
            FileNotFoundError: There is none, unless ``missing_ok``.
            StoreError: See :func:`~fullshard.state.storage.object_client.request`.
        """
        try:
            request(self.url, lambda files: files.rm_file(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise


Place = Path | ObjectPath
"""Where checkpoints are: on a disk, or in an object store."""


@dataclass(frozen=True)
class Listed:
    """The checkpoints in a directory by what their names, or the objects under them, show."""

    candidates: Sequence[Place]  # those with a checkpoint's name, complete or damaged, by step
    unfinished: Sequence[Place]  # being written, replaced or deleted, or left in that state by a killed process
    aside: Sequence[Place]  # damaged ones that were set aside


def relative(path: Place, top: Place) -> str:
    """Return the components of a path below ``top``."""
    return str(path)[len(str(top)) + 1 :]


def is_url(path: object) -> bool:
    """Return True if a path, as text or :class:`ObjectPath`, is the URL of an object store."""
    return isinstance(path, ObjectPath) or (isinstance(path, str) and "://" in path)


def as_place(path: str | Path | ObjectPath) -> Place:
    """Convert a path or URL to a place; nothing is opened.

    Raises:
        ConfigError: A URL has no bucket.
    """
    if isinstance(path, ObjectPath):
        return path
    if not is_url(path):
        return Path(path)
    protocol, _, key = str(path).partition("://")
    if not protocol or not key.strip("/"):
        raise ConfigError(f"{str(path)!r} names no place in an object store; write s3://bucket/prefix.")
    return ObjectPath(str(path).rstrip("/"))


def on_disk(path: Place) -> Path:
    """Return the path of a run or a model, which must be on a disk.

    Raises:
        CheckpointError: It is in an object store.
    """
    if isinstance(path, ObjectPath):
        raise CheckpointError(
            f"{path} is no step-… checkpoint and holds none. Of an object store only checkpoints are read; copy a run "
            "or a model to a disk first."
        )
    return path


def _fresh(files: Any) -> Any:
    """Return the file system with its cached listings dropped: another process may have changed the objects."""
    files.invalidate_cache()
    return files
