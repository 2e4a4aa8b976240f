"""A run with model.path reads its weights shard by shard; where that cannot be, it says so and gives the same model."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard import unsharded
from fullshard.core.comm import planned_memory
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.models import fused_head_of, load_model, load_tokenizer
from fullshard.program.train.dry_run import inspect_units
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.setup import model as modelling
from fullshard.program.train.setup.model import make_model, prepare_model
from fullshard.program.train.setup.prepare import prepare_tokenizer
from support.tiny_run import settings


@pytest.fixture
def saved(tmp_path):
    """A run on the directory of a model, and that directory."""
    values = settings(tmp_path)
    made = RunConfig.model_validate(values)
    tokenizer = prepare_tokenizer(made)
    make_model(made, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return RunConfig.model_validate(values | {"model": {"path": str(tmp_path / "model")}}), tmp_path / "model"


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
