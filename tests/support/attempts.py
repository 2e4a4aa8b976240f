"""Attempts of one run: ranks that are started again after a death, with the variables of a launcher that restarts."""

import os
import signal
import subprocess
import sys
import time

from support.processes import SOURCE, free_port


class Attempts:
    """Starts ``size`` ranks of a command, ``each`` of a machine, and starts all of them again when they have ended."""

    def __init__(self, command, keep, *, size=2, each=None, env=None):
        self.command, self.keep, self.size, self.each = command, keep, size, each or size
        self.count, self.ranks, self.said = 0, [], []
        self.env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | (env or {})

    def start(self):
        common = {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.each),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "FULLSHARD_ATTEMPT": str(self.count),
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, *self.command],
                env=self.env | common | {"RANK": str(rank), "LOCAL_RANK": str(rank % self.each)} | self._kept(rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(self.size)
        ]
        self.count += 1
        self.started = time.time()

    def _kept(self, rank):
        """The variable with the directory of a rank's machine."""
        return {"FULLSHARD_KEEP_DIR": str(self.keep / f"machine{rank // self.each}")}

    def kill(self, *ranks):
        """SIGKILL for ranks; the others end with them, as a launcher ends them."""
        for rank in ranks:
            self.ranks[rank].send_signal(signal.SIGKILL)
        self.end()

    def end(self):
        for process in self.ranks:
            process.kill()
        self.said.append([process.communicate()[0] for process in self.ranks])

    def finish(self, timeout=100):
        """Wait for all ranks; returns their exit codes."""
        texts = [process.communicate(timeout=timeout)[0] for process in self.ranks]
        self.said.append(texts)
        return [process.returncode for process in self.ranks]
