"""Steps of models with parameters that gather themselves, planned and measured in each rank."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from dist.compat.fsdp2_extensions_main import float8, over_nf4
from dist.planner.plan_main import STEPS, measured
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.core.comm import GlooComm
from support.extended import Halved, Scaled, blocks, blocks_over_codes
from support.rank_script import found, parse, print_result

WIDE = 1024
ROWS = 8  # torchao's emulated products hold an input in fp8 for longer than planned, 1.6 % of the peak with 64 rows
BF16 = MixedPrecision(param="bfloat16", reduce="float32")


def make(kind, frozen=()):
    return blocks(kind, wide=WIDE, frozen=frozen)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.blocks = model

    def forward(self, rows):
        return self.blocks(rows).float().square().mean()


CASES = {
    "int8": (functools.partial(make, Scaled), {}),
    "int8_beside_frozen": (functools.partial(make, Scaled, ("0.0.weight", "2.2.weight")), {"frozen": "shard"}),
    "codes": (functools.partial(blocks_over_codes, wide=WIDE), {"frozen": "shard"}),
    "codes_replicated": (functools.partial(blocks_over_codes, wide=WIDE), {"frozen": "replicate"}),
    "bf16_kept": (functools.partial(make, Halved), {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "nf4": (over_nf4, {"frozen": "shard"}),
    "float8": (functools.partial(float8, functools.partial(make, None)), {}),
    "float8_in_bf16": (functools.partial(float8, functools.partial(make, None)), {"mp_policy": BF16}),
    "float8_replicated": (
        functools.partial(float8, functools.partial(make, None)),
        {"strategy": ShardingStrategy.NO_SHARD},
    ),
}


def both(comm, make, options):
    """What ranks hold and send, and what the plan says."""

    def optimizer_of(model):
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)

    def build(ranks):
        model = fullshard.fully_shard(WithLoss(make()), ranks, **options)
        optimizer = optimizer_of(model)
        rows = torch.zeros(ROWS, 32)

        def step():
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()

        return model, step, STEPS

    taken = measured(comm, build)
    plan = fullshard.plan(
        lambda: WithLoss(make()),
        lambda: torch.zeros(ROWS, 32),
        world_size=2,
        optimizer_fn=optimizer_of,
        loss_fn=lambda model, rows: model(rows),
        **options,
    )
    names = ("collectives", "account", "sent_bytes", "peak_bytes")
    plan = {name: getattr(plan, name) for name in names}
    return {name: (taken[name], dict(plan[name]) if isinstance(plan[name], Mapping) else plan[name]) for name in names}


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    comm = fullshard.init(timeout_s=60)
    assert isinstance(comm, GlooComm)
    print_result({name: found(both, comm, *CASES[name]) for name in options.only})
    fullshard.shutdown()


if __name__ == "__main__":
    main()
