"""Models: building and loading them with their tokenizers, changing them for training, adapters, and the loss."""

from fullshard.program.models.activation_checkpointing import (
    blocks_of as blocks_of,
    enable_activation_checkpointing as enable_activation_checkpointing,
)
from fullshard.program.models.adapted import AdaptedWeights as AdaptedWeights
from fullshard.program.models.adapters import (
    COPY as COPY,
    Adapted as Adapted,
    AdapterSpec as AdapterSpec,
    add_adapter as add_adapter,
    base_of as base_of,
    import_peft as import_peft,
    load_adapter as load_adapter,
    magnitude_layers as magnitude_layers,
)
from fullshard.program.models.build import (
    ModelClass as ModelClass,
    build_model as build_model,
    build_skeleton as build_skeleton,
    converted_names as converted_names,
    is_causal as is_causal,
    load_model as load_model,
    load_tokenizer as load_tokenizer,
    train_tokenizer as train_tokenizer,
)
from fullshard.program.models.compile import compile_blocks as compile_blocks, uncompiled as uncompiled
from fullshard.program.models.decoder_inputs import decoder_inputs as decoder_inputs
from fullshard.program.models.hub import (
    card_metadata as card_metadata,
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
    summed_loss as summed_loss,
)
from fullshard.program.models.own_loss import (
    RouterLoss as RouterLoss,
    require_left_to_right as require_left_to_right,
    require_plain_loss as require_plain_loss,
    router_loss as router_loss,
)
from fullshard.program.models.t5 import (
    T5_FAMILY as T5_FAMILY,
    require_fp16_fit as require_fp16_fit,
    set_attention_dropout as set_attention_dropout,
)
