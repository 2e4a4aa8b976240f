"""Training: assemble, step, loop, evaluate, save; sinks are told what happens."""

from fullshard.train.loop import train as train
from fullshard.train.reports import CheckpointReport as CheckpointReport
from fullshard.train.reports import EvaluationReport as EvaluationReport
from fullshard.train.reports import RunSummary as RunSummary
from fullshard.train.reports import StepReport as StepReport
from fullshard.train.sinks import ConsoleSink as ConsoleSink
from fullshard.train.sinks import FileSink as FileSink
from fullshard.train.sinks import Sink as Sink
from fullshard.train.stop import StopRequest as StopRequest
