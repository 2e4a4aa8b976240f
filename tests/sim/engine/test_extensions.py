"""Parameters that gather themselves: the unsharded run on their rounded values, whatever the ranks and strategy."""

import copy

import pytest
import torch
from torch import nn

from fullshard import (
    Checkpoints,
    MixedPrecision,
    ShardingStrategy,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    unsharded,
)
from fullshard.core.comm import RecordingComm
from fullshard.core.engine.full.summon import summoned_parameters
from fullshard.core.engine.registry import runtime_of
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
        with torch.no_grad():
            loss_of(model, data(comm.rank, 1)[0])
        gathers = [entry.sent_bytes for entry in recorded.entries if entry.collective == "all_gather"]
        return sorted(gathers), tracker.live["gathered"]

    for gathers, live in run_ranks(2, work):
        # Codes and scales of (64, 32) and of (32, 64), half of them here, and the biases together.
        assert gathers == sorted([1024, 4 * 32, 1024, 4 * 16, 4 * 48])
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


def test_a_freed_full_parameter_is_not_read():
    models = [blocks(Scaled) for _ in range(2)]

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


def test_messages_of_such_parameters_are_not_rounded_further():
    losses, _ = expected(Scaled, 2)
    models = [copy.deepcopy(blocks(Scaled)) for _ in range(2)]
    found = on_ranks(2, models, lambda model, comm: train(model, comm.rank), mp_policy=MixedPrecision(messages="bf16"))
    torch.testing.assert_close(torch.tensor(found).mean(0), torch.tensor(losses), atol=2e-2, rtol=2e-2)


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
