"""Every option of peft's configurations: trained as by peft unsharded, saved and loaded by peft, or refused by name."""

import dataclasses
import json

import peft
import pytest
import torch
from safetensors.torch import load_file

from fullshard import save
from fullshard.errors import ModelError, UserError
from fullshard.program.models import train_tokenizer
from fullshard.program.train.setup.model import outline_model, prepare_model
from fullshard.state.saving.export import ExportOptions, choose_checkpoint, export
from support.adapter_steps import (
    GPT2,
    T5,
    assert_loads_as,
    batch_of,
    config_of,
    load_base,
    steps_alone,
    train_sharded,
    weights_of,
    write_base,
)
from support.interrupted_run import OFTEN, run

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # peft warns of nearly every option

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "dropout": 0.0}
MODELS = {
    "t5": T5,
    "bart": {**BART, "max_position_embeddings": 64},
    "gpt2": GPT2,
    "llama": LLAMA,
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
}
FIVE = ("t5", "bart", "gpt2", "llama", "gemma2")
ENCODER_DECODERS = ("t5", "bart")

# two targets, a feed-forward layer, the table, a norm, and one module's full name
PARTS = {
    "t5": ("q v wo shared final_layer_norm encoder.block.0.layer.0.SelfAttention.q", "block"),
    "bart": ("q_proj v_proj fc2 shared layernorm_embedding encoder.layers.0.self_attn.q_proj", "layers"),
    "gpt2": ("c_attn mlp.c_proj mlp.c_proj wte ln_f h.0.attn.c_attn", "h"),
    "llama": ("q_proj v_proj down_proj embed_tokens norm layers.0.self_attn.q_proj", "layers"),
}
KEYS = ("Q", "V", "FF", "TABLE", "NORM", "FIRST")

SHARED = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path")
PROMPT_SHAPE = ("num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers")

# By type and option: settings of the adapter under which the option is tried; capitals stand for PARTS.
TRIED = {
    "lora": {
        "revision": [{"revision": "main"}],
        "target_modules": [{"target_modules": one} for one in (["Q", "FF"], "all-linear", ["V", "TABLE"])],
        "exclude_modules": [{"exclude_modules": ["FIRST"], "target_modules": ["Q", "V"]}],
        "r": [{"r": 3}],
        "lora_alpha": [{"lora_alpha": 5}],
        "lora_dropout": [],  # drawn anew on each rank
        "bias": [{"bias": "all"}],
        "use_rslora": [{"use_rslora": True}],
        "modules_to_save": [{"modules_to_save": [one]} for one in ("NORM", "TABLE", "lm_head")],
        "init_lora_weights": [
            {"init_lora_weights": one} for one in (False, "gaussian", "olora", "pissa", "orthogonal", "mica")
        ],
        "layers_to_transform": [{"layers_to_transform": [1], "layers_pattern": "LIST", "target_modules": ["Q", "V"]}],
        "layers_pattern": [],  # above
        "rank_pattern": [{"rank_pattern": {"Q": 3}, "target_modules": ["Q", "V"]}],
        "alpha_pattern": [{"alpha_pattern": {"Q": 5}, "target_modules": ["Q", "V"]}],
        "trainable_token_indices": [
            {"trainable_token_indices": [5, 6]},
            {"trainable_token_indices": {"TABLE": [5, 6], "lm_head": [5, 6]}},
            {"trainable_token_indices": {"TABLE": [5, 6], "lm_head": [7]}},
            {"trainable_token_indices": [5, 6], "ensure_weight_tying": True},
        ],
        "use_dora": [{"use_dora": True}],
        "alora_invocation_tokens": [{"alora_invocation_tokens": [1]}],
        "use_qalora": [{"use_qalora": True, "qalora_group_size": 4}],
        "qalora_group_size": [],
        "lora_bias": [{"lora_bias": True}],
        "ensure_weight_tying": [
            {"ensure_weight_tying": True, "modules_to_save": [one]} for one in ("TABLE", "lm_head")
        ],
    },
    "dora": {"target_modules": [{"target_modules": ["Q", "TABLE"]}, {"target_modules": "all-linear"}]},
    "ia3": {
        "revision": [{}],
        "target_modules": [{"target_modules": ["Q", "FF"], "feedforward_modules": ["FF"]}],
        "exclude_modules": [{"exclude_modules": ["FIRST"], "target_modules": ["Q"], "feedforward_modules": []}],
        "feedforward_modules": [],
        "modules_to_save": [{"modules_to_save": [one]} for one in ("NORM", "TABLE", "lm_head")],
        "init_ia3_weights": [{"init_ia3_weights": False}],
    },
    "prompt": {
        "revision": [{}],
        "num_transformer_submodules": [{"num_transformer_submodules": 1}],
        "modules_to_save": [{"modules_to_save": [one]} for one in ("NORM", "lm_head")],
        "prompt_tuning_init": [{"prompt_tuning_init": "SAMPLE_VOCAB"}],
        "prompt_tuning_init_text": [
            {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "my card", "tokenizer_name_or_path": "BASE"}
        ],
        "tokenizer_name_or_path": [],
        "tokenizer_kwargs": [],
    },
    "prefix": {
        "revision": [{}],
        "num_transformer_submodules": [],
        "modules_to_save": [{"modules_to_save": ["NORM"]}],
        "init_weights": [{"init_weights": "zero"}],
        "encoder_hidden_size": [],
    },
}

# By type and option: what is refused before the first step, and what the error must name.
REFUSED = {
    "lora": {
        "inference_mode": ({"inference_mode": True}, "inference_mode"),
        "bias": ({"bias": "lora_only"}, "bias must be none or all"),
        "init_lora_weights": ({"init_lora_weights": "eva"}, "eva"),
        "eva_config": ({"init_lora_weights": "lora_ga"}, "lora_ga"),
        "corda_config": ({"init_lora_weights": "corda"}, "corda"),
        "lora_ga_config": ({"init_lora_weights": "pissa_niter_2"}, "pissa_niter_2 draws random numbers"),
        "velora_config": ({"velora_config": {}}, "buffers"),
        "monteclora_config": ({"monteclora_config": {}}, "buffers"),
        "ensure_weight_tying": ({"ensure_weight_tying": True, "target_modules": ["q_proj", "embed_tokens"]}, "lm_head"),
        "target_parameters": ({"target_parameters": ["q_proj.weight"]}, "not a valid target"),
        "use_bdlora": ({"use_bdlora": {}}, "block-diagonal"),
        "arrow_config": ({"arrow_config": {}}, "peft cannot add lora"),
        "runtime_config": ({"runtime_config": {}}, "peft cannot add lora"),
    },
    "ia3": {"inference_mode": ({"inference_mode": True}, "inference_mode")},
    "prompt": {"inference_mode": ({"inference_mode": True}, "inference_mode")},
    "prefix": {
        "inference_mode": ({"inference_mode": True}, "inference_mode"),
        "prefix_projection": ({"prefix_projection": True}, "prefix_projection"),
    },
}

# Of single kinds of layers, models or packages that are not there.
ELSEWHERE = {
    "lora": ("fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "layer_replication", "kasa_config"),
    "ia3": ("fan_in_fan_out",),
    "prompt": PROMPT_SHAPE,
    "prefix": PROMPT_SHAPE,
}
CLASSES = {"lora": "LoraConfig", "ia3": "IA3Config", "prompt": "PromptTuningConfig", "prefix": "PrefixTuningConfig"}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["where is my card", "i lost it again", "what is the rate"] * 2, 60)


@pytest.fixture(scope="module")
def bases(tokenizer, tmp_path_factory):
    """Directories of the models."""
    found = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, config in MODELS.items():
        write_base(found[name], config, tokenizer)
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_every_option_of_peft_is_tried_or_refused(kind):
    fields = {field.name for field in dataclasses.fields(getattr(peft, CLASSES[kind]))}
    assert fields == {*SHARED, *TRIED[kind], *REFUSED[kind], *ELSEWHERE[kind]}


def adapter_of(name, settings, base):
    """The settings for one model; options of the adapter's own type are not under ``options``."""
    parts, blocks = PARTS[name if name in PARTS else "llama"]
    text = json.dumps(settings).replace('"LIST"', f'"{blocks}"').replace('"BASE"', f'"{base}"')
    for key, part in zip(KEYS, parts.split(), strict=True):
        text = text.replace(f'"{key}"', f'"{part}"')
    settings = json.loads(text)
    own = {key: settings.pop(key) for key in ("r", "lora_alpha", "target_modules") if key in settings}
    return {**own, "options": settings}


def cases():
    for name in (*FIVE, "qwen3"):
        for kind, options in TRIED.items():
            for option, tries in options.items():
                for number, settings in enumerate(tries):
                    if name == "qwen3" and option != "ensure_weight_tying":
                        continue
                    # peft 0.21 replaces the embeddings of these by a linear layer, which token ids do not fit
                    if option == "ensure_weight_tying" and number == 1 and name in ENCODER_DECODERS:
                        continue
                    # peft 0.21 transposes the factors of a Conv1D, which then do not fit it
                    if name == "gpt2" and settings.get("init_lora_weights") == "olora":
                        continue
                    # test_new_tokens.py trains rows of tokens of the others
                    quick = name == "llama" or option == "ensure_weight_tying"
                    marks = () if quick else pytest.mark.slow
                    yield pytest.param(name, kind, settings, marks=marks, id=f"{name}-{kind}-{option}-{number}")


@pytest.mark.parametrize(("name", "kind", "settings"), list(cases()))
def test_an_option_does_what_it_does_in_peft_unsharded(bases, tokenizer, tmp_path, name, kind, settings):
    base, causal = bases[name], name not in ENCODER_DECODERS
    config = config_of(base, kind, adapter_of(name, settings, base), adam_epsilon=1e-3)
    plain = peft_alone(base, kind, config, name)
    losses = steps_alone(plain, config, causal)

    def then(model, comm):
        save(model, tmp_path / "ours", tokenizer=tokenizer)
        return weights_of(model)

    for ours, _, weights in train_sharded(config, tokenizer, causal, then):
        assert ours == pytest.approx(losses, abs=1e-5, rel=1e-5)
        assert weights.keys() == dict(plain.named_parameters()).keys()
        for key, weight in plain.named_parameters():
            torch.testing.assert_close(weights[key], weight, atol=1e-5, rtol=0, msg=key)
    plain.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("ours", "theirs"))
    # peft adds the frozen table if it is a target; loading does not need it.
    assert ours.keys() == {name for name in theirs if ".base_layer.weight" not in name}
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], atol=1e-5, rtol=0, msg=key)
    assert_loads_as(tmp_path / "ours", plain, base, batch_of([1], causal=causal), causal, atol=1e-3, rtol=1e-3)


def peft_alone(base, kind, config, name):
    """The adapter by peft itself, over the unsharded model."""
    adapter = config.model.adapter
    targets = adapter.target_modules
    values = {"target_modules": list(targets) if isinstance(targets, tuple) else targets}
    if kind in ("lora", "dora"):
        values |= {"r": adapter.r, "lora_alpha": adapter.lora_alpha}
        values |= {"use_dora": True} if kind == "dora" else {}
    if kind in ("prompt", "prefix"):
        values = {"num_virtual_tokens": adapter.num_virtual_tokens}
    if kind == "prefix" and name == "t5":
        values |= {"num_layers": 2, "num_attention_heads": 2, "token_dim": 8}
    task = "SEQ_2_SEQ_LM" if name in ENCODER_DECODERS else "CAUSAL_LM"
    options = json.loads(json.dumps(dict(adapter.options)))
    made = getattr(peft, CLASSES["lora" if kind == "dora" else kind])(task_type=task, **values, **options)
    model = load_base(base).train()
    torch.manual_seed(config.seed)
    return peft.get_peft_model(model, made).train()


@pytest.mark.parametrize(
    ("kind", "settings", "match"), [(kind, *one) for kind, options in REFUSED.items() for one in options.values()]
)
def test_what_would_be_ignored_or_could_not_be_saved_is_refused_by_name(bases, tokenizer, kind, settings, match):
    config = config_of(bases["llama"], kind, adapter_of("llama", settings, bases["llama"]))
    with pytest.raises(ModelError, match=match):
        prepare_model(config, tokenizer)
    with pytest.raises(UserError):
        outline_model(config, tokenizer)


def test_the_settings_are_as_given_after_peft_has_read_them(bases, tokenizer):
    config = config_of(bases["llama"], "lora", adapter_of("llama", TRIED["lora"]["ensure_weight_tying"][1], None))
    before = config.model_dump_json()
    prepare_model(config, tokenizer)
    assert config.model_dump_json() == before


@pytest.mark.usefixtures("unmetered")
@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {"trainable_token_indices": [5, 6]}],
    ids=["tied", "tokens"],
)
def test_a_checkpoint_is_exported_as_the_model_is_saved(bases, tmp_path, options):
    adapter = {"type": "lora", "r": 2, "options": options}
    model = {"path": str(bases["llama"]), "adapter": adapter}
    run(tmp_path, ranks=2, **OFTEN, model=model, sharding__wrap="auto")
    checkpoint = choose_checkpoint(tmp_path / "out")
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))
    saved, exported = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("out", "adapter"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in saved.items())
    assert not (tmp_path / "adapter" / "adapter_tied.json").exists()
    export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge"))
    plain = peft.PeftModel.from_pretrained(load_base(bases["llama"]), tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        ours, theirs = load_base(tmp_path / "merged").eval()(ids).logits, plain(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
