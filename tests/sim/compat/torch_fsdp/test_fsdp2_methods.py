"""Methods of FSDP2 modules on rank threads: when parameters are gathered and freed."""

import copy

import pytest
import torch
from torch import nn

from fullshard import unsharded
from fullshard.compat.torch_fsdp.fsdp2 import UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, ShardingError
from support.fsdp2 import SIZE, rows_of, shard, with_models
from support.models import TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, optimizer_for, replicas, train_sharded, train_unsharded


def gathers(model, ledger, tokens):
    """All-gathers of one forward, and of its backward."""
    ledger.entries.clear()
    loss = lm_loss(model, tokens)
    forward = ledger.names.count("all_gather")
    loss.backward()
    return forward, ledger.names.count("all_gather") - forward


@pytest.mark.parametrize(
    ("given", "expected"), [(None, (5, 4)), (True, (5, 5)), (False, (5, 0)), (1, (5, 0)), (SIZE, (5, 5))]
)
def test_reshard_after_forward_says_what_backward_gathers(given, expected):
    def work(comm, model):
        ledger = RecordingComm(comm)
        model = shard(model, ledger, reshard_after_forward=given)
        counts = [gathers(model, ledger, tokens) for tokens in rows_of(comm, 2)]
        model.set_reshard_after_forward(False)
        kept = gathers(model, ledger, rows_of(comm, 1)[0])
        model.set_reshard_after_forward(True)
        return counts, kept, gathers(model, ledger, rows_of(comm, 1)[0])

    for counts, kept, freed in with_models(SIZE, work):
        assert counts == [expected, expected]
        assert kept == (5, 0)
        assert freed == (5, 5)


def test_resharding_to_a_smaller_group_is_taken_for_true_with_a_warning_and_other_numbers_are_refused():
    def work(comm, model):
        with pytest.raises(ConfigError, match="divides the 4 ranks"):
            fully_shard(model, mesh=comm, reshard_after_forward=3)
        ledger = RecordingComm(comm)
        model = shard(model, ledger, reshard_after_forward=2)
        with pytest.raises(ConfigError, match="True or False"):
            model.set_reshard_after_forward(2)
        return gathers(model, ledger, rows_of(comm, 1)[0])

    with pytest.warns(UserWarning, match="reshard_after_forward=2 is taken for True"):
        assert with_models(4, work) == [(5, 5)] * 4


class NeedsSize(nn.Linear):
    """Its constructor has no defaults, so no copy can be made by calling it."""

    def __init__(self, size):
        super().__init__(size, size)


def test_a_deep_copy_is_refused():
    def work(comm):
        model = fully_shard(nn.Sequential(fully_shard(NeedsSize(3), mesh=comm)), mesh=comm)
        for one in (model, model[0]):
            with pytest.raises(ShardingError, match=r"FSDP does not support deepcopy, here of a FSDP[SN]") as refused:
                copy.deepcopy(one)
            assert isinstance(refused.value, AssertionError)

    run_ranks(1, work)


def test_without_reshard_after_backward_the_next_forward_gathers_nothing_until_a_step():
    reference, models = replicas(TinyLM, SIZE)
    data = batches(3, SIZE * ROWS_PER_RANK)
    optimizer = optimizer_for(reference)
    for tokens in data[:2]:
        lm_loss(reference, tokens).backward()
    optimizer.step()
    expected = lm_loss(reference, data[2]).item()

    def work(comm):
        ledger = RecordingComm(comm)
        model = shard(models[comm.rank], ledger)
        model.set_reshard_after_backward(False)
        optimizer = optimizer_for(model)
        counts = [gathers(model, ledger, tokens) for tokens in rows_of(comm, 2)]
        optimizer.step()
        ledger.entries.clear()
        loss = lm_loss(model, rows_of(comm, 3)[2])
        return counts, ledger.names.count("all_gather"), loss.item()

    losses = []
    for counts, after_step, loss in run_ranks(SIZE, work):
        assert counts == [(5, 4), (0, 4)] or counts == [(5, 4), (0, 0)]
        assert after_step == 5
        losses.append(loss)
    assert sum(losses) / SIZE == pytest.approx(expected, abs=1e-5)


def test_unshard_and_reshard_show_full_parameters_and_rows():
    def work(comm, model):
        ledger = RecordingComm(comm)
        model = shard(model, ledger)
        block = model.blocks[0]
        handle = block.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        handle.wait()
        handle.wait()
        shown = block.up.weight.shape
        block.reshard()
        assert model.unshard() is None
        before = ledger.names.count("all_gather")
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        gathered = ledger.names.count("all_gather") - before
        return tuple(shown), len(block.up.weight), gathered

    for shown, rows, gathered in with_models(SIZE, work):
        assert shown == (40, 24)
        assert 0 < rows < 40
        assert gathered == 8  # the root was there already


def test_unshard_after_a_step_gathers_what_the_step_left():
    def work(comm, model):
        model = shard(model, comm)
        block = model.blocks[0]
        block.unshard()
        block.reshard()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        block.unshard()
        before = block.up.weight.detach().clone()
        block.reshard()
        return before.unique().tolist()

    assert with_models(SIZE, work) == [[1.0], [1.0]]


def test_reshard_inside_the_modules_own_forward_is_refused():
    class Reshards(nn.Linear):
        def forward(self, x):
            self.reshard()
            return super().forward(x)

    def work(comm):
        model = fully_shard(Reshards(4, 4), mesh=comm)
        with pytest.raises(ShardingError, match="own forward"):
            model(torch.ones(1, 4))

    run_ranks(1, work)


def test_prefetch_lists_say_what_is_gathered_when():
    def work(comm, model):
        model = shard(model, comm)
        first, second, third, last = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        last.set_modules_to_backward_prefetch([third, second])
        runtime = model._fullshard_runtime
        with pytest.raises(ConfigError, match="fully_shard was called on"):
            first.set_modules_to_forward_prefetch([model.embed])
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        return runtime.schedule.forward_lists, runtime.schedule.backward_lists

    assert with_models(SIZE, work)[0] == ({1: [2, 3]}, {4: [3, 2]})


def test_prefetch_lists_said_before_the_roots_call_hold_after_it():
    def work(comm):
        model = TinyLM()
        for block in model.blocks:
            fully_shard(block, mesh=comm)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        model.blocks[1].set_requires_gradient_sync(False)
        model = fully_shard(model, mesh=comm)
        runtime = model._fullshard_runtime
        return runtime.schedule.forward_lists, [unit.options.reduce_gradients for unit in runtime.units]

    assert run_ranks(1, work)[0] == ({1: [3]}, [True, True, False, True, True])


def test_what_cannot_be_followed_is_refused_by_name():
    def work(comm):
        model = shard(TinyLM(), comm)
        with pytest.raises(ConfigError, match="set_custom_all_gather"):
            model.set_custom_all_gather(object())
        with pytest.raises(ConfigError, match="set_custom_reduce_scatter"):
            model.set_custom_reduce_scatter(object())
        with pytest.raises(ConfigError, match="stream"):
            model.set_all_reduce_hook(print, stream=object())
        with pytest.raises(ConfigError, match="above zero"):
            model.set_gradient_divide_factor(0)
        with pytest.raises(ConfigError, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(0)
        with pytest.raises(ShardingError, match="on the root"):
            model.blocks[0].reset_iter_state()
        with pytest.raises(ConfigError, match="fully_shard was called on"):
            share_comm_ctx([nn.Linear(1, 1)])

    run_ranks(1, work)


def test_a_registered_method_of_a_block_computes_with_full_parameters():
    class Scores(nn.Linear):
        def score(self, x):
            return x @ self.weight.t()

    def work(comm):
        model = nn.Sequential(Scores(4, 4), nn.Linear(4, 4))
        expected = model[0].score(torch.ones(1, 4)).detach()
        fully_shard(model[0], mesh=comm)
        fully_shard(model, mesh=comm)
        register_fsdp_forward_method(model[0], "score")
        register_fsdp_forward_method(nn.Linear(1, 1), "anything")
        with pytest.raises(ShardingError, match="no method rank"):
            register_fsdp_forward_method(model[0], "rank")
        torch.testing.assert_close(model[0].score(torch.ones(1, 4)), expected)

    torch.manual_seed(0)
    run_ranks(1, work)


def test_a_model_is_sharded_where_new_tensors_are_on_the_meta_device():
    def work(comm):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            fully_shard(model[0], mesh=comm)
            fully_shard(model, mesh=comm)
            assert torch.empty(1).is_meta
        model(torch.ones(2, 4)).sum().backward()
        return [param.full_tensor() for param in model.parameters()]

    one, two = run_ranks(SIZE, work)
    for param, same in zip(one, two, strict=True):
        assert torch.equal(param, same)
    assert one[0].std() > 0


def test_each_call_has_a_state_and_formatted_strings_show_the_rows():
    def work(comm, model):
        assert fully_shard.state(model) is None
        for module in (*model, model):
            fully_shard(module, mesh=comm)
        assert len({fully_shard.state(module) for module in (*model, model)}) == 3
        assert fully_shard.state(model) is not None
        weight = model[0].weight
        assert f"{weight}" == repr(weight)
        with pytest.raises(TypeError):
            format(weight, ".3f")

    with_models(SIZE, work, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_to_empty_keeps_what_fully_shard_gave_to_a_meta_model():
    def work(comm):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        model.to_empty(device="cpu")
        with pytest.raises(ShardingError, match="shards are on cpu"):
            model.to_empty(device="cuda")
        model.double()
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        with unsharded(model):
            full = [p.detach().clone() for p in model.parameters()]
        return [(p.dtype, p.abs().sum().item() > 0, p.isfinite().all().item()) for p in full]

    assert run_ranks(SIZE, work) == [[(torch.float64, True, True)] * 4] * SIZE


class Turned(nn.Module):
    """A block with a buffer of its own and a parameter, neither of which the class initializes."""

    def __init__(self, *, persistent):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.empty(8))
        self.register_buffer("table", self.angles(), persistent=persistent)

    @staticmethod
    def angles():
        return torch.cos(torch.arange(8.0))

    def forward(self, x, shift):
        return torch.tanh(self.linear(x) * self.table + self.scale * shift)


class InitializedLast(nn.Module):
    """As torchtitan's models: ``init_weights``, called after ``to_empty``, also computes buffers."""

    def __init__(self, *, persistent):
        super().__init__()
        self.embed = nn.Embedding(33, 8)
        self.layers = nn.ModuleList([Turned(persistent=persistent), Turned(persistent=persistent)])
        self.head = nn.Linear(8, 33, bias=False)
        self.register_buffer("shift", torch.ones(8), persistent=persistent)

    def init_weights(self):
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, param in self.named_parameters():
                nn.init.zeros_(param) if "bias" in name else nn.init.normal_(param, std=0.3, generator=generator)
            self.shift = torch.linspace(0, 1, 8)
            for layer in self.layers:
                layer.table.copy_(Turned.angles())

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.shift)
        return self.head(x)


def token_loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_meta_model_may_be_initialized_after_to_empty(persistent):
    reference = InitializedLast(persistent=persistent)
    reference.init_weights()
    data = [tokens % 33 for tokens in batches(4, SIZE * ROWS_PER_RANK)]
    plain = train_unsharded(reference, token_loss, data)

    def work(comm):
        with torch.device("meta"):
            model = InitializedLast(persistent=persistent)
        for layer in model.layers:
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        assert model.shift.is_meta
        model.to_empty(device="cpu")
        with unsharded(model):
            assert model.layers[0].scale.isnan().all()
        assert model.layers[1].table.isnan().all()
        model.init_weights()
        return train_sharded(model, comm, token_loss, data, sharded=True)

    with pytest.warns(UserWarning, match=r"nothing initializes scale: Turned has no reset_parameters.* NaN") as caught:
        runs = run_ranks(SIZE, work)
    assert sum("Turned" in str(one.message) for one in caught) == 2  # a unit each, on rank 0
    for run in runs:
        assert_same_run(run, plain)


def scale(model):
    for param in model.parameters():
        param.data.mul_(0.5)


CHANGES = {"fused_step": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step(), "data": scale}


@pytest.mark.parametrize("keep", ["after_backward", "unshard"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_stays_gathered_is_gathered_anew_after_changes_that_no_version_counts(change, keep):
    reference, models = replicas(TinyLM, SIZE)
    data = batches(1, SIZE * ROWS_PER_RANK)[0]
    lm_loss(reference, data).backward()
    CHANGES[change](reference)
    expected = lm_loss(reference, data[:2]).item()

    def work(comm):
        model = shard(models[comm.rank], comm)
        model.set_reshard_after_backward(keep != "after_backward")
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        if keep == "unshard":
            for module in (model, *model.blocks):
                module.unshard(async_op=True)
        CHANGES[change](model)
        return lm_loss(model, data[:2]).item()

    assert run_ranks(SIZE, work) == pytest.approx([expected] * SIZE, abs=1e-5)
