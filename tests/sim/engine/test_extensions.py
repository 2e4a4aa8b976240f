"""Parameters that gather themselves: the unsharded run on their rounded values, whatever the ranks and strategy."""

import pytest
import torch
from torch import nn

from fullshard import (
    Checkpoints,
    CPUOffload,
    FirstValues,
    ShardingStrategy,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    plan,
    unsharded,
)
from fullshard.core.comm import RecordingComm
from fullshard.core.engine.extension.extension_lane import ExtensionLane
from fullshard.core.engine.full.summon import summoned_parameters
from fullshard.core.engine.registry import runtime_of
from fullshard.core.optim import ExponentialMovingAverage
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError, WrapError
from support.extended import Codes, Halved, Scaled, blocks, blocks_over_codes, rounded
from support.parity import mesh_for, size_for

ROWS = 2


def data(rank, steps):
    draws = torch.Generator().manual_seed(7)
    everyone = torch.randn(steps, 12, 32, generator=draws)
    return everyone[:, rank * ROWS : (rank + 1) * ROWS]


def loss_of(model, rows):
    return model(rows).float().square().mean()


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, full, kind):
        return rounded(kind, full)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def expected(kind, ranks, steps=4):
    """Losses and weights of the unsharded run of all ranks' rows."""
    model = blocks(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = {name for name, _ in model.named_parameters() if name.endswith("weight")}
    losses = []
    for step in range(steps):
        rows = torch.cat([data(rank, steps)[step] for rank in range(ranks)])
        shown = {name: Rounded.apply(p, kind) if name in names else p for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, shown, rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def train(model, rank, steps=4, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(trainable(model), lr=1e-3)
    losses = []
    for rows in data(rank, steps):
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_ranks(ranks, models, work, **options):
    def run(comm):
        model = fully_shard(
            models[comm.rank], mesh_for(options.get("strategy", ShardingStrategy.FULL_SHARD), comm), **options
        )
        return work(model, comm)

    return run_ranks(ranks, run)


@pytest.mark.parametrize("kind", [Scaled, Halved])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_the_unsharded_run_on_rounded_values(kind, ranks):
    losses, weights = expected(kind, ranks)
    models = [blocks(kind) for _ in range(ranks)]
    found = on_ranks(ranks, models, lambda model, comm: (train(model, comm.rank), full_state_dict(model)), wrap=None)
    torch.testing.assert_close(torch.tensor([f for f, _ in found]).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5)
    saved = found[0][1]
    assert set(saved) == set(weights)
    for name, value in weights.items():
        assert type(saved[name]) is torch.Tensor
        torch.testing.assert_close(saved[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_every_strategy_gives_it(strategy):
    ranks = size_for(strategy, 2)
    losses, _ = expected(Scaled, ranks)
    models = [blocks(Scaled) for _ in range(ranks)]
    found = on_ranks(ranks, models, lambda model, comm: train(model, comm.rank), strategy=strategy)
    torch.testing.assert_close(torch.tensor(found).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5)


def test_what_the_class_returns_is_sent_and_only_that_is_kept():
    models = [blocks(Scaled, count=1) for _ in range(2)]

    def work(comm):
        recorded = RecordingComm(comm)
        model = fully_shard(models[comm.rank], recorded, wrap=None)
        tracker = runtime_of(model).tracker
        train(model, comm.rank, steps=1)
        recorded.entries.clear()
        during = []
        model[0][0].register_forward_pre_hook(lambda *_: during.append(tracker.live["gathered"]))
        with torch.no_grad():
            loss_of(model, data(comm.rank, 1)[0])
        gathers = [entry.sent_bytes for entry in recorded.entries if entry.collective == "all_gather"]
        return sorted(gathers), during, tracker.live["gathered"]

    for gathers, during, live in run_ranks(2, work):
        # Codes and scales of (64, 32) and of (32, 64), half of them here, and the biases together.
        assert gathers == sorted([1024, 4 * 32, 1024, 4 * 16, 4 * 48])
        assert during == [4 * (2 * 64 * 32 + 96)]  # the full parameters: nothing of them is in the codes
        assert live == 0


def test_uneven_rows_are_padded():
    losses, _ = expected(Scaled, 3)
    models = [blocks(Scaled) for _ in range(3)]  # 64 and 32 rows: 22, 22, 20 and 11, 11, 10
    found = on_ranks(3, models, lambda model, comm: train(model, comm.rank))
    torch.testing.assert_close(torch.tensor(found).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5)


def test_frozen_and_trainable_ones_of_one_unit():
    frozen = ("0.0.weight", "1.2.weight")
    models = [blocks(Scaled, frozen=frozen) for _ in range(2)]
    before = {name: value.clone() for name, value in blocks(None).named_parameters()}
    for name in frozen:  # FSDP1's way is the same: replicated or cut
        assert before[name].numel()
    saved = on_ranks(2, models, lambda model, comm: (train(model, comm.rank), full_state_dict(model))[1], wrap=None)[0]
    for name, value in before.items():
        assert torch.equal(saved[name], value) is (name in frozen), name


def test_a_model_on_the_meta_device_gets_its_own_first_values():
    def work(comm):
        with torch.device("meta"):
            model = blocks(Scaled)
        return full_state_dict(fully_shard(model, comm))

    saved = run_ranks(2, work)[0]
    assert all(value.isfinite().all() for value in saved.values())
    assert saved["0.0.weight"].std() > 0


def test_the_optimizer_sees_plain_rows():
    models = [blocks(Scaled) for _ in range(2)]

    def look(model, comm):
        train(model, comm.rank, steps=1)
        weight = model[0][0].weight
        return tuple(weight.shape), weight.to_local().dtype, type(weight.to_local())

    assert on_ranks(2, models, look)[1] == ((32, 32), torch.float32, torch.Tensor)


def test_full_parameters_are_shown_but_not_written_back():
    models = [blocks(Scaled) for _ in range(2)]

    def work(model, comm):
        with unsharded(model):
            shown = model[0][0].weight.clone()
        changed = pytest.raises(ShardingError, match=r"0\.0\.weight was changed inside unsharded")
        with changed, unsharded(model), torch.no_grad():
            model[0][0].weight.add_(1)
        return shown

    torch.testing.assert_close(on_ranks(2, models, work)[0], rounded(Scaled, blocks(None)[0][0].weight.detach()))


@pytest.mark.parametrize("make", [blocks, blocks_over_codes])
def test_a_freed_full_parameter_is_not_read(make):
    models = [make() for _ in range(2)]

    def work(model, comm):
        seen = []
        model[0][0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
        train(model, comm.rank, steps=1)
        with pytest.raises(ShardingError, match="after its unit released it"):
            seen[0] + 1

    on_ranks(2, models, work)


class OneMethod(Scaled):
    fsdp_post_all_gather = None

    def __getattribute__(self, name):
        if name == "fsdp_post_all_gather":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Opaque(Scaled):
    __tensor_flatten__ = None

    def __getattribute__(self, name):
        if name == "__tensor_flatten__":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("kind", "words"), [(OneMethod, "without fsdp_post_all_gather"), (Opaque, "__tensor_flatten__")]
)
def test_a_class_that_cannot_be_taken_apart_is_refused(kind, words):
    models = [blocks(kind) for _ in range(2)]

    def work(comm):
        with pytest.raises(WrapError, match=words):
            fully_shard(models[comm.rank], comm)

    run_ranks(2, work)


def test_rows_for_some_ranks_only_are_refused_where_the_class_cannot_know():
    models = [nn.Sequential(nn.Linear(4, 2)) for _ in range(3)]
    for model in models:
        model[0].weight = nn.Parameter(Scaled(torch.ones(2, 4)))

    def work(comm):
        with pytest.raises(WrapError, match=r"cut into 1 rows a rank: 1 of 3 ranks have none"):
            fully_shard(models[comm.rank], comm)

    run_ranks(3, work)


class Unpadded(Scaled):
    """Sends a number for each rank's rows, which differ."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data.new_zeros(len(self._data) + 1),), None


def test_parts_of_other_sizes_are_refused_on_every_rank():
    models = [blocks(Unpadded) for _ in range(3)]

    def work(model, comm):
        with pytest.raises(ShardingError, match="Ranks must send equal parts"):
            loss_of(model, data(comm.rank, 1)[0])

    on_ranks(3, models, work)


@pytest.mark.parametrize("frozen", ["shard", "replicate"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_frozen_codes_and_scales_are_the_unsharded_run(frozen, ranks):
    model = blocks(None)
    for block in model:
        block[0].weight.data = Codes.of(block[0].weight.detach()).full()
        block[0].weight.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
    losses = []
    for step in range(4):
        loss = loss_of(model, torch.cat([data(rank, 4)[step] for rank in range(ranks)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    models = [blocks_over_codes() for _ in range(ranks)]
    found = on_ranks(ranks, models, lambda model, comm: train(model, comm.rank), frozen=frozen)
    torch.testing.assert_close(torch.tensor(found).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5)


def test_codes_and_scales_are_saved_as_bytes_and_resumed_on_other_ranks(tmp_path):
    def saved(size, path=None):
        models = [blocks_over_codes() for _ in range(size)]

        def work(model, comm):
            optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
            if path is not None:
                with torch.no_grad():
                    model[0][0].weight.zero_()
                load_checkpoint(model, optimizer, path)
            train(model, comm.rank, steps=1)
            with Checkpoints(tmp_path / str(size), ranks=comm) as checkpoints:
                path_here = checkpoints.save(model, optimizer, step=1)
            with unsharded(model):
                return str(path_here), model[0][0].weight.full(), full_state_dict(model)

        return on_ranks(size, models, work, frozen="shard")[0]

    path, before, state = saved(2)
    assert (state["0.0.weight"].shape, state["0.0.weight"].dtype) == ((64, 32 + 4), torch.uint8)
    assert torch.equal(saved(4, path)[1], before)
    assert torch.equal(before, Codes.of(blocks(None)[0][0].weight.detach()).full())


@pytest.mark.parametrize(
    ("ranks", "trained", "words"),
    [(2, True, "Freeze it"), (3, False, "cut into 64 equal groups of rows: .* by 3 ranks")],
)
def test_codes_that_are_trained_or_cannot_be_divided_are_refused(ranks, trained, words):
    models = [blocks_over_codes() for _ in range(ranks)]
    for model in models:
        model[0][0].weight.requires_grad_(requires_grad=trained)

    def work(comm):
        with pytest.raises(WrapError, match=words):
            fully_shard(models[comm.rank], comm)

    run_ranks(ranks, work)


def test_codes_are_not_shown_to_plain_modules():
    models = [blocks_over_codes() for _ in range(2)]

    def work(model, comm):
        with pytest.raises(ShardingError, match="sharded as their bytes"), summoned_parameters(model, model.modules()):
            pass

    on_ranks(2, models, work)


@pytest.mark.parametrize("others", [1, 3])
def test_a_checkpoint_resumes_on_other_ranks(tmp_path, others):
    def run(size, path=None):
        models = [blocks(Scaled) for _ in range(size)]

        def work(model, comm):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if path is not None:
                load_checkpoint(model, optimizer, path)
                return "", steps(model, optimizer)
            steps(model, optimizer)
            with Checkpoints(tmp_path / "saved", ranks=comm) as checkpoints:
                saved = checkpoints.save(model, optimizer, step=1)
            return str(saved), steps(model, optimizer)

        return on_ranks(size, models, work)[0]

    def steps(model, optimizer):  # the same rows on every rank
        return train(model, 0, steps=2, optimizer=optimizer)

    path, losses = run(2)
    torch.testing.assert_close(run(others, path)[1], losses, atol=1e-6, rtol=1e-6)


def test_an_evaluation_in_inference_mode_may_come_first():
    losses, _ = expected(Scaled, 2)
    models = [blocks(Scaled) for _ in range(2)]

    def work(model, comm):
        with torch.inference_mode():
            model(data(comm.rank, 1)[0])
        return train(model, comm.rank)

    found = on_ranks(2, models, work)
    torch.testing.assert_close(torch.tensor(found).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5)


def test_a_users_function_may_initialize_them():
    def work(comm):
        with torch.device("meta"):
            model = blocks(Scaled)

        def initialize(module):
            module.to_empty(device="cpu", recurse=False)
            for param in module.parameters(recurse=False):
                param.detach().fill_(0.25)

        model = fully_shard(model, comm, first_values=FirstValues(initialize=initialize))
        return full_state_dict(model)

    assert all((value == 0.25).all() for value in run_ranks(2, work)[0].values())


def test_codes_on_the_meta_device_are_refused():
    def work(comm):
        with torch.device("meta"):
            model = blocks_over_codes()
        with pytest.raises(WrapError, match="where nothing gives it values"):
            fully_shard(model, comm)

    run_ranks(2, work)


def test_a_plan_with_shards_in_host_memory():
    planned = plan(
        blocks_over_codes,
        lambda: torch.zeros(2, 32),
        world_size=2,
        gpu="h100",
        optimizer_fn=lambda model: torch.optim.AdamW(trainable(model)),
        loss_fn=loss_of,
        offload_policy=CPUOffload(),
    )
    assert planned.account["gathered"] > 0


class Sent(Scaled):
    """Sends its values as they are."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data,), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        if out is None:
            made = gathered[0].clone()
            return made, (made,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[0])
        return None


class SentPadded(Sent):
    """Pads itself, and hands its rows over with the padding."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        sent = self._data.new_zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
        sent[: len(self._data)] = self._data
        return (sent,), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        if out is not None:
            return super().fsdp_post_all_gather([gathered[0][: len(out)]], None, param_dtype, out=out)
        made = self.laid_out(gathered[0])
        return made, (made,)


class ByColumns(SentPadded):
    def laid_out(self, rows):
        return rows.t().contiguous().t()


class WithOffset(SentPadded):
    def laid_out(self, rows):
        return torch.cat([rows.new_full((2, rows.shape[1]), 99.0), rows])[2:]


class OtherShape(SentPadded):
    def laid_out(self, rows):
        return rows.reshape(-1, 4)


class IgnoresOut(Sent):
    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return super().fsdp_post_all_gather(gathered, metadata, param_dtype)


class ReturnsNothing(Sent):
    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return None


class WithNumbers(Sent):
    """Sends four numbers a rank besides, as many as the first rank has rows."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data, torch.arange(4.0) + 10 * mesh.get_local_rank()), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        assert gathered[1].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
        return super().fsdp_post_all_gather(gathered, metadata, param_dtype, out=out)


class LosesItself(Sent):
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made._data if func is torch.ops.aten.new_zeros.default else made


def one_matrix(kind, rows=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, rows, bias=False))
    model[0].weight = nn.Parameter(kind(model[0].weight.detach()))
    return model


@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize("kind", [Sent, ByColumns, WithOffset])
def test_the_full_parameter_may_lie_in_memory_in_any_way(kind, rows):
    want = one_matrix(kind, rows)[0].weight._data
    models = [one_matrix(kind, rows) for _ in range(2)]
    for shown in on_ranks(2, models, lambda model, comm: [model(torch.eye(8)).t() for _ in range(2)]):
        for one in shown:
            torch.testing.assert_close(one, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OtherShape, r"0\.weight, a OtherShape, returned a full parameter of shape \(16, 4\)"),
        (IgnoresOut, r"0\.weight, a IgnoresOut, was given out= and returned a tensor with other memory"),
        (ReturnsNothing, r"0\.weight, a ReturnsNothing, returned a NoneType in the first gather"),
    ],
)
def test_what_a_class_returns_against_the_protocol_is_refused(kind, words):
    models = [one_matrix(kind) for _ in range(2)]

    def work(model, comm):
        with pytest.raises(ShardingError, match=words):
            loss_of(model, torch.eye(8)) + loss_of(model, torch.eye(8))

    on_ranks(2, models, work)


def test_numbers_that_are_not_rows_are_handed_over_whole():
    models = [one_matrix(WithNumbers, 7) for _ in range(2)]
    on_ranks(2, models, lambda model, comm: [model(torch.eye(8)) for _ in range(2)])


@pytest.mark.parametrize("write", [lambda data: data.mul_(2), lambda data: data.copy_(data.flip(0).clone())])
def test_writes_through_data_are_refused_too(write):
    models = [one_matrix(Sent) for _ in range(2)]

    def work(model, comm):
        with unsharded(model):
            pass
        with pytest.raises(ShardingError, match=r"0\.weight was changed inside unsharded"), unsharded(model):
            write(model[0].weight.data)
        with unsharded(model, write_back=False):
            write(model[0].weight.data)
        with unsharded(model):
            return model[0].weight.clone()

    assert torch.equal(on_ranks(2, models, work)[0], one_matrix(Sent)[0].weight._data)


def test_a_refusal_leaves_the_model_as_it_was():
    models = [nn.Sequential(one_matrix(Sent), one_matrix(LosesItself)) for _ in range(2)]

    def work(comm):
        with pytest.raises(WrapError, match=r"1\.0\.weight .* is a LosesItself, but its rows a Tensor"):
            fully_shard(models[comm.rank], comm)
        return models[comm.rank](torch.eye(8)).isfinite().all()

    assert all(run_ranks(2, work))


@pytest.mark.parametrize("make", [blocks, blocks_over_codes])
def test_rows_and_gradients_are_not_held_between_passes(make):
    models = [make() for _ in range(2)]

    def work(model, comm):
        lanes = [lane for unit in runtime_of(model).units for lane in unit.lanes if isinstance(lane, ExtensionLane)]

        def held():
            extensions = [lane.extension for lane in lanes]
            return sum(getattr(one._local, one._inside[0]).numel() for one in extensions)

        before = held()
        train(model, comm.rank, steps=1)
        lane = next((one for one in lanes if one.trainable), None)
        if lane is not None:  # one parameter: to wait for other gradients saves no copy
            lane.add_gradient(0, torch.ones(lane.shapes[0]))
            assert not lane.held
            lane.drop_gradient()
        return before, held()

    assert on_ranks(2, models, work) == [(0, 0)] * 2


class AsksTheGroup(Sent):
    def fsdp_pre_all_gather(self, mesh):
        group = mesh.get_group()
        assert (group.size(), group.rank()) == (mesh.size(), mesh.get_local_rank())
        return (self._data,), None


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_mesh_has_a_group(ranks):
    models = [one_matrix(AsksTheGroup) for _ in range(ranks)]
    on_ranks(ranks, models, lambda model, comm: model(torch.eye(8)))


class WithoutView(Scaled):
    """A full parameter that computes a linear layer only, as torchao's packed weights."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.view.default, torch.ops.aten.alias.default):
            raise NotImplementedError(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


class MakesOneWithoutView(Sent):
    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return None if out is not None else (WithoutView(gathered[0]), gathered)


class UsesOneWithoutView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, full):
        ctx.save_for_backward(rows)
        return rows @ full._data.t()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient.t() @ ctx.saved_tensors[0]


class OverOneWithoutView(nn.Linear):
    def forward(self, rows):
        return UsesOneWithoutView.apply(rows, self.weight)


def test_the_class_of_the_full_parameter_needs_no_view():
    plain, rows = one_matrix(Sent)[0].weight._data.clone(), torch.ones(4, 8)
    models = [OverOneWithoutView(8, 8, bias=False) for _ in range(2)]
    for model in models:
        model.weight = nn.Parameter(MakesOneWithoutView(plain.clone()))

    def work(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(model, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_state_dict(model)

    saved = on_ranks(2, models, work, wrap=None)[0]
    for _ in range(2):
        plain.requires_grad_()
        plain = (plain - 0.1 * torch.autograd.grad((rows @ plain.t()).square().mean(), plain)[0]).detach()
    torch.testing.assert_close(saved["weight"], plain)


def test_what_was_set_ahead_holds_until_the_shard_changes():
    models = [blocks(Scaled, count=1) for _ in range(2)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        params = [param for _, param in runtime_of(model).all_params() if isinstance(param.lane, ExtensionLane)]
        optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1), ExponentialMovingAverage(model, decay=0.5)

        def kept():
            """Run a pass, which gathers, and return what is left of what was set."""
            loss_of(model, data(comm.rank, 1)[0]).backward()
            return [param.lane.extension.get("ahead") for param in params]

        def set_all():
            for param in params:
                param.lane.extension.set("ahead", 1, param.sharded)

        set_all()
        found = [kept()]
        optimizer.step()
        found.append(kept())
        average.update()
        set_all()
        with average.applied():
            found.append(kept())
        set_all()
        model.load_state_dict(blocks(None, count=1).state_dict())
        return params, [*found, kept()]

    for params, (unchanged, *changed) in run_ranks(2, work):
        assert unchanged == [1] * len(params)
        assert changed == [[None] * len(params)] * 3
