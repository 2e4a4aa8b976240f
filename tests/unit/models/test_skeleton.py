"""A directory's model without memory is the loaded one but for its weights; what transformers converts is named."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from fullshard.errors import ModelError
from fullshard.program.models import build_model, build_skeleton, converted_names, load_model, train_tokenizer

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip


def save(config, tokenizer, directory, dtype=torch.float32):
    model = build_model(config, tokenizer, seed=1).to(dtype)
    model.generation_config.num_beams = 3
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("config", [T5, BART])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("generation_file", [True, False])
def test_it_is_the_loaded_model_without_memory(tokenizer, tmp_path, config, dtype, generation_file):
    save(config, tokenizer, tmp_path, dtype)
    if not generation_file:
        (tmp_path / "generation_config.json").unlink()
        values = json.loads((tmp_path / "config.json").read_text()) | {"num_beams": 4}
        (tmp_path / "config.json").write_text(json.dumps(values))
    loaded, skeleton = load_model(tmp_path, tokenizer), build_skeleton(tmp_path, tokenizer)
    assert type(skeleton) is type(loaded)
    assert skeleton.training
    assert skeleton.config.to_dict() == loaded.config.to_dict()
    assert skeleton.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert skeleton.generation_config.num_beams == (3 if generation_file else 4)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    ours, theirs = ([(name, p.shape, p.dtype) for name, p in m.named_parameters()] for m in (skeleton, loaded))
    assert ours == theirs


def test_it_needs_no_weights_but_a_config_that_fits_the_tokenizer(tokenizer, tmp_path, sentences):
    save(T5, tokenizer, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert build_skeleton(tmp_path, tokenizer).get_input_embeddings().weight.is_meta
    larger = train_tokenizer([*sentences, *(f"word{n} other{n}" for n in range(300))], 400)
    with pytest.raises(ModelError, match="smaller than the tokenizer's"):
        build_skeleton(tmp_path, larger)
    with pytest.raises(ModelError, match="has no causal model"):
        build_skeleton(tmp_path, tokenizer, model_class="causal")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"d_model": "wide"}))
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        build_skeleton(tmp_path, tokenizer)


def test_a_model_that_cannot_be_built(tokenizer, tmp_path):
    save(BART, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"encoder_attention_heads": 3}))
    with pytest.raises(ModelError, match=r"The model in .* cannot be built"):
        build_skeleton(tmp_path, tokenizer)


def test_names_that_transformers_converts():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    with torch.device("meta"):
        mixtral = MixtralForCausalLM(MixtralConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
        gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20))
    expert = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert converted_names(mixtral, [expert, "model.norm.weight"]) == [expert]
    assert converted_names(gpt2, ["h.0.ln_1.weight", "transformer.h.0.ln_1.weight"]) == []
    assert converted_names(gpt2, ["h.0.LayerNorm.gamma"]) == ["h.0.LayerNorm.gamma"]
