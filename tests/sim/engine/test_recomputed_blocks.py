"""A sharded model whose blocks are recomputed or their activations offloaded: the same losses and weights, to the bit.

Offloaded activations are on CUDA's streams read after they are written, and freed after they are read.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional

from fullshard import fully_shard
from fullshard.core.engine.registry import runtime_of
from fullshard.core.testing import run_ranks
from fullshard.program.models import blocks_of, enable_activation_checkpointing
from fullshard.program.train.setup import activation_offload
from fullshard.program.train.setup.activation_offload import ActivationOffload
from support.models import TinyLM, bart, batches, gpt2, llama, lm_loss, t5, two_forwards_loss
from support.parity import replicas, train_sharded
from support.streams import CheckedWork, StreamChecker, install

KINDS = {"t5": t5, "bart": bart, "gpt2": gpt2, "llama": llama}
STEPS = 3


def loss_of(model, tokens):
    inputs = {"decoder_input_ids": tokens[:, :-1]} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=tokens, **inputs, use_cache=False).logits[:, : tokens.shape[1] - 1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def with_dropout(model):
    """Every probability in transformers' modules and functions."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
    return model.train()


def count_copies(monkeypatch):
    """The sizes of what is copied between the device and the host."""
    copied, plain = [], activation_offload._copy_all

    def copy_all(pairs):
        copied.extend(target.numel() for target, _ in pairs)
        plain(pairs)

    monkeypatch.setattr(activation_offload, "_copy_all", copy_all)
    return copied


@pytest.mark.parametrize(
    ("kind", "size"),
    [*(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in KINDS if kind != "llama"),
     ("llama", 1), ("t5", 2), ("llama", 2)],
)  # fmt: skip
def test_none_some_or_all_recomputed_blocks_are_one_run_offloaded_or_not(kind, size, monkeypatch):
    """With dropout on one rank: ranks are threads, which share the random numbers."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 0)
    make = KINDS[kind]
    data, runs = batches(STEPS, size * 2), []
    blocks = len(blocks_of(make()))
    copied = count_copies(monkeypatch)

    def train(comm, model, offload):
        model = fully_shard(model, comm)
        if offload:
            ActivationOffload(model, blocks_of(model), runtime_of(model).device)
        return train_sharded(model, comm, loss_of, data, sharded=True)

    for number, offload in ((0, False), (0, True), (1, False), (1, True), (blocks - 1, False), (None, True)):
        _, models = replicas(make, size)
        for model in models:
            enable_activation_checkpointing(model, number)
            (with_dropout if size == 1 else torch.nn.Module.train)(model)
        torch.manual_seed(1)
        copied.clear()
        run = partial(run_ranks, size)
        runs.append(run(lambda comm, models=models, offload=offload: train(comm, models[comm.rank], offload)))
        assert bool(copied) is offload
    for run in runs[1:]:
        for (losses, norms, weights), plain in zip(run, runs[0], strict=True):
            assert (losses, norms) == plain[:2]
            assert all(torch.equal(weight, plain[2][name]) for name, weight in weights.items())


# On CUDA's streams


def _empty_host(checker, plain, numel, dtype, *, pinned):
    """Page-locked memory, whose allocator itself waits for the copies that read it."""
    made = plain(numel, dtype, pinned=pinned)
    if dtype == torch.uint8:
        checker._buffer(made.untyped_storage()).home = "activations stream"
    return made


@pytest.fixture
def violations(monkeypatch):
    """Trains with offloaded activations on two ranks; what is read or freed too early."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 0)
    install(monkeypatch)

    def violations(loss=lm_loss):
        _, models = replicas(lambda: TinyLM(layers=4), 2)

        def work(comm):
            with StreamChecker(comm.rank) as checker:
                checker.device.empty_host = partial(_empty_host, checker, checker.device.empty_host)
                model = fully_shard(models[comm.rank], checker.comm(comm))
                checker.names_from(model)
                ActivationOffload(model, model.blocks, checker.device)
                for tokens in batches(2, 2):
                    loss(model, tokens).backward()
            return checker.violations

        return [violation for rank in run_ranks(2, work) for violation in rank]

    return violations


@pytest.mark.parametrize("loss", [lm_loss, two_forwards_loss])
def test_offloaded_activations_are_ordered(violations, monkeypatch, loss):
    copied = count_copies(monkeypatch)
    assert violations(loss) == []
    assert copied


def test_a_copy_that_is_not_waited_for_is_reported(violations, monkeypatch):
    plain = CheckedWork.wait
    monkeypatch.setattr(CheckedWork, "wait", lambda work: None if work.name.startswith("activ") else plain(work))
    found = "\n".join(violations())
    assert "on compute reads" in found
    assert "while aten.copy_ on activations stream writes it" in found


def test_a_tensor_that_is_changed_while_it_is_copied_is_an_error_as_without_offload(violations):
    def loss(model, tokens):
        saved = []

        def change(*_):
            with torch.no_grad():
                saved[0].mul_(2)

        model.blocks[0].up.register_forward_hook(lambda _module, _args, output: saved.append(output))
        model.blocks[1].register_forward_pre_hook(change)
        return lm_loss(model, tokens)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        violations(loss)
