"""The plan of a run's step: the program's own model, data, optimizer and step, simulated without memory or ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from math import ceil, prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from fullshard.core.comm import Comm
from fullshard.core.engine.step.lane import HELD_BYTES
from fullshard.core.optim import ShardedGradScaler
from fullshard.errors import ConfigError
from fullshard.planner import (
    STEPS,
    Hardware,
    MemoryTimeline,
    Plan,
    PlannedStep,
    candidates,
    highest,
    host_of_gpu,
    real_tensors,
    simulate_on,
    spend,
)
from fullshard.program.config import RunConfig
from fullshard.program.data import (
    Batch,
    BatchPlan,
    CollateSpec,
    EpochPlan,
    LengthStats,
    Ragged,
    RowRef,
    Shape,
    TokenizedSet,
    collate,
    step_shapes,
    steps,
)
from fullshard.program.models import Objective, add_tokens, blocks_of, resolve_model
from fullshard.program.models.float8 import Float8Layers
from fullshard.program.models.hub import reads_one_sequence
from fullshard.program.train.around_steps import AT_ONCE, AroundSteps, HeldOutBatches, assumed
from fullshard.program.train.first_numbers import GPU_KERNELS, uncompiled
from fullshard.program.train.run.step import StepSpec, issue_step
from fullshard.program.train.setup.activation_offload import ActivationOffload
from fullshard.program.train.setup.choices import choices
from fullshard.program.train.setup.devices import Choice, Devices, for_devices, with_precision, with_unsharded
from fullshard.program.train.setup.model import (
    UnreadWeights,
    outline_model,
    own_loss,
    preference_of,
    prepare_model,
    shard_model,
)
from fullshard.program.train.setup.optimizers import make_optimizer, moving_average
from fullshard.program.train.setup.prepare import Prepared, collate_spec, model_tokenizer
from fullshard.program.train.setup.quantization import describe_quantization
from fullshard.program.train.setup.sequence import readers
from fullshard.program.train.setup.steps import learning_rate_schedule, make_plan, training_batches
from fullshard.program.train.setup.ways import ways_choice, with_ways
from fullshard.sizes import format_bytes, format_duration

_STEPS = 4
"""Steps of rows on all ranks: a budget of tokens rounds lengths, so that the last step may be short."""


@dataclass(frozen=True)
class RowsOfLength(Prepared):
    """A run's data as if every row had one length; the number of rows is unknown."""


def prepare_length(config: RunConfig, source: int | None, target: int, world_size: int) -> RowsOfLength:
    """Return rows of one length, enough for some steps. Reads the model's config and tokenizer, no data; one process.

    ``source`` and ``target`` are tokens; without a source, for causal models only, each row is a text of ``target``
    tokens. ``world_size`` is the largest number of ranks that will be planned with it.

    Raises:
        ConfigError: The model is an encoder-decoder and only one length is given.
        ModelError: The tokenizer or the model's configuration cannot be read.
    """
    directory = None if config.model.path is None else resolve_model(config.model.path)
    if directory is None:
        tokenizer = add_tokens(_blank_tokenizer(config), config.model.new_tokens)
    else:
        tokenizer = model_tokenizer(config, directory)
    described = directory if config.model.config is None else config.model.config
    causal = reads_one_sequence(described, config.model.model_class)  # type: ignore[arg-type]
    if source is None:
        if not causal or target < 2:
            kind = "a text of one token has no target" if causal else "this model is an encoder-decoder"
            raise ConfigError(f"A length is SOURCE/TARGET, such as 512/128, in tokens: {kind}. Give both.")
        source, target = 1, target - 1
    token = 0 if tokenizer.pad_token_id else 1
    rows = _set_of(config, (source, target), token, world_size)
    evaluates = config.training.eval_strategy != "no" and config.data.holds_out
    return RowsOfLength(
        tokenizer=tokenizer,
        model_directory=directory,
        causal=causal,
        separator=None,
        train_set=rows,
        held_out=[],
        held_out_set=rows if evaluates else None,
        labels=None,
        sets=(),
        notes=(),
    )


def _set_of(config: RunConfig, lengths: tuple[int, int], token: int, world_size: int) -> TokenizedSet:
    """Return rows of these lengths for some steps; each side is a single id in memory."""
    training = config.training
    each = training.per_device_train_batch_size
    if training.per_device_train_batch_tokens is not None:
        each = max(training.per_device_train_batch_tokens // sum(lengths), 1)
    count = max(_STEPS * world_size * training.gradient_accumulation_steps * each, training.per_device_eval_batch_size)
    together = 1 if training.objective == "sft" else 2
    count *= together
    sources, targets = (
        Ragged(np.broadcast_to(np.int32(token), count * length), np.arange(count + 1) * length) for length in lengths
    )
    source, target = (LengthStats(length, length, 0, length) for length in lengths)
    labels = np.ones(count // together, bool) if training.objective == "kto" else None
    return TokenizedSet(sources, targets, source, target, together=together, desirable=labels)


def _blank_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the maximum number of pieces of the one that the run trains on its data."""
    settings = config.model.tokenizer
    assert settings is not None, "the schema requires model.tokenizer with model.config"
    special = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    pieces = special | {f"piece{number}": number for number in range(len(special), settings.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


AUTO_SHARE = 0.9
"""Share of the free memory that a choice of a run may fill."""

BLOCKS = "training.gradient_checkpointing"
ACCUMULATE = "training.accumulate"

T = TypeVar("T")


@dataclass(frozen=True)
class RunPlan(Plan):
    """The plan of a run. Memory is that of the longest batch that the data can give; time that of a step of mean size.

    Attributes:
        steps: Optimizer steps of the run; 0: not known, as rows of a given length are no data.
        step_tokens: Source and target tokens of a step, all ranks together, without padding; the mean of an epoch.
        float8: Which linear layers compute in fp8, for users; None: the run is in another precision.
        quantization: Format of the frozen linear layers, such as ``nf4 (double)``; None: they are not quantised.
        accumulate: How gradients of a step's micro-batches are added up, ``sharded`` or ``unsharded``; None: there is
            one micro-batch.
        chosen: What the run chooses by itself; of ``sharding: auto`` and of a run to resume only its start knows.
        blocks: Blocks that backward could recompute.
        recomputed: How many of them it does.
        at_once: Most bytes alive in an evaluation whose units are all gathered once, as far as text is generated: its
            phases by name.
        gathers_once: Whether evaluations do so; then it is part of ``phase_peaks``.
        compiled_bytes: With ``training.torch_compile``, the gradients of the largest block, which arrive together; they
            are added to the plan of uncompiled blocks, which makes it an upper bound. None: blocks are not compiled.
        sequence_parallel: Ranks that share each row.
        by_masks: The run's way of attention if it is planned with masks and scores, which its kernel does not hold.
    """

    steps: int = 0
    step_tokens: int = 0
    float8: str | None = None
    quantization: str | None = None
    accumulate: str | None = None
    chosen: tuple[Choice, ...] = ()
    blocks: int = 0
    recomputed: int = 0
    at_once: Mapping[str, int] = field(default_factory=dict)
    gathers_once: bool = False

    def gathering_once(self) -> RunPlan:
        """Return the plan of the same run whose evaluations gather all units once, where they generate text."""
        return replace(
            self, phase_peaks={**self.phase_peaks, **self.at_once}, gathers_once="generation" in self.at_once
        )

    compiled_bytes: int | None = None
    by_masks: str | None = None
    sequence_parallel: int = 1

    @property
    def run_s(self) -> float | None:
        """Seconds of all steps, without evaluation and saving; None without a time, or if their number is unknown."""
        return self.timing.step_s * self.steps if self.timing is not None and self.steps else None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        chosen = [asdict(one) for one in self.chosen]
        own = {
            "float8": self.float8,
            "quantization": self.quantization,
            "accumulate": self.accumulate,
            "chosen": chosen,
        }
        own |= {
            "sequence_parallel": self.sequence_parallel,
            "at_once": dict(self.at_once),
            "gathers_once": self.gathers_once,
        }
        return {**super().as_dict(), "run_s": self.run_s, **own}

    def __str__(self) -> str:
        table = "\n".join([super().__str__(), *map(str, self.chosen)])
        if self.float8 is not None:
            table += f"\n{self.float8}"
        if self.quantization is not None:
            table += f"\nfrozen linear layers are quantised: {self.quantization}"
        said = {one.setting for one in self.chosen}
        if self.accumulate is not None and ACCUMULATE not in said:
            table += f"\naccumulate: {self.accumulate}"
        if self.recomputed and BLOCKS not in said:
            table += f"\nrecomputed in backward: {self.recomputed} of {self.blocks} blocks"
        if self.sequence_parallel > 1:
            table += f"\n{self.sequence_parallel} ranks share each row (sharding.sequence_parallel)"
        if self.gathers_once:
            table += "\nevaluation gathers all units once, not for every token"
        if self.compiled_bytes is not None:
            table += (
                "\nmemory is an upper bound: blocks are planned uncompiled (training.torch_compile), and for gradients "
                f"that arrive together {format_bytes(self.compiled_bytes)} are added; time is that of uncompiled blocks"
            )
        if self.by_masks is not None:
            table += (
                f"\nmemory is an upper bound: attention is planned with masks and scores, which {self.by_masks} does "
                "not hold on a GPU; time is that of attention with masks"
            )
        if self.timing is None:
            return table
        run = "" if self.run_s is None else f"{self.steps:,} steps: {format_duration(self.run_s)}; "
        return f"{table}\n{run}{self.step_tokens / self.timing.step_s:,.0f} tokens a second"


def plan_prepared(  # noqa: PLR0913 (each caller needs another part)
    config: RunConfig,
    data: Prepared,
    world_size: int,
    device: Hardware | None = None,
    *,
    roughly: int | None = None,
    around: bool = True,
    listed: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RunPlan:
    """Return what the fullest of ``world_size`` ranks holds and sends in a step; one process, without weights.

    The steps are those of the largest batches; see :func:`largest_steps`.

    Args:
        config: The run's settings.
        data: Result of :func:`~fullshard.program.train.setup.prepare.prepare` for settings that read the same data, or
            of :func:`prepare_length`.
        world_size: Number of ranks.
        device: The GPU of each, whose data sheet adds the time; None: CPU ranks.
        roughly: Plan this rank only, with at most two micro-batches a step and a step less; None: exactly.
        around: Whether to plan evaluations, saving and resuming too, which take as long as the steps.
        listed: See :func:`largest_steps`.
        progress: Called with the steps taken and those to take, of all ranks that are planned.

    Raises:
        ConfigError: A setting cannot be planned.
        ModelError: The step depends on values.
        UserError: Model or settings cannot be used.
    """
    devices = Devices.of_sheet(device)
    given = isinstance(data, RowsOfLength)
    settled, before = ways_choice(with_precision(config, devices), data, world_size, devices, counted=not given)
    asked, config = with_ways(config, settled.speed.ways), for_devices(settled, devices)
    training = config.training
    times, unsharded = training.gradient_accumulation_steps, training.accumulate == "unsharded"
    # Full gradients are there from the second micro-batch on, and the last one reduces them.
    most = times if roughly is None else min(times, 3 if unsharded else 2)
    # If packed or budgeted, any micro-batch of a step may be its largest.
    largest = [
        one[:most] if one[0] is one[-1] else one for one in largest_steps(config, data, world_size, listed=listed)
    ]
    epoch = make_plan(config, data.train_set, world_size, causal=data.causal)

    def usual() -> list[Batch]:
        with real_tensors():
            return middle_step(config, data, epoch)

    simulated = _Simulated(largest, STEPS - 1 if roughly is None else STEPS - 2)
    if device is not None and given:  # a usual step is as large as the largest, which is timed
        simulated = replace(simulated, times=max(times / most, 1))
    elif device is not None:
        simulated = replace(simulated, usual=lambda: usual()[:most], times=max(len(usual()) / most, 1))
    ranks = candidates(partial(_sharded, config, data), world_size) if roughly is None else [roughly]
    if roughly is None:  # of ranks that share rows the first have most tokens and heads
        ranks = sorted({one for rank in ranks for one in (rank, rank - rank % config.sharding.sequence_parallel)})
    told = _Told(progress, len(ranks) * len(simulated), partial(choices, asked, devices, before=before))
    held_out = _largest_held_out(config, data, world_size) if around else None
    phases = AroundSteps(config, data, held_out) if around else None
    with _without_warnings():
        found = highest(partial(_build, config, data, simulated, phases, told), ranks, world_size, device)
    values = {one.name: getattr(found, one.name) for one in fields(Plan)}
    at_once = {name: size for name, size in found.phase_peaks.items() if name.endswith(AT_ONCE)}
    values["phase_peaks"] = {name: size for name, size in found.phase_peaks.items() if name not in at_once}
    values["unplanned"] = tuple(name for name in found.unplanned if not name.endswith(AT_ONCE))
    tokens = len(data.train_set) * (data.train_set.source_stats.mean + data.train_set.target_stats.mean)
    plan = RunPlan(
        **values,
        # Rows of a given length are no data that could say how many there are.
        steps=training.max_steps or 0 if given else learning_rate_schedule(config, epoch.num_steps).total_steps,
        step_tokens=round(tokens / epoch.num_steps),
        float8=told.float8 if training.precision == "fp8" else None,
        quantization=describe_quantization(config),
        accumulate=None if times == 1 else "unsharded" if unsharded else "sharded",
        chosen=told.chosen,
        blocks=told.blocks,
        recomputed=told.recomputed,
        at_once={name.removesuffix(AT_ONCE): size for name, size in at_once.items()},
        by_masks=planned_by_masks(asked, gpu=device is not None),
        sequence_parallel=config.sharding.sequence_parallel,
    )
    return _with_compiled(plan, told.block_bytes) if "compile" in asked.ways else plan


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Context in which transformers logs errors only: others are about values, such as padding, which no plan has."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _with_compiled(plan: RunPlan, block_bytes: int) -> RunPlan:
    """Return the plan with all gradients of a block at once in backward, as graphs return them."""
    parts, peaks = dict(plan.parts), dict(plan.phase_peaks)
    parts["gradient_buffers"] += block_bytes
    peaks["backward"] += block_bytes
    return replace(
        plan, parts=parts, phase_peaks=peaks, peak_bytes=plan.peak_bytes + block_bytes, compiled_bytes=block_bytes
    )


def needed_bytes(plan: RunPlan, kind: str) -> int:
    """Return the most bytes of tensors on a device of ``kind``; a GPU does not hold a model while it is built.

    Snapshots for restarts are not among them: a run whose snapshots would take too much takes none.
    """
    if kind == "cpu":
        return max(plan.bytes_in(phase, snapshots=False) for phase in plan.phase_peaks)
    return max(size for phase, size in plan.phase_peaks.items() if phase != "before_first_step")


def try_step(config: RunConfig, data: Prepared, world_size: int) -> None:
    """Take the run's first step with its shortest row as rank 0, without memory; one process, without weights.

    Raises:
        UnplannedStepError: The step depends on values.
        Exception: Whatever the step raises.
    """
    shortest = int(np.argmin(np.asarray(data.train_set.lengths)))
    spec = replace(_collate_spec(config, data), packed=config.training.packing)
    each = data.train_set.together
    first = shortest // each * each
    batch = collate([RowRef(row) for row in range(first, first + each)], data.train_set, spec)
    build = partial(_build, config, data, _Simulated([[batch]], 0), None, _Told(lambda done, total: None, 0))
    simulate_on(build, 0, world_size, None, timed=False)


def draw_plan(config: RunConfig, data: Prepared, plan: RunPlan) -> MemoryTimeline:
    """Return the memory timeline of the fullest step of ``plan``, which :func:`plan_prepared` returned for this run."""
    told = _Told(lambda done, total: None, 0)
    config = for_devices(config, Devices.of_sheet(plan.device))
    config = with_unsharded(config) if plan.accumulate == "unsharded" else config
    build = partial(_build, config, data, _Simulated(largest_steps(config, data, plan.world_size)), None, told)
    timeline = simulate_on(build, plan.rank, plan.world_size, plan.device, draws=True).timeline
    assert timeline is not None, "it was asked for"
    return timeline


class _Told:
    """Counts the steps of all simulations of a plan and tells each; keeps what the run chooses for its model."""

    def __init__(
        self,
        progress: Callable[[int, int], None],
        total: int,
        choices: Callable[[Any], tuple[Choice, ...]] = lambda model: (),
    ) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._choices = choices
        self.chosen: tuple[Choice, ...] = ()
        self.float8: str | None = None
        self.blocks = self.recomputed = self.block_bytes = 0

    def model(self, model: Any) -> None:
        """Note what a plan says of a sharded model, which is not kept: it would count as memory."""
        self.chosen = self._choices(model)
        self.float8 = str(Float8Layers.of(model))
        blocks: list[Any] = list(blocks_of(model))
        self.blocks, self.recomputed = len(blocks), sum(block.gradient_checkpointing for block in blocks)
        # Graphs return a block's gradients together; a unit of several blocks may still hold back those of others.
        of_block, of_unit = Counter[int](), Counter[Any]()
        for place, block in enumerate(blocks):
            for p in (one for one in block.parameters() if one.requires_grad):
                size = prod(p.shard_meta.global_shape) * p.itemsize
                of_block[place] += size
                of_unit[p.shard_unit()] += size
        largest, unit = (max(found.values(), default=0) for found in (of_block, of_unit))
        self.block_bytes = max(largest, min(unit, largest + HELD_BYTES))

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        self._progress(self._done, self._total)


def _sharded(config: RunConfig, data: Prepared, comm: Comm) -> Any:
    """Return the run's model, sharded, without its weights; blocks are not compiled, so each operator is seen."""
    config = uncompiled(config)
    if config.model.path is None:
        model, weights, values = prepare_model(config, data.tokenizer).model, None, []
    else:
        with real_tensors():  # peft's values are read to find out whether it computes them from weights
            model, weights = outline_model(config, data.tokenizer), UnreadWeights()
        # A run holds its adapter's first values until the whole model is sharded.
        values = [param.detach() for param in model.parameters()]
    shard_model(model, config, comm, weights=weights)
    del values
    return model.train()


@dataclass(frozen=True)
class _Simulated:
    """The steps of a simulation."""

    turns: Sequence[list[Batch]]  # a step with micro-batches of each, the largest of the run
    first: int = STEPS - 1  # steps before them: the optimizer's state exists from the second step on
    usual: Callable[[], list[Batch]] | None = None  # makes the micro-batches of a last step, which is timed
    times: float = 1  # how often that step has them

    def __len__(self) -> int:
        return self.first + len(self.turns) + (self.usual is not None)

    def batches(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step."""
        # Of equal ones a single one makes the optimizer's state as well.
        begun = self.turns[0][:1] if self.turns[0][0] is self.turns[0][-1] else self.turns[0]
        yield from (*[begun] * self.first, *self.turns)
        if self.usual is not None:  # made here, as it would count as memory
            yield self.usual()


def _build(
    config: RunConfig, data: Prepared, simulated: _Simulated, around: AroundSteps | None, told: _Told, comm: Comm
) -> PlannedStep:
    """Return the run's steps, and what is ``around`` them."""
    model = _sharded(config, data, comm)
    told.model(model)
    if config.training.activation_offload and (host := host_of_gpu()) is not None:
        ActivationOffload(model, blocks_of(model), host)
    optimizer = make_optimizer(model, config)
    average = moving_average(model, config)
    scaler = ShardedGradScaler(comm.device.type) if config.training.precision == "fp16" else None
    spec = step_spec(model, config, data)
    each = simulated.batches()

    def step() -> None:
        # Late: otherwise it reads the loss and the norm, which a plan does not know.
        issue_step(model, optimizer, next(each), comm, spec, scaler, late=scaler is None)
        if average is not None:
            average.update()
        told.step()

    return PlannedStep(
        model,
        optimizer,
        step,
        steps=simulated.first + len(simulated.turns),
        after={} if around is None else around.phases(model, optimizer, comm, average),
        host={} if around is None else around.host(model, optimizer, comm, average),
        assumed=assumed if around is None else around.assumed,
        usual=simulated.usual is not None,
        times=simulated.times,
    )


def middle_step(config: RunConfig, data: Prepared, epoch: BatchPlan) -> list[Batch]:
    """Return rank 0's batches of a step of usual length."""
    spec = training_batches(config, collate_spec(data.tokenizer, causal=data.causal), epoch, data.train_set)
    return next(steps(data.train_set, epoch, 0, spec, start=_middle_of(data, epoch)))


def _middle_of(data: Prepared, epoch: BatchPlan) -> int:
    """Return the step whose padded length on rank 0 is nearest to the mean, of 200 or fewer of an epoch."""
    lengths = np.asarray(data.train_set.lengths)
    numbers = np.linspace(0, epoch.num_steps - 1, min(epoch.num_steps, 200)).astype(int).tolist()
    places = {number: [rows for rows, _ in epoch.step_places(number, 0)] for number in numbers}
    padded = {n: sum(len(rows) * int(lengths[rows].max()) for rows in batches) for n, batches in places.items()}
    mean = sum(padded.values()) / len(padded)
    return min(numbers, key=lambda number: abs(padded[number] - mean))


def at_limits(data: Prepared) -> Prepared:
    """Return the data with training rows at their greatest lengths, if theirs are only estimated."""
    rows = data.train_set
    if not rows.estimated:
        return data
    token = np.int32(0 if data.tokenizer.pad_token_id else 1)
    sources, targets = (
        Ragged(np.broadcast_to(token, len(rows) * stats.limit), np.arange(len(rows) + 1) * stats.limit)
        for stats in (rows.source_stats, rows.target_stats)
    )
    stats = rows.source_stats, rows.target_stats
    at_most = TokenizedSet(sources, targets, *stats, weights=rows.weights, set_rows=rows.set_rows)
    return replace(data, train_set=at_most)


def largest_steps(config: RunConfig, data: Prepared, world_size: int, *, listed: bool = False) -> list[list[Batch]]:
    """Return the micro-batches of steps of which one needs at least as much as any of the run; any process, alone.

    With padded rows: a step of micro-batches that none exceeds. If packed, or with a budget of tokens: of all steps
    of the run, those with the largest micro-batches by tokens and by attention, on each side, before a micro-batch
    has left gradients and after, and where full gradients are reduced; full steps last. ``listed``: with padded
    rows, too.
    """
    training, data = config.training, at_limits(data)
    # A row of a weighted set may occur twice in a micro-batch, which the longest rows do not show.
    listed = listed or bool(config.data.weights)
    if not listed and not training.packing and training.per_device_train_batch_tokens is None:
        return [[longest_batch(config, data, world_size)] * training.gradient_accumulation_steps]
    spec = _training_spec(config, data, world_size)
    found: tuple[dict[Shape, _Step], ...] = ({}, {}, {})
    for step in _counted(_steps(config, data, world_size, spec)):
        for place, (shape, _) in enumerate(step):
            reduces = training.accumulate == "unsharded" and place == len(step) - 1
            found[2 if reduces else min(place, 1)].setdefault(shape, step)
    chosen = [step for steps in found if steps for step in _largest(steps)]
    chosen = sorted({id(step): step for step in chosen}.values(), key=len)
    return [[_with_padding(_collated(rows, data.train_set, spec)) for _, rows in step] for step in chosen]


_Step = list[tuple[Shape, NDArray[np.int64]]]
"""The micro-batches of one rank in one step: shapes and rows."""


def _largest(steps: Mapping[Shape, _Step]) -> list[_Step]:
    """Return the steps of the shapes that are largest by one measure, or by all together; often that is one step."""
    count, sources, targets = np.array(list(steps), dtype=np.float64).T
    needs = [count * (sources + targets), count * sources, count * targets]
    needs += [need * length for need in needs[1:] for length in (sources, targets)]
    needs += [sum(need / need.max() for need in needs)]
    best = int(needs[-1].argmax())
    places = [best] if all(need[best] == need.max() for need in needs) else [int(need.argmax()) for need in needs]
    return [list(steps.values())[place] for place in places]


def _training_spec(config: RunConfig, data: Prepared, world_size: int) -> CollateSpec:
    """Return how the run's batches are made, with what only evaluations read."""
    epoch = make_plan(config, data.train_set, world_size, causal=data.causal)
    return training_batches(config, collate_spec(data.tokenizer, causal=data.causal), epoch, data.train_set)


def _steps(config: RunConfig, data: Prepared, world_size: int, spec: CollateSpec) -> Iterator[_Step]:
    first = make_plan(config, data.train_set, world_size, causal=data.causal)
    left = learning_rate_schedule(config, first.num_steps).total_steps
    for epoch in range(ceil(left / first.num_steps)):
        steps = min(left, first.num_steps)
        left -= steps
        yield from step_shapes(first.for_epoch(epoch), data.train_set, steps, spec)


def _collated(indices: NDArray[np.int64], rows: TokenizedSet, spec: CollateSpec) -> Batch:
    return collate([RowRef(row) for row in indices.tolist()], rows, spec)


def _largest_held_out(config: RunConfig, data: Prepared, world_size: int) -> HeldOutBatches | None:
    """Return the evaluation batches with most tokens and with the longest prompts; None if the run never evaluates."""
    if data.held_out_set is None:
        return None
    rows = replace(data.held_out_set, desirable=None)  # as in logps_of_rows
    size = config.training.per_device_eval_batch_size
    spec = _collate_spec(config, data)

    def largest(ranks: int, tokens: Callable[[Shape], int], *, causal: bool) -> Batch:
        plan = EpochPlan(len(rows), ranks, size, training=False, lengths=rows.lengths, together=rows.together)
        batches = chain.from_iterable(step_shapes(plan, rows, plan.num_steps, replace(spec, causal=causal)))
        _, found = max(_counted(batches), key=lambda one: tokens(one[0]))
        return _with_padding(_collated(found, rows, spec))

    return HeldOutBatches(
        loss=largest(readers(config, world_size), lambda shape: shape[0] * (shape[1] + shape[2]), causal=data.causal),
        text=largest(
            world_size, lambda shape: shape[0] * shape[1], causal=False
        ),  # prompts are the sources of either kind
    )


def _collate_spec(config: RunConfig, data: Prepared) -> CollateSpec:
    """Return how batches are padded, those of evaluations too."""
    spec = collate_spec(data.tokenizer, causal=data.causal)
    return replace(spec, shortest=config.sharding.sequence_parallel)


def _counted(values: Iterable[T]) -> Iterator[T]:
    """Yield ``values`` within the limit on a plan's work: there are as many as the data has batches."""
    for value in values:
        spend(1)
        yield value


def longest_batch(config: RunConfig, data: Prepared, world_size: int) -> Batch:
    """Return a micro-batch that is at least as large as any of the run, of rows of the data; any process, alone."""
    rows = longest_rows(data.train_set, config.training.per_device_train_batch_size, causal=data.causal)
    spec = _training_spec(config, data, world_size)
    # The last shape holds any micro-batch of the run, also where no row is longest on both sides. Of a small set it has
    # fewer rows than the settings allow.
    spec = replace(spec, shapes=spec.shapes[-1:])
    rows = rows[: spec.shapes[0][0] * len(data.train_set.forwards(rows))] if spec.shapes else rows
    return _with_padding(collate([RowRef(row) for row in rows], data.train_set, spec))


def _with_padding(batch: Batch) -> Batch:
    """Return the batch with a last token of padding, if it has several rows; any process.

    Rows of one length need no mask, and models then leave it out: a Llama's step was 4 % smaller than that of a batch
    with one token less.
    """
    mask, prompt_mask = batch.attention_mask_BS, batch.prompt_mask_BP
    if len(batch.indices) > 1 and mask is not None and prompt_mask is not None:
        mask[-1, -1] = 0
        if prompt_mask is not mask:
            prompt_mask[-1, :1] = 0  # plain text has no prompts
    return batch


def longest_rows(rows: TokenizedSet, count: int, *, causal: bool) -> Sequence[int]:
    """Return the indices of ``count`` rows that need most: the longest source and target, then the longest rows.

    A set with fewer rows gives all of them. Of rows that are together, ``count`` is the number of such runs.
    """
    each = rows.together
    sources, targets = (np.asarray(ids.lengths).reshape(-1, each) for ids in (rows.source_ids, rows.target_ids))
    both = (sources + targets).max(1) if causal else sources.max(1) + targets.max(1)
    by_length = np.argsort(-both, kind="stable")[: count + 2].tolist()
    first = [] if causal or count < 2 else [int(sources.max(1).argmax()), int(targets.max(1).argmax())]
    chosen = list(dict.fromkeys([*first, *by_length]))[:count]
    return [run * each + row for run in chosen for row in range(each)]


def planned_by_masks(config: RunConfig, *, gpu: bool) -> str | None:
    """Return the run's way of attention if its plan holds masks and scores that the run on a GPU does not; or None."""
    bounded = (*GPU_KERNELS, "bias_sdpa") if gpu else GPU_KERNELS
    return next((name for name in config.ways if name in bounded), None)


def step_spec(model: Any, config: RunConfig, data: Prepared) -> StepSpec:
    """Return the limits of a step that is planned."""
    settings = config.training
    return StepSpec(
        step=1,
        epoch=0.0,
        learning_rate=settings.learning_rate or 0.0,
        max_grad_norm=settings.max_grad_norm,
        causal=data.causal,
        objective=Objective(settings.label_smoothing_factor, settings.z_loss),
        preference=preference_of(config),
        router_loss=own_loss(model, config)[0],
        precision=settings.precision,
        unsharded=settings.accumulate == "unsharded",
    )
