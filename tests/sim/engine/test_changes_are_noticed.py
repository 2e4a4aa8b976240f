"""What users change between and inside passes is used, or refused by name on every rank."""

import copy
import dataclasses
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import fullshard
from fullshard import ShardingStrategy, fully_shard, no_all_reduce, no_sync, unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ShardingError
from support.parity import two_by_two

SIZE = 3


def net():
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))


def on_ranks(work, make=net, **options):
    """``work(model, comm)`` on every rank, of equal models; also the unsharded model."""
    torch.manual_seed(0)
    reference = make()
    models = [copy.deepcopy(reference) for _ in range(SIZE)]
    run = run_ranks(SIZE, lambda comm: work(fully_shard(models[comm.rank], comm, wrap=None, **options), comm))
    return run, reference


def backward(model):
    model(torch.ones(2, 6)).square().mean().backward()


def unsharded_of(model):
    with unsharded(model):
        return model[0].weight.detach().clone()


def test_data_assigned_after_the_last_forward_is_what_every_reader_sees():
    def work(model, comm):
        backward(model)
        for param in model.parameters():
            param.data = torch.full_like(param.data, 0.5)
        state = fullshard.full_state_dict(model)
        for param in model.parameters():
            param.data = torch.full_like(param.data, 0.25)
        shown = unsharded_of(model)
        for param in model.parameters():
            param.data = torch.full_like(param.data, 0.125)
        streamed = {name: full for _, tensors in fullshard.full_tensors(model) for name, full in tensors.items()}
        for param in model.parameters():
            param.data = torch.full_like(param.data, 0.0625)
        direct = model[0](torch.ones(1, 6))
        return state, shown, streamed, direct

    for rank, (state, shown, streamed, direct) in enumerate(on_ranks(work)[0]):
        assert (shown == 0.25).all()
        torch.testing.assert_close(direct, torch.full((1, 7), 6 * 0.0625 + 0.0625))
        if rank == 0:
            assert all((full == 0.5).all() for full in state.values())
            assert all((full == 0.125).all() for full in streamed.values())


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class ClampedData(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class ScaledTable(nn.Embedding):
    def forward(self, x):
        self.weight.data[x] *= 0.5
        return super().forward(x)


class ClampedOfFour(Clamped):
    def __init__(self):
        super().__init__(6, 5)
        self.scale, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))


WRITES = {
    "clamp_": (lambda: Clamped(6, 5), torch.ones(2, 6), "weight, bias"),
    "three of four are named": (ClampedOfFour, torch.ones(2, 6), "weight, bias, scale"),
    "data.clamp_": (lambda: ClampedData(6, 5), torch.ones(2, 6), "weight, bias"),
    "data of a table": (lambda: ScaledTable(9, 4), torch.tensor([1, 2]), "weight"),
    "max_norm": (lambda: nn.Embedding(9, 4, max_norm=0.1), torch.tensor([1, 2]), "weight"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_change_of_a_parameter_inside_forward_is_refused(name):
    make, x, names = WRITES[name]

    def work(model, comm):
        with pytest.raises(ShardingError, match=f"changed a parameter in place, one of {names}…: .* would be lost"):
            model(x)

    on_ranks(work, make)


class AssignsData(nn.Linear):
    assigns = True

    def forward(self, x):
        values = self.weight.data.clone()
        if self.assigns:
            self.weight.data = values.clamp(-0.01, 0.01)
        return nn.functional.linear(x, values, self.bias)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_data_assigned_inside_forward_is_refused_and_read_as_ever(strategy):
    def work(model, comm):
        with pytest.raises(ShardingError, match=r"weight\.data was assigned during forward"):
            model(torch.ones(2, 6))
        model.assigns = False
        with torch.no_grad():
            return model(torch.ones(2, 6))

    found, reference = on_ranks(work, lambda: AssignsData(6, 5), strategy=strategy)
    reference.assigns = False
    for output in found:
        torch.testing.assert_close(output, reference(torch.ones(2, 6)).detach())


class CastsItself(nn.Linear):
    def forward(self, x):
        self.to(torch.float32)  # as Switch Transformers' routers
        return super().forward(x)


def test_a_module_that_casts_itself_in_forward_is_used_or_refused():
    half = fullshard.MixedPrecision(param=torch.bfloat16)

    def used(model, comm):
        return model(torch.ones(2, 6)).detach()

    def refused(model, comm):
        with pytest.raises(
            ShardingError, match=r"weight\.data was assigned .*bfloat16 to torch\.float32.*\(keep_fp32="
        ):
            model(torch.ones(2, 6))

    found, reference = on_ranks(used, lambda: CastsItself(6, 5))
    for output in found:
        torch.testing.assert_close(output, reference(torch.ones(2, 6)).detach())
    on_ranks(refused, lambda: CastsItself(6, 5), mp_policy=half)
    kept = dataclasses.replace(half, keep_fp32=("CastsItself",))
    on_ranks(used, lambda: CastsItself(6, 5), mp_policy=kept)


def replaced(model):
    model[0] = nn.Linear(6, 7)


def removed(model):
    del model[2]


def added(model):
    model.append(nn.Linear(3, 2))


def wrapped(model):
    model[2] = nn.Sequential(model[2], nn.Linear(3, 3))


TREES = {replaced: "no longer part", removed: "no longer part", added: "was added", wrapped: "was added"}


@pytest.mark.parametrize("change", TREES)
def test_a_tree_changed_after_a_step_is_noticed_in_the_next_pass_and_when_saving(change):
    def work(model, comm):
        backward(model)
        change(model)
        for use in (lambda: model(torch.ones(2, 6)), lambda: fullshard.full_state_dict(model)):
            with pytest.raises(ShardingError, match=TREES[change]):
                use()

    on_ranks(work)


class SharedMemory(nn.Module):
    """A head that was given the table's memory, in a Parameter of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = nn.Parameter(self.table.weight.data)

    def forward(self, ids):
        return self.head(self.table(ids))


def test_two_parameters_of_one_memory_are_one_tie():
    torch.manual_seed(0)
    models = [SharedMemory() for _ in range(SIZE)]
    for model in models[1:]:
        model.table.weight.data.copy_(models[0].table.weight.data)
    tied = copy.deepcopy(models[0])
    tied.head.weight = tied.table.weight
    ids = torch.tensor([[1, 2], [3, 4]])
    tied(ids).square().mean().backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        model(ids).square().mean().backward()
        assert model.head.weight is model.table.weight
        return model.table.weight.grad.full_tensor()

    for found in run_ranks(SIZE, work):
        torch.testing.assert_close(found, tied.table.weight.grad, atol=1e-6, rtol=0)


def test_gradients_of_some_inputs_only_are_those_of_the_unsharded_model():
    def work(model, comm):
        model(torch.ones(2, 6)).square().mean().backward(inputs=[model[0].weight])
        assert [param.grad is None for param in model.parameters()] == [False, True, True, True]
        return model[0].weight.grad.full_tensor()

    found, reference = on_ranks(work)
    backward(reference)
    for full in found:
        torch.testing.assert_close(full, reference[0].weight.grad, atol=1e-6, rtol=0)


def test_a_step_after_no_sync_backwards_alone_is_refused():
    def work(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with no_sync(model):
            backward(model)
        with pytest.raises(ShardingError, match="computed inside no_sync or no_all_reduce and wait"):
            optimizer.step()
        backward(model)
        optimizer.step()

    on_ranks(work)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_steps_closure_may_run_the_backward_that_ends_the_accumulation(by_name):
    def work(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with no_sync(model):
            backward(model)
        optimizer.step(**{"closure": partial(backward, model)}) if by_name else optimizer.step(partial(backward, model))
        return unsharded_of(model)

    found, reference = on_ranks(work)
    for _ in range(2):
        backward(reference)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for weight in found:
        torch.testing.assert_close(weight, reference[0].weight, atol=1e-6, rtol=0)


def test_a_step_whose_closure_leaves_gradients_waiting_is_refused():
    def work(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = unsharded_of(model)

        def closure():
            with no_sync(model):
                backward(model)

        with pytest.raises(ShardingError, match="computed inside no_sync or no_all_reduce and wait"):
            optimizer.step(closure)
        backward(model)
        assert torch.equal(unsharded_of(model), before)
        optimizer.step()

    on_ranks(work)


class IgnoresClosures(torch.optim.SGD):
    def step(self, closure=None):
        super().step()


class Counting:
    calls = 0

    def __call__(self):
        self.calls += 1


def test_a_step_that_ignores_its_closure_does_not_hide_waiting_gradients():
    def work(model, comm):
        optimizer, closure = IgnoresClosures(model.parameters(), lr=0.1), Counting()
        with no_sync(model):
            backward(model)
        with pytest.raises(ShardingError, match="computed inside no_sync or no_all_reduce and wait"):
            optimizer.step(closure)
        backward(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step(closure)
        return closure.calls

    assert on_ranks(work)[0] == [1] * SIZE


def test_a_step_after_no_all_reduce_backwards_alone_is_refused():
    models = [copy.deepcopy(model) for model in [net()] for _ in range(4)]

    def work(comm):
        model = fully_shard(models[comm.rank], two_by_two(comm), strategy=ShardingStrategy.HYBRID_SHARD, wrap=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with no_all_reduce(model):
            backward(model)
        with pytest.raises(ShardingError, match="computed inside no_sync or no_all_reduce and wait"):
            optimizer.step()
        backward(model)
        optimizer.step()

    run_ranks(4, work)


def test_learning_rates_that_differ_are_told_on_every_rank_at_the_next_backward():
    def work(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            backward(model)
            optimizer.step()
            schedule.step()
        backward(model)
        optimizer.param_groups[0]["lr"] = 0.1 if comm.rank else 0.2
        optimizer.step()
        with pytest.raises(MismatchError, match=r"different learning rates: .*0\.2.* on rank 0 and .*0\.1"):
            backward(model)

    on_ranks(work)


def with_statistics():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_buffers_that_follow_the_data_are_told_at_evaluation_and_saving_and_made_equal():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = on_ranks(work_without_filters, with_statistics)
    texts = [str(one.message) for one in caught]
    assert sum("1.running_mean, differ between ranks" in text for text in texts) == 2 * SIZE
    assert all(torch.equal(mean, found[0]) for mean in found)


def work_without_filters(model, comm):
    x = torch.full((2, 6), 1.0 + comm.rank) * torch.tensor([[1.0], [2.0]])
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 6))  # told
        model(torch.ones(2, 6))  # not again
    fullshard.full_state_dict(model)  # told
    fullshard.broadcast_buffers(model)
    fullshard.full_state_dict(model)
    return model[1].running_mean.clone()


def test_ignored_parameters_that_train_are_told_of_and_averaged_on_request():
    torch.manual_seed(0)
    reference = net()
    models = [copy.deepcopy(reference) for _ in range(SIZE)]
    data = torch.randn(2 * SIZE, 6)
    reference(data).square().mean().backward()

    def work(comm):
        bias = models[comm.rank][2].bias
        model = fully_shard(models[comm.rank], comm, wrap=None, ignored_params=[bias])
        assert model[2].bias is bias
        model(data[2 * comm.rank : 2 * comm.rank + 2]).square().mean().backward()
        fullshard.average_ignored_gradients(model)
        return model[2].bias.grad

    with pytest.warns(UserWarning, match="1 of ignored_params are trainable"):
        found = run_ranks(SIZE, work)
    for gradient in found:
        torch.testing.assert_close(gradient, reference[2].bias.grad, atol=1e-6, rtol=0)


def assigned(model):
    model[0].weight.data = model[0].weight.data * 2


def from_a_vector(model):
    params = list(model.parameters())
    vector = torch.nn.utils.parameters_to_vector(params)
    torch.nn.utils.vector_to_parameters(vector * 2, params)


def swapped(model):
    backup = model[0].weight.data
    model[0].weight.data = torch.zeros_like(backup)
    model(torch.ones(1, 6))
    model[0].weight.data = backup


def copied(model):
    twin = copy.deepcopy(model[0].weight)
    twin.data = nn.Parameter(model[0].weight).data * 2
    model[0].weight.data.copy_(twin)


def loaded(model):
    state = {name: value * 2 for name, value in model.state_dict().items()}
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"


@pytest.mark.parametrize("change", [assigned, from_a_vector, swapped, copied, loaded])
def test_what_is_written_inside_unsharded_is_kept_however_it_is_written(change):
    def work(model, comm):
        with unsharded(model):
            change(model)
        backward(model)
        return fullshard.full_state_dict(model)

    (state, *_), reference = on_ranks(work)
    change(reference)
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value), name


def test_another_dtype_inside_unsharded_is_refused_and_the_values_stay():
    def work(model, comm):
        with (
            pytest.raises(ShardingError, match=r"0\.weight \(\(7, 6\), torch\.float16\).*another shape or dtype"),
            unsharded(model),
        ):
            model.half()
        return fullshard.full_state_dict(model)

    (state, *_), reference = on_ranks(work)
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value), name
