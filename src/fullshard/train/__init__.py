"""Training: assemble a run, take its steps, evaluate, save; sinks receive reports of it."""

from fullshard.train.reporting.reports import CheckpointReport as CheckpointReport
from fullshard.train.reporting.reports import EvaluationReport as EvaluationReport
from fullshard.train.reporting.reports import RunSummary as RunSummary
from fullshard.train.reporting.reports import StepReport as StepReport
from fullshard.train.reporting.sinks import ConsoleSink as ConsoleSink
from fullshard.train.reporting.sinks import FileSink as FileSink
from fullshard.train.reporting.sinks import Sink as Sink
from fullshard.train.run.loop import train as train
from fullshard.train.run.stop import StopRequest as StopRequest
