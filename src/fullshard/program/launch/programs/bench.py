"""The program that every rank of ``fullshard bench`` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.core.comm import init_from_env, shutdown, together
from fullshard.core.comm.stack_probe import named_machine
from fullshard.planner import Rates, rates_before, write_rates
from fullshard.program.config import load_run
from fullshard.program.launch.messages import say
from fullshard.program.launch.programs.rank import rank_parser, run_as_rank
from fullshard.program.launch.progress import WorkProgress
from fullshard.program.train.run_plan import measure_rates
from fullshard.program.train.setup.prepare import prepare
from fullshard.sizes import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process as one rank of a measurement; see ``run_as_rank``."""
    return run_as_rank(make_parser(), arguments, _bench)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of a rank's command line."""
    return rank_parser("bench", {"config": Path, "overrides": str}, {"world": int, "out": Path})


def _bench(options: argparse.Namespace, *, is_first: bool) -> None:
    """Tokenize, join the other ranks and measure; rank 0 writes and prints the rates."""
    config = load_run(options.config, options.overrides)
    rates_before(options.out)  # refuses another file before anything is measured
    data = prepare(config, say if is_first else lambda line: None)
    comm = init_from_env()
    world_size = options.world or comm.size
    with WorkProgress("measuring", shown=is_first) as progress:
        rates = measure_rates(config, data, comm, world_size, progress)
    together(comm, lambda: write_rates(options.out, named_machine(), rates) if is_first else None)
    if is_first:
        values = _values(rates, options.out)
        print(json.dumps(values) if options.json else _text(values), flush=True)
    shutdown()


def _values(rates: Rates, path: Path) -> dict[str, Any]:
    products = [(operator.flops, seconds) for operator, seconds in rates.operators.values() if operator.flops]
    others = [(o.nbytes, seconds) for o, seconds in rates.operators.values() if o.nbytes and not o.flops]
    return {
        "rates": str(path),
        "ranks": rates.ranks,
        "operators": len(rates.operators),
        "product_flops_per_s": _best(products),
        "bytes_per_s": _best(others),
        "host_s": rates.host_s,
        "collectives": rates.collectives,
    }


def _best(measured: list[tuple[int, float]]) -> float:
    return max((size / seconds for size, seconds in measured if seconds), default=0.0)


def _text(values: dict[str, Any]) -> str:
    lines = [
        f"{values['ranks']} rank{'s side by side' if values['ranks'] > 1 else ''}, {values['operators']} operators",
        f"{'fastest product':<28}{values['product_flops_per_s'] / 1e9:>9,.1f} GFLOP/s",
        f"{'fastest other operator':<28}{format_bytes(values['bytes_per_s']):>12}/s",
        f"{'between two operators':<28}{1e6 * values['host_s']:>9,.1f} us",
    ]
    for kind, sizes in values["collectives"].items():
        sent, alone, never_hidden = sizes[-1]
        behind = f"{1e3 * never_hidden:,.1f} ms of it not hidden by computation"
        lines.append(f"{kind + ', ' + format_bytes(sent):<28}{1e3 * alone:>9,.1f} ms, {behind}")
    return "\n".join([*lines, "", f"wrote {values['rates']}"])


if __name__ == "__main__":
    sys.exit(main())
