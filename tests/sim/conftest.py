import pytest

from fullshard.engine import wrap


@pytest.fixture(autouse=True)
def every_block_is_a_unit(monkeypatch):
    """The tests' models are so small that the engine would merge all of their blocks."""
    monkeypatch.setattr(wrap, "TINY_NUMEL", 0)
