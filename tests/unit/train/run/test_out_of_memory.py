"""An allocation that is refused is answered with figures; other errors stay what they are."""

import pytest
import torch

from fullshard.core.testing import run_ranks
from fullshard.errors import MemoryLimitError
from fullshard.program.config import RunConfig
from fullshard.program.train import train
from fullshard.program.train.run import loop
from fullshard.program.train.run.record import Planned, is_out_of_memory
from support.tiny_run import settings

PLANNED = Planned({"peak_bytes": 5}, "rank 0 of 1, a table", lambda: "Settings that need less")


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_is_an_allocation_that_was_refused(error, answer):
    assert is_out_of_memory(error) is answer


def failing_run(directory, monkeypatch, error, planned=PLANNED):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(loop, "issue_step", fail)
    comm = run_ranks(1, lambda comm: comm)[0]
    return train(RunConfig.model_validate(settings(directory)), comm, planned=planned)


def test_the_answer_has_the_plan_the_measurement_and_the_cause(tmp_path, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with pytest.raises(MemoryLimitError) as caught:
        failing_run(tmp_path, monkeypatch, error)
    assert caught.value.__cause__ is error
    text = str(caught.value)
    assert text.startswith("Rank 0 of 1 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n\nmeasured")
    for part in ("gathered units, peak", "optimizer state", "planned: rank 0 of 1, a table", "Settings that need less"):
        assert part in text


def test_without_a_plan_it_names_what_needs_less_in_general(tmp_path, monkeypatch):
    with pytest.raises(MemoryLimitError, match=r"Less is needed with training\.gradient_checkpointing=true"):
        failing_run(tmp_path, monkeypatch, MemoryError(), planned=None)


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught:
        failing_run(tmp_path, monkeypatch, error)
    assert caught.value is error
