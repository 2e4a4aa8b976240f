"""The base model of an adapter, which a checkpoint names instead of holding it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.state.storage.digest import content_of
from fullshard.state.storage.rules import Name


@dataclass(frozen=True)
class Base:
    """A model whose weights are read from its own files again, and quantised again as they were."""

    name: Name  # as the run file names it: a directory, or an id on the Hub
    directory: Name  # where its files were read
    content: Name  # digest of its files
    type: Name  # format of the quantised weights, such as ``nf4``
    double_quant: bool  # whether the scales of nf4 are quantised too
    layers: tuple[Name, ...]  # names of the weights that are quantised, in the base model

    @property
    def quantisation(self) -> str:
        """The format as a model's tensors name it, such as ``nf4 (double)``."""
        return f"{self.type} (double)" if self.double_quant and self.type == "nf4" else self.type

    @property
    def facts(self) -> dict[str, str]:
        """What a run records and shows of it: name, directory, digest and quantisation."""
        plain = {"name": self.name, "directory": self.directory, "content": self.content}
        return plain | {"quantisation": self.quantisation}


def require_base(directory: Path, facts: Mapping[str, str], owner: str, remedy: str) -> None:
    """Check that a directory has the files of the base model that an adapter was trained on; any process.

    Args:
        directory: Where the base model is now.
        facts: :attr:`Base.facts` of the run.
        owner: The adapter or checkpoint, for the message.
        remedy: What the user should do, for the message.

    Raises:
        CheckpointError: It has other files, or they cannot be read.
    """
    name, expected = facts["name"], facts["content"]
    if not directory.is_dir():
        raise CheckpointError(
            f"{owner} goes with the base model {name} ({expected}), and {directory} is not there. {remedy}"
        )
    try:
        found = content_of(directory)
    except OSError as error:
        raise CheckpointError(f"The base model {directory} cannot be read: {error}.") from error
    if found != expected:
        raise CheckpointError(
            f"{owner} goes with the base model {name} ({expected}), and {directory} has other files ({found}). {remedy}"
        )
