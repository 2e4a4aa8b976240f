"""Data: a file's rows, their token ids, and the batches that each rank sees."""

from fullshard.data.collate import IGNORED_LABEL as IGNORED_LABEL
from fullshard.data.collate import Batch as Batch
from fullshard.data.collate import CollateSpec as CollateSpec
from fullshard.data.collate import RowRef as RowRef
from fullshard.data.collate import collate as collate
from fullshard.data.sources import Example as Example
from fullshard.data.sources import read_rows as read_rows
from fullshard.data.stream import EpochPlan as EpochPlan
from fullshard.data.stream import batches as batches
from fullshard.data.tokenize import LengthStats as LengthStats
from fullshard.data.tokenize import TokenizedSet as TokenizedSet
from fullshard.data.tokenize import TokenizeSpec as TokenizeSpec
from fullshard.data.tokenize import tokenize as tokenize
