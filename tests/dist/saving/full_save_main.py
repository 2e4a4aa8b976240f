"""What a full save on gloo processes takes: memory, and time on a slow disk."""

import contextlib
import datetime
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import GlooComm, MemoryMeter, run_together
from fullshard.core.engine import full_state_dict
from support.models import TinyLM
from support.parity import replicas
from support.rank_script import parse, print_result

TIMEOUT_S = 2.0


def resident(name):
    """A line of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


class ResidentGrowth:
    """How far the process grew above what it held on entry."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self.start = resident("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = resident("VmHWM") - self.start


@contextlib.contextmanager
def slower_than_the_ranks(comm):
    """A disk that takes one piece each time the ranks meet, so that steps wait for it and never it for them."""
    allowed, pwrite, exchange = threading.Semaphore(0), os.pwrite, comm.all_gather_object

    def counted(value):
        allowed.release()
        return exchange(value)

    def late(descriptor, data, position):
        allowed.acquire()
        return pwrite(descriptor, data, position)

    run_together.PATIENCE_SECONDS, before = 0.02, run_together.PATIENCE_SECONDS
    comm.all_gather_object, os.pwrite = counted, late
    yield
    comm.all_gather_object, os.pwrite = exchange, pwrite
    run_together.PATIENCE_SECONDS = before


def memory(comm, directory):
    """Peaks of saving and of the state dict, of a model of 60 million parameters."""
    config = T5Config(vocab_size=32128, d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0)
    with torch.device("meta"):  # random values would take most of the time
        model = T5ForConditionalGeneration(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    model = fullshard.fully_shard(model, comm)
    with ResidentGrowth() as saving:
        fullshard.save(model, directory / "large")
    with ResidentGrowth() as casting:
        fullshard.save(model, directory / "large", dtype=torch.bfloat16)
    with slower_than_the_ranks(comm), MemoryMeter(comm.device) as saving_meter:
        fullshard.save(model, directory / "large", dtype=torch.bfloat16)
    with MemoryMeter(comm.device) as state_meter:
        state = full_state_dict(model)
    return {
        "model": sum(p.shard_meta.placement.numel for p in model.parameters()) * 4,
        "file": (directory / "large" / "model.safetensors").stat().st_size,
        "largest_unit": max(row.gathered_bytes for row in fullshard.units(model).rows),
        "resident_growth": saving.bytes,
        "resident_growth_with_casts": casting.bytes,
        "save_above_start": saving_meter.peak_bytes - saving_meter.start_bytes,
        "state_above_start": state_meter.peak_bytes - state_meter.start_bytes,
        "names": len(state),
    }


def slow_disk(comm, directory):
    """A disk that writes nothing until the ranks have waited longer than they would have in a single collective."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    _, (model,) = replicas(TinyLM, 1)
    slow = GlooComm(group)
    model = fullshard.fully_shard(model, slow)
    answered, pwrite, exchange, met = threading.Event(), os.pwrite, slow.all_gather_object, []
    started = time.monotonic()

    def counted(value):
        met.append(value)
        if time.monotonic() - started > 1.5 * TIMEOUT_S:
            answered.set()
        return exchange(value)

    def late(descriptor, data, position):
        answered.wait()
        return pwrite(descriptor, data, position)

    slow.all_gather_object, os.pwrite = counted, late
    fullshard.save(model, directory / "small")
    os.pwrite = pwrite
    return {"met": len(met), "saved": (directory / "small" / "model.safetensors").exists()}


CASES = {"memory": memory, "slow_disk": slow_disk}


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    comm = fullshard.init()
    results = {name: CASES[name](comm, options.directory) for name in options.only}
    print_result(comm.all_gather_object(results))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
