"""The Comm class of each kind of process group, and how ranks meet."""

import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.comm import Comm, FakeComm, GlooComm, init_from_env, process, shutdown
from fullshard.core.comm.mesh import SoloComm
from fullshard.core.comm.process import comm_of_group


@pytest.fixture
def group(request):
    backend, size = request.param
    dist.init_process_group(backend, rank=0, world_size=size, store=FakeStore() if backend == "fake" else None,
                            init_method=None if backend == "fake" else "tcp://127.0.0.1:0")  # fmt: skip
    yield dist.group.WORLD
    shutdown()


@pytest.mark.parametrize("group", [("fake", 512)], indirect=True)
def test_a_fake_group_is_one_process_of_a_large_world(group):
    comm = comm_of_group(group, None)
    assert type(comm) is FakeComm
    assert isinstance(comm, Comm)
    assert (comm.rank, comm.size, comm.device.type) == (0, 512, "cpu")
    comm.announce("all-gather of unit blocks.3")
    comm.all_gather(torch.zeros(1024), torch.zeros(2)).wait()
    comm.reduce_scatter(torch.zeros(2), torch.zeros(1024)).wait()
    received = [torch.ones(1 if rank else 2) for rank in range(512)]
    comm.exchange(received, [torch.full((2,), 5.0)] * 512).wait()
    assert (received[0].tolist(), received[1].tolist()) == ([5.0, 5.0], [0.0])  # nobody gives what is not asked for
    comm.barrier()
    assert len(comm.all_gather_object("a")) == 512


@pytest.mark.parametrize("group", [("gloo", 1)], indirect=True)
def test_one_rank_of_gloo_waits_for_nobody(group):
    comm = comm_of_group(group, None)
    assert type(comm) is GlooComm
    assert isinstance(comm, Comm)
    comm.announce("all-gather of unit blocks.3")
    full, shard, total = torch.zeros(2), torch.ones(2), torch.ones(100_000)
    comm.all_gather(full, shard).wait()
    assert torch.equal(full, shard)
    comm.reduce_scatter(full, 2 * shard).wait()
    assert torch.equal(full, 2 * shard)
    comm.all_reduce(total).wait()
    assert torch.equal(total, torch.ones(100_000))
    comm.broadcast(full).wait()
    comm.gather(shard, full).wait()
    comm.exchange([full], [3 * shard]).wait()
    assert torch.equal(full, 3 * shard)
    comm.barrier()
    assert comm.all_gather_object("a") == ["a"]


@pytest.mark.parametrize("group", [("fake", 512)], indirect=True)
def test_a_group_that_another_launcher_made_is_joined(group, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    comm = init_from_env()
    assert (type(comm), comm.size) == (FakeComm, 512)
    assert dist.group.WORLD is group


def test_a_group_of_one_without_processes_takes_announcements():
    assert isinstance(SoloComm(torch.device("cpu")), Comm)
    SoloComm(torch.device("cpu")).announce("all-gather of unit blocks.3")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_connects_when_rank_0_listens(rank, monkeypatch):
    class ConnectsError(Exception):
        """Where torch would connect."""

    pauses, listened = [], []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

        def sleep(seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                listened.append(listener.listen())

        def rendezvous(*_args, **_options):
            raise ConnectsError

        monkeypatch.setattr(process, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
        monkeypatch.setattr(process, "rendezvous", rendezvous)
        with pytest.raises(ConnectsError):
            init_from_env()
    assert len(listened) == rank  # rank 0 is the one that listens
    assert pauses == sorted(pauses)
    assert sum(pauses) < 0.05


def test_a_rank_that_waits_in_vain_leaves_the_error_to_torch(monkeypatch):
    clock, pauses = iter(range(1000)), []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setattr(process, "time", SimpleNamespace(sleep=pauses.append, monotonic=lambda: next(clock)))
        process._await_store(40.0)
        monkeypatch.setenv("MASTER_ADDR", "a name that nothing has")
        process._await_store(900.0)
    assert max(pauses) == 0.5
    assert 30 < len(pauses) < 40
