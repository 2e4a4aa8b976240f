"""``fullshard launch`` runs anybody's script: as Python would, lines with their rank, the cause of a failure last.

The launcher runs in this process; its ranks import nothing heavy, so a run takes a fraction of a second.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fullshard.core.comm.stack_probe import has_ended
from fullshard.program.cli.main import main
from fullshard.program.launch import ranks

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture
def launch(tmp_path, capfd, monkeypatch):
    """Run a script on two ranks; returns exit code, lines of standard output, lines of standard error."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(text, *arguments, options=("--nproc_per_node", "2"), target=("script.py",)):
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        code = main(["launch", *options, *target, *arguments])
        out, err = capfd.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


AS_PYTHON = """
    import multiprocessing, os, pickle, sys
    import sibling
    class Point:
        value = 3
    def work(queue):
        queue.put(Point())
    if __name__ == "__main__":
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        process = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
        process.start()
        print("spawned", type(queue.get()) is Point, sys.modules["__main__"].Point is Point)
        process.join()
        print("pickled", type(pickle.loads(pickle.dumps(Point()))) is Point)
        print("argv", sys.argv, __file__, os.path.samefile(sys.path[0], "."))
        print(*(f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))
        print("threads", os.environ["OMP_NUM_THREADS"], "stdin", repr(sys.stdin.read()), sibling.NAME)
        print("to stderr", file=sys.stderr)
        print("no newline", end="")
"""


def test_a_script_runs_as_under_python_with_torchruns_variables_and_a_prefix_on_each_line(launch, tmp_path):
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'")
    code, out, err = launch(AS_PYTHON, "--lr", "1", "--json", "--", "-x")
    assert code == 0
    assert sorted(err) == ["[rank 0] to stderr", "[rank 1] to stderr"]
    for rank in (0, 1):
        assert [line for line in out if line.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] {line}"
            for line in (
                "spawned True True",
                "pickled True",
                "argv ['script.py', '--lr', '1', '--json', '--', '-x'] script.py True",
                f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2",
                f"threads {max(1, len(os.sched_getaffinity(0)) // 2)} stdin '' sibling",
                "no newline",
            )
        ]
    assert len(out) == 12


FAILING = """
    import os, time
    def inner():
        raise ValueError("the cause")
    if os.environ["RANK"] == "1":
        inner()
    time.sleep(100)
"""


def test_the_first_traceback_is_shown_once_and_last_and_without_the_runners_frames(launch):
    code, out, err = launch(FAILING)
    assert code == 1
    assert out == []
    assert err == [
        "Rank 1 failed first:",
        "Traceback (most recent call last):",
        '  File "script.py", line 6, in <module>',
        "    inner()",
        '  File "script.py", line 4, in inner',
        '    raise ValueError("the cause")',
        "ValueError: the cause",
    ]


def test_ranks_that_fail_after_the_first_are_told_on_one_line(launch, tmp_path):
    os.mkfifo(tmp_path / "ready")
    code, _, err = launch(
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            open("ready").close()  # opens when rank 0 opens it, with its handler in place
            raise ValueError("the cause")
        def told(*_):
            raise ConnectionError("peer is gone\\nmore")
        signal.signal(signal.SIGTERM, told)
        open("ready", "w").close()
        time.sleep(100)
        """
    )
    assert code == 1
    assert err[0] == "fullshard: then rank 0: ConnectionError: peer is gone"
    assert err[1] == "Rank 1 failed first:"
    assert err[-1] == "ValueError: the cause"
    assert sum("Traceback" in line for line in err) == 1


@pytest.mark.dist
def test_ranks_that_wait_for_one_that_failed_are_told_its_error(launch):
    """The runner handles the error itself, and a process takes seconds to end."""
    code, out, _ = launch(
        """
        import signal
        import fullshard
        from fullshard.errors import ProcessGroupError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as on another machine, whose launcher does not know it yet
        comm = fullshard.init()
        if comm.rank == 1:
            raise ValueError("no rows left")
        try:
            comm.barrier()
        except ProcessGroupError as error:
            print(error)
        """
    )
    assert code == 1
    (line,) = out
    assert re.search(r"waited \d\.\d s in barrier and rank 1 failed first: ValueError: no rows left$", line)


def test_json_tells_ranks_code_duration_and_failure_and_keeps_stdout_free(launch):
    # Rank 1 fails after rank 0 has printed, whose output would else depend on which of them is faster.
    greeting = """
        import os, pathlib
        print("hello", flush=True)
        pathlib.Path(os.environ["RANK"]).touch()
        while not pathlib.Path("0").exists():
            pass
    """
    script = textwrap.dedent(greeting) + textwrap.dedent(FAILING)
    code, out, err = launch(script, options=["--json", "--nproc-per-node", "2"])
    summary = json.loads("\n".join(out))
    assert code == summary["exit_code"] == 1
    assert summary["ranks"] == [0, 1]
    assert 0 < summary["duration_s"] < 30
    assert summary["signal"] is None
    failure = summary["failure"]
    assert (failure["kind"], failure["message"], failure["rank"]) == ("ValueError", "the cause", 1)
    assert failure["traceback"].startswith("Traceback")
    assert "[rank 0] hello" in err


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("sys.exit(5)", 5, "fullshard: rank 1 ended with exit code 5."),
        ("sys.exit('so be it')", 1, "[rank 1] so be it"),
        ("os._exit(3)", 3, "fullshard: rank 1 ended with exit code 3."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL). The kernel does this when memory runs out"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "signal 11 (SIGSEGV). Native code crashed"),
        ("exec('1 +')", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_the_exit_code_of_the_first_failing_rank_is_passed_on(launch, how, code, last):
    got, _, err = launch(f"import os, signal, sys, time\nif os.environ['RANK'] == '1': {how}\ntime.sleep(100)")
    assert got == code
    assert last in err[-1] if "signal" in last else err[-1] == last
    assert sum("so be it" in line for line in err) == ("so be it" in how)
    assert sum(line.startswith("Traceback") for line in err) == ("exec" in how)


def test_what_all_ranks_leave_with_is_said_once_as_python_says_it(launch):
    code, out, err = launch("import sys\nsys.exit('two\\nlines')")
    assert (code, out) == (1, [])
    assert err in (["[rank 0] two", "[rank 0] lines"], ["[rank 1] two", "[rank 1] lines"])


def test_last_words_after_a_signal_are_shown(launch):
    code, _, err = launch(
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved at step 3"))
        print("ready", flush=True)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)
        """,
        options=("--nproc_per_node", "1"),
    )
    assert code == 143
    assert err == ["[rank 0] saved at step 3", "fullshard: stopped by SIGTERM; nothing is left running."]


def test_a_scripts_own_hook_shows_its_traceback_and_nobody_else_does(launch):
    code, _, err = launch(
        """
        import os, sys, time
        sys.excepthook = lambda kind, error, trace: print("my own words:", error, file=sys.stderr)
        if os.environ["RANK"] == "0":
            raise ValueError("the cause")
        time.sleep(100)
        """
    )
    assert code == 1
    assert err == ["[rank 0] my own words: the cause", "fullshard: rank 0: ValueError: the cause"]


def test_a_module_runs_by_name(launch, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.py").write_text("NAME = 'relative'")
    (package / "__main__.py").write_text(
        "import sys\nfrom .names import NAME\nprint(__name__, __spec__.name, __package__, NAME, sys.argv[1:])"
    )
    options = ["--nproc_per_node", "1", "-m"]
    code, out, _ = launch("", "--lr", "1", options=options, target=["package"])
    assert (code, out) == (0, ["[rank 0] __main__ package.__main__ package relative ['--lr', '1']"])
    code, _, err = launch("", options=options, target=["nowhere.at.all"])
    assert code == 1
    assert err[-1] == "ModuleNotFoundError: No module named 'nowhere'"
    assert not any("child.py" in line or "importlib" in line for line in err)


def shows(*names):
    """A script that prints variables."""
    return f"import os\nprint(*(os.environ.get(name) for name in {names}))"


CONFIG = """
distributed_type: FSDP
num_machines: 1
num_processes: 3
mixed_precision: bf16
use_cpu: true
fsdp_config:
  fsdp_sharding_strategy: 1
  fsdp_backward_prefetch_policy: BACKWARD_PRE
"""


def test_an_accelerate_file_says_how_many_ranks_and_what_their_environment_is(launch, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(CONFIG)
    text = shows("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "WORLD_SIZE")
    code, out, _ = launch(text, options=["--config_file", "fsdp.yaml"])
    assert code == 0
    assert sorted(out) == [f"[rank {rank}] bf16 True true 3" for rank in range(3)]
    code, out, _ = launch(text, options=["--config-file", "fsdp.yaml", "--nproc_per_node", "1"])
    assert (code, out) == (0, ["[rank 0] bf16 True true 1"])


def test_without_a_file_an_accelerator_takes_rank_0s_values_and_what_is_set_stays(launch, monkeypatch):
    text = shows("ACCELERATE_MIXED_PRECISION", "FSDP_SYNC_MODULE_STATES", "ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    code, out, _ = launch(text, options=["--nproc_per_node", "1"])
    assert (code, out) == (0, ["[rank 0] bf16 true None"])


def test_the_options_of_accelerate_launch_reach_the_ranks(launch):
    text = shows("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "WORLD_SIZE", "OMP_NUM_THREADS")
    options = ["--num_processes", "2", "--num_machines", "1", "--machine_rank", "0", "--mixed_precision", "bf16"]
    options += ["--use_fsdp", "--fsdp_version", "2", "--cpu", "--num_cpu_threads_per_process", "1", "--multi_gpu"]
    code, out, _ = launch(text, options=options)
    assert code == 0
    assert sorted(out) == [f"[rank {rank}] bf16 true 2 2 1" for rank in range(2)]
    code, out, err = launch(text, options=["--main_process_ip", "a", "--rdzv_endpoint", "b:1"])
    assert code == 2
    assert "Give one of them" in err[0]


INTERRUPTED = """
    import os, signal, sys, time
    rank = int(os.environ["RANK"])
    print("pid", os.getpid())
    if rank == 1:
        signal.signal(signal.{name}, signal.SIG_IGN)
    open(f"ready{{rank}}", "w").close()
    try:
        if rank == 0:
            while not os.path.exists("ready1"):
                time.sleep(0.01)
            os.kill(os.getppid(), signal.{name})
        time.sleep(100)
    except KeyboardInterrupt:
        print("saved")
        raise
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_reaches_the_ranks_and_leaves_none_behind(launch, monkeypatch, name, code):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(ranks, "STOP_SECONDS", 1.0)
    got, out, err = launch(INTERRUPTED.format(name=name))
    assert got == code
    assert err == [f"fullshard: stopped by {name}; nothing is left running."]
    assert ("[rank 0] saved" in out) == (name == "SIGINT")
    pids = [int(line.split()[-1]) for line in out if " pid " in line]
    assert len(pids) == 2
    assert all(map(has_ended, pids))
    assert signal.getsignal(signal.SIGINT) is before


REPORTS = """
import os, signal, sys, time
from pathlib import Path
from fullshard.errors import DataError, RunStopped
from fullshard.program.launch.failure import Failure, report_saving

def report(error, code):
    Failure.of(error, 0).write(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    sys.exit(code)

"""
SAVES = """
def save(*_):
    time.sleep(0.5)
    report(RunStopped("Stopped after step 3.", step=3, checkpoint="here"), 75)
signal.signal(signal.SIGTERM, save)
report_saving()
os.kill(os.{who}(), signal.SIGTERM)
time.sleep(100)
"""


@pytest.mark.parametrize("who", ["getppid", "getpid"])
def test_a_rank_that_saves_has_the_time_it_needs_and_ends_the_run(launch, monkeypatch, who):
    monkeypatch.setattr(ranks, "STOP_SECONDS", 0.0)
    code, _, err = launch(REPORTS + SAVES.format(who=who), options=("--nproc_per_node", "1", "--max_restarts", "1"))
    assert code == 75
    by_signal = ["fullshard: stopped by SIGTERM; nothing is left running."] if who == "getppid" else []
    assert err == [*by_signal, "fullshard: Stopped after step 3."]


def test_ranks_are_started_anew_as_often_as_asked_for(launch):
    text = """
        import os
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", attempt, os.environ["MASTER_PORT"])
        if attempt < 2 and os.environ["RANK"] == "0":
            raise ValueError(f"attempt {attempt}")
    """
    code, out, err = launch(text, options=["--nproc_per_node", "2", "--max_restarts", "2"])
    assert code == 0
    ports = [line.split()[-1] for line in out if line.startswith("[rank 0] attempt ")]  # rank 1 may not print
    assert len(set(ports)) == 3  # what ranks leave in a store would lead the next ones astray
    assert [line for line in err if "restart" in line] == [
        f"fullshard: rank 0: ValueError: attempt {attempt}; restart {attempt + 1} of 2 {when}"
        for attempt, when in enumerate(("now", "in 0.5 s"))
    ]


def test_ranks_find_their_attempt_and_what_the_one_before_kept(launch):
    text = """
        import os
        attempt, kept = os.environ["FULLSHARD_ATTEMPT"], os.environ["FULLSHARD_KEEP_DIR"] + "/kept"
        if attempt == "0":
            open(kept, "w").write("by the first")
            raise ValueError("once")
        print(attempt, open(kept).read(), os.environ["FULLSHARD_MAX_RESTARTS"], kept)
    """
    code, out, _ = launch(text, options=["--nproc_per_node", "1", "--max_restarts", "1"])
    assert code == 0
    (line,) = out
    assert "1 by the first 0 " in line  # no restart is left
    assert not Path(line.split()[-1]).parent.exists()


def test_an_error_of_the_users_in_a_program_of_ours_is_not_tried_again(launch):
    text = 'print("started")\nreport(DataError("no rows"), 3)'
    code, out, err = launch(REPORTS + text, options=["--nproc_per_node", "1", "--max_restarts", "2"])
    assert code == 3
    assert len(out) == 1
    assert not any("restart" in line for line in err)


def test_slurms_notice_lets_ranks_save_and_the_signal_after_it_does_not_kill_them(launch):
    text = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getppid(), signal.SIGUSR1)
signal.sigwait([signal.SIGUSR1])
report_saving()
os.kill(os.getppid(), signal.SIGTERM)
report(RunStopped("Stopped.", step=3, checkpoint="here"), 75)
"""
    code, _, err = launch(REPORTS + text, options=["--nproc_per_node", "1"])
    assert code == 75
    assert err[0] == "fullshard: stopped by SIGUSR1; nothing is left running."


def test_a_killed_launcher_takes_its_ranks_with_it(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid())\ntime.sleep(100)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "fullshard", "launch", "--nproc_per_node", "2", "script.py"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
    assert not any(map(has_ended, pids))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 10
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        pass
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rdzv_conf", "timeout=9", "script.py"], "here it is --rdzv_timeout SECONDS"),
        (["--num_processes", "2", "--nproc_per_node", "1", "script.py"], "not allowed with argument"),
        (["--nnodes", "2:1", "script.py"], "MIN:MAX"),
        (["--unknown", "script.py"], "unrecognized arguments: --unknown"),
        (["--unknown", "script.py"], "usage: fullshard launch [options] SCRIPT"),
        (["--nproc_per_node", "two", "script.py"], "must be a whole number of at least 1; got 'two'; or gpu"),
        (["--max_restarts", "-1", "script.py"], "must be a whole number of at least 0; got '-1'"),
        (["--node_rank", "x", "script.py"], "must be a whole number of at least 0; got 'x'"),
    ],
)
def test_options_of_other_launchers_are_told_their_name_here(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit) as ended:
        main(["launch", *arguments])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_script_that_is_not_there_is_a_wrong_command_line(launch):
    code, _, err = launch("", target=["other.py"])
    assert code == 2
    assert "There is no script other.py" in err[0]
