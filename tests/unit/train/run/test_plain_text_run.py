"""Runs over plain text: the losses of transformers unsharded, the same on any ranks, resumed to the bit."""

import csv
import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from fullshard.program.config import RunConfig
from fullshard.program.data import EpochPlan
from fullshard.program.models import train_tokenizer
from fullshard.program.train.setup.prepare import prepare
from support.interrupted_run import assert_same, run, run_until_killed
from support.tiny_run import settings

pytestmark = pytest.mark.usefixtures("unmetered")

LENGTH = 16
WORDS = ("some", "words", "of", "a", "text", "that", "goes", "on", "and", "on")
TEXTS = [" ".join(WORDS[(row * 3) % 7 :][: 2 + row % 6]) for row in range(110)]
SIZES = {
    "t5": T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
    "llama": LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    ),
}


def write_texts(path, texts):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])


@pytest.fixture(scope="module", params=["t5", "llama"])
def kind(request):
    return request.param


def changes(directory, kind, dropout=0.0):
    """The settings of a run over the texts, of a model in a directory of transformers."""
    write_texts(directory / "texts.csv", TEXTS)
    write_texts(directory / "held.csv", TEXTS[:9])
    tokenizer = train_tokenizer(TEXTS, 80, 3 if kind == "t5" else 0, ends=kind == "t5")
    config = SIZES[kind]
    config.vocab_size = len(tokenizer)
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, 1
    torch.manual_seed(0)
    model = (T5ForConditionalGeneration if kind == "t5" else LlamaForCausalLM)(config)
    if kind == "t5":
        model.config.dropout_rate = dropout
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    data = {
        "train_file": str(directory / "texts.csv"),
        "validation_file": str(directory / "held.csv"),
        "text_column": "text",
        "cache_dir": str(directory / "cache"),
        "max_source_length": LENGTH,
    }
    return {
        "model": {"path": str(directory / "model")},
        "data": data,
        "sharding": {},
        "evaluation": {"metric": "perplexity"},
        "data__max_train_samples": None,
        "training__per_device_train_batch_size": 4,
        "training__gradient_accumulation_steps": 1,
        "training__lr_scheduler_type": "constant",
        "training__warmup_steps": 0,
        "training__max_grad_norm": None,
        "training__weight_decay": 0.0,
    }


def unsharded(config):
    """Losses of each step and of the held-out rows: a plain loop over transformers' model."""
    auto = {"t5": AutoModelForSeq2SeqLM, "llama": AutoModelForCausalLM}
    data = prepare(config)
    model = auto["llama" if data.causal else "t5"].from_pretrained(config.model.path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.learning_rate, weight_decay=0.0)

    def loss_of(rows, indices):
        inputs = [torch.tensor(rows.source_ids[row].tolist()) for row in indices]
        targets = [torch.tensor(rows.target_ids[row].tolist()) for row in indices]
        if data.causal:
            inputs = targets
        padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in inputs], batch_first=True)
        found = model(input_ids=padded, attention_mask=mask, labels=labels).loss
        return found, int((labels[:, data.causal :] != -100).sum())

    losses = []
    for epoch in range(2):
        rows = data.train_set.for_epoch(epoch)
        plan = EpochPlan(len(rows), 1, 8, seed=config.seed, lengths=rows.lengths, epoch=epoch)
        for step in range(plan.num_steps):
            [(indices, _)] = plan.step_places(step, 0)
            loss, _ = loss_of(rows, indices.tolist())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held, _ = loss_of(data.held_out_set, range(len(data.held_out_set)))
    return losses, held.item()


def test_two_ranks_take_transformers_steps_and_measure_its_loss(kind, tmp_path):
    given = changes(tmp_path, kind)
    memory = run(tmp_path, ranks=2, **given)
    config = RunConfig.model_validate(settings(tmp_path, **given))
    losses, held = unsharded(config)
    assert [step.loss for step in memory.steps] == pytest.approx(losses, abs=1e-5)
    assert len(losses) >= 10
    report, _ = memory.evaluations[-1]
    assert report.loss == pytest.approx(held, abs=1e-5)
    assert report.metrics == {"perplexity": pytest.approx(math.exp(held), rel=1e-4)}
    assert report.predictions == ()


def test_a_killed_run_of_spans_resumes_with_the_same_weights(tmp_path):
    often = {"training__save_strategy": "steps", "training__save_steps": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for one in (whole, killed):
        one.mkdir()
    given = changes(tmp_path, "t5", dropout=0.1) | often
    run(whole, **given)
    run_until_killed(killed, ("step", 4), **given)
    run(killed, **given)
    for one in (whole, killed):
        (one / "out" / "predictions.jsonl").touch()  # nothing is generated
    assert_same(killed, whole)


def test_a_new_model_gets_the_sentinels_it_needs_and_a_causal_one_no_end_token(tmp_path):
    write_texts(tmp_path / "texts.csv", TEXTS)
    data = {"train_file": str(tmp_path / "texts.csv"), "text_column": "text", "max_source_length": 32}
    values = {"output_dir": str(tmp_path / "out"), "data": data | {"cache_dir": str(tmp_path)}}
    values |= {"training": {"eval_strategy": "no"}}
    found = []
    for kind in ("t5", "llama"):
        model = {"config": {"model_type": kind}, "tokenizer": {"vocab_size": 80}}
        found.append(prepare(RunConfig.model_validate(values | {"model": model})))
    t5, llama = found
    assert t5.tokenizer("<extra_id_0> a<extra_id_1>")["input_ids"][0] == 3
    assert t5.tokenizer("a")["input_ids"][-1] == 1
    assert 1 not in llama.tokenizer("a")["input_ids"]
    assert llama.tokenizer.get_vocab().get("<extra_id_0>") is None
    assert isinstance(t5.tokenizer, PreTrainedTokenizerFast)
    shown = next(note for note in t5.notes if "as the model sees it" in note)
    assert "<extra_id_0>" in shown
    assert any(line.endswith("rows of 32 tokens, cut out of the joined texts") for line in llama.notes)
