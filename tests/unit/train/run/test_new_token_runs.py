"""A run whose adapter trains the rows of new tokens: what it saves is loaded, trained further, exported and merged."""

import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fullshard.core.testing import run_ranks
from fullshard.program.config import recorded_run
from fullshard.program.data import InputRow
from fullshard.program.models import train_tokenizer
from fullshard.program.train.evaluation.evaluate import evaluate
from fullshard.program.train.evaluation.predict import predict
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.run.assemble import make_evaluation
from fullshard.program.train.setup.prepare import prepare
from fullshard.state.saving.export import ExportOptions, choose_checkpoint, export
from support.adapter_steps import T5, load_base, write_base
from support.interrupted_run import OFTEN, run
from support.tiny_run import WORDS, read_jsonl

pytestmark = [pytest.mark.usefixtures("unmetered"), pytest.mark.filterwarnings("ignore")]

NEW = ["<ticket>", "<reply>"]
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "tie_word_embeddings": True}
CASES = {
    "t5": (T5, None),
    "llama": (LLAMA, None),
    "gemma": (GEMMA, None),
    "bart, quantised": (BART | {"d_model": 64}, "nf4"),
    # Its tables have spare rows, as those of most published models.
    "llama, quantised": (LLAMA | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 80}, "nf4"),
}
LINES = ["<ticket> where is my card", "i lost it <reply>", "what is the rate"]


SLOW = ("llama", "gemma", "bart, quantised")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def finished(request, tmp_path_factory, unmetered):
    """The directory of a run's base and of a finished run over it, and whether it is quantised."""
    directory = tmp_path_factory.mktemp("run")
    config, quantization = CASES[request.param]
    write_base(directory / "base", config, train_tokenizer([*WORDS, *WORDS.values()] * 2, 60))
    model = {"path": str(directory / "base"), "new_tokens": NEW, "adapter": {"type": "lora", "r": 2}}
    model["quantization"] = quantization
    changes = {"training__max_steps": 3, "data__source_prefix": "<ticket> ", "training__learning_rate": 0.1}
    run(directory, CardSink(directory / "out", print), ranks=2, model=model, sharding__wrap="auto", **OFTEN, **changes)
    return directory, config["model_type"] in ("llama", "gemma3_text"), quantization is not None


def test_it_is_evaluated_with_its_own_tokens_as_in_the_run(finished):
    out = finished[0] / "out"
    trained = find_trained(str(out), recorded_run(out))
    data = prepare(trained.config)
    assert data.tokenizer.convert_tokens_to_ids(NEW[0]) in data.held_out_set.source_ids[0]

    def work(comm):
        model, tokenizer, _ = load_trained(trained, comm)
        return evaluate(model, tokenizer, make_evaluation(trained.config, data), comm, step=0, epoch=0.0).loss

    records = [one for one in read_jsonl(out / "metrics.jsonl") if one["kind"] == "evaluation"]
    best = json.loads((out / "summary.json").read_text())["best_step"]
    [loss] = [one["loss"] for one in records if one["step"] == best]
    assert run_ranks(2, work)[0] == pytest.approx(loss, abs=1e-5)


def by_peft(out, causal):
    kind = peft.AutoPeftModelForCausalLM if causal else peft.AutoPeftModelForSeq2SeqLM
    return kind.from_pretrained(out).eval()


@torch.no_grad()
def logits(model, tokenizer):
    rows = tokenizer(LINES, padding=True, return_tensors="pt")
    extra = {"labels": rows.input_ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, **extra).logits


def test_what_it_saved_is_read_by_peft_and_predicts(finished, tmp_path):
    directory, causal, quantised = finished
    out = directory / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    old = len(AutoTokenizer.from_pretrained(directory / "base"))
    assert tokenizer.convert_tokens_to_ids(NEW) == [old, old + 1]
    rows = [InputRow(line, number) for number, line in enumerate(LINES, start=1)]

    def work(comm):
        trained = find_trained(str(out), recorded_run(out))
        model, its_tokenizer, _ = load_trained(trained, comm)
        changed = trained.config.evaluation.model_copy(update={"max_new_tokens": 4})
        config = trained.config.model_copy(update={"evaluation": changed})
        return [one.text for part in predict(model, its_tokenizer, rows, config, comm) for one in part]

    ours = run_ranks(2, work)[0]
    model = by_peft(out, causal)
    if quantised:  # peft alone does not quantise the base
        export(choose_checkpoint(out), tmp_path / "merged", ExportOptions(lora="merge", dtype="float32"))
        model = load_base(tmp_path / "merged").eval()
    config = recorded_run(out)
    for line, text in zip(LINES, ours, strict=True):
        asked = config.data.source_prefix + line + ((config.data.separator or "") if causal else "")
        ids = tokenizer(asked, return_tensors="pt").input_ids
        written = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)[0]
        assert tokenizer.decode(written[ids.shape[1] * causal :], skip_special_tokens=True).strip() == text


def test_it_is_exported_and_merged_as_peft_does(finished, tmp_path):
    directory, causal, quantised = finished
    checkpoint = choose_checkpoint(directory / "out")
    export(checkpoint, tmp_path / "adapter", ExportOptions(lora="adapter"))
    ours, saved = (load_file(one / "adapter_model.safetensors") for one in (tmp_path / "adapter", directory / "out"))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in ours.items())
    export(checkpoint, tmp_path / "merged", ExportOptions(lora="merge", dtype="float32"))
    merged, tokenizer = load_base(tmp_path / "merged").eval(), AutoTokenizer.from_pretrained(tmp_path / "merged")
    first = tokenizer.convert_tokens_to_ids(NEW[0])
    rows = max(first + 2, load_base(directory / "base").config.vocab_size)
    assert merged.config.vocab_size == merged.get_input_embeddings().weight.shape[0] == rows
    model = by_peft(directory / "out", causal)
    if quantised:
        for name, value in saved.items():
            if "trainable_tokens" in name:
                table = merged.get_output_embeddings() if "lm_head" in name else merged.get_input_embeddings()
                torch.testing.assert_close(table.weight[first : first + 2], value)
        return
    torch.testing.assert_close(logits(merged, tokenizer), logits(model, tokenizer), atol=1e-4, rtol=0)


def test_it_is_trained_further_as_peft_does(finished, tmp_path):
    directory, _, quantised = finished
    model = {"path": str(directory / "base"), "adapter": {"path": str(directory / "out")}}
    model["quantization"] = "nf4" if quantised else None
    memory = run(
        tmp_path, ranks=2, model=model, sharding__wrap="auto", training__max_steps=2, data__source_prefix="<ticket> "
    )
    before, after = (load_file(one / "out/adapter_model.safetensors") for one in (directory, tmp_path))
    assert before.keys() == after.keys()
    assert all(not torch.equal(value, after[name]) for name, value in before.items() if "trainable_tokens" in name)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids(NEW[0]) > 0
    assert memory.ended[0].steps == 2


def test_the_card_loads_it(finished, monkeypatch):
    directory = finished[0]
    (code,) = re.findall(r"```python\n(.*?)```", (directory / "out/README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(directory)
    known = {}
    exec(code, known)
    rows = known["base"].get_input_embeddings().weight.shape[0]
    assert rows == len(known["tokenizer"]) or rows == 80 > len(known["tokenizer"])
