"""Ranks read each other's memory only where that is known to be right: one machine, whose processor is x86-64."""

import platform

import pytest

from fullshard.core.comm import stack_probe
from fullshard.core.comm.peer_memory import OTHER_MACHINE, PeerMemory
from fullshard.core.comm.stack_probe import named_machine


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "FULLSHARD_MACHINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def x86(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def obstacle(number=0):
    """What keeps a rank from reading its own table, and one whose card has another number in place of its magic one."""
    memory = PeerMemory()
    name, pid, address = memory.card()
    return memory.obstacle([(name, pid, address + 8 * number)])


def test_a_table_of_this_machine_is_read(x86):
    assert obstacle() is None


@pytest.mark.parametrize("processor", ["aarch64", "ppc64le", "riscv64", ""])
def test_on_other_processors_it_is_off(monkeypatch, processor):
    """Their stores may become visible in another order: a number before its address."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    assert obstacle() == f"that is only safe on x86-64 processors, and this one is {processor or 'unknown'}"


def test_what_is_no_table_is_not_read(x86):
    assert obstacle(1) == "their process ids are not those that this rank sees"


def test_only_what_was_offered_for_a_collective_is_found(x86):
    """An entry that is half written, or of a collective 8,192 before, is none."""
    memory = PeerMemory()
    assert memory.obstacle([memory.card()]) is None
    memory.offer(8195, 7, 0x7F00_0000_1000)
    assert memory.find(0, 8195, 7) == 0x7F00_0000_1000
    assert [memory.find(0, *other) for other in ((8195, 8), (8194, 7), (3, 7), (2 * 8192 + 3, 7))] == [None] * 4
    before = list(memory._entries)
    memory.offer(2 * 8192 + 3, 7, 0x7F00_0000_2000)
    memory._entries[3 * 3] = before[3 * 3]  # the mark of the first, with the address of the second
    assert memory.find(0, 8195, 7) is None


def machines(monkeypatch, *environments):
    """The names that ranks give their machine in these environments."""
    names = []
    for environment in environments:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            names.append(named_machine())
    return names


def two(monkeypatch, first, second):
    a, b = machines(monkeypatch, first, second)
    return a != b


def test_ranks_of_one_launcher_are_on_one_machine(monkeypatch):
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert not two(monkeypatch, torchrun, torchrun)
    assert not two(monkeypatch, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"})


def test_machines_of_a_launcher_are_several_even_on_one_host(monkeypatch):
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert two(monkeypatch, torchrun | {"GROUP_RANK": "0"}, torchrun | {"GROUP_RANK": "1"})


def test_network_namespaces_are_machines_if_the_environment_says_that_there_are_several(monkeypatch):
    def in_namespace(number, local):
        with monkeypatch.context() as patch:
            patch.setattr(stack_probe, "_link", lambda path: f"net:[{number}]")
            return machines(patch, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local})

    assert in_namespace(1, "1") != in_namespace(2, "1")
    assert in_namespace(1, "2") == in_namespace(2, "2")


def test_a_name_decides(monkeypatch):
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert two(monkeypatch, {"FULLSHARD_MACHINE": "a"}, {"FULLSHARD_MACHINE": "b"})
    assert not two(
        monkeypatch,
        torchrun | {"GROUP_RANK": "0", "FULLSHARD_MACHINE": "a"},
        torchrun | {"GROUP_RANK": "1", "FULLSHARD_MACHINE": "a"},
    )


def test_ranks_of_several_machines_say_nothing(monkeypatch, x86):
    card = PeerMemory().card()
    monkeypatch.setenv("FULLSHARD_MACHINE", "b")
    assert PeerMemory().obstacle([card]) == OTHER_MACHINE
