"""Uploads to the Hugging Face Hub in a single commit: a repository is either unchanged or complete."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    logging as hub_logging,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    validate_repo_id,
)

from fullshard.errors import ConfigError, HubError
from fullshard.program.sharing.contents import File, is_of_a_model
from fullshard.version import __version__

T = TypeVar("T")

LIMIT_S = 120.0
"""Longest wait for an answer of the Hub, in seconds; huggingface_hub itself waits forever."""

AGAIN = "Run the same command again: files that have arrived are not sent again."

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


@dataclass(frozen=True)
class Upload:
    """Files to upload, and the repository they go to."""

    repo: str  # id of the repository: ``owner/name``
    files: tuple[File, ...]
    message: str  # title of the commit
    private: bool = False  # whether the repository must be private


@dataclass(frozen=True)
class Uploaded:
    """Result of an upload."""

    url: str  # page of the repository
    commit: str  # id of the repository's newest commit
    changed: bool  # False if the repository already had these files
    deleted: tuple[str, ...]  # files of an earlier model that this one does not have

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"url": self.url, "commit": self.commit, "changed": self.changed, "deleted": list(self.deleted)}


def require_repo(repo: str) -> None:
    """Check that a text is a repository id with an owner.

    Raises:
        ConfigError: It is not.
    """
    try:
        validate_repo_id(repo)
        wrong = None if _REPO.fullmatch(repo) else "it has no owner"
    except HFValidationError as error:
        wrong = " ".join(str(error).split())
    if wrong:
        raise ConfigError(f"A repository on the Hub is named owner/name, such as ada/my-t5; got {repo!r}: {wrong}.")


def upload(wanted: Upload, *, progress: bool = False) -> Uploaded:
    """Upload files to a repository in one commit; one process.

    Large files are sent first, except those that the Hub already has. The commit then refers to them, and deletes
    files of an earlier model that this one does not have. Until the Hub accepts it, the repository is unchanged.

    Raises:
        ConfigError: The repository's name is wrong, or it is public although ``private`` is set.
        HubError: There is no token, or the Hub refuses, fails or does not answer.
    """
    require_repo(wanted.repo)
    token = get_token()
    if token is None:
        raise HubError(
            f"There is no token of the Hugging Face Hub. Make one that may write at {_TOKENS_PAGE}, and set HF_TOKEN "
            "or call `hf auth login`."
        )
    with _quiet(progress=progress), _explained(wanted.repo, token):
        return _upload(wanted, HfApi(token=token, library_name="fullshard", library_version=__version__))


def _upload(wanted: Upload, api: HfApi) -> Uploaded:
    before = _asked(lambda: _find_or_create(wanted, api))
    if wanted.private and not before.private:
        raise ConfigError(
            f"{wanted.repo} exists and is public, but it must be private. Make it private in its settings on the Hub, "
            "or choose another name."
        )
    names = {file.name for file in wanted.files}
    there = [one.rfilename for one in before.siblings or ()]
    deleted = sorted(name for name in there if is_of_a_model(name) and name not in names)
    operations: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in deleted]
    operations += [CommitOperationAdd(file.name, file.content) for file in wanted.files]
    done = _asked(
        # With its parent given, the Hub refuses the commit if somebody else committed in between.
        lambda: api.create_commit(wanted.repo, operations, commit_message=wanted.message, parent_commit=before.sha)
    )
    changed = done.oid != before.sha
    return Uploaded(f"{api.endpoint}/{wanted.repo}", done.oid, changed, tuple(deleted))


def _find_or_create(wanted: Upload, api: HfApi) -> Any:
    try:
        return api.model_info(wanted.repo, timeout=LIMIT_S)
    except HfHubHTTPError as error:
        if error.response.status_code != 404 or not isinstance(error, RepositoryNotFoundError):
            raise
    api.create_repo(wanted.repo, private=wanted.private or None, exist_ok=True)
    return api.model_info(wanted.repo, timeout=LIMIT_S)


def _asked(call: Callable[[], T]) -> T:
    """Call ``huggingface_hub`` with the time limit; after a refused connection it creates a session without one."""
    get_session().timeout = LIMIT_S
    return call()


@contextmanager
def _quiet(*, progress: bool) -> Iterator[None]:
    """Suppress the library's own output: it contains upload addresses, and no remedy."""
    level, drew = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.CRITICAL)
    if not progress:
        disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)
        if drew:
            enable_progress_bars()


@contextmanager
def _explained(repo: str, token: str) -> Iterator[None]:
    """Convert exceptions of ``huggingface_hub`` into a HubError of one sentence and its remedy."""
    try:
        yield
    except (ConfigError, HubError):
        raise
    except Exception as error:  # httpx, hf_xet and the library raise classes of their own, without a common base
        # Raised without the cause: its traceback may contain requests with their headers, and so the token.
        raise HubError(_explanation(error, repo).replace(token, "(the token)")) from None


def _explanation(error: Exception, repo: str) -> str:
    chain = list(_causes(error))
    refused = next((one for one in chain if isinstance(one, HfHubHTTPError)), None)
    if refused is not None:
        return _refusal(refused, repo)
    if any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return "HF_HUB_OFFLINE is set, so the Hub was not contacted. Unset it to share."
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    if kinds & {"TimeoutException", "TimeoutError"}:
        return f"The Hub at {constants.ENDPOINT} did not answer within {LIMIT_S:g} s. Check the network. {AGAIN}"
    if kinds & {"TransportError", "ConnectionError", "NetworkError"}:
        return (
            f"The connection to the Hub at {constants.ENDPOINT} failed: {_line(chain[-1])}. Check the network. {AGAIN}"
        )
    return f"{repo} could not be uploaded: {'; '.join(_line(one) for one in chain)}. {AGAIN}"


def _refusal(error: HfHubHTTPError, repo: str) -> str:
    status = error.response.status_code
    said = " ".join((error.server_message or "").split())[:200].rstrip(".")
    answer = f"HTTP {status}{f': {said}' if said else ''}"
    if status == 401:
        return (
            f"The Hub does not accept the token ({answer}). Make one that may write at {_TOKENS_PAGE}, and set "
            "HF_TOKEN, which comes before the login, or call `hf auth login`."
        )
    if status == 403:
        return (
            f"The token may not write to {repo} ({answer}). Use a token of its owner that may write, from "
            f"{_TOKENS_PAGE}, or a repository of your own."
        )
    if status == 404:
        return f"The Hub has no {repo}, or no such owner ({answer}). Correct the name, or use a token that may see it."
    if status in (409, 412):
        return f"{repo} was changed by somebody else meanwhile and is not overwritten ({answer}). {AGAIN}"
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        when = f"Wait {wait} s" if wait and wait.isdigit() else "Wait some minutes"
        return f"The Hub limits the number of requests ({answer}). {when}. {AGAIN}"
    if status >= 500:
        return f"The Hub failed, and {repo} is as before ({answer}). See https://status.huggingface.co. {AGAIN}"
    return f"The Hub refused the upload to {repo} ({answer}). Correct what it names. {AGAIN}"


def _causes(error: BaseException) -> Iterable[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
