"""Where the device has a queue, as CUDA does: a step's numbers are read one step late, and nothing else changes."""

import copy
import sys
import threading

import pytest
import torch

from fullshard import fully_shard
from fullshard.core.comm.device import Device
from fullshard.core.testing import run_ranks
from fullshard.errors import TrainingError
from fullshard.program.train.run import loop, step as step_module
from support.interrupted_run import assert_same, metrics, run, run_until_stopped
from support.models import t5

from .test_step import batch_of, spec

pytestmark = pytest.mark.usefixtures("unmetered")

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
SAVES = {
    "training__save_strategy": "steps",
    "training__save_steps": 3,
    "training__eval_strategy": "steps",
    "training__eval_steps": 4,
}


class QueueingDevice(Device):
    """The CPU, of which it is said that reading a number waits."""

    @property
    def queues(self):
        return True


@pytest.fixture
def _queues(monkeypatch):
    for module in (loop, step_module):
        monkeypatch.setattr(module, "device_of", QueueingDevice)


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    directory = tmp_path_factory.mktemp("early")
    run(directory, **SAVES)
    return directory


@pytest.mark.usefixtures("_queues")
def test_a_run_is_the_same_run(tmp_path, early):
    run(tmp_path, **SAVES)
    assert_same(tmp_path, early)


@pytest.mark.usefixtures("_queues")
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_stop_saves_the_step_that_was_under_way_and_a_resumed_run_is_the_same(tmp_path, early, at):
    left = run_until_stopped(tmp_path, ("step", at), **SAVES)
    assert 0 <= left.step - at <= 3  # asked while the next step is under way, told by the one after, read one later
    assert [record["step"] for record in metrics(tmp_path) if record["kind"] == "step"] == list(range(1, left.step + 1))
    run(tmp_path, **SAVES)
    assert_same(tmp_path, early)


@pytest.mark.usefixtures("_queues")
def test_a_loss_that_is_not_finite_is_an_error_before_anything_is_saved(tmp_path):
    options = {"training__learning_rate": 1e30, "training__lr_scheduler_type": "constant", "training__warmup_steps": 0}
    # With this seed step 2 is not the heaviest, whose record waits for the device.
    with pytest.raises(TrainingError, match=r"Step 2: the loss is .*The weights have been updated with it"):
        run(tmp_path, seed=1, **options)
    assert not list((tmp_path / "out").glob("checkpoints/step-*"))


@pytest.mark.usefixtures("_queues")
def test_whether_to_skip_is_decided_at_once(tmp_path, early):
    run(tmp_path, training__on_nonfinite="skip", **SAVES)
    assert metrics(tmp_path) == metrics(early)


def reads_by(function, monkeypatch):
    """Names of functions of ours in which this thread read a tensor's value while ``function`` ran."""
    found, here = [], threading.get_ident()

    def recording(original):
        def read(tensor, *args, **kwargs):
            code = sys._getframe(1).f_code
            if threading.get_ident() == here and "/fullshard/" in code.co_filename:
                found.append(code.co_qualname)
            return original(tensor, *args, **kwargs)

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, recording(getattr(torch.Tensor, name)))
        function()
    return found


def test_a_late_step_reads_nothing_before_its_report(monkeypatch):
    torch.manual_seed(0)
    models = [copy.deepcopy(model) for model in [t5()] for _ in range(2)]
    read = {}

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        micro_batches = [batch_of([2 * comm.rank]), batch_of([2 * comm.rank + 1])]
        issued = []

        def issue():
            step = spec(step=len(issued) + 1)
            issued.append(step_module.issue_step(model, optimizer, micro_batches, comm, step, late=True))

        issue()
        issue()
        issued[-1].report()
        if comm.rank == 0:
            read["issue"] = reads_by(issue, monkeypatch)
            read["report"] = reads_by(issued[-1].report, monkeypatch)
        else:
            issue()

    run_ranks(2, work)
    # The engine compares ranks by numbers that are on the host on a CPU. On CUDA it compares each collective in the
    # first step only, and `read_later` reads what a side stream has copied in the step before.
    assert set(read["issue"]) <= {"Agreement.before", "Device.read_later.<locals>.read"}
    assert read["report"] == ["IssuedStep._numbers"]
