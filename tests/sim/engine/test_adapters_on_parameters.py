"""peft's LoRA on parameters: forward registers a parametrization, and takes it away again."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

from fullshard import MinNumel, fully_shard
from fullshard.compat.torch_fsdp.fsdp2 import fully_shard as fsdp2
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from support.models import TinyLM, batches, causal_loss, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, replicas, train_sharded, train_unsharded

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
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
            model.base_model.model.activation_checkpointing_enable()
        return model

    return make


def by_layers(model, comm):
    for layer in model.base_model.model.model.layers:
        fsdp2(layer, mesh=comm)
    return fsdp2(model, mesh=comm)


SHARDED = {
    "blocks": lambda model, comm: fully_shard(model, comm),
    "one unit": lambda model, comm: fully_shard(model, comm, wrap=None),
    "fsdp2": by_layers,
}


@pytest.mark.parametrize("shard", SHARDED)
@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (experts(EXPERTS[:1]), 2),
        (experts(EXPERTS), 2),
        (experts(["mlp.gate.weight"]), 2),
        (experts(EXPERTS, checkpointed=True), 1),  # parametrize's cache, which recomputing reads, is of all threads
    ],
    ids=["one", "two", "router", "checkpointed"],
)
def test_lora_on_parameters_gives_the_unsharded_run(make, ranks, shard):
    reference, models = replicas(make, ranks)
    data = [tokens % 64 for tokens in batches(5, ranks * ROWS_PER_RANK)]
    plain = train_unsharded(reference, causal_loss, data)

    def work(comm):
        model = SHARDED[shard](models[comm.rank], comm)
        return train_sharded(model, comm, causal_loss, data, sharded=True)

    for run in run_ranks(ranks, work):
        assert_same_run(run, plain)


def test_experts_in_a_unit_of_their_own_are_refused_by_name():
    def work(comm):
        model = fully_shard(experts(EXPERTS)(), comm, wrap=MinNumel(500))
        with pytest.raises(ShardingError, match=r"experts\S*_proj, .* a wrap policy that puts"):
            causal_loss(model, batches(1, 2)[0] % 64)

    run_ranks(1, work)


def test_other_values_in_forward_are_still_refused():
    def work(comm):
        model = TinyLM()
        sharded = fully_shard(model, comm)

        def write(module, args):
            weight = next(module.parameters())
            weight.set_(torch.zeros_like(weight))

        model.blocks[0].register_forward_pre_hook(write)
        with torch.no_grad(), pytest.raises(ShardingError):
            lm_loss(sharded, batches(1, 2)[0])

    run_ranks(1, work)
