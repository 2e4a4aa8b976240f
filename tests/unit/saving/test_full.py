"""A sharded model saved by its ranks is the model that Hugging Face loads, to the bit."""

import copy
import errno
import json
import os
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaConfig

from fullshard import MixedPrecision, ShardingStrategy, fully_shard, save
from fullshard.core.comm import run_together
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, ShardingError
from fullshard.program.models import train_tokenizer
from fullshard.state.saving import full
from support.models import TinyLM, bart, gpt2, t5, t5_untied
from support.parity import replicas


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a few words", "some more words"] * 3, 60)


@pytest.fixture
def _small_steps(monkeypatch):
    """Models of a few kilobytes take many steps."""
    monkeypatch.setattr(full, "_STREAM_BYTES", 15000)


def save_over(size, models, directory, **options):
    def work(comm):
        save(fully_shard(models[comm.rank], comm), directory, **options)

    run_ranks(size, work)


def load(reference, directory, **options):
    auto = AutoModelForSeq2SeqLM if reference.config.is_encoder_decoder else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(directory, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return loaded


def assert_equal(loaded, reference):
    assert type(loaded) is type(reference)
    ours, expected = loaded.state_dict(), reference.state_dict()
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("make", [t5, t5_untied, bart, gpt2])
@pytest.mark.parametrize(("size", "max_shard_size"), [(1, "50GB"), (2, "20KB"), (3, "50GB"), (4, 3000)])
def test_from_pretrained_gives_the_same_bits(make, size, max_shard_size, tokenizer, tmp_path):
    reference, models = replicas(make, size)
    ours, theirs = tmp_path / "model", tmp_path / "reference"
    save_over(size, models, ours, tokenizer=tokenizer, max_shard_size=max_shard_size)
    assert_equal(load(reference, ours), reference)
    reference.save_pretrained(theirs, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(theirs)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    for path in theirs.iterdir():  # the same words in the configuration, the same tensors in the same files
        if path.suffix == ".json":
            assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text()), path.name
        elif path.suffix == ".safetensors":
            assert load_file(ours / path.name).keys() == load_file(path).keys()
    assert AutoTokenizer.from_pretrained(ours).get_vocab() == tokenizer.get_vocab()


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("make", [t5, t5_untied, bart, gpt2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16"])
def test_a_save_in_bf16_is_the_model_cast_to_bf16(make, dtype, tmp_path):
    reference, models = replicas(make, 2)
    save_over(2, models, tmp_path / "model", dtype=dtype, max_shard_size="20KB")
    assert_equal(load(reference, tmp_path / "model"), reference.to(torch.bfloat16))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert models[0].config.to_dict() == reference.config.to_dict()  # the model that trains on is as it was


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_every_strategy_saves_the_same_bits(strategy, tmp_path):
    reference, models = replicas(t5, 4)

    def work(comm):
        mesh = (comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])) if strategy.needs_two_axes else comm
        model = fully_shard(models[comm.rank], mesh, strategy=strategy, mp_policy=MixedPrecision(param="bf16"))
        save(model, tmp_path / "model")

    run_ranks(4, work)
    assert_equal(load(reference, tmp_path / "model"), reference)


def test_a_model_that_is_not_hugging_faces_is_a_safetensors_file(tmp_path):
    reference, models = replicas(lambda: nn.Sequential(TinyLM(), nn.BatchNorm1d(3)), 2)
    save_over(2, models, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    expected = reference.state_dict()
    assert saved.keys() == expected.keys() - {"0.head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


@pytest.mark.usefixtures("_small_steps")
def test_progress_is_told_on_rank_0_up_to_all_bytes(tmp_path):
    reference, models = replicas(t5, 2)
    told = [[], []]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        save(
            model,
            tmp_path / "model",
            dtype="bf16",
            progress=lambda *count: told[comm.rank].append((*count, threading.current_thread().name)),
        )

    run_ranks(2, work)
    assert told[1] == []
    total = sum(p.numel() for p in reference.parameters()) * 2
    done = [count for count, _, _ in told[0]]
    assert done == sorted(done)
    assert done[-1] == total
    assert len(set(done)) > 5
    assert {(in_all, thread) for _, in_all, thread in told[0]} == {(total, "rank0")}


@pytest.mark.parametrize("options", [{"dtype": torch.int8}, {"max_shard_size": "much"}])
def test_what_cannot_be_saved_so_is_refused_on_every_rank(options, tmp_path):
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with pytest.raises(ConfigError):
            save(model, tmp_path / "model", **options)
        comm.barrier()

    run_ranks(2, work)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    with pytest.raises(ShardingError):
        save(TinyLM(), tmp_path / "model")


# Failures


def failing_save(models, final, **options):
    """The error of each rank; both are in step afterwards, and a save that is allowed to works."""

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with pytest.raises(CheckpointError) as caught:
            save(model, final, **options)
        comm.barrier()
        return str(caught.value)

    texts = run_ranks(2, work)
    assert len(set(texts)) == 1
    return texts[0]


@pytest.fixture
def old(tmp_path):
    """What an earlier save left."""
    final = tmp_path / "models" / "model"
    final.mkdir(parents=True)
    (final / "model.safetensors").write_text("old")
    yield final
    assert (final / "model.safetensors").read_text() == "old"
    assert [path.name for path in final.parent.iterdir()] == ["model"]


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("writes", [0, 1, 5, 20])
def test_a_full_disk_ends_the_save_early_on_every_rank(writes, old, tokenizer, monkeypatch):
    _, models = replicas(t5, 2)
    pwrite, calls = os.pwrite, []

    def refuse(descriptor, data, position):
        calls.append(position)
        if len(calls) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", refuse)
    steps, full_runs = [], full.full_runs

    def counted(*args, **options):
        for runs in full_runs(*args, **options):
            steps.append(1)
            yield runs

    monkeypatch.setattr(full, "full_runs", counted)
    assert "No space left on device" in failing_save(models, old, tokenizer=tokenizer)
    assert len(calls) == writes + 1
    assert len(steps) / 2 <= writes + 4


@pytest.mark.parametrize("operation", ["fsync", "rename", "mkdir"])
def test_a_disk_that_refuses_at_the_end_or_the_beginning(operation, old, monkeypatch):
    _, models = replicas(t5, 2)
    real = getattr(os, operation)

    def refuse(first, *rest, **named):
        if operation == "fsync" or str(first).endswith(".tmp"):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(first, *rest, **named)

    monkeypatch.setattr(os, operation, refuse)
    text = failing_save(models, old)
    assert "Read-only file system" in text
    assert "Its previous content is unchanged" in text


def test_a_file_in_the_way_is_refused(tmp_path):
    _, models = replicas(t5, 2)
    (tmp_path / "model").write_text("mine")
    assert "is a file" in failing_save(models, tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("no such setting")])
def test_a_tokenizer_that_cannot_be_saved(error, old):
    class Tokenizer:
        def save_pretrained(self, directory):
            raise error

    _, models = replicas(t5, 2)
    text = failing_save(models, old, tokenizer=Tokenizer())
    assert (error.strerror if isinstance(error, OSError) else "ValueError('no such setting')") in text


def test_ctrl_c_leaves_what_was_there_and_no_thread(old, monkeypatch):
    _, (model,) = replicas(t5, 1)
    threads = threading.active_count()

    def interrupt(done, total):
        raise KeyboardInterrupt

    def work(comm):
        with pytest.raises(KeyboardInterrupt):
            save(fully_shard(model, comm), old, progress=interrupt)
        return threading.active_count()

    assert run_ranks(1, work) == [threads + 1]  # the rank's own


@pytest.mark.usefixtures("_small_steps")
def test_a_disk_slower_than_the_communication_timeout_trips_nothing(tmp_path, monkeypatch):
    """Nothing is written until the ranks have met so often that they would have timed out in one collective."""
    monkeypatch.setattr(run_together, "PATIENCE_SECONDS", 0.1)
    reference, models = replicas(t5, 2)
    answered, pwrite, met = threading.Event(), os.pwrite, []

    def slow(descriptor, data, position):
        assert answered.wait(60)
        return pwrite(descriptor, data, position)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        exchange = comm.all_gather_object

        def counted(value):
            met.append(comm.rank)
            if met.count(1) == 22:
                answered.set()
            return exchange(value)

        comm.all_gather_object = counted
        monkeypatch.setattr(os, "pwrite", slow)
        save(model, tmp_path / "model")

    run_ranks(2, work, timeout_s=1.0)
    assert_equal(load(reference, tmp_path / "model"), reference)


def test_the_configuration_says_what_other_readers_do_not_find_out(tmp_path):
    """Transformers 4, vLLM and converters tie by the configuration, and know rotary embeddings by earlier names."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    own_head = t5_untied()
    own_head.config.scale_decoder_outputs = False  # as of T5 1.1, and of flan-t5
    own_head.lm_head.weight = nn.Parameter(torch.randn_like(own_head.shared.weight))
    for name, reference in {
        "t5": t5(),
        "own": own_head,
        "llama": AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **small, rope_parameters=rope)),
    }.items():
        save_over(1, [copy.deepcopy(reference)], tmp_path / name)
        loaded = load(reference, tmp_path / name)
        assert_equal(loaded, reference)
        assert loaded.config.to_diff_dict().get("rope_parameters") == reference.config.to_diff_dict().get(
            "rope_parameters"
        )
        assert getattr(loaded.config, "scale_decoder_outputs", 0) == getattr(
            reference.config, "scale_decoder_outputs", 0
        )
    own, tied, llama = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("own", "t5", "llama"))
    assert (own["tie_word_embeddings"], tied["tie_word_embeddings"]) == (False, True)
    assert (llama["rope_theta"], llama["rope_scaling"]) == (5e5, {"rope_type": "linear", "factor": 2.0})
