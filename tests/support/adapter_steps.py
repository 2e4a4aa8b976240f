"""A few steps of an adapter: by peft and torch alone, and by the program's parts on ranks."""

import json

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer

from fullshard.core.testing import run_ranks
from fullshard.program.config import RunConfig
from fullshard.program.models import AdapterSpec, add_adapter, build_model
from fullshard.program.train.run.step import StepSpec
from fullshard.program.train.setup.model import prepare_model, shard_model
from fullshard.program.train.setup.optimizers import make_optimizer
from support.one_step import batch_from, tokenized, train_step
from support.parity import weights_of as weights_of

T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ROWS = tokenized(
    [[5, 6, 1], [7, 8, 9, 10, 1], [11, 1], [12, 13, 14, 1]], [[20, 1], [21, 22, 23, 24, 1], [15, 16, 1], [17, 1]]
)


def write_base(directory, config, tokenizer, scale=3):
    """Save a model; by default with larger weights than a new one's, whose logits hardly depend on anything."""
    model = build_model(config, tokenizer, seed=7)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale if p.dim() > 1 else 1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def config_of(base, kind, adapter=None, sharding=None, quantization=None, **training):
    size = {"prompt": {"num_virtual_tokens": 3}, "prefix": {"num_virtual_tokens": 3}, "ia3": {}}.get(kind, {"r": 2})
    values = {
        "output_dir": "unused",
        "model": {
            "path": str(base),
            "adapter": {"type": kind, **size, **(adapter or {})},
            "quantization": quantization,
        },
        "data": {
            "train_file": "unused.csv",
            "validation_file": "unused.csv",
            "source_column": "a",
            "target_column": "b",
        },
        "training": {"learning_rate": 1e-2, "weight_decay": 0.1, "per_device_eval_batch_size": 1, **training},
        "sharding": sharding or {},
    }
    return RunConfig.model_validate(values)


def batch_of(rows, *, causal, packed=False):
    return batch_from(ROWS, rows, causal=causal, packed=packed)


def spec_of(step, *, causal):
    return StepSpec(step=step, epoch=0.1, learning_rate=1e-2, max_grad_norm=1.0, causal=causal)


def load_base(base):
    two = json.loads((base / "config.json").read_text()).get("is_encoder_decoder")
    return (AutoModelForSeq2SeqLM if two else AutoModelForCausalLM).from_pretrained(base)


def train_plain(base, kind, config, causal, steps=3, change=lambda model: model, norms=None):
    """peft and torch alone, on all rows at once; ``change`` is applied to the base; ``norms``: see below."""
    settings = dict(config.model.adapter)
    model = add_adapter(change(load_base(base)), AdapterSpec(base=str(base), **settings), seed=config.seed).model
    return model, steps_alone(model, config, causal, steps, norms)


def steps_alone(model, config, causal, steps=3, norms=None):
    """The losses of torch's own steps on all rows at once; the gradients' norms before clipping go into ``norms``."""
    held = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = Trainer.get_decay_parameter_names(None, model)
    of_decay = {decay: [p for name, p in held.items() if (name in decayed) == (decay > 0)] for decay in (0.1, 0.0)}
    groups = [{"params": params, "weight_decay": decay} for decay, params in of_decay.items()]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=config.training.adam_epsilon)
    batch, losses = batch_of(range(4), causal=causal), []
    for _ in range(steps):
        inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
        loss = model(**inputs, labels=batch.labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(held.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if norms is not None:
            norms.append(norm.item())
    return losses


def train_sharded(config, tokenizer, causal, then, steps=3, size=2):
    ready = [prepare_model(config, tokenizer) for _ in range(size)]

    def work(comm):
        model, weights, notes = ready[comm.rank].model, ready[comm.rank].weights, ready[comm.rank].notes
        shard_model(model, config, comm, weights=weights)
        optimizer, losses = make_optimizer(model, config), []
        rows = range(comm.rank, 4, size)
        for step in range(1, steps + 1):
            batch = batch_of(rows, causal=causal, packed=config.training.packing)
            report = train_step(model, optimizer, [batch], comm, spec_of(step, causal=causal))
            losses.append(report.loss)
        return losses, notes, then(model, comm)

    return run_ranks(size, work)


def assert_loads_as(directory, plain, base, batch, causal, **tolerance):
    """The adapter saved in ``directory`` over ``base`` computes as ``plain`` does, by peft alone."""
    loaded = PeftModel.from_pretrained(load_base(base), directory).eval()
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
    inputs |= {} if causal else {"decoder_input_ids": batch.labels_BT}
    with torch.no_grad():
        ours, theirs = loaded(**inputs).logits, plain.eval()(**inputs).logits
    torch.testing.assert_close(ours, theirs, **tolerance)
