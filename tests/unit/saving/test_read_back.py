"""A model is called saved only if ``from_pretrained`` gives it back: no tensor missing or left over, the same ties."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

from fullshard import fully_shard, save
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.program.models import train_tokenizer
from fullshard.state.saving.read_back import read_back
from support.model_types import small_model, types
from support.models import bart, gpt2, t5, t5_untied

pytestmark = pytest.mark.filterwarnings("ignore")


def t5gemma():
    """Its head is tied to the decoder's table, not to the encoder's."""
    part = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    part |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=part, decoder=part, vocab_size=64))


def saved(model, directory, ranks=1):
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    run_ranks(ranks, lambda comm: save(fully_shard(copies[comm.rank], comm, wrap=None), directory))


def ties(model):
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return sorted(map(sorted, found.values()))


def assert_loads(model, directory):
    """By transformers' own report and values."""
    loaded, info = type(model).from_pretrained(directory, output_loading_info=True)
    assert not any(info.values())
    assert ties(loaded) == ties(model)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_head_that_is_tied_to_the_decoders_table_is_saved_so(tmp_path):
    model = t5gemma()
    saved(model, tmp_path / "model", ranks=2)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is True
    assert_loads(model, tmp_path / "model")


def own_head(model):
    model.get_output_embeddings().weight = nn.Parameter(model.get_input_embeddings().weight.detach() + 1)
    return model


def tied_against_the_config():
    model = gpt2()
    model.config.tie_word_embeddings = False
    return model


def with_a_new_layer():
    model = gpt2()
    model.score = nn.Linear(4, 2)
    return model


def grown_without_the_config():
    model = bart()
    model.config.decoder_ffn_dim += 1
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (tied_against_the_config, r"1 tensor \(lm_head.weight\) missing"),
        (with_a_new_layer, r"2 tensors \(score.bias, score.weight\) in the files, and not the model's"),
        (grown_without_the_config, "of another shape"),
    ],
)
def test_what_would_be_read_otherwise_is_an_error_on_every_rank_and_replaces_nothing(make, text, tmp_path):
    saved(gpt2(), tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    models, errors = [make()], [None, None]
    models.append(copy.deepcopy(models[0]))

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        with pytest.raises(CheckpointError, match=text) as caught:
            save(model, tmp_path / "model")
        errors[comm.rank] = str(caught.value)

    run_ranks(2, work)
    assert errors[0] == errors[1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("make", [t5, t5_untied, bart, gpt2, t5gemma, lambda: own_head(gpt2())])
def test_files_are_read_back_without_a_model_too_and_each_tensor_counts(make, tmp_path):
    model = make()
    saved(model, tmp_path / "model")
    read_back(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".0." in name][:3]:
        save_file({key: value for key, value in tensors.items() if key != name}, path)
        with pytest.raises(CheckpointError, match=f"{name}.* missing"):
            read_back(tmp_path / "model")


ADAPTERS = {
    "lora": {"kind": peft.LoraConfig, "r": 2},
    "dora": {"kind": peft.LoraConfig, "r": 2, "use_dora": True},
    "rows": {"kind": peft.LoraConfig, "r": 2, "trainable_token_indices": [3, 4]},
    "trained copy": {"kind": peft.LoraConfig, "r": 2, "modules_to_save": ["ln_f"]},
    "ia3": {"kind": peft.IA3Config},
    "prompt": {"kind": peft.PromptTuningConfig, "num_virtual_tokens": 3},
    "prefix": {"kind": peft.PrefixTuningConfig, "num_virtual_tokens": 3},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_read_back_as_peft_does_and_each_tensor_counts(name, tmp_path):
    options = dict(ADAPTERS[name])
    model = peft.get_peft_model(gpt2(), options.pop("kind")(task_type="CAUSAL_LM", **options))
    saved(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    path = tmp_path / "ours" / "adapter_model.safetensors"
    tensors, reference = load_file(path), load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert {key: value.shape for key, value in tensors.items()} == {key: one.shape for key, one in reference.items()}
    first, values = (
        next(iter(tensors)),
        model.get_base_model().config.to_dict() | {"architectures": ["GPT2LMHeadModel"]},
    )
    read_back(tmp_path / "ours", base_values=values)
    save_file({key: value for key, value in tensors.items() if key != first} | {"other": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"missing.*1 tensor \(other\) in the files"):
        read_back(
            tmp_path / "ours",
            base_values=model.get_base_model().config.to_dict() | {"architectures": ["GPT2LMHeadModel"]},
        )


@pytest.mark.slow
def test_no_registered_type_is_refused_that_transformers_reads_back(tmp_path):
    tokenizer, count = train_tokenizer(["where is my card", "i lost it again"] * 2, 60), 0
    for name, kind in types():
        model = small_model(name, kind, tokenizer)
        if model is not None:
            model.save_pretrained(tmp_path / name)
            read_back(tmp_path / name)
            count += 1
    assert count > 100
