"""A small model, a training run unsharded and sharded, and what the behaviours ask of them."""

import torch

from fullshard import ShardingStrategy, TransformerBlocks, clip_grad_norm_, fully_shard, unsharded
from support.parity import assert_gradients, optimizer_for, sharded_gradients
from support.tiny_lm import TinyLM, batches, lm_loss

BLOCKS = TransformerBlocks({"Block"})
LAYERS = 3
BLOCK_NAMES = tuple(f"blocks.{i}" for i in range(LAYERS))
UNITS = ("(root)", *BLOCK_NAMES)
HYBRID = ShardingStrategy.HYBRID_SHARD


def lm(reentrant=None, cls=TinyLM, layers=LAYERS):
    """Blocks that no number of ranks divides evenly, a tied head, a module that is never used."""
    return cls(reentrant, layers=layers, width=12, hidden=20)


def expect(got, wanted, what="it"):
    """Equality with both sides in the message."""
    assert got == wanted, f"{what}: {got} instead of {wanted}"


def data_for(ranks, steps=None, rows=2):
    """Joint batches of tokens, ``rows`` for each rank; a run's steps by default."""
    return [tokens.to(ranks.device) for tokens in batches(steps or ranks.steps, rows * ranks.size, length=7)]


def is_sharded(model):
    return hasattr(model, "_fullshard_runtime")


def runtime(model):
    return model._fullshard_runtime


def gathered(model):
    """Names of the units whose full parameters are in memory."""
    return {unit.name for unit in runtime(model).units if unit.state.value != "sharded"}


def clip(model, max_norm=1.0, p=2.0):
    """Clip the gradients of a sharded model or of one that is not."""
    if is_sharded(model):
        return clip_grad_norm_(model, max_norm, p).item()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, p).item()


def finish_step(model, optimizer, loss):
    """Clip, step, clear; returns ``loss`` as a number and the norm of the gradients."""
    norm = clip(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm


def plain_step(loss_of):
    """The usual step: ``step(model, optimizer, batch, number)`` returns the loss and the norm of the gradients."""

    def step(model, optimizer, batch, _number):
        loss = loss_of(model, batch)
        loss.backward()
        return finish_step(model, optimizer, loss)

    return step


def weights_of(model):
    """Full parameters of a sharded model by name."""
    with unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_weights(ours, reference, tolerance=1e-5):
    """``ours`` by name are those of the model ``reference``."""
    expected = dict(reference.named_parameters())
    expect(ours.keys(), expected.keys(), "names")
    for name, value in ours.items():
        worst = (value - expected[name].to(value.device)).abs().max().item()
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"


def assert_rows(model, reference, tolerance=1e-5):
    """The gradients of this rank's rows are those of the model ``reference``."""
    assert_gradients([sharded_gradients(model)], reference, tolerance)


def compare(ranks, make, step, *, data=None, reference_step=None, sharded=None, tolerance=1e-5, **options):
    """Train on joint batches unsharded, and sharded on this rank's rows; figures and weights must agree.

    Args:
        ranks: The world.
        make: Makes the model.
        step: ``step(model, optimizer, batch, number)`` trains it and returns figures whose mean over ranks is that of
            the unsharded run: the loss, the norm of the gradients.
        data: Joint batches, a step each.
        reference_step: For the unsharded model, where that takes another one.
        sharded: Shards the model in place of ``fully_shard(model, **options)``.
        tolerance: Largest difference of a weight, and of a figure beside 1 or itself.
        options: For ``fully_shard``.

    Returns:
        The sharded model.
    """
    data = data_for(ranks) if data is None else [batch.to(ranks.device) for batch in data]
    reference, model = ranks.alike(make), ranks.alike(make)
    plain = optimizer_for(reference)
    expected = [(reference_step or step)(reference, plain, batch, number) for number, batch in enumerate(data)]
    model = shard(ranks, model, **options) if sharded is None else sharded(model)
    optimizer = optimizer_for(model)
    for number, batch in enumerate(data):
        figures = ranks.means(step(model, optimizer, ranks.rows(batch), number))
        for got, wanted in zip(figures, expected[number], strict=True):
            assert abs(got - wanted) <= tolerance * max(1.0, abs(wanted)), (
                f"step {number}: {figures} instead of {expected[number]}"
            )
    assert_weights(weights_of(model), reference, tolerance)
    expect(runtime(model).account.live["gathered"], 0, "gathered bytes after training")
    return model


def shard(ranks, model, *, mesh=None, strategy=ShardingStrategy.FULL_SHARD, wrap=BLOCKS, **options):
    """``fully_shard`` with the world's mesh for the strategy, one unit a block."""
    return fully_shard(model, mesh or ranks.mesh_for(strategy), strategy=strategy, wrap=wrap, **options)


lm_step = plain_step(lm_loss)
