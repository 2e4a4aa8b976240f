"""Behaviours 22 to 29: how gradients are divided, dtypes, loss scales, clipping, casts, and models without memory."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from fullshard import CPUOffload, MixedPrecision, ShardedGradScaler, ShardingStrategy, clip_grad_norm_, fully_shard
from fullshard.core.shards import rows_of
from support.behaviours.running import HYBRID, assert_rows, compare, data_for, expect, lm, plain_step, shard, weights_of
from support.parity import optimizer_for
from support.tiny_lm import Block, lm_loss

BF16 = MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
FP16 = MixedPrecision(param=torch.float16, reduce=torch.float32)


def grads_of(model):
    return {p.shard_meta.name: p.grad for p in model.parameters() if p.grad is not None}


def b22_divide_factor(ranks):
    tokens = data_for(ranks, 1)[0]
    for strategy in (ShardingStrategy.FULL_SHARD, HYBRID):
        by_factor = {}
        for divide in (None, 1.0, 8.0, 3.0):
            precision = MixedPrecision(divide=divide)
            model = shard(ranks, ranks.alike(lm), strategy=strategy, mp_policy=precision)
            lm_loss(model, ranks.rows(tokens)).backward()
            by_factor[divide] = grads_of(model)
        reference = ranks.alike(lm)
        lm_loss(reference, tokens).backward()
        mean = by_factor[None]
        assert_rows(model, scaled(reference, ranks.size / 3.0))
        for name, gradient in mean.items():  # powers of two are exact
            assert torch.equal(by_factor[1.0][name], gradient * ranks.size), f"{name} divided by 1"
            assert torch.equal(by_factor[8.0][name], gradient * ranks.size / 8.0), f"{name} divided by 8"


def scaled(model, factor):
    """``model`` with its gradients times ``factor``."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)
    return model


class Stack(nn.Module):
    """Blocks and nothing else, on floats: every gradient is made by one operation."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(12, 20) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def floats(ranks, width=12):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4 * ranks.size, width, generator=generator).to(ranks.device) for _ in range(ranks.steps)]


def square_loss(model, x):
    return model(x).float().square().mean()


def b23_bf16_compute_with_fp32_reduce_bitwise(ranks):
    reference = ranks.alike(Stack)
    model = shard(ranks, ranks.alike(Stack), mp_policy=BF16)
    plain, optimizer = optimizer_for(reference), optimizer_for(model)
    for number, batch in enumerate(floats(ranks)):
        by_rank = []
        for part in batch.chunk(ranks.size):
            low = copy.deepcopy(reference).bfloat16()
            square_loss(low, part.bfloat16()).backward()
            by_rank.append([p.grad.float() for p in low.parameters()])
        for p, *grads in zip(reference.parameters(), *by_rank, strict=True):
            p.grad = torch.stack(grads).sum(0) / ranks.size
        square_loss(model, ranks.rows(batch)).backward()
        for name, gradient in grads_of(model).items():
            first, last = model.get_parameter(name).shard_meta.row_range
            expect(gradient.dtype, torch.float32, name)
            wanted = reference.get_parameter(name).grad[first:last]
            assert_equal(ranks, rows_of(gradient), wanted, f"{name} in step {number}")
        plain.step()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        first, last = p.shard_meta.row_range
        assert_equal(ranks, rows_of(p), reference.get_parameter(name)[first:last], f"{name} after training")


def assert_equal(ranks, ours, wanted, what):
    """The same bits, or on a GPU what bfloat16 leaves of them."""
    assert ranks.exact or torch.allclose(ours, wanted, rtol=2**-6, atol=2**-6), f"{what}, beyond rounding"
    assert not ranks.exact or torch.equal(ours, wanted), what


class Casting(nn.Module):
    """Three units that take nested inputs and write down the dtypes that they see."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x, *, extra):
            self.seen = {"x": x.dtype, "bias": extra["bias"][0].dtype, "ids": extra["ids"].dtype}
            self.seen["weight"] = self.weight.dtype
            return F.linear(x.to(self.weight.dtype), self.weight) + extra["bias"][0].to(self.weight.dtype)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Casting.Block() for _ in range(3))

    def forward(self, x, extra):
        for block in self.blocks:
            x = block(x, extra=extra)
        self.returned = x.dtype
        return {"y": x, "ids": extra["ids"]}


def b24_input_and_output_casts_with_per_unit_opt_out(ranks):
    x = torch.ones(2, 4)
    extra = {"bias": [torch.ones(4)], "ids": torch.arange(4)}
    fp32, bf16, int64 = torch.float32, torch.bfloat16, torch.int64

    def run(shard_it):
        model = shard_it(ranks.alike(Casting))
        out = model(x, extra)
        out["y"].float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        expect([extra["bias"][0].dtype, x.dtype], [fp32, fp32], "the caller's own tensors")
        expect(out["ids"].dtype, int64)
        return [block.seen for block in model.blocks], model.returned, out["y"].dtype

    def seen(x, bias, weight):
        return {"x": x, "bias": bias, "ids": int64, "weight": weight}

    def one_call(policy):
        return run(lambda model: shard(ranks, model, mp_policy=policy))

    cast = MixedPrecision(param=bf16, output=fp32)
    expect(one_call(cast), ([seen(bf16, bf16, bf16)] * 3, bf16, fp32), "cast by every unit")
    uncast = MixedPrecision(param=bf16, cast_forward_inputs=False)
    first = seen(fp32, fp32, bf16)
    expect(one_call(uncast), ([first, seen(bf16, fp32, bf16), seen(bf16, fp32, bf16)], bf16, bf16), "cast by none")

    def by_hand(model):
        """The middle unit takes its inputs as they come and gives float64; the last one keeps to float32."""
        fully_shard(model.blocks[0], ranks.comm, wrap=None, mp_policy=MixedPrecision(param=bf16))
        own = MixedPrecision(param=bf16, output=torch.float64, cast_forward_inputs=False)
        fully_shard(model.blocks[1], ranks.comm, wrap=None, mp_policy=own)
        fully_shard(model.blocks[2], ranks.comm, wrap=None, mp_policy=MixedPrecision(param=fp32))
        return fully_shard(model, ranks.comm, wrap=None, mp_policy=MixedPrecision(output=bf16))

    units = [seen(bf16, bf16, bf16), seen(bf16, fp32, bf16), seen(fp32, fp32, fp32)]
    expect(run(by_hand), (units, fp32, bf16), "a policy for each unit")


class Buffered(nn.Module):
    """Buffers of several dtypes in the root and in blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 1 + 2**-12))  # not a bfloat16
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.steps += 1
            return self.linear(x) * self.scale.to(x.dtype)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Buffered.Block() for _ in range(2))
        self.register_buffer("shift", torch.full((4,), 0.1), persistent=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.shift.to(x.dtype)


def b25_buffers_dtype(ranks):
    fp32, bf16 = torch.float32, torch.bfloat16
    for buffer, wanted in ((None, fp32), (bf16, bf16)):
        policy = MixedPrecision(param=bf16, buffer=buffer)
        before = dict(ranks.alike(Buffered).named_buffers())
        model = shard(ranks, ranks.alike(Buffered), mp_policy=policy)
        for _ in range(2):
            square_loss(model, torch.ones(2, 4)).backward()
        for name, now in model.named_buffers():
            if name.endswith("steps"):
                expect((now.dtype, now.item()), (torch.int64, 2), name)
            else:
                expect(now.dtype, wanted, name)
                assert torch.equal(now, before[name].to(wanted)), f"{name} has other values"
    step = plain_step(square_loss)
    compare(ranks, Buffered, step, data=floats(ranks, width=4))


def b26_fp16_inf_on_one_rank_skips_the_step_on_all(ranks):
    for strategy in (ShardingStrategy.FULL_SHARD, HYBRID):
        model = ranks.alike(lambda: nn.Embedding(8, 4))
        model = shard(ranks, model, strategy=strategy, wrap=None, mp_policy=FP16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler(ranks.device.type, init_scale=2.0**16)
        saw_inf = []
        for number, factor in enumerate((100.0, 1.0, 1.0)):  # 100 / 4 * 2**16 is no float16
            before = weights_of(model)
            factor = factor if ranks.rank == ranks.size - 1 else 1.0
            loss = (model(torch.tensor([0])) * factor).float().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            saw_inf.append(not rows_of(model.weight.grad).isfinite().all().item())
            scaler.step(optimizer)
            scaler.update()
            expect(scaler.get_scale(), 2.0**15, f"scale after step {number}")
            # AdamW's weight decay moves every row
            after = weights_of(model)
            moved = (after["weight"] != before["weight"]).any(1).tolist()
            expect(moved, [number > 0] * 8, f"rows that step {number} moved")
        everyone = ranks.comm.all_gather_object(saw_inf)
        expect([any(step) for step in zip(*everyone, strict=True)], [True, False, False], "an inf on any rank")
        if strategy is ShardingStrategy.FULL_SHARD:
            expect(sum(rank[0] for rank in everyone), 1, "ranks that could see the inf")


def b27_clipping_with_several_p_and_with_offload(ranks):
    tokens = data_for(ranks, 1)[0]
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, HYBRID):
        for offload in (None, CPUOffload()):
            model = shard(ranks, ranks.alike(lm), strategy=strategy, offload_policy=offload)
            for p in (1.0, 2.0, 3.0, math.inf):
                reference = ranks.alike(lm)
                lm_loss(reference, tokens).backward()
                wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, p).item()
                assert wanted > 0.05, "nothing is clipped"
                model.zero_grad()
                lm_loss(model, ranks.rows(tokens)).backward()
                norm = clip_grad_norm_(model, 0.05, p).item()
                assert abs(norm - wanted) <= 1e-5 * wanted, f"p={p}, {strategy.name}: norm {norm} instead of {wanted}"
                assert_rows(model, reference, 1e-6)


def b28_cast_to_fp64_after_init(ranks):
    def step(model, optimizer, x, number):
        if number == 0:
            model.double()
        loss = model(x.double()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.item(),)

    model = compare(ranks, Stack, step, data=floats(ranks), tolerance=1e-10)
    expect({p.dtype for p in model.parameters()}, {torch.float64})


class Filled(nn.Module):
    """A matrix, and a buffer, that ``reset_parameters`` fills without torch's generator, which threads share."""

    def __init__(self, rows, columns, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.register_buffer("scale", torch.empty(columns))
        self.seed = seed
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            values = torch.randn(
                self.weight.shape, device="cpu", generator=torch.Generator("cpu").manual_seed(self.seed)
            )
            self.weight.copy_(values / self.weight.shape[1] ** 0.5)
            self.scale.fill_(0.5)

    def forward(self, x):
        return F.linear(x * self.scale, self.weight)


class FilledModel(nn.Module):
    class Block(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.up = Filled(20, 12, seed)
            self.down = Filled(12, 20, seed + 1)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    def __init__(self):
        super().__init__()
        self.first = Filled(12, 6, 1)
        self.blocks = nn.ModuleList(FilledModel.Block(2 + 2 * i) for i in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def b29_meta_init_and_materialise(ranks):
    def sharded(model):
        with torch.device("meta"):
            empty = FilledModel()
        expect({p.device.type for p in empty.parameters()}, {"meta"})
        empty = shard(ranks, empty)
        expect({t.device.type for t in [*empty.parameters(), *empty.buffers()]}, {ranks.device.type}, "devices")
        for (name, value), whole in zip(weights_of(empty).items(), model.parameters(), strict=True):
            assert torch.equal(value, whole), f"{name} has other first values"
        return empty

    compare(ranks, FilledModel, plain_step(square_loss), data=floats(ranks, width=6), sharded=sharded)
