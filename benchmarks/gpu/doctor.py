"""Stage ``doctor``: versions, devices, libraries, links, and how ranks join each other here."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch.cuda import nccl

import fullshard
from benchmarks.gpu.machine import Machine, output_of
from benchmarks.gpu.record import Case, Lacking
from fullshard.core.comm import Comm

LIBRARIES = {
    "accelerate": "fullshard launch with Accelerate's files; tests of compat/",
    "bitsandbytes": "comparisons with its optimizers",
    "datasets": "tables of many formats",
    "hypothesis": "property tests",
    "peft": "LoRA",
    "plotly": "the report of a run",
    "pydantic": "fullshard train and fullshard launch: the run file's schema",
    "pytest": "stage tests",
    "pytest_timeout": "nothing here: stage tests keeps time itself",
    "rich": "fullshard train",
    "rouge_score": "ROUGE in evaluation",
    "sacrebleu": "BLEU in evaluation",
    "yaml": "run files",
}
"""What each is for."""
SLEEP_CYCLES = 50_000_000


def cases(machine: Machine) -> list[Case]:
    """Return what to ask the machine."""
    return [
        Case("versions", partial(_alone, machine, versions)),
        Case("libraries", libraries),
        Case("device", partial(_alone, machine, device)),
        Case("link", link if machine.cuda else _no_device),
        Case("speed", partial(_alone, machine, speed)),
        Case("1 rank", partial(group, machine, 1), limit_s=60),
        Case("2 ranks", partial(group, machine, 2), limit_s=60),
    ]


def _alone(machine: Machine, work: Callable[[bool], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    return machine.alone(work, machine.cuda, limit_s=limit_s)


def _no_device(limit_s: float) -> dict[str, Any]:
    raise Lacking("there is no CUDA device")


def versions(cuda: bool) -> dict[str, Any]:
    """Return what is installed, by version."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fullshard": fullshard.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
    }


def libraries(limit_s: float) -> dict[str, Any]:
    """Return versions of the libraries that are there, and what the others would be for."""
    there = {name: importlib.util.find_spec(name) is not None for name in LIBRARIES}
    return {
        "there": {name: _version(name) for name in LIBRARIES if there[name]},
        "missing": {name: purpose for name, purpose in LIBRARIES.items() if not there[name]},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version({"yaml": "pyyaml"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "without a version"


def device(cuda: bool) -> dict[str, Any]:
    """Return what the devices and the host have."""
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "host_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "shared_memory_gib": round(shutil.disk_usage("/dev/shm").free / 2**30, 1),
        "devices": [],
    }
    for index in range(torch.cuda.device_count() if cuda else 0):
        about = torch.cuda.get_device_properties(index)
        found["devices"].append(
            {
                "name": about.name,
                "gib": round(about.total_memory / 2**30, 1),
                "capability": f"{about.major}.{about.minor}",
                "multiprocessors": about.multi_processor_count,
                "peers": [i for i in range(torch.cuda.device_count()) if i != index and _peers(index, i)],
            }
        )
    return found


def _peers(one: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(one, other)


def link(limit_s: float) -> dict[str, Any]:
    """Return what nvidia-smi says about links and clocks."""
    return {
        "topology": output_of("nvidia-smi", "topo", "-m"),
        "nvlink": output_of("nvidia-smi", "nvlink", "-s"),
        "pcie_and_clocks": output_of(
            "nvidia-smi",
            "--query-gpu=pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,clocks.sm,power.limit",
            "--format=csv",
        ),
    }


def speed(cuda: bool) -> dict[str, Any]:
    """Return the rates of copies and of a bf16 product, and of the clock that stage ``overlap`` sleeps by."""
    where = torch.device("cuda" if cuda else "cpu")
    nbytes, side = (1 << 30, 8192) if cuda else (1 << 20, 64)
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(on_device)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    pinned = pageable.pin_memory() if cuda else pageable
    left = torch.randn(side, side, device=where, dtype=torch.bfloat16)
    copies: dict[str, Callable[[], Any]] = {
        "device_to_device": lambda: target.copy_(on_device),
        "pinned_to_device": lambda: target.copy_(pinned, non_blocking=True),
        "pageable_to_device": lambda: target.copy_(pageable),
        "device_to_pinned": lambda: pinned.copy_(target, non_blocking=True),
    }
    found = {f"{name}_gb_per_s": round(nbytes / seconds_of(copy, cuda) / 1e9, 2) for name, copy in copies.items()}
    product_s = seconds_of(lambda: left @ left, cuda, repeat=10)
    found["bf16_product_tflops"] = round(2 * side**3 / product_s / 1e12, 2)
    if cuda:
        found["sleep_mhz"] = round(SLEEP_CYCLES / seconds_of(partial(torch.cuda._sleep, SLEEP_CYCLES), cuda) / 1e6, 1)
    return found


def seconds_of(work: Callable[[], Any], cuda: bool, *, repeat: int = 3) -> float:
    """Return the seconds of one call, after one that warms up."""
    work()
    if not cuda:
        began = time.perf_counter()
        for _ in range(repeat):
            work()
        return (time.perf_counter() - began) / repeat
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat


def group(machine: Machine, world: int, limit_s: float) -> dict[str, Any]:
    """Return how ``fullshard.init()`` joins ranks here, and whether an all-gather and a reduce-scatter are right."""
    ranks = machine.together(world, _joined, limit_s=limit_s)
    wrong = [f"rank {number}: {rank['wrong']}" for number, rank in enumerate(ranks) if rank["wrong"]]
    return ranks[0] | ({"failed": "; ".join(wrong)} if wrong else {})


def _joined(comm: Comm) -> dict[str, Any]:
    shard = torch.full((4,), float(comm.rank), device=comm.device)
    full = torch.empty(4 * comm.size, device=comm.device)
    total = torch.empty(4, device=comm.device)
    comm.announce("all-gather of the doctor")
    comm.all_gather(full, shard).wait()
    ones = torch.ones_like(full)
    comm.announce("reduce-scatter of the doctor")
    comm.reduce_scatter(total, ones).wait()
    expected = torch.arange(comm.size, device=comm.device).repeat_interleave(4)
    comm.barrier()
    wrong = [] if torch.equal(full, expected.float()) else [f"all-gather gave {full.tolist()}"]
    wrong += [] if bool((total == comm.size).all()) else [f"reduce-scatter gave {total.tolist()}"]
    return {
        "communicator": type(comm).__name__,
        "device": str(comm.device),
        "backend": str(torch.distributed.get_backend()),
        "wrong": ", ".join(wrong),
    }
