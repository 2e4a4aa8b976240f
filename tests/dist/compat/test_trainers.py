"""Hugging Face's and TRL's trainers and Lightning on fullshard's engine do what they do under DDP, on two processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes, selected

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


QUICK_V1 = {"peft_lora_resumes_v1", "gpt2_trains_v1"}
"""Of version 1 of the engine's settings, under the Trainer; the others are slow."""
SLOW_V2 = {"peft_lora_resumes_v2", "smaller_batches_v2", "train_twice_v2", "stopped_twice_in_an_epoch_v2"}


def _params(script, name):
    slow = script == "trainer" and (name in SLOW_V2 or (name.endswith("_v1") and name not in QUICK_V1))
    return pytest.param(script, name, marks=pytest.mark.slow if slow else ())


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    @cache
    def of(script):
        if script != "trainer":
            pytest.importorskip(script)
        only = ",".join(selected(request, script=script))
        folder = str(tmp_path_factory.mktemp(script))
        return run_processes(2, path_of(script), "--only", only, "--directory", folder, timeout_s=280)

    return of


@pytest.mark.parametrize(
    ("script", "name"), [_params(script, name) for script, names in CASES.items() for name in names]
)
def test_as_under_ddp(results, script, name):
    assert not results(script)[name], results(script)[name]
