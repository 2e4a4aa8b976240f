"""What a rank may still take, as the system says it: the machine, and control groups of either version."""

import pytest
import torch

from fullshard.core.comm import memory
from fullshard.core.comm.memory import free_memory as found

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes the system's files and returns the bytes that are free, by pool."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_GROUPS", groups)

    def look(cgroup="", **files):
        files = {
            "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\nSwapFree: 1000 kB\n",
            "proc/sys/kernel/random/boot_id": "abc\n",
            "proc/self/ns/cgroup": "",
            "proc/self/cgroup": cgroup,
            **files,
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return {name.rpartition(":")[2].strip(): size for name, size in found(CPU).items()}

    return look


def test_swap_and_what_the_system_can_take_back_are_free(system):
    assert system() == {"abc": 6000 * 1024}


def test_limits_of_control_groups_are_less_what_is_used_and_cannot_be_taken_back(system):
    group = {
        "groups/job/task/memory.max": "max\n",
        "groups/job/task/memory.current": "7\n",
        "groups/job/task/memory.stat": "anon 7\n",
        "groups/job/memory.max": "3000\n",
        "groups/job/memory.current": "2500\n",
        "groups/job/memory.stat": "anon 1500\ninactive_file 600\nactive_file 300\nslab_reclaimable 20\n",
    }
    assert system("0::/job/task\n", **group) == {"abc": 6000 * 1024, "/job": 1420 + 1000 * 1024}


def test_a_group_of_version_1_counts_the_groups_inside(system):
    group = {
        "groups/memory/job/memory.limit_in_bytes": "3000\n",
        "groups/memory/job/memory.usage_in_bytes": "2500\n",
        "groups/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 300\n",
    }
    assert system("5:cpu:/job\n4:memory:/job\n0::/\n", **group) == {"abc": 6000 * 1024, "/job": 1400 + 1000 * 1024}


def test_a_container_sees_its_limit_at_the_root(system):
    group = {"groups/memory.max": "3000\n", "groups/memory.current": "1000\n", "groups/memory.stat": "anon 1000\n"}
    assert system("0::/\n", **group)["/"] == 2000 + 1000 * 1024


def test_where_the_system_says_nothing_there_is_no_pool(system):
    assert system(**{"proc/meminfo": "nothing\n"}) == {}


def test_this_machine_has_some_free():
    assert min(found(CPU).values()) > 1 << 20
