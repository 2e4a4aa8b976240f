"""Runs of Hugging Face's trainers (DDP on CPU) and of fullshard's, on gloo processes."""

import argparse
import copy
import functools
import os
import re
import sys
import types
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
from transformers.distributed import DistributedConfig
from transformers.integrations import liger

import fullshard
from fullshard.compat import transformers as ours
from fullshard.compat.accelerate import Accelerator, FullyShardedDataParallelPlugin, utils
from fullshard.compat.torch_fsdp import FullyShardedDataParallel, fully_shard
from fullshard.core.comm import MemoryMeter
from fullshard.core.engine.setup import wrap
from fullshard.errors import ConfigError, ProcessGroupError, WrapError
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


def untied(seed=0):
    torch.manual_seed(seed)
    config = gpt2().config
    config.tie_word_embeddings = False
    return GPT2LMHeadModel(config)


def one_import_with_liger():
    """A kernel that takes the head's weight, in place of the package, which needs a GPU."""
    expected = reference(untied)
    ask_for_nothing()

    def forward(self, input_ids, labels, num_items_in_batch=None, **_):
        hidden = self.transformer(input_ids=input_ids).last_hidden_state[:, :-1]
        logits = torch.nn.functional.linear(hidden, self.lm_head.weight).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return {"loss": total / (num_items_in_batch or len(logits))}

    def apply(model, **_):
        model.forward = types.MethodType(forward, model)

    package, kernels = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap, "LARGE_NUMEL", 1000)
        patch.setattr(liger, "is_liger_kernel_available", lambda: False)
        with pytest.raises(ImportError, match="pip install liger-kernel"):
            make(ours, untied, use_liger_kernel=True).train()
        patch.setitem(sys.modules, "liger_kernel", package)
        patch.setitem(sys.modules, "liger_kernel.transformers", kernels)
        patch.setattr(liger, "is_liger_kernel_available", lambda: True)
        same(trained(make(ours, untied, use_liger_kernel=True)), expected)


def loaded_in_parts():
    """What transformers has divided over ranks by torch's FSDP2 is refused by each face, and not trained by torch's."""
    if "fsdp_plan" not in DistributedConfig.__dataclass_fields__:
        return  # transformers before 5.23
    path = directory / "in_parts"
    if torch.distributed.get_rank() == 0:
        untied().save_pretrained(path)
    torch.distributed.barrier()
    plan = {"transformer.h.*": "free_full_weight"}

    def loaded():
        return GPT2LMHeadModel.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2, fsdp_plan=plan))

    ask_for_nothing()
    faces = {
        "trainer": lambda: make(ours, loaded, max_grad_norm=0.0).train(),
        "model_init": lambda: make(ours, lambda: None, more={"model_init": loaded}).train(),
        "trainer, version 1": lambda: sharded(1, loaded),
        "trainer, version 2": lambda: sharded(2, loaded),
        "accelerator": lambda: Accelerator(mixed_precision="bf16").prepare(loaded()),
        "version 1": lambda: FullyShardedDataParallel(loaded()),
        "native": lambda: fullshard.fully_shard(loaded()),
    }
    for name, face in faces.items():
        refusal = ProcessGroupError if name == "native" else WrapError  # it takes what another axis divides
        with pytest.raises(refusal, match=r"is a DTensor.* leave out .*distributed_config="):
            print(name, face())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.distributed.fsdp, "fully_shard", fully_shard)  # as after compat.redirect()
        with pytest.raises(ConfigError, match=r"from_pretrained\(distributed_config"):
            loaded()


class Measured(transformers.TrainerCallback):
    """Ends a measurement when the model is prepared, before the first step."""

    def __init__(self):
        self.meter = MemoryMeter(torch.device("cpu"))

    def on_train_begin(self, args, state, control, **_):
        self.meter.__exit__(None, None, None)


@both_versions
def loaded_on_rank_0_only(version):
    """As a script that loads on rank 0: rank 1 never holds the full model, but its half, and a unit of 12 at a time."""
    path = directory / f"loaded_{version}"
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=64, n_layer=12, n_head=2, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(3)
    plain, first = GPT2LMHeadModel(config), torch.distributed.get_rank() == 0
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    size = sum(param.nbytes for param in plain.parameters())
    if first:
        plain.save_pretrained(path)
    torch.distributed.barrier()
    measured = Measured()
    ask_for_nothing()
    settings = SETTINGS | {"output_dir": str(directory / "out"), "max_steps": 1, "learning_rate": 0.0}
    asked = {"version": version, "cpu_ram_efficient_loading": True}
    args = transformers.TrainingArguments(fsdp=True, fsdp_config=asked, **settings)
    measured.meter.__enter__()  # the callback ends it
    with torch.device("cpu" if first else "meta"):
        model = GPT2LMHeadModel.from_pretrained(path) if first else GPT2LMHeadModel(config)
    trainer = ours.Trainer(model=model, args=args, train_dataset=rows(8), callbacks=[measured])
    trainer.train()
    held = (measured.meter.peak_bytes - measured.meter.start_bytes) / size
    assert held > 1 if first else 0.5 < held < 0.7, held
    found = weights(trainer)
    if first:
        torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=0)


class Pair(torch.nn.Module):
    """No list of blocks, and nothing that would be a block."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(720, 720), torch.nn.Tanh())
        self.decoder = torch.nn.Bilinear(8, 8, 10_000)


def one_unit_is_told():
    """In the words of the road that the script took, which work."""
    ask_for_nothing()
    trainer = make(ours, Pair)
    with pytest.warns(UserWarning, match=r"All 1,169,120 parameters of Pair are one.*TrainingArguments\(fsdp=True"):
        trainer.accelerator.prepare_model(trainer.model)
    trainer = make(ours, Pair, fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["Sequential"]})
    model = trainer.accelerator.prepare_model(trainer.model)
    assert "encoder" in [row.unit for row in fullshard.units(trainer.accelerator.unwrap_model(model)).rows]
    plugin = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Sequential"]}
    with pytest.warns(UserWarning, match=r"FullyShardedDataParallelPlugin\(auto_wrap_policy="):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(Pair())
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
    model = accelerator.prepare(Pair())
    assert "encoder" in [row.unit for row in fullshard.units(accelerator.unwrap_model(model)).rows]
    ask_for_nothing()
    trainer = make(ours, Pair, torch_compile=True)
    with pytest.raises(ConfigError, match=r"no units inside. Name their classes: TrainingArguments\(fsdp=True"):
        trainer.accelerator.prepare_model(trainer.model)


@both_versions
def labels_of_unequal_number(version):
    """The mean over all tokens of a step, on all ranks and in all three batches; an epoch is one step of 12 rows."""
    data = rows(12)
    for number, row in enumerate(data):
        row["labels"] = row["labels"].clone()
        row["labels"][: 1 + number % 6] = -100  # the first has no prediction
    plain = gpt2()
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.5), []
    for _ in range(3):
        batch = {key: torch.stack([row[key] for row in data]) for key in ("input_ids", "labels")}
        logits = plain(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        expected.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    options = {"gradient_accumulation_steps": 3, "max_steps": 3, "max_grad_norm": 1e9, "lr_scheduler_type": "constant"}
    trainer = sharded(version, **(SGD | options))
    trainer.train_dataset = data
    trainer.train()
    logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    assert logs == [pytest.approx(one, rel=1e-5) for one in expected]
    if torch.distributed.get_rank() == 0:
        torch.testing.assert_close(weights(trainer), dict(plain.state_dict()), rtol=0, atol=1e-5)
    else:
        weights(trainer)


class Stopping(transformers.TrainerCallback):
    """Interrupts a run after each second step that it takes, when it has saved."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step % 2 == 0


@both_versions
def stopped_twice_in_an_epoch(version):
    """And resumed: each row of the epoch is trained once."""
    folder, seen = directory / f"stopped_twice_{version}", []
    for number in range(3):
        callbacks = [] if number == 2 else [Stopping()]
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": -1, "num_train_epochs": 1}
        trainer = sharded(version, callbacks=callbacks, output_dir=str(folder), **options)
        trainer.train_dataset = rows(24)
        for index, row in enumerate(trainer.train_dataset):
            row["input_ids"][0] = index
        step = trainer.training_step

        def training_step(model, inputs, *rest, step=step):
            seen.extend(inputs["input_ids"][:, 0].tolist())
            return step(model, inputs, *rest)

        trainer.training_step = training_step
        trainer.train(resume_from_checkpoint=number > 0)
        assert trainer.state.global_step == 2 * (number + 1)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, seen)
    assert [len(one) for one in everyone] == [12, 12]
    assert sorted(everyone[0] + everyone[1]) == list(range(24))


@both_versions
def adapters_of_each_rank(version):
    """With ``adapter_only``, a file has the rows that each rank holds, here marked by its number."""
    for kind in ("FULL", "SHARDED"):
        trainer = sharded(version, lively, config={"state_dict_type": f"{kind}_STATE_DICT"})
        accelerator, folder = trainer.accelerator, directory / f"marked_{kind}_{version}"
        model = accelerator.prepare_model(trainer.model)
        trained = [param for param in model.parameters() if param.requires_grad]
        with torch.no_grad():
            for param in trained:
                param.fill_(torch.distributed.get_rank() + 1.0)
        expected = {param.shard_meta.name: param.full_tensor() for param in trained}
        places = [None, None]
        torch.distributed.all_gather_object(places, {p.shard_meta.name: p.shard_meta.row_range for p in trained})
        for name, value in expected.items():
            for rank, of in enumerate(places):
                assert (value[slice(*of[name])] == rank + 1.0).all(), name
        plugin = accelerator.state.fsdp_plugin
        utils.save_fsdp_model(plugin, accelerator, model, str(folder), adapter_only=True)
        with torch.no_grad():
            for param in trained:
                param.zero_()
        utils.load_fsdp_model(plugin, accelerator, model, str(folder), adapter_only=True)
        for param in trained:
            assert torch.equal(param.full_tensor(), expected[param.shard_meta.name])


CHECKS |= {
    "one_unit_is_told": one_unit_is_told,
    "two_at_once": two_at_once,
    "one_import": one_import,
    "one_import_with_liger": one_import_with_liger,
    "loaded_in_parts": loaded_in_parts,
}


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
    configs = [
        {"transformer_layer_cls_to_wrap": ["GPT2Block"]},
        {"transformer_layer_cls_to_wrap": ["LayerNorm", "Conv1D"]},
        {"min_num_params": 1000},
        {"transformer_layer_cls_to_wrap": ["GPT2Block"], "activation_checkpointing": True},
    ]
    for config in configs if version == 1 else configs[1:2]:  # version 1 is slow
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
