"""Runs of Hugging Face's trainers (DDP on CPU) and of fullshard's, on gloo processes."""

import argparse
import copy
import functools
import os
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import transformers
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import GPT2Config, GPT2LMHeadModel, T5ForConditionalGeneration

import fullshard
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


def one_import():
    expected = reference()
    ask_for_nothing()
    trainer = make(ours)
    same(trained(trainer), expected)
    rows = fullshard.units(trainer.accelerator.unwrap_model(trainer.model)).rows
    assert [row.unit for row in rows] == ["(root)", "transformer.h.0", "transformer.h.1"]


CHECKS |= {"two_at_once": two_at_once, "one_import": one_import}


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


@both_versions
def labels_smoothed(version):
    """The library shifts the labels of a causal model, which it knows by the name of its class."""
    options = {"label_smoothing_factor": 0.1}
    expected = reference(**options)
    assert expected[0]["loss"] != pytest.approx(reference()[0]["loss"], rel=1e-4)
    same(trained(sharded(version, **options)), expected)


@both_versions
def named_as_itself(version):
    """Also in the model's card, where its task follows from the name of its class."""
    cards = []
    for kind in (theirs, functools.partial(sharded, version)):
        folder, more = directory / f"card_{version}_{len(cards)}", {"compute_metrics": lambda _: {"accuracy": 0.5}}
        trainer = kind(output_dir=str(folder), more=more)
        trainer.train()
        trainer.evaluate()
        trainer.create_model_card(dataset_tags="a", dataset="a")
        torch.distributed.barrier()
        cards.append(re.findall("type: (.*)", (folder / "README.md").read_text()))
    assert "text-generation" in cards[0]
    assert cards[1] == cards[0]
    inner = trainer.accelerator.unwrap_model(trainer.model)
    assert type(inner).__name__ == "GPT2LMHeadModel"
    assert sum(type(one).__name__ == "GPT2Block" for one in inner.modules()) == 2


def groups(trainer):
    """Names of the parameters of each of the optimizer's groups; a shard's name is the unsharded parameter's."""
    trainer.create_optimizer()
    names = {param: name for name, param in trainer.model.named_parameters()}
    names |= {param: param.shard_meta.name for param in names if hasattr(param, "shard_meta")}
    return [(group["weight_decay"], [names[p] for p in group["params"]]) for group in trainer.optimizer.param_groups]


class Grouping(ours.Trainer):
    """As scripts write it, with the library's function for names."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            names = transformers.trainer_pt_utils.get_parameter_names(self.model, [torch.nn.LayerNorm])
            decayed = {name for name in names if "bias" not in name}
            named = list(self.model.named_parameters())
            one = {"params": [param for name, param in named if name in decayed], "weight_decay": 0.5}
            other = {"params": [param for name, param in named if name not in decayed], "weight_decay": 0.0}
            self.optimizer = torch.optim.AdamW([one, other], lr=self.args.learning_rate)
        return self.optimizer


@both_versions
def weight_decay(version):
    """Reaches the same parameters whatever is wrapped."""
    options = {"weight_decay": 0.5}
    trainer = theirs(**options)
    expected = groups(trainer)
    assert [len(names) for _, names in expected] == [10, 18]
    logs = trained(trainer)
    for config in (
        {"transformer_layer_cls_to_wrap": ["GPT2Block"]},
        {"transformer_layer_cls_to_wrap": ["LayerNorm", "Conv1D"]},
        {"min_num_params": 1000},
        {"transformer_layer_cls_to_wrap": ["GPT2Block"], "activation_checkpointing": True},
    ):
        trainer = sharded(version, config=config, **options)
        same(trained(trainer), logs)
        assert groups(trainer) == expected, config
    trainer = sharded(version, config={"transformer_layer_cls_to_wrap": ["GPT2Block"]}, **options)
    trainer.evaluate()  # the model is wrapped already when the optimizer is created
    same(trained(trainer), logs)
    for kind in ("evaluated", "not evaluated"):
        trainer = make(argparse.Namespace(Trainer=Grouping), fsdp=True, fsdp_config={"version": version}, **options)
        if kind == "evaluated":
            trainer.evaluate()
        same(trained(trainer), logs)


def classifier():
    torch.manual_seed(0)
    config = gpt2().config
    config.pad_token_id, config.num_labels = 0, 3
    return transformers.GPT2ForSequenceClassification(config)


ADAPTERS = {
    "prompt": (gpt2, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "prefix": (gpt2, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True)),
    "p_tuning": (gpt2, PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)),
    "head": (classifier, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True)),
    "embeddings": (
        gpt2,
        LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte", "ln_f"]),
    ),
}


def adapted(name):
    model, config = ADAPTERS[name]
    torch.manual_seed(3)
    return get_peft_model(model(), copy.deepcopy(config))


def adapter_of(kind, name, folder, **options):
    """The tensors that a trainer saves, and the loss of the model that was loaded from them."""
    options |= SGD | {"output_dir": str(folder)}
    trainer = kind(functools.partial(adapted, name), **options)
    if name == "head":
        for data in (trainer.train_dataset, trainer.eval_dataset):
            for number, row in enumerate(data):
                row["labels"] = number % 3
    logs = trained(trainer)
    trainer.save_model(str(folder))
    torch.distributed.barrier()
    return logs, load_file(folder / "adapter_model.safetensors")


@both_versions
def adapters_saved(version):
    """Also where peft runs a prompt's encoder on rank 0 alone, or asks a module there for its state."""
    for name in ADAPTERS:
        logs, expected = adapter_of(theirs, name, directory / f"{name}_theirs")
        found_logs, found = adapter_of(functools.partial(sharded, version), name, directory / f"{name}_{version}")
        same(found_logs, logs)
        assert found.keys() == expected.keys(), name
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        untrained = get_peft_model_state_dict(adapted(name))
        assert any(not torch.equal(expected[key], untrained[key]) for key in expected), name


def main():
    global directory
    options = parse(CHECKS, __doc__)
    directory = options.directory
    torch.distributed.init_process_group("gloo")
    print_result(run_checks(CHECKS, options.only))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
