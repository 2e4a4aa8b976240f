"""The fork server: ``python -m fullshard.program.launch.programs.forks SOCKET MODULE ARGUMENTS``.

It imports the module of a rank program once and forks the ranks of each attempt
(``ForkServer``). No thread runs here, so a fork behaves like a new interpreter, also
at its end. Ranks get the environment, standard output and error, and arguments that a new interpreter would have.
Unlike interpreters they share the seed of hashes, which orders sets of strings.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping

from fullshard.program.launch.processes import LONGEST_MESSAGE, end_with_launcher
from fullshard.program.launch.streams import guard_streams


def main() -> int:
    """Import the module, then serve; in forks, run the module's ``main`` and return its exit code."""
    end_with_launcher()
    guard_streams()  # imports print warnings
    # A SIGINT for all processes ends this one without a traceback: the launcher has it too, and says what follows.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    number, name, *arguments = sys.argv[1:]
    launcher = socket.socket(fileno=int(number))
    # What imports start must not hold it: the launcher waits for its end when this process has died.
    launcher.set_inheritable(False)
    # No garbage collection of imported objects, here or in ranks: it finds nothing and would copy shared pages.
    gc.disable()
    module = importlib.import_module(name)
    if hasattr(module, "import_more"):
        module.import_more(arguments)
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    variables = _serve(launcher)
    if variables is None:
        return 0
    launcher.close()
    gc.enable()
    if is_default and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _draw_seeds()
    os.environ.update(variables)
    sys.argv = [str(module.__file__), *arguments]
    return module.main(arguments)


def _draw_seeds() -> None:
    """Give this rank random numbers of its own if imports have drawn a seed; Python's are reseeded by a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _serve(launcher: socket.socket) -> Mapping[str, str] | None:
    """Fork for each request of the launcher until there are none left; return None, or in a rank its variables."""
    while request := launcher.recv(LONGEST_MESSAGE):
        told, tell = os.pipe()
        wait, go = os.pipe()
        parent = os.fork()
        if parent == 0:
            pids = []
            for variables in json.loads(request):
                pid = os.fork()
                if pid == 0:
                    for end in (told, tell, go):
                        os.close(end)
                    if not os.read(
                        wait, 1
                    ):  # a rank begins when the launcher knows of it, and ends if this dies before
                        os.kill(os.getpid(), signal.SIGKILL)
                    os.close(wait)
                    return variables
                # Before the launcher knows of it: Ctrl-C of the terminal reaches only the launcher, which signals
                # the groups of ranks.
                os.setpgid(pid, pid)
                pids.append(pid)
            os.write(tell, json.dumps(pids).encode())
            os._exit(0)
        for end in (tell, wait):
            os.close(end)
        _, status = os.waitpid(parent, 0)  # from here on the launcher is the parent of the ranks
        if status != 0:
            sys.exit("fullshard: the ranks could not be forked")  # ranks forked so far end with this process
        pids = os.read(told, LONGEST_MESSAGE)
        launcher.send(pids)
        os.write(go, bytes(len(json.loads(pids))))
        for end in (told, go):
            os.close(end)
    return None


if __name__ == "__main__":
    sys.exit(main())
