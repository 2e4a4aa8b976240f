"""A run of compiled blocks: fixed shapes, equal losses and weights, and nothing compiled after the first epoch."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from fullshard import unsharded
from fullshard.program.config import load_run
from fullshard.program.data import steps
from fullshard.program.models import compile_blocks
from fullshard.program.models.blocks import MOST_GRAPHS
from fullshard.program.speed import compiled
from fullshard.program.train import Sink
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.run.step import StepSpec, issue_step
from fullshard.program.train.setup.prepare import prepare
from support.alone import alone, finish
from support.mixtures import CONFIGS
from support.planned import write_run
from support.tiny_run import Memory

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]  # torch's compiler warns about its code

T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 32, "intermediate_size": 64}
MODELS = {"t5": T5, "llama": LLAMA}
ROWS = {
    "rows": {"per_device_train_batch_size": 3},
    "tokens": {"per_device_train_batch_size": None, "per_device_train_batch_tokens": 60},
    "packed": {"per_device_train_batch_size": 4, "packing": True},
}
FAST = (("t5", "rows"), ("llama", "packed"))


def trained(config):
    """Losses and weights after four epochs, and how many graphs were compiled by the end of each."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    parts = assemble(config, alone(), prepare(config))
    parts.model.train()
    spec = StepSpec(1, 0.0, 1e-3, 1.0, parts.collate.causal)
    epochs = [steps(parts.train_set, parts.plan.for_epoch(epoch), 0, parts.collate) for epoch in range(4)]
    losses, graphs = [], []
    for epoch in epochs:
        for batches in epoch:
            losses.append(issue_step(parts.model, parts.optimizer, batches, parts.comm, spec).report().loss)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(losses) >= 10
    with unsharded(parts.model):
        weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    return losses, weights, graphs, parts


def config_of(directory, model, **training):
    values = {f"training__{name}": value for name, value in training.items()}
    # Rows of one step are those of the plan either way, so only padding and fillers differ.
    path = write_run(directory, model={"config": model, "tokenizer": {"vocab_size": 60}}, **values)
    return load_run(path, ["training.precision=fp32"])


def assert_equal_to_uncompiled(config):
    compiling = config.model_copy(update={"training": config.training.model_copy(update={"torch_compile": True})})
    expected, expected_weights, none, _ = trained(config)
    losses, weights, graphs, parts = trained(compiling)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)
    assert none == [0, 0, 0, 0]
    assert 0 < graphs[0] == graphs[3], "compiled again after the first epoch"
    return graphs[0], parts


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        pytest.param(model, rows, marks=[] if (model, rows) in FAST else pytest.mark.slow)
        for model in MODELS
        for rows in ROWS
    ],
)
def test_losses_and_weights_are_those_of_uncompiled_blocks_and_natural_batches(tmp_path, monkeypatch, model, rows):
    monkeypatch.setattr(compiled, "compile_blocks", partial(compile_blocks, backend="eager"))
    graphs, parts = assert_equal_to_uncompiled(config_of(tmp_path, MODELS[model], **ROWS[rows]))
    stacks = 2 if model == "t5" else 1
    assert graphs <= stacks * len(parts.collate.shapes)
    (note,) = [line for line in parts.notes if line.startswith("training batches")]
    assert "without the fixed shapes that blocks are compiled for" in note


MIXTURE = {**CONFIGS["mixtral"], "model_type": "mixtral"}
MIXTURE = {name: value for name, value in MIXTURE.items() if not name.endswith("token_id") and name != "vocab_size"}


@pytest.mark.slow
def test_fifteen_steps_of_rows_of_many_lengths_compile_at_most_the_announced_shapes(tmp_path, monkeypatch, caplog):
    """A mixture of experts that trains its routers' loss gets no filler rows, so its micro-batches have more shapes."""
    monkeypatch.setattr(compiled, "compile_blocks", partial(compile_blocks, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    told = Memory()
    rows = {"per_device_train_batch_size": None, "per_device_train_batch_tokens": 60, "max_steps": 15}
    config = config_of(tmp_path, MIXTURE, torch_compile=True, eval_strategy="no", num_train_epochs=None, **rows)
    model = config.model.model_copy(update={"output_router_logits": True})
    finish(config.model_copy(update={"model": model}), told)
    (note,) = [line for line in told.begun[0].notes if line.startswith("training batches")]
    announced = note.partition("compiled for (")[2].partition(")")[0].split(", ")
    assert len(told.steps) == 15
    # transformers' hook on the routers cuts a block into several graphs.
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS * len(announced)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fullshard"]
    assert f"for {len(announced)} announced" in line


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("model", MODELS)
def test_by_inductor(tmp_path, model, more):
    assert_equal_to_uncompiled(config_of(tmp_path, MODELS[model], **ROWS["rows"], **more))


def test_a_run_tells_what_it_compiles_and_for_how_long(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "compile_blocks", partial(compile_blocks, backend="eager"))
    torch._dynamo.reset()
    told = []

    class Told(Sink):
        def compiling(self, graphs, seconds, *, late_after=None):
            told.append((graphs, seconds, late_after))

    config = config_of(tmp_path, LLAMA, torch_compile=True, eval_strategy="no", num_train_epochs=2)
    summary = finish(config, Told())
    assert [late for *_, late in told] == [None] * len(told)
    assert told == sorted(told)
    assert 0 < summary.compile_seconds == pytest.approx(told[-1][1])
