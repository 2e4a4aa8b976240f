"""After a rank is lost the launcher starts all of them again, unless that would be in vain. Ranks are small scripts."""

import json
import os
import signal
import stat
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullshard.errors import CheckpointError, ProcessGroupError
from fullshard.program.launch import attempts, launch
from fullshard.program.launch.attempts import Reached, Restarts, scratch_directory
from fullshard.program.launch.failure import Failure
from fullshard.program.launch.programs import again
from fullshard.program.launch.programs.again import ReachedSink, resume_again
from fullshard.state.saving.scratch import ScratchDirectory

PRELUDE = """
import json, os, signal, sys
rank, attempt = int(os.environ["RANK"]), int(os.environ["FULLSHARD_ATTEMPT"])
keep = os.environ["FULLSHARD_KEEP_DIR"]
out = {out!r}

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

def reach(step, saved=0):
    with open(f"{{keep}}/{{rank}}", "w") as file:
        json.dump(dict(attempt=attempt, step=step, saved=saved), file)
    os.replace(f"{{keep}}/{{rank}}", keep + "/reached.json")

with open(out + "/started", "a") as file:
    file.write(f"{{rank}} {{attempt}}\\n")
"""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def run(tmp_path):
    """Return a function that launches a script as two ranks; the failure comes back."""

    def launched(text, most=3):
        path = tmp_path / "rank.py"
        path.write_text(PRELUDE.format(out=str(tmp_path)) + textwrap.dedent(text))
        return launch([sys.executable, str(path)], nproc=2, max_restarts=most)

    return launched


def started(tmp_path):
    """How many attempts there were."""
    return 1 + max(int(line.split()[1]) for line in (tmp_path / "started").read_text().splitlines())


def failure(kind="ProcessGroupError", rank=1, code=137, transient=None):
    return Failure(rank, kind, f"rank {rank} was lost. Look for why.", None, code, 1.0, transient=transient)


def test_what_an_attempt_keeps_is_there_for_the_next_one_and_gone_after_the_last(run, tmp_path):
    ended = run(
        """
        if attempt == 0:
            open(f"{keep}/of{rank}", "w").write("kept")
            if rank == 1:
                die()
            signal.pause()
        assert open(f"{keep}/of1").read() == "kept"
        assert os.stat(keep).st_mode & 0o077 == 0
        open(f"{out}/keep{rank}", "w").write(keep)
        """
    )
    assert ended is None
    assert started(tmp_path) == 2
    kept = Path((tmp_path / "keep0").read_text())
    assert kept == Path((tmp_path / "keep1").read_text())
    assert not kept.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_line_says_which_rank_was_lost_how_and_from_where_it_goes_on(run, number, capfd):
    ended = run(
        f"reach(12, 10)\nif rank == 1 and attempt == 0: die({int(number)})\nsignal.pause() if attempt == 0 else 0"
    )
    assert ended is None
    name = f"signal {int(number)} ({number.name})"
    line = f"fullshard: rank 1 was killed by {name}, after step 12; restart 1 of 3 now, from step 10 or later\n"
    assert line in capfd.readouterr().err


def test_the_same_step_twice_in_the_same_way_ends_with_the_first_cause(run, tmp_path, capfd):
    ended = run(
        """
        reach(7)
        if rank == 1:
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump(dict(fullshard=dict(rank=1, kind="ConnectionError", message=f"of attempt {attempt}",
                                              trace=None, exit_code=1, time_s=1.0, transient=True)), file)
            sys.exit(1)
        signal.pause()
        """
    )
    assert ended.message == "of attempt 0"
    assert started(tmp_path) == 2
    assert "after step 7, as in the attempt before: the ranks are not started again" in capfd.readouterr().err


def test_another_step_is_another_failure_until_the_restarts_are_used_up(run, tmp_path, capfd):
    ended = run("reach(attempt)\nif rank == 0: die()\nsignal.pause()", most=2)
    assert ended.exit_code == 137
    assert started(tmp_path) == 3
    assert "2 restarts are used up (--max-restarts)" in capfd.readouterr().err


@pytest.fixture
def kills(monkeypatch):
    """Set what the system says about processes killed for memory, from one look to the next."""

    def say(*counts, of_group=True):
        looks = iter(None if count is None else attempts.MemoryKills(count, of_group) for count in counts)
        monkeypatch.setattr(attempts, "memory_kills", lambda: next(looks))

    return say


NOTED = """
from fullshard.program.launch.attempts import note_plan
rank or note_plan("planned: a rank needs at most 9.00 GiB for tensors; 8.00 GiB are free")
rank or note_plan("another line")
"""
WITH_PLAN = "The run's plan: planned: a rank needs at most 9.00 GiB for tensors; 8.00 GiB are free; another line."


def begun(began, step):
    note = f"dict(attempt=attempt, began={began}, step={step})"
    return f"with open(keep + '/reached.json', 'w') as file: json.dump({note}, file)"


@pytest.mark.parametrize("reached", ["", begun(0, 0), begun(12, 12)])
def test_memory_that_runs_out_before_the_first_step_would_run_out_again(run, tmp_path, capfd, kills, reached):
    kills(3, 4)
    ended = run(NOTED + reached + "\nif rank == 0: die()\nsignal.pause()")
    assert started(tmp_path) == 1
    assert (ended.rank, ended.exit_code) == (0, 137)
    assert ended.message.endswith(WITH_PLAN)
    assert "the ranks are not started again" in capfd.readouterr().err


KILLED_TWICE = "if rank == 0 and attempt < 2: die()\nsignal.pause() if attempt < 2 else 0"


@pytest.mark.parametrize(
    ("counts", "of_group", "text", "attempts_made"),
    [
        # Memory ran out after a step: it may suffice next time.
        ((3, 4), True, f"if attempt == 0:\n    {begun(0, 1)}\n    if rank == 0: die()\n    signal.pause()", 2),
        ((3, 3, 3), True, KILLED_TWICE, 3),  # somebody else killed the rank
        ((3, 5, 5), False, KILLED_TWICE, 3),  # the same, while the kernel killed processes that are not the run's
        # Memory ran out during an attempt, and not during the one that failed last.
        ((3, 4, 4, 4), True, f"if attempt == rank == 0: die(signal.SIGSEGV)\n{KILLED_TWICE}", 3),
    ],
)
def test_a_kill_that_may_not_come_again_is_followed_by_another_attempt(
    run, tmp_path, kills, counts, of_group, text, attempts_made
):
    kills(*counts, of_group=of_group)
    assert run(text) is None
    assert started(tmp_path) == attempts_made


def test_where_nobody_counts_a_rank_that_is_killed_twice_before_the_first_step_is_not_started_again(
    run, tmp_path, kills
):
    kills(None, None, None)
    ended = run("if rank == 0: die()\nsignal.pause()")
    assert started(tmp_path) == 2
    assert ended.message.endswith("The run's plan: its memory was not planned.")


def test_the_message_says_that_the_machines_count_rose(run, tmp_path, kills):
    kills(3, 5, 6, of_group=False)
    ended = run(NOTED + "if rank == 0: die()\nsignal.pause()")
    assert started(tmp_path) == 2
    assert "killed 2 processes of this machine" in ended.message
    assert ended.message.endswith(WITH_PLAN)


@pytest.mark.parametrize("most", [0, 1])
def test_the_plan_is_told_also_where_nothing_is_started_again(run, kills, most):
    kills(0, 1)
    assert run(NOTED + "if rank == 0: die()\nsignal.pause()", most=most).message.endswith(WITH_PLAN)


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/job/a", "job/a/memory.events", "low 0\noom 9\noom_kill 7\n"),
        ("4:cpu,memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"),
        ("0::/", None, ""),
    ],
)
def test_kills_are_counted_by_the_control_group_or_else_by_the_machine(tmp_path, monkeypatch, group, file, text):
    monkeypatch.setattr(attempts, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(attempts, "_GROUPS", tmp_path / "groups")
    assert attempts.memory_kills() is None
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"8:pids:/\n{group}\n")
    assert attempts.memory_kills() is None
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 12\noom_kill 41\n")
    if file is not None:
        (tmp_path / "groups" / file).parent.mkdir(parents=True)
        (tmp_path / "groups" / file).write_text(text)
    assert attempts.memory_kills() == attempts.MemoryKills(41 if file is None else 7, of_group=file is not None)


def test_an_error_that_would_come_again_is_not_tried_again(run, tmp_path):
    assert run("sys.exit(3)").exit_code == 3
    assert started(tmp_path) == 1


@pytest.mark.parametrize(
    ("error", "passes"),
    [(CheckpointError("x"), False), (ValueError("x"), False), (ConnectionResetError("x"), True), (KeyError(), False)],
)
def test_which_errors_may_pass(error, passes, tmp_path):
    Failure.of(error, 0).write(tmp_path / "failure.json")
    assert Failure.read(tmp_path / "failure.json", 0).may_pass is passes


def test_a_lost_rank_may_pass_and_the_user_errors_of_its_class_do_not():
    lost = ProcessGroupError("rank 1 is gone")
    lost.transient = True
    assert Failure.of(lost, 0).may_pass
    assert not Failure.of(ProcessGroupError("no group"), 0).may_pass


def test_a_stop_in_the_pause_ends_the_run(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 30.0)
    monkeypatch.setattr(attempts.Restarts, "after", lambda self, failure: os.kill(os.getpid(), signal.SIGTERM) or 30.0)
    with pytest.raises(KeyboardInterrupt):
        run("die() if rank == 0 else signal.pause()")
    assert started(tmp_path) == 1
    assert "saved no checkpoint and deleted none" in capfd.readouterr().err


def test_the_pause_grows_while_nothing_is_gained(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.5)
    restarts = Restarts(100, tmp_path)
    pauses = []
    for attempt, step in enumerate([None, None, None, 5, 9, 8, 7, 6, 5, 4, 3, 2, 1, 10]):
        (tmp_path / "reached.json").write_text(json.dumps({"attempt": attempt if step else -1, "step": step or 99}))
        pauses.append(restarts.after(failure()))
    assert pauses == [0.0, 0.5, 1.0, 0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.0]


def test_directories_of_killed_launchers_are_removed_and_those_of_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "_SHARED_MEMORY", tmp_path)
    left = tmp_path / "fullshard-keep-left"
    left.mkdir()
    (left / "lock").touch()
    just_made = tmp_path / "fullshard-keep-new"
    just_made.mkdir()
    with scratch_directory() as mine, scratch_directory() as second:
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert mine.exists()
        assert second.exists()
        assert just_made.exists()
        assert not left.exists()
    assert not mine.exists()


def test_the_line_says_the_step_of_a_snapshot_that_all_ranks_have(tmp_path, capfd):
    (tmp_path / "reached.json").write_text(json.dumps({"attempt": 0, "step": 9, "saved": 2}))
    # Rank 1 was killed before it had completed the one of step 9.
    for rank, name in ((0, "step-00000008"), (0, "step-00000009"), (1, "step-00000008"), (1, "step-00000009.tmp")):
        (tmp_path / "run" / f"rank-{rank:05d}" / name).mkdir(parents=True)
    Restarts(3, tmp_path).after(failure())
    assert "from step 8 or later" in capfd.readouterr().err


@pytest.mark.parametrize("most", [0, 1])
def test_ranks_keep_no_state_where_nobody_starts_them_again(run, tmp_path, most):
    assert run("open(f'{out}/{rank}', 'w').write(os.environ['FULLSHARD_MAX_RESTARTS'])", most) is None
    assert (tmp_path / "1").read_text() == str(most)


@pytest.mark.parametrize("most", ["0", "1"])
def test_which_launchers_ranks_keep_their_state(tmp_path, monkeypatch, most):
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))
    monkeypatch.setenv("FULLSHARD_MAX_RESTARTS", most)
    assert (ScratchDirectory.of("run") is not None) is (most == "1")


def test_a_stop_between_attempts_says_what_was_in_memory_only(run, monkeypatch, capfd):
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 30.0)
    monkeypatch.setattr(attempts.Restarts, "after", lambda self, failure: os.kill(os.getpid(), signal.SIGTERM) or 30.0)
    with pytest.raises(KeyboardInterrupt):
        run(
            """
            reach(7, 4)
            os.makedirs(f"{keep}/run/rank-{rank}/step-00000007")
            open(f"{out}/ready{rank}", "w")
            while not os.path.exists(f"{out}/ready{1 - rank}"):
                pass
            die()
            """
        )
    assert "saved no checkpoint and deleted none; step 7 was in memory only and is lost" in capfd.readouterr().err


def test_an_error_of_one_rank_is_the_cause_though_another_aborts_of_it(run, tmp_path):
    """Under NCCL a rank that lost another one aborts, before or after the launcher's signal."""
    ended = run(
        """
        if rank == 1:
            open(f"{out}/waits", "w")
            signal.signal(signal.SIGTERM, lambda *_: die(signal.SIGABRT))
            while True:
                signal.pause()
        while not os.path.exists(f"{out}/waits"):
            pass
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump(dict(fullshard=dict(rank=0, kind="ConfigError", message="a wrong setting", trace=None,
                                          exit_code=2, time_s=1.0, transient=False)), file)
        sys.exit(2)
        """
    )
    assert (ended.kind, ended.message, ended.exit_code) == ("ConfigError", "a wrong setting", 2)
    assert started(tmp_path) == 1


def test_a_real_time_signal_is_named(run):
    assert "killed by signal 40 (real-time)" in run("die(40) if rank == 1 else signal.pause()", most=0).message


@pytest.mark.parametrize(
    ("before", "resumed", "noted"),
    [
        (None, 6, (6, None)),  # the first attempt, from the checkpoint of an earlier command
        (Reached(0, 9, 4, path="c/step-4"), 8, (4, "c/step-4")),  # from a snapshot, which no later command has
        (Reached(0, 9, 4, path="c/step-4"), 2, (2, None)),  # the checkpoint is damaged
        (Reached(0, 9, 0), 8, (0, None)),
    ],
)
def test_the_note_has_the_step_of_a_checkpoint_and_not_of_a_snapshot(before, resumed, noted, tmp_path, monkeypatch):
    """What --grace says of a run that was out of time: the same command resumes from there."""
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "0" if before is None else "1")
    if before is not None:
        attempts.note(before)
    ReachedSink(0.0).start(SimpleNamespace(resumed_step=resumed))
    now = attempts.last_note(tmp_path)
    assert (now.step, now.saved, now.path) == (resumed, *noted)


@pytest.mark.parametrize(
    ("reached", "resume", "setting"),
    [
        (None, "never", []),
        (Reached(0, 3), "never", []),
        (Reached(0, 3), "auto", []),
        (Reached(0, 3, 2), "previous", ["resume=auto"]),
        (Reached(0, 3, 2, path="c/step-2"), "never", ["resume=auto"]),
        (Reached(0, 3, 2, path="c/step-2", finished=True), "auto", ["resume=c/step-2"]),
        (Reached(0, 3, 2, finished=True), "auto", ["resume=never"]),
    ],
)
def test_where_a_later_attempt_resumes(reached, resume, setting, tmp_path, monkeypatch):
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    if reached is not None:
        attempts.note(reached)
    assert resume_again(resume) == setting


def test_the_first_step_of_a_later_attempt_says_how_long_the_run_was_without(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    attempts.note(Reached(0, 9, 4))
    for name, when in (("lost", 100.0), ("started", 100.5)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    clock = iter((108.5, 109.25))
    monkeypatch.setattr(again, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setattr(attempts, "time", SimpleNamespace(time=lambda: next(clock)))
    sink = ReachedSink(106.5)
    sink.start(SimpleNamespace(resumed_step=8))
    for step in (9, 10):
        sink.step(SimpleNamespace(step=step))
    assert capsys.readouterr().err == (
        "fullshard: step 9 was done 9.2 s after the loss, 3.2 s without starting processes "
        "(ending ranks 0.5 s, state 2.0 s, step 0.8 s)\n"
    )


def test_the_launcher_notes_when_a_rank_was_lost_and_when_it_started_the_next_attempt(run, tmp_path):
    ended = run(
        """
        if attempt == 0 and rank == 0:
            signal.pause()  # it may get here after the loss of the other
        times = [os.stat(f"{keep}/{name}").st_mtime for name in ("lost", "started") if os.path.exists(f"{keep}/{name}")]
        open(f"{out}/{attempt}.{rank}", "w").write(json.dumps(times))
        attempt or die()
        """
    )
    assert ended is None
    assert len(json.loads((tmp_path / "0.1").read_text())) == 1
    for rank in range(2):
        lost, began = json.loads((tmp_path / f"1.{rank}").read_text())
        assert (tmp_path / "0.1").stat().st_mtime <= lost <= began


def test_a_summary_is_printed_once_though_a_rank_dies_after_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))
    for number in ("0", "1"):
        monkeypatch.setenv("FULLSHARD_ATTEMPT", number)
        sink = ReachedSink(0.0)
        sink.start(SimpleNamespace(resumed_step=3))
        sink.finish(SimpleNamespace())
        sink.tell('{"steps": 3}')
    assert capsys.readouterr().out == '{"steps": 3}\n'


def test_the_last_attempt_is_told_that_it_is(run, tmp_path):
    ended = run(
        """
        if rank == 1:
            signal.pause()  # it would write the same file, and be killed over it when rank 0 has died
        reach(attempt)
        open(f"{out}/{attempt}", "w").write(os.environ["FULLSHARD_MAX_RESTARTS"])
        die()
        """,
        2,
    )
    assert ended.exit_code == 137
    assert [(tmp_path / str(number)).read_text() for number in range(3)] == ["2", "1", "0"]
