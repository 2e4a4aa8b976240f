"""Where ranks compute: decided by which GPU each has, and alike on every rank."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fullshard.core.comm import device_memory_bytes, process, shutdown
from fullshard.core.comm.rank_gpus import all_have_gpus, gpu_of_rank
from fullshard.errors import ProcessGroupError


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs, played."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: gpu)
    return monkeypatch


def test_each_rank_of_a_machine_has_the_gpu_of_its_local_rank(machine):
    found = []
    for local_rank in range(3):
        machine.setenv("LOCAL_RANK", str(local_rank))
        found.append(gpu_of_rank().index)
    assert found == [0, 1, 0]  # the third is refused when the ranks join
    machine.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of_rank() is None


def decided(cards):
    """What ranks with these GPUs decide, in threads that share a store."""
    store, decisions = dist.HashStore(), [None] * len(cards)

    def decide(rank):
        gpu = None if cards[rank] is None else SimpleNamespace(uuid=cards[rank])
        try:
            decisions[rank] = all_have_gpus(store, rank, len(cards), gpu)
        except ProcessGroupError as error:
            decisions[rank] = str(error)

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in range(len(cards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(decisions)) == 1
    return decisions[0]


@pytest.mark.parametrize(
    ("cards", "decision"),
    [([None, None], False), (["a", None, None], False), (["a", "a", None], False), (["a"], True), (["a", "b"], True)],
)
def test_ranks_compute_on_gpus_if_each_has_one_of_its_own(machine, cards, decision):
    assert decided(cards) is decision


@pytest.mark.parametrize(
    ("cards", "gpus", "ranks"),
    [(["a", "a"], 1, "0, 1"), (["a", "b", "a"], 2, "0, 2"), (["a", "b", "c", "c", "c"], 3, "2, 3, 4")],
)
def test_ranks_that_share_a_gpu_are_refused_alike_on_every_rank(machine, cards, gpus, ranks):
    error = decided(cards)
    assert f"{len(cards)} ranks have {gpus} GPUs, and ranks {ranks} have the same one" in error
    assert "--nproc_per_node" in error
    assert "CUDA_VISIBLE_DEVICES" in error


class Joined:
    """What a rank does to join, with a GPU that is only played."""

    def __init__(self, monkeypatch, other):
        self.backends, self.devices = [], []
        store = dist.HashStore()
        store.set("fullshard/gpu/1", other)
        store.set("fullshard/gpu/1/read", "")
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        properties = SimpleNamespace(uuid="a")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        monkeypatch.setattr(process, "rendezvous", lambda _url, timeout: iter([(store, 0, 2)]))
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: self.backends.append(backend))
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)
        monkeypatch.setattr(process, "comm_of_group", lambda group, device: device)
        monkeypatch.setattr(process, "_world", lambda: None)


@pytest.mark.parametrize(
    ("other", "backend", "device", "said"),
    [("b", "nccl", "cuda:0", []), ("", "gloo", "cpu", ["1 of 2 ranks see no GPU, so all use the CPU."])],
)
def test_joining(machine, caplog, other, backend, device, said):
    joined = Joined(machine, other)
    assert process.init_from_env() == torch.device(device)
    assert joined.backends == [backend]
    assert joined.devices == ([] if other == "" else [torch.device("cuda", 0)])
    assert [record.message for record in caplog.records] == said


def test_no_group_is_made_for_ranks_that_share_a_gpu(machine):
    joined = Joined(machine, "a")
    with pytest.raises(ProcessGroupError, match="cannot share a GPU"):
        process.init_from_env()
    assert joined.backends == []


def test_a_rank_has_all_memory_of_its_gpu(machine):
    machine.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=600))
    assert device_memory_bytes(torch.device("cuda", 0)) == 600


def test_init_joins_the_group_that_the_process_has():
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    try:
        comm = process.init_from_env()
        assert (comm.rank, comm.size, comm.device) == (0, 1, torch.device("cpu"))
        assert dist.is_initialized()
    finally:
        shutdown()


def test_a_gloo_group_serves_no_gpu():
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    try:
        with pytest.raises(ProcessGroupError, match=r"gloo.*cuda:0.*nccl"):
            process.comm_of_group(dist.group.WORLD, torch.device("cuda", 0))
    finally:
        shutdown()
