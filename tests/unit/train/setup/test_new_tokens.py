"""``model.new_tokens``: the steps of transformers' resized model, and tokenizer and table in what a run saves."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fullshard import save
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.models import add_tokens, load_model
from fullshard.program.train import FileSink, train
from fullshard.program.train.setup.model import outline_model, prepare_model
from fullshard.program.train.setup.prepare import prepare_tokenizer
from support import adapter_steps
from support.adapter_steps import T5, batch_of, config_of, load_base, steps_alone, train_sharded, weights_of, write_base
from support.one_step import tokenized
from support.tiny_run import settings, write_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]

NEW = ("<ticket>", "<reply>")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0}
GEMMA = LLAMA | {"num_hidden_layers": 1, "head_dim": 8, "initializer_range": 0.06, "tie_word_embeddings": True}
BASES = {
    "t5": T5,
    "t5, its own output layer": T5 | {"tie_word_embeddings": False},
    "bart": BART,
    "llama": LLAMA | {"tie_word_embeddings": True},
    "llama, its own output layer": LLAMA | {"tie_word_embeddings": False},
    # Their embedding computes a buffer of its own, which is on the meta device when the table has been read.
    "gemma": GEMMA | {"model_type": "gemma"},
    "gemma2": GEMMA | {"model_type": "gemma2"},
    "gemma3": GEMMA | {"model_type": "gemma3_text"},
}
CAUSAL = ("llama", "gemma")


def config_with(base, adapter=None, **more):
    values = config_of(base, "lora", adam_epsilon=1e-3, **more).model_dump(by_alias=True)
    model = {**values["model"], "path": str(base), "new_tokens": NEW, "adapter": adapter}
    return RunConfig.model_validate({**values, "model": model})


def rows_with(first):
    """Rows with two new tokens, of which ``first`` is the first id."""
    return tokenized(
        [[5, first, 1], [7, 8, first + 1, 10, 1], [first, 1], [12, 13, 14, 1]],
        [[first + 1, 1], [21, 22, first, 24, 1], [15, 16, 1], [17, 1]],
    )


@pytest.mark.parametrize("name", BASES)
def test_two_ranks_train_the_resized_model_of_transformers(tokenizer, tmp_path, monkeypatch, name):
    write_base(tmp_path, BASES[name], tokenizer)
    causal, first = name.startswith(CAUSAL), len(tokenizer)
    monkeypatch.setattr(adapter_steps, "ROWS", rows_with(first))
    config = config_with(tmp_path)
    plain = load_base(tmp_path).train()
    torch.manual_seed(config.seed)
    plain.resize_token_embeddings(first + 2)
    begun = plain.get_input_embeddings().weight.detach().clone()
    torch.testing.assert_close(begun[first], begun[:first].mean(0), atol=1e-3, rtol=0)  # transformers' mean
    losses = steps_alone(plain, config, causal)
    added = add_tokens(copy.deepcopy(tokenizer), NEW)
    for ours, notes, weights in train_sharded(config, added, causal, lambda one, _: weights_of(one)):
        assert ours == pytest.approx(losses, abs=1e-5)
        for key, param in plain.named_parameters():
            torch.testing.assert_close(weights[key], param, atol=1e-5, rtol=0, msg=key)
        assert any("were read in full on every rank, to take rows of new tokens" in note for note in notes)
    assert not torch.equal(plain.get_input_embeddings().weight[first], begun[first])  # they were trained
    outline = outline_model(config, added)
    assert {key: param.shape for key, param in outline.named_parameters()} == {
        key: param.shape for key, param in plain.named_parameters()
    }


TARGETS = {
    "t5": ["shared"],
    "bart": ["model.shared"],
    "llama": ["model.embed_tokens"],
    "llama, its own output layer": ["model.embed_tokens", "lm_head"],
    "gemma3": ["model.embed_tokens"],
}


@pytest.mark.parametrize(
    ("name", "adapter", "sharding"),
    [
        ("t5", {"type": "lora", "r": 2}, {"tables": "home"}),
        ("bart", {"type": "dora", "r": 2}, {}),
        ("llama", {"type": "lora", "r": 2, "target_modules": "all-linear"}, {}),
        ("llama, its own output layer", {"type": "lora", "r": 2}, {"strategy": "shard_grad_op", "tables": "home"}),
        ("gemma3", {"type": "lora", "r": 2}, {}),
    ],
)
def test_beside_an_adapter_two_ranks_train_the_rows_that_peft_does(
    tokenizer, tmp_path, monkeypatch, name, adapter, sharding
):
    base, causal, first = tmp_path / "base", name.startswith(CAUSAL), len(tokenizer)
    write_base(base, BASES[name], tokenizer)
    monkeypatch.setattr(adapter_steps, "ROWS", rows_with(first))
    config = config_with(base, adapter, sharding=sharding)
    plain = load_base(base).train()
    torch.manual_seed(config.seed)
    plain.resize_token_embeddings(first + 2)
    spec = peft.LoraConfig(
        task_type="CAUSAL_LM" if causal else "SEQ_2_SEQ_LM",
        r=2,
        lora_alpha=16,
        target_modules=adapter.get("target_modules"),
        use_dora=adapter["type"] == "dora",
        trainable_token_indices={one: [first, first + 1] for one in TARGETS[name]},
    )
    torch.manual_seed(config.seed)
    plain = peft.get_peft_model(plain, spec).train()
    begun = {key: value.detach().clone() for key, value in plain.named_parameters() if "trainable_tokens" in key}
    losses = steps_alone(plain, config, causal)
    assert not any(torch.equal(value, plain.get_parameter(key)) for key, value in begun.items())  # they were trained
    added = add_tokens(copy.deepcopy(tokenizer), NEW)

    def then(model, comm):
        save(model, tmp_path / "ours", tokenizer=added)
        return weights_of(model)

    for ours, _, weights in train_sharded(config, added, causal, then):
        assert ours == pytest.approx(losses, abs=1e-5)
        assert weights.keys() == dict(plain.named_parameters()).keys()
        for key, param in plain.named_parameters():
            torch.testing.assert_close(weights[key], param, atol=1e-5, rtol=0, msg=key)
            assert param.requires_grad or torch.equal(weights[key], param), key
    kind = peft.AutoPeftModelForCausalLM if causal else peft.AutoPeftModelForSeq2SeqLM
    batch = batch_of([0, 1], causal=causal)
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "labels": batch.labels_BT}
    with torch.no_grad():
        loaded, trained = kind.from_pretrained(tmp_path / "ours").eval()(**inputs), plain.eval()(**inputs)
    torch.testing.assert_close(loaded.logits, trained.logits, atol=1e-4, rtol=0)
    outline = {
        key: (param.shape, param.requires_grad) for key, param in outline_model(config, added).named_parameters()
    }
    assert outline == {key: (param.shape, param.requires_grad) for key, param in plain.named_parameters()}


@pytest.mark.usefixtures("unmetered")
def test_a_run_saves_model_and_tokenizer_and_goes_on_from_its_checkpoint(tokenizer, tmp_path):
    write_base(tmp_path / "base", T5, tokenizer)
    write_rows(tmp_path / "train.csv", 9)
    values = settings(tmp_path, model={"path": str(tmp_path / "base"), "new_tokens": list(NEW)}, nproc=None)
    values["data"]["source_prefix"] = "<ticket> "
    config = RunConfig.model_validate(values)
    run_ranks(2, lambda comm: train(config, comm, [FileSink(config.output_dir)] if comm.rank == 0 else []))
    out, first = tmp_path / "out", len(tokenizer)
    saved = AutoTokenizer.from_pretrained(out)
    assert saved.convert_tokens_to_ids(list(NEW)) == [first, first + 1]
    assert first in saved("<ticket> where")["input_ids"]
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == first + 2
    [newest] = sorted(out.glob("checkpoints/step-*"))[-1:]
    longer = config.model_copy(update={"resume": newest, "output_dir": tmp_path / "second"})
    longer = longer.model_copy(update={"training": longer.training.model_copy(update={"num_train_epochs": 3})})
    done = run_ranks(2, lambda comm: train(longer, comm))
    assert done[0].steps > int(newest.name.partition("-")[2])
    assert AutoTokenizer.from_pretrained(tmp_path / "second").convert_tokens_to_ids(NEW[0]) == first


def test_a_table_with_spare_rows_stays_and_is_read_shard_by_shard(tokenizer, tmp_path):
    write_base(tmp_path, LLAMA | {"vocab_size": len(tokenizer) + 8}, tokenizer)
    added = add_tokens(copy.deepcopy(tokenizer), NEW)
    [(_, notes, weights), _] = train_sharded(
        config_with(tmp_path), added, True, lambda one, _: weights_of(one), steps=1
    )
    assert weights["model.embed_tokens.weight"].shape[0] == len(tokenizer) + 8
    assert not any("in full" in note for note in notes)


def test_an_output_layer_of_its_own_keeps_its_weights_also_where_the_configuration_ties_it(tokenizer, tmp_path):
    """As in flan-t5's files: transformers unties what its configuration ties, and its resizing ties it again."""
    write_base(tmp_path, T5, tokenizer)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors["shared.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    added = add_tokens(copy.deepcopy(tokenizer), NEW)
    grown = load_model(tmp_path, added, grow=3)
    assert torch.equal(grown.lm_head.weight[: len(tokenizer)], head)
    assert grown.encoder.embed_tokens.weight is grown.decoder.embed_tokens.weight is grown.shared.weight
    [(_, _, weights), _] = train_sharded(config_with(tmp_path), added, False, lambda one, _: weights_of(one), steps=1)
    torch.testing.assert_close(weights["lm_head.weight"][: len(tokenizer)], head, atol=0.02, rtol=0)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration has an output layer of its own"):
        prepare_model(config_with(tmp_path, {"type": "lora"}), added)


def test_an_adapter_that_changes_the_table_too_is_refused(bases, tokenizer):
    added = add_tokens(copy.deepcopy(tokenizer), NEW)
    for adapter in ({"options": {"modules_to_save": ["shared"]}}, {"target_modules": ["q", "shared"]}):
        for make in (prepare_model, outline_model):
            with pytest.raises(ModelError, match=r"single rows of a table that model\.adapter changes too, in shared"):
                make(config_with(bases["t5"], {"type": "lora", **adapter}), added)


def test_rows_that_would_stay_as_they_were_drawn_are_refused(bases, tokenizer):
    added = add_tokens(copy.deepcopy(tokenizer), NEW)
    for option, patterns in (("freeze", ["encoder.*"]), ("train", ["decoder.block.*"])):
        config = config_with(bases["t5"])
        config = config.model_copy(update={"model": config.model.model_copy(update={option: patterns})})
        for make in (prepare_model, outline_model):
            with pytest.raises(ConfigError, match=rf"model\.{option} leaves the table of embeddings untrained"):
                make(config, added)


def test_wrong_tokens_are_refused_by_name(bases, tokenizer):
    known = tokenizer.convert_ids_to_tokens([5])[0]
    with pytest.raises(ModelError, match=r"model\.new_tokens: the tokenizer has .* already"):
        prepare_tokenizer(config_with(bases["t5"]).model_copy(update={"model": model_with(bases, [known])}))
    for tokens, problem in ((["a", "a"], "'a' is given twice"), ([" "], "a token is empty")):
        with pytest.raises(ValueError, match=problem):
            model_with(bases, tokens)
    for adapter in ({"type": "ia3"}, {"type": "prefix"}, {"path": "runs/other"}):
        with pytest.raises(ValueError, match="new_tokens needs full fine-tuning or a"):
            model_with(bases, ["<x>"], adapter=adapter)


def model_with(bases, tokens, **more):
    values = config_of(bases["t5"], "lora").model_dump(by_alias=True)
    model = {"path": str(bases["t5"]), "new_tokens": tokens, **more}
    return RunConfig.model_validate({**values, "model": model}).model
