"""Files that survive a kill: atomic directories and the Hugging Face format, written one tensor at a time."""

from fullshard.checkpoint.atomic import atomic_directory as atomic_directory
from fullshard.checkpoint.atomic import publish as publish
from fullshard.checkpoint.atomic import recover as recover
from fullshard.checkpoint.atomic import write_text as write_text
from fullshard.checkpoint.hf import WEIGHTS_NAME as WEIGHTS_NAME
from fullshard.checkpoint.hf import SafetensorsWriter as SafetensorsWriter
from fullshard.checkpoint.hf import TensorSpec as TensorSpec
from fullshard.checkpoint.hf import write_full as write_full
from fullshard.checkpoint.piece import Piece as Piece
