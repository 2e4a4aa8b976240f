"""Ranks compare each collective of the first pass, and one checksum a step after that."""

from types import SimpleNamespace

import pytest
import torch

from fullshard.core.comm import Mesh, SoloComm, device_of
from fullshard.core.comm.device import Device
from fullshard.core.engine.step.agreement import Agreement
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import MismatchError

NAMES = ["(root)", "blocks.0", "blocks.1"]


def agreement_of(comm):
    return Agreement(Mesh(comm, SoloComm(comm.device)), device_of(comm.device), NAMES)


def messages(work, size=2):
    """The collectives that ``work(agreement)`` issues, on rank 0."""

    def of_rank(comm):
        ledger = RecordingComm(comm)
        agreement = agreement_of(ledger)
        agreement.pass_is_over()
        work(agreement)
        return list(ledger.names)

    return run_ranks(size, of_rank)[0]


def test_in_the_first_pass_every_rank_is_refused_before_a_collective_that_differs():
    def work(comm):
        agreement = agreement_of(comm)
        agreement.before("all-gather", 1)
        with pytest.raises(MismatchError, match=r"rank 0: all-gather of unit blocks.0; .*rank 2: reduce-scatter"):
            agreement.before("reduce-scatter" if comm.rank == 2 else "all-gather", 1)

    run_ranks(3, work)


def test_after_the_first_pass_nothing_is_sent_before_a_collective():
    assert messages(lambda agreement: agreement.before("all-gather", 1)) == []


def test_a_step_is_compared_in_one_message():
    assert messages(lambda agreement: agreement.after_backward([True, True], 7)) == ["all_reduce"]


@pytest.mark.parametrize("unit", [1, 2])
def test_the_order_of_collectives_is_part_of_the_checksum(unit):
    def work(comm):
        agreement = agreement_of(comm)
        agreement.pass_is_over()
        agreement.before("all-gather", unit if comm.rank else 1)
        if unit == 1:
            assert agreement.after_backward([True], 7) is None
        else:
            with pytest.raises(MismatchError, match="different orders"):
                agreement.after_backward([True], 7)

    run_ranks(2, work)


def test_the_plans_order_is_part_of_the_checksum():
    def work(comm):
        with pytest.raises(MismatchError, match="different orders"):
            agreement_of(comm).after_backward([True], 7 + comm.rank)

    run_ranks(2, work)


def test_the_next_step_is_compared_afresh():
    def work(comm):
        agreement = agreement_of(comm)
        for step in range(3):
            agreement.before("all-gather", step)
            assert agreement.after_backward([True], step) is None
            assert not agreement.first_pass

    run_ranks(2, work)


def test_gradients_that_arrived_on_any_rank_are_known_where_one_is_missing():
    def work(comm):
        found = agreement_of(comm).after_backward([comm.rank == 0, False, True], 7)
        assert found == [True, False, True]

    run_ranks(2, work)


def test_flags_are_set_if_they_are_on_any_rank():
    def work(comm):
        flags = agreement_of(comm)
        assert flags.on_any_rank([comm.rank == 1, False]) == [True, False]

    run_ranks(3, work)
    assert messages(lambda agreement: agreement.on_any_rank([])) == []


def test_optimizers_that_step_different_parameters_are_named():
    def work(comm):
        agreement = agreement_of(comm)
        agreement.fingerprints.append({"weight": (comm.rank, ("decay",)), "bias": (0, ())})
        with pytest.raises(MismatchError, match=r"weight is in group 0 on rank 0 and in group 1 on rank 1"):
            agreement.after_backward([True], 7)

    run_ranks(2, work)


def test_with_the_debug_variable_every_pass_is_compared(monkeypatch):
    monkeypatch.setenv("FULLSHARD_DEBUG", "1")
    assert messages(lambda agreement: agreement.before("all-gather", 1)) == ["all_reduce"]


@pytest.mark.parametrize("fingerprints", [[], [{"weight": (0, ("lr",))}]])
def test_where_the_device_is_not_waited_for_the_error_tells_that_optimizers_may_differ_if_there_are_any(fingerprints):
    agreement = agreement_of(SoloComm(torch.device("cpu")))
    agreement.mesh = SimpleNamespace(device=torch.device("cuda"), rank=0)
    agreement.fingerprints = fingerprints
    with pytest.raises(MismatchError) as told:
        agreement._raise_mismatch(3)
    assert ("gave optimizers different parameters" in str(told.value)) is bool(fingerprints)


class QueueingDevice(Device):
    """The CPU, of which it is said that reading a number waits; ``waits`` has the step of each number that was read."""

    queues = True

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.step, self.waits = 0, []

    def read_later(self, work, numbers):
        read, issued = super().read_later(work, numbers), self.step

        def noted():
            if issued == self.step:  # a later step does not wait: the device has done what it reads
                self.waits.append(issued)
            return read()

        return noted


STEPS = [
    ([True, True, True], [True, True, True]),
    ([True, False, True], [True, False, True]),  # from here on the second parameter is unused
    ([True, False, True], [True, False, True]),
    ([True, False, False], [True, False, True]),  # the third is used by the other rank
    ([True, False, True], [True, False, True]),
    ([True, True, True], [True, True, True]),
]
"""Which gradients arrive in a step, on rank 0 and on rank 1."""


@pytest.mark.parametrize("possible", [True, False])
def test_gradients_that_are_always_missing_wait_for_the_device_once(possible):
    def work(comm):
        device = QueueingDevice()
        comm.host_sum = lambda: (lambda tensor: comm.all_reduce(tensor).wait()) if possible else None
        agreement = Agreement(Mesh(comm, SoloComm(comm.device)), device, NAMES)
        agreement.pass_is_over()
        for step, by_rank in enumerate(STEPS):
            device.step = step
            expected = [any(flags) for flags in zip(*by_rank, strict=True)]
            found = agreement.after_backward(by_rank[comm.rank], step)
            assert found == (None if all(by_rank[comm.rank]) else expected), step
        return device.waits

    waits = [1] if possible else [1, 2, 3, 4]
    assert run_ranks(2, work) == [waits, waits]


def test_a_rank_that_cannot_add_up_on_the_host_makes_all_wait_for_their_devices():
    def work(comm):
        comm.host_sum = lambda: None if comm.rank else lambda tensor: None
        return Mesh(comm, SoloComm(comm.device)).host_sum()

    assert run_ranks(2, work) == [None, None]


def test_one_rank_alone_adds_up_nothing():
    numbers = torch.tensor([1, 0])
    Mesh(SoloComm(torch.device("cpu")), SoloComm(torch.device("cpu"))).host_sum()(numbers)
    assert numbers.tolist() == [1, 0]
