"""Compiled or recomputed blocks give the same outputs and gradients, and keep the names of parameters."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import T5Config, T5ForConditionalGeneration

from fullshard import fully_shard
from fullshard.core import torch_private
from fullshard.core.testing import run_ranks
from fullshard.errors import ModelError
from fullshard.program.models import (
    announce_shapes,
    blocks_of,
    build_model,
    compile_blocks,
    enable_activation_checkpointing,
    uncompiled,
)
from support.mixtures import mixture
from support.models import TinyLM, bart, gpt2, llama, t5, tiny_t5_config

LIMITS = torch_private.limits_each_function
DYNAMO = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code


def output(model, seed=0):
    tokens = torch.arange(3, 13).view(2, 5)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(input_ids=tokens, decoder_input_ids=tokens).logits


@DYNAMO
def test_compiled_blocks_keep_names_and_values():
    torch.manual_seed(0)
    model = t5()
    names = [name for name, _ in model.named_parameters()]
    expected = output(model)
    compile_blocks(model, backend="eager")
    assert [name for name, _ in model.named_parameters()] == names
    assert len([module for module in model.modules() if module._compiled_call_impl is not None]) == 4
    torch.testing.assert_close(output(model), expected)


def trained(model, data):
    """Losses of a few SGD steps, and how often the compiler had compiled and cut a graph after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, counts = [], []
    for tokens in data:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return losses, counts


@DYNAMO
@pytest.mark.parametrize(
    "make", [t5, llama, pytest.param(bart, marks=pytest.mark.slow), pytest.param(gpt2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_sharded_model_of_compiled_blocks_trains_alike_with_one_graph_a_block(make, backend):
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    data = [torch.randint(3, 40, (2, 6)) for _ in range(4)]
    expected, _ = trained(reference, data)
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend=backend)
    blocks = sum(module._compiled_call_impl is not None for module in model.modules())
    ((losses, counts),) = run_ranks(1, lambda comm: trained(fully_shard(model, comm), data))
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)
    graphs, breaks = counts[1]
    stacks = 2 if model.config.is_encoder_decoder else 1
    assert graphs <= stacks < blocks
    assert breaks <= 1  # the hooks, which are not in a graph
    assert counts[1:] == [counts[1]] * 3, "compiled again after the second step"


@DYNAMO
@pytest.mark.parametrize("when", ["before sharding", "after sharding"])
def test_blocks_that_are_alike_share_their_graphs(when):
    """The compiler gives up on a function that it has compiled eight times, so a model may have many blocks."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(tiny_t5_config(num_layers=10, num_decoder_layers=10))
    tokens = torch.randint(3, 40, (2, 6))
    torch._dynamo.reset()
    counters.clear()

    def work(comm):
        if when == "before sharding":
            compile_blocks(model, backend="eager")
        fully_shard(model, comm)
        if when == "after sharding":
            compile_blocks(model, backend="eager")
        return trained(model, [tokens] * 2)

    _, counts = run_ranks(1, work)[0]
    assert counts[-1] == (2, 1)  # one for each stack: its first block is given the bias; the hooks break the graph


@DYNAMO
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.skipif(not LIMITS, reason="old torch"))])
def test_more_shapes_are_compiled_than_the_compilers_limit_for_all(monkeypatch, each):
    monkeypatch.setattr(torch_private, "limits_each_function", each)
    torch._dynamo.reset()
    counters.clear()
    limit = torch._dynamo.config.recompile_limit
    call = torch_private.compiled(lambda x: x * 2, graphs=limit + 4, backend="eager", dynamic=False)
    for size in range(1, limit + 4):
        call(torch.ones(size))
    assert counters["stats"]["unique_graphs"] == limit + 3
    assert torch._dynamo.config.recompile_limit == limit


@DYNAMO
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("make", [t5, llama])
def test_blocks_are_compiled_for_the_announced_number_of_shapes_and_run_uncompiled_on_others(make, recomputed, caplog):
    torch.manual_seed(0)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    if recomputed:
        enable_activation_checkpointing(model.train())
    stacks = 2 if model.config.is_encoder_decoder else 1
    data = [torch.randint(3, 40, (2, tokens)) for tokens in (6, 5, 7, 6, 8, 9, 5, 10, 7)]
    expected, _ = trained(reference, data)
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend="eager")
    announce_shapes(model, 2)
    with torch.no_grad(), uncompiled(model):  # an evaluation's shapes are not counted
        model(input_ids=data[-2], labels=data[-2], use_cache=False)
    losses, counts = trained(model, data)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)
    assert [graphs for graphs, _ in counts] == [stacks, *[2 * stacks] * 8]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fullshard"]
    assert "for 2 announced shapes" in line
    assert "uncompiled" in line


@DYNAMO
def test_blocks_that_are_cut_by_their_data_are_not_compiled_again_with_every_batch(caplog):
    model = mixture("switch_transformers")  # its experts are a loop over the tokens that each one gets
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend="eager")
    announce_shapes(model, 1)
    _, counts = trained(model, [torch.randint(3, 40, (2, 6)) for _ in range(5)])
    graphs = [graphs for graphs, _ in counts]
    assert graphs[1:] == [graphs[0]] * 4
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fullshard"]
    assert f"{graphs[0]} graphs" in line


@pytest.mark.slow
@DYNAMO
def test_evaluation_compiles_nothing():
    torch.manual_seed(0)
    model = t5()
    compile_blocks(model, backend="eager")
    torch._dynamo.reset()
    counters.clear()

    def work(comm):
        sharded = fully_shard(model, comm)
        with torch.no_grad(), uncompiled(sharded):
            output(sharded)
        before = counters["stats"]["unique_graphs"]
        output(sharded)
        return before, counters["stats"]["unique_graphs"]

    before, after = run_ranks(1, work)[0]
    assert before == 0 < after


@DYNAMO
def test_a_submodule_compiled_by_itself_gathers_when_it_is_called_alone():
    torch.manual_seed(0)
    reference = t5()
    model = copy.deepcopy(reference)
    x = torch.ones(1, 3, 32)
    expected = reference.encoder.block[0].layer[1](x)
    layer = model.encoder.block[0].layer[1]
    layer.compile(backend="eager")

    def work(comm):
        fully_shard(model, comm)
        return layer(x), layer(x)

    for output in run_ranks(1, work)[0]:
        torch.testing.assert_close(output, expected)


def test_a_model_without_blocks_is_not_compiled():
    with pytest.raises(ModelError, match="Linear has no transformer blocks"):
        compile_blocks(nn.Linear(2, 2))


@DYNAMO
def test_a_module_of_a_compiled_block_is_gathered_when_another_graph_calls_it():
    rows = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    model = TinyLM(layers=2)
    expected = model.blocks[0].up(rows)

    def work(comm):
        fully_shard(model, comm)
        model.blocks[0].compile(backend="eager")
        inside = torch.compile(lambda given: model.blocks[0].up(given), backend="eager")
        return inside(rows)

    torch.testing.assert_close(run_ranks(1, work)[0], expected)


T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
}  # fmt: skip


def loss_gradients_and_calls(model, ids):
    calls = []
    model.encoder.block[0].layer[1].register_forward_pre_hook(lambda *_: calls.append(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, len(calls)


def test_gradients_are_equal_and_blocks_run_twice(tokenizer):
    ids = torch.tensor([tokenizer("My card has not arrived").input_ids])
    plain = build_model(T5, tokenizer, seed=1)
    checkpointed = build_model(T5, tokenizer, seed=1)
    enable_activation_checkpointing(checkpointed)
    loss, gradients, calls = loss_gradients_and_calls(plain, ids)
    other_loss, other_gradients, other_calls = loss_gradients_and_calls(checkpointed, ids)
    assert (calls, other_calls) == (1, 2)
    torch.testing.assert_close(loss, other_loss)
    torch.testing.assert_close(gradients, other_gradients)


def test_generation_still_works(tokenizer):
    ids = torch.tensor([tokenizer("My card has not arrived").input_ids])
    plain = build_model(T5, tokenizer, seed=1).eval()
    expected = plain.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    enable_activation_checkpointing(plain)
    assert torch.equal(plain.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)


def test_model_without_support(tokenizer):
    model = build_model(T5, tokenizer, seed=1)
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="T5ForConditionalGeneration does not support activation checkpointing"):
        enable_activation_checkpointing(model)


def recomputed(number, layers):
    model = T5ForConditionalGeneration(T5Config(**T5 | {"num_layers": layers, "vocab_size": 8}))
    enable_activation_checkpointing(model, number)
    return [place for place, block in enumerate(blocks_of(model)) if block.gradient_checkpointing]


def test_a_number_of_blocks_is_spread_over_both_stacks_and_the_deepest_comes_last():
    assert recomputed(0, 3) == []
    assert recomputed(1, 3) == [0]
    assert recomputed(2, 3) == [0, 3]
    assert recomputed(4, 3) == [0, 1, 3, 4]
    assert recomputed(5, 3) == [0, 1, 2, 3, 4]
    assert recomputed(6, 3) == recomputed(None, 3) == [0, 1, 2, 3, 4, 5]


def test_more_blocks_than_there_are():
    with pytest.raises(ModelError, match=r"7 blocks .* T5ForConditionalGeneration has 6\. .*at most 6"):
        recomputed(7, 3)
