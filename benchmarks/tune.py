"""How near `fullshard tune` comes to an exhaustive search of the same candidates, of two models on one CPU rank.

    python benchmarks/tune.py

The exhaustive search times every candidate six times, in two passes; the ratio is that of the chosen one's median to
the best one's there. Blocks are not compiled, which would take most of the time.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from fullshard.core.comm import SoloComm
from fullshard.program.config import load_run
from fullshard.program.speed import WAYS
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.tune.candidates import Memory, candidates
from fullshard.program.tune.halving import FULL, Halving
from fullshard.program.tune.journal import Journal
from fullshard.program.tune.measure import Bench

DATA = Path(__file__).parents[1] / "examples" / "data" / "banking77"

MODELS = {
    "t5": {
        "model_type": "t5",
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.1,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def write_run(directory, model, rows):
    """Write a run file for a model from scratch on the example's data."""
    values = {
        "output_dir": str(directory / "out"),
        "model": {"config": MODELS[model], "tokenizer": {"vocab_size": 2000}},
        "data": {
            "train_file": str(DATA / "train.csv"),
            "source_column": "text",
            "target_column": "category",
            "cache_dir": str(directory / "cache"),
            "max_source_length": 64,
            "max_target_length": 20,
        },
        "training": {
            "per_device_train_batch_size": rows,
            "eval_strategy": "no",
            "precision": "fp32",
            "torch_compile": False,
        },
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def compare(model, rows):
    """Tune, search exhaustively, and print both."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        path = write_run(directory, model, rows)

        def load(more):
            return load_run(path, more)

        config, comm = load(()), SoloComm(torch.device("cpu"))
        data = prepare(config)

        def bench(name):
            memory = Memory(load, data, 1, None, None)
            return Bench(load, data, comm, memory, Journal(directory / name, comm))

        tuner, began = bench("tuned.json"), time.monotonic()
        every = candidates(config, [name for name in WAYS if name not in tuner.misfits])
        outcome = Halving(tuner, lambda: time.monotonic() - began, 600.0).run(every)
        took, chosen = time.monotonic() - began, next(iter(outcome.measured))
        full, began, times = bench("full.json"), time.monotonic(), {}
        for _ in range(2):
            for one in outcome.measured:
                found = full(one, FULL)
                times[one] = found if one not in times else times[one] + found
        best = min(times, key=lambda one: times[one].step_s)
        ratio = times[chosen].step_s / times[best].step_s
        print(f"{model}, {rows} rows a step, {len(times)} candidates that differ; tuned and exhaustive, in ms:")
        for one, found in outcome.measured.items():
            print(f"    {1e3 * found.step_s:7.1f} {1e3 * times[one].step_s:7.1f}  {one}")
        print(f"  tuned:      {chosen}: {1e3 * times[chosen].step_s:.1f} ms, in {took:.0f} s")
        print(f"  exhaustive: {best}: {1e3 * times[best].step_s:.1f} ms, in {time.monotonic() - began:.0f} s")
        print(f"  ratio: {ratio:.3f}", flush=True)


def main(arguments=None):
    """Compare on both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step (default: 16)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for model in MODELS:
        compare(model, options.rows)


if __name__ == "__main__":
    sys.exit(main())
