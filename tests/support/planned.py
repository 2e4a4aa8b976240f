"""A small T5, its batch and options, planned in one process and measured on ranks."""

from functools import partial

import torch
import yaml
from transformers import T5Config, T5ForConditionalGeneration

from fullshard import MixedPrecision, ShardingStrategy, fully_shard
from fullshard.planner import PlannedStep
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.t5_directory import write_t5
from support.tiny_run import MODEL, WORDS, settings

SHAPE = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 4, "num_layers": 2, "vocab_size": 500}

OPTIONS = {
    "full_shard": {},
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "grad_op_bf16": {
        "strategy": ShardingStrategy.SHARD_GRAD_OP,
        "mp_policy": MixedPrecision(param="bfloat16", reduce="float32"),
    },
}
"""Options of ``fully_shard`` by case."""


def make_model(*, checkpointing=False, **changes):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**SHAPE | changes, decoder_start_token_id=0))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch(rows=4, tokens=32):
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % 400 + 3
    return {"input_ids": ids, "labels": ids[:, : tokens // 2].clone(), "use_cache": False}


def build(comm, **options):
    """The small T5 sharded with ``options``, and its step; to simulate, or to take on ranks."""
    model = fully_shard(make_model(), comm, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = batch()

    def step():
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    return PlannedStep(model, optimizer, step)


def write_run(directory, **changes):
    """Write a run file in ``directory`` for the tiny run with ``changes``, and return its path."""
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings(directory, **changes)))
    return path


def write_directory_run(directory, **changes):
    """Write a run file that trains a small T5 from a directory, and return its path."""
    write_t5(directory / "model", [*WORDS, *WORDS.values()] * 30)
    return write_run(directory, **{"model": {"path": str(directory / "model")}, **changes})


def write_adapter_run(directory):
    """Write a run file that trains a LoRA adapter of it, and return its path."""
    model = {"path": str(directory / "model"), "adapter": {"type": "lora", "r": 4}}
    return write_directory_run(directory, model=model, sharding={"frozen": "replicate"})


def write_quantised_run(directory, quantization="nf4"):
    """Write a run file that trains a LoRA adapter over quantised weights, and return its path."""
    model = {"path": str(directory / "model"), "adapter": {"type": "lora", "r": 4}, "quantization": quantization}
    return write_directory_run(directory, model=model)


def write_packed_run(directory, **changes):
    """Write a run file with packed batches of a budget of tokens and a fused loss, and return its path."""
    options = {"packing": True, "per_device_train_batch_tokens": 60, "fused_cross_entropy": True}
    options |= {"gradient_accumulation_steps": 1, "gradient_checkpointing": True}
    return write_directory_run(directory, training={"learning_rate": 1e-3, "eval_strategy": "no", **options}, **changes)


def write_table_run(directory):
    """Write a run file of a model whose embedding is large enough for tokens to travel to it."""
    return write_run(directory, model={"config": MODEL | {"vocab_size": 70_000}, "tokenizer": {"vocab_size": 60}})


def write_shared_rows_run(directory):
    """Write a run file of a causal model whose rows two ranks share, with recomputed blocks, and return its path."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", **sizes, "num_key_value_heads": 2}
    model = {"config": config, "tokenizer": {"vocab_size": 60}}
    changes = {"training__gradient_checkpointing": 1, "data__max_source_length": 64}
    return write_run(directory, model=model, sharding={"sequence_parallel": 2}, **changes)


def write_accumulating_run(directory):
    """Write a run file of four micro-batches a step, whose gradients accumulate in full, and return its path."""
    training = {"accumulate": "unsharded", "gradient_accumulation_steps": 4, "eval_strategy": "no"}
    return write_run(directory, training={"per_device_train_batch_size": 2, **training})


RUNS = {
    "run": write_run,
    "accumulating": write_accumulating_run,
    "directory": partial(write_directory_run, training__gradient_checkpointing=2),
    "adapter": write_adapter_run,
    "nf4": write_quantised_run,
    "int8": partial(write_quantised_run, quantization="int8"),
    "packed": write_packed_run,
    "bias": partial(write_directory_run, speed={"ways": ["bias_sdpa"]}),
    "packed_bias": partial(write_packed_run, speed={"ways": ["bias_sdpa"]}),
    "table": write_table_run,
    "shared_rows": write_shared_rows_run,
    "shared_packed_rows": partial(write_packed_run, sharding={"sequence_parallel": 2}),
}
"""Functions that write run files, by case."""


def plan_run(config, ranks, device=None):
    """The plan of a run with its own data."""
    return plan_prepared(config, prepare(config), ranks, device)
