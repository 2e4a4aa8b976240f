"""Training: assembles a run, takes its steps, evaluates, saves, and reports to sinks."""

from fullshard.program.train.reporting.reports import (
    CheckpointReport as CheckpointReport,
    EvaluationReport as EvaluationReport,
    RunSummary as RunSummary,
    StepReport as StepReport,
)
from fullshard.program.train.reporting.sinks import ConsoleSink as ConsoleSink, FileSink as FileSink, Sink as Sink
from fullshard.program.train.run.loop import StopRequest as StopRequest, train as train
