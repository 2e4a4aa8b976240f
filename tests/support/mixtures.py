"""A tiny mixture of experts of every type whose routers' loss is trained."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCAB = 40
_BIG = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "router_aux_loss_coef": 0.5}
_LM = _BIG | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_LM |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
_LOCAL = _LM | {"num_local_experts": 4, "num_experts_per_tok": 2}
_NAMED = _LM | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "moe_intermediate_size": 12}
_LINEAR = _NAMED | {"shared_expert_intermediate_size": 12, "layer_types": ["linear_attention", "full_attention"]}
_LINEAR |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SWITCH = _BIG | {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_experts": 4, "expert_capacity": 64}
_SWITCH |= {"num_layers": 4, "num_sparse_encoder_layers": 2, "num_decoder_layers": 4, "num_sparse_decoder_layers": 2}
_SWITCH |= {"router_z_loss_coef": 0.25, "router_jitter_noise": 0.0, "dropout_rate": 0.0, "decoder_start_token_id": 0}

CONFIGS = {
    "doge": _LM | {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": _LM | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12},
    "flex_olmo": _LM | {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _LOCAL | {"head_dim": 8},
    "granitemoe": _LOCAL,
    "granitemoehybrid": _LOCAL
    | {"layer_types": ["attention"] * 2, "shared_intermediate_size": 12, "mamba_n_heads": 2, "mamba_d_head": 16},
    "granitemoeshared": _LOCAL,
    "jamba": _LM | {"num_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {name: value for name, value in _LOCAL.items() if name != "router_aux_loss_coef"}
    | {"aux_loss_coef": 0.5, "kv_channels": 8, "num_key_value_heads": 1},
    "laguna": _NAMED,
    "mellum": _NAMED,
    "minimax": _LOCAL,
    "minimax_m2": _LOCAL | {"head_dim": 8},
    "mixtral": _LOCAL,
    "olmoe": _LM | {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _LOCAL,
    "qwen2_moe": _NAMED | {"shared_expert_intermediate_size": 12},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_moe": _NAMED,
    "qwen3_next": _LINEAR,
    "switch_transformers": _SWITCH,
}


def mixture(kind, **changes):
    """A model of the type in training mode, without dropout; the same each time."""
    config = AutoConfig.for_model(kind, **(CONFIGS[kind] | changes))
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = maker.from_config(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()
