"""``training.neftune_noise_alpha``: the noise of Hugging Face's Trainer, on two ranks as without sharding."""

from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from fullshard.program.config import TrainingConfig
from fullshard.program.models import train_tokenizer
from fullshard.program.train.setup.model import prepare_model
from support.adapter_steps import GPT2, T5, batch_of, config_of, load_base, train_sharded, write_base

ALPHA = 40.0
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
BART |= {
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "scale_embedding": True,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["where is my card", "i lost it again", "what is the rate"] * 2, 60)


@pytest.fixture(scope="module")
def bases(tokenizer, tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("t5", "gpt2", "bart")}
    for name, config in (("t5", T5), ("gpt2", GPT2), ("bart", BART)):
        write_base(found[name], config, tokenizer)
    return found


@pytest.fixture
def known_noise(monkeypatch):
    """Noise that depends on shape and bounds alone, because ranks draw from generators of their own."""

    def uniform_(self, low=0.0, high=1.0, **_):
        return self.copy_(torch.linspace(float(low), float(high), self.numel()).view(self.shape))

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)


def losses_alone(base, causal, *, noisy, size=2, steps=3):
    """The losses of torch's own steps with their hook, in the micro-batches that the ranks have."""
    model = load_base(base).train()
    stacks = [model] if causal else [model.get_encoder(), model.get_decoder()]
    for one in stacks if noisy else ():
        embeddings: Any = one.get_input_embeddings()
        embeddings.neftune_noise_alpha = ALPHA
        embeddings.register_forward_hook(neftune_post_forward_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-3)
    batches = [batch_of(range(rank, 4, size), causal=causal) for rank in range(size)]
    found = []
    for _ in range(steps):
        total = torch.zeros(())
        for batch in batches:
            inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS}
            total = total + model(**inputs, labels=batch.labels_BT).loss * batch.target_tokens
        loss = total / sum(batch.target_tokens for batch in batches)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def config_with(base, **changes):
    found = config_of(base, "lora", adam_epsilon=1e-3, weight_decay=0.0, neftune_noise_alpha=ALPHA, **changes)
    return found.model_copy(update={"model": found.model.model_copy(update={"adapter": None})})


@pytest.mark.usefixtures("known_noise")
@pytest.mark.parametrize(("name", "tables"), [("t5", "gather"), ("t5", "home"), ("gpt2", "home"), ("bart", "gather")])
def test_two_ranks_train_with_the_trainers_noise(bases, tokenizer, name, tables):
    base, causal = bases[name], name == "gpt2"
    config = config_with(base, sharding={"tables": tables})
    noisy, plain = (losses_alone(base, causal, noisy=noisy) for noisy in (True, False))
    for ours, _, _ in train_sharded(config, tokenizer, causal, lambda *_: None):
        assert ours == pytest.approx(noisy, abs=1e-5)
    assert abs(noisy[0] - plain[0]) > 1e-3


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_noise_is_on_both_sides_of_an_adapter_in_training_only(bases, tokenizer, kind):
    batch = batch_of(range(4), causal=False)
    given = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "labels": batch.labels_BT}
    config = config_of(bases["t5"], kind, neftune_noise_alpha=ALPHA)
    model = prepare_model(config, tokenizer).model.to_empty(device="cpu")
    draws = []

    def uniform_(self, low=0.0, high=1.0):
        draws.append(tuple(self.shape[:2]))
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", uniform_)
        model.eval()(**given)
        assert not draws
        model.train()(**given)
    assert draws == [(4, batch.input_ids_BS.shape[1]), (4, batch.labels_BT.shape[1])]


def test_zero_is_no_noise():
    assert TrainingConfig(neftune_noise_alpha=0).neftune_noise_alpha is None
