"""Models: building and loading them with their tokenizers, changing them for training, adapters, and the loss."""

from fullshard.program.models.adapters import (
    COPY as COPY,
    SPLIT_BASE as SPLIT_BASE,
    Adapted as Adapted,
    AdapterSpec as AdapterSpec,
    AdapterWeights as AdapterWeights,
    add_adapter as add_adapter,
    base_of as base_of,
    init_of as init_of,
    load_adapter as load_adapter,
    magnitude_layers as magnitude_layers,
    saved_adapter as saved_adapter,
    trains_rows as trains_rows,
    without_adapter as without_adapter,
)
from fullshard.program.models.blocks import (
    announce_shapes as announce_shapes,
    blocks_of as blocks_of,
    compile_blocks as compile_blocks,
    enable_activation_checkpointing as enable_activation_checkpointing,
    uncompiled as uncompiled,
)
from fullshard.program.models.build import (
    ModelClass as ModelClass,
    add_rows as add_rows,
    build_model as build_model,
    build_skeleton as build_skeleton,
    converted_names as converted_names,
    is_causal as is_causal,
    lacks_rows as lacks_rows,
    load_model as load_model,
    load_tokenizer as load_tokenizer,
    train_tokenizer as train_tokenizer,
)
from fullshard.program.models.hub import (
    card_metadata as card_metadata,
    resolve_adapter as resolve_adapter,
    resolve_model as resolve_model,
    stated_license as stated_license,
)
from fullshard.program.models.loss import (
    PLAIN as PLAIN,
    Objective as Objective,
    can_fuse as can_fuse,
    fuse_head as fuse_head,
    fused_head_of as fused_head_of,
    model_loss as model_loss,
    row_loss as row_loss,
    row_sums as row_sums,
    summed_loss as summed_loss,
)
from fullshard.program.models.model_types import (
    T5_FAMILY as T5_FAMILY,
    RouterLoss as RouterLoss,
    rates_of_dropout as rates_of_dropout,
    require_fp16_fit as require_fp16_fit,
    require_left_to_right as require_left_to_right,
    require_plain_loss as require_plain_loss,
    router_loss as router_loss,
    set_attention_dropout as set_attention_dropout,
)
from fullshard.program.models.new_tokens import (
    GrownWeights as GrownWeights,
    add_tokens as add_tokens,
    tokenizer_of as tokenizer_of,
)
from fullshard.program.models.noise import add_embedding_noise as add_embedding_noise
from fullshard.program.models.packing import decoder_inputs as decoder_inputs
from fullshard.program.models.preferences import Preference as Preference, reward_means as reward_means
from fullshard.program.models.saved_tokenizer import save_tokenizer as save_tokenizer
