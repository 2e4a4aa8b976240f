"""Sharding from CPU and from the meta device, the unit table, and the fused weight gradients."""

import weakref

import pytest
import torch
from torch import nn
from transformers import T5ForConditionalGeneration

from fullshard import fully_shard, units, unsharded
from fullshard.core.comm.device import Device
from fullshard.core.testing import run_ranks
from fullshard.errors import WrapError
from support.models import TinyLM, batches, causal_loss, llama, lm_loss, seq2seq_loss, t5, tiny_t5_config
from support.parity import alone, on_ranks, replicas


def test_a_meta_model_gets_the_same_values_on_every_rank_and_trains():
    def work(comm):
        with torch.device("meta"):
            model = TinyLM()
        model = fully_shard(model, comm)
        with unsharded(model):
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
        lm_loss(model, batches(1, 2)[0]).backward()
        return values

    first, second = run_ranks(2, work)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.isfinite().all()
    assert first["embed.weight"].std() > 0.05
    assert torch.equal(first["blocks.0.norm.weight"], torch.ones(24))


def test_a_hugging_face_meta_model_is_initialised_as_its_class_says():
    def work(comm):
        with torch.device("meta"):
            model = T5ForConditionalGeneration(tiny_t5_config(d_model=64))
        model = fully_shard(model, comm)
        assert torch.isfinite(seq2seq_loss(model, batches(1, 2)[0]))
        with unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    values, _ = run_ranks(2, work)
    assert torch.equal(values["encoder.final_layer_norm.weight"], torch.ones(64))
    expected = (64 * 8) ** -0.5  # T5's factor for queries
    assert values["encoder.block.0.layer.0.SelfAttention.q.weight"].std().item() == pytest.approx(expected, rel=0.1)


def test_a_meta_module_that_cannot_initialise_itself_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(WrapError, match=r"nothing initializes scale: Bare has no reset_parameters"):
        alone(model, wrap=None)


def test_meta_attention_takes_torchs_own_first_values():
    def work(comm):
        with torch.device("meta"):
            model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = fully_shard(model, comm, wrap=None)
        with unsharded(model):
            attention = model.self_attn
            assert not attention.in_proj_bias.any()
            assert not attention.out_proj.bias.any()
            return attention.in_proj_weight.detach().clone()

    one, two = run_ranks(2, work)
    limit = (6 / (16 + 48)) ** 0.5  # xavier_uniform_
    assert torch.equal(one, two)
    assert limit * 0.9 < one.abs().max().item() <= limit


def test_the_allocator_is_trimmed_once_the_full_parameters_are_freed(monkeypatch):
    model = TinyLM()
    full = [weakref.ref(param.untyped_storage()) for param in model.parameters()]
    left = []
    monkeypatch.setattr(Device, "trim", lambda _: left.append(sum(storage() is not None for storage in full)))
    run_ranks(1, lambda comm: fully_shard(model, comm))
    assert left == [0]


def test_the_allocator_is_trimmed_once_bottom_up(monkeypatch):
    model = TinyLM()
    trims = []
    monkeypatch.setattr(Device, "trim", lambda _: trims.append(len(blocks)))
    blocks = []

    for block in model.blocks:
        blocks.append(alone(block, wrap=None))
    alone(model)
    assert len(blocks) == 4
    assert trims == [4], "after the blocks, by the root"


def test_the_table_has_a_line_for_each_run_of_alike_units():
    def work(comm, model):
        assert "encoder.block.0" in repr(model)
        assert type(model).__name__ == "T5ForConditionalGeneration"
        return units(model)

    table, other = on_ranks(2, t5, work)
    assert str(table) == str(other)
    assert [row.unit for row in table.rows][:2] == ["(root)", "encoder.block.0"]
    total = sum(p.numel() for p in t5().parameters())
    assert sum(row.parameters for row in table.rows) == total
    assert f"{total:,}" in str(table).splitlines()[-1]
    assert table.as_dict()["world_size"] == 2
    assert 4 * total / 2 <= sum(row.shard_bytes for row in table.rows) <= 1.05 * 4 * total / 2


def test_no_weight_sized_gradient_is_made_outside_the_lane():
    """The fused gradients leave nothing for autograd to accumulate in plain linear and embedding weights."""
    _, (model,) = replicas(t5, 1)

    alone(model)
    accumulated = []
    for _, param in model._fullshard_runtime.all_params():
        with unsharded(model):

            def seen(grad, name=param.meta.name):
                if grad is not None:
                    accumulated.append(name)

            param.full.register_hook(seen)
    seq2seq_loss(model, batches(1, 2)[0]).backward()
    assert accumulated
    # what is left are norms; T5's relative position bias and every projection go straight into the lane
    assert all("layer_norm" in name for name in accumulated), accumulated


def test_padding_rows_get_no_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4, padding_idx=2)

        def forward(self, x):
            return self.embed(x)

    torch.manual_seed(0)
    model = alone(Model(), wrap=None)
    model(torch.tensor([1, 2, 2, 5, 5])).sum().backward()
    grad = model.embed.weight.grad
    assert grad[:, 0].tolist() == [0, 1, 0, 0, 0, 2]


def test_a_meta_buffer_that_nothing_sets_is_refused_and_modules_with_buffers_only_are_initialised():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)

        def reset_parameters(self):
            self.table.copy_(torch.arange(4.0))

    class Model(nn.Module):
        def __init__(self, forgetful):
            super().__init__()
            self.rotary = Rotary()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            if forgetful:
                self.blocks[0].register_buffer("scale", torch.ones(3))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x + self.rotary.table))

    with torch.device("meta"):
        models = Model(forgetful=False), Model(forgetful=True)
    model = alone(models[0])
    assert model(torch.ones(2, 4)).isfinite().all()
    assert model.rotary.table.tolist() == [0, 1, 2, 3]
    with pytest.raises(WrapError, match="scale of Linear"):
        alone(models[1])


def test_a_llama_on_the_meta_device():
    def work(comm):
        with torch.device("meta"):
            model = llama()
        model = fully_shard(model, comm)
        loss = causal_loss(model, batches(1, 2)[0])
        loss.backward()
        return loss.item()

    first, second = run_ranks(2, work)
    assert first == second
    assert 3 < first < 5  # ln(50) = 3.9
