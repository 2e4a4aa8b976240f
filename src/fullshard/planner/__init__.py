"""Runs the real model, engine and optimizer as one rank of many, without memory, and counts what they hold and send."""

from fullshard.planner.course import Course as Course, Span as Span
from fullshard.planner.hardware import Hardware as Hardware, hardware as hardware, names as names
from fullshard.planner.hollow import real_tensors as real_tensors
from fullshard.planner.plan import (
    LABELS as LABELS,
    PHASE_LABELS as PHASE_LABELS,
    Plan as Plan,
    candidates as candidates,
    highest as highest,
    plan as plan,
    rehearse_on as rehearse_on,
)
from fullshard.planner.rehearsal import STEPS as STEPS, Rehearsed as Rehearsed, rehearse as rehearse
from fullshard.planner.timing import Timing as Timing, time_step as time_step
