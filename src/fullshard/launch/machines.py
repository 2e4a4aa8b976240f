"""Which machines run a script, and where they meet: from the command line, a configuration file and Slurm. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import ConfigError

STATIC = "static"
"""Every machine has its number, and machine 0 is where they meet: torchrun's default."""

DYNAMIC = "c10d"
"""Machines are numbered as they come, and may be a number between a least and a most."""

DEFAULT_PORT = 29500

_SLURM = "Slurm"


@dataclass(frozen=True)
class Nodes:
    """How many machines there are to be.

    Attributes:
        least: With fewer the script does not start.
        most: No more take part.
    """

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """``N``, or ``MIN:MAX``.

        Raises:
            ValueError: It is neither.
        """
        least, _, most = text.partition(":")
        nodes = cls(int(least), int(most or least))
        if not 1 <= nodes.least <= nodes.most:
            raise ValueError(text)
        return nodes

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Wishes:
    """What one source says about machines; None: nothing.

    Attributes:
        source: Its name, for messages.
        nnodes: How many machines.
        node_rank: The number of this one.
        nproc: Ranks on this machine.
        processes: Ranks on all machines together.
        host: Where the machines meet: name or address of machine 0.
        port: The TCP port there.
        backend: ``static`` or ``c10d``.
        run_id: What keeps runs apart that meet at the same place.
    """

    source: str
    nnodes: Nodes | None = None
    node_rank: int | None = None
    nproc: int | None = None
    processes: int | None = None
    host: str | None = None
    port: int | None = None
    backend: str | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class Plan:
    """One run on one or several machines, as this machine sees it; the fields are those of :class:`Wishes`."""

    nnodes: Nodes
    node_rank: int
    nproc: int
    host: str
    port: int
    backend: str
    run_id: str

    @property
    def several(self) -> bool:
        """Whether there may be more machines than this one."""
        return self.nnodes.most > 1

    @property
    def place(self) -> str:
        """Where the machines meet, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def plan_machines(wishes: Sequence[Wishes], choose_nproc: Callable[[int | None], int]) -> Plan:
    """Bring the sources together: the first that says something wins.

    Args:
        wishes: The command line, the file, Slurm: in this order.
        choose_nproc: Gives the number of ranks here, from what was asked for; None: nothing was.

    Raises:
        ConfigError: Something is missing, or contradicts something else.
    """
    nnodes, _ = _first(wishes, "nnodes", Nodes(1, 1))
    backend, backend_from = _first(wishes, "backend", DYNAMIC if nnodes.least < nnodes.most else STATIC)
    if backend not in (STATIC, DYNAMIC):
        raise ConfigError(
            f"The rendezvous backend is {STATIC} or {DYNAMIC}; {backend_from} says {backend}. {STATIC} needs nothing "
            f"but --node_rank and --rdzv_endpoint."
        )
    if backend == STATIC and nnodes.least < nnodes.most:
        raise ConfigError(
            f"--nnodes {nnodes} leaves the number of machines open, and {backend_from} says rdzv_backend {STATIC}, "
            f"which needs a fixed one. Use --rdzv_backend {DYNAMIC}, or --nnodes {nnodes.most}."
        )
    _agree_with_slurm(wishes)
    several = nnodes.most > 1
    host, _ = _first(wishes, "host", None if several else "127.0.0.1")
    if host is None:
        raise ConfigError(
            f"{nnodes} machines need a place to meet. Give all of them --rdzv_endpoint HOST:PORT, with the address of "
            "machine 0 and a free port there (main_process_ip and main_process_port in the file)."
        )
    port, _ = _first(wishes, "port", DEFAULT_PORT if several else 0)
    node_rank = _node_rank(wishes, nnodes, needed=several and backend == STATIC)
    run_id, _ = _first(wishes, "run_id", "none")
    return Plan(nnodes, node_rank, _nproc(wishes, nnodes, choose_nproc), host, port, backend, run_id)


def _first(wishes: Sequence[Wishes], name: str, otherwise: Any) -> tuple[Any, str]:
    """The first value that a source gives, and the source."""
    for wish in wishes:
        if getattr(wish, name) is not None:
            return getattr(wish, name), wish.source
    return otherwise, "the default"


def _node_rank(wishes: Sequence[Wishes], nnodes: Nodes, *, needed: bool) -> int:
    rank, source = _first(wishes, "node_rank", None)
    if rank is None and needed:
        raise ConfigError(
            f"Each of {nnodes} machines needs a number of its own: give --node_rank 0 on the one of --rdzv_endpoint, "
            f"and 1 to {nnodes.most - 1} on the others."
        )
    if rank is not None and not 0 <= rank < nnodes.most:
        raise ConfigError(
            f"Machines are numbered from 0 to {nnodes.most - 1}, since there are {nnodes}; {source} says that this "
            f"one is number {rank}. Mend --node_rank or --nnodes."
        )
    return rank or 0


def _nproc(wishes: Sequence[Wishes], nnodes: Nodes, choose_nproc: Callable[[int | None], int]) -> int:
    """Ranks on this machine: asked for, or this machine's part of what was asked for of all."""
    for wish in wishes:
        if wish.nproc is not None:
            return choose_nproc(wish.nproc)
        if wish.processes is None:
            continue
        if nnodes.least < nnodes.most:
            raise ConfigError(
                f"{wish.source} counts the ranks of all machines (num_processes: {wish.processes}), and --nnodes "
                f"{nnodes} leaves open how many machines there are. Give --nproc_per_node."
            )
        if wish.processes % nnodes.most:
            raise ConfigError(
                f"{wish.source} wants {wish.processes} ranks on all machines together (num_processes), and there are "
                f"{nnodes}: every machine runs as many. Use a multiple of {nnodes}, or give --nproc_per_node."
            )
        return choose_nproc(wish.processes // nnodes.most)
    return choose_nproc(None)


def _agree_with_slurm(wishes: Sequence[Wishes]) -> None:
    """What Slurm gave the job is a fact: whoever says something else would wait for machines that never come.

    Raises:
        ConfigError: Another source says something else.
    """
    for slurm in (wish for wish in wishes if wish.source == _SLURM and wish.nnodes is not None):
        for other in wishes:
            if other.nnodes is not None and slurm.nnodes is not None and other.nnodes.most != slurm.nnodes.most:
                raise ConfigError(
                    f"{other.source} says {other.nnodes} machine{'s' if other.nnodes.most > 1 else ''}, and Slurm "
                    f"started this on {slurm.nnodes} (SLURM_NNODES). Change one of them: --nnodes {slurm.nnodes}, or "
                    f"srun --nodes={other.nnodes.most}."
                )
            if other.node_rank is not None and other.node_rank != slurm.node_rank and slurm.nnodes != Nodes(1, 1):
                raise ConfigError(
                    f"{other.source} says that this is machine {other.node_rank}, and Slurm that it is "
                    f"{slurm.node_rank} (SLURM_NODEID). Leave it to Slurm: take away --node_rank, or machine_rank from "
                    "the file."
                )


def slurm_wishes(environment: Mapping[str, str]) -> Wishes | None:
    """What Slurm says, where it started this process; None where it did not.

    Args:
        environment: The variables of this process.

    Raises:
        ConfigError: The job has several machines and only one of them runs ``fullshard launch``, or one of them runs
            it several times.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    job = environment["SLURM_JOB_ID"]
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if "SLURM_STEP_ID" not in environment:
        if nodes > 1:
            raise ConfigError(
                f"Slurm gave this job {nodes} machines, and `fullshard launch` runs on one of them only. Start it on "
                f"each: srun --ntasks-per-node=1 fullshard launch …"
            )
        return None
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks > nodes:
        raise ConfigError(
            f"srun started `fullshard launch` {tasks} times on {nodes} machine{'s' if nodes > 1 else ''}, and it "
            "starts the ranks of a machine itself: one for each GPU. Use srun --ntasks-per-node=1, with the GPUs given "
            "to the task (--gpus-per-task, or --gpus-per-node)."
        )
    if nodes == 1:
        return Wishes(_SLURM, nnodes=Nodes(1, 1), node_rank=0)
    step = environment["SLURM_STEP_ID"]
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return Wishes(
        _SLURM,
        nnodes=Nodes(nodes, nodes),
        node_rank=_number(environment, "SLURM_NODEID"),
        host=first_host(hosts) or None,
        # Jobs that share a machine get different ports; every machine computes the same one.
        port=20_000 + zlib.crc32(f"{job}.{step}".encode()) % 10_000,
        run_id=f"slurm-{job}.{step}",
    )


def _number(environment: Mapping[str, str], *names: str) -> int:
    """The first of some variables that is set, as a number; 1 for none of them."""
    text = next((environment[name] for name in names if name in environment), "1")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"Slurm's variable {names[0]} must be a number; got {text!r}.") from None


def first_host(hosts: str) -> str:
    """The first of Slurm's list of machines, such as ``gpu07`` of ``gpu[07-09,12],login1``.

    Args:
        hosts: The list, as in ``SLURM_JOB_NODELIST``.
    """
    outside = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    first = outside.group() if outside else ""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Host and port of ``HOST:PORT`` or ``HOST``; an IPv6 address with a port is in brackets.

    Raises:
        ConfigError: It is neither.
    """
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::(\d+))?|([^\s:\[\]]+)(?::(\d+))?", text.strip())
    port = None if match is None else match[2] or match[4]
    if match is None or int(port or 0) > 65_535:
        raise ConfigError(f"--rdzv_endpoint is HOST:PORT, with a port up to 65535; got {text!r}.")
    return match[1] or match[3], None if port is None else int(port)
