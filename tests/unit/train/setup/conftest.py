"""Models that tests of a run's setup start from."""

import pytest

from fullshard.program.models import train_tokenizer
from support.adapter_steps import GPT2, T5, write_base


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["where is my card", "i lost it again", "what is the rate"] * 2, 60)


@pytest.fixture(scope="module")
def bases(tokenizer, tmp_path_factory):
    """Directories of a T5 and a GPT-2."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("t5", "gpt2")}
    for name, config in (("t5", T5), ("gpt2", GPT2)):
        write_base(found[name], config, tokenizer)
    return found
