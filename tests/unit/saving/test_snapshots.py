"""A snapshot gives back what a rank held, one that is not whole is never taken for one, and a failure ends no run."""

import errno
import json
import os
import re
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullshard import Checkpoints, ShardingStrategy, fully_shard
from fullshard.core.engine import local_tensors
from fullshard.core.optim import AdamW8bit, Muon, step_in_backward
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.resilience import checksums, scratch, snapshot_buffer, snapshots
from fullshard.state.resilience.snapshot_buffer import SnapshotBuffer, SnapshotHeader
from fullshard.state.resilience.snapshots import _interval
from fullshard.state.saving.parameter_state import stepped
from fullshard.state.saving.pieces import plan_save
from fullshard.state.saving.snapshot import take
from fullshard.state.storage import find_checkpoints, seal
from support.models import TinyLM, batches, lm_loss
from support.parity import replicas
from support.states import assert_same_bits, rank_runs, whole

ROWS = 2


@pytest.fixture(autouse=True)
def keep(tmp_path, monkeypatch):
    """The launcher's directory; its first attempt."""
    directory = tmp_path / "keep"
    directory.mkdir()
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(directory))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "0")
    return directory


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def step(model, optimizer, tokens, comm):
    lm_loss(model, tokens[comm.rank * ROWS : (comm.rank + 1) * ROWS]).backward()
    optimizer.step()
    optimizer.zero_grad()


def attempt(size, directory, steps, *, optimizer_of=adamw, mesh_of=lambda comm: comm, save=(), fill=None, **options):
    """Train until ``steps`` from where the run is; where each rank began, and the whole state at the end."""
    _, models = replicas(TinyLM, size)
    data = batches(8, ROWS * size)

    def work(comm):
        model = models[comm.rank]
        if fill is not None:
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.fill_(fill)
        model = fully_shard(model, mesh_of(comm), **options)
        optimizer = optimizer_of(model)
        with Checkpoints(directory, ranks=mesh_of(comm), in_memory=1) as checkpoints:
            restored = checkpoints.load(model, optimizer)
            began = 0 if restored is None else restored.step
            if restored is not None:
                assert restored.values == {"rows": began * ROWS}
            for number in range(began + 1, steps + 1):
                step(model, optimizer, data[number - 1], comm)
                assert checkpoints.snapshot(model, optimizer, step=number, values={"rows": number * ROWS})
                if number in save:
                    checkpoints.save(model, optimizer, step=number, values={"rows": number * ROWS})
        return began, rank_runs(model, optimizer)

    began, runs = zip(*run_ranks(size, work), strict=True)
    assert len(set(began)) == 1
    return began[0], whole(runs)


def buffers(keep, rank):
    """A rank's buffers with a snapshot, by its step."""
    found = [SnapshotBuffer(path).read() for path in sorted(keep.glob(f"*/rank-{rank:05d}/*"))]
    return {one.described.step: one.directory for one in found if one is not None}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_later_attempt_continues_to_the_bit(size, tmp_path, keep, monkeypatch):
    _, undisturbed = attempt(size, tmp_path / "other", 5)
    assert attempt(size, tmp_path / "run", 3)[0] == 0
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    began, state = attempt(size, tmp_path / "run", 5, fill=-7)
    assert began == 3
    assert_same_bits(state, undisturbed)
    assert not find_checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    "optimizer_of",
    [lambda model: AdamW8bit(model.parameters(), lr=1e-2), lambda model: Muon(model.named_parameters(), lr=1e-2)],
    ids=["8bit", "muon"],
)
def test_optimizers_with_states_of_their_own_continue_to_the_bit(optimizer_of, tmp_path, monkeypatch):
    _, undisturbed = attempt(2, tmp_path / "other", 4, optimizer_of=optimizer_of)
    attempt(2, tmp_path / "run", 2, optimizer_of=optimizer_of)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    began, state = attempt(2, tmp_path / "run", 4, optimizer_of=optimizer_of, fill=-7)
    assert began == 2
    assert_same_bits(state, undisturbed)


def grid(comm):
    """Two replicas of two shards."""
    return comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])


def test_replicas_keep_their_own(tmp_path, monkeypatch):
    options = {"mesh_of": grid, "strategy": ShardingStrategy.HYBRID_SHARD}
    _, undisturbed = attempt(4, tmp_path / "other", 3, **options)
    attempt(4, tmp_path / "run", 2, **options)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    began, state = attempt(4, tmp_path / "run", 3, fill=-7, **options)
    assert began == 2
    assert_same_bits(state, undisturbed)


def break_bytes(directory):
    content = bytearray((directory / snapshot_buffer.BYTES_NAME).read_bytes())
    content[100] ^= 4
    (directory / snapshot_buffer.BYTES_NAME).write_bytes(content)


def break_manifest(directory):
    path = directory / snapshot_buffer.MANIFEST_NAME
    path.write_text(path.read_text().replace('"step":3', '"step":4'))


def cut_short(directory):
    os.truncate(directory / snapshot_buffer.BYTES_NAME, 8192)


@pytest.mark.parametrize("damage", [break_bytes, break_manifest, cut_short])
def test_a_damaged_snapshot_on_one_rank_sends_all_to_the_one_before(damage, tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    damage(buffers(keep, 1)[3])
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    _, undisturbed = attempt(2, tmp_path / "other", 4)
    began, state = attempt(2, tmp_path / "run", 4, fill=-7)
    assert began == 2
    assert_same_bits(state, undisturbed)


def test_a_rank_that_is_killed_in_the_middle_leaves_the_one_before(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    newest = SnapshotBuffer(buffers(keep, 1)[3])
    newest.write({"x": torch.ones(3)}, lambda pairs: lambda: None)  # what completes it is never called
    assert newest.read() is None
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(2, tmp_path / "run", 3, fill=-7)[0] == 2


def test_snapshots_of_a_given_up_attempt_are_not_mixed_with_later_ones(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    (buffers(keep, 1)[3] / snapshot_buffer.MANIFEST_NAME).unlink()
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(2, tmp_path / "run", 3, fill=-7)[0] == 2
    # Rank 0 has step 3 of both attempts' numbering; rank 1 loses that of the later one.
    (buffers(keep, 1)[3] / snapshot_buffer.MANIFEST_NAME).unlink()
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "2")
    assert attempt(2, tmp_path / "run", 3, fill=-7)[0] == 2


@pytest.mark.parametrize(("saved", "steps", "begins"), [((1,), 3, 3), ((3,), 3, 3), ((2,), 2, 2)])
def test_the_later_of_memory_and_disk_is_taken(saved, steps, begins, tmp_path, monkeypatch, caplog):
    attempt(2, tmp_path / "run", steps, save=saved)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(2, tmp_path / "run", steps, fill=-7)[0] == begins
    source = "the snapshot in memory" if steps > saved[0] else str(find_checkpoints(tmp_path / "run")[-1])
    assert f"attempt 1 continues after step {begins} from {source}" in caplog.text


def test_without_snapshots_damaged_checkpoints_are_passed_over(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3, save=(1, 3))
    (find_checkpoints(tmp_path / "run")[-1] / "index.json").write_text("{}")
    for path in keep.rglob(snapshot_buffer.MANIFEST_NAME):
        path.unlink()
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(2, tmp_path / "run", 3, fill=-7)[0] == 1


def test_the_only_checkpoint_may_be_damaged_where_there_are_snapshots(tmp_path, monkeypatch):
    attempt(2, tmp_path / "run", 3, save=(2,))
    (find_checkpoints(tmp_path / "run")[-1] / "index.json").write_text("{}")
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(2, tmp_path / "run", 3, fill=-7)[0] == 3


def test_at_another_world_size_the_checkpoint_is_taken(tmp_path, monkeypatch):
    attempt(2, tmp_path / "run", 3, save=(2,))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(1, tmp_path / "run", 2, fill=-7)[0] == 2


def test_without_a_launcher_that_restarts_none_are_taken(tmp_path, monkeypatch):
    monkeypatch.delenv("FULLSHARD_KEEP_DIR")

    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            return checkpoints.snapshot(model, step=1)

    assert run_ranks(2, work) == [False, False]


def test_the_average_of_the_weights_is_in_it(tmp_path, monkeypatch):
    def work(model, comm, number):
        model = fully_shard(model, comm)
        average = ExponentialMovingAverage(model, decay=0.5)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            if number == 0:
                average.update()
                checkpoints.snapshot(model, step=1, average=average)
            else:
                for tensor in average.averages.values():
                    tensor.fill_(-7)
                assert checkpoints.load(model, average=average).step == 1
        return average.updates, {name: tensor.clone() for name, tensor in average.averages.items()}

    _, models = replicas(TinyLM, 2)
    first = run_ranks(2, lambda comm: work(models[comm.rank], comm, 0))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    _, models = replicas(TinyLM, 2)
    second = run_ranks(2, lambda comm: work(models[comm.rank], comm, 1))
    for (updates, ours), (_, theirs) in zip(second, first, strict=True):
        assert updates == 1
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_snapshot_of_another_model_is_refused(tmp_path, monkeypatch):
    attempt(1, tmp_path / "run", 1)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")

    def work(comm):
        model = fully_shard(torch.nn.Linear(3, 3), comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            checkpoints.load(model)

    with pytest.raises(CheckpointError, match=r"does not fit the model\. Tensors 2 missing: weight, bias"):
        run_ranks(1, work)


class Counting(torch.optim.SGD):
    """Keeps state under a key with a slash."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param].setdefault("steps/fast", torch.zeros_like(param)).add_(1)
                self.state[param]["steps/all"] = self.state[param].get("steps/all", 0) + 1


def plain(value):
    return torch.as_tensor(value).detach().as_subclass(torch.Tensor).clone()


IN_BACKWARD = lambda model: step_in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-2))  # noqa: E731


@pytest.mark.parametrize(
    ("model_of", "optimizer_of"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)), IN_BACKWARD),
        (lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), adamw),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(3, 4)),
            lambda model: Counting(model.parameters(), lr=1e-2, momentum=0.9),
        ),
    ],
    ids=["a-rank-without-rows", "frozen-parameters", "a-slash-in-a-key"],
)
def test_each_rank_has_its_own_state_again(model_of, optimizer_of, tmp_path, monkeypatch):
    def train(directory, steps):
        models = replicas(model_of, 3)[1]

        def work(comm):
            model, frozen = fully_shard(models[comm.rank], comm), optimizer_of is adamw
            average = ExponentialMovingAverage(model, decay=0.5) if frozen else None
            model[0].requires_grad_(not frozen)
            optimizer = optimizer_of(model)
            with Checkpoints(directory, ranks=comm, in_memory=1) as checkpoints:
                checkpoints.in_memory.note_made(model)
                restored = checkpoints.load(model, optimizer, average=average)
                began = 0 if restored is None else restored.step
                checkpoints.in_memory.leave_out_made(model)
                for number in range(began + 1, steps + 1):
                    model(torch.ones(2, 3) * number).pow(2).sum().backward()
                    if optimizer_of is not IN_BACKWARD:
                        optimizer.step()
                        optimizer.zero_grad()
                    if average is not None:
                        average.update()
                    assert checkpoints.snapshot(model, optimizer, step=number, values={}, average=average)
            held = [dict(model.named_parameters()), {} if average is None else average.averages]
            held += [one.state for one in stepped(local_tensors(model), optimizer)]
            return began, [{key: plain(value) for key, value in one.items()} for one in held]

        return run_ranks(3, work)

    undisturbed = train(tmp_path / "other", 3)
    train(tmp_path / "run", 2)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    for (began, ours), (_, theirs) in zip(train(tmp_path / "run", 3), undisturbed, strict=True):
        assert began == 2
        for one, other in zip(ours, theirs, strict=True):
            assert one.keys() == other.keys()
            assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize(("dtype", "of_buffer"), [(torch.bfloat16, torch.float32), (torch.float32, torch.int64)])
def test_a_snapshot_of_another_dtype_is_refused(dtype, of_buffer, tmp_path, monkeypatch):
    def work(comm, dtype, of_buffer):
        model = torch.nn.Linear(4, 4, bias=False).to(dtype)
        torch.nn.init.ones_(model.weight)
        model.register_buffer("middle", torch.tensor([1.5, 2.5]).to(of_buffer))
        model = fully_shard(model, comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            if checkpoints.load(model) is None:
                checkpoints.snapshot(model, step=1)

    run_ranks(2, lambda comm: work(comm, torch.float32, torch.float32))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    with pytest.raises(
        CheckpointError, match=rf"model/\w+ is {dtype if dtype != torch.float32 else of_buffer} on this"
    ):
        run_ranks(2, lambda comm: work(comm, dtype, of_buffer))


def test_a_snapshot_of_another_format_is_none(tmp_path, keep):
    attempt(1, tmp_path / "run", 1)
    (directory,) = buffers(keep, 0).values()
    path = directory / snapshot_buffer.MANIFEST_NAME
    values = json.loads(path.read_text())
    del values["own_sha256"], values["format"]
    path.write_text(seal(json.dumps(values)))
    assert SnapshotBuffer(directory).read() is None
    assert SnapshotBuffer(directory).described() is None


def test_plain_state_in_a_checkpoint_made_from_snapshots_is_that_of_the_rank_that_saves_it():
    models = replicas(lambda: torch.nn.Linear(3, 4), 2)[1]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = Counting(model.parameters(), lr=1e-2)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        _, plain = take(model, optimizer, None, comm.device, cut=True)
        return plain["written"]["scalars"], plan_save(model, optimizer, gradients=False).scalars

    (first, saved), (second, saved_by_second) = run_ranks(2, work)
    assert first == saved == {"weight": {"steps/all": 1}}
    assert second == saved_by_second == {"bias": {"steps/all": 1}}


def test_a_snapshot_of_other_shards_is_refused_and_names_both_runs(tmp_path, monkeypatch):
    attempt(2, tmp_path / "run", 1)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    holds = r"holds elements 0 to [\d,]+ of model/\S+, and the snapshot has 0 to [\d,]+\."
    with pytest.raises(CheckpointError, match=holds):
        attempt(2, tmp_path / "run", 2, strategy=ShardingStrategy.NO_SHARD)


def train_with_trouble(tmp_path):
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            return [checkpoints.snapshot(model, step=number) for number in (1, 2, 3)]

    return run_ranks(2, work)


def test_too_little_memory_is_said_and_ends_snapshots_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshots, "free_memory", lambda device: {"machine: here": 100_000})
    assert train_with_trouble(tmp_path) == [[False] * 3] * 2
    assert "the ranks of a machine would take" in caplog.text
    assert caplog.text.count("No snapshots are kept in memory") == 1


def test_a_small_file_system_is_left_to_others(tmp_path, monkeypatch, caplog):
    """64 MB of /dev/shm in a container: filled to the last page, it would end loaders' workers and NCCL."""
    real = os.statvfs(tmp_path)
    small = SimpleNamespace(f_bavail=25, f_frsize=4096)
    monkeypatch.setattr(snapshots.os, "statvfs", lambda path: small)
    assert real.f_bavail > small.f_bavail
    assert train_with_trouble(tmp_path) == [[False] * 3] * 2
    assert re.search(r"the ranks of a file system \(.*/keep\) would take .* 100\.0 KiB free", caplog.text)


def test_checksums_of_tensors_tell_a_bit_a_place_and_a_part():
    one, other = torch.arange(5000.0), torch.arange(3, dtype=torch.uint8)
    sums = checksums([one, other, torch.empty(0)])
    assert checksums([one.clone(), other.clone()]) == sums
    changed = one.clone()
    changed[4999] += 1
    assert checksums([changed, other]) != sums
    assert checksums([other, one]) != sums
    assert checksums([]) == [0, 0]


def test_a_full_file_system_is_said_and_ends_snapshots_only(tmp_path, monkeypatch, caplog):
    def full(descriptor, start, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert train_with_trouble(tmp_path) == [[True, False, False]] * 2
    assert "No space left on device" in caplog.text


def test_the_interval_keeps_the_cost_below_one_percent():
    assert _interval(cost_s=0.005, written_s=0.1, step_s=1.0) == 1
    assert _interval(cost_s=0.05, written_s=0.1, step_s=1.0) == 5
    assert _interval(cost_s=0.005, written_s=30.0, step_s=1.0) == 30  # complete before the next one begins


def test_the_interval_is_shorter_where_failures_are_frequent_and_never_longer():
    lost = {every: 0.08 / every + every / 2 / 60 for every in range(1, 9)}  # a share of the time, of steps of 1 s
    assert _interval(cost_s=0.08, written_s=0.1, step_s=1.0, life_s=60.0) == min(lost, key=lost.get)
    assert _interval(cost_s=0.01, written_s=0.1, step_s=1.0, life_s=60.0) == 1  # two steps would lose more
    assert _interval(cost_s=0.08, written_s=0.1, step_s=1.0, life_s=3600.0) == 8 == _interval(0.08, 0.1, 1.0)


def test_how_long_attempts_last_is_known_from_the_second_on(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    now = (tmp_path / "lock").stat().st_mtime + 90
    monkeypatch.setattr(scratch, "time", SimpleNamespace(time=lambda: now))
    lives = [scratch.ScratchDirectory(tmp_path / "run", number).mean_life_s() for number in range(3)]
    assert lives == [None, 90.0, 45.0]
    (tmp_path / "lock").unlink()
    assert scratch.ScratchDirectory(tmp_path / "run", 1).mean_life_s() is None


def kept_by(directory, number, life_s=None):
    """What the launcher keeps, for an attempt after others that lasted so long in the mean."""
    return SimpleNamespace(directory=directory, attempt=number, last=False, mean_life_s=lambda: life_s)


def test_a_later_attempt_takes_over_how_long_snapshots_and_steps_took(tmp_path):
    pace, lives = (0.08, 0.1, 1.0), (600.0, 60.0)

    def before(comm):
        one = SnapshotBuffer(tmp_path / f"rank-{comm.rank:05d}" / "0")
        seal_it = one.write({"x": torch.zeros(4)}, lambda pairs: [t.copy_(s) for t, s in pairs] and int)
        seal_it(SnapshotHeader(8, comm.rank, 2, 0, 0, every=8, pace=pace))

    def after(comm):
        later = snapshots.Snapshots(comm, kept_by(tmp_path, 1, lives[comm.rank]), "auto")
        assert later.newest().described.step == 8
        every = later.every
        assert [later.due(step) for step in (7 + every, 8 + every)] == [False, True]
        later.write(lambda: ({"x": torch.zeros(4)}, {}), 8 + every, {})
        later.wait()
        return every, SnapshotBuffer(tmp_path / f"rank-{comm.rank:05d}" / "1").read().described.pace

    run_ranks(2, before)
    shortest = _interval(*pace, life_s=60.0)
    assert shortest not in (snapshots.FIRST_GAP, _interval(*pace, life_s=600.0))
    assert run_ranks(2, after) == [(shortest, list(pace))] * 2  # and the attempt after that, if this one is as short


def test_one_slow_snapshot_does_not_make_them_rare(tmp_path, monkeypatch):
    clock = iter(range(1000))

    def work(comm):
        one = snapshots.Snapshots(comm, kept_by(tmp_path, 0), "auto")
        one.costs += [3.0, 3.0, 0.05, 0.05, 0.09]  # new memory twice, three as they are
        one.tick()
        one.tick()
        one.write(lambda: ({"x": torch.zeros(4)}, {}), 9, {})
        one.wait()
        return one.every

    monkeypatch.setattr(snapshots, "time", SimpleNamespace(monotonic=lambda: next(clock), thread_time=lambda: 0.0))
    assert run_ranks(1, work) == [_interval(0.05, 0.0, 1.0)]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no directory in memory")
def test_a_later_attempt_takes_no_fault_for_every_page():
    tensors, faults = {"x": torch.ones(4 << 20)}, []

    def copy(pairs):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for target, source in pairs:
            target.copy_(source)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return lambda: None

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for _ in range(2):
            SnapshotBuffer(Path(directory)).write(tensors, copy)(SnapshotHeader(1, 0, 1, 0, 0, 4))
    assert faults[1] < tensors["x"].nbytes / resource.getpagesize() / 4


def test_both_sums_notice_what_the_other_does_not():
    words = torch.zeros(3 * 1024, dtype=torch.int64)
    words[0] = 5
    before = snapshot_buffer.checksum(words.view(torch.uint8))
    words[0], words[2000] = 0, 5
    assert snapshot_buffer.checksum(words.view(torch.uint8))[1] != before[1]
    words[2000] = 4
    assert snapshot_buffer.checksum(words.view(torch.uint8))[0] != before[0]


def test_an_empty_slot_has_no_snapshot(tmp_path):
    assert SnapshotBuffer(tmp_path / "0").read() is None
    one = SnapshotBuffer(tmp_path / "0")
    one.write({"x": torch.arange(5.0), "none": torch.empty(0)}, lambda pairs: [t.copy_(s) for t, s in pairs] and int)(
        SnapshotHeader(1, 0, 1, 0, 0, 4)
    )
    read = SnapshotBuffer(tmp_path / "0").read()
    assert read.described.key == (0, 0, 1)
    assert torch.equal(read.tensors["x"], torch.arange(5.0))
    assert read.tensors["none"].numel() == 0


def test_the_last_attempt_continues_and_takes_none(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    monkeypatch.setenv("FULLSHARD_MAX_RESTARTS", "0")
    before = {path: path.read_bytes() for path in keep.rglob(snapshot_buffer.MANIFEST_NAME)}
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = adamw(model)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            restored = checkpoints.load(model, optimizer)
            return restored.step, checkpoints.snapshot(model, optimizer, step=4)

    assert run_ranks(2, work) == [(3, False)] * 2
    assert {path: path.read_bytes() for path in keep.rglob(snapshot_buffer.MANIFEST_NAME)} == before


def test_only_the_newest_is_added_up_unless_a_rank_lacks_it(tmp_path, keep, monkeypatch):
    attempt(1, tmp_path / "run", 3)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    looked, real = [], snapshot_buffer.checksum
    monkeypatch.setattr(snapshot_buffer, "checksum", lambda buffer: looked.append(1) or real(buffer))
    assert attempt(1, tmp_path / "run", 3)[0] == 3
    assert len(looked) == 1
    break_bytes(buffers(keep, 0)[3])
    looked.clear()
    assert attempt(1, tmp_path / "run", 2)[0] == 2
    assert len(looked) == 3  # the newest twice, and the one before
