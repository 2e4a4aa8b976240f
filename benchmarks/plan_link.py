"""Planned step times over a slow link, compared with the same steps: two CPU ranks in network namespaces of their own.

    sudo python benchmarks/plan_link.py [--rate 1gbit] [--out PATH]

Makes two network and process namespaces on this machine (Linux, root, ``ip`` and ``tc``) with a link between them that
lets through ``--rate`` each way, and removes them at the end. In each runs one rank, which cannot read the other's
memory. For each configuration the ranks measure rates over the link and real steps in turns, and rank 0 plans, as in
``plan_time.py``. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from namespaces import on_two_machines
from plan import Configuration
from plan_time import figures, measured
from ranks import quiet

from fullshard.core.comm import init_from_env, shutdown

LATEST = Path(__file__).parent / "results" / "plan_link.json"
CHOSEN = (
    *(Configuration(model) for model in ("t5", "bart", "gpt2", "llama", "qwen", "mixtral")),
    *(Configuration(model, strategy=s) for model in ("t5", "llama") for s in ("SHARD_GRAD_OP", "NO_SHARD")),
    *(Configuration(model, checkpointing=True, batch=(8, 96)) for model in ("t5", "gpt2", "llama")),
    *(Configuration(model, frozen="shard") for model in ("t5", "llama")),
    Configuration("t5-large", optimizer="adafactor"),
)


def compare(out: Path, rate: str) -> None:
    """Compare all configurations; as one of the ranks."""
    comm = init_from_env()
    rows = []
    for one in CHOSEN:
        found, own = measured(comm, one)
        seconds = comm.all_gather_object(own)
        if comm.rank == 0:
            rows.append({"name": one.name, **figures(one.timing(found), seconds)})
            print(f"{rows[-1]['error']:+.1%} of {1e3 * rows[-1]['measured_s']:.0f} ms {one.name}", file=sys.stderr)
            written = {"rate": rate, "summary": summary(rows), "torch": torch.__version__, "rows": rows}
            out.write_text(json.dumps(written, indent=1) + "\n")
        comm.barrier()
    shutdown()


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures over all rows."""
    errors = [row["error"] for row in rows]
    return {
        "configurations": len(rows),
        "time_median_error": round(statistics.median(map(abs, errors)), 4),
        "time_worst_error": max(map(abs, errors)),
    }


def main() -> None:
    """Make the link and compare over it, or be one of its ranks."""
    parser = argparse.ArgumentParser(description="Compare planned step times over a slow link with measured ones.")
    parser.add_argument("--rate", default="1gbit", help="as tc writes it")
    parser.add_argument("--out", metavar="PATH", type=Path, default=LATEST)
    options = parser.parse_args()
    quiet()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        return compare(options.out, options.rate)
    codes = on_two_machines(options.rate)
    if any(codes):
        sys.exit(f"a rank failed: exit codes {codes}")
    return print(json.dumps(json.loads(options.out.read_text())["summary"], indent=1))


if __name__ == "__main__":
    main()
