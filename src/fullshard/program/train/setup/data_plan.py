"""The plan of a run's epochs: which rows each step has."""

from __future__ import annotations

from fullshard.program.config import RunConfig
from fullshard.program.data import BatchPlan, EpochPlan, Mixture, TokenizedSet, TokenPlan
from fullshard.program.train.reporting.reports import SetFacts
from fullshard.program.train.setup.division import Division
from fullshard.program.train.setup.prepare import Prepared


def make_plan(
    config: RunConfig, train_set: TokenizedSet, world_size: int, *, causal: bool, group: int | None = None
) -> BatchPlan:
    """Return the plan of the first epoch, whose ``for_epoch`` returns the others; any rank, with the same result.

    Args:
        config: The run's settings.
        train_set: Token ids of the training rows.
        world_size: Number of ranks.
        causal: Whether source and target are one sequence.
        group: :attr:`Division.group` of the run's start; None: it starts here.

    Raises:
        DataError: A row is longer than the token budget.
    """
    settings = config.training
    group = group or Division.of(config, world_size).group
    if settings.per_device_train_batch_tokens is None:
        return EpochPlan(
            num_rows=len(train_set),
            world_size=world_size,
            batch_size=settings.per_device_train_batch_size,
            seed=config.seed,
            lengths=train_set.lengths if settings.train_sampling_strategy == "group_by_length" else None,
            group_rows=group,
            accumulation=settings.gradient_accumulation_steps,
            mixture=make_mixture(config, train_set),
        )
    return TokenPlan(
        source_lengths=train_set.source_ids.lengths,
        target_lengths=train_set.target_ids.lengths,
        causal=causal,
        world_size=world_size,
        batch_tokens=settings.per_device_train_batch_tokens,
        accumulation=settings.gradient_accumulation_steps,
        seed=config.seed,
        group=group,
    )


def make_mixture(config: RunConfig, train_set: TokenizedSet) -> Mixture | None:
    """Return the shares of the sets of a run in an epoch; None if they have no weights, so that each row comes once."""
    weights = config.data.weights
    # A mixture of one set is that set, whatever its weight.
    return Mixture(train_set.set_rows, weights, config.seed) if weights and train_set.set_rows else None


def mixture_notes(config: RunConfig, prepared: Prepared) -> list[str]:
    """Return a line with the rows of each set in an epoch, for a mixture with weights; any rank."""
    mixture = make_mixture(config, prepared.train_set)
    if mixture is None:
        return []
    total = sum(mixture.rows)
    parts = [
        f"{one.name} {count:,} ({count / total:.1%}, {count / len(one.train_set):.2f} times its {len(one.train_set):,})"
        for one, count in zip(prepared.sets, mixture.counts, strict=True)
    ]
    return [f"mixture: an epoch of {total:,} rows has {', '.join(parts)}"]


def set_facts(config: RunConfig, prepared: Prepared) -> tuple[SetFacts, ...]:
    """Return the recorded facts of each set of a mixture, empty if there is none; any rank."""
    mixture = make_mixture(config, prepared.train_set)
    counts = [len(one.train_set) for one in prepared.sets] if mixture is None else mixture.counts
    return tuple(
        SetFacts(
            name=one.name,
            weight=config.data.sets[one.name].weight,
            train_rows=len(one.train_set),
            epoch_rows=count,
            validation_rows=len(one.held_out),
            content=one.content,
        )
        for one, count in zip(prepared.sets, counts, strict=True)
        if one.name
    )
