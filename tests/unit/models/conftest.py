"""A tokenizer trained on a few sentences, and no network."""

import pytest

from fullshard.program.models import train_tokenizer

SENTENCES = [
    "How do I locate my card?",
    "My card has not arrived yet.",
    "card_arrival",
    "card_arrival",
    "lost_or_stolen_card",
    "Is the café's top-up\nin € or £?",
] * 3


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def sentences():
    return SENTENCES


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(SENTENCES, 100)
