"""Forks of one process are to their launcher what interpreters are, whichever process dies. Ranks are small modules."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from fullshard.core.comm.stack_probe import has_ended
from fullshard.errors import ProcessGroupError
from fullshard.program.launch import attempts, launch, local, processes
from support.processes import SOURCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' PR_SET_CHILD_SUBREAPER")

RESTARTED = "restart 1 of 3 now"


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SOURCE}")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(local, "_DRIVERS", ())
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)


def module(tmp_path, main="", imports="", more=""):
    """The command of a module with these lines: in its function of a rank, at its top, and in ``import_more``."""
    top = "import json, os, random, signal, sys, tempfile, time, uuid\nout = os.environ['OUT']\n"
    top += "open(f'{out}/imported', 'a').write(f'{os.getpid()}\\n')\n"
    rank = "rank, attempt = int(os.environ['RANK']), int(os.environ['FULLSHARD_ATTEMPT'])\n"
    body = textwrap.indent(rank + textwrap.dedent(main), "    ")
    then = textwrap.indent(textwrap.dedent(more) + "\npass", "    ")
    text = f"{top}{textwrap.dedent(imports)}\ndef import_more(arguments):\n{then}\ndef main(arguments=None):\n{body}\n"
    (tmp_path / "a_rank.py").write_text(text + "if __name__ == '__main__':\n    sys.exit(main())\n")
    return [sys.executable, "-m", "a_rank"]


def imported(tmp_path):
    """The processes that imported the module."""
    return [int(line) for line in (tmp_path / "imported").read_text().splitlines()]


def children():
    """This process's children that have not ended."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [pid for pid in map(int, file.read().split()) if not has_ended(pid)]


FACTS = """
facts = {
    "arguments": sys.argv,
    "given": arguments or sys.argv[1:],
    "path": sys.path,
    "directory": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name not in DIFFER},
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "files": sorted(os.listdir("/proc/self/fd")),
    "input": os.readlink("/proc/self/fd/0"),
    "leads its group": os.getpgid(0) == os.getpid(),
    "parent": os.getppid(),
    "collects": __import__("gc").isenabled(),
    "threads": os.listdir("/proc/self/task") == [str(os.getpid())],
}
json.dump(facts, open(f"{out}/facts{rank}", "w"))
"""
DIFFER = ("FULLSHARD_KEEP_DIR", "FULLSHARD_FAILURE_FILE", "MASTER_PORT")


def test_a_fork_finds_what_an_interpreter_finds(tmp_path, monkeypatch):
    command = [*module(tmp_path, FACTS, f"DIFFER = {DIFFER}"), "--an", "argument"]
    found, before = [], children()  # servers of tests that ran before may be among them
    for drivers in ((), (os.devnull,)):  # where there is the driver of a GPU, ranks are interpreters
        monkeypatch.setattr(local, "_DRIVERS", drivers)
        assert launch(command, nproc=2) is None
        found.append([json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(2)])
    forks, interpreters = found
    assert forks == interpreters
    assert forks[0]["parent"] == os.getpid()
    assert len(imported(tmp_path)) == 3
    assert children() == before


def test_ranks_share_no_random_numbers(tmp_path):
    main = """
        drawn = random.random(), str(uuid.uuid4()), tempfile.mktemp(), numpy.random.random(), torch.rand(1).item()
        json.dump(drawn, open(f"{out}/drawn{rank}", "w"))
    """
    imports = "import numpy, torch; random.random(); tempfile.mktemp(); uuid.uuid4()"
    assert launch(module(tmp_path, main, imports), nproc=2) is None
    one, other = (json.loads((tmp_path / f"drawn{rank}").read_text()) for rank in range(2))
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_what_was_printed_before_the_fork_is_printed_once(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert launch(module(tmp_path, "print('rank')", "print('imports')"), nproc=2) is None
    assert sorted(capfd.readouterr().out.split()) == ["imports", "rank", "rank"]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_the_signal_that_ended_a_rank_is_known(tmp_path, number):
    failure = launch(module(tmp_path, f"os.kill(os.getpid(), {int(number)})"), nproc=1)
    assert f"rank 0 was killed by signal {int(number)} ({number.name})" in failure.message
    assert failure.exit_code == 128 + number


def test_ranks_that_start_again_import_nothing_again(tmp_path, capfd):
    assert launch(module(tmp_path, "attempt or os.kill(os.getpid(), 9)"), nproc=2, max_restarts=3) is None
    assert len(imported(tmp_path)) == 1
    assert RESTARTED in capfd.readouterr().err


def test_ranks_go_on_without_the_process_they_were_forked_from_and_the_next_attempt_has_another(tmp_path, capfd):
    main = """
        if rank == 0 and attempt == 0:
            os.kill(int(open(f"{out}/imported").read()), signal.SIGKILL)
        if attempt == 0:
            time.sleep(0.2) if rank else signal.sigtimedwait([signal.SIGUSR1], 0.2)
            open(f"{out}/went_on{rank}", "w")
            rank == 1 and os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
    """
    assert launch(module(tmp_path, main), nproc=2, max_restarts=3) is None
    assert len(imported(tmp_path)) == 2
    assert (tmp_path / "went_on1").exists()
    assert "rank 1 was killed by signal 9 (SIGKILL), before the first step; " + RESTARTED in capfd.readouterr().err


@pytest.mark.parametrize("when", ["imports", "more", "forked"])
def test_the_fork_server_may_be_killed_before_there_are_ranks(tmp_path, capfd, when):
    """``forked``: the ranks are there, but the launcher has not been told of them."""
    die = "if not os.path.exists(out + '/died'): open(out + '/died', 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    late = f"def waited(*more):\n    {die}\n    return waitpid(*more)\nwaitpid, os.waitpid = os.waitpid, waited"
    lines = {"imports": {"imports": die}, "more": {"more": die}, "forked": {"imports": late}}[when]
    command = module(tmp_path, "open(f'{out}/ran', 'a').write(f'{rank} {attempt}\\n')", **lines)
    assert launch(command, nproc=2, max_restarts=3) is None
    said = "the process that imports for all ranks was killed by signal 9 (SIGKILL), before the first step; "
    assert said + RESTARTED in capfd.readouterr().err
    assert sorted((tmp_path / "ran").read_text().splitlines()) == ["0 1", "1 1"]


def test_an_error_in_the_imports_is_the_failure_and_would_come_again(tmp_path, capfd):
    failure = launch(module(tmp_path, imports="raise ImportError('no such library')"), nproc=2, max_restarts=3)
    assert "ended with exit code 1 before it could report why; see its output above." in failure.message
    assert (failure.rank, failure.exit_code, failure.may_pass) == (None, 1, False)
    assert capfd.readouterr().err.count("ImportError: no such library") == 1
    assert len(imported(tmp_path)) == 1


def test_ranks_that_cannot_all_be_forked_end(tmp_path, capfd):
    """Their standard output, a pipe, ends when the last process has ended."""
    imports = """
        real = os.fork
        def fork():
            if os.path.exists(out + "/forked2"):
                raise BlockingIOError("too many processes")
            os.path.exists(out + "/forked1") and open(out + "/forked2", "w")
            open(out + "/forked1", "w")
            return real()
        os.fork = fork
    """
    command = module(tmp_path, "open(out + '/ran', 'w')", imports)
    code = f"from fullshard.program.launch import launch; print(launch({command!r}, nproc=2).exit_code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"
    assert "BlockingIOError: too many processes" in done.stderr
    assert "fullshard: the ranks could not be forked" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("then", ["signal.pause()", "os.kill(os.getpid(), signal.SIGTERM)"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_launcher_and_all_else(tmp_path, capfd, number, then):
    """Whoever stops a job may signal all its processes."""
    command = module(tmp_path, imports=f"os.kill(os.getppid(), {int(number)}); {then}")
    before, started = children(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(command, nproc=2)
    assert time.monotonic() - started < 30
    assert "no step was being trained" in capfd.readouterr().err
    assert children() == before


def test_a_signal_for_all_processes_prints_no_traceback_of_the_one_that_forks(tmp_path, capfd):
    """Ranks have Python's handler."""
    main = """
        server = int(open(f"{out}/imported").read())
        rank or os.kill(server, signal.SIGINT)
        json.dump(signal.getsignal(signal.SIGINT) is signal.default_int_handler, open(f"{out}/default{rank}", "w"))
        while not rank and open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[0] not in "ZX":
            os.sched_yield()
    """
    assert launch(module(tmp_path, main), nproc=2) is None
    assert [json.loads((tmp_path / f"default{rank}").read_text()) for rank in range(2)] == [True, True]
    assert "Traceback" not in capfd.readouterr().err


def test_a_launcher_that_was_started_with_ignored_children_sees_how_ranks_end(tmp_path):
    command = module(tmp_path, "os._exit(7 * rank)")
    code = f"from fullshard.program.launch import launch; print(launch({command!r}, nproc=2).exit_code)"
    ignores = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", ignores, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "7\n", done.stderr


def test_imports_that_end_the_process_do_not_pass_for_success(tmp_path):
    assert launch(module(tmp_path, imports="sys.exit(0)"), nproc=2).exit_code == 1


def test_what_imports_start_does_not_hold_the_line_to_the_launcher(tmp_path):
    """It lives on when the process that forks is killed, and the launcher would wait for both."""
    imports = """
        if not os.path.exists(out + "/died"):
            open(out + "/died", "w")
            os.system(f"tail -f /dev/null >/dev/null 2>&1 & echo $! > {out}/started")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    try:
        assert launch(module(tmp_path, imports=imports), nproc=1, max_restarts=1) is None
    finally:
        os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)


def test_a_system_that_gives_nobody_orphans_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_PR_SET_CHILD_SUBREAPER", 1 << 20)  # prctl knows no such option
    with pytest.raises(
        ProcessGroupError, match=r"PR_SET_CHILD_SUBREAPER.* refused: Invalid argument\. Start .*torchrun"
    ):
        launch(module(tmp_path), nproc=2)
