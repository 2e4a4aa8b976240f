"""Runs in fp8, emulated on two ranks: beside torch's FSDP2, as whole runs, and as planned."""

import dataclasses
import os
import sys
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as torchs

import fullshard
from dist.planner.plan_main import STEPS, measured
from fullshard.core.comm import RecordingComm, SoloComm
from fullshard.core.engine.extension.float8 import precompute_float8_scales
from fullshard.core.torch_private import graphs_compiled
from fullshard.errors import RunStopped
from fullshard.program.config import load_run
from fullshard.program.models import blocks_of, compile_blocks, uncompiled
from fullshard.program.models.float8 import Float8Layers, compute_in_float8
from fullshard.program.train import FileSink, StopRequest, train
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.run.step import StepSpec, issue_step
from fullshard.program.train.run_plan import largest_steps, plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.float8_runs import PLANNED, RUNS, make
from support.rank_script import found, parse, print_result
from support.tiny_run import read_jsonl
from support.torchao_folder import let_import_torchao


def batches(rank):
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(3, 100, (3, 10), generator=draw)  # 30 tokens: products of weights' gradients are padded
        yield {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def trained(model, rank, after=lambda model: None):
    """The losses of some steps of a sharded model, with what is done ``after`` each, and how many graphs there are."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, graphs = [], []
    for inputs in batches(rank):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        after(model)
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(graphs_compiled())
    return losses, graphs


def evaluated(model, rank):
    """The losses of some batches in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return [model(**inputs).loss.item() for inputs in batches(rank)]


def beside_fsdp2(comm, kind, scales, *, gathers=False, compiled=False):
    """Losses and weights of our steps and of FSDP2's, of the same model and batches; or with weights gathered in fp8.

    ``compiled`` are our blocks only, without a change of rounding.

    Embeddings are frozen: FSDP2 adds up their gradients in bf16, as it does without fp8 too, and fullshard in fp32.
    """
    ours, theirs = make(kind), make(kind)
    for model in (ours, theirs):
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.requires_grad_(requires_grad=False)
    chosen = set(Float8Layers.of(ours).chosen)
    compute_in_float8(ours, scales=scales, emulate=True, ranks=2 if gathers else None)
    if compiled:
        compile_blocks(ours, backend="aot_eager")
    policy = fullshard.MixedPrecision(param="bfloat16", reduce="float32")
    comm = RecordingComm(comm)
    ours = fullshard.fully_shard(ours, comm, mp_policy=policy)
    torchao = import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(scales)
    config = dataclasses.replace(config, emulate=True, enable_fsdp_float8_all_gather=gathers)
    theirs = torchao.convert_to_float8_training(theirs, module_filter_fn=lambda _, name: name in chosen, config=config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*blocks_of(theirs), theirs):
        torchs(module, mp_policy=policy)
    scale = torchao.precompute_float8_dynamic_scale_for_fsdp if gathers else lambda model: None
    losses, graphs = trained(ours, comm.rank, precompute_float8_scales)
    gathered = sum(entry.sent_bytes for entry in comm.entries if entry.collective == "all_gather")
    others, _ = trained(theirs, comm.rank, scale)
    mine = fullshard.full_state_dict(ours)  # on rank 0
    weights = {name: p.full_tensor() for name, p in theirs.named_parameters() if p.requires_grad}
    apart = [name for name, value in weights.items() if mine and not torch.equal(value, mine[name])]
    found = {"ours": losses, "theirs": others, "apart": apart, "weights": len(weights), "layers": len(chosen)}
    found |= {"graphs": graphs, "gathered": gathered, "evaluated": evaluated(ours, comm.rank)}
    with uncompiled(ours):
        return found | {"evaluated_uncompiled": evaluated(ours, comm.rank)}


class StopAfter(StopRequest):
    """Asks to stop as soon as a checkpoint could be saved."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    @property
    def requested(self):
        return self._path.exists() and len(read_jsonl(self._path)) >= 3

    @requested.setter
    def requested(self, value):
        pass


def whole(comm, directory, name):
    """What a run left behind: losses, the saved tensors' names, dtypes and content."""
    config = load_run(directory / name / "run.yaml", [])
    ended = "finished"
    if name.endswith("interrupted"):
        stop = StopAfter(config.output_dir / "metrics.jsonl")
        try:
            train(config, comm, [FileSink(config.output_dir)] if comm.rank == 0 else [], stop)
        except RunStopped as stopped:
            ended = f"stopped after {stopped.step}"
    summary = train(config, comm, [FileSink(config.output_dir)] if comm.rank == 0 else [])
    if comm.rank:
        return None
    (file,) = config.output_dir.glob("*.safetensors")
    tensors = load_file(file)
    texts = [path.read_bytes() for path in config.output_dir.rglob("*") if path.is_file()]
    return {
        "ended": ended,
        "loss": summary.loss,
        "texts": [one.prediction for one in summary.predictions],
        "tensors": {key: [str(value.dtype), value.double().sum().item()] for key, value in tensors.items()},
        "names_torchao": sum(b"torchao" in text for text in texts),
    }


def planned(comm, directory, name):
    """The planned and the measured peak of a run's steps."""
    config = load_run(directory / name / "run.yaml", [])
    comm = comm if config.nproc == 2 else SoloComm(comm.device)
    data = prepare(config)
    plan = plan_prepared(config, data, comm.size)
    given = largest_steps(config, data, comm.size)

    def build(ranks):
        parts = assemble(config, ranks, data)
        parts.model.train()
        spec = StepSpec(1, 0.0, 1e-3, 1.0, parts.collate.causal)

        def step():
            issue_step(parts.model, parts.optimizer, given[0], ranks, spec).report()

        return parts.model, step, STEPS

    real = measured(comm, build)
    peaks = comm.all_gather_object(real["peak_bytes"])
    sent = {kind: size for kind, size in real["sent_bytes"].items() if size and kind != "all_gather_object"}
    return {"planned": plan.peak_bytes, "measured": max(peaks), "sent": [plan.sent_bytes, sent]}


CASES = {
    "beside_llama": lambda comm, directory: beside_fsdp2(comm, "llama", "tensorwise"),
    "beside_llama_gathers": lambda comm, directory: beside_fsdp2(comm, "llama", "tensorwise", gathers=True),
    "beside_llama_compiled": lambda comm, directory: beside_fsdp2(
        comm, "llama", "tensorwise", gathers=True, compiled=True
    ),
    "beside_t5": lambda comm, directory: beside_fsdp2(comm, "t5", "rowwise"),
    **{name: lambda comm, directory, name=name: whole(comm, directory, name) for name in RUNS},
    **{name: lambda comm, directory, name=name: planned(comm, directory, name) for name in PLANNED},
}


def main():
    options = parse(CASES, __doc__)
    let_import_torchao()
    torch.set_num_threads(1)
    comm = fullshard.init()
    print_result({name: found(CASES[name], comm, options.directory) for name in options.only})
    fullshard.shutdown()
    sys.stdout.flush()
    os._exit(0)  # collecting at exit what FSDP2 left aborts, after its group is gone


if __name__ == "__main__":
    main()
