"""Shared rows together with what else trains a model; the reference is the same run of one rank on full rows."""

import peft
import pytest
import torch

import fullshard
from fullshard import clip_grad_norm_
from fullshard.optim import Adafactor, Muon, muon_groups
from support.models import t5
from support.shared_rows import MODELS, assert_shared_rows_train_alike, checkpointed

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]


def with_lora(model):
    torch.manual_seed(1)
    targets = ["q", "v", "wo"] if model.config.model_type == "t5" else ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def muon(model):
    return Muon(muon_groups(model), lr=1e-3, ns_dtype=torch.float32)


def adafactor(model):
    return Adafactor(model.parameters(), lr=1e-3, relative_step=False)


CASES = {
    "recomputed blocks": {"change": checkpointed},
    "recomputed blocks of t5": {"make": t5, "change": checkpointed},
    "LoRA": {"change": with_lora},
    "LoRA on t5": {"make": t5, "change": with_lora},
    "clipping": {"clip": lambda model: clip_grad_norm_(model, 0.1)},
    "Adafactor": {"optimizer": adafactor},
    "Muon": {"optimizer": muon},
    "no_sync": {"context": fullshard.no_sync},
    "two groups that hold replicas": {"groups": 2, "hybrid": True},
}


SLOW = ("recomputed blocks", "LoRA")  # T5's run by default


@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in CASES])
def test_what_composes(case):
    options = {"make": MODELS["llama"], "steps": 3} | CASES[case]
    assert_shared_rows_train_alike(options.pop("make"), each=2, **options)
