"""What ``fullshard tune`` measured on this machine: step times by setting, kept in the user's cache for later runs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from fullshard.core.comm import Comm
from fullshard.core.comm.stack_probe import named_machine
from fullshard.program.config import RunConfig
from fullshard.program.config.speed import AttentionWay, BlocksWay, KernelsWay
from fullshard.program.train.setup.prepare import Prepared
from fullshard.state.storage import write_text
from fullshard.user_cache import default_directory
from fullshard.version import __version__

ROWS = "training.per_device_train_batch_size"
TIMES = "training.gradient_accumulation_steps"

_OF_TRAINING = (
    *("precision", "fp8_scales", "tf32", "optimizer", "packing", "per_device_train_batch_tokens"),
    *("train_sampling_strategy", "accumulate", "fused_cross_entropy", "activation_offload", "max_grad_norm"),
    *("label_smoothing_factor", "z_loss"),
)
"""Options of ``training`` that change a step's time and that tuning does not vary."""

_LIBRARIES = (
    "torch",
    "transformers",
    "triton",
    "liger-kernel",
    "flash-attn",
    "flash-attn-3",
    "kernels",
    "bitsandbytes",
)
"""Distributions whose versions count, also that one is missing: a choice may name a way that needs it."""

_BUCKET = 16
"""Tokens of a bucket of the histogram of lengths."""


@dataclass(frozen=True)
class Setting:
    """What tuning varies."""

    ways: tuple[str, ...]  # in the order of their parts
    recompute: str  # training.gradient_checkpointing, in JSON: true is all blocks, and 1 is one
    rows: int | None  # of a micro-batch on each rank; None: micro-batches are cut by tokens
    times: int  # micro-batches of a step

    @property
    def values(self) -> dict[str, Any]:
        """Return the options of the run file by dotted key."""
        rows = {} if self.rows is None else {ROWS: self.rows, TIMES: self.times}
        return {"speed.ways": list(self.ways), "training.gradient_checkpointing": json.loads(self.recompute), **rows}

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return them as overrides of the run file."""
        return tuple(f"{name}={json.dumps(value)}" for name, value in self.values.items())

    def agrees(self, config: RunConfig) -> bool:
        """Return whether it leaves every option as it is that the run file sets by hand."""
        training = config.training
        return (
            (ways_are_open(config) or set(self.ways) == set(config.ways))
            and (compile_is_open(config) or ("compile" in self.ways) == ("compile" in config.ways))
            and (recompute_is_open(config) or self.recompute == json.dumps(training.gradient_checkpointing))
            and (rows_are_open(config) or self.rows in (None, training.per_device_train_batch_size))
        )


def ways_are_open(config: RunConfig) -> bool:
    """Return whether tuning may choose ways: ``speed.ways`` is not set by hand."""
    return "ways" not in config.speed.model_fields_set


def compile_is_open(config: RunConfig) -> bool:
    """Return whether tuning may choose to compile blocks."""
    return ways_are_open(config) and "torch_compile" not in config.training.model_fields_set


def recompute_is_open(config: RunConfig) -> bool:
    """Return whether tuning may choose how many blocks are recomputed."""
    training = config.training
    return "gradient_checkpointing" not in training.model_fields_set or training.gradient_checkpointing == "auto"


def rows_are_open(config: RunConfig) -> bool:
    """Return whether tuning may divide a step's rows into other micro-batches.

    The file says how many rows a step has; that ``gradient_accumulation_steps`` is set says how they are divided.
    """
    training = config.training
    by_rows = training.per_device_train_batch_tokens is None
    return by_rows and "gradient_accumulation_steps" not in training.model_fields_set


def set_by_hand(config: RunConfig) -> list[str]:
    """Return the options that tuning would vary if the run file did not set them."""
    by_tokens = config.training.per_device_train_batch_tokens is not None
    are_open = {
        "speed.ways": ways_are_open(config),
        "training.gradient_checkpointing": recompute_is_open(config),
        TIMES: rows_are_open(config) or by_tokens,
    }
    return [name for name, is_open in are_open.items() if not is_open]


def still_open(kept: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Return those overrides of an earlier choice whose options the run file leaves open now.

    Rows are open as long as a step has as many as before.
    """
    training = config.training
    chosen = {name: json.loads(value) for name, _, value in (one.partition("=") for one in kept)}
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    same_rows = rows_are_open(config) and chosen.get(ROWS, 0) * chosen.get(TIMES, 0) == rows
    ways = ways_are_open(config) and (
        compile_is_open(config) or ("compile" in chosen.get("speed.ways", ())) == ("compile" in config.ways)
    )
    are_open = {"speed.ways": ways, "training.gradient_checkpointing": recompute_is_open(config)}
    are_open |= {ROWS: same_rows, TIMES: same_rows}
    return tuple(one for one in kept if are_open.get(one.partition("=")[0], True))


def card_of(comm: Comm, sheet: str | None) -> str:
    """Return the name of the ranks' devices for :func:`key_of`; every rank calls it. ``sheet``: of their data sheet."""
    if comm.device.type == "cuda":
        mine = sheet or torch.cuda.get_device_name(comm.device)
    else:
        mine = f"{_processor()}, {torch.get_num_threads()} threads"
    everyone = comm.all_gather_object((mine, named_machine()))
    return on_machines(", ".join(sorted({name for name, _ in everyone})), len({place for _, place in everyone}))


def on_machines(card: str, machines: int) -> str:
    """Return a card's name with the number of machines: between them a step's messages take another time."""
    return card if machines == 1 else f"{card}, {machines} machines"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def key_of(config: RunConfig, data: Prepared, world_size: int, card: str) -> str:
    """Return a digest of what a step's time depends on besides a :class:`Setting`; any process.

    These are model, adapter, quantization, lengths of rows, rows of a step, ranks, precision, card and versions.
    ``config`` has its precision chosen.
    """
    plain, training = config.as_plain(), config.training
    described = data.model_directory and Path(data.model_directory, "config.json")
    rows = training.per_device_train_batch_size if training.per_device_train_batch_tokens is None else 1
    parts = {
        "model": {name: value for name, value in plain["model"].items() if name != "path"},
        "described": described and described.exists() and json.loads(described.read_text(encoding="utf-8")),
        "vocabulary": len(data.tokenizer),
        "lengths": [_histogram(side.lengths) for side in (data.train_set.source_ids, data.train_set.target_ids)],
        "limits": [config.data.max_source_length, config.data.max_target_length],
        "step": rows * training.gradient_accumulation_steps,
        "training": {name: plain["training"][name] for name in _OF_TRAINING},
        "sharding": {name: value for name, value in plain["sharding"].items() if name != "auto"},
        "ranks": world_size,
        "card": card,
        "versions": [*map(_version, _LIBRARIES), __version__],
    }
    return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _histogram(lengths: Any) -> list[tuple[int, int]]:
    """Return the percentage of rows in each bucket of lengths that has some."""
    buckets, counts = np.unique(np.asarray(lengths) // _BUCKET, return_counts=True)
    shares = np.rint(100 * counts / counts.sum()).astype(int)
    return [(int(bucket), int(share)) for bucket, share in zip(buckets, shares, strict=True)]


def place_of(config: RunConfig, key: str) -> Path:
    """Return the file of what was measured under a key: in ``data.cache_dir``, or the user's cache directory."""
    return Path(config.data.cache_dir or default_directory(), f"tuned-{key}.json")


def write_tuned(path: Path, measured: Sequence[tuple[Setting, float]]) -> None:
    """Write settings and their steps' seconds, the best first; one rank.

    Raises:
        OSError, CheckpointError: The file system refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps([{**asdict(setting), "step_s": seconds} for setting, seconds in measured]))


def read_tuned(path: Path) -> list[tuple[Setting, float]]:
    """Return what :func:`write_tuned` wrote; empty if there is nothing, or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [_entry(one) for one in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _entry(one: Any) -> tuple[Setting, float]:
    known = get_args(AttentionWay) + get_args(KernelsWay) + get_args(BlocksWay)
    setting = Setting(tuple(one["ways"]), one["recompute"], one["rows"], one["times"])
    json.loads(setting.recompute)
    if not set(setting.ways) <= {*known} or not math.isfinite(one["step_s"]):
        raise ValueError("it is damaged")
    return setting, float(one["step_s"])


def with_others(
    measured: Sequence[tuple[Setting, float]], path: Path, config: RunConfig
) -> list[tuple[Setting, float]]:
    """Return what was measured, and at their places what an earlier tuning measured that ``config`` rules out.

    That holds still for run files that leave open what this one sets.
    """
    found = list(measured)
    for setting, seconds in read_tuned(path):
        if not setting.agrees(config):
            place = next((at for at, (_, other) in enumerate(found) if other > seconds), len(found))
            found.insert(place, (setting, seconds))
    return found


def best_of(measured: Sequence[tuple[Setting, float]], config: RunConfig) -> tuple[Setting, float] | None:
    """Return the best of what was measured that leaves the run file's own values; None if there is none."""
    return next(((setting, seconds) for setting, seconds in measured if setting.agrees(config)), None)


def measured_step(config: RunConfig, data: Prepared, world_size: int, card: str) -> float | None:
    """Return the measured seconds of a step with just these settings; None if they were not measured here."""
    training = config.training
    asked = training.gradient_checkpointing
    recompute = json.dumps(False if asked == "auto" else asked)  # a plan of auto recomputes nothing
    for setting, seconds in read_tuned(place_of(config, key_of(config, data, world_size, card))):
        same_rows = setting.rows in (None, training.per_device_train_batch_size)
        if same_rows and set(setting.ways) == set(config.ways) and setting.recompute == recompute:
            return seconds
    return None
