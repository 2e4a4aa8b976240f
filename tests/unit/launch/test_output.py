"""What ranks print comes out in whole lines, each with its rank, and progress bars stay usable."""

import io
import threading

import pytest

from fullshard.program.launch.output import BAR_SECONDS, Output


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def written():
    return {"stdout": io.BytesIO(), "stderr": io.BytesIO()}


def output_of(written, columns=None, clock=None):
    return Output(written, columns=columns, clock=clock or Clock())


def test_lines_keep_their_stream_and_get_their_rank(written):
    output = output_of(written)
    output.feed(0, "stdout", b"one\ntw")
    output.feed(1, "stderr", b"warning\n")
    output.feed(0, "stdout", b"o\n\nthree")
    output.end(0, "stdout")
    assert written["stdout"].getvalue() == b"[rank 0] one\n[rank 0] two\n[rank 0] \n[rank 0] three\n"
    assert written["stderr"].getvalue() == b"[rank 1] warning\n"


def test_lines_of_ranks_that_write_at_once_are_never_torn(written):
    output = output_of(written)

    def write(rank):
        for number in range(200):
            for part in (b"line ", str(number).encode(), b" of a rank\n"):
                output.feed(rank, "stdout", part)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = written["stdout"].getvalue().decode().splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] line {number} of a rank" for number in range(200)]


def test_windows_line_ends_and_bytes_that_are_no_text_pass(written):
    output = output_of(written)
    output.feed(0, "stdout", b"caf\xc3\xa9\xff\r\nnext\r")
    output.feed(0, "stdout", b"\nlast\n")
    assert written["stdout"].getvalue() == b"[rank 0] caf\xc3\xa9\xff\n[rank 0] next\n[rank 0] last\n"


def test_a_bar_in_a_file_is_its_last_state_and_one_line_every_ten_seconds(written):
    clock = Clock()
    output = output_of(written, clock=clock)
    for percent in range(100):
        output.feed(0, "stderr", b"\r%d%%" % percent)
        clock.now += 0.01
    assert written["stderr"].getvalue() == b""
    clock.now += BAR_SECONDS
    output.feed(0, "stderr", b"\r99.5%")
    output.feed(0, "stderr", b"\r100%\n")
    assert written["stderr"].getvalue() == b"[rank 0] 99.5%\n[rank 0] 100%\n"


def test_a_bar_that_ends_in_the_carriage_return_is_not_glued_to_the_next_state(written):
    output = output_of(written)
    for part in (b"10%\r", b"20%\r", b"30%\r\n"):
        output.feed(0, "stderr", part)
    assert written["stderr"].getvalue() == b"[rank 0] 30%\n"


def test_on_a_terminal_the_lowest_ranks_bar_stays_below_the_lines(written):
    output = output_of(written, columns=20)
    output.feed(1, "stderr", b"\r50% of rank one")
    output.feed(0, "stderr", b"\r10% of rank zero")
    output.feed(1, "stderr", b"\r60% of rank one")
    assert written["stderr"].getvalue().endswith(b"\r\x1b[K[rank 0] 10% of ran")
    output.feed(1, "stderr", b"\na line\n")
    text = written["stderr"].getvalue().decode()
    assert screen(text) == ["[rank 1] 60% of rank one", "[rank 1] a line", "[rank 0] 10% of ran"]
    output.feed(0, "stderr", b"\rdone\n")
    assert screen(written["stderr"].getvalue().decode())[-2:] == ["[rank 0] done", ""]


def test_nested_bars_do_not_move_the_cursor_out_of_their_rank(written):
    output = output_of(written)
    output.feed(0, "stderr", b"\router 1\n\rinner 1\x1b[A\n\x1b[A\r\x1b[32mgreen\x1b[0m\n")
    assert written["stderr"].getvalue() == b"[rank 0] outer 1\n[rank 0] inner 1\n[rank 0] \x1b[32mgreen\x1b[0m\n"


def screen(text):
    """What a terminal shows of a text with carriage returns and erasures."""
    lines, row = [""], ""
    for part in text.replace("\x1b[K", "\0").split("\n"):
        row = ""
        for piece in part.split("\r"):
            row = (
                piece.replace("\0", "")
                if piece.startswith("\0") or len(piece) >= len(row)
                else piece + row[len(piece) :]
            )
        lines.append(row)
    return lines[1:]
