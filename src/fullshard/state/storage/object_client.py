"""Requests to an object store through fsspec, with a bounded number of attempts and one-sentence errors."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fullshard.errors import StoreError

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
