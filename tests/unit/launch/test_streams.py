"""Standard streams that cannot be written."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from rich.console import Console
from fullshard.errors import DataError
from fullshard.program.launch.streams import UnreadOutputError, guard_streams
guard_streams(outlived={outlived})
try:
    Console().print("through rich")  # which ends the process itself on a BrokenPipeError
    print("more", flush=True)
except (UnreadOutputError, DataError) as error:
    print(type(error).__name__, error, file=sys.stderr)
print("the last line", file=sys.stderr)
print("what Python writes when it ends")
"""


def ended(stdout, *, outlived, unbuffered=False, **more):
    program = PROGRAM.format(outlived=outlived)
    command = [sys.executable, *(["-u"] if unbuffered else []), "-c", program]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=100, **more)


def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk():
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("opened", "reason", "error"),
    [
        (without_reader, "Broken pipe", "UnreadOutputError "),
        (full_disk, "No space left on device", "DataError Standard output cannot be written: No space left on device."),
    ],
)
def test_lost_output_is_told_once_or_ends_the_command(opened, reason, error, unbuffered):
    writer = opened()
    lost = ended(writer, outlived=True, unbuffered=unbuffered)
    line = f"fullshard: standard output is lost ({reason}); the run continues"
    assert (lost.returncode, lost.stderr.splitlines()) == (0, [line, "the last line"])
    refused = ended(writer, outlived=False, unbuffered=unbuffered)
    assert (refused.returncode, refused.stderr.splitlines()) == (0, [error, "the last line"])
    os.close(writer)


def test_nothing_ends_because_of_standard_error():
    program = (
        "from fullshard.program.launch.streams import *; guard_streams(); import sys; print(file=sys.stderr); print(1)"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_a_file_opened_later_is_not_written_into_by_messages(tmp_path):
    program = (
        "import os, sys; from fullshard.program.launch.streams import *; guard_streams()\n"
        f"file = open({str(tmp_path / 'weights')!r}, 'w'); assert file.fileno() > 2\n"
        "assert sys.stdin.read() == ''\n"
        "print('a message'); print('a message', file=sys.stderr); os.write(2, b'native code')\n"
        "os.system('echo a child')\n"
        "file.write('weights')\n"
    )
    shell = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", program]
    assert subprocess.run(shell, check=False, timeout=100).returncode == 0
    assert (tmp_path / "weights").read_text() == "weights"


def test_a_pipe_that_is_not_blocking_gets_every_line():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    program = "from fullshard.program.launch.streams import *; guard_streams()\nfor n in range(100_000): print(n)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert [int(line) for line in lines] == list(range(100_000))
    assert process.wait(timeout=100) == 0
