"""Parameters that gather themselves under torch's ``fully_shard`` and fullshard's, on gloo processes."""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as theirs

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.compat.torch_fsdp import fsdp2 as ours
from fullshard.core.comm import RecordingComm
from fullshard.core.engine.extension.float8 import precompute_float8_scales
from support.extended import Halved, Scaled, blocks
from support.rank_script import parse, print_result, run_checks
from support.torchao_folder import let_import_torchao

STEPS = 5
FLAT = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")


def float8(make):
    let_import_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(make(), config=config)


class OverNF4(nn.Module):
    """A linear layer of a frozen 4-bit weight, and a bias that is trained."""

    def __init__(self, linear):
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor  # noqa: PLC0415

        self.multiply = nf4_tensor.linear_nf4
        self.weight = nn.Parameter(nf4_tensor.to_nf4(linear.weight.detach(), 32, 16), requires_grad=False)
        self.bias = linear.bias

    def forward(self, rows):
        return self.multiply(rows, self.weight) + self.bias


def over_nf4():
    let_import_torchao()
    model = blocks(None)
    for block in model:
        block[0], block[2] = OverNF4(block[0]), OverNF4(block[2])
    return model


def sent_by_torch(run):
    """What ``run`` returns, and the bytes of FSDP2's gathers and reduces: it calls torch's collectives by name."""
    sent = []
    before = {name: getattr(dist, name) for name in FLAT if hasattr(dist, name)}

    def counting(collective):
        def call(*args, **kwargs):
            sizes = [one.nbytes for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            sent.append(min(sizes) * (dist.get_world_size() - 1))
            return collective(*args, **kwargs)

        return call

    try:
        for name, collective in before.items():
            setattr(dist, name, counting(collective))
        return run(), sum(sent)
    finally:
        for name, collective in before.items():
            setattr(dist, name, collective)


def train(model, after=lambda: None):
    """The losses of some AdamW steps, each rank on its own rows."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(4, 32, generator=draws)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.item())
    return losses


def shard(fully_shard, model, **options):
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def scales_of(model, *, is_ours):
    if is_ours:
        return precompute_float8_scales(model)
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # noqa: PLC0415

    return precompute_float8_dynamic_scale_for_fsdp(model)


def compare(make, *, ahead=False, **options):
    """Losses equal to the bit, and bytes equal or fewer."""

    def run(fully_shard, **more):
        model = shard(fully_shard, make(), **options, **more)
        is_ours = fully_shard is not theirs.fully_shard
        return train(model, functools.partial(scales_of, model, is_ours=is_ours) if ahead else int)

    expected, most = sent_by_torch(lambda: run(theirs.fully_shard))
    assert run(ours.fully_shard) == expected
    if "mp_policy" in options:
        return
    comm = RecordingComm(fullshard.init())
    assert run(fullshard.fully_shard, mesh=comm) == expected
    sent = sum(entry.sent_bytes for entry in comm.entries if entry.collective in ("all_gather", "reduce_scatter"))
    scales = 4 * STEPS * 6 if ahead else 0  # of six weights, by an all-reduce there, which is not counted
    assert 0 < sent <= most + scales, (sent, most)


BF16 = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


of_int8, of_bf16 = functools.partial(blocks, Scaled), functools.partial(blocks, Halved)
of_float8 = functools.partial(float8, functools.partial(blocks, None))

CASES = {
    "scale_and_int8": functools.partial(compare, of_int8),
    "bf16": functools.partial(compare, of_bf16),
    "bf16_computed_in_bf16": functools.partial(compare, of_bf16, mp_policy=BF16),
    "kept_after_forward": functools.partial(compare, of_int8, reshard_after_forward=False),
    "torchaos_float8": functools.partial(compare, of_float8),
    "torchaos_float8_scaled_ahead": functools.partial(compare, of_float8, ahead=True),
    "torchaos_nf4_frozen": functools.partial(compare, over_nf4),
    "torchaos_float8_in_bf16": functools.partial(compare, of_float8, ahead=True, mp_policy=BF16),
}


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    fullshard.init(timeout_s=60)
    print_result(run_checks(CASES, options.only))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
