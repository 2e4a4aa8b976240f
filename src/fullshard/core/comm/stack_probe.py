"""Where this process's program is, and whether another process on this machine is stopped, for messages about waits."""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

MACHINE_VARIABLE = "FULLSHARD_MACHINE"
"""Name of this rank's machine, for ranks that see each other's processes but must count as several machines."""

_TORCH_COLLECTIVES = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor",
})  # fmt: skip
"""Collectives of torch that end only when every member of the group has joined."""

_LONG_CALLS = {
    "a compile": ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/", "/triton/"),
    "a load or save": (
        "/transformers/modeling_utils.py",
        "/torch/serialization.py",
        "/fullshard/state/storage/",
        "/fullshard/state/saving/",
    ),
}
"""Parts of the names of files whose functions may hold the interpreter for long without processor time."""

_SHOWN_FRAMES = 12

_TORCH_FILE = dist.distributed_c10d.__file__
_LIBRARIES = (
    str(Path(__file__).parents[2]),
    str(Path(torch.__file__).parent),
    str(Path(os.__file__).parent),
    "<frozen ",
)
_COMMUNICATORS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "testing"))


class Place(NamedTuple):
    """The position of the main thread.

    Attributes:
        text: The source line, for messages.
        members: Inside a collective of torch's own, the global ranks of its group; otherwise empty.
        frames: Equal for two looks only if the thread has stayed at this place in between, or has returned to it.
    """

    text: str
    members: tuple[int, ...]
    frames: tuple[tuple[int, int], ...]


def main_thread_place() -> Place | None:
    """Return where the main thread is now; None if it has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None
    frames = _outwards(frame)
    own = next((one for one in frames if not one.f_code.co_filename.startswith(_LIBRARIES)), frame)
    line = f"{os.path.basename(own.f_code.co_filename)}:{own.f_lineno} ({own.f_code.co_name})"
    marks = tuple((id(one), one.f_lasti) for one in frames)
    inside = next((one for one in reversed(frames) if _is_collective(one.f_code)), None)
    if inside is None:
        return Place(line, (), marks)
    return Place(f"torch.distributed.{inside.f_code.co_name}, called at {line}", _members(inside), marks)


def main_thread_call() -> str:
    """Return :func:`public_call` of the main thread now; empty if it has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else public_call(frame)


def public_call(frame: FrameType) -> str:
    """Return the function of fullshard that the program called, and the line that did; empty if torch called it.

    Methods of a communicator do not count: their collectives have the same names.
    """
    frames = _outwards(frame)
    own = next((n for n, one in enumerate(frames) if not one.f_code.co_filename.startswith(_LIBRARIES)), 0)
    inside = [one for one in frames[:own] if not one.f_code.co_filename.endswith("contextlib.py")]  # of decorators
    name = inside[-1].f_code.co_filename if inside else ""
    if not name.startswith(_LIBRARIES[0]) or name.startswith(_COMMUNICATORS):
        return ""
    line = f"{os.path.basename(frames[own].f_code.co_filename)}:{frames[own].f_lineno}"
    names = [one.f_code.co_qualname for one in reversed(inside)]
    return f"{next((one for one in names if '<locals>' not in one), names[0])}, called at {line}"  # not a decorator's


def exchange_site(frame: FrameType) -> str:
    """Return the function of fullshard that exchanges something, by the innermost frame outside of this room.

    It is the same on all ranks in the same exchange; empty in an exchange that the program began itself.
    """
    code = next(
        (one.f_code for one in _outwards(frame) if not one.f_code.co_filename.startswith(_COMMUNICATORS)), frame.f_code
    )
    inside = code.co_filename.startswith(_LIBRARIES[0])
    return f"{Path(code.co_filename).stem}.{code.co_qualname}" if inside else ""


def main_thread_stack() -> str:
    """Return the innermost frames of the main thread as Python prints them, without source lines, innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else _outwards(frame)[:_SHOWN_FRAMES]
    lines = (f'  File "{one.f_code.co_filename}", line {one.f_lineno}, in {one.f_code.co_name}' for one in frames)
    return "\n".join(reversed([*lines]))


def main_thread_long_call() -> str:
    """Return the compile, load, save or first CUDA call that the main thread is in; empty if it is in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for code in (one.f_code for one in (() if frame is None else _outwards(frame))):
        if code.co_name == "_lazy_init" and code.co_filename.endswith("/torch/cuda/__init__.py"):
            return "the first CUDA call"
        for what, files in _LONG_CALLS.items():
            if any(part in code.co_filename for part in files):
                return what
    return ""


def _outwards(frame: FrameType) -> list[FrameType]:
    """Yield the frames of a thread, innermost first."""
    frames, outer = [frame], frame.f_back
    while outer is not None:
        frames.append(outer)
        outer = outer.f_back
    return frames


def _is_collective(code: CodeType) -> bool:
    return code.co_filename == _TORCH_FILE and code.co_name in _TORCH_COLLECTIVES


def _members(frame: FrameType) -> tuple[int, ...]:
    """Return the global ranks of the group in the collective of torch that ``frame`` runs; empty if unknown."""
    try:
        return tuple(dist.get_process_group_ranks(frame.f_locals.get("group")))
    except (RuntimeError, ValueError, KeyError):  # a group that torch does not know
        return ()


@functools.cache
def machine() -> str:
    """Return an identifier shared by processes that can see each other's process ids; empty if there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def named_machine() -> str:
    """Return an identifier of this rank's machine from the environment; ranks with the same one share memory.

    Processes that see each other are on one machine, unless :data:`MACHINE_VARIABLE` differs. If a launcher states
    that there are several machines, another machine number or network namespace also makes another machine: this
    distinguishes containers that share process ids.
    """
    parts = [machine()]
    world = os.environ.get("WORLD_SIZE", "")
    if os.environ.get(MACHINE_VARIABLE):
        parts.append(os.environ[MACHINE_VARIABLE])
    elif os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        parts += [os.environ.get("GROUP_RANK", ""), _link("/proc/self/ns/net")]
    return " ".join(parts)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Return True if process ``pid`` on this machine is stopped by a signal or a debugger."""
    return _state(pid) in ("T", "t")


def has_ended(pid: int) -> bool:
    """Return True if process ``pid`` on this machine has ended, even if its parent has not reaped it."""
    return _state(pid) in ("", "Z", "X")


def processor_ticks(pid: int) -> int:
    """Return the processor time of a process on this machine in the kernel's ticks; -1 if there is no such process."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else -1


def _state(pid: int) -> str:
    """Return the state letter of a process from Linux; empty if there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of Linux's ``stat`` for a process from its state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
