"""Runs of Hugging Face's trainers (DDP on CPU) and of fullshard's, on gloo processes."""

import argparse
import functools
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint import FileSystemReader
from transformers import GPT2Config, GPT2LMHeadModel, T5ForConditionalGeneration

from fullshard.compat import transformers as ours
from fullshard.compat.accelerate import Accelerator
from support.models import tiny_t5_config
from support.rank_script import parse, print_result, run_checks
from support.trainers import SETTINGS, STEPS, Stop, ask_for_nothing, both_versions_of, installed, same, trained

VOCAB = 64
CHECKS = {}
both_versions = both_versions_of(CHECKS)
directory = Path()  # main sets it
# Adam would take the same steps of gradients that are all twice as large.
SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.3}


def rows(count, seed=1):
    tokens = torch.randint(2, VOCAB, (count, 10), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt2(seed=0):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=1))


def t5(seed=0):
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(tiny_t5_config(vocab_size=VOCAB))


def lora(seed=0):
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    return get_peft_model(gpt2(), config)


def lively(seed=0):
    """A LoRA whose second matrices are not zero."""
    model = lora(seed)
    torch.manual_seed(seed + 1)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    return model


def make(kind, model=gpt2, trainer="Trainer", callbacks=(), more=None, **options):
    """A trainer of the module ``kind`` in ``directory``."""
    settings = SETTINGS | {"output_dir": str(directory / "out")}
    arguments = getattr(transformers, {"Trainer": "TrainingArguments"}.get(trainer, f"{trainer[:-7]}TrainingArguments"))
    args = arguments(**(settings | options))
    data = {"train_dataset": rows(32), "eval_dataset": rows(8, seed=2)}
    return getattr(kind, trainer)(model=model(), args=args, callbacks=list(callbacks), **data, **(more or {}))


def theirs(*args, **options):
    """The library's, as in a process where nothing asks for FSDP."""
    ask_for_nothing()
    return make(transformers, *args, **options)


def sharded(version, *args, config=None, **options):
    return make(ours, *args, fsdp=True, fsdp_config={"version": version, **(config or {})}, **options)


@functools.cache
def reference(model=gpt2, **options):
    """Logs of the library's run."""
    return trained(theirs(model, **options))


def weights(trainer):
    """All of them: on rank 0 of a sharded run, on each of the library's."""
    of_ours = isinstance(trainer.accelerator, Accelerator)
    state = trainer.accelerator.get_state_dict(trainer.model) if of_ours else trainer.model.state_dict()
    return {name: value.clone() for name, value in state.items()}


@both_versions
def gpt2_trains(version):
    expected = reference()
    trainer = sharded(version)
    same(trained(trainer), expected)
    assert all(hasattr(param, "shard_meta") for param in trainer.model.parameters())


@both_versions
def accumulation(version):
    options = SGD | {"gradient_accumulation_steps": 2}
    expected = reference(**options)
    same(trained(sharded(version, **options)), expected)


@both_versions
def bf16(version):
    """Version 2 rounds the loss to bf16, as Accelerate's policy for it says."""
    expected = reference(bf16=True, **SGD)
    trainer = sharded(version, bf16=True, **SGD)
    same(trained(trainer), expected, 5e-3)
    assert trainer.accelerator.state.fsdp_plugin.mixed_precision_policy.param_dtype is torch.bfloat16


@both_versions
def checkpointing(version):
    expected = reference()
    same(trained(sharded(version, config={"activation_checkpointing": True})), expected)
    same(trained(sharded(version, gradient_checkpointing=True)), expected)


@both_versions
def offload(version):
    expected = reference()
    same(trained(sharded(version, config={"cpu_offload": True})), expected)


def resumed(version, kind, model=gpt2):
    """Logs of a run that was interrupted, and went on from its checkpoint with a model of other values."""
    options = {"save_strategy": "steps", "save_steps": STEPS // 2, "config": {"state_dict_type": f"{kind}_STATE_DICT"}}
    options["output_dir"] = str(directory / f"{model.__name__}_{kind}_{version}")
    sharded(version, model, callbacks=[Stop()], **options).train()
    return trained(sharded(version, functools.partial(model, seed=5), **options), resume_from_checkpoint=True)


@both_versions
def resume_full(version):
    expected = reference()
    same(resumed(version, "FULL"), expected)


@both_versions
def resume_sharded(version):
    expected = reference()
    same(resumed(version, "SHARDED"), expected)


def best_options(name):
    every = {f"{what}_strategy": "steps" for what in ("eval", "save")} | {"eval_steps": 2, "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return every | best | {"output_dir": str(directory / name)}


@both_versions
def best_model(version):
    for kind in ("FULL", "SHARDED"):
        expected = reference(**best_options("best"))
        evals = [log["eval_loss"] for log in expected if "eval_loss" in log]
        assert evals[-1] == pytest.approx(min(evals))
        assert evals[-2] > min(evals) + 1e-3
        options = best_options(f"best_{version}_{kind}") | {"config": {"state_dict_type": f"{kind}_STATE_DICT"}}
        same(trained(sharded(version, **options)), expected)


def checksum(predictions):
    tokens = torch.as_tensor(predictions.predictions)
    return {"tokens": float((tokens * torch.arange(1, tokens.numel() + 1).view(tokens.shape)).sum())}


@both_versions
def seq2seq(version):
    options = {"trainer": "Seq2SeqTrainer", "predict_with_generate": True, "generation_max_length": 8}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3}
    more = {"compute_metrics": checksum}
    expected = trained(theirs(t5, more=more, **options))
    assert sum("eval_tokens" in log for log in expected) == 2
    same(trained(sharded(version, t5, more=more, **options)), expected)


@both_versions
def train_twice(version):
    """The second call goes on with the weights and moments of the first."""

    def run(trainer):
        trainer.train()
        first = weights(trainer)
        return trained(trainer), first, weights(trainer)

    logs, first, last = run(theirs())
    assert any(not torch.equal(first[name], last[name]) for name in first)
    found = run(sharded(version))
    same(found[0], logs)
    if torch.distributed.get_rank() == 0:
        # Keys' biases have no gradient but rounding errors, which Adam scales up.
        torch.testing.assert_close(list(found[1:]), [first, last], rtol=1e-4, atol=1e-4)


@both_versions
def launched(version):
    """Without ``fsdp=``, by the variables that ``accelerate launch`` sets."""
    expected = reference()
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": str(version),
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    trainer = make(ours)
    same(trained(trainer), expected)
    plugin = trainer.accelerator.state.fsdp_plugin
    assert plugin.fsdp_version == version
    assert plugin.transformer_cls_names_to_wrap == ["GPT2Block"]


@both_versions
def saved(version):
    for kind in ("FULL", "SHARDED"):
        expected = theirs()
        expected.train()
        trainer = sharded(version, config={"state_dict_type": f"{kind}_STATE_DICT"})
        trainer.train()
        folder = directory / f"saved_{version}_{kind}"
        trainer.save_model(str(folder))
        torch.distributed.barrier()
        loaded = GPT2LMHeadModel.from_pretrained(folder).state_dict()
        torch.testing.assert_close(dict(loaded), weights(expected), rtol=1e-5, atol=1e-5)


@both_versions
def evaluated_first(version):
    """And trained then, which under DDP the library does without DDP, and under version 1 not at all."""
    first, expected = theirs().evaluate()["eval_loss"], reference()
    trainer = sharded(version)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first, abs=1e-5)
    same(trained(trainer), expected)


def two_at_once():
    """Each has its own version, and neither disturbs the other."""
    expected = reference()
    one, two = (sharded(version) for version in (1, 2))
    assert [trainer.accelerator.state.fsdp_plugin.fsdp_version for trainer in (one, two)] == [1, 2]
    for trainer in (one, two):
        same(trained(trainer), expected)
    assert one.evaluate()["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], abs=1e-5)


CHECKS["two_at_once"] = two_at_once


@both_versions
def smaller_batches(version):
    """``auto_find_batch_size``: the model is prepared again after the first batch did not fit."""

    def run(trainer):
        step = trainer.training_step

        def training_step(model, inputs, *rest):
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return step(model, inputs, *rest)

        trainer.training_step = training_step
        return trained(trainer)

    options = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
    expected = run(theirs(**options))
    same(run(sharded(version, **options)), expected)


@both_versions
def without_use_cpu(version):
    """Accelerate's state takes each rank for a single process then, until the Accelerator."""
    expected = reference()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")
        trainer = sharded(version, use_cpu=False, ddp_backend=None)
        same(trained(trainer), expected)
    assert trainer.args.world_size == 2


class Derived(transformers.Trainer):
    """As a library would derive one."""


@both_versions
def install(version):
    expected = reference()
    with installed():
        trainer = make(argparse.Namespace(Trainer=Derived), fsdp=True, fsdp_config={"version": version})
    same(trained(trainer), expected)
    assert all(hasattr(param, "shard_meta") for param in trainer.model.parameters())


@both_versions
def peft_lora(version):
    options = SGD | {"max_grad_norm": 0.01, "learning_rate": 10.0}
    expected = reference(lively, **options)
    same(trained(sharded(version, lively, **options)), expected)


@both_versions
def peft_lora_resumes(version):
    """Its checkpoints hold what trains, as Accelerate's."""
    for kind in ("FULL", "SHARDED"):
        expected = reference(lively)
        same(resumed(version, kind, lively), expected)
        checkpoint = directory / f"lively_{kind}_{version}" / f"checkpoint-{STEPS}"
        if kind == "FULL":
            names = set(torch.load(checkpoint / "pytorch_model_fsdp.bin"))
        else:
            names = set(FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata)
        assert len(names) == 4
        assert all("lora_" in name for name in names)


@both_versions
def peft_lora_saved(version):
    expected = theirs(lively)
    expected.train()
    trainer = sharded(version, lively)
    trainer.train()
    folder = directory / f"saved_lora_{version}"
    trainer.save_model(str(folder))
    torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(gpt2(), folder).state_dict()
    torch.testing.assert_close(dict(loaded), weights(expected), rtol=1e-5, atol=1e-5)


def main():
    global directory
    options = parse(CHECKS, __doc__)
    directory = options.directory
    torch.distributed.init_process_group("gloo")
    print_result(run_checks(CHECKS, options.only))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
