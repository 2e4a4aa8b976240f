"""A sharded model saved by its ranks is the model that Hugging Face loads, to the bit."""

import copy
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fullshard import fully_shard, save
from fullshard.checkpoint import atomic
from fullshard.comm import run_ranks
from fullshard.errors import CheckpointError
from fullshard.models import train_tokenizer
from support.models import bart, gpt2, t5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a few words", "some more words"] * 3, 60)


def save_over(size, models, tokenizer, directory):
    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        save(model, directory, tokenizer=tokenizer)

    run_ranks(size, work)


@pytest.mark.parametrize("make", [t5, bart, gpt2])
@pytest.mark.parametrize("size", [1, 3])
def test_from_pretrained_gives_the_same_bits(make, size, tokenizer, tmp_path):
    torch.manual_seed(0)
    reference = make()
    save_over(size, [copy.deepcopy(reference) for _ in range(size)], tokenizer, tmp_path / "model")
    auto = AutoModelForSeq2SeqLM if reference.config.is_encoder_decoder else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(reference)
    expected = reference.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    reference.save_pretrained(tmp_path / "reference")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("model", "reference"))
    assert ours.stat().st_size == pytest.approx(theirs.stat().st_size, rel=0.02)  # no tensor is stored twice


def test_a_disk_that_refuses_is_the_same_error_on_every_rank_and_the_old_model_stays(tokenizer, tmp_path, monkeypatch):
    torch.manual_seed(0)
    models = [t5() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    final = tmp_path / "model"
    final.mkdir()
    (final / "model.safetensors").write_text("old")
    pwrite, calls = os.pwrite, []

    def full(descriptor, data, position):
        calls.append(position)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(atomic.os, "pwrite", full)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with pytest.raises(CheckpointError) as caught:
            save(model, final, tokenizer=tokenizer)
        comm.barrier()  # the ranks are still in step
        return str(caught.value)

    texts = run_ranks(2, work)
    assert len(set(texts)) == 1
    assert "No space left" in texts[0]
    assert (final / "model.safetensors").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
