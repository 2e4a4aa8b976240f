"""What two ranks compile is kept for later runs and attempts on the machine, in the compiler's own directory."""

import json
import subprocess
import sys

import pytest

from support.planned import write_run
from support.processes import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 32, "intermediate_size": 64}


def test_the_same_run_compiles_nothing_the_second_time(tmp_path):
    kept = tmp_path / "inductor"
    found, seconds = [], []
    for attempt in ("first", "second"):
        changes = {"torch_compile": True, "eval_strategy": "no", "num_train_epochs": 1}
        changes = {f"training__{name}": value for name, value in changes.items()}
        model = {"config": LLAMA, "tokenizer": {"vocab_size": 60}}
        path = write_run(tmp_path, model=model, output_dir=str(tmp_path / attempt), **changes)
        command = [sys.executable, "-m", "fullshard", "train", str(path)]
        more = {"TORCHINDUCTOR_CACHE_DIR": str(kept)}
        done = subprocess.run(command, env=environment() | more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append({str(file.relative_to(kept)) for file in (kept / "fxgraph").rglob("*") if file.is_file()})
        seconds.append(json.loads((tmp_path / attempt / "summary.json").read_text())["compile_seconds"])
    assert found[0], "graphs are kept"
    assert found[1] == found[0], "no graph was made again"
    assert 0 < seconds[1] < seconds[0]
