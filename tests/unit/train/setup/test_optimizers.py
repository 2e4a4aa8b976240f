"""Every optimizer that a run can choose: it learns, goes on to the bit, and takes the memory that was foretold."""

import pytest
import torch
from safetensors.torch import load_file

from fullshard.core.optim.shards import meta_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.train import FileSink, train
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.setup import resume
from fullshard.program.train.setup.optimizers import expected_state_bytes, held_state_bytes, make_optimizer
from fullshard.program.train.setup.resume import deciding_settings
from support.tiny_run import MODEL, Memory, settings

NAMES = ("adamw", "adafactor", "muon", "adamw_8bit", "adamw_bf16")
OWN_STEPS = {
    "training__optimizer": "adafactor",
    "training__learning_rate": None,
    "training__lr_scheduler_type": "constant",
    "training__warmup_steps": 0,
}
CASES = {name: {"training__optimizer": name} for name in NAMES} | {"adafactor's own steps": OWN_STEPS}

SMALL = {
    "model": {
        "config": MODEL | {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_decoder_layers": 1, "dropout_rate": 0.0},
        "tokenizer": {"vocab_size": 60},
    },
    "data__validation_file": None,
    "training__eval_strategy": "no",
    "training__gradient_accumulation_steps": 1,
    "training__weight_decay": 0.1,
    "training__warmup_steps": 0,
    "sharding__wrap": ["T5Block"],
}
"""Matrices of 8192 elements, so that some state is 8-bit, and three steps an epoch on two ranks."""


pytestmark = pytest.mark.usefixtures("unmetered", "one_at_a_time")


def config(directory, **changes):
    directory.mkdir(exist_ok=True)
    return RunConfig.model_validate(settings(directory, **SMALL | changes))


def run(config_, ranks=2):
    memory = Memory()

    def work(comm):
        return train(config_, comm, [FileSink(config_.output_dir), memory] if comm.rank == 0 else [])

    return run_ranks(ranks, work)[0], memory


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_it_learns_and_goes_on_to_the_bit_or_nearly_on_other_ranks_and_its_memory_is_foretold(tmp_path, changes):
    changes = {"training__save_strategy": "steps", "training__save_steps": 4} | changes
    whole = config(tmp_path / "whole", **changes)
    summary, memory = run(whole)
    losses = [report.loss for report in memory.steps]
    assert sum(losses[-2:]) / 2 < losses[0] - 0.1
    assert dry_run(whole, 2).optimizer == summary.memory[0].optimizer > 0
    changes["resume"] = str(whole.output_dir / "checkpoints" / "step-00000004")
    rest = config(tmp_path / "rest", **changes)
    _, going_on = run(rest)
    assert [report.step for report in going_on.steps] == list(range(5, len(losses) + 1))
    assert [report.loss for report in going_on.steps] == losses[4:]
    ours, theirs = (load_file(one.output_dir / "model.safetensors") for one in (rest, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    _, alone = run(config(tmp_path / "alone", training__per_device_train_batch_size=8, **changes), ranks=1)
    assert [report.loss for report in alone.steps] == pytest.approx(losses[4:], rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_state_takes_on_every_rank_the_bytes_that_the_layout_foretells(tmp_path, name, ranks):
    settings_ = config(tmp_path, training__optimizer=name)

    def work(comm):
        parts = assemble(settings_, comm)
        for param in parts.model.parameters():
            param.grad = torch.ones_like(param) if param.nbytes else None
        expected = expected_state_bytes(parts.model, settings_)
        parts.optimizer.step()
        return expected, held_state_bytes(parts.optimizer), held_state_bytes(parts.optimizer, torch.device("meta"))

    for expected, held, elsewhere in run_ranks(ranks, work):
        assert expected == held > 0
        assert elsewhere == 0


def test_adamws_state_is_twice_the_parameters_and_others_take_less(tmp_path):
    parameters, state = {}, {}
    for name in NAMES:
        found = dry_run(config(tmp_path, training__optimizer=name), 2)
        parameters[name], state[name] = found.parameters, found.optimizer
        assert found.as_dict()["optimizer"] == found.optimizer
    assert state["adamw"] == pytest.approx(2 * parameters["adamw"], rel=0.01)
    assert state["adamw_bf16"] == pytest.approx(parameters["adamw"], rel=0.01)
    assert state["adafactor"] < 0.1 * state["adamw"]
    assert state["adamw_8bit"] < 0.5 * state["adamw"]
    assert 0.5 * state["adamw"] < state["muon"] < 0.7 * state["adamw"]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_all_parameters_in_one_order_and_norms_do_not_decay(tmp_path, name):
    settings_ = config(tmp_path, training__optimizer=name)

    def work(comm):
        groups = assemble(settings_, comm).optimizer.param_groups
        return [[(meta_of(param).name, group["weight_decay"]) for param in group["params"]] for group in groups]

    first, *others = run_ranks(3, work)
    assert all(other == first for other in others)
    decay = dict(pair for group in first for pair in group)
    assert len(decay) == len(list(assembled(settings_).model.parameters()))
    plain = {key for key in decay if "layer_norm" in key or ("bias" in key and name != "muon")}
    assert {decay[key] for key in plain} == {0.0}
    assert {decay[key] for key in decay.keys() - plain} == {0.1}


def assembled(settings_):
    return run_ranks(1, lambda comm: assemble(settings_, comm))[0]


def test_options_reach_the_optimizer(tmp_path):
    adam = {"training__adam_beta1": 0.8, "training__adam_beta2": 0.95, "training__adam_epsilon": 1e-6}
    for name in ("adamw", "adamw_8bit", "adamw_bf16"):
        for group in assembled(config(tmp_path, training__optimizer=name, **adam)).optimizer.param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (1e-2, (0.8, 0.95), 1e-6)
    muon = assembled(config(tmp_path, training__optimizer="muon", **adam)).optimizer.param_groups
    assert [group["use_muon"] for group in muon] == [True, False, False]
    assert {group["lr"] for group in muon} == {1e-2}
    assert muon[0]["adjust_lr_fn"] == "match_rms_adamw"
    assert (muon[1]["betas"], muon[1]["eps"]) == ((0.8, 0.95), 1e-6)
    rounding = assembled(config(tmp_path, training__optimizer="adamw_bf16")).optimizer.param_groups
    assert [group["seed"] for group in rounding] == [3, 3]
    for changes, rate in ((OWN_STEPS, None), ({"training__optimizer": "adafactor"}, 1e-2)):
        (group, _) = assembled(config(tmp_path, **changes)).optimizer.param_groups
        assert (group["lr"], group["relative_step"], group["scale_parameter"]) == (rate, rate is None, rate is None)


def test_adafactors_own_steps_are_reported(tmp_path):
    _, memory = run(config(tmp_path, training__max_steps=2, **OWN_STEPS), ranks=1)
    assert [report.learning_rate for report in memory.steps] == [1e-2, 1e-2]


def test_nothing_to_train_is_refused(tmp_path):
    for name in ("adamw", "muon"):
        settings_ = config(tmp_path, training__optimizer=name)
        model = assembled(settings_).model.requires_grad_(requires_grad=False)
        with pytest.raises(ConfigError, match="no trainable parameters"):
            make_optimizer(model, settings_)


def test_frozen_parameters_are_in_no_group(tmp_path):
    for name in NAMES:
        settings_ = config(tmp_path, training__optimizer=name)
        model = assembled(settings_).model
        frozen = [param for key, param in model.named_parameters() if "encoder" in key]
        for param in frozen:
            param.requires_grad_(requires_grad=False)
        stepped = [param for group in make_optimizer(model, settings_).param_groups for param in group["params"]]
        assert len(stepped) == len(list(model.parameters())) - len(frozen)
        assert all(param.requires_grad for param in stepped)


def test_a_checkpoint_of_another_optimizer_is_not_gone_on_from(tmp_path):
    saving = {"training__save_strategy": "steps", "training__save_steps": 1, "training__max_steps": 2}
    run(config(tmp_path, **saving), ranks=1)
    path = tmp_path / "out" / "checkpoints" / "step-00000001"
    other = config(tmp_path, training__optimizer="adafactor", resume=str(path), **saving)
    with pytest.raises(ConfigError) as caught:
        run(other, ranks=1)
    assert f"The run cannot resume from {path}: the model, the optimizer or the global batch has changed" in str(
        caught.value
    )
    assert "training.optimizer: adafactor; in the checkpoint adamw" in str(caught.value)
    assert "fullshard export, then model.path" in str(caught.value)


def test_a_checkpoint_from_before_there_was_a_choice_is_adamws(tmp_path, monkeypatch):
    saving = {"training__save_strategy": "steps", "training__save_steps": 1, "training__max_steps": 2}

    def of_then(*args):
        return {key: value for key, value in deciding_settings(*args).items() if key != "training.optimizer"}

    with monkeypatch.context() as patch:
        patch.setattr(resume, "deciding_settings", of_then)
        run(config(tmp_path, **saving), ranks=1)
    path = tmp_path / "out" / "checkpoints" / "step-00000001"
    assert "training.optimizer" not in (path / "index.json").read_text()
    _, memory = run(config(tmp_path, resume=str(path), **saving), ranks=1)
    assert not any("changed" in note for note in memory.begun[0].notes)
