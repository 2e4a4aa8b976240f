"""Hugging Face's and TRL's trainers and Lightning on fullshard's engine do what they do under DDP, on two processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity, pytest.mark.timeout(300)]


ALONE = ["two_at_once", "one_import", "one_import_with_liger", "loaded_in_parts", "one_unit_is_told"]


def cases_of(script):
    text = path_of(script).read_text()
    both = re.findall(r"^@both_versions\ndef (\w+)", text, re.MULTILINE)
    names = [f"{name}_v{version}" for name in both for version in (1, 2)]
    names += re.findall(r"^@case\ndef (\w+)", text, re.MULTILINE)
    return names + (ALONE if script == "trainer" else [])


def path_of(script):
    return Path(__file__).with_name(f"{script}_main.py")


CASES = {script: cases_of(script) for script in ("trainer", "trl", "lightning")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    @cache
    def of(script):
        if script != "trainer":
            pytest.importorskip(script)
        return run_processes(2, path_of(script), "--directory", str(tmp_path_factory.mktemp(script)), timeout_s=280)

    return of


@pytest.mark.parametrize(("script", "name"), [(script, name) for script, names in CASES.items() for name in names])
def test_as_under_ddp(results, script, name):
    assert not results(script)[name], results(script)[name]


@pytest.mark.parametrize("script", CASES)
def test_nothing_is_left_out(results, script):
    assert set(results(script)) == set(CASES[script])
