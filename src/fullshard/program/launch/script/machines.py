"""The machines of a run and their endpoint, from the command line, a configuration file and Slurm. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import ConfigError

STATIC = "static"
"""Torch's backend for machines with fixed numbers; its ranks cannot start again. The default without restarts."""

DYNAMIC = "c10d"
"""Torch's backend that numbers machines itself; their number may lie between a minimum and a maximum."""

DEFAULT_PORT = 29500

_SLURM = "Slurm"


@dataclass(frozen=True)
class Nodes:
    """The allowed number of machines, from ``least`` to ``most``."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Parse ``N`` or ``MIN:MAX``.

        Raises:
            ValueError: The text is neither.
        """
        least, _, most = text.partition(":")
        nodes = cls(int(least), int(most or least))
        if not 1 <= nodes.least <= nodes.most:
            raise ValueError(text)
        return nodes

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class MachineSettings:
    """Settings of machines from one source; None where it does not set one."""

    name: str  # name of the source, for messages
    nnodes: Nodes | None = None  # number of machines
    node_rank: int | None = None  # number of this machine
    nproc: int | None = None  # ranks on this machine
    processes: int | None = None  # ranks on all machines together
    host: str | None = None  # name or address of machine 0, where the machines meet
    port: int | None = None  # TCP port there
    backend: str | None = None  # ``static`` or ``c10d``
    run_id: str | None = None  # distinguishes runs with the same endpoint


@dataclass(frozen=True)
class MachinePlan:
    """The machines of one run, on this machine; the fields are those of :class:`MachineSettings`."""

    nnodes: Nodes
    node_rank: int | None  # None: torch numbers the machines
    nproc: int
    host: str
    port: int
    backend: str
    run_id: str

    @property
    def several(self) -> bool:
        """True if there may be other machines."""
        return self.nnodes.most > 1

    @property
    def place(self) -> str:
        """The endpoint where the machines meet, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def plan_machines(
    sources: Sequence[MachineSettings], choose_nproc: Callable[[int | None], int], *, restarts: bool = False
) -> MachinePlan:
    """Combine the sources; the first one that has a setting wins.

    Args:
        sources: The command line, the file and Slurm, in this order.
        choose_nproc: Returns the number of ranks here for the requested number, or for None.
        restarts: Whether ranks may start again.

    Raises:
        ConfigError: A setting is missing, or settings contradict each other.
    """
    nnodes, _ = _first(sources, "nnodes", Nodes(1, 1))
    several = nnodes.most > 1
    moving = nnodes.least < nnodes.most or (several and restarts)
    backend, backend_from = _first(sources, "backend", DYNAMIC if moving else STATIC)
    if backend not in (STATIC, DYNAMIC):
        raise ConfigError(
            f"The rendezvous backend is {STATIC} or {DYNAMIC}; {backend_from} sets {backend}. {STATIC} needs only "
            f"--node_rank and --rdzv_endpoint."
        )
    if backend == STATIC and nnodes.least < nnodes.most:
        raise ConfigError(
            f"--nnodes {nnodes} is a range, and {backend_from} sets rdzv_backend {STATIC}, "
            f"which needs a fixed one. Use --rdzv_backend {DYNAMIC}, or --nnodes {nnodes.most}."
        )
    if backend == STATIC and moving:
        raise ConfigError(
            f"--max_restarts starts the ranks of {nnodes} machines again, and {backend_from} sets rdzv_backend "
            f"{STATIC}, under which they would find addresses of the ranks before. Use --rdzv_backend {DYNAMIC}."
        )
    _agree_with_slurm(sources)
    host, _ = _first(sources, "host", None if several else "127.0.0.1")
    if host is None:
        raise ConfigError(
            f"{nnodes} machines need a place to meet. Give each --rdzv_endpoint HOST:PORT, with the address of "
            "machine 0 and a free port there (main_process_ip and main_process_port in the file)."
        )
    port, _ = _first(sources, "port", DEFAULT_PORT if several else 0)
    node_rank = _node_rank(sources, nnodes, needed=several and backend == STATIC)
    run_id, _ = _first(sources, "run_id", "none")
    return MachinePlan(nnodes, node_rank, _nproc(sources, nnodes, choose_nproc), host, port, backend, run_id)


def _first(sources: Sequence[MachineSettings], name: str, otherwise: Any) -> tuple[Any, str]:
    """Return the first source's value, and the source's name."""
    for source in sources:
        if getattr(source, name) is not None:
            return getattr(source, name), source.name
    return otherwise, "the default"


def _node_rank(sources: Sequence[MachineSettings], nnodes: Nodes, *, needed: bool) -> int | None:
    rank, source = _first(sources, "node_rank", None)
    if rank is None and needed:
        raise ConfigError(
            f"Each of {nnodes} machines needs a number of its own: give --node_rank 0 on the one of --rdzv_endpoint, "
            f"and 1 to {nnodes.most - 1} on the others."
        )
    if rank is not None and not 0 <= rank < nnodes.most:
        raise ConfigError(
            f"With --nnodes {nnodes}, machines are numbered from 0 to {nnodes.most - 1}; {source} says that "
            f"this one is number {rank}. Correct --node_rank or --nnodes."
        )
    return rank


def _nproc(sources: Sequence[MachineSettings], nnodes: Nodes, choose_nproc: Callable[[int | None], int]) -> int:
    """Return the ranks on this machine: the requested number, or an equal share of that of all machines."""
    for source in sources:
        if source.nproc is not None:
            return choose_nproc(source.nproc)
        if source.processes is None:
            continue
        if nnodes.least < nnodes.most:
            raise ConfigError(
                f"{source.name} counts the ranks of all machines (num_processes: {source.processes}), and --nnodes "
                f"{nnodes} is a range of machines. Give --nproc_per_node."
            )
        if source.processes % nnodes.most:
            raise ConfigError(
                f"{source.name} requests {source.processes} ranks on all machines together (num_processes), and "
                f"there are {nnodes} machines, which run equal numbers. Use a multiple of {nnodes}, or give "
                "--nproc_per_node."
            )
        return choose_nproc(source.processes // nnodes.most)
    return choose_nproc(None)


def _agree_with_slurm(sources: Sequence[MachineSettings]) -> None:
    """Require that other sources agree with Slurm: otherwise ranks would wait for machines that never arrive.

    Raises:
        ConfigError: Another source contradicts Slurm.
    """
    for slurm in (source for source in sources if source.name == _SLURM and source.nnodes is not None):
        for other in sources:
            if other.nnodes is not None and slurm.nnodes is not None and other.nnodes.most != slurm.nnodes.most:
                raise ConfigError(
                    f"{other.name} says {other.nnodes} machine{'s' if other.nnodes.most > 1 else ''}, and Slurm "
                    f"started this on {slurm.nnodes} (SLURM_NNODES). Change one of them: --nnodes {slurm.nnodes}, or "
                    f"srun --nodes={other.nnodes.most}."
                )
            if other.node_rank is not None and other.node_rank != slurm.node_rank and slurm.nnodes != Nodes(1, 1):
                raise ConfigError(
                    f"{other.name} says that this is machine {other.node_rank}, and Slurm that it is "
                    f"{slurm.node_rank} (SLURM_NODEID). Leave it to Slurm: remove --node_rank, or machine_rank from "
                    "the file."
                )


def slurm_settings(environment: Mapping[str, str]) -> MachineSettings | None:
    """Return Slurm's settings if it started this process, else None.

    Raises:
        ConfigError: The job has several machines and only one of them runs ``fullshard launch``, or one machine runs
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
            f"srun started `fullshard launch` {tasks} times on {nodes} machine{'s' if nodes > 1 else ''}, but one "
            "process starts all ranks of a machine, one per GPU. Use srun --ntasks-per-node=1, with the GPUs given "
            "to the task (--gpus-per-task, or --gpus-per-node)."
        )
    if nodes == 1:
        return MachineSettings(_SLURM, nnodes=Nodes(1, 1), node_rank=0)
    step = environment["SLURM_STEP_ID"]
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return MachineSettings(
        _SLURM,
        nnodes=Nodes(nodes, nodes),
        node_rank=_number(environment, "SLURM_NODEID"),
        host=first_host(hosts) or None,
        # Jobs that share a machine get different ports; every machine computes the same one.
        port=20_000 + zlib.crc32(f"{job}.{step}".encode()) % 10_000,
        run_id=f"slurm-{job}.{step}",
    )


def _number(environment: Mapping[str, str], *names: str) -> int:
    """Return the first variable that is set, as a number; 1 if none is."""
    text = next((environment[name] for name in names if name in environment), "1")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"Slurm's variable {names[0]} must be a number; got {text!r}.") from None


def first_host(hosts: str) -> str:
    """Return the first machine of Slurm's list, ``SLURM_JOB_NODELIST``: ``gpu07`` of ``gpu[07-09,12],login1``."""
    outside = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    first = outside.group() if outside else ""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Parse ``HOST:PORT`` or ``HOST``; an IPv6 address with a port is in brackets.

    Raises:
        ConfigError: The text is neither.
    """
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::(\d+))?|([^\s:\[\]]+)(?::(\d+))?", text.strip())
    port = None if match is None else match[2] or match[4]
    if match is None or int(port or 0) > 65_535:
        raise ConfigError(f"--rdzv_endpoint is HOST:PORT, with a port up to 65535; got {text!r}.")
    return match[1] or match[3], None if port is None else int(port)
