"""From the JSON of the stages: ``benchmarks/results/gpu.json``, and what has run where on ``docs/evidence/gpu.md``."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.tests import files, gpu_tests

BEGIN = "<!-- written by python -m benchmarks.gpu --report: do not edit -->"
END = "<!-- end of what is written -->"
STAGES = {
    "doctor": "versions, devices, links, how ranks join",
    "kernels": "what a step computes, by kind of kernel; attention and loss alone",
    "tests": "the tests marked gpu",
    "step": "time of a step, next to FSDP2 and FSDP1",
    "memory": "peaks, waits, kernels, each engine alone",
    "headline": "the program without an option and by hand, next to the Trainer and FSDP2",
    "switches": "bf16, prefetch, offload",
    "overlap": "communication hidden, as rank 0 of 8 to 512",
    "speed": "ways of speed.ways, next to FSDP2 with the same ways",
    "fp8": "compiled steps in bf16 and fp8, memory beside the plan's",
    "long": "one long row on one rank and shared by two, memory beside the plan's",
    "plan": "the planner's figures",
}
ENGINES = {"fullshard": "fullshard", "fsdp2": "FSDP2", "fsdp1": "FSDP1"}
AIMS = (
    ("t5-large, full, 1 rank", "mfu", 0.30),
    ("t5-3b, full, checkpointed, 1 rank", "mfu", 0.38),
    ("llama-3-8b, LoRA, checkpointed, 1 rank", "tokens_per_s", 13_000),
    ("llama-3-8b, full, checkpointed, rank 0 of 8", "mfu", 0.55),
)
"""Models of stage ``speed``, and what fullshard is to reach on one H100 with the best ways."""
SHOWN = 240
Results = dict[str, dict[str, dict[str, Any]]]


def write(folder: Path, results: Path, page: Path) -> None:
    """Add what ``folder`` holds to ``results``, and write both.

    Raises:
        SystemExit: The folder's figures are of a dry run.
    """
    known: Results = json.loads(results.read_text()) if results.exists() else {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if found["dry"]:
            raise SystemExit(f"{path} is of a dry run, whose figures mean nothing.")
        known[found["stage"]] = merged(known.get(found["stage"], {}), found["cases"])
    results.write_text(json.dumps(known, indent=1) + "\n")
    page.write_text(replaced(page.read_text(), part(known)))


def merged(known: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the cases of both: of one in both the later result, unless that was cut or skipped and hides figures."""
    result = dict(known)
    for name, case in found.items():
        old = result.get(name)
        tells_less = old is not None and old["status"] == "done" and case["status"] in ("cut", "skipped")
        if old is None or (case["at"] >= old["at"] and not tells_less):
            result[name] = case
    return result


def replaced(text: str, new: str) -> str:
    """Return the page with ``new`` between the marks.

    Raises:
        ValueError: The page lacks one of the marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs a line {BEGIN!r} and, below it, {END!r}.")
    return f"{before}{BEGIN}\n\n{new.strip()}\n\n{END}{after}"


def part(results: Results) -> str:
    """Return what has run where, as Markdown."""
    sections = [_stages(results), _tests(results.get("tests", {})), _aims(results.get("speed", {}))]
    tables: tuple[tuple[str, Callable[[dict[str, Any]], list[str]]], ...] = (
        ("headline", _headline),
        ("kernels", _kernels),
        ("step", _steps),
        ("memory", _memory),
        ("switches", _switches),
        ("overlap", _overlap),
        ("speed", _speed),
        ("fp8", _fp8),
    )
    for stage, table in tables:
        figures = {name: case["figures"] for name, case in results.get(stage, {}).items() if case["figures"]}
        if figures:
            sections.append(table(figures))
    told = [
        f"- {stage}, {name}: {case['status']}. {' '.join(case['why'].split())[:SHOWN]}"
        for stage, cases in results.items()
        for name, case in cases.items()
        if case["status"] != "done"
    ]
    sections += [["**Failed, cut or skipped**", "", *told]] if told else []
    return "\n\n".join("\n".join(lines) for lines in sections)


def _stages(results: Results) -> list[str]:
    lines = ["| stage | what it tells | cases | device | last |", "|---|---|---|---|---|"]
    for stage, what in STAGES.items():
        cases = results.get(stage, {}).values()
        counts = Counter(case["status"] for case in cases)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "**not yet run**"
        devices = ", ".join(sorted({case["device"] for case in cases}))
        lines.append(f"| {stage} | {what} | {told} | {devices} | {max((c['at'][:10] for c in cases), default='')} |")
    return lines


def _tests(cases: dict[str, Any]) -> list[str]:
    lines = ["| tests marked gpu | functions | result |", "|---|---|---|"]
    for file in files():
        outcomes = cases.get(file, {}).get("figures", {}).get("tests", {})
        counts = Counter(test["outcome"] for test in outcomes.values())
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "**not yet run**"
        lines.append(f"| `{file}` | {len(gpu_tests(file))} | {told} |")
    failed = [
        f"- `{name}` failed: {' '.join(test.get('message', '').split())[-SHOWN // 2 :]}"
        for case in cases.values()
        for name, test in case["figures"].get("tests", {}).items()
        if test["outcome"] == "failed"
    ]
    return [*lines, "", *failed] if failed else lines


def _row(label: str, values: Iterator[Any], form: str) -> str:
    cells = ["-" if value is None else form.format(value) for value in values]
    return f"| {label} | {' | '.join(cells)} |"


def _steps(figures: dict[str, Any]) -> list[str]:
    lines = [
        "Median of a step in milliseconds; tokens a second and the share of the device's bf16 peak (MFU) are of",
        "fullshard's fastest step. FSDP1 does not shard on one rank.",
        "",
    ]
    lines += [f"| | {' | '.join(ENGINES.values())} | tokens/s | MFU |", "|---" * (len(ENGINES) + 3) + "|"]
    for name, found in figures.items():
        engines = found.get("engines", {})
        times = (engines.get(engine, {}).get("median_s") for engine in ENGINES)
        ours = engines.get("fullshard", {})
        row = _row(name, (seconds and seconds * 1e3 for seconds in times), "{:.1f}")
        mfu = ours.get("mfu")
        lines.append(f"{row} {ours.get('tokens_per_s', '-')} | {'-' if mfu is None else f'{mfu:.1%}'} |")
    return lines


def _kernels(figures: dict[str, Any]) -> list[str]:
    lines = ["Milliseconds of a step's kernels by kind, then attention and loss alone (median, peak).", ""]
    lines += ["| | ms | kernels or GB |", "|---|---|---|"]
    for name, found in figures.items():
        for kind, milliseconds in found.get("kernel_ms", {}).items():
            lines.append(f"| {name}: {kind} | {milliseconds:.1f} | {found['kernels'][kind]} |")
        for way, figure in found.get("ways", {}).items():
            if "error" in figure:
                lines.append(f"| {name}: {way} | - | {figure['error'][:60].replace('|', '/')} |")
            else:
                lines.append(f"| {name}: {way} | {figure['median_s'] * 1e3:.2f} | {figure['peak_bytes'] / 1e9:.2f} |")
    return lines


def _memory(figures: dict[str, Any]) -> list[str]:
    names = [*ENGINES.values()]
    lines = [
        "Peak of a step in GB, allocated and reserved by the allocator; then, for each engine in this order, waits of",
        "the CPU for the GPU in a step, kernels launched, and allocations that had to be tried again.",
        "",
    ]
    lines += [f"| | {' | '.join(names)} | waits | kernels | retries |", "|---" * (len(ENGINES) + 4) + "|"]
    for name, found in figures.items():
        engines = [found.get("engines", {}).get(engine, {}) for engine in ENGINES]
        peaks = (
            one and f"{one['peak_bytes'] / 1e9:.2f}, {one.get('reserved_peak_bytes', 0) / 1e9:.2f}" for one in engines
        )
        row = _row(name, (peak or None for peak in peaks), "{}")
        counts = (
            " / ".join(str(one.get(key, "-")) for one in engines) for key in ("host_waits", "kernels", "alloc_retries")
        )
        lines.append(f"{row} {' | '.join(counts)} |")
    return lines


def _headline(figures: dict[str, Any]) -> list[str]:
    lines = ["What a user gets, a process for each on one card, the same rows and batches.", ""]
    lines += ["| | tokens/s | reserved, GB | first step after, s |", "|---|---|---|---|"]
    for name, found in figures.items():
        values = (found.get("tokens_per_s"), found.get("reserved_bytes", 0) / 1e9, found.get("first_step_s"))
        lines.append(_row(name, iter(values), "{:.1f}"))
    return lines


def _switches(figures: dict[str, Any]) -> list[str]:
    lines = ["| | step, ms | peak, GB |", "|---|---|---|"]
    for name, found in figures.items():
        peaks = found["alone"]["engines"]
        for label, times in found["times"]["engines"].items():
            peak = peaks.get(label, {}).get("peak_bytes")
            values = iter((times["median_s"] * 1e3, peak and peak / 1e9))
            lines.append(_row(f"{name} ({found['what']}): {label}", values, "{:.2f}"))
    return lines


def _overlap(figures: dict[str, Any]) -> list[str]:
    lines = ["Median of a step in milliseconds, and the share of the communication's time that was hidden.", ""]
    lines += ["| | link | fullshard | hidden | FSDP2 | hidden |", "|---|---|---|---|---|---|"]
    for name, found in figures.items():
        for link, engines in found["links"].items():
            cells = []
            for engine in ("fullshard", "fsdp2"):
                hidden = engines[engine].get("hidden")
                cells += [
                    f"{engines[engine]['step']['median_s'] * 1e3:.1f}",
                    "-" if hidden is None else f"{hidden:.0%}",
                ]
            lines.append(f"| {name} | {link} | {' | '.join(cells)} |")
    return lines


def _aims(cases: dict[str, Any]) -> list[str]:
    """Return what is aimed at on one H100 or H200, and the best that stage ``speed`` measured, with its ways."""
    lines = ["With the best [ways](../guides/faster.md), on one H100 or H200:", ""]
    lines += ["| | aim | measured | ways |", "|---|---|---|---|"]
    for model, what, aim in AIMS:
        ours = {
            name.partition(": ")[2]: case["figures"]["engines"]["fullshard"][what]
            for name, case in cases.items()
            if name.startswith(f"{model}: ") and "fullshard" in case["figures"].get("engines", {})
        }
        ways = max((one for one in ours if ours[one] is not None), key=lambda one: ours[one], default=None)
        measured = "not yet" if ways is None else _share(ours[ways], what)
        lines.append(f"| {model} | {_share(aim, what)} | {measured} | {ways or '-'} |")
    return lines


def _share(value: float, what: str) -> str:
    return f"{value:.0%} of the peak" if what == "mfu" else f"{value:,.0f} tokens/s"


def _speed(figures: dict[str, Any]) -> list[str]:
    lines = [
        "Median of a step in milliseconds; tokens a second, share of the device's bf16 peak (MFU), memory reserved in"
    ]
    lines += ["GB and seconds of compiling are fullshard's. FSDP2 has the same ways.", ""]
    lines += ["| | fullshard | FSDP2 | tokens/s | MFU | reserved | compiling |", "|---" * 7 + "|"]
    for name, found in figures.items():
        engines = found.get("engines", {})
        ours = engines.get("fullshard", {})
        times = (engines.get(engine, {}).get("step_s") for engine in ("fullshard", "fsdp2"))
        label = f"{name} (without {', '.join(ours['left_out'])})" if ours.get("left_out") else name
        row = _row(label, (seconds and seconds * 1e3 for seconds in times), "{:.1f}")
        mfu, reserved = ours.get("mfu"), ours.get("reserved_bytes")
        cells = [ours.get("tokens_per_s", "-"), "-" if mfu is None else f"{mfu:.1%}"]
        cells += ["-" if reserved is None else f"{reserved / 1e9:.1f}", ours.get("compile_s", "-")]
        lines.append(f"{row} {' | '.join(map(str, cells))} |")
    return lines


def _fp8(figures: dict[str, Any]) -> list[str]:
    lines = ["Blocks are compiled. Median of a step in milliseconds; peak memory and a plan's in GB, the plan's of"]
    lines += ["uncompiled ones.", ""]
    lines += ["| | step | tokens/s | peak | planned | compiling, s |", "|---" * 6 + "|"]
    for name, found in figures.items():
        both = (found["peak_bytes"], found["planned_bytes"])
        sizes = ("-" if size is None else f"{size / 1e9:.1f}" for size in both)
        cells = [f"{found['step_s'] * 1e3:.1f}", f"{found['tokens_per_s']:,.0f}", *sizes, str(found["compile_s"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
