"""The law of an unsharded optimizer's state: training that goes on with it sharded is the unsharded run's."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import Trainer

from fullshard import fully_shard, step_in_backward
from fullshard.core.engine import unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.saving.optimizer_state import _guesses, load_optimizer_state
from support.models import KINDS, TinyLM, bart, batches, gpt2, lm_loss, lm_with_frozen_parts, seq2seq_loss, t5
from support.parity import replicas
from support.states import assert_same_bits, rank_runs, whole

ROWS = 6  # of each batch; 1, 2 and 3 ranks take equal shares
MAKERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, lr_decay=0.1),
}


def train(model, optimizer, loss_of, data, rank=0, size=1):
    for tokens in data:
        loss_of(model, tokens[rank * ROWS // size : (rank + 1) * ROWS // size]).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def hugging_face_groups(model):
    decay = Trainer.get_decay_parameter_names(None, model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in decay], "weight_decay": 0.1},
        {"params": [p for name, p in named if name not in decay], "weight_decay": 0.0},
    ]


def check(size, make=TinyLM, loss_of=lm_loss, before=None, after=None, given=lambda state: state, **names):
    """Train unsharded, shard there with the state, go on both ways.

    ``before`` and ``after`` make the optimizer from the model; ``given`` turns the state dict into what is loaded.
    """
    before = before or (lambda model: MAKERS["adamw"](model.parameters()))
    reference, models = replicas(make, size)
    optimizer = before(reference)
    train(reference, optimizer, loss_of, batches(3, ROWS))
    state = given(optimizer.state_dict())
    for model in models:
        model.load_state_dict(reference.state_dict())

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        sharded = (after or before)(model)
        load_optimizer_state(model, sharded, state, **names)
        in_backward = not isinstance(sharded, torch.optim.Optimizer)
        train(model, None if in_backward else sharded, loss_of, batches(3, ROWS, seed=2), comm.rank, comm.size)
        with unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    results = run_ranks(size, work)
    train(reference, optimizer, loss_of, batches(3, ROWS, seed=2))
    for weights in results:
        for name, p in reference.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_goes_on_as_unsharded(kind, size):
    check(size, before=lambda model: MAKERS[kind](model.parameters()))


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_trainers_groups_are_found(kind, tmp_path):
    make, loss_of = KINDS[kind]

    def file(state):
        torch.save(state, tmp_path / "optimizer.pt")
        return tmp_path / "optimizer.pt"

    grouped = lambda model: torch.optim.AdamW(hugging_face_groups(model), lr=1e-3)  # noqa: E731
    check(2, make, loss_of, before=grouped, given=file)


@pytest.mark.parametrize("make", [t5, bart, gpt2, TinyLM])
def test_the_guess_is_trainers_own_order(make):
    model = make()
    ids = {id(p): name for name, p in model.named_parameters()}
    groups = [[ids[id(p)] for p in group["params"]] for group in hugging_face_groups(model)]
    assert list(_guesses(model, 2)) == [groups]
    assert all(groups)


def test_names_in_the_state_are_used():
    """In an order that no guess would find."""
    reverse = lambda model: torch.optim.AdamW(list(model.named_parameters())[::-1], lr=1e-2)  # noqa: E731
    check(2, before=reverse, after=lambda model: MAKERS["adamw"](model.parameters()))


def test_names_that_are_given_are_used():
    names = [name for name, _ in TinyLM().named_parameters()][::-1]
    reverse = lambda model: MAKERS["adamw"](list(model.parameters())[::-1])  # noqa: E731
    check(2, before=reverse, after=lambda model: MAKERS["adamw"](model.parameters()), names=[names])


def test_names_in_place_of_numbers_are_used():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = MAKERS["adamw"](model.parameters())
    train(model, optimizer, lm_loss, batches(1, ROWS))
    named = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert_loaded(model, named, named["state"])


def assert_loaded(model, state, expected, size=2, after=lambda model: MAKERS["adamw"](model.parameters())):
    """What is loaded on ``size`` ranks is, put together, ``expected`` by name and key."""
    models = [copy.deepcopy(model) for _ in range(size)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = after(model)
        load_optimizer_state(model, optimizer, state)
        return rank_runs(model, optimizer)

    found = whole(run_ranks(size, work))
    flat = {f"optimizer/{name}/{key}": value.reshape(-1) for name, of in expected.items() for key, value in of.items()}
    assert_same_bits({name: value for name, value in found.items() if name.startswith("optimizer/")}, flat)


@pytest.mark.parametrize("trainable_only", [True, False])
def test_frozen_parameters_may_be_in_the_optimizer_or_not(trainable_only):
    def make(model):
        return MAKERS["adamw"]([p for p in model.parameters() if p.requires_grad or not trainable_only])

    check(2, lm_with_frozen_parts, before=make)
    check(2, lm_with_frozen_parts, before=make, after=lambda model: MAKERS["adamw"](model.parameters()))


def test_optimizers_that_step_in_backward_take_it_over():
    check(2, t5, seq2seq_loss, after=lambda model: step_in_backward(model, MAKERS["adamw"]))


def test_hyperparameters_are_taken_over_and_state_that_is_there_is_filled():
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-3, betas=(0.5, 0.6), weight_decay=0.3)
    train(model, optimizer, lm_loss, batches(1, ROWS))

    def work(comm):
        sharded = fully_shard(copy.deepcopy(model), comm)
        its = torch.optim.AdamW(sharded.parameters(), lr=1.0)
        train(sharded, its, lm_loss, batches(1, ROWS))
        there = {param: state["exp_avg"].data_ptr() for param, state in its.state.items()}
        load_optimizer_state(sharded, its, optimizer.state_dict())
        assert there == {param: its.state[param]["exp_avg"].data_ptr() for param in there}
        (group,) = its.param_groups
        return group["lr"], group["betas"], group["weight_decay"]

    assert run_ranks(1, work) == [(7e-3, (0.5, 0.6), 0.3)]


def swapped(state):
    state["state"][0], state["state"][1] = state["state"][1], state["state"][0]
    return state


def shortened(state):
    state["param_groups"][0]["params"].pop()
    return state


def nested(state):
    state["state"][0]["history"] = [torch.zeros(2)]
    return state


def rowwise(_):
    model = TinyLM()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, lm_loss, batches(1, ROWS))
    return optimizer.state_dict()


MISFITS = {
    "of other parameters": (swapped, {}, r"'exp_avg' of embed.weight has shape \(24,\) and the parameter \(50, 24\)"),
    "of fewer": (shortened, {}, r"groups of \[26\] parameters without names; the model would have \[27\]"),
    "with too few names": (lambda s: s, {"names": [["embed.weight"]]}, r"groups of \[27\] parameters; .* \[1\]"),
    "with unknown names": (lambda s: s, {"names": [["x"] * 27]}, "the model does not have: x"),
    "with lists": (nested, {}, "'history' of embed.weight is a list"),
    "by row": (rowwise, {}, "can be sharded if it is one number, has the parameter's shape"),
    "of a model": (lambda _: TinyLM().state_dict(), {}, "has the keys 'state' and 'param_groups'"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_one_error_on_every_rank_and_changes_nothing(case):
    change, names, text = MISFITS[case]
    reference, models = replicas(TinyLM, 3)
    optimizer = MAKERS["adamw"](reference.parameters())
    train(reference, optimizer, lm_loss, batches(1, ROWS))
    state = change(copy.deepcopy(optimizer.state_dict()))

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        sharded = torch.optim.AdamW(model.parameters(), lr=0.5)
        train(model, sharded, lm_loss, batches(1, ROWS), comm.rank, comm.size)
        before = copy.deepcopy(sharded.state_dict())
        with pytest.raises(CheckpointError, match=text) as error:
            load_optimizer_state(model, sharded, state, **names)
        after = sharded.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for number, values in before["state"].items():
            assert all(torch.equal(after["state"][number][key], value) for key, value in values.items())
        return str(error.value)

    assert len(set(run_ranks(3, work))) == 1


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 no archive", b"text"])
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
    path = tmp_path / "optimizer.pt"
    if content is not None:
        path.write_bytes(content)

    def work(comm):
        model = fully_shard(TinyLM(), comm)
        with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
            load_optimizer_state(model, MAKERS["adamw"](model.parameters()), path)

    run_ranks(1, work)


def test_trainable_parameters_need_to_have_been_stepped():
    model = lm_with_frozen_parts()
    optimizer = MAKERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, lm_loss, batches(1, ROWS))
    state = optimizer.state_dict()
    names = [[name for name, p in model.named_parameters() if p.requires_grad]]
    model.requires_grad_(True)

    def work(comm):
        sharded = fully_shard(copy.deepcopy(model), comm)
        with pytest.raises(CheckpointError, match="did not step"):
            load_optimizer_state(sharded, MAKERS["adamw"](sharded.parameters()), state, names=names)

    run_ranks(1, work)
