"""Ways of using a sharded model that a hostile review broke; each is what it would be unsharded, or a clear error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import (
    BackwardPrefetch,
    Named,
    Prefetch,
    ShardingStrategy,
    TransformerBlocks,
    fully_shard,
    no_all_reduce,
    no_sync,
    register_forward_method,
    unsharded,
)
from fullshard.core.engine.setup import wrap
from fullshard.core.shards import ShardParameter
from fullshard.core.testing import run_ranks
from fullshard.core.testing.threads import ThreadComm
from fullshard.errors import MismatchError, ShardingError
from support.models import SkippingLM, TinyLM, batches, lm_loss
from support.parity import (
    ROWS_PER_RANK,
    assert_gradients,
    assert_gradients_alike,
    assert_same_run,
    assert_trains_alike,
    on_ranks,
    optimizer_for,
    replicas,
    rows_for,
    sharded_gradients,
    train_sharded,
    train_unsharded,
    where_sharded,
)

pytestmark = pytest.mark.parity

SIZE = 2
BLOCKS = TransformerBlocks({"Block"})


class Fragile(TinyLM):
    """Fails in its third block while ``broken``."""

    broken = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if self.broken and number == 2:
                block(x[..., :5])
            x = block(x)
        return self.head(x)


def fail(model, tokens):
    model.broken = True
    with pytest.raises(RuntimeError, match="normalized_shape"):
        lm_loss(model, tokens)
    model.broken = False


def test_a_forward_that_failed_leaves_shards_in_sight_and_nothing_stale():
    reference, models = replicas(Fragile, SIZE)
    data = batches(3, SIZE * ROWS_PER_RANK)
    wanted = {name: value + 1 for name, value in reference.state_dict().items()}
    reference.load_state_dict(wanted)
    plain = train_unsharded(reference, lm_loss, data)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=BLOCKS)
        fail(model, data[0])
        assert all(hasattr(p, "shard_meta") for p in model.parameters())
        model.load_state_dict(wanted)
        optimizer = optimizer_for(model)
        with unsharded(model):
            assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())
        return train_sharded(model, comm, lm_loss, data, sharded=True, optimizer=optimizer)

    for run in run_ranks(SIZE, work):
        assert_same_run(run, plain)


def test_a_registered_method_that_failed_gathers_again():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x))

        def scaled(self, x):
            return x * self.scale

    def work(comm, model):
        register_forward_method(model, "scaled")
        with pytest.raises(RuntimeError, match="must match the size"):
            model.scaled(torch.ones(4, 5))
        return model.scaled(torch.ones(4, 6)).shape

    assert set(on_ranks(SIZE, Scaled, work, wrap=lambda m: type(m) is nn.Linear)) == {torch.Size([4, 6])}


class Choosing(TinyLM):
    """Uses only the blocks it is told to."""

    use = (0, 1, 2, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        for number in self.use:
            x = self.blocks[number](x)
        return self.head(x)


def test_gradients_of_no_all_reduce_are_kept_where_the_last_backward_uses_less():
    first, second = batches(2, 8)

    def run(model, rows):
        with where_sharded(no_all_reduce, model):
            lm_loss(model, rows(first)).backward()
        model.use = (0, 1)
        lm_loss(model, rows(second)).backward()

    assert_gradients_alike(Choosing, run, 4, strategy=ShardingStrategy.HYBRID_SHARD, wrap=BLOCKS)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_parts_called_after_new_weights_compute_with_them(strategy):
    reference, models = replicas(TinyLM, SIZE)
    tokens = batches(1, SIZE * ROWS_PER_RANK)[0]
    wanted = {name: value * 2 for name, value in reference.state_dict().items()}
    reference.load_state_dict(wanted)
    x = torch.ones(2, 3, 24)
    expected = [reference.head(x), reference.blocks[1](x)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=BLOCKS, strategy=strategy)
        lm_loss(model, tokens)  # recorded, and no backward: the root and, under SHARD_GRAD_OP, all units stay gathered
        model.load_state_dict(wanted)
        return model.head(x), model.blocks[1](x)

    for got in run_ranks(SIZE, work):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_blocks_called_one_by_one_around_new_weights_compute_with_them():
    reference, models = replicas(TinyLM, SIZE)
    x = torch.ones(2, 3, 24)

    @torch.no_grad()
    def run(model):
        outputs = []
        for _ in range(3):  # from the second time on, the first block's call is known to be followed by the second's
            for block in model.blocks[:2]:
                outputs.append(block(x))
                for parameter in model.parameters():
                    parameter.mul_(1.1)
        return outputs

    expected = run(reference)

    def work(comm):
        return run(fully_shard(models[comm.rank], comm, wrap=BLOCKS))

    for got in run_ranks(SIZE, work):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_unit_that_was_gathered_for_nothing_is_not_used_later():
    reference, models = replicas(Choosing, SIZE)
    tokens = batches(1, 2)[0]
    wanted = {name: value * 2 for name, value in reference.state_dict().items()}
    reference.load_state_dict(wanted)
    x = torch.ones(2, 3, 24)
    expected = reference.blocks[2](x)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=BLOCKS).eval()
        lm_loss(model, tokens)
        model.use = (0, 1)  # the next block is expected, and does not come
        with torch.no_grad():
            lm_loss(model, tokens)
        assert model._fullshard_runtime.tracker.live["gathered"] == 0
        model.load_state_dict(wanted)
        return model.blocks[2](x)

    for got in run_ranks(SIZE, work):
        torch.testing.assert_close(got, expected)


def test_members_of_a_group_called_alone_around_a_step():
    groups = Named(("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))
    reference, models = replicas(TinyLM, SIZE)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))

    def steps(model, mine):
        optimizer, losses = optimizer_for(model), []
        for _ in range(3):
            loss = model.blocks[0](mine).square().mean() + model.blocks[2](mine).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = steps(reference, x)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=groups)
        return steps(model, x[2 * comm.rank : 2 * comm.rank + 2])

    runs = run_ranks(SIZE, work)
    assert [sum(pair) / SIZE for pair in zip(*runs, strict=True)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("change", ["freeze", "cast"])
def test_changes_while_gradients_wait_are_refused(change):
    tokens = batches(1, 2)[0]

    def work(comm, model):
        with no_sync(model):
            lm_loss(model, tokens).backward()
        model.blocks[1].requires_grad_(False) if change == "freeze" else model.double()
        with pytest.raises(ShardingError, match="Finish the accumulation"):
            lm_loss(model, tokens)

    on_ranks(SIZE, TinyLM, work, wrap=BLOCKS)


def test_weights_changed_between_forward_and_backward_are_refused_as_unsharded():
    tokens = batches(1, 2)[0]

    def work(comm, model):
        loss = lm_loss(model, tokens)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        with pytest.raises(ShardingError, match="between its forward and its backward"):
            loss.backward()

    on_ranks(SIZE, TinyLM, work, wrap=BLOCKS)


@pytest.mark.parametrize(
    ("prefetch", "skipped"),
    [
        (Prefetch(), (1,)),
        (Prefetch(), (1, 2)),
        (Prefetch(backward=BackwardPrefetch.BACKWARD_POST), (2,)),
        (Prefetch(backward=BackwardPrefetch.NONE), (1, 2)),
        (Prefetch(max_in_flight=1), (2,)),
        (Prefetch(ahead=3), (1, 2)),
        (Prefetch(ahead=3), (3,)),
    ],
)
def test_ranks_whose_backward_skips_different_blocks_issue_the_same_gathers(prefetch, skipped):
    reference, models = replicas(SkippingLM, SIZE)
    tokens = batches(1, SIZE * ROWS_PER_RANK)[0]
    for rank in range(SIZE):
        reference.cut = skipped if rank else ()
        (lm_loss(reference, tokens[2 * rank : 2 * rank + 2]) / SIZE).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=BLOCKS, prefetch=prefetch)
        model.cut = skipped if comm.rank else ()
        for _ in range(2):
            model.zero_grad()
            lm_loss(model, rows_for(comm, tokens)).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(SIZE, work, timeout_s=20), reference)


@pytest.mark.parametrize("merged", [False, True])
def test_several_calls_of_a_unit_inside_one_reentrant_checkpoint(merged, monkeypatch):
    class Wholesale(TinyLM):
        def forward(self, tokens):
            def all_blocks(x):
                for block in (*self.blocks, self.blocks[1]):
                    x = block(x)
                return x

            return self.head(checkpoint(all_blocks, self.embed(tokens), use_reentrant=True))

    monkeypatch.setattr(wrap, "TINY_NUMEL", 10**6 if merged else 0)
    assert_trains_alike(Wholesale, lm_loss, SIZE, steps=4)


def test_an_embedding_that_its_unit_also_reads_is_gathered_in_backward():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Embedding(12, 8)

        def forward(self, x):
            scores = x @ self.codes.weight.t()
            return x + self.codes(scores.argmax(-1)) + F.linear(scores.softmax(-1), self.codes.weight.t())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Codebook(), Codebook()])

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    blocks = TransformerBlocks({"Codebook"})
    assert_gradients_alike(Model, lambda model, rows: model(rows(x)).square().mean().backward(), SIZE, wrap=blocks)


def test_a_table_read_by_an_older_graph_is_kept(monkeypatch):
    class Reads(TinyLM):
        early = True

        def forward(self, tokens):
            x = self.embed(tokens)
            extra = F.linear(x, self.embed.weight) if self.early else 0
            for block in self.blocks:
                x = block(x)
            return self.head(x) + extra

    monkeypatch.setattr(wrap, "LARGE_NUMEL", 1000)
    data = batches(3, SIZE * ROWS_PER_RANK)

    def run(model, rows):
        losses = [lm_loss(model, rows(tokens)) for tokens in data[:2]]
        losses[0].backward()
        model.early = False
        lm_loss(model, rows(data[2]))
        losses[1].backward()

    assert_gradients_alike(Reads, run, SIZE, wrap=BLOCKS)


class Nested(nn.Module):
    """An encoder of small blocks inside a model: its blocks are one group, and the last one may be dropped."""

    def __init__(self):
        super().__init__()
        self.encoder = TinyLM()
        self.drop = False

    def forward(self, tokens):
        x = self.encoder.embed(tokens)
        for block in self.encoder.blocks[: 3 if self.drop else 4]:
            x = block(x)
        return self.encoder.head(x)


def test_groups_inside_units_and_groups_inside_groups_are_closed_in_order():
    def loss_of(model, tokens):
        model.drop = not model.drop
        return lm_loss(model, tokens)

    def shard(model, comm):
        fully_shard(model.encoder, comm, wrap=Named(("blocks.0.up", "blocks.0.down"), ("blocks.2", "blocks.3")))
        return fully_shard(model, comm)

    assert_trains_alike(Nested, loss_of, SIZE, steps=4, shard=shard)


def test_groups_around_groups():
    inner = ("blocks.0.up", "blocks.0.down"), ("blocks.3.norm", "blocks.3.up")
    assert_trains_alike(TinyLM, lm_loss, SIZE, steps=4, wrap=Named(("blocks.0", "blocks.1"), "blocks.2", *inner))


def test_lists_that_make_no_sense_are_refused_before_anything_moves():
    def work(comm):
        model = TinyLM()
        with pytest.raises(ShardingError, match="twice"):
            fully_shard([model.blocks[0], model.blocks[0]], comm)
        fully_shard([model.blocks[0].up, model.blocks[1].up], comm)
        with pytest.raises(ShardingError, match="outside of Block"):
            fully_shard(model.blocks[0], comm)

    run_ranks(1, work)


def test_function_transforms_over_a_linear_take_its_plain_path():
    def work(comm):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 3), comm, wrap=None)
        with unsharded(model):
            return torch.func.vmap(model)(torch.ones(5, 2, 4)).shape

    assert run_ranks(1, work) == [torch.Size([5, 2, 3])]


BORROWS = {
    "linear": lambda model, x: F.linear(x, model.blocks[0].up.weight).logsumexp(-1, keepdim=True),
    "lookup": lambda model, _: F.embedding(torch.arange(4), model.blocks[0].table.weight),
    "penalty": lambda model, _: sum(p.square().sum() for p in model.parameters()),
    "scale": lambda model, x: x.sum() * model.blocks[0].scale,
    "data": lambda model, _: model.blocks[0].scale.data.sum(),
    "kept": lambda model, _: model.kept[0].mean(),
    "tied by hand": lambda model, x: x @ model.blocks[1].up.weight.t(),
}


class Borrowing(nn.Module):
    """A root that computes with what a block has, outside of the block."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.table, self.scale = nn.Linear(6, 8), nn.Embedding(10, 6), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x + self.up(x).mean(-1, keepdim=True) * self.scale

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Part(), self.Part()])
        self.tail = nn.Linear(6, 6)
        self.use = None

    def forward(self, x):
        weight = self.blocks[0].up.weight
        assert (weight.dtype, weight.dim(), weight.is_floating_point()) == (torch.float32, 2, True)
        for block in self.blocks:
            x = block(x)
        x = self.tail(x)
        borrowed = 0 if self.use is None else BORROWS[self.use](self, x).sum()
        return (x.sum() + borrowed) / 100


@pytest.mark.parametrize("use", BORROWS)
def test_shards_are_not_computed_with_as_if_they_were_the_parameters(use):
    reference, models = replicas(Borrowing, SIZE)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for rank in range(SIZE):
        (reference(x[4 * rank : 4 * rank + 4]) / SIZE).backward()

    def work(comm):
        model, mine = models[comm.rank], x[4 * comm.rank : 4 * comm.rank + 4]
        model.kept = [model.tail.weight]  # no registration: it stays the shard while the module shows the whole
        model = fully_shard(model, comm, wrap=TransformerBlocks({"Part"}))
        model.use = use
        with pytest.raises(ShardingError, match=r"(up|table|tail)\.(weight|bias)|scale") as refused:
            model(mine)
        assert "this rank's rows" in str(refused.value)
        model.use = None
        model(mine).backward()
        assert sum(p.detach().square().sum() for p in model.parameters()) > 0
        assert all(type(p) is ShardParameter for p in model.parameters())
        return sharded_gradients(model)

    assert_gradients(run_ranks(SIZE, work), reference)


@pytest.mark.parametrize("again", ["a step", "a pass"])
def test_after_a_step_that_raised_shards_are_shards_again(again):
    data = batches(1, SIZE * ROWS_PER_RANK)[0]

    def work(comm, model):
        mine = data[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK]
        lm_loss(model, mine).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = optimizer.param_groups[0]
        dampening = group.pop("dampening")  # read after the hook before the step
        with pytest.raises(KeyError):
            optimizer.step()
        group["dampening"] = dampening
        optimizer.step() if again == "a step" else lm_loss(model, mine).backward()
        assert {type(p) for p in model.parameters()} == {ShardParameter}
        return [p.grad.norm().item() for p in model.parameters() if p.grad is not None]

    first, second = on_ranks(SIZE, TinyLM, work, wrap=BLOCKS)
    assert first == second


ASKS = {
    "new": lambda model, _: next(model.blocks.parameters()).new_zeros(3),
    "cast like": lambda model, x: x.type_as(model.blocks[0].scale).to(model.blocks[0].up.weight),
    "type": lambda model, x: torch.ones(len(model.blocks[0].up.weight.type())),
    "result type": lambda model, x: x.to(torch.result_type(x, model.blocks[0].up.weight)),
}


@pytest.mark.parametrize("use", ASKS)
def test_shards_may_be_asked_what_does_not_depend_on_their_rows(use, monkeypatch):
    monkeypatch.setitem(BORROWS, use, ASKS[use])
    reference, models = replicas(Borrowing, SIZE)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    reference.use = use
    expected = reference(x).item()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=TransformerBlocks({"Part"}))
        model.use = use
        return model(x).item()

    assert run_ranks(SIZE, work) == pytest.approx([expected] * SIZE, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_goes_its_fast_way_over_sharded_layers_too():
    """It asks about its first layer's weights, and another answer would let padded positions be other than zero."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    reference, models = replicas(lambda: nn.Sequential(nn.TransformerEncoder(layer, 3)).eval(), SIZE)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    with torch.no_grad():
        expected = reference[0](x, src_key_padding_mask=padding)

    def work(comm):
        model = models[comm.rank]
        model.forward = lambda x: model[0](x, src_key_padding_mask=padding)
        model = fully_shard(model, comm, wrap=TransformerBlocks({"TransformerEncoderLayer"}))
        with torch.no_grad():
            return model(x)

    for found in run_ranks(SIZE, work):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class DeafComm(ThreadComm):
    """Collectives as NCCL has them: ranks in different ones of a size take whatever is there, and nobody is told."""

    def _meet(self, kind, payload, use, *, bound=False):
        self.world.slots[self.rank] = payload
        self.world.meeting.wait()
        shape = getattr(payload, "shape", None)
        result = use([other if getattr(other, "shape", None) == shape else payload for other in self.world.slots])
        self.world.meeting.wait()
        return result


def test_collectives_in_another_order_are_told_where_no_collective_tells():
    """A block that one rank skips in backward, and an older graph that may still need it: when to reduce it differs."""
    _, models = replicas(SkippingLM, SIZE)
    data = batches(2, SIZE * ROWS_PER_RANK)

    def work(comm):
        model = fully_shard(models[comm.rank], DeafComm(comm.world, comm.rank), wrap=BLOCKS)
        lm_loss(model, data[0]).backward()
        older = lm_loss(model, data[0])
        model.cut = (2,) if comm.rank else ()
        with pytest.raises(MismatchError, match="different orders"):
            lm_loss(model, data[1]).backward()
        return older.item()

    run_ranks(SIZE, work)
