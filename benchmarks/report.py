"""Ratios, definitions and a table from raw figures."""

from typing import Any

LOSSES_AGREE = 1e-4
LEFT_BEHIND = 1_000_000
EVERYONE = "every contender"
NOT_RUN = "its scenario was not run"

# ratio: (scenario, contender over, contender under, figure)
RATIOS = {
    "step_time_over_fully_shard": ("step", "fullshard", "fsdp2", "median_s"),
    "step_time_over_floor": ("step", "fullshard", "floor", "median_s"),
    "engine_memory_over_fully_shard": ("memory", "fullshard", "fsdp2", "engine_memory_bytes"),
    "wire_bytes_over_fully_shard": ("memory", "fullshard", "fsdp2", "wire_bytes"),
    "lora_replicated_step_time_over_ddp": ("lora", "fullshard_replicated", "ddp", "median_s"),
    "lora_sharded_step_time_over_fully_shard": ("lora", "fullshard_sharded", "fsdp2", "median_s"),
    "lora_sharded_peak_over_ddp": ("lora", "fullshard_sharded", "ddp", "peak_tensor_bytes"),
    "fake512_forward_backward_over_unsharded": ("fake512", "fullshard", "floor", "median_s"),
}

DEFINITIONS = {
    "ratio of step times": "Ratio of medians; ratios_of_minima has the ratio of minima.",
    "step time": "From barrier to barrier, so until every rank is done; the slower rank's of each round. In a round "
    "every contender runs one step in one pair of processes, and each round starts with another contender; the garbage "
    "collector runs between steps only.",
    "floor": "The unsharded model on both ranks at once, without communication.",
    "peak tensor memory": "Peak of live tensor bytes on one rank during one step (forward, backward, "
    "AdamW) after two warm ones, alone in a fresh pair of processes, by the CPU allocator's own events since before "
    "the model was built; the larger rank's. gloo's hidden buffers are included.",
    "activations": "Peak of tensor bytes during the unsharded forward, less those live before it (parameters, "
    "optimizer state): what backward needs and forward's own temporaries, no gradient.",
    "engine memory": "Peak tensor memory less activations.",
    "peak resident memory": "VmHWM of one rank over two steps after a warm one, reset in between; the larger "
    "rank's. In fresh processes, once with glibc's defaults and once with MALLOC_MMAP_THRESHOLD_=262144.",
    "bytes on the wire": "What the machine sent on its loopback device during a step, headers and the barrier "
    "included, over the number of ranks; the smaller of two steps, because others on the machine can only add. "
    "fullshard's are its own ledger's: on one host its ranks read each other's memory and send next to nothing "
    "(loopback_bytes), which is a property of the transport; the ledger counts the bytes that other ranks receive.",
    "copies": "Bytes written in one step by operators that only copy, cast, pad, concatenate or scale into a buffer, "
    "less those of the floor; called by the training thread, so without copies inside a collective.",
    "collectives": "Calls of torch's collectives in one step; of fullshard, whose gathers are messages on gloo, "
    "entries of its ledger.",
    "losses_apart_at_most": "Largest difference of two contenders' losses in one of the first two rounds, on one "
    "rank, the floor left out because it trains on its own rank's data alone; first_losses is of the first step, floor "
    "included.",
    "fake512": "Forward and backward without optimizer as rank 0 of 512 in one process; torch's fake process group "
    "sends nothing and fills a gather's output with copies of the input.",
}

COLUMNS = {
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "fsdp2_no_reshard": "FSDP2 no reshard",
    "ddp": "DDP",
    "fullshard": "fullshard",
}


def figures(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ratios, failures and definitions; write derived figures into ``results``."""
    failures = {
        f"{scenario}/{who}": why for scenario, result in results.items() for who, why in result["failures"].items()
    }
    _derive(results, failures)
    ratios = {name: _ratio(results, name, *parts, failures) for name, parts in RATIOS.items()}
    minima = {
        name: _ratio(results, name, scenario, over, under, "min_s", failures)
        for name, (scenario, over, under, figure) in RATIOS.items()
        if figure == "median_s"
    }
    for scenario, result in results.items():
        for key in ("losses_apart_at_most", "first_losses_apart_at_most"):
            if result.get(key, 0.0) > LOSSES_AGREE:
                failures[f"{scenario}/{key}"] = f"{result[key]:.2e}, above {LOSSES_AGREE:.0e}"
    for name, one in results.get("memory", {}).get("contenders", {}).items():
        if abs(one["tensor_bytes_left_behind_by_a_step"]) > LEFT_BEHIND:
            failures[f"memory/{name} is not steady"] = (
                f"a step left {one['tensor_bytes_left_behind_by_a_step']:,} bytes more than it found, or releases "
                "in other threads went unseen: its peak tensor memory is not to be trusted"
            )
    return {"ratios": ratios, "ratios_of_minima": minima, "failures": failures, "definitions": DEFINITIONS}


def _derive(results: dict[str, dict[str, Any]], failures: dict[str, str]) -> None:
    """Add engine memory and copies, which are relative to the floor's figures."""
    engines = results.get("memory", {}).get("contenders", {})
    floor = engines.get("floor")
    if floor is None and engines:
        failures["memory/floor"] = f"{failures.get('memory/floor')}; engine memory and copies are counted from it"
    if floor is None:
        return
    for one in engines.values():
        one["engine_memory_bytes"] = one["peak_tensor_bytes"] - floor["peak_activation_bytes"]
        one["copied_bytes_above_floor"] = one["copied_bytes"] - floor["copied_bytes"]


def _ratio(
    results: dict[str, dict[str, Any]],
    name: str,
    scenario: str,
    over: str,
    under: str,
    figure: str,
    failures: dict[str, str],
) -> float | None:
    if scenario not in results:
        failures[f"ratios/{name}"] = NOT_RUN
        return None
    contenders = results[scenario]["contenders"]
    missing = [who for who in (over, under) if figure not in contenders.get(who, {})]
    if missing:
        because = [failures.get(f"{scenario}/{who}") or failures[f"{scenario}/{EVERYONE}"] for who in missing]
        failures[f"ratios/{name}"] = "; ".join(
            f"{who} in {scenario}: {why}" for who, why in zip(missing, because, strict=True)
        )
        return None
    return round(contenders[over][figure] / contenders[under][figure], 4)


def text(result: dict[str, Any]) -> str:
    """Return the ratios, the table and the failures as Markdown."""
    lines = ["| ratio | of medians | of minima |", "|---|---|---|"]
    for name, value in result["ratios"].items():
        lines.append(f"| {name} | {_shown(value)} | {_shown(result['ratios_of_minima'].get(name))} |")
    lines += ["", *_table(result["raw"]), "", f"{result['seconds']['total']} s in all: {result['seconds']}"]
    lines += [f"FAILED {what}: {why}" for what, why in failed(result).items()]
    return "\n".join(lines)


def failed(result: dict[str, Any]) -> dict[str, str]:
    """Return the failures, except scenarios that were not requested."""
    return {what: why for what, why in result["failures"].items() if why != NOT_RUN}


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _table(raw: dict[str, dict[str, Any]]) -> list[str]:
    floor = raw.get("step", {}).get("contenders", {}).get("floor")
    rows = {
        "collectives per step": ("memory", "collectives", 1, "{:.0f}"),
        "given to other ranks per step and rank, MB": ("memory", "wire_bytes", 1e6, "{:.1f}"),
        "of these on the loopback device, MB": ("memory", "loopback_bytes", 1e6, "{:.1f}"),
        "copies per step and rank, MB": ("memory", "copied_bytes_above_floor", 1e6, "{:.1f}"),
        "peak tensor memory, MB": ("memory", "peak_tensor_bytes", 1e6, "{:.0f}"),
        "engine memory (peak less activations), MB": ("memory", "engine_memory_bytes", 1e6, "{:.0f}"),
        "peak resident memory, MB": ("memory", "peak_resident_bytes", 1e6, "{:.0f}"),
        "the same, MALLOC_MMAP_THRESHOLD_=262144": ("memory_mmap", "peak_resident_bytes", 1e6, "{:.0f}"),
        "step time, median, s": ("step", "median_s", 1, "{:.3f}"),
    }
    if floor:
        rows["step time over the compute floor, medians"] = ("step", "median_s", floor["median_s"], "{:.2f}")
        rows["the same, minima"] = ("step", "min_s", floor["min_s"], "{:.2f}")
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for label, (scenario, figure, unit, form) in rows.items():
        contenders = raw.get(scenario, {}).get("contenders", {})
        values = [contenders.get(name, {}).get(figure) for name in COLUMNS]
        lines.append(f"| {label} | {' | '.join('-' if v is None else form.format(v / unit) for v in values)} |")
    return lines
