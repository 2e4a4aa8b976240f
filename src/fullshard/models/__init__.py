"""Models: building and loading them with their tokenizers, changes for training, adapters, and the loss."""

from fullshard.models.activation_checkpointing import enable_activation_checkpointing as enable_activation_checkpointing
from fullshard.models.adapters import Adapted as Adapted
from fullshard.models.adapters import AdapterSpec as AdapterSpec
from fullshard.models.adapters import add_adapter as add_adapter
from fullshard.models.adapters import base_of as base_of
from fullshard.models.adapters import load_adapter as load_adapter
from fullshard.models.build import ModelClass as ModelClass
from fullshard.models.build import build_model as build_model
from fullshard.models.build import build_skeleton as build_skeleton
from fullshard.models.build import converted_names as converted_names
from fullshard.models.build import is_causal as is_causal
from fullshard.models.build import load_model as load_model
from fullshard.models.build import load_tokenizer as load_tokenizer
from fullshard.models.build import train_tokenizer as train_tokenizer
from fullshard.models.compile import compile_blocks as compile_blocks
from fullshard.models.hub import resolve_model as resolve_model
from fullshard.models.loss import PLAIN as PLAIN
from fullshard.models.loss import Objective as Objective
from fullshard.models.loss import fuse_head as fuse_head
from fullshard.models.loss import fused_head_of as fused_head_of
from fullshard.models.loss import model_loss as model_loss
from fullshard.models.loss import summed_loss as summed_loss
from fullshard.models.t5 import T5_FAMILY as T5_FAMILY
from fullshard.models.t5 import require_fp16_fit as require_fp16_fit
from fullshard.models.t5 import set_attention_dropout as set_attention_dropout
