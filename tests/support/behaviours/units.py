"""Behaviours 1 to 9 and 41: units, what is registered when, how often each is gathered and reduced, tables at home."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fullshard import Named, ShardingStrategy, units, unsharded, vocab_parallel_loss
from fullshard.core.comm import SoloComm
from fullshard.core.engine.tables.table_param import TableParam
from fullshard.core.shards import rows_of
from support.behaviours.running import (
    BLOCK_NAMES,
    HYBRID,
    LAYERS,
    UNITS,
    assert_rows,
    compare,
    data_for,
    expect,
    gathered,
    lm,
    lm_step,
    plain_step,
    runtime,
    shard,
)
from support.tiny_lm import VOCAB, HiddenLM, lm_loss


class Uneven(nn.Module):
    """Rows that no world of two or four divides, and a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, 5)
        self.up = nn.Linear(5, 13)
        self.down = nn.Linear(13, 3, bias=False)
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(3, VOCAB)

    def forward(self, tokens):
        return self.head(self.down(F.gelu(self.up(self.embed(tokens)))) * self.gain * self.scale)


def b01_one_unit_parity_with_uneven_shapes(ranks):
    model = compare(ranks, Uneven, lm_step, wrap=None)
    expect([row.unit for row in units(model).rows], ["(root)"])
    held = ranks.comm.all_gather_object({p.shard_meta.name: rows_of(p).numel() for p in model.parameters()})
    whole = {name: p.numel() for name, p in Uneven().named_parameters()}
    expect({name: sum(rank[name] for rank in held) for name in whole}, whole, "elements on all ranks")
    assert any(rank[name] * ranks.size != whole[name] for rank in held for name in whole), "the shapes are not uneven"
    assert any(rank["scale"] == 0 for rank in held), "the scalar has one holder"


def b02_nested_units_over_several_steps(ranks):
    nested = Named(*BLOCK_NAMES, *(f"{block}.up" for block in BLOCK_NAMES), "blocks.1.side")
    for strategy in (ShardingStrategy.FULL_SHARD, HYBRID):
        model = compare(ranks, lm, lm_step, wrap=nested, strategy=strategy)
        names = [row.unit for row in units(model).rows]
        expect(sorted(names), sorted(["(root)", *nested_names(nested)]))


def nested_names(named):
    return [name for group in named.units for name in group]


def b03_root_only(ranks):
    ledger = ranks.ledger()

    def step(model, optimizer, tokens, number):
        ledger.clear()
        figures = lm_step(model, optimizer, tokens, number)
        if number:  # the first pass compares the ranks
            expect(ledger.of("AG", "RS"), ["AG (root)", "RS (root)"], f"step {number}")
        return figures

    compare(ranks, lm, step, reference_step=lm_step, mesh=ledger, wrap=None)


class NoInputs(nn.Module):
    """Blocks that compute from their parameters alone, and a root that does as well."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, width))
            self.mix = nn.Linear(width, width)

        def forward(self):
            return self.mix(self.table).tanh().sum(0)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NoInputs.Block(6) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self):
        return sum(block() for block in self.blocks) * self.scale


def b04_forward_without_inputs(ranks):
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randn(2 * ranks.size, 6, generator=generator) for _ in range(10)]
    step = plain_step(lambda model, target: (model() - target).square().mean())
    compare(ranks, NoInputs, step, data=targets)


@dataclass
class Extra:
    """An input in a dataclass."""

    bias: torch.Tensor
    label: str


class Nest(nn.Module):
    """Takes tensors in every kind of container and says on which devices they came."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, scale):
            return self.linear(x) * scale["by"]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Nest.Block() for _ in range(2))
        self.seen = []

    def forward(self, xs, pair, *, extra, options):
        x, y = xs[0], pair[1]["deep"][0]
        self.seen = [t.device.type for t in (x, y, pair[0], extra.bias, options["scale"]["by"])]
        self.rest = pair[1]["count"], extra.label
        for block in self.blocks:
            x = block(x, scale=options["scale"])
        return x + y + pair[0] + extra.bias


def b05_nested_inputs_moved_to_the_device(ranks):
    # Of one rank, since the only device beside the CPU that every machine has is one that nothing can be sent from.
    device = torch.device("meta")
    model = shard(ranks, ranks.alike(Nest).cpu(), mesh=SoloComm(torch.device("cpu")), device=device)
    x = torch.ones(2, 4)
    with torch.no_grad():
        y = model([x], (x, {"deep": [x], "count": 3}), extra=Extra(x, "kept"), options={"scale": {"by": x}})
    expect(model.seen, ["meta"] * 5, "devices of the inputs")
    expect(model.rest, (3, "kept"), "what is no tensor")
    expect(y.device.type, "meta")
    expect(x.device.type, "cpu", "the caller's own tensor")


def shown(model):
    """Names of the units whose modules show full parameters."""
    full = [name for name, p in model.named_parameters() if not hasattr(p, "shard_meta")]
    return {".".join(name.split(".")[:2]) if name.startswith("blocks.") else "(root)" for name in full}


def b06_registered_parameters_after_forward_and_backward_per_strategy(ranks):
    tokens = data_for(ranks, 1)[0]
    whole = {name: p.numel() for name, p in ranks.alike(lm).named_parameters()}
    for strategy in ShardingStrategy:
        model = shard(ranks, ranks.alike(lm), strategy=strategy)
        before = list(model.named_parameters())
        numel = ranks.comm.all_gather_object({name: rows_of(p).numel() for name, p in before})
        copies = ranks.copies_of(strategy)
        total = {name: sum(rank[name] for rank in numel) for name in whole}
        expect(total, {name: count * copies for name, count in whole.items()}, f"{strategy.name}: elements")
        inside = []
        for block in model.blocks:
            block.norm.register_forward_hook(lambda *_, model=model, inside=inside: inside.append(shown(model)))
        loss = lm_loss(model, ranks.rows(tokens))
        expect(inside, [{"(root)", name} for name in BLOCK_NAMES], f"{strategy.name}: full inside each block")
        kept = set(UNITS) if strategy.keeps_after_forward else {"(root)"}
        expect(gathered(model), kept, f"{strategy.name}: in memory after forward")
        check_shards_are_registered(model, before)
        loss.backward()
        expect(gathered(model), set(), f"{strategy.name}: in memory after backward")
        check_shards_are_registered(model, before)


def check_shards_are_registered(model, before):
    """The very parameters that ``fully_shard`` left, none of them full."""
    expect(shown(model), set(), "units that show full parameters")
    for (name, shard_before), (other, shard_now) in zip(before, model.named_parameters(), strict=True):
        expect(other, name)
        assert shard_now is shard_before, f"{name} is another parameter"
        expect(tuple(shard_now.shape), shard_now.shard_meta.local_shape, name)


def b07_manual_reshard_then_backward_regathers(ranks):
    tokens = data_for(ranks, 1)[0]
    reference = ranks.alike(lm)
    lm_loss(reference, tokens).backward()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        ledger = ranks.ledger()
        model = shard(ranks, ranks.alike(lm), mesh=ledger, strategy=strategy)
        lm_loss(model, ranks.rows(tokens)).backward()
        model.zero_grad()
        loss = lm_loss(model, ranks.rows(tokens))
        with unsharded(model):
            expect(gathered(model), set(UNITS))
        expect(gathered(model), set(), "left resharded")
        ledger.clear()
        loss.backward()
        expect(ledger.of("AG"), [f"AG {name}" for name in ("(root)", *reversed(BLOCK_NAMES))], strategy.name)
        assert_rows(model, reference)


def one_step(ranks, **options):
    """Events of forward and of backward of the second step."""
    ledger = ranks.ledger()
    model = shard(ranks, ranks.alike(lm), mesh=ledger, **options)
    forward = []
    for tokens in data_for(ranks, 2):
        ledger.clear()
        loss = lm_loss(model, ranks.rows(tokens))
        forward = list(ledger.events)
        loss.backward()
    return forward, ledger.events[len(forward) :]


def b08_exact_gather_and_reduce_counts_three_strategies(ranks):
    gathers = ["AG (root)", "AG blocks.0", "AG blocks.1", "AG blocks.2"]
    # the bare all-reduce at the end tells which parameters got a gradient anywhere
    reduces = ["RS blocks.2", "RS blocks.1", "RS blocks.0", "RS (root)", "AR"]
    forward, backward = one_step(ranks)
    expect(forward, gathers, "FULL_SHARD forward")
    expect(
        backward,
        ["AG blocks.2", "AG blocks.1", "RS blocks.2", "AG blocks.0", "RS blocks.1", *reduces[2:]],
        "FULL_SHARD backward",
    )
    forward, backward = one_step(ranks, strategy=ShardingStrategy.SHARD_GRAD_OP)
    expect(forward, gathers, "SHARD_GRAD_OP forward")
    expect(backward, reduces, "SHARD_GRAD_OP backward")
    forward, backward = one_step(ranks, strategy=ShardingStrategy.NO_SHARD)
    expect(forward, [], "NO_SHARD forward")
    expect(backward, [event.replace("RS", "AR") for event in reduces], "NO_SHARD backward")


def b09_root_kept_gathered_by_default(ranks):
    ledger = ranks.ledger()
    model = shard(ranks, ranks.alike(lm), mesh=ledger)
    root = runtime(model).root
    for number, tokens in enumerate(data_for(ranks, 3)):
        ledger.clear()
        loss = lm_loss(model, ranks.rows(tokens))
        expect(gathered(model), {"(root)"}, "between forward and backward")
        expect(runtime(model).tracker.live["gathered"], sum(lane.full.nbytes for lane in root.lanes), "bytes")
        loss.backward()
        expect(gathered(model), set(), "after backward")
        counts = {name: ledger.events.count(f"AG {name}") for name in UNITS}
        expect(counts, {"(root)": 1} | dict.fromkeys(BLOCK_NAMES, 2), f"gathers of step {number}")


TABLE_ROWS = 44_000
"""Of 24 elements: just enough for a table."""


class LargeLM(HiddenLM):
    """With tables; ``tied``, the head is the embedding."""

    def __init__(self, *, tied):
        super().__init__(layers=2)
        self.embed = nn.Embedding(TABLE_ROWS, 24)
        self.head = nn.Linear(24, TABLE_ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def b41_tables_stay_home(ranks):
    generator = torch.Generator().manual_seed(2)
    data = [torch.randint(0, TABLE_ROWS, (2 * ranks.size, 7), generator=generator) for _ in range(2)]
    part = TABLE_ROWS * 24 * 4 // ranks.size
    for tied, names in ((True, {"(root)"}), (False, {"embed", "head"})):
        ledger = ranks.ledger()

        # Without the norm: torch's own, of a million numbers in float32, is off by 1e-5 of itself.
        def step(model, optimizer, batch, _number, ledger=ledger):
            ledger.clear()
            loss = vocab_parallel_loss(model(batch[:, :-1]), model.head, batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all(entry.sent_bytes < part for entry in ledger.entries), "a table was sent"
            return (loss.item(),)

        options = {"data": data, "mesh": ledger, "wrap": "auto", "tables": "home"}
        model = compare(ranks, lambda tied=tied: LargeLM(tied=tied), step, **options)
        held = {unit.name for unit in runtime(model).units if any(isinstance(p, TableParam) for p in unit.params)}
        expect(held, names, "units with a table that stays home")
