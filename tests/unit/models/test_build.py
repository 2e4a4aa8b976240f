"""Tokenizers with T5's ids, models that are the same on every rank, and errors where weights would be random;
a model without memory is the loaded one but for its weights."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from fullshard.errors import ModelError
from fullshard.program.models import (
    build_model,
    build_skeleton,
    converted_names,
    is_causal,
    load_model,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def saved_t5(tmp_path, tokenizer):
    build_model(T5, tokenizer, seed=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_tokenizer_has_t5s_ids_and_ends_texts_with_eos(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer("My card").input_ids[-1] == 1
    assert tokenizer.unk_token_id in tokenizer("日").input_ids
    assert len(tokenizer) <= 100


@pytest.mark.parametrize("index", range(6))
def test_tokenizer_round_trip(tokenizer, sentences, index):
    text = sentences[index]
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_pieces_end_at_words_punctuation_and_underscores(tokenizer):
    assert tokenizer.tokenize("my card?") == ["▁my", "▁card", "?"]
    assert tokenizer.tokenize("card_arrival") == ["▁card", "_arrival"]


def test_tokenizer_loads_through_auto_tokenizer(tokenizer, sentences, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded(sentences[0]).input_ids == tokenizer(sentences[0]).input_ids
        assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
        assert loaded.decode(loaded(sentences[5]).input_ids, skip_special_tokens=True) == sentences[5]


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "a/b", ".."])
def test_a_chat_template_whose_name_leads_out_is_refused_before_it_is_saved(name, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    templates = [{"name": one, "template": "x"} for one in ("default", name)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    with pytest.raises(ModelError, match=r"chat template named .* not the name of a file"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_tokenizer_training_is_the_same_in_another_process(tokenizer, sentences):
    code = (
        "import json, sys; from fullshard.program.models import train_tokenizer;"
        "print(train_tokenizer(json.load(sys.stdin), 100).backend_tokenizer.to_str())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(sentences), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == tokenizer.backend_tokenizer.to_str()


def test_vocabulary_too_small_for_the_alphabet(sentences):
    with pytest.raises(ModelError, match=r"A vocabulary of 10 is too small: .* alone are \d+\. Use a larger"):
        train_tokenizer(sentences, 10)


@pytest.mark.parametrize("config", [T5, BART])
def test_encoder_decoder_fits_the_tokenizer_trains_and_generates(tokenizer, config):
    model = build_model(config, tokenizer, seed=1)
    assert not is_causal(model)
    assert model.training
    assert model.config.vocab_size == len(tokenizer)
    ids = torch.tensor([tokenizer("My card").input_ids])
    labels = torch.tensor([tokenizer("card_arrival").input_ids])
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    assert torch.isfinite(loss)
    generated = model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert generated[0, 0] == tokenizer.pad_token_id
    if generated.shape[1] == 4:  # it ran to the limit: no end is forced at another model's id
        assert generated[0, -1] == model(input_ids=ids, decoder_input_ids=generated[:, :3]).logits[0, -1].argmax()


def test_causal_model_generates_alike_from_left_padding(tokenizer):
    model = build_model(GPT2, tokenizer, seed=1).eval()
    assert is_causal(model)
    ids = tokenizer("My card").input_ids
    alone = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    padded = model.generate(
        input_ids=torch.tensor([[0, 0, *ids]]),
        attention_mask=torch.tensor([[0, 0] + [1] * len(ids)]),
        max_new_tokens=4,
        do_sample=False,
    )
    assert padded[0, 2:].tolist() == alone[0].tolist()


def test_same_seed_same_weights_and_global_state_untouched(tokenizer):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = build_model(T5, tokenizer, seed=1).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    same = build_model(T5, tokenizer, seed=1).state_dict()
    other = build_model(T5, tokenizer, seed=2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["shared.weight"], other["shared.weight"])


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"d_model": 16}, "The model's config needs a model_type, such as t5, bart or gpt2"),
        ({"model_type": "t55"}, r"Unknown model_type 't55'\. Did you mean 't5'\?"),
        ({**T5, "d_modle": 3}, r"A t5 config has no option 'd_modle'\. Did you mean 'd_model'\?"),
        ({**T5, "d_model": "wide"}, "The t5 config is invalid: (?s:.)*d_model"),
        ({**T5, "vocab_size": 20}, r"vocab_size of 20 is smaller than the tokenizer's \d+"),
        ({**BART, "encoder_attention_heads": 3}, "No bart model can be built from this config"),
        ({"model_type": "vit"}, r"Model type vit has no causal model\. It cannot be trained to generate text"),
    ],
)
def test_configs_that_are_refused(tokenizer, config, rule):
    with pytest.raises(ModelError, match=rule):
        build_model(config, tokenizer, seed=1)


@pytest.mark.parametrize(("config", "asked", "fitting"), [(T5, "causal", "seq2seq"), (GPT2, "seq2seq", "causal")])
def test_class_that_the_type_does_not_have(tokenizer, config, asked, fitting):
    rule = rf"Model type {config['model_type']} has no {asked} model\. Use class {fitting}\."
    with pytest.raises(ModelError, match=rule):
        build_model(config, tokenizer, model_class=asked, seed=1)


def test_options_under_their_common_names_and_larger_vocabularies_are_taken(tokenizer):
    common = {"model_type": "t5", "hidden_size": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = build_model({**common, "vocab_size": 128, "tie_word_embeddings": True}, tokenizer, seed=1)
    assert model.get_input_embeddings().weight.shape == (128, 16)


def test_load_gives_the_saved_weights_in_fp32(saved_t5, tokenizer):
    saved = build_model(T5, tokenizer, seed=1)
    saved.to(torch.bfloat16).save_pretrained(saved_t5)
    model = load_model(saved_t5, load_tokenizer(saved_t5))
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.shared.weight, saved.shared.weight.float())


def test_load_equals_hugging_faces_own(saved_t5, tokenizer):
    ours = load_model(saved_t5, tokenizer).state_dict()
    theirs = AutoModelForSeq2SeqLM.from_pretrained(saved_t5).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_missing_weight_is_an_error_and_not_a_random_one(saved_t5, tokenizer):
    file = saved_t5 / "model.safetensors"
    weights = load_file(file)
    del weights["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    rule = r"1 weights in .* are missing: encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight\. Save the model"
    with pytest.raises(ModelError, match=rule):
        load_model(saved_t5, tokenizer)


def test_weight_of_another_shape(saved_t5, tokenizer):
    config = json.loads((saved_t5 / "config.json").read_text())
    (saved_t5 / "config.json").write_text(json.dumps({**config, "d_ff": 48}))
    rule = (
        r"4 weights in .* have another shape than in the config: .*DenseReluDense\.wi\.weight \(32, 16\) for \(48, 16\)"
    )
    with pytest.raises(ModelError, match=rule):
        load_model(saved_t5, tokenizer)


def test_weights_that_are_missing_or_damaged(saved_t5, tokenizer):
    (saved_t5 / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match=r"The weights in .* cannot be loaded"):
        load_model(saved_t5, tokenizer)
    (saved_t5 / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"The weights in .* cannot be loaded: .*no file named model\.safetensors"):
        load_model(saved_t5, tokenizer)


def test_directories_that_hold_no_model(tmp_path, tokenizer):
    with pytest.raises(ModelError, match=r"t5-small is not a directory\. A model is read from a local"):
        load_model("t5-small", tokenizer)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path, tokenizer)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_model(tmp_path, tokenizer)


def test_directories_that_hold_no_tokenizer(tmp_path, tokenizer):
    with pytest.raises(ModelError, match="t5-small is not a directory"):
        load_tokenizer("t5-small")
    build_model(T5, tokenizer, seed=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer \(none of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"The tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)


def test_sentencepiece_file_that_cannot_be_read_names_the_packages_it_needs(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json\. A SentencePiece file is read with: pip install"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_pad_pads_with_eos_and_without_eos_is_refused(tmp_path, tokenizer):
    bare = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    bare.save_pretrained(tmp_path / "no_pad")
    assert load_tokenizer(tmp_path / "no_pad").pad_token_id == 1
    tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path / "no_eos")
    with pytest.raises(ModelError, match="has no end-of-sequence token"):
        load_tokenizer(tmp_path / "no_eos")


def test_attention_is_computed_as_asked_where_the_model_offers_it(tmp_path):
    tokenizer = train_tokenizer(["some words to learn from"], 60)
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    built = build_model(config, tokenizer, attention="eager", seed=0)
    assert built.config._attn_implementation == "eager"
    built.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for load in (load_model, build_skeleton):
        assert load(tmp_path, tokenizer, attention="sdpa").config._attn_implementation == "sdpa"
        assert load(tmp_path, tokenizer, attention="eager").config._attn_implementation == "eager"
    small = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ModelError, match=r"does not support attn_implementation 'flash_attention_2'\. It"):
        build_model(small, tokenizer, attention="flash_attention_2", seed=0)


def test_flash_attention_is_refused_where_transformers_computes_something_else_by_it():
    tokenizer = train_tokenizer(["some words to learn from"], 60)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    with pytest.raises(ModelError, match=r"padding of sources for that of targets .* bart has an encoder"):
        build_model({"model_type": "bart", **sizes}, tokenizer, attention="flash_attention_2", seed=0)
    layers = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    window = {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 4, **layers}
    with pytest.raises(ModelError, match="qwen2_moe does not tell it the window of 4 tokens"):
        build_model(window, tokenizer, attention="flash_attention_2", seed=0)


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


def test_a_saved_tokenizer_is_read_by_other_programs_and_by_transformers_alike(tmp_path):
    tokenizer = train_tokenizer(["where is my card"] * 3, 60, sentinels=2)
    tokenizer.vocab_file = str(tmp_path / "spiece.model")
    (tmp_path / "spiece.model").write_bytes(b"pieces")
    tokenizer.add_tokens(["<ticket>"])
    saved = tmp_path / "saved"
    saved.mkdir()
    save_tokenizer(tokenizer, saved)
    assert (saved / "spiece.model").read_bytes() == b"pieces"
    assert json.loads((saved / "added_tokens.json").read_text()) == tokenizer.get_added_vocab()
    values = json.loads((saved / "tokenizer_config.json").read_text())
    assert values["additional_special_tokens"] == ["<extra_id_0>", "<extra_id_1>"]  # transformers 4 asks for a mapping
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = AutoTokenizer.from_pretrained(saved)
    assert type(loaded) is type(tokenizer)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.all_special_tokens == tokenizer.all_special_tokens
    text = "my <ticket> <extra_id_1> card"
    assert loaded(text).input_ids == tokenizer(text).input_ids
