"""Each type of model that transformers registers: the first loss is its own, and the dry run takes the same step."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional
from transformers import T5ForConditionalGeneration

from fullshard.errors import CheckpointError, ConfigError, ModelError
from fullshard.planner import UnplannedStepError
from fullshard.program.config import RunConfig
from fullshard.program.data import CollateSpec, RowRef, collate
from fullshard.program.models import decoder_inputs, require_left_to_right, require_plain_loss, train_tokenizer
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.run_plan import try_step
from fullshard.program.train.setup.model import losses
from fullshard.program.train.setup.prepare import prepare
from fullshard.state.saving import full
from support.adapter_steps import ROWS, batch_of
from support.interrupted_run import STEPS, run
from support.model_types import small_config, small_model, types
from support.tiny_run import settings

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # transformers' own, of some types

UNSHIFTED = ("trocr", "whisper", "xlm")  # decoders whose labels transformers wants as the logits are
SHIFTS_INSIDE = ("m2m_100", "blenderbot", "blenderbot-small")
QUICK = (
    *SHIFTS_INSIDE,
    "t5",
    "bart",
    "mbart",
    "pegasus",
    "fsmt",
    "llama",
    "gpt2",
    "qwen3",
    "gemma2",
    "mistral",
    "phi3",
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["where is my card", "i lost it again", "what is the rate"] * 2, 60)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def config_of(place, name, kind, **changes):
    model = {"config": small_config(name), "class": kind, "tokenizer": {"vocab_size": 60}}
    return RunConfig.model_validate(settings(place, model=model, sharding__wrap="none", **changes))


def own_loss(model, batch):
    """The loss that transformers computes of what its collator makes, or None if it cannot of such rows."""
    batch = copy.deepcopy(batch)  # FSMT changes labels
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "labels": batch.labels_BT}
    if model.config.model_type in UNSHIFTED:
        inputs["labels"] = functional.pad(batch.labels_BT[:, 1:], (0, 1), value=-100)
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):  # as in DataCollatorForSeq2Seq
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch.labels_BT.clone())
    try:
        with torch.no_grad():
            return model(**inputs).loss.item()
    except Exception:
        return None


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*one, marks=() if one[0] in QUICK else pytest.mark.slow, id=one[0]) for one in types()],
)
def test_the_first_loss_is_transformers_own_and_the_dry_run_takes_the_step(place, tokenizer, name, kind):
    model = small_model(name, kind, tokenizer)
    batch = batch_of(range(4), causal=kind == "causal")
    if model is not None and refused(model.config):
        pytest.skip("refused; see below")
    expected = None if model is None else own_loss(model, batch)
    if expected is None:
        assert name not in QUICK
        pytest.skip("transformers has no small text model of this type")
    found = losses(model, batch, None, causal=kind == "causal")[0].item() / batch.target_tokens
    assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
    config = config_of(place, name, kind)
    try:
        try_step(config, prepare(config), 2)
    except UnplannedStepError:
        assert name not in QUICK  # a router, or a mask that reads values: said by the dry run


def refused(config):
    try:
        require_plain_loss(config)
        require_left_to_right(config)
    except ConfigError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in types() if kind == "causal"])
def test_a_model_that_sees_the_tokens_to_predict_is_refused_and_no_other(tokenizer, name):
    model = small_model(name, "causal", tokenizer)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 20]])
    try:
        with torch.no_grad():
            one, other = model(input_ids=ids, use_cache=False).logits[:, :-1]
    except Exception:
        pytest.skip("transformers has no small text model of this type")
    sees = (one - other).abs().max() > 1e-6
    with pytest.raises(ConfigError, match="both directions") if sees else nullcontext():
        require_left_to_right(model.config)


@pytest.mark.parametrize("name", SHIFTS_INSIDE)
@pytest.mark.parametrize("packed", [False, True])
def test_the_decoders_inputs_are_those_that_the_models_make_themselves(tokenizer, name, packed):
    model = small_model(name, "seq2seq", tokenizer)
    batch = collate([RowRef(row) for row in range(4)], ROWS, CollateSpec(pad_token_id=0, packed=packed))
    given = []
    model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, kwargs: given.append(kwargs["input_ids"]), with_kwargs=True
    )
    model(input_ids=batch.input_ids_BS, labels=batch.labels_BT)
    assert torch.equal(decoder_inputs(model, batch.labels_BT), given[0])
    model.config.pad_token_id = None
    with pytest.raises(ModelError, match="pad_token_id"):
        decoder_inputs(model, batch.labels_BT)


@pytest.mark.usefixtures("unmetered")
@pytest.mark.parametrize("name", SHIFTS_INSIDE)
def test_such_a_model_is_ready_and_trains(tmp_path, name):
    config = config_of(tmp_path, name, "seq2seq")
    assert "ready for the first step" in str(dry_run(config, 2))
    model = {"config": small_config(name), "tokenizer": {"vocab_size": 60}}
    steps = run(tmp_path, ranks=2, model=model, sharding__wrap="none").steps
    assert len(steps) == STEPS // 2  # of two ranks
    assert steps[-1].loss < steps[0].loss


def test_a_step_that_would_fail_is_not_called_ready(tmp_path, monkeypatch):
    def forward(self, **inputs):
        raise IndexError("list index out of range")

    monkeypatch.setattr(T5ForConditionalGeneration, "forward", forward)
    with pytest.raises(ModelError, match=r"test_model_types.py:\d+: IndexError: list index out of range"):
        dry_run(config_of(tmp_path, "t5", "seq2seq"), 2)


def test_a_save_that_would_fail_is_not_called_ready(tmp_path, monkeypatch):
    def refuse(model, directory, *, tokenizer):
        raise ValueError("GenerationConfig is invalid")

    monkeypatch.setattr(full, "write_assets", refuse)
    with pytest.raises(CheckpointError, match="GenerationConfig is invalid"):
        dry_run(config_of(tmp_path, "t5", "seq2seq"), 2)
