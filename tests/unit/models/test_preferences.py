"""Laws of the losses of preferences: the papers' formulas, rewards as in TRL, and heads that hold no full logits."""

import copy
import math

import pytest
import torch

from fullshard import fully_shard
from fullshard.core.testing import run_ranks
from fullshard.program.models import Preference, fuse_head, reward_means, row_loss
from support.models import VOCAB, bart, gpt2, t5
from support.parity import assert_gradients, replicas, sharded_gradients

LOGPS = torch.tensor([-3.0, -5.0, -2.5, -0.5, -4.0, -9.0], dtype=torch.float64)
TOKENS = torch.tensor([2, 4, 1, 3, 5, 5])
REFERENCE = torch.tensor([-3.5, -4.0, -2.0, -1.0, -4.0, -7.0], dtype=torch.float64)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def odds(mean):
    return math.exp(mean) / (1 - math.exp(mean))


def by_hand(name, pair, beta=0.3, gamma=0.2):
    """The loss of one pair and the rewards of its completions, one number at a time."""
    w, l = (int(2 * pair + side) for side in (0, 1))  # noqa: E741
    p, r, n = LOGPS.tolist(), REFERENCE.tolist(), TOKENS.tolist()
    if name == "dpo":
        h = (p[w] - r[w]) - (p[l] - r[l])
        return -log_sigmoid(beta * h), beta * (p[w] - r[w]), beta * (p[l] - r[l])
    if name == "ipo":
        chosen, rejected = (p[w] - r[w]) / n[w], (p[l] - r[l]) / n[l]
        return (chosen - rejected - 1 / (2 * beta)) ** 2, beta * chosen, beta * rejected
    chosen, rejected = p[w] / n[w], p[l] / n[l]
    if name == "simpo":
        return -log_sigmoid(beta * (chosen - rejected) - gamma), beta * chosen, beta * rejected
    ratio = math.log(odds(chosen) / odds(rejected))
    return -chosen - beta * log_sigmoid(ratio), beta * chosen, beta * rejected


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_each_loss_is_its_papers_formula(name):
    found = Preference(name, beta=0.3, simpo_gamma=0.2).of_pairs(LOGPS, TOKENS, REFERENCE)
    for pair in range(3):
        loss, chosen, rejected = by_hand(name, pair)
        assert found.losses_P[pair].item() == pytest.approx(loss, rel=1e-9)
        rewards = [chosen, 1, rejected, 1, float(chosen > rejected)]
        assert found.rewards[:, pair].tolist() == pytest.approx(rewards, rel=1e-12)


def test_the_loss_of_labels_is_its_papers_formula():
    preference = Preference("kto", beta=0.3, desirable_weight=2.0, undesirable_weight=0.5)
    desirable = torch.tensor([True, False, False, True, True, False])
    found = preference.of_labels(LOGPS, REFERENCE, desirable, torch.tensor(0.7))
    for row, good in enumerate(desirable.tolist()):
        gain = LOGPS[row].item() - REFERENCE[row].item()
        value = 1 / (1 + math.exp(-0.3 * (gain - 0.7 if good else 0.7 - gain)))
        weight = 2.0 if good else 0.5
        assert found.losses_P[row].item() == pytest.approx(weight * (1 - value), rel=1e-6)
        rewards = [0.3 * gain, 1, 0, 0, 0] if good else [0, 0, 0.3 * gain, 1, 0]
        assert found.rewards[:, row].tolist() == pytest.approx(rewards, rel=1e-12)


def test_rewards_are_means_of_their_sides():
    assert reward_means([3.0, 2.0, -1.0, 4.0, 1.0], paired=False) == {
        "rewards/chosen": 1.5,
        "rewards/rejected": -0.25,
        "rewards/margins": 1.75,
    }
    assert reward_means([3.0, 2.0, -1.0, 2.0, 1.0], paired=True)["rewards/accuracies"] == 0.5
    assert reward_means([0.0, 0.0, -1.0, 4.0, 0.0], paired=False) == {"rewards/rejected": -0.25}


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_fillers_and_certain_completions_have_finite_losses_and_gradients(name):
    logps = torch.tensor([0.0, 0.0, 0.0, -1e-9, -80.0, -1e4], requires_grad=True)
    tokens = torch.tensor([0, 0, 3, 3, 4, 4])
    losses = Preference(name).of_pairs(logps, tokens, torch.zeros(6)).losses_P
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logps.grad.isfinite().all()


def test_rewards_have_no_gradient():
    logps = LOGPS.clone().requires_grad_()
    found = Preference("dpo").of_pairs(logps, TOKENS, REFERENCE)
    assert found.losses_P.requires_grad
    assert not found.rewards.requires_grad


def batch(rows=4, length=7):
    tokens = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[0, 3:] = -100
    labels[-1] = -100
    return tokens, labels


def squared(logps_B):
    """A function of rows that no weights of tokens could express before the forward."""
    return logps_B.square().sum() / 100


def loss_of(model, tokens, labels, packed=None):
    inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    forward = lambda: model(input_ids=tokens, use_cache=False, **inputs).logits  # noqa: E731
    return row_loss(model, forward, labels, squared, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make", [t5, gpt2, bart])
def test_a_fused_head_changes_neither_loss_nor_gradients(make, packed):
    torch.manual_seed(0)
    plain = make().double()
    fused = copy.deepcopy(plain)
    fuse_head(fused)
    tokens, labels = batch()
    owners = torch.tensor([[0] * 7, [3] * 2 + [1] * 5, [2] * 6 + [-1], [4] * 7])  # row 4 has no label
    labels[2, 6] = -100
    rows = (owners, 5) if packed else None
    losses = [loss_of(model, tokens, labels, rows) for model in (plain, fused)]
    logits = plain(
        input_ids=tokens, **({"decoder_input_ids": tokens} if plain.config.is_encoder_decoder else {})
    ).logits
    each = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    each = torch.where(labels == -100, 0, each)
    expected = squared(torch.stack([each[owners == row].sum() for row in range(5)]) if packed else each.sum(1))
    assert losses[0].item() == pytest.approx(expected.item(), rel=1e-12)
    assert losses[1].item() == pytest.approx(expected.item(), rel=1e-12)
    for loss in losses:
        loss.backward()
    for (name, one), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-12), name


@pytest.mark.parametrize("make", [t5, gpt2])
def test_a_sharded_fused_head_has_the_gradients_of_the_plain_model(make):
    reference, models = replicas(make, 2)
    tokens, labels = batch()
    loss_of(reference, tokens, labels).backward()

    def work(comm):
        fuse_head(models[comm.rank])
        model = fully_shard(models[comm.rank], comm, tables="gather")
        loss_of(model, tokens, labels).backward()  # alike on both ranks, whose mean it is
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference, 1e-5)
