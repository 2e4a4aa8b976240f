"""Where ranks compute: decided by which GPU each has, and alike on every rank."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fullshard.core.comm import device_memory_bytes, machine_placement, process, shutdown
from fullshard.core.comm.gloo import GlooComm
from fullshard.core.comm.machine_placement import SHARED, Placement, agree, gpu_of_rank, placement_of

SLOW = "collectives go through host memory, which is slow and meant for testing."


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        (["", ""], Placement("cpu")),
        (["0 a", "", ""], Placement("cpu", note="2 of 3 ranks see no GPU, so all use the CPU.")),
        (["0 a"], Placement("own")),
        (["0 a", "1 b"], Placement("own")),
        (["0 a", "0 b"], Placement("own")),  # each sees one GPU, and another one
        (["0 a", "0 a"], Placement("shared", 2, f"2 ranks share GPU 0: {SLOW}")),
        (["3 a", "0 a"], Placement("shared", 2, f"2 ranks share GPU 3: {SLOW}")),  # they see different GPUs
        (["0 a", "1 b", "0 a"], Placement("shared", 2, f"3 ranks share 2 GPUs: {SLOW}")),
        (["0 a", "1 b", "0 c", "0 c", "0 c"], Placement("shared", 3, f"5 ranks share 3 GPUs: {SLOW}")),
    ],
)
def test_what_follows_from_the_gpus(cards, expected):
    assert placement_of(cards) == expected


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs, played."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(uuid="a", total_memory=600)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    return monkeypatch


def test_ranks_are_dealt_round_to_the_gpus_of_a_machine(machine):
    found = []
    for local_rank in range(5):
        machine.setenv("LOCAL_RANK", str(local_rank))
        found.append(gpu_of_rank().index)
    assert found == [0, 1, 0, 1, 0]
    machine.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of_rank() is None


def test_ranks_tell_each_other_which_gpu_they_have(machine):
    store = dist.HashStore()
    store.set("fullshard/gpu/1", "0 a")
    assert agree(store, 0, 2, torch.device("cuda", 1)).note.startswith("2 ranks share GPU 1: ")
    assert store.get("fullshard/gpu/0") == b"1 a"
    assert agree(store, 0, 2, None).kind == "cpu"


def test_a_rank_has_its_share_of_a_shared_gpu(machine):
    gpu = torch.device("cuda", 0)
    assert device_memory_bytes(gpu) == 600
    machine.setattr(SHARED, "ranks", 3)
    assert device_memory_bytes(gpu) == 200


class Joined:
    """What a rank does to join, with a GPU that is only played."""

    def __init__(self, monkeypatch, other):
        self.backends, self.devices = [], []
        store = dist.HashStore()
        store.set("fullshard/gpu/1", other)
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(process, "rendezvous", lambda _url, timeout: iter([(store, 0, 2)]))
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: self.backends.append(backend))
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)
        monkeypatch.setattr(process, "comm_of_group", lambda group, device: device)
        monkeypatch.setattr(process, "_world", lambda: None)


@pytest.mark.parametrize(
    ("other", "backend", "shared", "said"),
    [
        ("1 b", "nccl", None, []),
        ("0 a", "gloo", "cuda:0", [f"2 ranks share GPU 0: {SLOW}"]),
        ("", "gloo", None, ["1 of 2 ranks see no GPU, so all use the CPU."]),
    ],
)
def test_joining(machine, caplog, other, backend, shared, said):
    joined = Joined(machine, other)
    try:
        device = process.init_from_env()
        assert joined.backends == [backend]
        assert joined.devices == ([] if other == "" else [torch.device("cuda", 0)])
        assert device == torch.device("cpu" if other == "" else "cuda:0")
        assert SHARED.gpu == (shared and torch.device(shared))
        assert [record.message for record in caplog.records] == said
        machine.setenv("RANK", "1")
    finally:
        shutdown()
    assert machine_placement.Shared() == SHARED


def test_init_joins_the_group_that_the_process_has():
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    try:
        comm = process.init_from_env()
        assert (comm.rank, comm.size, comm.device) == (0, 1, torch.device("cpu"))
        assert dist.is_initialized()
    finally:
        shutdown()


@pytest.fixture
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    yield dist.group.WORLD
    shutdown()


def test_gloo_groups_serve_the_gpu_that_is_shared_or_given(group, monkeypatch):
    made = []

    class Played:
        def __init__(self, device):
            made.append(device)
            self.device = device

        def settle(self):
            pass

    monkeypatch.setattr(process, "CudaStaging", Played)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert type(process.comm_of_group(group, None)) is GlooComm
    assert process.comm_of_group(group, gpu).device == gpu
    monkeypatch.setattr(SHARED, "gpu", gpu)
    staged = process.comm_of_group(group, None)
    assert (staged.device, staged.group, staged.rank, staged.size) == (gpu, group, 0, 1)
    assert type(process.comm_of_group(group, cpu)) is GlooComm
    assert made == [gpu]  # one thread and one stream for a group
