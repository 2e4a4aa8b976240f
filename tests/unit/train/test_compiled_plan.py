"""What a run of compiled blocks holds is at most what is planned for it, uncompiled."""

import gc
import time
from functools import partial
from itertools import cycle

import pytest
import torch

from fullshard.core.comm import MemoryMeter
from fullshard.program.config import load_run
from fullshard.program.models import compile_blocks
from fullshard.program.speed import compiled
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.run.step import StepSpec, issue_step
from fullshard.program.train.run_plan import largest_steps, plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.alone import alone
from support.planned import write_run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]  # torch's compiler warns about its code

T5 = {"model_type": "t5", "d_kv": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "dropout_rate": 0.1}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_positions": 64}
BART = {"model_type": "bart", "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "max_position_embeddings": 64}


def models(width):
    """Models of this width; the wider, the more of a step's memory is that of parameters and gradients."""
    inner = 2 * width
    return {
        "t5": T5 | {"d_model": width, "d_ff": inner},
        "llama": LLAMA | {"hidden_size": width, "intermediate_size": inner},
        "gpt2": GPT2 | {"n_embd": width},
        "bart": BART | {"d_model": width, "encoder_ffn_dim": inner, "decoder_ffn_dim": inner},
    }


def steps_peak(config, data, comm, steps):
    """The most bytes in ``steps`` steps of the largest batches, above what was there before the model."""
    given = cycle(largest_steps(config, data, 1))
    gc.collect()
    with MemoryMeter(comm.device) as meter:
        parts = assemble(config, comm, data)
        spec = StepSpec(1, 0.0, 1e-3, config.training.max_grad_norm, parts.collate.causal)
        parts.model.train()
        begun = time.perf_counter()
        for _ in range(steps):
            issue_step(parts.model, parts.optimizer, next(given), comm, spec).report()
    return max(count for at, count in meter.timeline if at >= begun) - meter.start_bytes


CASES = [
    pytest.param(name, width, more, marks=pytest.mark.slow, id=f"{name}-{width}-{more or 'plain'}")
    for width, more in ((16, ""), (128, ""), (16, "training.gradient_checkpointing=true"))
    for name in models(16)
    if not more or name in ("t5", "llama")
]


@pytest.mark.parametrize(("name", "width", "more"), CASES)
def test_compiled_by_inductor(tmp_path, name, width, more):
    rows = 1 if width > 16 else 4
    assert_at_most_planned(tmp_path, models(width)[name], rows, [more] if more else [])


def test_compiled_to_operators(tmp_path, monkeypatch):
    """Graphs of forward and backward as for inductor, but run operator by operator, which takes no C++ compiler."""
    monkeypatch.setattr(compiled, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    plan, held = assert_at_most_planned(tmp_path, models(128)["llama"], 1, [])
    assert held > plan.peak_bytes - plan.compiled_bytes, "a block's gradients arrive together"


def assert_at_most_planned(directory, model, rows, more):
    torch._dynamo.reset()
    batch = {"training__per_device_train_batch_size": rows}
    path = write_run(directory, model={"config": model, "tokenizer": {"vocab_size": 60}}, **batch)
    config = load_run(path, ["training.torch_compile=true", *more])
    data = prepare(config)
    plan = plan_prepared(config, data, 1)
    assert plan.compiled_bytes
    comm = alone()
    held = steps_peak(config, data, comm, 2)
    assert 0.5 * plan.peak_bytes < held <= plan.peak_bytes
    return plan, held
