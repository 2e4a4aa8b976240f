"""Runs of TRL's trainers (DDP on CPU), and the same after ``install()``, on gloo processes."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from support.rank_script import parse, print_result, run_checks
from support.trained_tokenizer import byte_tokenizer
from support.trainers import SETTINGS, STEPS, Stop, ask_for_nothing, both_versions_of, installed, same, trained

CHECKS = {}
both_versions = both_versions_of(CHECKS)
directory = Path()  # main sets it
STARTS = [f"{who} {where} " for who in ("cats", "dogs", "fish", "birds") for where in ("here", "there", "afar", "near")]
SFT = (SFTTrainer, SFTConfig, {"text": [f"{start}sleep well" for start in STARTS]})
DPO = (
    DPOTrainer,
    DPOConfig,
    {"prompt": STARTS, "chosen": ["sleep"] * len(STARTS), "rejected": ["run off"] * len(STARTS)},
)
KTO = (
    KTOTrainer,
    KTOConfig,
    {
        "prompt": STARTS,
        "completion": ["sleep", "run off"] * (len(STARTS) // 2),
        "label": [True, False] * (len(STARTS) // 2),
    },
)
GRPO = (GRPOTrainer, GRPOConfig, {"prompt": STARTS})
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "init_lora_weights": False}


def llama(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, pad_token_id=0, **sizes))


GENERATING = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "per_device_eval_batch_size": 2}


def vowels(completions, **_):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def make(what, lora=False, seed=0, path=None, reference=None, callbacks=(), **options):
    """A trainer of TRL in ``directory``."""
    trainer, config, columns = what
    settings = SETTINGS | {"output_dir": str(directory / "out"), "bf16": False}
    settings |= GENERATING if config is GRPOConfig else {"max_length": 40}
    args = config(**(settings | options))
    model = llama(0 if lora else seed) if path is None else str(path)
    torch.manual_seed(seed)  # the adapter's first values
    more = {"peft_config": LoraConfig(task_type="CAUSAL_LM", **LORA)} if lora else {}
    if reference is not None:
        more["ref_model"] = llama(reference)
    if trainer is GRPOTrainer:
        more["reward_funcs"] = vowels
    data = Dataset.from_dict(columns)
    return trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=byte_tokenizer(),
        callbacks=list(callbacks),
        **more,
    )


def theirs(*args, **options):
    ask_for_nothing()
    return make(*args, **options)


def sharded(version, *args, config=None, **options):
    with installed():
        return make(*args, fsdp=True, fsdp_config={"version": version, **(config or {})}, **options)


def all_sharded(model):
    return all(hasattr(param, "shard_meta") for param in model.parameters())


def resumed(version, name, *args, **options):
    """Logs of a run that was interrupted, and went on from its sharded checkpoint with a model of other values."""
    options |= {"save_strategy": "steps", "save_steps": STEPS // 2, "output_dir": str(directory / f"{name}_{version}")}
    options["config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
    sharded(version, *args, callbacks=[Stop()], **options).train()
    return trained(sharded(version, *args, seed=5, **options), resume_from_checkpoint=True)


def weights(model):
    return dict(model.state_dict())


@both_versions
def sft(version):
    library = theirs(SFT)
    expected = trained(library)
    trainer = sharded(version, SFT)
    same(trained(trainer), expected)
    assert all_sharded(trainer.model)
    folder = directory / f"sft_saved_{version}"
    trainer.save_model(str(folder))
    torch.distributed.barrier()
    loaded = LlamaForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(weights(loaded), weights(library.model), rtol=1e-4, atol=1e-4)
    same(resumed(version, "sft", SFT), expected)


@both_versions
def sft_lora(version):
    library = theirs(SFT, lora=True)
    expected = trained(library)
    trainer = sharded(version, SFT, lora=True)
    same(trained(trainer), expected)
    assert all_sharded(trainer.model)
    folder = directory / f"sft_lora_saved_{version}"
    trainer.save_model(str(folder))
    torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(llama(), folder)
    torch.testing.assert_close(weights(loaded), weights(library.model), rtol=1e-4, atol=1e-4)
    same(resumed(version, "sft_lora", SFT, lora=True), expected)


@both_versions
def dpo(version):
    """Its reference model is sharded, too."""
    expected = trained(theirs(DPO, reference=3))
    trainer = sharded(version, DPO, reference=3)
    assert all_sharded(trainer.ref_model)
    assert not trainer.ref_model.training
    same(trained(trainer), expected)
    assert all_sharded(trainer.model)
    same(resumed(version, "dpo", DPO, reference=3), expected)


@both_versions
def dpo_lora(version):
    expected = trained(theirs(DPO, lora=True))
    trainer = sharded(version, DPO, lora=True)
    same(trained(trainer), expected)
    assert all_sharded(trainer.model)


@both_versions
def kto(version):
    expected = trained(theirs(KTO, reference=3))
    trainer = sharded(version, KTO, reference=3)
    assert all_sharded(trainer.ref_model)
    same(trained(trainer), expected)


@both_versions
def grpo(version):
    """It generates in training."""
    expected = trained(theirs(GRPO, lora=True))
    assert any(log.get("grad_norm") for log in expected)
    trainer = sharded(version, GRPO, lora=True)
    same(trained(trainer), expected)
    assert all_sharded(trainer.model)


@both_versions
def grpo_reference(version):
    """From a directory, from which TRL loads the reference model as well."""
    path = directory / f"llama_{version}"
    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(path)
    torch.distributed.barrier()
    expected = trained(theirs(GRPO, path=path))
    trainer = sharded(version, GRPO, path=path)
    assert all_sharded(trainer.ref_model)
    same(trained(trainer), expected)
    assert all_sharded(trainer.model)


def main():
    global directory
    options = parse(CHECKS, __doc__)
    directory = options.directory
    disable_progress_bars()
    torch.distributed.init_process_group("gloo")
    print_result(run_checks(CHECKS, options.only))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
