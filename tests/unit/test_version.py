"""Versions of other libraries: outside of the tested range a line says so, once."""

import importlib.metadata
import subprocess
import sys

import pytest

import fullshard.version
from fullshard.version import TESTED, untested


@pytest.mark.parametrize(
    ("installed", "tested"),
    [("2.11.0", True), ("2.13.4+cpu", True), ("2.14.9", True), ("2.10.1", False), ("2.15.0a0", False), ("3.0", False)],
)
def test_a_release_counts_by_its_major_and_minor_number(monkeypatch, installed, tested):
    monkeypatch.setitem(TESTED, "torch", ("2.11", "2.14"))
    monkeypatch.setattr(fullshard.version, "version", lambda name: installed)
    line = untested("torch")
    assert (line is None) == tested
    if line is not None:
        assert f"torch {installed} (2.11 to 2.14)" in line


def test_a_library_that_is_not_installed_is_not_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(fullshard.version, "version", missing)
    assert untested(*TESTED) is None


def test_the_pinned_versions_are_tested_ones():
    assert untested(*TESTED) is None


def test_the_first_use_of_the_library_warns_once():
    code = (
        "import fullshard.version as v; v.TESTED['torch'] = ('1.0', '1.1')\n"
        "import fullshard; fullshard.fully_shard; fullshard.units"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("not tested with") == 1
    assert "(1.0 to 1.1)" in done.stderr
