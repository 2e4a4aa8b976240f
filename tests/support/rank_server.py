"""A process that has imported what test scripts import, and forks for each of their ranks.

Importing torch and transformers takes ten seconds of a core, which each rank of each script would spend anew. No thread
runs here, so a fork is as good as a new interpreter; it ends like one, too, except that it leaves its objects alone:
clearing all that was imported takes half a second. ``support.processes`` starts two such servers, because ranks that
share one also share their hash seed, by which sets are ordered.

It reads requests from standard input, one JSON object a line, and answers each when its ranks have ended, with their
exit codes.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

IMPORTED = (
    "accelerate",
    "fullshard",
    "fullshard.compat.accelerate",
    "fullshard.compat.torch_fsdp",
    "fullshard.program.launch.programs.train",
    "peft",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.bart.modeling_bart",
    "transformers.models.t5.modeling_t5",
)
LAST_WORDS_S = 2.0


def serve():
    """Answer requests until there are no more; returns in forks only, with the request and the rank that they are."""
    for line in sys.stdin:
        request, running = json.loads(line), {}
        for number, rank in enumerate(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                return request, rank
            running[pid] = number
        codes = wait(running, time.monotonic() + request["timeout_s"])
        print(json.dumps(codes), flush=True)
    return None


def wait(running, deadline):
    """The exit codes of ``running``, from process id to place; None for one that the deadline ended."""
    codes = [None] * len(running)
    while running:
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, deadline - time.monotonic()))
        late = time.monotonic() > deadline
        for pid in list(running):
            if late:
                os.kill(pid, signal.SIGABRT)  # it prints where its threads are, see become(), unless it is stopped
                signal.sigtimedwait([signal.SIGCHLD], LAST_WORDS_S)
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                codes[running.pop(pid)] = None if late else os.waitstatus_to_exitcode(status)
    return codes


def become(request, rank):
    """Make this process what a new interpreter would be that runs the script; it prints its stacks when it dies."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for descriptor, path in enumerate((os.devnull, rank["out"], rank["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(rank["env"])
    os.chdir(request["cwd"])
    script = request["script"]
    sys.argv = [script, *request["args"]]
    sys.path[0] = str(Path(script).resolve().parent)
    faulthandler.enable()


def run(script):
    """Run a script as the main program until its threads and exit handlers have ended; its exit code."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if code and not isinstance(asked.code, int):
            print(asked.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this folder: modules here have the names of libraries
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # a script that needs it says so
            importlib.import_module(name)
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    forked = serve()
    if forked is not None:
        become(*forked)
        os._exit(run(sys.argv[0]))
