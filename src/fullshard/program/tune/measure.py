"""A candidate's steps, as a run would take them: its model, its optimizer and real rows, on all ranks together."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from fullshard.core.comm import Comm, together
from fullshard.core.optim import ShardedGradScaler
from fullshard.errors import ConfigError, MemoryLimitError, ModelError, TrainingError, WrapError
from fullshard.program.config import RunConfig
from fullshard.program.data import Batch
from fullshard.program.models import blocks_of, rates_of_dropout
from fullshard.program.speed import WAYS
from fullshard.program.train.fit import Load
from fullshard.program.train.reporting.flops import Flops, count_flops, peak_flops
from fullshard.program.train.run.record import is_out_of_memory
from fullshard.program.train.run.step import StepSpec, issue_step, reserved_memory_bytes
from fullshard.program.train.run_plan import batches_of, middle_of, step_spec
from fullshard.program.train.setup.devices import Devices, for_devices, smallest_memory
from fullshard.program.train.setup.model import ReadyModel, prepare_model, shard_model, speed_facts
from fullshard.program.train.setup.optimizers import make_optimizer
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.steps import make_plan
from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.candidates import Candidate, Memory, named
from fullshard.program.tune.halving import FULL, Measured
from fullshard.program.tune.journal import OUT_OF_MEMORY, Journal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCES = {"fp32": (1e-5, 1e-4), "tf32": (2e-3, 8e-3), "fp16": (2e-3, 8e-3), "bf16": (1.6e-2, 6e-2)}
TOLERANCES["fp8"] = TOLERANCES["bf16"]  # a way changes sums and norms, which are in bf16
"""Relative differences of loss and gradient norm that rounding may make, by the format of products.

4 and 16 roundings of that format (2^-11 with 11 significant bits in TF32 and fp16, 2^-8 with 8 in bf16): those of a
model's blocks are independent, so that they grow with the root of their number, and the loss is a mean over tokens. In
fp32 it is what this project's own parity tests allow: there the order of sums decides, not the format of products."""

PLAIN = ("speed.ways=[]", "training.torch_compile=false")
"""Overrides without any way."""

MOST_WARM = 6
"""Warm steps at most: a compiler may need several."""

MOST_SCALES = 20
"""Steps in which an fp16 loss scale may come down until the gradient is finite."""


def product_format(config: RunConfig, device: torch.device) -> str:
    """Return the format in which a run with a chosen precision multiplies matrices."""
    precision = config.training.precision
    return "tf32" if precision == "fp32" and device.type == "cuda" and config.training.tf32 else precision


@dataclass
class Built:
    """A candidate's model and what its steps need, on one rank."""

    model: PreTrainedModel
    batches: list[Batch]
    optimizer: torch.optim.Optimizer
    scaler: ShardedGradScaler | None
    spec: StepSpec
    comm: Comm
    flops: Flops | None

    def step(self, spec: StepSpec | None = None) -> tuple[float, float]:
        """Take a step; return its loss and gradient norm once it is done on this rank's device."""
        how = {"late": self.scaler is None}
        spec = spec or self.spec
        issued = issue_step(self.model, self.optimizer, self.batches, self.comm, spec, self.scaler, **how)
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        return issued.loss_and_norm

    def timed(self) -> float:
        """Return the seconds of a step, of the slowest rank; every rank calls it."""
        self.comm.barrier()
        begun = time.perf_counter()
        self.step()
        return max(self.comm.all_gather_object(time.perf_counter() - begun))

    def values(self) -> tuple[float, float]:
        """Return loss and gradient norm without dropout, and leave the weights as they are; every rank calls it.

        Raises:
            TrainingError: One of them is not finite; on every rank.
        """
        still = replace(self.spec, learning_rate=0.0)
        with without_dropout(self.model):
            for _ in range(1 if self.scaler is None else MOST_SCALES):
                found = self.step(still)
                if all(map(math.isfinite, found)):
                    return found
        raise TrainingError(
            f"The loss is {found[0]} and the gradient norm is {found[1]} in a first step without dropout; both must be "
            "finite. Look at the data and the model's weights, or set training.precision=fp32."
        )

    def warm(self) -> list[float]:
        """Take steps until one is not much shorter than the one before; return their seconds."""
        found = [self.timed()]
        while len(found) < MOST_WARM:
            found.append(self.timed())
            if found[-1] > 0.7 * found[-2]:
                break
        return found


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every rate of dropout and jitter to 0 inside the context. Not ``eval()``, in which ways do not apply."""
    modules = list(model.modules())
    configs = {id(config): config for one in modules if hasattr(config := getattr(one, "config", None), "__dict__")}
    kept = rates_of_dropout((*modules, *configs.values()))
    try:
        for owner, name, _ in kept:
            setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def difference(plain: Sequence[float], found: Sequence[float], tolerances: Sequence[float]) -> str | None:
    """Return how loss or gradient norm differ by more than rounding; None if neither does."""
    names = ("loss", "gradient norm")
    for name, one, other, tolerance in zip(names, plain, found, tolerances, strict=True):
        if not abs(other - one) <= tolerance * abs(one):  # also if one is not a number
            return f"{name} {other:.9g}, and {one:.9g} without it: rounding makes at most {tolerance:g} of it"
    return None


class Bench:
    """Measures candidates; every rank makes it and calls it alike. A ``Measure`` of ``Halving``."""

    def __init__(self, load: Load, data: Prepared, comm: Comm, memory: Memory, journal: Journal) -> None:
        """Build the run's model once, to see how many blocks it has and which ways apply.

        Raises:
            UserError: The model cannot be built, or the settings do not match it; on every rank.
        """
        self._load, self._data, self._comm, self._memory, self._journal = load, data, comm, memory, journal
        self._memory_bytes = smallest_memory(comm)
        config = load(PLAIN)
        model = self._prepared(config).model
        self.blocks = len(blocks_of(model))
        facts = speed_facts(config, comm.device)
        mine = {name: why for name, way in WAYS.items() if (why := way.misfit(model, facts)) is not None}
        # What one machine lacks, no rank can use.
        self.misfits = {name: why for of_rank in comm.all_gather_object(mine) for name, why in of_rank.items()}
        # However its rows are divided, a step has the same ones.
        self._step = middle_of(data, make_plan(config, data.train_set, comm.size, causal=data.causal))
        self._tolerances = TOLERANCES[product_format(config, comm.device)]

    def __call__(self, candidate: Candidate, steps: int) -> Measured | str:
        """Measure a candidate, or return its result of an attempt before.

        Raises:
            MemoryLimitError: This rank is out of memory; others wait for it in a collective, so all ranks must start
                again, and then leave the candidate out.
        """
        recorded = self._journal.take(candidate)
        if recorded is not None:
            return recorded
        setting = self._settled(candidate)
        result = setting if isinstance(setting, str) else self._tried(candidate, setting, steps)
        self._journal.add(candidate, result)
        return result

    def _tried(self, candidate: Candidate, setting: Setting, steps: int) -> Measured | str:
        wrong = self._journal.values["wrong"].get(named(candidate.ways))
        if wrong is not None:
            return wrong
        self._journal.begin(candidate)
        try:
            result = self._measure(candidate, setting, steps)
        except (ConfigError, ModelError, WrapError, TrainingError) as error:  # the same on every rank
            if not candidate.ways:
                raise
            result = (str(error).splitlines() or [""])[0]
        except Exception as error:
            self._lose(candidate, error)
        self._free()
        return result

    def _settled(self, candidate: Candidate) -> Setting | str:
        """Return rank 0's setting of a candidate, or why it is left out; every rank calls it."""
        mine = self._memory.settled(candidate, self.blocks) if self._comm.rank == 0 else ""
        return self._comm.all_gather_object(mine)[0]

    def _lose(self, candidate: Candidate, error: Exception) -> NoReturn:
        """Record what this rank could not measure, and end the attempt, if another one can leave it out."""
        ran_out, first = is_out_of_memory(error), (str(error).splitlines() or [""])[0]
        if not ran_out and not candidate.ways:
            raise error
        rank, why = self._comm.rank, f"{OUT_OF_MEMORY}{first}" if ran_out else f"{type(error).__name__}: {first}"
        self._journal.lose(candidate, f"rank {rank} failed in it, {why}")
        if not ran_out:
            raise error
        raise MemoryLimitError(
            f"Rank {rank} is out of memory in the candidate {candidate}: {first}. Run the same command again: it "
            "leaves this candidate out, and keeps what it has measured."
        ) from error

    def _measure(self, candidate: Candidate, setting: Setting, steps: int) -> Measured | str:
        begun = time.perf_counter()
        if (why := self._measure_plain(candidate, setting)) is not None:
            return why
        built = self._built(setting)
        before_check = time.perf_counter()
        why = self._check(candidate, setting, built)
        if why is not None:
            return why
        checked = self._slowest(time.perf_counter() - before_check)
        warm = built.warm()
        before = self._slowest(time.perf_counter() - begun) - len(warm) * min(warm)
        times = [built.timed() for _ in range(steps)]
        # Steps that are shorter than building and compiling cost less now than with the model built again.
        while len(times) < FULL and times[-1] < before:
            times.append(built.timed())
        found = Measured(
            setting,
            tuple(times),
            tokens=self._sum(batch.tokens for batch in built.batches),
            took_s=self._slowest(time.perf_counter() - begun),
            compile_s=max(checked - min(warm), 0.0) + sum(warm) - len(warm) * min(warm),
            reserved_bytes=int(self._slowest(reserved_memory_bytes(self._comm.device))),
        )
        targets = self._sum(batch.target_tokens for batch in built.batches)
        if built.flops is None:  # on a rank whose card is not known; another one's may be
            return found
        share = built.flops.utilisation(tokens=found.tokens, target_tokens=targets, seconds=found.step_s)
        return replace(found, share_of_peak=share)

    def _slowest(self, mine: float) -> float:
        return max(self._comm.all_gather_object(mine))

    def _sum(self, mine: Iterable[int]) -> int:
        return sum(self._comm.all_gather_object(sum(mine)))

    def _measure_plain(self, candidate: Candidate, setting: Setting) -> str | None:
        """Measure loss and gradient norm of the plain ways for these micro-batches, unless they are known.

        Returns why they cannot be measured; None if they are known.
        """
        known, ways = self._journal.values, named(candidate.ways)
        rows = str(setting.rows)
        if not candidate.ways or ways in known["wrong"] or rows in known["plain"]:
            return None
        plain = replace(candidate, attention="", kernels="", blocks="")
        tried = (self._settled(replace(plain, recompute=recompute)) for recompute in (setting.recompute, "true"))
        fitting = next((one for one in tried if isinstance(one, Setting)), None)
        if fitting is None:
            return "its values cannot be compared: the model without it does not fit by its memory plan"
        built = self._built(fitting)
        known["plain"][rows] = built.values()
        del built
        self._free()
        return None

    def _check(self, candidate: Candidate, setting: Setting, built: Built) -> str | None:
        """Compare loss and gradient norm with those of the plain ways, once for each combination of ways."""
        known, ways, rows = self._journal.values, named(candidate.ways), str(setting.rows)
        if not candidate.ways:
            if rows not in known["plain"]:
                known["plain"][rows] = built.values()
        elif ways not in known["wrong"]:
            known["wrong"][ways] = difference(known["plain"][rows], built.values(), self._tolerances)
        return known["wrong"].get(ways)

    def _prepared(self, config: RunConfig) -> ReadyModel:
        config, data = for_devices(config, Devices.of_ranks(self._comm)), self._data
        memory, directory = self._memory_bytes, data.model_directory
        return together(self._comm, lambda: prepare_model(config, data.tokenizer, directory, memory_bytes=memory))

    def _built(self, setting: Setting) -> Built:
        """Build the model and its optimizer as :func:`~fullshard.program.train.run.assemble.assemble` does."""
        comm, data = self._comm, self._data
        plain = () if setting.ways else PLAIN
        accumulate = self._memory.accumulate(setting) if comm.rank == 0 else None
        accumulate = comm.all_gather_object(accumulate)[0]
        unsharded = () if accumulate is None else (f"training.accumulate={accumulate}",)
        config = together(comm, lambda: self._load([*setting.overrides, *unsharded, *plain]))
        ready = self._prepared(config)
        source, target = count_flops(ready.model)
        peak = peak_flops(comm.device, config.training.precision)
        shard_model(ready.model, config, comm, weights=ready.weights)
        model = ready.model.train()
        torch.manual_seed(config.seed + comm.rank)
        epoch = make_plan(config, data.train_set, comm.size, causal=data.causal)
        return Built(
            model=model,
            batches=batches_of(config, data, epoch, self._step, comm.rank),
            optimizer=make_optimizer(model, config),
            scaler=ShardedGradScaler(comm.device.type) if config.training.precision == "fp16" else None,
            spec=step_spec(model, config, data),
            comm=comm,
            flops=None if peak is None else Flops(source, target, peak * comm.size),
        )

    def _free(self) -> None:
        """Free what the last model held, so that the next one has as much memory as a run."""
        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if self._comm.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._comm.device)
