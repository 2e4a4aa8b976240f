"""Plans of runs with ways whose kernels are a GPU's: they are made on any machine, and say that they are bounds."""

import pytest

from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.train.dry_run import lay_out
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.planned import write_run
from support.tiny_run import MODEL

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("way", "model"), [("bias_sdpa", MODEL | {"num_layers": 1, "num_decoder_layers": 1}), ("varlen", LLAMA)]
)
def test_a_kernel_of_a_gpu_is_planned_with_masks_as_an_upper_bound(tmp_path, way, model):
    changes = {"model": {"config": model, "tokenizer": {"vocab_size": 60}}, "training__packing": True}
    path = write_run(tmp_path, speed={"ways": [way]}, training__eval_strategy="no", **changes)
    config = load_run(path, ["training.precision=bf16"])
    data = prepare(config)
    plan = plan_prepared(config, data, 2, hardware("l4"), roughly=0)
    assert f"memory is an upper bound: attention is planned with masks and scores, which {way} does not" in str(plan)
    assert plan_prepared(config, data, 2, roughly=0).by_masks == (None if way == "bias_sdpa" else way)
    lay_out(config, data.tokenizer, 2)
