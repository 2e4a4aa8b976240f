"""A cache on disk, whose entries are built atomically by one process under a lock."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.errors import DataError
from fullshard.program.data.examples import Example
from fullshard.program.data.tokenizing.ragged import ID_DTYPE, OFFSET_DTYPE, Ragged, offsets_of
from fullshard.program.data.tokenizing.tokenize import (
    Counters,
    LengthStats,
    TokenizedSet,
    TokenizeSpec,
    encode_chunks,
    weights_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTENTS_NAME = "contents.json"
"""Name of the file in an entry with the sizes of its files and the values of its builder; written last."""

_WEIGHTS_NAME = "weights.f64"
"""Name of the file in an entry with each row's weight; missing if all are 1."""


def cached(
    directory: Path, key: str, build: Callable[[Path], dict[str, Any]], waiting: Callable[[], None] = lambda: None
) -> tuple[Path, dict[str, Any]]:
    """Return an entry, building it if needed. Any number of processes and threads may call it at once.

    One of them builds the entry, under a lock on a file next to it, in a temporary directory that is renamed when it is
    complete; the others wait. A killed builder leaves a temporary directory, which the next one deletes, and no entry.
    An entry whose files have changed in size is built again.

    Args:
        directory: The cache; created if missing.
        key: Name of the entry, a valid file name.
        build: Writes the entry's files into the directory it receives; returns JSON values to store with them.
        waiting: Called when another process or thread is building the entry.

    Returns:
        The entry's directory, and the stored values.

    Raises:
        DataError: The file system reported an error.
    """
    entry = directory / key
    try:
        kept = _read(entry)
        if kept is not None:
            return entry, kept
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{key}.lock", waiting):
            kept = _read(entry)
            if kept is None:
                kept = _build(entry, build)
            return entry, kept
    except OSError as error:
        raise DataError(
            f"The cache of tokens in {directory} cannot be used: {error}. Set data.cache_dir to a writable directory."
        ) from error


def tokenize_to(
    directory: Path,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    spec: TokenizeSpec,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the ids of examples to files, a few thousand rows at a time; for ``build`` of :func:`cached`.

    Arguments and errors as for :func:`~fullshard.program.data.tokenizing.tokenize.tokenize`. Returns the length
    statistics as JSON values for :func:`open_tokens`.
    """
    counters = Counters(spec)
    files: dict[str, Any] = {}
    lengths: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        for rows in encode_chunks(examples, tokenizer, spec, progress):
            counters.add(rows)
            for name, part in (("source", rows.source.ids), ("target", rows.target.ids), ("spans", rows.spans)):
                if part is None:
                    continue
                if name not in files:
                    files[name] = stack.enter_context((directory / f"{name}.ids").open("wb"))
                part.ids.tofile(files[name])
                lengths.setdefault(name, []).append(part.lengths)
    for name, parts in lengths.items():
        offsets_of(np.concatenate(parts)).tofile(directory / f"{name}.offsets")
    if (weights := weights_of(examples)) is not None:
        weights.tofile(directory / _WEIGHTS_NAME)
    return counters.kept()


def open_tokens(directory: Path, stats: dict[str, Any]) -> TokenizedSet:
    """Memory-map the files that :func:`tokenize_to` wrote, with the statistics that it returned.

    Raises:
        DataError: The files cannot be mapped.
    """
    try:
        sides = {name: _map_rows(directory, name) for name in ("source", "target")}
        spans = _map_rows(directory, "spans") if (directory / "spans.offsets").exists() else None
        file = directory / _WEIGHTS_NAME
        weights = np.memmap(file, np.float64, mode="r") if file.exists() else None
    except (OSError, ValueError) as error:
        raise DataError(f"The tokens in {directory} cannot be read: {error}. Delete that directory.") from error
    source, target = (LengthStats(**stats[name]) for name in ("source", "target"))
    return TokenizedSet(sides["source"], sides["target"], source, target, spans=spans, weights=weights)


def _map_rows(directory: Path, name: str) -> Ragged:
    offsets = np.fromfile(directory / f"{name}.offsets", OFFSET_DTYPE)
    if offsets[-1] == 0:
        return Ragged(np.zeros(0, ID_DTYPE), offsets)
    return Ragged(np.memmap(directory / f"{name}.ids", ID_DTYPE, mode="r"), offsets)


def _read(entry: Path) -> dict[str, Any] | None:
    """Return the values stored with a complete entry, else None."""
    try:
        contents = json.loads((entry / CONTENTS_NAME).read_text(encoding="utf-8"))
        sizes = {name: (entry / name).stat().st_size for name in contents["sizes"]}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return contents["kept"] if sizes == contents["sizes"] else None


def _build(entry: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Build a missing or damaged entry; the caller holds its lock."""
    for leftover in entry.parent.glob(f"{entry.name}.building-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=f"{entry.name}.building-") as temporary:
        made = Path(temporary, "entry")
        made.mkdir()
        kept = build(made)
        sizes = {path.name: path.stat().st_size for path in made.iterdir()}
        text = json.dumps({"sizes": sizes, "kept": kept})
        (made / CONTENTS_NAME).write_text(text, encoding="utf-8")
        if entry.exists():
            shutil.rmtree(entry)
        made.rename(entry)
    return json.loads(text)["kept"]


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock on a file against other processes and threads; the kernel releases it if the process dies.

    The holder writes its run's identity into the file: ``waiting`` is not called for another rank of the same run.
    """
    with path.open("a+") as file:
        # The rendezvous address, which only the ranks of one run share.
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        run = address if "RANK" in os.environ else None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            if run is None or file.read() not in (run, ""):  # empty: the holder has not written yet
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(run or "no rank")
        file.flush()
        yield
        file.truncate(0)
