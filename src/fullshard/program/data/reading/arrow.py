"""Tables in Arrow format: Parquet files, and datasets on disk or on the Hub."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fullshard.errors import DataError
from fullshard.program.data.reading.row import Row, RowReader
from fullshard.program.data.reading.text_file import is_parquet, require_no_other_kind, unreadable

_SAVED_MARKS = ("state.json", "dataset_dict.json")
"""Files that save_to_disk writes for one split and for several splits."""

_Names = list[str] | Mapping[str, Any]
"""Names of the classes of a column, or of the columns inside of it."""


class ParquetFile(RowReader):
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def columns(self) -> list[str]:
        """Return the names of the file's columns."""
        return list(self._file.schema_arrow.names)

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield rows with only the wanted columns, numbered from 1."""
        # What ``datasets`` recorded when it wrote the file.
        recorded = json.loads((self._file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
        names = _class_names(recorded.get("info", {}).get("features", {}))
        number = 0
        try:
            for batch in self._file.iter_batches(columns=list(wanted)):
                for cells in batch.to_pylist():
                    number += 1
                    yield Row(number, _named(cells, names))
        except (OSError, ValueError) as error:
            raise unreadable(self._path, error) from error

    @cached_property
    def _file(self) -> Any:
        parquet = _library("pyarrow.parquet", "pyarrow", f"{self._path} is a Parquet file")
        if not is_parquet(self._path):
            require_no_other_kind(self._path)
        try:
            return parquet.ParquetFile(self._path)
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these two
            raise unreadable(self._path, error) from error


class DatasetRows(RowReader):
    """One split of a dataset of the ``datasets`` library."""

    def __init__(self, where: str, dataset: Any, files: Sequence[Path] = ()) -> None:
        """Read ``dataset``; ``files`` are those that a user wrote and may have changed since."""
        super().__init__(where)
        self._dataset, self._files = dataset, files

    def columns(self) -> list[str]:
        """Return the names of the dataset's columns."""
        return list(self._dataset.column_names)

    @property
    def fingerprint(self) -> list[str]:
        """The library's hash of the rows and their transformations, and the content of the files on disk."""
        try:
            # Imported here: a launcher looks at columns without torch.
            content_of = importlib.import_module("fullshard.state.storage").content_of
            return [str(self._dataset._fingerprint), *map(content_of, self._files)]
        except OSError as error:
            raise unreadable(self._files[0], error) from error

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield rows with only the wanted columns, numbered from 1, with the names of class labels."""
        chosen = self._dataset.with_format(None).select_columns(list(wanted))
        names = _class_names(chosen.features.to_dict())
        for number, cells in enumerate(chosen, start=1):
            yield Row(number, _named(cells, names))


def open_dataset(name: str, config_name: str | None, split: str) -> DatasetRows:
    """Open one split of a dataset.

    Args:
        name: A directory written by ``save_to_disk``, or an id on the Hub.
        config_name: The dataset's configuration on the Hub; None: its only one.
        split: Name of the split. A directory of a dataset without splits has only ``train``.

    Raises:
        DataError: There is no such dataset or split, or it cannot be read.
    """
    library = _library("datasets", "datasets", f"data.dataset_name is {name!r}")
    directory = Path(name).expanduser()
    if directory.is_dir():
        if config_name is not None:
            raise DataError(
                f"data.dataset_config_name: {config_name!r} applies to datasets on the Hub, and {directory} is a local "
                "directory; leave it out."
            )
        found = _from_disk(library, directory, split)
        files = [Path(one["filename"]) for one in found.cache_files]
        return DatasetRows(f"{directory} ({split})", found, files)
    if directory.is_absolute() or name.startswith((".", "~")):
        raise DataError(f"data.dataset_name: there is no directory {directory}.")
    call = ", ".join([repr(name), *([repr(config_name)] if config_name else []), f"split={split!r}"])
    try:
        dataset = library.load_dataset(name, config_name, split=split)
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.dataset_name: {name!r} is not a local directory ({directory.absolute()}), and "
            f"datasets.load_dataset({call}) failed with {type(error).__name__}: {error}\n"
            "Check the id, data.dataset_config_name, the splits and the network connection. Without a network, save "
            "the dataset elsewhere with save_to_disk and give that directory."
        ) from error
    return DatasetRows(f"{name} ({split})", dataset)


def _from_disk(library: Any, directory: Path, split: str) -> Any:
    """Load one split of a directory written by save_to_disk."""
    if not any((directory / mark).is_file() for mark in _SAVED_MARKS):
        raise DataError(
            f"data.dataset_name: the directory {directory} was not written by datasets' save_to_disk: it has neither "
            f"{' nor '.join(_SAVED_MARKS)}. Give data.train_file for a file in it."
        )
    try:
        loaded = library.load_from_disk(str(directory))
    except (OSError, ValueError) as error:
        raise unreadable(directory, error) from error
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    if split not in splits:
        listed = ", ".join(map(repr, splits))
        raise DataError(
            f"data.dataset_name: {directory} has no split {split!r}. Its splits: {listed}. Set data.train_split or "
            "data.validation_split to one of them, or hold rows out with data.validation_fraction."
        )
    return splits[split]


def _class_names(features: Mapping[str, Any]) -> dict[str, _Names]:
    """Return the names of the classes of columns, or of keys of objects, from features as ``datasets`` writes them."""
    found: dict[str, _Names] = {}
    for name, feature in features.items():
        while isinstance(feature, dict) and isinstance(feature.get("_type"), str) and "feature" in feature:
            feature = feature["feature"]  # a list of classes
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            found[name] = feature["names"]
        elif isinstance(feature, dict) and (inner := _class_names(feature)):
            found[name] = inner
    return found


def _named(cells: Mapping[str, object], names: Mapping[str, _Names]) -> dict[str, object]:
    """Replace class numbers in the cells by class names."""
    return {name: _class_name(cell, names[name]) if name in names else cell for name, cell in cells.items()}


def _class_name(cell: Any, names: _Names) -> object:
    """Return a class's name; None for a row without a class, whose number is -1."""
    if isinstance(cell, list):
        return [_class_name(item, names) for item in cell]
    if isinstance(names, Mapping):
        return _named(cell, names) if isinstance(cell, Mapping) else cell
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else None


def _library(module: str, package: str, reason: str) -> Any:
    """Import an optional library."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{reason}: reading it needs {package}. Install it: pip install {package}") from error
