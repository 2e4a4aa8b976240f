"""Assembly of a run from its settings: data, tokenizer, sharded model, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from fullshard.core.comm import Comm, together
from fullshard.core.optim import ExponentialMovingAverage, ShardedGradScaler
from fullshard.errors import MismatchError
from fullshard.program.config import RunConfig, option_of
from fullshard.program.data import BatchPlan, CollateSpec, TokenizedSet, TokenPlan, Turn, padding_share, positions
from fullshard.program.metrics import describe_words
from fullshard.program.models import RouterLoss, announce_shapes
from fullshard.program.train.evaluation.evaluate import EvaluationSpec, HeldOut, evaluation_spec
from fullshard.program.train.evaluation.reference import with_reference
from fullshard.program.train.reporting.flops import Flops, count_flops, peak_flops
from fullshard.program.train.reporting.reports import SetFacts
from fullshard.program.train.setup.choices import advice, choices
from fullshard.program.train.setup.devices import Choice, Devices, for_devices, smallest_memory
from fullshard.program.train.setup.model import own_loss, prepare_model, shard_model
from fullshard.program.train.setup.optimizers import make_optimizer, moving_average
from fullshard.program.train.setup.prepare import Prepared, collate_spec, prepare
from fullshard.program.train.setup.quantization import quantised_base
from fullshard.program.train.setup.resume import THIS_VERSION, Rules
from fullshard.program.train.setup.sequence import sharing_notes
from fullshard.program.train.setup.steps import (
    LearningRateSchedule,
    learning_rate_schedule,
    make_plan,
    mixture_notes,
    schedule_notes,
    set_facts,
    training_batches,
)
from fullshard.state.storage import Base

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Assembly:
    """The parts of a run on one rank."""

    config: RunConfig  # the run's settings, and what its data decides
    comm: Comm  # the ranks
    tokenizer: PreTrainedTokenizerBase  # the model's tokenizer
    model: PreTrainedModel  # the sharded model, in training mode; with an adapter, peft's model around it
    optimizer: torch.optim.Optimizer  # over this rank's shards
    average: ExponentialMovingAverage | None  # of the trained weights, which is evaluated and published; None: none
    scaler: ShardedGradScaler | None  # scales the loss in fp16; None in other precisions
    schedule: LearningRateSchedule  # learning rate factor of each step
    train_set: TokenizedSet  # token ids of the training rows
    plan: BatchPlan  # rows of each step of the first epoch
    collate: CollateSpec  # how training batches are made, and the kind of model
    evaluation: EvaluationSpec | None  # rows and metrics of an evaluation; None if the run never evaluates
    parameters: int  # elements of all parameters, a tied one counted once
    padding_share: float  # share of padding among all positions of an epoch's batches
    router_loss: RouterLoss | None  # the routers' own loss of a mixture of experts; None: it is not trained
    flops: Flops | None  # FLOPs of a token and of the devices; None if the devices' are not known
    sets: tuple[SetFacts, ...]  # the sets of a mixture; empty: the run has one set
    notes: tuple[str, ...]  # notes on data and model for the user
    # :attr:`~fullshard.program.train.setup.prepare.Prepared.system_turns`
    system_turns: Mapping[str, Sequence[Turn] | None] = field(default_factory=dict)
    chosen: tuple[Choice, ...] = ()  # what the run chose by itself
    base: Base | None = None  # the quantised model under the adapter, named by checkpoints; None: they hold everything


def assemble(  # noqa: PLR0913 (of the run, and of where it starts)
    config: RunConfig,
    comm: Comm,
    prepared: Prepared | None = None,
    *,
    group: int | None = None,
    rules: Rules = THIS_VERSION,
    filled: bool = False,
    chosen: Sequence[Choice] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Assembly:
    """Build every part of a run; every rank calls it, with the same settings.

    ``group`` and ``rules`` are those of the run's :class:`~fullshard.program.train.setup.resume.StartingPoint`; a
    snapshot fills a model later that is ``filled``, see ``prepare_model``. ``prepared`` and ``chosen`` are as for
    :func:`~fullshard.program.train.run.loop.train`. ``progress`` is called while the reference of preferences is
    computed, with this rank's batches done and in total.

    Raises:
        UserError: Data, model or settings do not fit together; on every rank, with the same text.
        MismatchError: See :func:`require_same_settings` and :func:`require_same_rows`.
    """
    require_same_settings(comm, config)
    ready_data = prepared or together(comm, lambda: prepare(config))
    tokenizer, train_set, causal = ready_data.tokenizer, ready_data.train_set, ready_data.causal
    require_same_rows(comm, ready_data)
    config = ready_data.settled(config)
    evaluation = together(comm, lambda: make_evaluation(config, ready_data))
    plan = together(comm, lambda: make_plan(config, train_set, comm.size, causal=causal, group=group))
    config = rules.settled(config, plan.num_steps)
    devices = Devices.of_ranks(comm)
    of_device = for_devices(config, devices)
    memory, directory = smallest_memory(comm), ready_data.model_directory
    refers = config.training.preference_has_reference
    filled = filled and not refers  # the reference is the model before any step
    ready = together(comm, lambda: prepare_model(of_device, tokenizer, directory, filled=filled, memory_bytes=memory))
    model = ready.model
    router, router_notes = together(comm, lambda: own_loss(model, config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    source_flops, target_flops = count_flops(model)
    peak = peak_flops(comm.device, config.training.precision)
    shard_model(model, config, comm, weights=ready.weights)
    plain = collate_spec(tokenizer, causal=causal)
    reference_notes: tuple[str, ...] = ()
    if refers:
        ready_data, note = with_reference(model, config, ready_data, comm, plain, progress)
        train_set, reference_notes = ready_data.train_set, (note,)
        evaluation = make_evaluation(config, ready_data)
    collate = training_batches(config, plain, plan, train_set)
    announce_shapes(model, len(collate.shapes))
    # What no forward reads is not made; the routers' own loss counts tokens by the mask, and would count fillers.
    collate = replace(collate, prompts=False, masked=not causal or router is not None, fills=router is None)
    share = padding_share(plan, train_set, collate)
    schedule = learning_rate_schedule(config, plan.num_steps)
    return Assembly(
        config=config,
        comm=comm,
        tokenizer=tokenizer,
        model=model,
        optimizer=make_optimizer(model, config, decay_by=rules.weight_decay),
        average=moving_average(model, config),
        scaler=ShardedGradScaler(comm.device.type) if config.training.precision == "fp16" else None,
        schedule=schedule,
        train_set=train_set,
        plan=plan,
        collate=collate,
        evaluation=evaluation,
        parameters=parameters,
        padding_share=share,
        router_loss=router,
        flops=None if peak is None else Flops(source_flops, target_flops, peak * comm.size),
        sets=set_facts(config, ready_data),
        notes=(
            *ready_data.notes,
            *mixture_notes(config, ready_data),
            *([describe_words(evaluation.words)] if evaluation is not None and evaluation.words else []),
            padding_note(plan, train_set, collate, share),
            *router_notes,
            *ready.notes,
            *reference_notes,
            *schedule_notes(config, schedule),
            *sharing_notes(config, comm.size, ready_data.held_out_set),
            *advice(config, ready_data, plan, comm.size),
        ),
        system_turns=ready_data.system_turns,
        chosen=choices(config, devices, model, memory, before=chosen),
        base=quantised_base(model, config, ready_data.model_directory, comm),
    )


def padding_note(plan: BatchPlan, train_set: TokenizedSet, collate: CollateSpec, share: float) -> str:
    """Return a line for users about the padding of training batches; any rank."""
    about = "by estimated lengths, " if train_set.estimated else ""
    line = f"training batches: {about}{share:.1%} of all positions are padding"
    if not collate.shapes:
        return line
    own = padding_share(plan, train_set, replace(collate, shapes=()))
    sizes = ", ".join("x".join(map(str, shape[:2] if collate.causal else shape)) for shape in collate.shapes)
    most = max(positions(shape, causal=collate.causal) for shape in collate.shapes)
    over = ""
    if isinstance(plan, TokenPlan) and most > plan.batch_tokens:
        over = f"; the largest has {most:,}, where training.per_device_train_batch_tokens is {plan.batch_tokens:,}"
    return (
        f"{line}; {own:.1%} without the fixed shapes that blocks are compiled for ({sizes}), which are "
        f"{(1 - own) / (1 - share) - 1:.1%} more positions{over}"
    )


def require_same_settings(comm: Comm, config: RunConfig) -> None:
    """Check that all ranks have the same settings, because each machine reads its own run file. Every rank calls it.

    Raises:
        MismatchError: Settings differ; on every rank.
    """
    # Of settings that may differ between machines, the content they refer to is compared instead.
    shared = {key: str(value) for key, value in config.as_flat().items() if not option_of(key).own_machine}
    everyone = comm.all_gather_object(shared)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            apart = sorted(key for key, value in theirs.items() ^ everyone[0].items())
            shown = "; ".join(
                f"{key} is {everyone[0].get(key)} on rank 0 and {theirs.get(key)} on rank {rank}"
                for key in dict.fromkeys(apart)
            )
            raise MismatchError(
                f"Settings differ between ranks: {shown}. Give every machine the same run file and options."
            )


def require_same_rows(comm: Comm, prepared: Prepared) -> None:
    """Check that all ranks have the same token ids, because each reads its machine's files. Every rank calls it.

    Raises:
        MismatchError: Rows differ; on every rank.
    """
    sets = {"training": prepared.train_set, "held-out": prepared.held_out_set}
    mine = {name: _summary(one) for name, one in sets.items() if one is not None}
    everyone = comm.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        for name in everyone[0]:
            if theirs.get(name) != everyone[0][name]:
                raise MismatchError(
                    f"The {name} rows differ between ranks: rank 0 has {everyone[0][name]}, rank {rank} has "
                    f"{theirs.get(name)}. Every machine needs the same data files, tokenizer and version of "
                    "transformers. If the chat template writes the date, the ranks may have started before and after "
                    "midnight: start again."
                )


def _summary(rows: TokenizedSet) -> str:
    source, target = rows.source_ids, rows.target_ids
    sums = f"{source.checksum():08x}-{target.checksum():08x}"
    sums += "" if rows.spans is None else f"-{rows.spans.checksum():08x}"
    weights = "" if rows.weights is None else _of_weights(rows.weights)
    labels = "" if rows.desirable is None else f", labels {crc32(rows.desirable.tobytes()):08x}"
    return f"{len(rows):,} of {source.num_ids:,} and {target.num_ids:,} tokens (checksum {sums}{weights}{labels})"


def _of_weights(weights: NDArray[np.float64]) -> str:
    return f", weights' checksum {crc32(np.ascontiguousarray(weights).data):08x}, weights {weights.sum():.9g}"


def make_evaluation(config: RunConfig, prepared: Prepared) -> EvaluationSpec | None:
    """Return the rows and metrics of an evaluation, or None if the run never evaluates; any rank.

    Raises:
        ConfigError: See :func:`~fullshard.program.train.evaluation.evaluate.evaluation_spec`.
    """
    if prepared.held_out_set is None:
        return None
    spec = collate_spec(prepared.tokenizer, causal=prepared.causal)
    spec = replace(spec, shortest=config.sharding.sequence_parallel)
    sets = {
        one.name: HeldOut(one.held_out, one.held_out_set, spec, labels=prepared.labels, majority=one.majority)
        for one in prepared.sets
        if one.held_out_set is not None
    }
    rows = HeldOut(
        prepared.held_out,
        prepared.held_out_set,
        spec,
        labels=prepared.labels,
        majority=[one.majority for one in prepared.sets for _ in one.held_out],
        sets=sets if config.data.sets else {},
    )
    return evaluation_spec(prepared.settled(config), rows)
