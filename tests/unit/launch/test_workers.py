"""Ranks as processes: what they write comes out whole, whoever reads it, and nobody is waited for without a reason."""

import io
import os
import signal
import subprocess
import threading

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from fullshard.program.launch.script import workers
from fullshard.program.launch.script.agent import raised_signals
from fullshard.program.launch.script.output import Output
from fullshard.program.launch.script.workers import Workers


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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as one rank to its end, with standard output in ``target``; what came there."""
    monkeypatch.setattr(workers, "_DRAIN_SECONDS", 0.1)

    def start(text, target):
        (tmp_path / "script.py").write_text(text)
        output = Output({"stdout": target, "stderr": io.BytesIO()}, columns=None)
        ranks = Workers(["script", str(tmp_path / "script.py")], {}, output, tmp_path)
        ranks.start({0: {"RANK": "0"}})
        ranks._workers[0].threads[-1].join()
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
    output = Output({"stdout": words, "stderr": io.BytesIO()}, columns=None)
    ranks = Workers(["script", str(tmp_path / "script.py")], {}, output, tmp_path)
    start = subprocess.Popen

    def interrupted(*args, **options):
        process = start(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)  # as scancel does, before the start is over
        return process

    monkeypatch.setattr(workers.subprocess, "Popen", interrupted)
    with raised_signals(ranks):
        with pytest.raises(SignalException):
            ranks.start({0: {"RANK": "0"}})
        assert words.written.wait(timeout=30)
        ranks.stop()
    (failure,) = ranks.failures()
    assert failure.message == "saved at step 3"
