"""Planner: runs the real model, engine and optimizer as one rank of many, without memory, and counts the bytes.

Files, in reading order: ``memory_tracker`` (live bytes), ``work`` (the operators and collectives of a step),
``fake_tensors`` (operators without memory), ``ranks`` (the other ranks), ``simulation`` (the steps of one rank),
``timing`` (a step's time), ``plan`` (the result).
"""

from fullshard.planner.fake_tensors import (
    UnplannedStepError as UnplannedStepError,
    planning as planning,
    real_tensors as real_tensors,
)
from fullshard.planner.memory_tracker import (
    MemoryTracker as MemoryTracker,
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
    simulate_on as simulate_on,
)
from fullshard.planner.simulation import (
    STEPS as STEPS,
    MemoryTimeline as MemoryTimeline,
    PlannedStep as PlannedStep,
    Span as Span,
    host_of_gpu as host_of_gpu,
    simulate as simulate,
)
from fullshard.planner.timing import (
    Hardware as Hardware,
    Timing as Timing,
    hardware as hardware,
    names as names,
    time_step as time_step,
)
