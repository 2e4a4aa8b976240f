"""A whole run with shards inside machines and copies across, on two gloo processes that play two machines."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM

from support.processes import run_processes
from support.tiny_run import write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_two_machines_of_one_rank_train_save_and_export_one_model(tmp_path):
    path = write_run_file(tmp_path, training__max_steps=3, training__save_strategy="steps", training__save_steps=2)
    script = Path(__file__).with_name("hybrid_main.py")
    axes = run_processes(2, script, str(path), "sharding.strategy=hybrid_shard")
    assert axes == [[True, 2, True, True]]
    out = tmp_path / "out"
    assert json.loads((out / "summary.json").read_text())["config"]["sharding"]["strategy"] == "hybrid_shard"
    assert (out / "checkpoints" / "step-00000002").is_dir()
    assert AutoModelForSeq2SeqLM.from_pretrained(out).num_parameters() > 0
