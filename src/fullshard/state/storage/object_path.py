"""Paths of objects and prefixes in an object store, and requests to it through fsspec.

Paths have the part of the interface of pathlib that is needed; requests a bounded number of attempts and one-sentence
errors.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fullshard.errors import CheckpointError, ConfigError, StoreError

T = TypeVar("T")

PART_BYTES = 64 << 20
"""Size of one part of an upload, which a writer holds in memory until it is sent."""

ATTEMPTS = 4
"""Attempts for a request whose failure may be temporary."""

FIRST_WAIT_SECONDS = 0.5
"""Wait before the second attempt; each further one is twice as long."""

_S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 3}}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS, "file": {"auto_mkdir": True}}
"""Without these, an S3 host that does not answer blocks each request for a minute, five times five times."""

_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "DefaultCredentialsError")
_PASSING = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "requests", "urllib3", "fsspec")
"""Client modules whose errors come from the network or the server, not from a mistake in a call."""


def file_system(url: str) -> Any:
    """Return the fsspec file system of a URL; one for each protocol and process, shared by its threads.

    Raises:
        StoreError: There is no package for the protocol.
    """
    # Keyed by process, because a connection does not survive a fork. fsspec's own cache is per thread, and our threads
    # are created for each save.
    return _file_system(url.partition("://")[0], os.getpid())


@functools.lru_cache(maxsize=16)
def _file_system(protocol: str, _process: int) -> Any:
    fsspec = importlib.import_module("fsspec")
    own = fsspec.config.conf.get(protocol, {})
    options = {name: value for name, value in _OPTIONS.get(protocol, {}).items() if name not in own}
    try:
        return fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        package = _EXTRAS.get(protocol)
        remedy = "pip install 'fullshard[s3]'" if package == "s3fs" else f"pip install {package}"
        remedy = "correct the URL, or install the package that opens it" if package is None else remedy
        raise StoreError(
            f"{protocol}:// cannot be opened: {str(error).rstrip('.')}. Object stores need fsspec's package for their "
            f"protocol: {remedy}."
        ) from error


def request(url: str, action: Callable[[Any], T]) -> T:
    """Run ``action(file_system)``; repeat it after failures that may be temporary; any rank.

    Args:
        url: The object, for the message.
        action: A request that may be repeated.

    Raises:
        FileNotFoundError: There is no such object, or no such bucket.
        FileExistsError: There is one already, and the request was to make it.
        StoreError: Credentials are missing, access is refused, or the store did not answer any attempt.
    """
    files = file_system(url)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action(files)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            problem = refusal(url, error, attempt)
            if problem is not None:
                raise problem from error
        time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def put(url: str, content: bytes, *, mode: str = "overwrite") -> None:
    """Put an object, which appears complete or not at all; any rank.

    Args:
        url: The object.
        content: All bytes of it.
        mode: ``create`` if there must be none yet.

    Raises:
        FileExistsError: There is one already, and the mode is ``create``.
        StoreError: See :func:`request`; also if there is no such bucket.
    """
    try:
        request(url, lambda files: files.pipe_file(url.partition("://")[2], content, mode=mode))
    except FileNotFoundError as error:
        raise no_bucket(url, error) from error


def no_bucket(url: str, error: Exception) -> StoreError:
    """Return the error for an object that cannot be put because its bucket does not exist."""
    return StoreError(f"{url} cannot be written: {_short(error)}. The bucket must exist; make it, or correct the URL.")


def refusal(url: str, error: Exception, attempt: int) -> StoreError | None:
    """Return the error to raise for a failed request; None if the request may be repeated.

    Raises:
        Exception: ``error`` itself, if it was caused by a mistake in the call rather than by the store.
    """
    if isinstance(error, StoreError):
        return error
    kind, text = type(error), _short(error)
    if kind.__name__ in _CREDENTIALS:
        return StoreError(
            f"There are no credentials for {url}: {text}. Set them where the store's own tools look for them (for S3: "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or the machine's role), on every rank's machine."
        )
    if isinstance(error, PermissionError):
        return StoreError(
            f"The store refuses access to {url} (403): {text}. Checkpoints need the rights to list, read, write and "
            "delete under this prefix."
        )
    if not isinstance(error, OSError) and kind.__module__.split(".")[0] not in _PASSING:
        raise error
    if attempt < ATTEMPTS:
        return None
    return StoreError(
        f"{url} could not be reached in {attempt} attempts: {kind.__name__}: {text}. Earlier checkpoints there are "
        "unchanged. Check the network and the store's state, then start again."
    )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else f"{text[:299]}…"


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
            StoreError: See :func:`~fullshard.state.storage.object_path.request`.
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
            StoreError: See :func:`~fullshard.state.storage.object_path.request`.
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
            StoreError: See :func:`~fullshard.state.storage.object_path.request`.
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
