"""Fixtures of the tests of Accelerate's configuration files."""

import os

import pytest
import yaml

from fullshard.compat.accelerate_config.file import read_accelerate_file
from support.accelerate_files import VERSION_1


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    """Accelerate's launcher takes over the variables of its own process, and its plugin sets some in any test's."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)


@pytest.fixture
def read(tmp_path):
    """Reads the file that a text is, or VERSION_1 with changes."""

    def read_text(text=None, fsdp=None, **changes):
        if text is None:
            values = yaml.safe_load(VERSION_1)
            values["fsdp_config"] |= fsdp or {}
            text = yaml.safe_dump(values | changes)
        path = tmp_path / "fsdp_config.yaml"
        path.write_text(text)
        return read_accelerate_file(path)

    return read_text
