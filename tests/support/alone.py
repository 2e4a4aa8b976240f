"""Runs of one rank, in this process."""

from fullshard.core.testing import run_ranks
from fullshard.program.train import FileSink, train
from fullshard.program.train.reporting.card import CardSink


def alone():
    """The communicator of a single rank."""
    return run_ranks(1, lambda comm: comm)[0]


def finish(config, *sinks, say=print, stop=None):
    """Train to the end, with a card and the files of a run; returns the summary."""
    return train(config, alone(), [CardSink(config.output_dir, say), FileSink(config.output_dir), *sinks], stop)
