"""Machines with a network, processes and memory of their own: ranks die, machines are lost, one never comes.

A run that restarts ends with the bits of the undisturbed one.
"""

import os
import signal
import subprocess

import pytest

from support.machine_runs import Run, by_launch, by_torchrun
from support.namespaces import can_unshare
from support.processes import SOURCE, free_port

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not can_unshare(), reason="this user may not make namespaces, or there is no ip or unshare"),
]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The facts of an undisturbed run."""
    with Run(tmp_path_factory.mktemp("calm") / "run", restarts=0) as run:
        run.finish()
        return run.facts()


@pytest.fixture(params=[by_launch, by_torchrun])
def start(request):
    return request.param


def test_a_rank_that_is_killed_starts_again_on_both_machines(tmp_path, calm, start):
    with Run(tmp_path / "run", start) as run:
        run.trains_past(6)
        os.kill(run.machines.processes(1)[0], signal.SIGKILL)
        said = run.finish()
        assert "exitcode: -9" in said[1]
        assert "resuming after step" in said[0]
        assert run.facts() == calm


def test_a_machine_that_is_lost_and_started_again_continues_the_run(tmp_path, calm, start):
    with Run(tmp_path / "run", start) as run:
        run.trains_past(6)
        run.machines.lose(1)
        run.start(1)
        said = run.finish()
        assert "resuming after step" in said[0]
        assert run.facts() == calm


def test_without_restarts_a_killed_rank_ends_the_run_on_both_machines_and_the_same_commands_resume_it(
    tmp_path, calm, start
):
    with Run(tmp_path / "run", start, restarts=0) as run:
        run.trains_past(6)
        os.kill(run.machines.processes(1)[0], signal.SIGKILL)
        codes, said = run.codes(), run.said()
        assert codes == ([7, 137] if start is by_launch else [1, 1]), said
        assert "rank 1" in said[0]
        for number in range(2):
            run.start(number)
        run.finish()
        assert run.facts() == calm


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_machine_that_never_comes_is_told_with_the_number_that_came(start, restarts):
    command = start(0, restarts)
    place = f"127.0.0.1:{free_port()}"
    command = [one.replace("10.213.77.1:29500", place) for one in command]
    if start is by_launch:
        command += ["--rdzv_timeout", "2"]
    else:
        command.append("--rdzv-conf=timeout=2,join_timeout=2")
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([*command, __file__], env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == (7 if start is by_launch else 1)
    if restarts and start is by_torchrun:
        assert "RendezvousTimeoutError" in ended.stderr  # torch's message has no number
    else:
        assert "1/2 clients joined" in ended.stderr or "1 of 2 machines were there" in ended.stderr
    if start is by_launch:
        assert place in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
