"""One rank of ``fullshard launch``: runs a script as ``python`` would, and writes a failure to a file.

The launcher runs this file by its path. It imports only the standard library, so that a script can set variables before
it imports torch, and pays for no import that it does not use. The script is the process's real ``__main__`` from its
first line until the interpreter exits, so that pickles name its classes and spawned processes import it.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import importlib.util
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER_PID"
"""The same names as in :mod:`fullshard.program.launch.failure` and :mod:`fullshard.program.launch.processes`."""

INTERRUPTED = 130

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(kind: str, target: str, arguments: list[str]) -> None:
    """Run a script or a module as this process's main program; does not return if it fails.

    Args:
        kind: ``script`` or ``module``.
        target: Path of the script, or name of the module.
        arguments: Its ``sys.argv[1:]``.

    Raises:
        SystemExit: With 1 after an exception, 130 after Ctrl-C, or as the script itself raised it.
    """
    _end_with_launcher()
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # as in a terminal: a line appears when it is written
    try:
        if kind == "script":
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(target).resolve().parent)
            module = _main_module(__file__=target, __cached__=None)
            code = compile(Path(target).read_bytes(), target, "exec")
        else:
            module, code = _of_module(target)
        sys.argv = [module.__file__ or target, *arguments]
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            raise
        _report(error)  # sys.exit("reason"): the launcher prints it once, at the end
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BaseException as error:
        _report(error)
        sys.last_value = error  # as the interpreter does: the watchdog tells the other ranks at exit
        sys.exit(1)


def _end_with_launcher() -> None:
    """Make Linux kill this rank when its launcher dies; SIGKILL, since a script may handle SIGTERM itself."""
    # Removed from the environment: processes that the script starts have another parent than the launcher.
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # the launcher died before the call above
            os._exit(INTERRUPTED)


def _of_module(name: str) -> tuple[ModuleType, CodeType]:
    """Return the main module for ``-m name``, and its code."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code: Callable[[str], CodeType | None] | None = getattr(spec and spec.loader, "get_code", None)
    found = None if spec is None or code is None else code(spec.name)
    if spec is None or found is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run; searched {', '.join(sys.path)}")
    module = _main_module(
        __file__=spec.origin, __cached__=spec.cached, __spec__=spec, __package__=spec.parent, __loader__=spec.loader
    )
    return module, found


def _main_module(**attributes: object) -> ModuleType:
    sys.modules["fullshard_launch_child"] = sys.modules["__main__"]  # keeps this module alive
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __package__=None, __spec__=None, **{"__annotations__": {}})
    module.__dict__.update(attributes)
    return module


def _report(error: BaseException) -> None:
    """Report this rank's failure in the launcher's file if there is one, otherwise on standard error."""
    own: TracebackType | None = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    while own is not None and own.tb_frame.f_code.co_filename.startswith("<frozen "):
        own = own.tb_next  # for a missing module, importlib's frames are useless
    error.__traceback__ = own
    trace: str | None = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, SystemExit):
        trace = None
    elif _has_hook():
        sys.excepthook(type(error), error, own)  # the script's hook prints the traceback
        trace = None
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or _is_forgotten():
        print(str(error) if isinstance(error, SystemExit) else trace or "", file=sys.stderr)
    if not path:
        return
    kind, text, now = type(error).__name__, str(error), time.time()
    failure = {
        "rank": int(os.environ.get("RANK", "0")),
        "kind": kind,
        "message": text,
        "trace": trace,
        "exit_code": 1,
        "time_s": now,
    }
    more = {"py_callstack": trace or text, "timestamp": str(int(now))}
    content = {"message": {"message": f"{kind}: {text}", "errorCode": 1, "extraInfo": more}, "fullshard": failure}
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)  # atomic: the launcher may read it at any moment


def _is_forgotten() -> bool:
    """Return True if torch's agent will not show a failure of this start; as in the launcher's own module."""
    starts, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ and starts < most


def _has_hook() -> bool:
    """Return whether the script has set ``sys.excepthook``. torch's hook, which only adds the rank, does not count."""
    hook = sys.excepthook
    return hook is not sys.__excepthook__ and not (getattr(hook, "__module__", "") or "").startswith("torch.")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
