"""A checkpoint that an earlier fullshard wrote is read for ever, on any number of ranks.

``checkpoint_v1`` to ``checkpoint_v3`` are of format versions 1 to 3, written by two ranks, which in the third divide
columns (tensor parallel). Their tensors hold what :func:`value` says, so nothing else is recorded. They are never
written again; a new version of the format gets a directory of its own from a new :func:`write_golden`.
"""

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, fully_shard, load_checkpoint
from fullshard.core.layout import Block
from fullshard.core.testing import run_ranks
from fullshard.state.storage import (
    CheckpointReader,
    Keep,
    Piece,
    SaveJob,
    SavePlan,
    begin,
    commit_save,
    dtype_of,
    read_index,
    read_part,
    write_part,
)
from fullshard.state.storage.contents import verify
from support.states import rank_runs, whole

GOLDEN = Path(__file__).parent
STEP = "step-00000007"
NAMES = ("embed.weight", "scale", "out.weight", "out.bias", "low")
STATE = ("exp_avg", "exp_avg_sq")


class Small(nn.Module):
    """A tied weight that both ranks hold rows of, a scalar, bf16, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.out = nn.Linear(6, 5)
        self.low = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))


def value(name, numel, dtype):
    """Elements of a stored tensor: small whole numbers, other ones for each name, exact in every dtype."""
    kind = sum(name.encode()) % 50
    return ((torch.arange(numel) * 3 + kind) % 101).to(dtype)


def make(comm):
    """The sharded model, whose shards hold nothing of what is read, and its optimizer after a step."""
    model = Small()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model = fully_shard(model, comm, wrap=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75), weight_decay=0.125)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def write_golden(directory):
    """What wrote the second of them; run by hand."""

    def work(comm):
        torch.manual_seed(0)
        model, optimizer = make(comm)
        for parameter in model.parameters():
            meta, (low, high) = parameter.shard_meta, parameter.shard_meta.element_range
            targets = {f"model/{meta.name}": parameter.data}
            targets |= {f"optimizer/{meta.name}/{key}": optimizer.state[parameter][key] for key in STATE}
            for name, target in targets.items():
                full = value(name, prod(meta.global_shape), target.dtype)
                target.view(-1).copy_(full[low:high])
            optimizer.state[parameter]["step"].fill_(7)
        model.seen.copy_(value("model/seen", 4, torch.int64))
        with Checkpoints(directory, ranks=comm) as checkpoints:
            checkpoints.save(
                model,
                optimizer,
                step=7,
                metric=0.5,
                values={"epoch": 2, "loss": 0.1, "order": [3, 1, 2], "name": "ä"},
                assets=lambda path: (path / "config.json").write_text('{"model_type": "small"}\n'),
            )

    run_ranks(2, work)
    (directory / "lock").unlink()


def write_divided_golden(directory):
    """What wrote the third, from the second: each of two ranks has half of the columns."""
    source = GOLDEN / "checkpoint_v2" / STEP
    index = read_index(source)
    directory.mkdir()
    jobs = []
    for rank in range(2):
        plan = SavePlan(groups=index.groups if rank == 0 else [])
        for name, entry in index.tensors.items():
            full = torch.empty(entry.numel, dtype=dtype_of(entry))
            CheckpointReader(source, index).read(Piece(name, entry.shape, 0, full))
            if entry.shape[-1:] in ((6,), (4,)) and len(entry.shape) == 2:
                half = full.view(entry.shape).chunk(2, 1)[rank].flatten()
                plan.pieces.append(Piece(name, entry.shape, 0, half, Block(1, rank, 2)))
            elif name.startswith(f"rank/0000{rank}") or (rank == 0 and not name.startswith("rank/")):
                plan.pieces.append(Piece(name, entry.shape, 0, full))
        written = replace(index, tensors={}, groups=(), divided_by=2)
        jobs.append(SaveJob(directory, "", rank, written, plan, Keep(), lambda: None, 10.0, lambda: None))
    begin(jobs[0], lambda path: shutil.copytree(source / "model", path, dirs_exist_ok=True))
    for job in jobs:
        write_part(job)
    commit_save(jobs[0], [read_part(jobs[0], rank) for rank in range(2)])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_version_is_read_as_it_was_written(version, size):
    def work(comm):
        model, optimizer = make(comm)
        restored = load_checkpoint(model, optimizer, GOLDEN / f"checkpoint_v{version}" / STEP)
        assert (restored.step, restored.world_size, restored.metric) == (7, 2, 0.5)
        assert restored.values == {"epoch": 2, "loss": 0.1, "order": [3, 1, 2], "name": "ä"}
        assert restored.rng_restored == (size == 2 and version < 3)
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.5, 0.75), 0.125)
        return rank_runs(model, optimizer)

    found = whole(run_ranks(size, work))
    shapes = {"model/" + name: tensor for name, tensor in Small().state_dict().items() if name != "head.weight"}
    assert {name for name in found if name.startswith("model/")} == set(shapes)
    for name, tensor in shapes.items():
        assert torch.equal(found[name], value(name, tensor.numel(), tensor.dtype)), name
    for name in NAMES:
        assert found[f"optimizer/{name}/step"].item() == 7
        for key in STATE:
            stored = f"optimizer/{name}/{key}"
            like = shapes[f"model/{name}"]
            assert torch.equal(found[stored], value(stored, like.numel(), like.dtype)), stored


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_version_is_whole_and_what_it_says_of_itself(version):
    checkpoint = GOLDEN / f"checkpoint_v{version}" / STEP
    assert verify(checkpoint.parent).problems == 0
    index = read_index(checkpoint)
    assert index.versions["fullshard"] == "0.1.0"
    assert len(index.tensors["model/embed.weight"].pieces) == 2
    assert index.serial == (None if version == 1 else 1)
    for name in ("index.json", "complete.json"):
        content = json.loads((checkpoint / name).read_text())
        assert ("own_sha256" in content) == (version > 1)
        assert content.get("version", 1) == (version if name == "index.json" else min(version, 2))
    assert sorted(path.name for path in checkpoint.glob("shard-*")) == [
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.safetensors",
    ]
