"""Small runs in fp8, emulated on CPUs: their models and run files."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from support.planned import write_run
from support.processes import Cases, run_processes
from support.t5_directory import write_t5
from support.tiny_run import WORDS

LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 64, "intermediate_size": 256}
T5 = {"num_layers": 1, "num_decoder_layers": 1, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}
FEW = {"data__max_train_samples": 16, "evaluation__max_new_tokens": 2}
FP8 = {"training__precision": "fp8", "training__allow_emulation": True} | FEW
QUIET = {"training__eval_strategy": "no", "training__per_device_train_batch_size": 12}


def make(kind):
    """A small model, always the same."""
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=100, **LLAMA))
    return T5ForConditionalGeneration(T5Config(vocab_size=100, decoder_start_token_id=0, dropout_rate=0.0, **T5))


def new(kind, directory, **changes):
    """Write the run file of a new model."""
    config = {"model_type": kind, **(LLAMA if kind == "llama" else T5)}
    return write_run(directory, model={"config": config, "tokenizer": {"vocab_size": 60}}, **changes)


def adapted(kind, directory, **changes):
    """Write a model's directory, and the run file that trains an adapter of it."""
    place = directory / "model"
    write_t5(place, [*WORDS, *WORDS.values()] * 30)
    if kind == "llama":
        make("llama").save_pretrained(place)
    adapter = {"type": "lora", "r": 4, "target_modules": "all-linear"}
    return write_run(directory, model={"path": str(place), "adapter": adapter}, **changes)


RUNS = {
    "run": lambda place: new("t5", place, **FP8),
    "run_interrupted": lambda place: new("t5", place, **FP8, training__save_strategy="no"),
    "run_bf16": lambda place: new("t5", place, training__precision="bf16", **FEW),
    "lora": lambda place: adapted("llama", place, **FP8),
}
"""Functions that write the run files of whole runs."""

PLANNED = {
    "t5_tensorwise": lambda place: new("t5", place, **FP8, **QUIET),
    "t5_rowwise": lambda place: new("t5", place, **FP8, **QUIET, training__fp8_scales="rowwise"),
    "t5_lora": lambda place: adapted("t5", place, **FP8, **QUIET),
    "llama_tensorwise": lambda place: new("llama", place, **FP8, **QUIET, nproc=1),
    "llama_rowwise": lambda place: new("llama", place, **FP8, **QUIET, training__fp8_scales="rowwise"),
    "llama_lora": lambda place: adapted("llama", place, **FP8, **QUIET, nproc=1),
}
"""The same, of runs whose plans are compared with their steps."""


def float8_cases(names, directory):
    """Run cases of ``dist/train/float8_main.py`` on two ranks; returns their results by name."""
    for name in names:
        if write := (RUNS | PLANNED).get(name):
            (directory / name).mkdir()
            write(directory / name)
    script = Path(__file__).parents[1] / "dist" / "train" / "float8_main.py"
    return Cases(run_processes(2, script, "--only", ",".join(names), "--directory", str(directory)))
