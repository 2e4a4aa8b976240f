"""Rows of a batch that several ranks share: each holds a part of the tokens, and in attention a part of the heads."""

from fullshard.core.sequence.model import sequence_parallel as sequence_parallel
