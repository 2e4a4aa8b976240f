"""Ranks as processes: what they write comes out whole, whoever reads it, and nobody is waited for without a reason."""

import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from fullshard.program.launch import processes, ranks as module
from fullshard.program.launch.output import Output
from fullshard.program.launch.processes import Interpreters
from fullshard.program.launch.ranks import Ranks, StopAsked, listening
from fullshard.program.launch.script.run import CHILD


class SlowReader(io.BytesIO):
    """A file whose first write lasts until it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def write(self, data):
        self.let_go.wait()
        return super().write(data)


class Heard(io.BytesIO):
    """A file that tells when something was written to it."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, data):
        self.written.set()
        return super().write(data)


def ranks_of(folder, target):
    """Ranks of the script in a folder, with standard output in ``target``."""
    command = [sys.executable, str(CHILD), "script", str(folder / "script.py")]
    starter = Interpreters(command, os.environ, piped=True)
    return Ranks(starter, folder, Output({"stdout": target, "stderr": io.BytesIO()}, columns=None))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as one rank to its end, with standard output in ``target``; what came there."""
    monkeypatch.setattr(module, "_DRAIN_SECONDS", 0.1)

    def start(text, target):
        (tmp_path / "script.py").write_text(text)
        ranks = ranks_of(tmp_path, target)
        ranks.start([{"RANK": "0"}])
        ranks._ranks[0].threads[-1].join()
        return ranks

    return start


def test_what_a_rank_wrote_comes_out_however_slowly_it_is_read(run):
    target = SlowReader()
    ranks = run("for number in range(1000): print(number)", target)
    threading.Timer(1.0, target.let_go.set).start()
    ranks.stop()
    assert target.getvalue().splitlines()[-1] == b"[rank 0] 999"


def test_a_process_left_behind_that_keeps_writing_is_not_waited_for(run):
    chatty = "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"
    ranks = run(
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {chatty!r}]).pid)", io.BytesIO()
    )
    ranks.stop()
    assert ranks.all_ended()
    ranks.kill()


def test_a_signal_while_ranks_are_started_stops_all_of_them(tmp_path, monkeypatch):
    """Raised between a rank's start and the note of it, it left the rank without its SIGTERM and its last words."""
    (tmp_path / "script.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved at step 3'))\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    words = Heard()
    ranks = ranks_of(tmp_path, words)
    start = subprocess.Popen

    def interrupted(*args, **options):
        process = start(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)  # as scancel does, before the start is over
        return process

    monkeypatch.setattr(processes.subprocess, "Popen", interrupted)
    with listening(ranks):
        with pytest.raises(StopAsked):
            ranks.start([{"RANK": "0"}])
        assert words.written.wait(timeout=30)
        ranks.stop()
    (failure,) = ranks.failures()
    assert failure.message == "saved at step 3"
