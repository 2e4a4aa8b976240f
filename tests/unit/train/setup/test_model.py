"""The model of a run: read shard by shard where that can be, else loaded in full; and sharded as the settings say."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard import unsharded
from fullshard.core.comm import planned_memory
from fullshard.core.engine import units
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ModelError, WrapError
from fullshard.program.config import RunConfig
from fullshard.program.models import fused_head_of, load_model, load_tokenizer
from fullshard.program.train import train
from fullshard.program.train.dry_run import inspect_units
from fullshard.program.train.run import loop
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.setup import model as modelling
from fullshard.program.train.setup.model import make_model, prepare_model, shard_model
from fullshard.program.train.setup.prepare import prepare_tokenizer
from fullshard.state.saving import Pretrained
from support.alone import alone
from support.mixtures import mixture
from support.tiny_run import MODEL, Memory, settings


@pytest.fixture
def saved(tmp_path):
    """A run on the directory of a model, and that directory."""
    values = settings(tmp_path)
    made = RunConfig.model_validate(values)
    tokenizer = prepare_tokenizer(made)
    make_model(made, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return RunConfig.model_validate(values | {"model": {"path": str(tmp_path / "model")}}), tmp_path / "model"


def test_a_t5_attends_eagerly_on_a_gpu_or_in_its_plan_and_is_saved_as_before(saved, tmp_path):
    config, directory = saved
    comm, tokenizer = alone(), load_tokenizer(directory)
    for memory, attention in ((None, "sdpa"), (1 << 34, "eager")):
        with planned_memory(memory):
            model = prepare_model(config, tokenizer).model
            shard_model(model, config, comm, weights=Pretrained(directory))
        assert {part.config._attn_implementation for part in (model.encoder, model.decoder)} == {attention}
    before = json.loads((directory / "config.json").read_text())
    assert json.loads(model.config.to_json_string(use_diff=False)).get("attn_implementation") is None
    model.config.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == before


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def weights_by_rank(config, size=2):
    def work(comm):
        parts = assemble(config, comm)
        with unsharded(parts.model):
            return {n: p.detach().clone() for n, p in parts.model.named_parameters()}, parts.notes, parts.parameters

    return run_ranks(size, work)


def assert_loaded(results, directory):
    expected = load_model(directory, load_tokenizer(directory))
    for found, _, parameters in results:
        assert parameters == sum(p.numel() for p in expected.parameters())
        assert found.keys() == dict(expected.named_parameters()).keys()
        assert all(torch.equal(found[name], p) for name, p in expected.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_by_shard_and_equal_from_pretrained(saved, dtype, monkeypatch, one_at_a_time):
    config, directory = saved

    def cast(tensors):
        tensors.update({name: value.to(dtype) for name, value in tensors.items()})

    rewrite(directory, cast)
    expected = load_model
    monkeypatch.setattr(modelling, "load_model", None)
    results = weights_by_rank(config)
    assert not [note for _, notes, _ in results for note in notes if "loaded in full" in note]
    monkeypatch.setattr(modelling, "load_model", expected)
    assert_loaded(results, directory)


def old_names(tensors):
    tensors["pooler.LayerNorm.gamma"] = torch.zeros(1)


def left_over(tensors):
    tensors["left.over"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (old_names, r"transformers converts 1 of its tensors \(pooler\.LayerNorm\.gamma, …\)"),
        (left_over, r"1 tensor \(left\.over\) is not the model's"),
    ],
)
def test_names_that_only_transformers_understands_are_loaded_whole_and_the_run_says_so(saved, change, reason):
    config, directory = saved
    rewrite(directory, change)
    results = weights_by_rank(config, size=1)
    assert_loaded(results, directory)
    note = results[0][1][-1]
    assert re.search(rf"model was loaded in full on every rank, not shard by shard: {reason}", note)


def test_faults_are_errors_on_every_rank(saved, one_at_a_time):
    config, directory = saved

    def raised(error):
        def work(comm):
            with pytest.raises(error) as caught:
                assemble(config, comm)
            return str(caught.value)

        texts = set(run_ranks(2, work))
        assert len(texts) == 1
        return texts.pop()

    rewrite(directory, lambda tensors: tensors.update({"shared.weight": torch.zeros(3, 3)}))
    assert "shared.weight: (3, 3) in the file, (60, 16) in the model" in raised(CheckpointError)
    rewrite(directory, lambda tensors: tensors.pop("shared.weight"))
    assert "are missing: decoder.embed_tokens.weight" in raised(ModelError)
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert "announces a header of 16 bytes, but has only 10 bytes" in raised(CheckpointError)
    (directory / "model.safetensors").unlink()
    assert "holds no weights" in raised(CheckpointError)


def test_inspection_needs_no_weights(saved):
    config, directory = saved
    expected = inspect_units(config, 2)
    (directory / "model.safetensors").unlink()
    assert inspect_units(config, 2) == expected


@pytest.mark.parametrize(("share", "fuses"), [(1.01, False), (0.99, True)])
def test_the_head_computes_the_loss_where_the_logits_could_take_a_twentieth_of_memory(saved, share, fuses, monkeypatch):
    config = saved[0]
    assert config.training.fused_cross_entropy == "auto"
    tokenizer = prepare_tokenizer(config)
    words = make_model(config, tokenizer).config.vocab_size
    logits = 4 * words * config.training.per_device_train_batch_size * config.data.max_target_length
    with planned_memory(int(logits * 20 * share)):
        ready = prepare_model(config, tokenizer)
    head = fused_head_of(ready.model)
    assert (head is not None and head.fuses) is fuses
    assert any("training.fused_cross_entropy: true" in note and "5 %" in note for note in ready.notes) is fuses


def test_the_smallest_memory_decides_on_all_ranks(saved):
    config = saved[0]
    words = make_model(config, prepare_tokenizer(config)).config.vocab_size
    logits = 4 * words * config.training.per_device_train_batch_size * config.data.max_target_length

    def fuses(comm):
        with planned_memory(int(logits * 20 * (1.01, 0.99)[comm.rank])):
            model = assemble(config, comm).model
        head = fused_head_of(model)
        return head is not None and head.fuses

    assert run_ranks(2, fuses) == [True, True]


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
    monkeypatch.setattr(loop, "traced_step", lambda model, optimizer, comm, take, *_: (take(), nothing))


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
