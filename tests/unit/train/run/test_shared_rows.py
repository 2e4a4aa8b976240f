"""Runs whose ranks share rows (``sharding.sequence_parallel``) equal the run of one rank on full rows."""

import re
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from fullshard.core.torch_private import limits_each_function
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.models import compile_blocks, load_tokenizer
from fullshard.program.speed import compiled
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.setup.model import outline_model
from fullshard.program.train.setup.resume import choose_starting_point
from support.interrupted_run import run, run_until_stopped
from support.t5_directory import write_t5
from support.tiny_run import MODEL, settings

pytestmark = pytest.mark.usefixtures("unmetered", "one_at_a_time")

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "t5": MODEL | {"dropout_rate": 0.0, "num_heads": 4, "d_kv": 4},
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
ROWWISE = {**SIZES, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
UNDROPPED = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
BOTH = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))}
BOTH |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, **UNDROPPED}
BOTH |= {"decoder_start_token_id": 2, "forced_eos_token_id": 1}
PHI = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "max_position_embeddings": 64}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
OTHERS = {
    "qwen3": ROWWISE,
    "mistral": ROWWISE | {"sliding_window": 4},
    "gemma": ROWWISE,
    "phi": SIZES | PHI,
    "gpt2": GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mt5": MODELS["t5"] | {"feed_forward_proj": "gated-gelu"},
    "bart": BOTH,
    "pegasus": BOTH,
}
MODELS |= {kind: config | {"model_type": kind} for kind, config in OTHERS.items()}
WORLDS = {"2 ranks": (2, 2), "2 groups of 2": (4, 2), "4 ranks": (4, 4)}
ROWS = 4
"""Rows of a step, in two micro-batches."""


def options(kind, each, groups, **changes):
    model = {"config": MODELS[kind], "tokenizer": {"vocab_size": 60}}
    training = {"training__per_device_train_batch_size": ROWS // 2 // groups, "training__num_train_epochs": 1}
    sharding = {"wrap": "auto", "sequence_parallel": each, **changes.pop("sharding", {})}
    return {"model": model, "sharding": sharding, "sharding__wrap": "auto", **training, **changes}


def trained(directory, kind, ranks=1, each=1, **changes):
    """What a sink was told of a run, and its weights."""
    directory.mkdir()
    found = run(directory, ranks=ranks, **options(kind, each, ranks // each, **changes))
    return found, load_file(directory / "out" / "model.safetensors")


def assert_alike(ours, reference):
    """Runs took the same steps and have the same evaluations and weights."""
    (found, weights), (expected, theirs) = ours, reference
    assert len(found.steps) == len(expected.steps) >= 3
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((other.loss, other.grad_norm), abs=1e-5)
        assert (step.tokens, step.target_tokens) == (other.tokens, other.target_tokens)
    for (report, _), (other, _) in zip(found.evaluations, expected.evaluations, strict=True):
        assert report.loss == pytest.approx(other.loss, abs=1e-5)
        assert report.predictions == other.predictions
    for name, weight in theirs.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)


CASES = {
    "padded": {},
    "packed": {"training__packing": True, "training__eval_strategy": "no"},
    "smoothed": {"training__label_smoothing_factor": 0.1, "training__z_loss": 1e-3, "sharding": {"tables": "home"}},
    "fused": {"training__fused_cross_entropy": True, "training__gradient_checkpointing": True},
    "unsharded": {"training__accumulate": "unsharded", "training__optimizer": "adafactor"},
    "budget": {"training": {"per_device_train_batch_tokens": 60, "learning_rate": 1e-2, "num_train_epochs": 1}},
    "two tokens": {"data__max_source_length": 2, "data__max_target_length": 2},
}
QUICK = [("t5", "padded", "2 groups of 2"), ("llama", "packed", "2 ranks")]
ALL = [
    (kind, case, world)
    for kind in MODELS
    for case in (CASES if kind not in OTHERS else ("padded", "packed"))
    for world in WORLDS
    if case != "packed" or kind not in ("mistral", "bart", "pegasus")  # refused, and mistral for its window
    if case != "budget" or world != "2 groups of 2"  # two groups would have two budgets
]


def assert_a_run_equals_that_of_one_rank(tmp_path, kind, case, world):
    reference = trained(tmp_path / "alone", kind, **CASES[case])
    assert_alike(trained(tmp_path / "shared", kind, *WORLDS[world], **CASES[case]), reference)


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "case", "world"), QUICK)
def test_a_run_equals_that_of_one_rank(tmp_path, kind, case, world):
    assert_a_run_equals_that_of_one_rank(tmp_path, kind, case, world)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(("kind", "case", "world"), [one for one in ALL if one not in QUICK])
def test_every_run_equals_that_of_one_rank(tmp_path, kind, case, world):
    assert_a_run_equals_that_of_one_rank(tmp_path, kind, case, world)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.timeout(900)
@pytest.mark.skipif(not limits_each_function, reason="torch 2.11: fake tensors crash after a compile in a thread")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_run_of_compiled_blocks_equals_that_of_one_rank(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(compiled, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    torch._dynamo.reset()
    # Two ranks that evaluate as threads of one process may leave the compiler off.
    torch.compiler.set_stance("default")
    counters.clear()
    ours = trained(tmp_path / "shared", kind, 2, 2, training__torch_compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert_alike(ours, trained(tmp_path / "alone", kind))


@pytest.mark.parametrize(("then", "now"), [((2, 2), (4, 2)), ((1, 1), (4, 4))])
def test_a_run_resumes_with_other_ranks_to_a_row(tmp_path, then, now):
    """The rows of a step stay, as groups are counted: four ranks in pairs read as two."""
    reference = trained(tmp_path / "alone", "llama")
    directory = tmp_path / "stopped"
    directory.mkdir()
    ranks, each = then
    run_until_stopped(directory, ("step", 2), ranks=ranks, **options("llama", each, ranks // each))
    ranks, each = now
    found = run(directory, ranks=ranks, **options("llama", each, then[0] // then[1]))
    resumed = found.begun[0].resumed_step
    assert 0 < resumed < len(reference[0].steps)
    found.steps[:0] = reference[0].steps[:resumed]
    assert_alike((found, load_file(directory / "out" / "model.safetensors")), reference)


def config_of(tmp_path, **changes):
    return RunConfig.model_validate(settings(tmp_path, **options("llama", 2, 1, **changes)))


@pytest.mark.parametrize(("ranks", "begun"), [(2, 1), (4, 2), (2, 2)])
def test_a_further_attempt_keeps_the_readers_that_the_first_one_began_with(tmp_path, ranks, begun):
    assert choose_starting_point(config_of(tmp_path), ranks, begun=begun).began.ranks == begun


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speed": {"ways": ["liger"]}}, "liger"),
        ({"training__precision": "fp8"}, "training.precision: fp8"),
        ({"training__objective": "dpo"}, "training.objective: dpo"),
    ],
)
def test_what_rows_cannot_be_split_with_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(ValidationError, match=f"sequence_parallel: 2 cannot be combined with {named}"):
        config_of(tmp_path, **changes)


def test_ways_that_ask_for_no_full_row_are_accepted(tmp_path):
    assert config_of(tmp_path, speed={"ways": ["t5_attention", "compile"]}).sharding.sequence_parallel == 2


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"attn_implementation": "flex_attention"}, "model.attn_implementation: flex_attention"),
        ({"output_router_logits": True}, "model.output_router_logits"),
    ],
)
def test_models_whose_rows_cannot_be_split_are_refused_by_name(tmp_path, model, named):
    with pytest.raises(ValidationError, match=f"sequence_parallel: 2 cannot be combined with {named}"):
        config_of(tmp_path, model={"path": str(tmp_path), **model})


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_adapters_before_the_tokens_are_refused(tmp_path, kind):
    write_t5(tmp_path / "model", ["a b c"] * 20)
    config = config_of(tmp_path, model={"path": str(tmp_path / "model"), "adapter": {"type": kind}})
    with pytest.raises(ConfigError, match=f"{kind} adapter is incompatible with sharding.sequence_parallel"):
        outline_model(config, load_tokenizer(tmp_path / "model"))


def test_a_dry_run_refuses_ranks_that_are_no_groups_and_more_ranks_than_heads(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("3 ranks are no such groups. Use 4 ranks")):
        dry_run(config_of(tmp_path), 3)
    with pytest.raises(ConfigError, match=r"sharding.sequence_parallel: 8 .* has 4 for 8 ranks"):
        dry_run(config_of(tmp_path, sharding={"sequence_parallel": 8}), 8)
    assert "2 groups of them read rows" in str(dry_run(config_of(tmp_path), 4))
