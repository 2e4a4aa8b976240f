"""A snapshot gives back what a rank held, one that is not whole is never taken for one, and a failure ends no run."""

import errno
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from fullshard import Checkpoints, ShardingStrategy, fully_shard, load_checkpoint
from fullshard.core.comm import SoloComm
from fullshard.core.comm.memory import live_tensor_bytes
from fullshard.core.engine import local_tensors
from fullshard.core.optim import AdamW8bit, Muon, step_in_backward
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.saving import memory, scratch
from fullshard.state.saving.memory import InMemory, _interval
from fullshard.state.saving.parameter_state import stepped
from fullshard.state.saving.pieces import frozen_digest
from fullshard.state.saving.scratch import ScratchDirectory
from fullshard.state.storage import find_checkpoints, shard_name, verify
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


def snapshots_of(keep, rank):
    """A rank's complete snapshots, by step."""
    directory = ScratchDirectory.of(keep.parent / "run").directory / f"rank-{rank:05d}"
    return {int(path.name.removeprefix("step-")): path for path in find_checkpoints(directory)}


def test_what_it_maps_is_counted_until_the_next_one(tmp_path):
    solo = SoloComm(torch.device("cpu"))
    model = fully_shard(TinyLM(), solo)
    optimizer = adamw(model)
    step(model, optimizer, batches(1, ROWS)[0], solo)
    with Checkpoints(tmp_path / "run", ranks=solo, in_memory=1) as checkpoints:
        assert checkpoints.in_memory.nbytes == 0
        before = live_tensor_bytes()
        for number in (1, 2, 3):
            assert checkpoints.snapshot(model, optimizer, step=number, values={})
            checkpoints.in_memory.wait()
            assert checkpoints.in_memory.nbytes == live_tensor_bytes() - before > 0


def test_an_attempt_that_does_not_ask_for_snapshots_leaves_none_of_those_before(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    model, optimizer = fully_shard(TinyLM(), SoloComm(torch.device("cpu"))), None
    with Checkpoints(tmp_path / "run", ranks=SoloComm(torch.device("cpu")), in_memory=1) as checkpoints:
        assert checkpoints.snapshot(model, optimizer, step=2, values={})
        checkpoints.in_memory.wait()
    assert list(snapshots_of(keep, 0)) == [2]
    assert list(snapshots_of(keep, 1)) == [2, 3]  # another rank's


def test_what_another_rank_wrote_alone_is_refused(tmp_path, keep):
    attempt(2, tmp_path / "run", 2)
    model = fully_shard(TinyLM(), SoloComm(torch.device("cpu")))
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 .* rank 0 of 1"):
        load_checkpoint(model, None, snapshots_of(keep, 1)[2])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_later_attempt_continues_to_the_bit(size, tmp_path, keep, monkeypatch):
    _, undisturbed = attempt(size, tmp_path / "other", 5)
    assert attempt(size, tmp_path / "run", 3)[0] == 0
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    for rank in range(size):
        assert list(snapshots_of(keep, rank)) == [2, 3]
        assert verify(snapshots_of(keep, rank)[3]).problems == 0
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


def break_bytes(path):
    file = path / shard_name(1, 2)
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)


def break_index(path):
    file = path / "index.json"
    file.write_text(file.read_text().replace('"step":3', '"step":4'))


def cut_short(path):
    os.truncate(path / shard_name(1, 2), 100)


def leave_unfinished(path):
    path.rename(path.with_name(f"{path.name}.tmp"))


@pytest.mark.parametrize("damage", [break_bytes, break_index, cut_short, leave_unfinished])
def test_a_snapshot_that_is_not_whole_on_one_rank_sends_all_to_the_one_before(damage, tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    damage(snapshots_of(keep, 1)[3])
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    _, undisturbed = attempt(2, tmp_path / "other", 4)
    began, state = attempt(2, tmp_path / "run", 4, fill=-7)
    assert began == 2
    assert_same_bits(state, undisturbed)


def test_snapshots_of_a_given_up_attempt_are_not_mixed_with_later_ones(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    shutil.rmtree(snapshots_of(keep, 1)[3])
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert attempt(2, tmp_path / "run", 2, fill=-7)[0] == 2
    # Rank 0 had the one of step 3, which this attempt has not reached.
    assert list(snapshots_of(keep, 0)) == list(snapshots_of(keep, 1)) == [2]


def test_a_snapshot_that_one_rank_has_replaced_by_another_of_its_step_is_not_taken(tmp_path, keep, monkeypatch):
    """As in a run that is killed after an evaluation: values differ, and so would ranks."""

    def work(comm, steps):
        model = fully_shard(torch.nn.BatchNorm1d(3), comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            restored = checkpoints.load(model)
            for number, values in steps:
                assert checkpoints.in_memory.take(model, None, step=number, values={"of": values})
        return restored and (restored.step, restored.values)

    run_ranks(2, lambda comm: work(comm, [(1, 0), (2, 0), (3, 0)]))
    (directory,) = keep.glob("*/rank-00001")
    shutil.copytree(directory, tmp_path / "rank 1")
    shutil.rmtree(keep)
    keep.mkdir()
    run_ranks(2, lambda comm: work(comm, [(1, 0), (2, 0), (3, 0), (3, 1)]))
    assert list(snapshots_of(keep, 0)) == [2, 3]
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "rank 1", directory)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert run_ranks(2, lambda comm: work(comm, [])) == [(2, {"of": 0})] * 2


@pytest.mark.parametrize("lost", [None, 1])
def test_ranks_of_two_machines_agree_on_what_each_sees_alone(lost, tmp_path, monkeypatch):
    """The lost one's ranks have no snapshot, so that all ranks begin at the newest checkpoint on disk."""

    def work(comm, number):
        model = fully_shard(torch.nn.BatchNorm1d(3), comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            checkpoints.in_memory = InMemory(comm, ScratchDirectory(tmp_path / f"machine{comm.rank}", number), 1)
            restored = checkpoints.load(model)
            if number == 0:
                checkpoints.save(model, step=1)
                assert checkpoints.snapshot(model, step=2)
            return restored and restored.step

    run_ranks(2, lambda comm: work(comm, 0))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    if lost is not None:
        shutil.rmtree(tmp_path / f"machine{lost}")
    assert run_ranks(2, lambda comm: work(comm, 1)) == [2 if lost is None else 1] * 2


def test_buffers_that_differ_between_ranks_are_each_ranks_own(tmp_path, monkeypatch):
    def work(comm):
        model = fully_shard(torch.nn.BatchNorm1d(3), comm)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            if checkpoints.load(model) is None:
                model.running_mean.fill_(comm.rank + 1)
                checkpoints.snapshot(model, step=1)
                checkpoints.in_memory.wait()
                model.running_mean.fill_(0)
        return model.running_mean.tolist()

    assert run_ranks(2, work) == [[0.0] * 3] * 2
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    assert run_ranks(2, work) == [[1.0] * 3, [2.0] * 3]


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
    shutil.rmtree(keep)
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


def test_a_snapshot_of_other_shards_is_refused_and_names_both_runs(tmp_path, monkeypatch):
    attempt(2, tmp_path / "run", 1)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    holds = r"holds elements 0 to [\d,]+ of \w+/\S+, and the snapshot has 0 to [\d,]+\."
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
    monkeypatch.setattr(memory, "free_memory", lambda device: {"machine: here": 100_000})
    assert train_with_trouble(tmp_path) == [[False] * 3] * 2
    assert "the ranks of a machine would take" in caplog.text
    assert caplog.text.count("No snapshots are kept in memory") == 1


def test_a_small_file_system_is_left_to_others(tmp_path, monkeypatch, caplog):
    """64 MB of /dev/shm in a container: filled to the last page, it would end loaders' workers and NCCL."""
    real = os.statvfs(tmp_path)
    small = SimpleNamespace(f_bavail=25, f_frsize=4096)
    monkeypatch.setattr(memory.os, "statvfs", lambda path: small)
    assert real.f_bavail > small.f_bavail
    assert train_with_trouble(tmp_path) == [[False] * 3] * 2
    assert re.search(r"the ranks of a file system \(.*/keep\) would take .* 100\.0 KiB free", caplog.text)


def test_the_digest_of_frozen_weights_tells_a_bit_and_leaves_trained_ones_out():
    def work(comm):
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)), comm)
        model[0].requires_grad_(False)
        found = [frozen_digest(model)]
        for one in (model[1].weight, model[0].weight):
            with torch.no_grad():
                one.view(-1)[0] += 1
            found.append(frozen_digest(model))
        return found

    ((first, trained, frozen),) = run_ranks(1, work)
    assert first == trained != frozen


def test_a_full_file_system_is_said_and_ends_snapshots_only(tmp_path, monkeypatch, caplog):
    def full(descriptor, start, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert train_with_trouble(tmp_path) == [[True, False, False]] * 2
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.glob("keep/*/rank-*/*"))


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
    lives = [ScratchDirectory(tmp_path / "run", number).mean_life_s() for number in range(3)]
    assert lives == [None, 90.0, 45.0]
    (tmp_path / "lock").unlink()
    assert ScratchDirectory(tmp_path / "run", 1).mean_life_s() is None


def kept_by(directory, number, life_s=None):
    """What the launcher keeps, for an attempt after others that lasted so long in the mean."""
    return SimpleNamespace(directory=directory, attempt=number, last=False, mean_life_s=lambda: life_s)


def test_one_slow_snapshot_does_not_make_them_rare(tmp_path, monkeypatch):
    clock = iter(range(1000))

    def work(comm):
        model = fully_shard(torch.nn.Linear(3, 3), comm)
        one = InMemory(comm, kept_by(tmp_path, 0), "auto")
        one.costs += [3.0, 3.0, 0.05, 0.05, 0.09]  # new memory twice, three as they are
        one.tick()
        one.tick()
        one.take(model, None, step=9, values={})
        one.wait()
        return one.every

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run_ranks(1, work) == [_interval(0.05, 0.0, 1.0)]


def test_the_last_attempt_continues_and_takes_none(tmp_path, keep, monkeypatch):
    attempt(2, tmp_path / "run", 3)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    monkeypatch.setenv("FULLSHARD_MAX_RESTARTS", "0")
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = adamw(model)
        with Checkpoints(tmp_path / "run", ranks=comm, in_memory=1) as checkpoints:
            restored = checkpoints.load(model, optimizer)
            return restored.step, checkpoints.snapshot(model, optimizer, step=4)

    assert run_ranks(2, work) == [(3, False)] * 2
    assert [list(snapshots_of(keep, rank)) for rank in (0, 1)] == [[2, 3]] * 2
