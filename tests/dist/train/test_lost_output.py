"""Output that cannot be written: a closed stream, a full disk, a pipe without a reader, a terminal that is gone."""

import json
import os
import pty
import subprocess

import pytest

from support.processes import FULLSHARD, apart
from support.tiny_run import QUICK, read_jsonl, write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.slow]

CHANGES = QUICK | {"training__num_train_epochs": 10}


def shell(command):
    bash = ["bash", "-c", command]
    return subprocess.run(bash, capture_output=True, text=True, env=apart(), check=False, timeout=200)


def train_command(tmp_path):
    return [*FULLSHARD, "train", str(write_run_file(tmp_path, **CHANGES)), "--no-plan"]


def require_finished(tmp_path):
    records = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == steps[-1] == len(steps) == 20


@pytest.mark.parametrize(
    "output",
    [
        "2>&1 | head -n 1 > /dev/null; exit ${PIPESTATUS[0]}",
        "2>&1 >/dev/full",
        "> /dev/full 2> /dev/full",
        ">&- 2>&- <&-",
    ],
)
def test_training_outlives_its_output(tmp_path, output):
    done = shell(f"{' '.join(train_command(tmp_path))} {output}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("standard output is lost (No space left on device)") == (output == "2>&1 >/dev/full")
    require_finished(tmp_path)


@pytest.mark.parametrize("under_nohup", [True, False])
def test_a_terminal_that_closes_costs_no_step(tmp_path, under_nohup):
    command = train_command(tmp_path)
    terminal, theirs = pty.openpty()
    # A session's first process gets SIGHUP when its terminal is gone; setsid -c makes it the terminal's.
    wrapped = ["setsid", "-c", *(["env", "--ignore-signal=HUP"] if under_nohup else []), *command]
    train = subprocess.Popen(wrapped, stdin=theirs, stdout=theirs, stderr=theirs, env=apart())
    os.close(theirs)
    shown = b""
    while b"step 1/" not in shown:
        shown += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert train.wait(timeout=100) == (0 if under_nohup else 75), shown
    if not under_nohup:
        done = shell(" ".join(command))
        assert done.returncode == 0, done.stderr
        assert "resum" in done.stdout
    require_finished(tmp_path)


def test_a_script_outlives_the_output_of_its_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "for line in range(20_000):\n"
        "    print('a line')\n"
        f"pathlib.Path({str(tmp_path)!r}, 'done').touch()\n"
    )
    done = shell(f"{' '.join(FULLSHARD)} launch --nproc_per_node 1 {script} 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout) == (0, "[rank 0] a line\n")
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("| true; exit ${PIPESTATUS[0]}", 141, ""),
        ("> /dev/full", 3, "Standard output cannot be written: No space left"),
    ],
)
@pytest.mark.parametrize("verb", ["--help", "config check {run} --json", "inspect {run}"])
def test_a_verb_that_only_prints_ends_quietly(tmp_path, verb, output, code, said):
    run = write_run_file(tmp_path, **CHANGES)
    done = shell(f"{' '.join(FULLSHARD)} {verb.format(run=run)} {output}")
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == bool(said), done.stderr
    assert said in done.stderr
