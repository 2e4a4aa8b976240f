"""The smallest model of each type that transformers registers for text from text."""

import inspect

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from fullshard.program.models import build_model

# Options of configurations by their usual names; a configuration has some of them.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_attention_heads", "n_head", "n_heads"), 2),
    **dict.fromkeys(("num_heads", "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_encoder_position_embeddings"), 64),
    **dict.fromkeys(("max_decoder_position_embeddings",), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "expert_num"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "state_size"), 4),
    **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "decoder_start_token_id": 0,
}

MOST_PARAMETERS = 1_000_000
"""Elements of a model that is small enough; others have sizes under other names."""


def types():
    """Each registered type with its class: ``seq2seq`` or ``causal``."""
    two = [one.model_type for one in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    return [(name, "seq2seq") for name in two] + [
        (one.model_type, "causal") for one in MODEL_FOR_CAUSAL_LM_MAPPING if one.model_type not in two
    ]


def small_config(name):
    """The options of the run file's ``model.config`` for a small model of a type."""
    kind = CONFIG_MAPPING[name]
    known = {*inspect.signature(kind).parameters, *kind.attribute_map}
    return {"model_type": name, **{key: value for key, value in SMALL.items() if key in known}}


def small_model(name, kind, tokenizer):
    """A small model in evaluation mode, or None if there is none of this type by these options."""
    try:
        with torch.device("meta"):
            outline = build_model(small_config(name), tokenizer, seed=3, model_class=kind)
        if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
            return None
        return build_model(small_config(name), tokenizer, seed=3, model_class=kind).eval()
    except Exception:  # a type that needs other options, other packages, images or sound
        return None
