"""``fullshard plan``: what each rank of a run will hold, send and compute, before there is a GPU for it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.program.cli.common import NeverSilent, ShareProgress, add_run_arguments, amount, load_program, positive
from fullshard.program.config import load_run
from fullshard.program.launch import choose_nproc
from fullshard.program.launch.messages import say
from fullshard.sizes import format_bytes, format_duration

PROGRAM = "fullshard.program.train.run_plan"
PAGE = "fullshard.program.report"
SEARCH = "fullshard.program.train.search"
DATA = "fullshard.program.train.setup.prepare"
DEVICES = "fullshard.program.train.setup.devices"
FLOAT8 = "fullshard.program.train.setup.float8"

DRAWN_WORLDS = (1, 2, 4, 8, 64, 512, 4096)
"""Numbers of ranks on a plan's page."""

DOES_NOT_FIT = 1
"""Exit code if the run needs more memory than there is."""

SUMMARY = "show the memory, traffic and time of a run, before it starts"

DESCRIPTION = """\
Show the most memory that a rank of a run holds, by use, and the bytes that it sends in a step. The run's own model,
schedule and optimizer take three steps on tensors without memory, which needs no GPU, no ranks, no weights and no
network. The batch is the longest that the data can give; with --length no data is read.

With --gpu or --memory, also say whether it fits; the exit code is 1 if it does not. --gpu adds what a GPU holds besides
tensors, and how long a step takes by its data sheet. --fit searches for the fastest settings that fit, among those that
the run file leaves open, and prints them as overrides.

Evaluation, its generated text, saving and resuming have peaks of their own. Host memory holds copies of checkpoints
that are being saved and snapshots for restarts, on CPU ranks in addition to the peaks. Without --gpu, what a process
holds besides tensors is not counted.
"""

EPILOG = """\
examples:
  fullshard plan examples/banking77_tiny.yaml --world 2
  fullshard plan run.yaml --world 8 --gpu h100 --price 2.5
  fullshard plan run.yaml --world 1,2,4,8 --gpu a10g
  fullshard plan run.yaml --world 4 --gpu a10g --fit
  fullshard plan run.yaml --world 8 --gpu a10g --length 512/128
  fullshard plan run.yaml --world 8 --gpu a10g --html plan.html
  fullshard plan run.yaml --world 8 --memory 78GB training.per_device_train_batch_size=16 --json
"""

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}B": size for unit, size in _UNITS.items() if len(unit) == 1 and unit != "B"}
_UNITS |= {f"{unit}IB": 1 << (10 * power) for power, unit in enumerate("KMGT", 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--world",
        metavar="N[,N...]",
        type=worlds,
        help="ranks to plan for (default: as many as train would start); several: one line each",
    )
    parser.add_argument("--gpu", metavar="NAME", help="GPU of each rank, such as h100; an unknown name lists them")
    parser.add_argument("--memory", metavar="SIZE", type=memory, help="memory of each rank, such as 80GB or 24GiB")
    parser.add_argument("--machine", metavar="N", type=positive, help="GPUs of a machine (default: 8)")
    parser.add_argument(
        "--network",
        metavar="SIZE",
        type=memory,
        help="bytes a second of each GPU's network port, between machines (default: 50GB, which is 400 Gbit/s)",
    )
    parser.add_argument(
        "--length",
        metavar="SOURCE/TARGET",
        type=lengths,
        help="tokens of every row, in place of the data, which may be missing; one number for causal models",
    )
    parser.add_argument("--price", metavar="P", type=amount, help="price of a GPU for an hour, to print the run's")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write a page: memory over a step, the schedule of units, memory and time by number of ranks",
    )
    parser.add_argument("--fit", action="store_true", help="search for the fastest settings that fit on --gpu")


def worlds(text: str) -> list[int]:
    """Parse numbers of ranks, separated by commas."""
    return [positive(part) for part in text.split(",")]


def lengths(text: str) -> tuple[int | None, int]:
    """Parse the tokens of a source and a target, or of both together, whose source is None."""
    source, slash, target = text.partition("/")
    return (positive(source), positive(target)) if slash else (None, positive(text))


def memory(text: str) -> int:
    """Parse a size: a number, and B, kB, MB, GB, TB (powers of 1,000) or KiB, MiB, GiB, TiB (of 1,024)."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-zA-Z]*)", text.strip())
    size = _UNITS.get(found[2].upper()) if found else None
    if found is None or size is None or float(found[1]) * size < 1:
        raise argparse.ArgumentTypeError(f"must be a size above zero, such as 80GB or 24GiB; got {text!r}")
    return int(float(found[1]) * size)


def run(options: argparse.Namespace) -> int:
    """Print the plan; one process. The exit code is 1 if the run fits on none of the numbers of ranks."""
    config = load_run(options.config, options.overrides, reads_data=options.length is None)
    if options.price is not None and options.length is not None and config.training.max_steps is None:
        raise ConfigError("--price needs the number of steps, which --length does not know: set training.max_steps.")
    sizes = options.world or [choose_nproc(config.nproc)]
    what = "searching for settings that fit" if options.fit else "planning"
    say(f"{what}, {', '.join(map(str, sizes))} rank{'s' if sizes != [1] else ''}; importing torch takes some seconds")
    if options.fit:
        with NeverSilent(what) as busy:
            device = _checked_device(options, config, sizes)
            found = _search(options, sizes, device, _given_rows(options, config, sizes), busy.now)
        return _print_found(options, found, device)
    device = _checked_device(options, config, sizes)
    limit = options.memory if device is None else device.memory_bytes
    _tell_of_auto(config, limit)
    drawn = DRAWN_WORLDS if options.html is not None else ()
    data = _given_rows(options, config, [*sizes, *drawn]) or load_program(DATA).prepare(config)
    plans, chosen = [], []
    with ShareProgress("planning", len(sizes), shown=not options.json) as progress:
        for progress.piece, size in enumerate(sizes):
            plan, settings = load_program(SEARCH).plan_chosen(limit, config, data, size, device, progress=progress)
            plans.append(plan)
            chosen.append(settings)
    if options.html is not None:
        _write_page(options, chosen[0], data, plans[0], limit)
    fitting = [limit is None or plan.fits(limit) for plan in plans]
    if options.json:
        verdicts = [{} if limit is None else {"memory_bytes": limit, "fits": fits} for fits in fitting]
        values = [{**plan.as_dict(), **verdict} for plan, verdict in zip(plans, verdicts, strict=True)]
        print(json.dumps(values[0] if len(values) == 1 else values))
    elif len(plans) == 1:
        _print_one(plans[0], limit, options.price)
    else:
        _print_all(plans, limit, options.price)
    return 0 if any(fitting) else DOES_NOT_FIT


def _tell_of_auto(config: Any, limit: int | None) -> None:
    """Report the choices of a run that this plan does not make."""
    if config.sharding.auto is True:
        say("sharding: auto chooses at the start of training; this plans the settings as they are. --fit searches too")
    if limit is None and config.training.accumulate == "auto" and config.training.gradient_accumulation_steps > 1:
        say("accumulate: auto chooses by the free memory; this plans sharded. --memory SIZE says how much there is")


def _given_rows(options: argparse.Namespace, config: Any, sizes: list[int]) -> Any:
    """Return the rows that ``--length`` describes; None without that option."""
    if options.length is None:
        return None
    return load_program(PROGRAM).prepare_length(config, *options.length, max(sizes))


def _device(options: argparse.Namespace) -> Any:
    """Return the GPU named by ``--gpu``, with the memory of ``--memory`` if given; None without ``--gpu``."""
    if options.gpu is None:
        for name in ("fit", "price", "network", "machine"):
            if getattr(options, name):
                raise ConfigError(f"--{name} needs a step's time: name a GPU with --gpu.")
        return None
    given = {"network_bytes_per_s": options.network, "devices_each": options.machine}
    given = {name: value for name, value in given.items() if value is not None}
    device = load_program("fullshard.planner").hardware(options.gpu, **given)
    return device if options.memory is None else replace(device, memory_bytes=options.memory)


def _checked_device(options: argparse.Namespace, config: Any, sizes: list[int]) -> Any:
    """Return the GPU of the options, or None, once they are known to go together."""
    device = _device(options)
    if config.training.precision == "fp8":
        load_program(FLOAT8).require_float8(config, load_program(DEVICES).Devices.of_sheet(device))
    _check_page(options, sizes)
    return device


def _check_page(options: argparse.Namespace, sizes: list[int]) -> None:
    """Check that ``--html`` is compatible with the other options and can be written."""
    if options.html is None:
        return
    if options.fit or len(sizes) > 1:
        raise ConfigError("--html draws one plan: leave out --fit, and give --world one number of ranks.")
    if options.html.is_dir():
        raise ConfigError(f"--html {options.html} is a directory; name a file, such as {options.html / 'plan.html'}.")


def _write_page(options: argparse.Namespace, config: Any, data: Any, plan: Any, limit: int | None) -> None:
    """Plan for other numbers of ranks too, and write the page."""
    program, search = load_program(PROGRAM), load_program(SEARCH)
    others = []
    with ShareProgress("drawing", len(DRAWN_WORLDS), shown=not options.json) as progress:
        for progress.piece, size in enumerate(DRAWN_WORLDS):
            others.append(search.plan_chosen(limit, config, data, size, plan.device, roughly=0, progress=progress)[0])
    timeline = program.draw_plan(config, data, plan)
    load_program(PAGE).write_plan(options.html, options.config.stem, plan, timeline, others, limit)
    say(f"wrote {options.html}")


def _print_one(plan: Any, limit: int | None, price: float | None) -> None:
    print(plan)
    if price is not None:
        print(f"costs {_cost(plan, price):,.2f} at {price:g} an hour and GPU, without evaluation and saving")
    if limit is not None:
        print(f"\n{_verdict(plan, limit)}")


def _print_all(plans: list[Any], limit: int | None, price: float | None) -> None:
    timed = plans[0].timing is not None
    names = ["ranks", "needed", *(["fits"] if limit else []), *(["step", "run"] if timed else [])]
    print("".join(f"{name:>14}" for name in [*names, *(["cost"] if price is not None else [])]))
    for plan in plans:
        cells = [f"{plan.world_size:,}", format_bytes(plan.needed_bytes)]
        cells += [] if limit is None else ["yes" if plan.fits(limit) else "no"]
        cells += [format_duration(plan.timing.step_s)] if timed else []
        cells += ["-" if plan.run_s is None else format_duration(plan.run_s)] if timed else []
        cells += [] if price is None else [f"{_cost(plan, price):,.2f}"]
        print("".join(f"{cell:>14}" for cell in cells))
    print(*plans[0].chosen, sep="\n")


def _cost(plan: Any, price: float) -> float:
    return plan.run_s / 3600 * plan.world_size * price


def _verdict(plan: Any, memory_bytes: int) -> str:
    """Describe whether a plan fits, and by how much."""
    need = f"{format_bytes(plan.needed_bytes)} of {format_bytes(memory_bytes)}, including some to spare"
    apart = format_bytes(abs(memory_bytes - plan.needed_bytes))
    if plan.fits(memory_bytes):
        return f"fits: it needs {need}; {apart} are left"
    recompute = "training.gradient_checkpointing=true, " if not plan.recomputed else ""
    return (
        f"does not fit: it needs {need}; {apart} are missing. Plan more ranks (--world), search (--fit), or override "
        f"{recompute}training.per_device_train_batch_size, training.optimizer or training.precision."
    )


def _search(
    options: argparse.Namespace, sizes: list[int], device: Any, data: Any, tell: Callable[[str], None]
) -> list[Any]:
    """Search for the fastest settings that fit; ``tell`` receives a line for each candidate."""
    if len(sizes) > 1:
        raise ConfigError(f"--fit searches for one number of ranks; got {', '.join(map(str, sizes))}.")

    def load(more: Any) -> Any:
        return load_run(options.config, [*options.overrides, *more], reads_data=options.length is None)

    program = load_program(SEARCH)
    return program.search(load, sizes[0], device, data, program.Telling(tell))


def _print_found(options: argparse.Namespace, found: list[Any], device: Any) -> int:
    """Print the result of a search, and return the exit code."""
    best = found[0]
    if options.json:
        print(json.dumps([tried.as_dict() for tried in found]))
    elif best.why:
        print(f"nothing fits: of {len(found)} settings the nearest is {_nearest(found)}. Plan more ranks (--world).")
    else:
        print(f"the fastest of {len(found)} settings that fits: {' '.join(best.overrides) or 'as it is'}\n")
        _print_one(best.plan, device.memory_bytes, options.price)
        rest = [tried for tried in found[1:] if not tried.why]
        for tried in rest[:3]:
            print(f"next: {format_duration(tried.step_s)} a step, {' '.join(tried.overrides) or 'as it is'}")
    return DOES_NOT_FIT if best.why else 0


def _nearest(found: list[Any]) -> str:
    planned = [tried for tried in found if tried.needed_bytes is not None]
    if not planned:
        return f"not known: {found[0].why}"
    nearest = min(planned, key=lambda tried: tried.needed_bytes)
    return f"{nearest.why}, with {' '.join(nearest.overrides) or 'the settings as they are'}"
