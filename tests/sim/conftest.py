import pytest

from fullshard.core.engine.setup import wrap
from support import poison


@pytest.fixture(autouse=True)
def every_block_is_a_unit(monkeypatch):
    """The tests' models are so small that the engine would merge all of their blocks."""
    monkeypatch.setattr(wrap, "TINY_NUMEL", 0)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    """What the engine reads before it is written, or after it was given back, is no number."""
    poison.install(monkeypatch)
