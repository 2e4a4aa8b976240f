"""The run file's ``data.sets`` section: the data sets of a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fullshard.program.config.section import ConfigSection, Fraction

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")]
"""Name of a set: part of keys and of file names."""


class SetConfig(ConfigSection):
    """One data set of a mixture, under a name of your choice; options left out are taken from `data`."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """This set's share of the rows of an epoch, relative to the sum of all weights. Set it for all sets or for none:
    without weights each row of each set comes once. An epoch has as many rows as all sets together."""
    train_file: Path | None = None
    """As data.train_file. Set exactly one of train_file and dataset_name."""
    validation_file: Path | None = None
    """As data.validation_file."""
    validation_fraction: Fraction | None = None
    """As data.validation_fraction."""
    dataset_name: str | None = None
    """As data.dataset_name."""
    dataset_config_name: str | None = None
    """As data.dataset_config_name."""
    train_split: str | None = None
    """As data.train_split."""
    validation_split: str | None = None
    """As data.validation_split."""
    format: str | None = None
    """As data.format."""
    delimiter: str | None = None
    """As data.delimiter."""
    quoting: str | None = None
    """As data.quoting."""
    source_column: str | None = None
    """As data.source_column."""
    target_column: str | None = None
    """As data.target_column."""
    template: str | None = None
    """As data.template."""
    source_prefix: str | None = None
    """As data.source_prefix."""
    weight_column: str | None = None
    """As data.weight_column."""
