"""Two machines, each with a directory of its own: when one is lost, its ranks' state comes back from the other."""

import shutil

import pytest
import torch

from fullshard import Checkpoints, fully_shard
from fullshard.core.testing import run_ranks
from fullshard.state.resilience import peer_replicas, snapshot_buffer
from fullshard.state.resilience.scratch import ScratchDirectory
from fullshard.state.resilience.snapshot_buffer import SnapshotBuffer
from fullshard.state.storage import find_checkpoints
from support.models import TinyLM, batches, lm_loss
from support.parity import replicas
from support.states import assert_same_bits, rank_runs, whole

SIZE, EACH, ROWS = 4, 2, 2


@pytest.fixture(autouse=True)
def machines(tmp_path, monkeypatch):
    """The directories of both machines; which one is theirs, ranks (threads of one process) know by their number."""
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(EACH))
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path))
    monkeypatch.setattr(peer_replicas, "SECONDS", 10.0)
    return directories


def attempt(number, machines, directory, steps, fill=None, build=TinyLM):
    """Train until ``steps`` from where the run is; where it began, and the whole state at the end."""
    size = EACH * len(machines)
    _, models = replicas(build, size)
    data = batches(8, ROWS * SIZE)

    def work(comm):
        model = models[comm.rank]
        if fill is not None:
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.fill_(fill)
        model = fully_shard(model, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        keep = ScratchDirectory(machines[comm.rank // EACH], number)
        with Checkpoints(directory, ranks=comm, in_memory=1) as checkpoints:
            checkpoints.in_memory = type(checkpoints.in_memory)(checkpoints.ranks, keep, 1)
            restored = checkpoints.load(model, optimizer)
            began = 0 if restored is None else restored.step
            for step in range(began + 1, steps + 1):
                lm_loss(model, data[step - 1][comm.rank * ROWS : (comm.rank + 1) * ROWS]).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert checkpoints.snapshot(model, optimizer, step=step)
        return began, rank_runs(model, optimizer)

    began, runs = zip(*run_ranks(size, work), strict=True)
    assert len(set(began)) == 1
    return began[0], whole(runs)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machines_state_comes_back_to_the_bit(lost, tmp_path, machines):
    _, undisturbed = attempt(0, machines, tmp_path / "other", 5)
    for directory in machines:
        shutil.rmtree(directory)
    attempt(0, machines, tmp_path / "run", 3)
    shutil.rmtree(machines[lost])
    began, state = attempt(1, machines, tmp_path / "run", 5, fill=-7)
    assert began == 3
    assert_same_bits(state, undisturbed)


def frozen_part():
    """A model of which a part does not train."""
    model = TinyLM()
    model.blocks[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("build", [TinyLM, frozen_part])
@pytest.mark.parametrize("lost", [0, 1])
def test_fewer_ranks_go_on_from_the_copies_on_the_machine_that_is_left(lost, build, tmp_path, machines):
    _, state = attempt(0, machines, tmp_path / "run", 3, build=build)
    left = machines[1 - lost]
    shutil.rmtree(machines[lost])
    began, fewer = attempt(1, [left], tmp_path / "run", 3, fill=-7, build=build)
    assert began == 3
    assert_same_bits(fewer, state)
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["step-00000003"]
    shutil.rmtree(left)  # the checkpoint is as if the four ranks had saved it
    began, all_again = attempt(0, machines, tmp_path / "run", 3, fill=-7, build=build)
    assert began == 3
    assert_same_bits(all_again, state)


def turned():
    """A model with a buffer that is not contiguous in memory."""
    model = TinyLM()
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    return model


def test_a_buffer_that_is_not_contiguous_goes_to_fewer_ranks(tmp_path, machines):
    _, state = attempt(0, machines, tmp_path / "run", 3, build=turned)
    shutil.rmtree(machines[0])
    began, fewer = attempt(1, machines[1:], tmp_path / "run", 3, build=turned)
    assert began == 3
    assert_same_bits(fewer, state)


def test_without_the_copy_of_a_lost_machine_fewer_ranks_start_at_the_newest_checkpoint(tmp_path, machines):
    attempt(0, machines, tmp_path / "run", 3)
    shutil.rmtree(machines[1])
    shutil.rmtree(machines[0] / "rank-00003")
    assert attempt(1, machines[:1], tmp_path / "run", 0)[0] == 0


def test_the_same_snapshots_are_on_both_machines(tmp_path, machines):
    attempt(0, machines, tmp_path / "run", 2)
    for rank in range(SIZE):
        for number in range(2):
            one, other = (SnapshotBuffer(path / f"rank-{rank:05d}" / str(number)).read() for path in machines)
            assert one.described == other.described
            assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_a_damaged_copy_is_not_brought_back(tmp_path, machines):
    attempt(0, machines, tmp_path / "run", 3)
    shutil.rmtree(machines[1])
    newest = max(
        (
            one
            for number in range(2)
            if (one := SnapshotBuffer(machines[0] / "rank-00003" / str(number)).read()) is not None
        ),
        key=lambda one: one.described.key,
    )
    content = bytearray((newest.directory / snapshot_buffer.BYTES_NAME).read_bytes())
    content[5] ^= 1
    (newest.directory / snapshot_buffer.BYTES_NAME).write_bytes(content)
    assert attempt(1, machines, tmp_path / "run", 3, fill=-7)[0] == 2


def test_both_machines_lost_is_the_start(tmp_path, machines):
    attempt(0, machines, tmp_path / "run", 2)
    for directory in machines:
        shutil.rmtree(directory)
    assert attempt(1, machines, tmp_path / "run", 2)[0] == 0


def test_a_stranger_stores_nothing(tmp_path, machines):
    def work(comm):
        one = peer_replicas.PeerReplicas(comm, machines[comm.rank // EACH])
        if comm.rank == 0:
            host, port, _ = one._addresses[2]
            one._addresses[2] = (host, port, b"x" * 32)
            SnapshotBuffer(tmp_path / "mine").store(b"{}", 8192, lambda view: None)
            with pytest.raises(OSError, match=r"did not store|reset|Broken pipe"):
                one.send(2, tmp_path / "mine")
        comm.barrier()

    run_ranks(SIZE, work)
    assert not list(machines[1].iterdir())
