"""Machines with a network, processes and memory of their own: ranks die, machines are lost, cables are pulled.

Every run ends with the bits of the undisturbed one.
"""

import os
import signal

import pytest

from support.machine_runs import ELASTIC, SETTINGS, Run
from support.namespaces import can_unshare

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_unshare(), reason="this user may not make namespaces, or there is no ip or unshare"),
]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The facts of undisturbed runs, by the number of machines."""
    found = {}

    def of(count):
        if count not in found:
            with Run(tmp_path_factory.mktemp("calm") / "run", count) as run:
                run.finish()
                found[count] = run.facts()
        return found[count]

    return of


FROM_MEMORY = "from the snapshot in memory"


@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0), (3, 2)])
def test_a_rank_that_is_killed_on_one_machine_starts_again_on_all(tmp_path, calm, count, victim):
    with Run(tmp_path / "run", count) as run:
        run.trains_past(6)
        os.kill(run.machines.processes(victim)[0], signal.SIGKILL)
        said = run.finish()
        assert f"rank {victim} was killed by signal 9 (SIGKILL)" in said[victim]
        assert FROM_MEMORY in said[0]
        assert run.facts() == calm(count)


def test_resume_never_holds_for_the_first_attempt_on_all_machines(tmp_path, calm):
    saves = {"resume": "never", "training__save_strategy": "steps", "training__save_steps": 5}
    with Run(tmp_path / "run", 2, **saves) as run:
        run.trains_past(12)
        os.kill(run.machines.processes(1)[0], signal.SIGKILL)
        said = run.finish()
        assert "resuming after step" in said[0]
        assert run.facts() == calm(2)


def test_a_cut_shorter_than_the_limit_ends_nothing(tmp_path, calm):
    with Run(tmp_path / "run", 2) as run:
        run.trains_past(6)
        run.machines.cut(1)
        run.until(lambda: all("does not answer" in run.machines.said(number) for number in (0, 1)))
        run.machines.mend(1)
        said = run.finish()
        assert not any("restart" in text for text in said)
        assert run.facts() == calm(2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_cut_longer_than_the_limit_ends_the_attempt_on_all_machines_which_meet_again(tmp_path, calm, victim):
    with Run(tmp_path / "run", 2) as run:
        run.trains_past(6)
        run.machines.cut(victim)
        for number in (0, 1):
            cause = f"machine {1 - number} (node{1 - number}) has sent no heartbeat for 2"
            run.until(lambda n=number, cause=cause: cause in run.machines.said(n))
        run.machines.mend(victim)
        said = run.finish()
        assert all("cut off from the network" in text and "restart 1 of 3" in text for text in said)
        assert FROM_MEMORY in said[0]
        assert run.facts() == calm(2)


SMOOTH = {
    "model": {"config": SETTINGS["model"]["config"] | {"dropout_rate": 0.0}, "tokenizer": {"vocab_size": 60}},
    "training__learning_rate": 1e-4,
}
"""Without dropout, whose numbers are drawn by each rank."""
ALONE = "the run began on 2 ranks: on 1 a step of 4 rows is 4 micro-batches of 1 on each"


def assert_close(steps, right):
    for key in ("step", "tokens"):
        assert [one[key] for one in steps] == [one[key] for one in right]
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(steps, right, strict=True)) < 1e-5


def test_a_machine_that_returns_is_taken_in_after_a_save(tmp_path):
    long = SMOOTH | {"training__num_train_epochs": 100, "training__save_strategy": "steps", "training__save_steps": 20}
    with Run(tmp_path / "calm", 2, **long) as run:
        run.finish()
        right = run.steps()
    with Run(tmp_path / "run", 2, ELASTIC, **long) as run:
        run.trains_past(25)
        run.machines.lose(1)
        run.until(lambda: ALONE in run.machines.said(0))
        run.start(1)
        said = run.finish()
        assert "another machine has arrived; it is taken in after the next checkpoint" in said[0]
        assert "2 ranks" in said[0].rpartition(ALONE)[2]
        assert_close(run.steps(), right)
