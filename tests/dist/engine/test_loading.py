"""Two real processes load a model from disk: each commits the memory of its shards and a little, and no more."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from support.processes import run_processes

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc"),
]

SLACK_BYTES = 64 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A T5 of t5-small's size, 60 million parameters, in fp32."""
    config = T5Config(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1)
    directory = tmp_path_factory.mktemp("t5")
    model.save_pretrained(directory)
    return directory, {name: parameter.double().sum().item() for name, parameter in model.named_parameters()}


def test_peak_memory_while_loading_is_the_shard(saved):
    directory, sums = saved
    ranks = run_processes(2, Path(__file__).with_name("loading_main.py"), str(directory))
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert sum(rank["bytes_read"] for rank in ranks) == pytest.approx(stored, rel=1e-3)
    for rank in ranks:
        assert stored / 2 * 0.95 <= rank["shards"] <= stored / 2 * 1.05
        assert rank["while_sharding"] <= 1.05 * rank["shards"] + SLACK_BYTES, rank
        assert rank["while_loading"] <= SLACK_BYTES, rank
    for name, expected in sums.items():
        assert sum(rank["sums"][name] for rank in ranks) == expected, name
