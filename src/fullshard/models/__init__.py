"""Models: built or loaded with their tokenizers, and activation checkpointing."""

from fullshard.models.build import ModelClass as ModelClass
from fullshard.models.build import build_model as build_model
from fullshard.models.build import build_skeleton as build_skeleton
from fullshard.models.build import converted_names as converted_names
from fullshard.models.build import is_causal as is_causal
from fullshard.models.build import load_model as load_model
from fullshard.models.build import load_tokenizer as load_tokenizer
from fullshard.models.build import train_tokenizer as train_tokenizer
from fullshard.models.checkpointing import enable_activation_checkpointing as enable_activation_checkpointing
