"""What the sharding section can say, as the run it makes: units by size, shards inside machines and copies across."""

from types import SimpleNamespace

import pytest
import torch

from fullshard.core.engine import units
from fullshard.core.engine.registry import runtime_of
from fullshard.core.testing import run_ranks
from fullshard.errors import WrapError
from fullshard.program.config import RunConfig
from fullshard.program.train import train
from fullshard.program.train.dry_run import inspect_units
from fullshard.program.train.run import loop
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.setup.model import shard_model
from support.mixtures import mixture
from support.tiny_run import MODEL, Memory, settings

PLAIN = {"config": MODEL | {"dropout_rate": 0.0}, "tokenizer": {"vocab_size": 60}}


def config(directory, **changes):
    return RunConfig.model_validate(settings(directory, model=PLAIN, **changes))


def names(config, world_size=2):
    return [unit["unit"] for unit in inspect_units(config, world_size).as_dict()["units"]]


def test_units_by_size_are_the_modules_of_that_size(tmp_path):
    assert names(config(tmp_path, sharding__wrap=10**3))[0] == "(root)"
    small, large = (names(config(tmp_path, sharding__wrap=size)) for size in (1000, 2000))
    assert len(small) > len(large) > 1
    with pytest.raises(WrapError, match="choose a smaller number"):
        names(config(tmp_path, sharding__wrap=10**8))


def losses(settings, size):
    """Loss of each step, and over how many ranks a unit is sharded, of a run on threads."""

    def work(comm):
        memory = Memory()
        train(settings, comm, [memory] if comm.rank == 0 else [])
        return [report.loss for report in memory.steps]

    return run_ranks(size, work)[0]


@pytest.fixture
def untraced(monkeypatch):
    """Leave out the traced step: torch's profiler is one for all threads."""
    nothing = SimpleNamespace(ranks=[SimpleNamespace(peak_bytes=0)] * 4)
    monkeypatch.setattr(loop, "traced_step", lambda model, optimizer, comm, take: (take(), nothing))


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_shards_inside_machines_and_copies_across_train_as_shards_over_all(
    tmp_path, strategy, monkeypatch, one_at_a_time, untraced
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    short = {"training__max_steps": 2, "training__gradient_accumulation_steps": 1, "resume": "never"}
    hybrid = config(tmp_path, sharding__strategy=strategy, **short)
    ranks = run_ranks(4, lambda comm: units(assemble(hybrid, comm).model).world_size)
    assert ranks == [2] * 4
    assert losses(hybrid, 4) == pytest.approx(losses(config(tmp_path, **short), 4), rel=1e-5)


def test_a_hybrid_run_is_laid_out_over_the_ranks_of_a_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    hybrid = config(tmp_path, sharding__strategy="hybrid_shard")
    assert inspect_units(hybrid, 8).world_size == hybrid.nproc == 2


def test_routers_that_cast_themselves_stay_in_float32_and_are_trained(tmp_path):
    """In 16 bits the first step's cast stayed the router's weight for ever."""
    run = config(tmp_path, training__precision="bf16")
    models = [mixture("switch_transformers") for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        shard_model(model, run, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.arange(2, 18).view(2, 8)
        logits = []  # by a hook: transformers before 5.18 fails where the model is asked for them
        router = next(one for name, one in model.encoder.named_modules() if name.endswith("router.classifier"))
        router.register_forward_hook(lambda module, args, output: logits.append(output))
        for _ in range(2):
            (model(input_ids=x, labels=x).loss + logits[-1].square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [one.dtype for one in logits] == [torch.float32] * 2
        return [one.detach() for one in logits]

    for first, second in run_ranks(2, work):
        assert (first - second).abs().max() > 0.01


def test_a_run_rounds_the_messages_that_its_settings_say(tmp_path, one_at_a_time, untraced):
    with_messages = config(tmp_path, training__messages="bf16")

    def meshes(comm):
        made = runtime_of(assemble(with_messages, comm).model)
        return {lane.mesh.messages for unit in made.units for lane in unit.lanes}

    assert run_ranks(2, meshes) == [{"bf16"}] * 2
    exact, near = losses(config(tmp_path), 2), losses(config(tmp_path, training__messages="bf16", resume="never"), 2)
    assert exact != near
    assert near == pytest.approx(exact, rel=2.0**-8)
