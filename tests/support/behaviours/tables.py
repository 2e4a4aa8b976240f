"""Behaviour 41: tables whose rows stay with their ranks."""

import torch
from torch import nn

from fullshard import vocab_parallel_loss
from fullshard.core.engine.tables.table_param import TableParam
from support.behaviours.running import compare, expect, runtime
from support.tiny_lm import HiddenLM

ROWS = 44_000
"""Of 24 elements: just enough for a table."""


class LargeLM(HiddenLM):
    """With tables; ``tied``, the head is the embedding."""

    def __init__(self, *, tied):
        super().__init__(layers=2)
        self.embed = nn.Embedding(ROWS, 24)
        self.head = nn.Linear(24, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def b41_tables_stay_home(ranks):
    generator = torch.Generator().manual_seed(2)
    data = [torch.randint(0, ROWS, (2 * ranks.size, 7), generator=generator) for _ in range(2)]
    part = ROWS * 24 * 4 // ranks.size
    for tied, units in ((True, {"(root)"}), (False, {"embed", "head"})):
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
        expect(held, units, "units with a table that stays home")
