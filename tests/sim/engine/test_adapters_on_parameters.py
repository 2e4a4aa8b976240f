"""peft's LoRA on parameters: forward registers a parametrization, and takes it away again."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

from fullshard import MinNumel, fully_shard
from fullshard.compat.torch_fsdp.fsdp2 import fully_shard as fsdp2
from fullshard.errors import ShardingError
from support.models import TinyLM, batches, causal_loss, lm_loss
from support.parity import alone, assert_trains_alike

pytestmark = [  # both by peft, the second before 0.21
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def experts(targets, *, checkpointed=False):
    def make():
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 3}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads, use_cache=False))
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.05)
        if checkpointed:
            model.enable_input_require_grads()
            plain = model.base_model.model
            getattr(plain, "activation_checkpointing_enable", plain.gradient_checkpointing_enable)()
        return model

    return make


def by_layers(model, comm):
    for layer in model.base_model.model.model.layers:
        fsdp2(layer, mesh=comm)
    return fsdp2(model, mesh=comm)


SHARDED = {
    "blocks": fully_shard,
    "one unit": lambda model, comm: fully_shard(model, comm, wrap=None),
    "fsdp2": by_layers,
}
MADE = {
    "one": (experts(EXPERTS[:1]), 2),
    "two": (experts(EXPERTS), 2),
    "router": (experts(["mlp.gate.weight"]), 2),
    # of one rank: parametrize's cache, which recomputing reads, is of all threads
    "checkpointed": (experts(EXPERTS, checkpointed=True), 1),
}


@pytest.mark.parametrize(
    ("made", "shard"),
    [*((made, "blocks") for made in MADE), ("two", "one unit"), *((m, "fsdp2") for m in ("router", "checkpointed"))],
)
def test_lora_on_parameters_gives_the_unsharded_run(made, shard):
    make, ranks = MADE[made]
    assert_trains_alike(
        make, lambda model, tokens: causal_loss(model, tokens % 64), ranks, steps=5, shard=SHARDED[shard]
    )


def test_experts_in_a_unit_of_their_own_are_refused_by_name():
    model = alone(experts(EXPERTS)(), wrap=MinNumel(500))
    with pytest.raises(ShardingError, match=r"experts\S*_proj, .* a wrap policy that puts"):
        causal_loss(model, batches(1, 2)[0] % 64)


def test_other_values_in_forward_are_still_refused():
    model = TinyLM()
    sharded = alone(model)

    def write(module, args):
        weight = next(module.parameters())
        weight.set_(torch.zeros_like(weight))

    model.blocks[0].register_forward_pre_hook(write)
    with torch.no_grad(), pytest.raises(ShardingError):
        lm_loss(sharded, batches(1, 2)[0])
