"""Cases of the engine on CUDA devices, a rank each."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "dist" / "engine"))

import parallel_main

import fullshard
from fullshard.core.comm import MemoryMeter, SoloComm
from fullshard.core.engine import record
from fullshard.core.engine.full.summon import summoned_parameters
from fullshard.core.engine.registry import runtime_of
from fullshard.program.train.setup.activation_offload import ActivationOffload
from support import staged_comm
from support.extended import Halved, Scaled, blocks, rounded
from support.models import KINDS, TinyLM, batches, lm_loss, seq2seq_loss, t5
from support.parity import ROWS_PER_RANK, replicas, train_sharded, train_unsharded
from support.rank_script import found, parse, print_result
from support.saving_case import saving


def parity(comm):
    torch.backends.cuda.matmul.allow_tf32 = False
    worst_loss = worst_weight = 0.0
    for make, loss_of in KINDS.values():
        reference, (model,) = replicas(make, 1)
        data = [tokens.to(comm.device) for tokens in batches(10, comm.size * ROWS_PER_RANK)]
        plain = train_unsharded(reference.to(comm.device), loss_of, data)
        ours = train_sharded(model, comm, loss_of, data)
        worst_loss = max([worst_loss, *(abs(a - b) for a, b in zip(ours[0], plain[0], strict=True))])
        gaps = [(ours[2][name] - plain[2][name]).abs().max().item() for name in plain[2]]
        worst_weight = max([worst_weight, *gaps])
    return {"worst_loss": worst_loss, "worst_weight": worst_weight}


def bf16(comm):
    torch.manual_seed(0)
    policy = fullshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    model = fullshard.fully_shard(t5(), comm, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses, tokens = [], batches(1, 4)[0].to(comm.device)
    for _ in range(10):
        loss = seq2seq_loss(model, tokens)
        loss.backward()
        fullshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def gaps(comm, **options):
    """Largest differences of losses and weights from the unsharded run, of a T5 and a small language model."""
    worst = 0.0
    for kind in ("t5", "lm_two_forwards"):
        make, loss_of = KINDS[kind]
        reference, (model,) = replicas(make, 1)
        data = [tokens.to(comm.device) for tokens in batches(10, comm.size * ROWS_PER_RANK)]
        plain = train_unsharded(reference.to(comm.device), loss_of, data)
        ours = train_sharded(model, comm, loss_of, data, **options)
        weights = [(ours[2][name] - plain[2][name]).abs().max().item() for name in plain[2]]
        worst = max([worst, *weights, *(abs(a - b) for a, b in zip(ours[0], plain[0], strict=True))])
    return worst


def strategies(comm):
    """The hybrid ones as replicas of one rank each: their all-reduce runs on a stream of its own."""
    alone = SoloComm(comm.device)
    return {
        strategy.name: gaps(comm, strategy=strategy, mesh=(comm, alone) if strategy.needs_two_axes else None)
        for strategy in fullshard.ShardingStrategy
    }


def offload(comm):
    plain = gaps(comm, offload_policy=fullshard.CPUOffload())
    pageable = gaps(comm, offload_policy=fullshard.CPUOffload(pin_memory=False))
    model = fullshard.fully_shard(t5(), comm, offload_policy=fullshard.CPUOffload())
    seq2seq_loss(model, batches(1, 4)[0].to(comm.device)).backward()
    params = [p for p in model.parameters() if p.grad is not None]
    return {
        "gap": max(plain, pageable),
        "devices": sorted({p.device.type for p in params} | {p.grad.device.type for p in params}),
        "pinned": all(
            lane.shard.is_pinned() or not lane.shard.numel() for u in model._fullshard_runtime.units for lane in u.lanes
        ),
    }


def fp16(comm):
    """Sharded gradient scaling: an inf on the first rank skips the step on all, and training goes on."""
    torch.manual_seed(0)
    policy = fullshard.MixedPrecision(param=torch.float16, reduce=torch.float32)
    model = fullshard.fully_shard(t5(), comm, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = fullshard.ShardedGradScaler("cuda", init_scale=2.0**8)
    scales, losses, tokens = [], [], batches(1, 4)[0].to(comm.device)
    for step in range(6):
        loss = seq2seq_loss(model, tokens)
        scaler.scale(loss * (float("inf") if step == 1 and comm.rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return {"scales": scales, "losses": losses}


def wide_sum(comm):
    """bf16 messages added in fp32: each rank's gradient is rounded once."""
    torch.manual_seed(0)
    policy = fullshard.MixedPrecision(reduce="bf16", reduce_sum="fp32")
    model = fullshard.fully_shard(torch.nn.Linear(64, 64, bias=False), comm, wrap=None, mp_policy=policy)
    x = torch.randn(8, 64, device=comm.device)
    model(x).sum().backward()
    expected = torch.ones(64, 8, device=comm.device) @ x
    grad = model.weight.grad
    return {
        "gap": 0.0 if grad is None else (grad - expected[: len(grad)]).abs().max().item() / expected.abs().max().item()
    }


def extensions(comm):
    """Losses of models with parameters that gather themselves, in three steps, less those of the rounded values."""
    worst = 0.0
    for kind in (Scaled, Halved):
        model = fullshard.fully_shard(blocks(kind).to(comm.device), comm)
        plain = blocks(None).to(comm.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.linspace(-1, 1, 128, device=comm.device).reshape(4, 32)
        for _ in range(3):
            with summoned_parameters(model, model.modules()):
                full = {name: param.detach().clone() for name, param in model.named_parameters()}
            shown = {name: rounded(kind, value) if value.dim() == 2 else value for name, value in full.items()}
            loss = model(rows).square().mean()
            expected = torch.func.functional_call(plain, shown, rows).square().mean()
            worst = max(worst, ((loss - expected).abs() / expected).item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"gap": worst}


def divided(comm):
    """A Llama whose layers two ranks divide, or one: the unsharded run, and torch's FSDP2 on several GPUs."""
    parallel_main.DEVICE, tensor = comm.device.type, 2 - comm.size % 2
    parallel_main.equals_unsharded_and_torchs("llama", comm.size // tensor, tensor)
    return {"equal": True}


def embedding(comm):
    grads = []
    for _ in range(2):
        torch.manual_seed(0)
        model = fullshard.fully_shard(torch.nn.Embedding(100, 64), comm, wrap=None)
        indices = torch.arange(4096, device=comm.device) % 7
        (model(indices) * torch.linspace(0, 1, 4096, device=comm.device).unsqueeze(1)).sum().backward()
        grads.append(model.weight.grad)
    return {"same": grads[0] is None or torch.equal(grads[0], grads[1])}


def memory(comm):
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(2048, 8192), torch.nn.Linear(8192, 2048)) for _ in range(6)]
    model = fullshard.fully_shard(torch.nn.Sequential(*blocks), comm)
    x = torch.randn(2, 2048, device=comm.device)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    model.zero_grad()
    with MemoryMeter(comm.device) as meter:
        model(x).sum().backward()
    units = model._fullshard_runtime.units
    return {
        "above_start": meter.peak_bytes - meter.start_bytes,
        "shards": sum(lane.shard.nbytes for unit in units for lane in unit.lanes),
        "unit": max(lane.full.nbytes for unit in units for lane in unit.lanes),
    }


def activations(comm):
    """Losses, and the peak above what is held between steps, without and with offloaded activations."""
    result = {}
    for name in ("kept", "offloaded"):
        torch.manual_seed(0)
        model = fullshard.fully_shard(TinyLM(layers=8, width=256, hidden=1024), comm)
        if name == "offloaded":
            ActivationOffload(model, model.blocks, runtime_of(model).device)
        losses = []
        for tokens in batches(4, 64, length=257):
            torch.cuda.synchronize()
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = lm_loss(model, tokens.to(comm.device))
            loss.backward()
            losses.append(loss.item())
            model.zero_grad()
        result[name] = {"losses": losses, "above": torch.cuda.max_memory_allocated() - start}
    return result


def trace(comm):
    """Whether a recorded step has its events in order, and what its memory adds up to."""
    torch.manual_seed(0)
    model = fullshard.fully_shard(t5(), comm)
    tokens = batches(1, 4)[0].to(comm.device)
    for _ in range(2):
        with record(model) as recorder:
            seq2seq_loss(model, tokens).backward()
        model.zero_grad()
    forwards = [event for event in recorder.events if event.kind == "forward"]
    gathers = [event for event in recorder.events if event.kind == "gather"]
    in_time = (any(g.unit == f.unit and g.end_s <= f.start_s for g in gathers) for f in forwards)
    return {
        "gathered_in_time": comm.size == 1 or all(in_time),
        "within": all(0 <= event.start_s <= event.end_s <= recorder.seconds for event in recorder.events),
        "forwards": len(forwards),
        "allocated": min(sample.allocated - sample.gathered - sample.gradient_buffers for sample in recorder.samples),
    }


def unused(comm):
    """Steps in which a layer never gets a gradient; from the third on waiting for the device is an error.

    Not if ranks share the device: a thread then waits for it to copy what it sends.
    """
    shared = torch.cuda.device_count() < comm.size

    class Model(TinyLM):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Linear(24, 24)

    model = fullshard.fully_shard(Model(), comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    before = model.spare.weight.detach().clone()
    for step, tokens in enumerate([tokens.to(comm.device) for tokens in batches(5, 2)]):
        torch.cuda.set_sync_debug_mode("default" if step < 3 or shared else "error")
        lm_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return {"kept": torch.equal(before, model.spare.weight)}


CASES = {
    case.__name__: case
    for case in (
        parity,
        strategies,
        bf16,
        offload,
        fp16,
        wide_sum,
        extensions,
        divided,
        embedding,
        memory,
        activations,
        trace,
        unused,
        saving,
    )
}


def main():
    options = parse(CASES, __doc__, torch.cuda.device_count(), gpus=None)
    comm = staged_comm.init()
    results = {name: found(CASES[name], comm) for name in options.only}
    print_result(comm.all_gather_object(results))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
