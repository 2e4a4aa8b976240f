"""What to write for options of other programs: of Hugging Face's arguments, including removed ones, and of scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullshard.program.config.schema import options

_REPLACED: Mapping[str, str] = {
    "bf16": "write training.precision: bf16",
    "dataloader_num_workers": "leave it out: batches are made from token ids in memory-mapped files",
    "deepspeed": "leave it out: the sharding section sets how the model is sharded",
    "do_eval": "leave it out: training.eval_strategy sets when to evaluate; fullshard evaluate only evaluates",
    "do_predict": "leave it out: fullshard predict writes predictions for a file",
    "do_train": "leave it out: fullshard train trains",
    "dtype": "write training.precision: fp32, bf16 or fp16",
    "fp16": "write training.precision: fp16, or bf16, which T5 needs",
    "fsdp": "leave it out: the sharding section sets how the model is sharded",
    "fsdp_config": "pass Accelerate's file as --config_file, or convert it to a run file with fullshard config convert",
    "greater_is_better": "leave it out: it follows from the metric",
    "group_by_length": "write training.train_sampling_strategy: group_by_length, which is the default, or random",
    "ignore_pad_token_for_loss": "leave it out: padding never counts in the loss",
    "length_column_name": "leave it out: lengths are counted when the data is tokenized",
    "hub_model_id": "write training.push_to_hub: owner/name",
    "hub_private_repo": "write training.push_to_hub: {repo: owner/name, private: true}",
    "hub_token": "leave it out: the token is taken from HF_TOKEN or from hf auth login",
    "load_best_model_at_end": "leave it out: the best model by evaluation.metric is always kept",
    "load_in_4bit": "write model.quantization: nf4",
    "load_in_8bit": "write model.quantization: int8",
    "logging_dir": "leave it out: everything is written to output_dir",
    "no_cuda": "leave it out: without a GPU the run uses the CPU",
    "optim_args": "set the optimizer's options in training, such as training.adam_beta2",
    "overwrite_cache": "leave it out: the cache identifies data, tokenizer and settings by their content",
    "overwrite_output_dir": "write resume: never",
    "pad_to_max_length": "leave it out: batches are padded to their longest row, or not at all with training.packing",
    "predict_with_generate": "leave it out: metrics of text need generation, perplexity does not",
    "preprocessing_num_workers": "leave it out: tokenizing uses all cores",
    "save_safetensors": "leave it out: weights are always safetensors",
    "tf32": "leave it out: set torch's own variable in the environment",
    "tokenizer_name": "leave it out: a model's directory contains its tokenizer",
    "torch_dtype": "write training.precision: fp32, bf16 or fp16",
    "use_fast_tokenizer": "leave it out: the fast tokenizer is used if there is one",
    "use_peft": "write a model.adapter section",
}
"""Options that do not exist here, with what to do instead."""

_OPTIMIZERS: Mapping[str, str] = {
    "adafactor": "adafactor",
    "adamw": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_anyprecision": "adamw_bf16",
    "adamw_apex_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_fused": "adamw",
    "muon": "muon",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
}
"""Optimizer names of Hugging Face's Trainer, with their names here."""


def other_name(key: str, value: Any) -> str | None:
    """Return what to write instead of another program's option, a dotted key and its value; None if none has it."""
    name = key.rpartition(".")[2].lower()
    if name == "optim":
        return _optimizer_name(value)
    if name in _REPLACED:
        return f"is not an option here; {_REPLACED[name]}"
    here = next((other for other, option in options().items() if name in option.also and other != key), None)
    shown = "" if isinstance(value, Mapping) else f": {value}"
    return None if here is None else f"is called {here} here; write {here}{shown}"


def _optimizer_name(value: Any) -> str:
    """Return what to write instead of Hugging Face's ``optim: value``."""
    known = _OPTIMIZERS.get(str(value).lower())
    if known is not None:
        return f"is called training.optimizer here; write training.optimizer: {known}"
    there = ", ".join(dict.fromkeys(_OPTIMIZERS.values()))
    return f"is called training.optimizer here, and there is no {value}: it is one of {there}"
