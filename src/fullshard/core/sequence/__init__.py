"""Rows of a batch that several ranks share: each holds a part of the tokens, and in attention a part of the heads."""

from fullshard.core.sequence.attention import attention_for as attention_for
from fullshard.core.sequence.model import (
    own_places as own_places,
    own_tokens as own_tokens,
    rows_split as rows_split,
    sequence_parallel as sequence_parallel,
    sharers_of as sharers_of,
)
