"""A process group of another backend than gloo and NCCL: the same runs, by torch's own collectives."""

import datetime
import logging

import pytest
import torch
import torch.distributed as dist

from fullshard import Checkpoints, ShardingStrategy, fully_shard
from fullshard.core.comm import Comm, GlooComm, TorchComm, axes_of
from fullshard.core.comm.process import _warn_of, comm_of_group
from support.behaviours import BEHAVIOURS, Ranks
from support.collectives import check_collectives
from support.models import KINDS, batches
from support.parity import ROWS_PER_RANK, assert_same_run, optimizer_for, replicas, train_sharded, train_unsharded
from support.states import assert_same_bits, rank_runs, whole
from support.threaded_group import run_threaded

pytestmark = pytest.mark.parity


def world():
    comm = comm_of_group(dist.group.WORLD, None)
    assert type(comm) is TorchComm
    assert isinstance(comm, Comm)
    return comm


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_gives_what_the_protocol_says(size):
    run_threaded(size, lambda rank: check_collectives(world()))


@pytest.mark.parametrize(
    ("kind", "size", "strategy"),
    [
        ("lm", 2, ShardingStrategy.SHARD_GRAD_OP),
        ("lm", 2, ShardingStrategy.NO_SHARD),
        ("lm", 3, ShardingStrategy.FULL_SHARD),
        ("lm", 3, ShardingStrategy.NO_SHARD),
        ("t5", 3, ShardingStrategy.FULL_SHARD),
        ("lm", 4, ShardingStrategy.HYBRID_SHARD),
        ("lm", 4, ShardingStrategy.HYBRID_SHARD_ZERO2),
    ],
)
def test_a_sharded_run_equals_the_unsharded_run(kind, size, strategy):
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, size)
    data = batches(4, size * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)

    def work(rank):
        comm = world()
        mesh = dist.init_device_mesh("cpu", (2, 2)) if strategy.needs_two_axes else None
        model = fully_shard(models[rank], mesh, strategy=strategy)
        return train_sharded(model, comm, loss_of, data, sharded=True)

    for run in run_threaded(size, work):
        assert_same_run(run, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BEHAVIOURS if not name.startswith("b40")])
def test_behaviour(name):
    """The last one is left out: ranks that part are not told of here."""

    def work(rank):
        comm = world()
        spare = comm_of_group(dist.new_group(list(range(4))), None)
        BEHAVIOURS[name](Ranks.as_processes(comm, spare, axes_of(comm, 2)))

    run_threaded(4, work)


def state_of(size, work):
    _, models = replicas(KINDS["lm"][0], size)
    data = batches(2, size)

    def on_rank(rank):
        model = fully_shard(models[rank])
        optimizer = optimizer_for(model)
        for tokens in data:
            KINDS["lm"][1](model, tokens[rank : rank + 1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        work(model, optimizer)
        return rank_runs(model, optimizer)

    return whole(run_threaded(size, on_rank))


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_of_two_ranks_loads_on_three(tmp_path, background):
    def save(model, optimizer):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(model, optimizer, step=2, background=background)

    def load(model, optimizer):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.load(model, optimizer)

    assert_same_bits(state_of(2, save), state_of(3, load))


def test_rank_zero_says_once_what_is_lacking(caplog):
    _warn_of.cache_clear()
    with caplog.at_level(logging.WARNING, "fullshard"):
        run_threaded(2, lambda rank: rank and world())
        assert not caplog.records
        run_threaded(2, lambda rank: (world(), world()))
    (record,) = caplog.records
    assert "backend is threaded" in record.getMessage()


@pytest.fixture
def gloo_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                            timeout=datetime.timedelta(seconds=20))  # fmt: skip
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", None, "GlooComm"),
        ("cpu:gloo", None, "GlooComm"),
        ("cpu:gloo,cuda:nccl", "cpu", "GlooComm"),
        ("cpu:gloo,cuda:nccl", "cuda", "ProcessComm"),
        ("cuda:nccl", "cuda", "ProcessComm"),
        ("cpu:mpi", None, "TorchComm"),
        ("cpu:ucc,cuda:ucc", "cuda", "TorchComm"),
        ("cpu:fake,cuda:fake", None, "FakeComm"),
        ("cpu:gloo_next", None, "TorchComm"),  # names are compared as they are, not by a part of them
        ("xpu:xccl", "xpu", "TorchComm"),
    ],
)
def test_the_backend_is_the_one_that_carries_the_device(gloo_of_one, monkeypatch, config, device, expected):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    comm = comm_of_group(gloo_of_one, None if device is None else torch.device(device))
    assert type(comm).__name__ == expected


def test_the_accelerator_is_taken_where_a_backend_is_made_for_it(gloo_of_one, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    found = {}
    for config in ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:mpi,cuda:mpi", "cpu:ucc,cuda:ucc", "cpu:ucc"):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        found[config] = str(comm_of_group(gloo_of_one, None).device)
    assert found == {
        "cpu:gloo,cuda:nccl": "cuda:3", "cpu:gloo,cuda:gloo": "cpu", "cpu:mpi,cuda:mpi": "cpu",
        "cpu:ucc,cuda:ucc": "cuda:3", "cpu:ucc": "cpu",
    }  # fmt: skip


def test_an_accelerator_that_only_the_build_of_torch_knows_is_not_taken(gloo_of_one, monkeypatch):
    known = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else known
    )
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:ucc,cuda:ucc")
    assert str(comm_of_group(gloo_of_one, None).device) == "cpu"


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None])
def test_a_gloo_group_keeps_its_own_messages_however_it_was_made(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm = comm_of_group(dist.group.WORLD, None)
        assert type(comm) is GlooComm
        check_collectives(comm)
    finally:
        dist.destroy_process_group()
