"""Plans of runs with ways whose kernels are a GPU's: they are made on any machine, and say where they are bounds."""

from importlib.util import find_spec

import pytest

from fullshard.planner import hardware
from fullshard.planner.fake_tensors import Form
from fullshard.program.config import load_run
from fullshard.program.train.first_numbers import lay_out
from fullshard.program.train.run_plan import plan_prepared, prepare_length
from fullshard.program.train.setup.prepare import prepare
from support.planned import write_run
from support.tiny_run import MODEL

LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
T5 = MODEL | {"num_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize(("way", "model"), [("bias_sdpa", T5), ("varlen", LLAMA)])
def test_a_kernel_of_a_gpu_is_planned_with_masks_as_an_upper_bound(tmp_path, way, model):
    changes = {"model": {"config": model, "tokenizer": {"vocab_size": 60}}, "training__packing": True}
    path = write_run(tmp_path, speed={"ways": [way]}, training__eval_strategy="no", **changes)
    config = load_run(path, ["training.precision=bf16"])
    data = prepare(config)
    plan = plan_prepared(config, data, 2, hardware("l4"), roughly=0)
    assert f"memory is an upper bound: attention is planned with masks and scores, which {way} does not" in str(plan)
    assert plan_prepared(config, data, 2, roughly=0).by_masks == (None if way == "bias_sdpa" else way)
    lay_out(config, data.tokenizer, 2)


@pytest.mark.parametrize("packing", [False, True])
def test_t5s_kernel_is_planned_without_triton_and_without_a_tensor_of_all_pairs(tmp_path, monkeypatch, packing):
    """Lengths are primes, which no other size of the model is: a shape that ends with them is of scores or a mask."""
    made, empty, lengths, peaks = set(), Form.empty, {211, 103}, {}
    monkeypatch.setattr(Form, "empty", lambda form: made.add(tuple(form.size)) or empty(form))
    found = lambda name, *of: None if name == "triton" else find_spec(name, *of)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", found)
    for way in ("t5_attention", "bias_sdpa"):
        made.clear()
        changes = {"model": {"config": T5, "tokenizer": {"vocab_size": 60}}, "speed": {"ways": [way]}}
        path = write_run(tmp_path, training__eval_strategy="no", training__packing=packing, **changes)
        config = load_run(path, ["training.precision=bf16"])
        data = prepare_length(config, 211, 103, 2)
        plan = plan_prepared(config, data, 2, hardware("h100"), roughly=0)
        pairs = [shape for shape in made if len(shape) > 2 and {*shape[-2:]} <= lengths]
        assert bool(pairs) == (way == "bias_sdpa"), pairs
        assert plan.by_masks == (None if way == "t5_attention" else way)
        lay_out(config, data.tokenizer, 2)
        peaks[way] = plan.phase_peaks
    for phase in ("forward", "backward"):
        assert 2 * peaks["t5_attention"][phase] < peaks["bias_sdpa"][phase]
