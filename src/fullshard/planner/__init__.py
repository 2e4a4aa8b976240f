"""Planner: runs the real model, engine and optimizer as one rank of many, without memory, and counts the bytes."""

from fullshard.planner.bench import measure_rates as measure_rates
from fullshard.planner.hollow import UnplannedStepError as UnplannedStepError, real_tensors as real_tensors
from fullshard.planner.meter import (
    Meter as Meter,
    TooMuchWorkError as TooMuchWorkError,
    spend as spend,
    work_limit as work_limit,
)
from fullshard.planner.plan import (
    HOST_LABELS as HOST_LABELS,
    LABELS as LABELS,
    PHASE_LABELS as PHASE_LABELS,
    Plan as Plan,
    candidates as candidates,
    highest as highest,
    plan as plan,
    rehearse_on as rehearse_on,
    speed_of as speed_of,
)
from fullshard.planner.rates import (
    Rates as Rates,
    rates_before as rates_before,
    read_rates as read_rates,
    write_rates as write_rates,
)
from fullshard.planner.rehearsal import (
    STEPS as STEPS,
    Course as Course,
    Rehearsed as Rehearsed,
    Span as Span,
    host_of_gpu as host_of_gpu,
    rehearse as rehearse,
)
from fullshard.planner.timing import (
    Hardware as Hardware,
    Timing as Timing,
    hardware as hardware,
    names as names,
    time_step as time_step,
)
