"""Names of options in other programs: Hugging Face's arguments, including removed ones, and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RENAMED: Mapping[str, str] = {
    "adapter": "model.adapter",
    "batch_size": "training.per_device_train_batch_size",
    "bnb_4bit_compute_dtype": "model.quantization.compute_dtype",
    "bnb_4bit_quant_type": "model.quantization.type",
    "bnb_4bit_use_double_quant": "model.quantization.double_quant",
    "config_name": "model.config",
    "epochs": "training.num_train_epochs",
    "evaluation_strategy": "training.eval_strategy",
    "generation_max_length": "evaluation.max_new_tokens",
    "generation_num_beams": "evaluation.num_beams",
    "label_smoothing": "training.label_smoothing_factor",
    "llm_int8_skip_modules": "model.quantization.skip",
    "lora_r": "model.adapter.r",
    "lr": "training.learning_rate",
    "max_input_length": "data.max_source_length",
    "max_length": "data.max_source_length",
    "max_seq_length": "data.max_source_length",
    "metric_for_best_model": "evaluation.metric",
    "model_name": "model.path",
    "name_or_path": "model.path",
    "model_name_or_path": "model.path",
    "num_epochs": "training.num_train_epochs",
    "output_max_length": "data.max_target_length",
    "per_gpu_eval_batch_size": "training.per_device_eval_batch_size",
    "per_gpu_train_batch_size": "training.per_device_train_batch_size",
    "resume_from_checkpoint": "resume",
    "scheduler": "training.lr_scheduler_type",
    "summary_column": "data.target_column",
    "test_file": "data.validation_file",
    "text_column": "data.source_column",
    "train_batch_size": "training.per_device_train_batch_size",
    "val_batch_size": "training.per_device_eval_batch_size",
    "val_max_target_length": "evaluation.max_new_tokens",
    "warmup_ratio": "training.warmup_steps",
}
"""Other names of options that take the same values."""

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
    if name in _RENAMED and _RENAMED[name] != key:
        shown = "" if isinstance(value, Mapping) else f": {value}"
        return f"is called {_RENAMED[name]} here; write {_RENAMED[name]}{shown}"
    return None


def _optimizer_name(value: Any) -> str:
    """Return what to write instead of Hugging Face's ``optim: value``."""
    known = _OPTIMIZERS.get(str(value).lower())
    if known is not None:
        return f"is called training.optimizer here; write training.optimizer: {known}"
    there = ", ".join(dict.fromkeys(_OPTIMIZERS.values()))
    return f"is called training.optimizer here, and there is no {value}: it is one of {there}"
