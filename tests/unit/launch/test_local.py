"""The launcher starts ranks, finds the first that fails, and leaves none behind.

Ranks are small Python scripts.
"""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from fullshard.errors import ProcessGroupError
from fullshard.program.launch import choose_nproc, launch, launched_elsewhere, local, ranks
from fullshard.program.launch.streams import UnreadOutputError
from support.processes import SOURCE

PRELUDE = """
import json, os, signal, sys
rank = int(os.environ["RANK"])

def fail(message, when, code, stopped=None):
    values = (rank, "ValueError", message, "trace of " + message, code, when, stopped)
    failure = dict(zip(("rank", "kind", "message", "trace", "exit_code", "time_s", "stopped"), values))
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    with open(path + ".tmp", "w") as file:
        json.dump({{"fullshard": failure}}, file)
    os.replace(path + ".tmp", path)  # as ranks do: the launcher may end this one in between
    os._exit(code)

def meet(mode):
    # Returns when one rank has called it with "r" and another with "w"; reading then ends when the writer does.
    return open("{fifo}", mode)
"""


@pytest.fixture(autouse=True)
def sources(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


def script(tmp_path, text, more=""):
    os.mkfifo(tmp_path / "fifo")
    lines = (PRELUDE + more).format(fifo=str(tmp_path / "fifo")) + textwrap.dedent(text)
    (tmp_path / "a_rank.py").write_text(lines)
    return [sys.executable, str(tmp_path / "a_rank.py")]


def ends(pid):
    """Whether a process that was killed ends: the kernel takes it down after the call that kills it has returned."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(handle, "rb"):
        return bool(select.select([handle], [], [], 10)[0])


def pids_of(tmp_path):
    """The process ids that ranks have written."""
    return [int(path.read_text()) for path in tmp_path.glob("pid*") if path.read_text()]


def test_ranks_get_torchruns_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    write = f"open('{tmp_path}/' + str(rank), 'w').write(json.dumps([os.environ[n] for n in {names}]))"
    command = script(tmp_path, write)
    assert launch([*command, "an argument"], nproc=3) is None
    rows = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    values = [json.loads(row) for row in rows]
    assert [row[:5] for row in values] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({row[5] for row in values}) == 1
    assert int(values[0][6]) == max(1, len(os.sched_getaffinity(0)) // 3)


def test_what_the_user_set_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    kept = "os.environ['OMP_NUM_THREADS'] == '5' and os.environ['GLIBC_TUNABLES'].endswith('=0')"
    assert launch(script(tmp_path, f"sys.exit(not ({kept}))"), nproc=1) is None


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_ranks_have_expandable_segments_unless_the_user_set_an_allocator_option(name, monkeypatch):
    for one in local._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(one, raising=False)
    assert local.default_variables(1)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not set(local._ALLOCATOR_VARIABLES) & local.default_variables(1).keys()


def test_the_earliest_failure_is_shown_whoever_ends_first(tmp_path):
    """Rank 2 fails because rank 0 did, but ends before it."""
    command = script(
        tmp_path,
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: fail("cause", 1.0, 7))
            ready = meet("w")
        elif rank == 2:
            meet("r")
            fail("consequence", 2.0, 8)
        signal.pause()
        """,
    )
    failure = launch(command, nproc=3)
    assert (failure.rank, failure.message, failure.exit_code) == (0, "cause", 7)
    assert failure.text() == "Rank 0 failed first:\ntrace of cause"


def test_the_others_are_ended(tmp_path):
    command = script(
        tmp_path,
        f"""
        if rank == 1:
            fail("gone", 1.0, 9)
        open(f"{tmp_path}/pid" + str(rank), "w").write(str(os.getpid()))
        signal.pause()
        """,
    )
    assert launch(command, nproc=3).exit_code == 9
    assert all(map(ends, pids_of(tmp_path)))


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    command = script(
        tmp_path,
        f"""
        import subprocess
        if rank == 1:
            meet("r")
            fail("gone", 1.0, 9)
        open("{tmp_path}/pid", "w").write(str(subprocess.Popen(["tail", "-f", "/dev/null"]).pid))
        ready = meet("w")
        signal.pause()
        """,
    )
    assert launch(command, nproc=2).exit_code == 9
    assert list(map(ends, pids_of(tmp_path))) == [True]


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "STOP_SECONDS", 0.2)
    command = script(
        tmp_path,
        """
        if rank == 1:
            meet("r")
            fail("gone", 1.0, 9)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready = meet("w")
        while True:
            signal.pause()
        """,
    )
    failure = launch(command, nproc=2)
    assert (failure.rank, failure.exit_code) == (1, 9)


def test_a_killed_rank_is_the_cause_of_what_the_others_write(tmp_path):
    command = script(
        tmp_path,
        """
        if rank == 1:
            held = meet("w")
            os.kill(os.getpid(), signal.SIGKILL)
        meet("r").read()  # ends when rank 1 does
        fail("connection closed", 1.0, 1)
        """,
    )
    failure = launch(command, nproc=2)
    assert failure.rank == 1
    assert "signal 9 (SIGKILL)" in failure.text()
    assert "memory" in failure.text()
    assert failure.exit_code == 137


def test_a_rank_that_ends_before_it_can_say_why(tmp_path):
    failure = launch(script(tmp_path, "sys.exit(3)"), nproc=1)
    assert failure.exit_code == 3
    assert failure.text().startswith("ProcessGroupError: rank 0 ended with exit code 3")


def test_what_a_script_recorded_in_torchs_format_is_its_failure(tmp_path):
    record = "from torch.distributed.elastic.multiprocessing.errors import record\n"
    raises = "def work():\n    raise ValueError('the cause')\nrecord(work)()"
    failure = launch(script(tmp_path, record + raises), nproc=1)
    assert (failure.rank, failure.kind, failure.message) == (0, "ValueError", "the cause")
    assert failure.text().startswith("Rank 0 failed first:\nTraceback")


def test_a_launcher_that_was_started_with_ignored_children_sees_how_ranks_end(tmp_path):
    command = script(tmp_path, "os._exit(7 * rank)")
    code = f"from fullshard.program.launch import launch; print(launch({command!r}, nproc=2).exit_code)"
    ignores = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", ignores, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "7\n", done.stderr


def test_the_launcher_does_without_torch(tmp_path):
    command = script(tmp_path, "sys.exit(0)")
    text = "import sys; from fullshard.program.launch import launch; "
    text += f"print(launch({command!r}, nproc=2), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout == "None False\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_ranks_that_do_not_train_yet(tmp_path, number, capfd):
    command = script(
        tmp_path,
        f"""
        open(f"{tmp_path}/pid" + str(rank), "w").write(str(os.getpid()))
        if rank == 1:
            os.kill(os.getppid(), {int(number)})
        signal.pause()
        """,
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        launch(command, nproc=2)
    assert signal.getsignal(signal.SIGTERM) is before
    assert pids_of(tmp_path)
    assert all(map(ends, pids_of(tmp_path)))
    said = "fullshard: no step was being trained, so this stop saved no checkpoint and deleted none\n"
    assert capfd.readouterr().err == said


def test_output_that_nothing_reads_any_more_ends_all_ranks_without_a_failure(tmp_path, capfd):
    command = script(
        tmp_path,
        """
        if rank == 1:
            sys.exit(141)
        signal.pause()
        """,
    )
    with pytest.raises(UnreadOutputError):
        launch(command, nproc=2)
    assert capfd.readouterr().err == ""


ASKED = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

def asked():
    # Waits for SIGTERM; unlike pause() it sees one that came before.
    signal.sigwait([signal.SIGTERM])
    os.write(1, b"asked\\n")  # in one piece: ranks share the terminal

def save():
    asked()
    if rank == 0:
        fail("stopped after step 3", 1.0, 75, {{"stopped": True, "step": 3, "checkpoint": "c"}})
    sys.exit(75)
"""


# A shell and the kernel both send SIGHUP when a terminal closes.
@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGHUP, 2), (signal.SIGUSR1, 2)]
)
def test_the_first_signal_lets_all_ranks_save_and_leave(tmp_path, number, times, capfd):
    command = script(
        tmp_path,
        f"""
        if rank == 1:
            ready = meet("w")
            for _ in range({times}):
                os.kill(os.getppid(), {int(number)})
        else:
            meet("r")
        save()
        """,
        ASKED,
    )
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    outcome = launch(command, nproc=2)
    assert (outcome.exit_code, outcome.text()) == (75, "stopped after step 3")
    assert outcome.as_dict() == {"stopped": True, "step": 3, "checkpoint": "c", "exit_code": 75}
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    output = capfd.readouterr()
    assert output.out == "asked\n" * 2
    assert "no checkpoint" not in output.err


def test_a_rank_that_fails_while_saving_is_the_failure(tmp_path):
    command = script(
        tmp_path,
        """
        if rank == 1:
            ready = meet("w")
            os.kill(os.getppid(), signal.SIGTERM)
            asked()
            fail("disk full", 2.0, 9)
        meet("r")
        save()
        """,
        ASKED,
    )
    outcome = launch(command, nproc=2)
    assert (outcome.exit_code, outcome.message) == (9, "disk full")


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("end = os._exit; os._exit = lambda code: (time.sleep(1.0), end(code)); fail('disk full', 2.0, 9)", 9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("os._exit(3)", 3),
    ],
    ids=["exits-later", "crashes", "says-nothing"],
)
def test_a_rank_that_ends_otherwise_while_the_others_save_is_the_failure(
    ending, exit_code, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(ranks, "STOP_SECONDS", 2.0)
    command = script(
        tmp_path,
        f"""
        import time
        if rank == 1:
            ready = meet("w")
            os.kill(os.getppid(), signal.SIGTERM)
            asked()
            {ending}
        meet("r")
        asked()
        asked()  # it waits for the other one
        os._exit(130)
        """,
        ASKED,
    )
    outcome = launch(command, nproc=2)
    assert (outcome.rank, outcome.exit_code) == (1, exit_code)
    assert "no checkpoint" not in capfd.readouterr().err


def test_a_request_while_ranks_end_after_a_failure_hides_it_not(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ranks, "STOP_SECONDS", 1.0)
    command = script(
        tmp_path,
        """
        import time
        if rank == 1:
            meet("r")
            fail("cause", 1.0, 9)
        ready = meet("w")
        asked()
        if rank == 2:
            os._exit(130)
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            asked()
        """,
        ASKED,
    )
    outcome = launch(command, nproc=3)
    assert (outcome.message, outcome.exit_code) == ("cause", 9)
    assert "no checkpoint" not in capfd.readouterr().err


def test_what_a_rank_has_started_ends_with_it_after_a_request(tmp_path):
    command = script(
        tmp_path,
        f"""
        import subprocess
        deaf = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("{tmp_path}/pid", "w").write(str(subprocess.Popen(["tail", "-f", "/dev/null"], preexec_fn=deaf).pid))
        os.kill(os.getppid(), signal.SIGTERM)
        save()
        """,
        ASKED,
    )
    assert launch(command, nproc=1).exit_code == 75
    assert list(map(ends, pids_of(tmp_path))) == [True]


def test_the_second_signal_kills_ranks_that_take_their_time(tmp_path):
    """They would need longer than the launcher waits after a failure."""
    command = script(
        tmp_path,
        f"""
        open(f"{tmp_path}/pid" + str(rank), "w").write(str(os.getpid()))
        if rank == 1:
            ready = meet("w")
            os.kill(os.getppid(), signal.SIGINT)
        else:
            meet("r")
        asked()
        if rank == 1:
            os.kill(os.getppid(), signal.SIGINT)
        while True:
            asked()
        """,
        ASKED,
    )
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(command, nproc=2)
    assert time.monotonic() - started < ranks.STOP_SECONDS
    assert len(pids_of(tmp_path)) == 2
    assert all(map(ends, pids_of(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' PR_SET_PDEATHSIG")
@pytest.mark.parametrize("still_imports", [False, True])
def test_ranks_end_with_a_launcher_that_is_killed(still_imports, tmp_path):
    """The ranks hold the launcher's standard output; it reaches its end when the last of them is gone."""
    command = script(
        tmp_path,
        f"""
        from fullshard.program.launch.processes import end_with_launcher
        signal.alarm(20)
        launcher = os.getppid()
        if not {still_imports}:
            end_with_launcher()
        print("ready", flush=True)
        while os.getppid() == launcher:
            signal.sigtimedwait([signal.SIGUSR1], 0.01)
        end_with_launcher()
        signal.pause()
        """,
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"from fullshard.program.launch import launch; launch({command!r}, nproc=1)"],
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout.readline() == b"ready\n"
    launcher.kill()
    started = time.monotonic()
    assert launcher.communicate()[0] == b""
    assert time.monotonic() - started < 15.0


def test_number_of_ranks(monkeypatch):
    monkeypatch.setattr(local, "gpu_count", lambda: 0)
    assert choose_nproc(None) == 2
    assert choose_nproc(5) == 5
    monkeypatch.setattr(local, "gpu_count", lambda: 4)
    assert choose_nproc(None) == 4
    assert choose_nproc(3) == 3


def test_more_ranks_than_gpus_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    with pytest.raises(ProcessGroupError, match=r"3 ranks .*nproc.* has 2 GPUs.*CUDA_VISIBLE_DEVICES"):
        launch(["/does/not/exist"], nproc=3)


def test_launched_elsewhere(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not launched_elsewhere()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched_elsewhere()
