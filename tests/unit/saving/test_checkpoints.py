"""A checkpoint gives back what was saved, on any number of ranks, and one that is not whole is never taken for one."""

import errno
import os
import threading
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, ShardingStrategy, fully_shard, load_checkpoint, no_sync, step_in_backward
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.storage import find_checkpoints, read_index, writer
from support.models import TinyLM, batches, lm_loss, t5
from support.parity import replicas
from support.states import assert_same_bits, rank_runs, whole

ROWS = 2


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model, optimizer, comm, data, loss_of=lm_loss):
    losses = []
    for tokens in data:
        loss = loss_of(model, tokens[comm.rank * ROWS : (comm.rank + 1) * ROWS])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_ranks(size, work, make=TinyLM):
    """``work(model, comm)`` on each rank with equal models."""
    _, models = replicas(make, size)
    return run_ranks(size, lambda comm: work(models[comm.rank], comm))


def save_trained(size, directory, *, make=TinyLM, optimizer_of=adamw, mesh_of=lambda comm: comm, **options):
    """Train two steps and save step 2; the whole state that was saved."""

    def work(model, comm):
        model = fully_shard(model, mesh_of(comm), **options)
        optimizer = optimizer_of(model)
        train(model, optimizer, comm, batches(2, 2 * ROWS * size))
        with Checkpoints(directory, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=2, values={"epoch": 1})
        return rank_runs(model, optimizer)

    return whole(on_ranks(size, work, make))


def loaded(size, path, *, make=TinyLM, optimizer_of=adamw, mesh_of=lambda comm: comm, **options):
    """The whole state after loading into fresh, different models."""

    def work(model, comm):
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(-7)
        model = fully_shard(model, mesh_of(comm), **options)
        optimizer = optimizer_of(model)
        restored = load_checkpoint(model, optimizer, path)
        assert (restored.step, restored.values) == (2, {"epoch": 1})
        return rank_runs(model, optimizer)

    return whole(on_ranks(size, work, make))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2), (2, 3), (3, 4), (4, 1), (4, 3), (2, 8), (8, 3)])
def test_every_world_size_loads_every_other_to_the_bit(before, after, tmp_path):
    saved = save_trained(before, tmp_path)
    assert any(name.startswith("optimizer/") for name in saved)
    assert_same_bits(loaded(after, tmp_path / "step-00000002"), saved)


class Odd(nn.Module):
    """Fewer rows than ranks, a scalar, a buffer, and a buffer that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 50)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(50, 50)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, tokens):
        return self.out(self.embed(tokens % 3)) * self.scale


@pytest.mark.parametrize(("before", "after"), [(1, 4), (8, 1), (5, 8)])
def test_more_ranks_than_rows_scalars_and_buffers(before, after, tmp_path):
    saved = save_trained(before, tmp_path, make=Odd, wrap=None)
    assert "model/turned" in saved
    assert_same_bits(loaded(after, tmp_path / "step-00000002", make=Odd, wrap=None), saved)


def grid(comm):
    """Two replicas of two shards."""
    return comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])


HYBRID = {"mesh_of": grid, "strategy": ShardingStrategy.HYBRID_SHARD}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, HYBRID), (2, {})),
        ((3, {}), (4, HYBRID)),
        ((2, {"strategy": ShardingStrategy.NO_SHARD}), (3, {"strategy": ShardingStrategy.SHARD_GRAD_OP})),
        ((2, {}), (2, {"strategy": ShardingStrategy.NO_SHARD})),
    ],
)
def test_every_strategy_loads_every_other(before, after, tmp_path):
    saved = save_trained(before[0], tmp_path, **before[1])
    assert_same_bits(loaded(after[0], tmp_path / "step-00000002", **after[1]), saved)


def test_ranks_with_copies_share_the_writing_and_write_nothing_twice(tmp_path):
    save_trained(4, tmp_path, make=lambda: TinyLM(width=512, hidden=1024, layers=2), **HYBRID)
    path = tmp_path / "step-00000002"
    sizes = [file.stat().st_size for file in sorted(path.glob("shard-*"))]
    assert max(sizes) < 1.1 * min(sizes)
    numel = sum(entry.numel * 4 for entry in read_index(path).tensors.values() if entry.dtype == "float32")
    assert sum(sizes) < 1.05 * numel


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.Adagrad(model.parameters()),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), amsgrad=True),
    ],
    ids=["momentum", "sgd", "adagrad", "fused", "amsgrad"],
)
def test_state_of_other_optimizers(optimizer_of, tmp_path):
    saved = save_trained(2, tmp_path, optimizer_of=optimizer_of)
    assert_same_bits(loaded(3, tmp_path / "step-00000002", optimizer_of=optimizer_of), saved)


def test_a_tied_t5_and_groups_with_options(tmp_path):
    def two_groups(model):
        decay = [p for p in model.parameters() if len(p.shard_meta.global_shape) > 1]
        rest = [p for p in model.parameters() if len(p.shard_meta.global_shape) < 2]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.5, betas=(0.5, 0.6))

    def fill(model, comm):
        model = fully_shard(model, comm)
        optimizer = two_groups(model)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
        optimizer.step()
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=1)

    def check(model, comm):
        model = fully_shard(model, comm)
        optimizer = two_groups(model)
        for group in optimizer.param_groups:
            group.update(lr=1.0, betas=(0.1, 0.2), weight_decay=3.0)
        load_checkpoint(model, optimizer, tmp_path / "step-00000001")
        return [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]

    on_ranks(2, fill, t5)
    assert on_ranks(3, check, t5) == [[(0.5, (0.5, 0.6), 0.01), (0.5, (0.5, 0.6), 0.0)]] * 3


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    data = batches(6, 4)

    def straight(model, comm):
        model = fully_shard(model, comm)
        return train(model, adamw(model), comm, data)

    def first(model, comm):
        model = fully_shard(model, comm)
        optimizer = adamw(model)
        losses = train(model, optimizer, comm, data[:3])
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=3)
        return losses

    def second(model, comm):
        model = fully_shard(model, comm)
        optimizer = adamw(model)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            assert checkpoints.load(model, optimizer).step == 3
        return train(model, optimizer, comm, data[3:])

    expected = on_ranks(2, straight)
    heads, tails = on_ranks(2, first), on_ranks(2, second)
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == expected


def test_in_the_middle_of_an_accumulation_gradients_come_along(tmp_path):
    data = batches(2, 4)

    def work(model, comm, *, cut):
        model = fully_shard(model, comm)
        optimizer = adamw(model)
        lm_loss(model, data[0][comm.rank * ROWS :][:ROWS]).backward()
        if cut:
            with Checkpoints(tmp_path, ranks=comm) as checkpoints:
                checkpoints.save(model, optimizer, step=0, gradients=True)
            optimizer.zero_grad()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            load_checkpoint(model, None, tmp_path / "step-00000000")
        lm_loss(model, data[1][comm.rank * ROWS :][:ROWS]).backward()
        optimizer.step()
        return rank_runs(model, optimizer)

    plain, cut = (whole(on_ranks(2, lambda m, c, cut=cut: work(m, c, cut=cut))) for cut in (False, True))
    assert_same_bits(cut, plain)


def test_gradients_that_wait_unreduced_are_not_lost_silently(tmp_path):
    def work(model, comm):
        model = fully_shard(model, comm)
        with no_sync(model):
            lm_loss(model, batches(1, 4)[0]).backward()
        with Checkpoints(tmp_path, ranks=comm) as checkpoints, pytest.raises(CheckpointError, match="not reduced yet"):
            checkpoints.save(model, step=1)

    on_ranks(2, work)


def test_a_step_in_backward_is_saved_and_loaded(tmp_path):
    def work(model, comm, *, load):
        model = fully_shard(model, comm)
        steps = step_in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            if load:
                checkpoints.load(model, steps)
            else:
                lm_loss(model, batches(1, 4)[0][comm.rank * ROWS :][:ROWS]).backward()
                checkpoints.save(model, steps, step=1)
        return rank_runs(model, steps)

    saved, again = (whole(on_ranks(n, lambda m, c, load=load: work(m, c, load=load))) for n, load in ((2, 0), (3, 1)))
    assert_same_bits(again, saved)


def test_the_random_state_comes_back(tmp_path):
    def work(model, comm):
        model = fully_shard(model, comm)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            torch.manual_seed(5)
            checkpoints.save(model, step=1)
            expected = torch.rand(3)
            assert checkpoints.load(model).rng_restored
            return torch.equal(torch.rand(3), expected)

    assert on_ranks(1, work) == [True]


def test_a_background_save_holds_the_moment_it_was_called_at(tmp_path):
    def work(model, comm):
        model = fully_shard(model, comm)
        optimizer = adamw(model)
        data = batches(4, 4)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            saved = []
            for step, tokens in enumerate(data, start=1):
                train(model, optimizer, comm, [tokens])
                checkpoints.save(model, optimizer, step=step, background=True)
                saved.append(rank_runs(model, optimizer))
            train(model, optimizer, comm, data)
            report = checkpoints.wait()
            assert report.step == 4
            assert report.path.is_dir()
            assert checkpoints.wait() is None
            load_checkpoint(model, optimizer, checkpoints.latest())
            assert_same_bits(dict(enumerate_runs(rank_runs(model, optimizer))), dict(enumerate_runs(saved[-1])))

    on_ranks(2, work)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("written", "given_up"), [(1, False), (0, True)])
def test_a_slow_save_is_given_up_for_its_silence_alone(written, given_up, tmp_path, monkeypatch):
    """Four parts of 100 s each, of a limit of 150 s without progress."""
    clock, moved, go = SimpleNamespace(now=0.0), Queue(), Queue()
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: 0.0))
    write = writer.write_part

    def slow(job, count):
        for _ in range(4):
            clock.now += 100.0
            count(written)
            moved.put(None)
            go.get()
        write(job, count)

    monkeypatch.setattr(writer, "write_part", slow)

    def work(model, comm):
        model = fully_shard(model, comm)
        with Checkpoints(tmp_path, ranks=comm, timeout_s=150.0) as checkpoints:
            checkpoints.save(model, None, step=1, background=True)
            found = []
            for _ in range(4):
                moved.get()
                found.append(checkpoints._save.poll(0.0))
                if given_up and len(found) == 4:
                    checkpoints._save.cancel()
                go.put(None)
            with pytest.raises(CheckpointError) if given_up else nullcontext():
                checkpoints.wait()
        assert [outcome is not None for outcome in found] == [False, given_up, given_up, given_up]

    on_ranks(1, work)
    assert len(find_checkpoints(tmp_path)) == (not given_up)


def test_after_an_error_a_save_goes_on_while_it_writes():
    save, grown = writer.Save.__new__(writer.Save), iter([5, 5, 0, 5])
    save.done_bytes, waits = 0, []

    def poll(seconds):
        save.done_bytes += next(grown)
        waits.append(seconds)

    save.poll = poll
    save.let_end(10.0)
    assert (save.done_bytes, waits) == (10, [10.0] * 3)


def enumerate_runs(runs):
    return ((name, part) for name, _, _, part in runs)


def test_the_last_and_the_best_are_kept(tmp_path):
    def work(model, comm):
        model = fully_shard(model, comm)
        with Checkpoints(tmp_path, ranks=comm, keep_last=2, keep_best=1) as checkpoints:
            for step, metric in enumerate([0.1, 0.9, 0.3, None, 0.2], start=1):
                checkpoints.save(model, step=step, metric=metric)
            assert checkpoints.best().name == "step-00000002"
            assert checkpoints.latest().name == "step-00000005"

    on_ranks(2, work)
    assert sorted(path.name for path in tmp_path.glob("step*")) == [f"step-{step:08d}" for step in (2, 4, 5)]


@pytest.mark.parametrize("keep", [3, 5])
def test_as_many_are_kept_as_there_are_until_there_are_more(keep, tmp_path):
    def work(model, comm):
        model, found = fully_shard(model, comm), []
        with Checkpoints(tmp_path, ranks=comm, keep_last=keep) as checkpoints:
            for step in range(1, 8):
                checkpoints.save(model, step=step)
                found.append(len(find_checkpoints(tmp_path)))
        return found

    assert on_ranks(1, work)[0] == [min(step, keep) for step in range(1, 8)]


def same_error(size, work):
    """The one text with which ``work`` fails on every rank."""

    def caught(model, comm):
        with pytest.raises(CheckpointError) as info:
            work(model, comm)
        return str(info.value)

    texts = on_ranks(size, caught)
    assert len(set(texts)) == 1
    return texts[0]


def test_a_second_run_is_told_to_use_another_directory(tmp_path):
    with_lock = on_ranks(1, lambda _, comm: Checkpoints(tmp_path, ranks=comm))
    text = same_error(2, lambda _, comm: Checkpoints(tmp_path, ranks=comm))
    assert "Another run" in text
    assert str(os.getpid()) in text
    with_lock[0].close()
    on_ranks(2, lambda _, comm: Checkpoints(tmp_path, ranks=comm).close())


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    text = same_error(2, lambda _, comm: Checkpoints(tmp_path / "file" / "x", ranks=comm))
    assert f"{tmp_path / 'file'} is a file. Move it or choose another directory." in text
    (tmp_path / "closed").symlink_to(tmp_path / "nowhere" / "deep")
    assert "Check that you can write to it" in same_error(
        2, lambda _, comm: Checkpoints(tmp_path / "closed" / "x", ranks=comm)
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_on_one_rank_is_everyones_error_and_the_old_one_stays(rank, background, tmp_path, monkeypatch):
    pwrite, full = os.pwrite, threading.Event()

    def refuse(descriptor, data, position):
        if full.is_set() and f"shard-{rank:05d}" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", refuse)

    def work(model, comm):
        model = fully_shard(model, comm)
        checkpoints = Checkpoints(tmp_path, ranks=comm)
        checkpoints.save(model, step=1)
        comm.barrier()
        full.set()
        try:
            checkpoints.save(model, step=2, background=background)
            checkpoints.wait()
        finally:
            assert checkpoints.latest().name == "step-00000001"
            comm.barrier()
            full.clear()
            checkpoints.save(model, step=3)
            checkpoints.close()

    assert "No space left" in same_error(2, work)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_rank_that_does_not_share_the_directory_is_told(tmp_path, monkeypatch):
    def work(model, comm):
        checkpoints = Checkpoints(tmp_path / str(comm.rank), ranks=comm)
        checkpoints.directory = tmp_path / str(comm.rank)
        checkpoints.save(fully_shard(model, comm), step=1)

    assert "directory that they share" in same_error(2, work)


def corrupt(path, damage):
    if damage == "flipped":
        file = sorted(path.glob("shard-*"))[1]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        sorted(path.glob("shard-*"))[1].unlink()
    elif damage == "cut":
        file = sorted(path.glob("shard-*"))[0]
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "index":
        content = (path / "index.json").read_bytes()
        assert b'"step":2,' in content
        (path / "index.json").write_bytes(content.replace(b'"step":2,', b'"step":3,'))
    else:
        (path / "complete.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("flipped", "checksum"),
        ("missing", "00002.safetensors is missing"),
        ("cut", "bytes, expected"),
        ("index", "was changed after it was written"),
        ("unmarked", "complete.json, which is written last, is missing"),
    ],
)
def test_damage_is_one_clear_error_on_every_rank(damage, words, tmp_path):
    save_trained(2, tmp_path)
    corrupt(tmp_path / "step-00000002", damage)

    def work(model, comm):
        model = fully_shard(model, comm)
        load_checkpoint(model, adamw(model), tmp_path / "step-00000002")

    assert words in same_error(3, work)
    assert bool(find_checkpoints(tmp_path)) == (damage == "flipped")  # what only a checksum tells is found when read


def test_of_another_model_nothing_is_loaded(tmp_path):
    save_trained(2, tmp_path)

    def work(model, comm):
        model = fully_shard(TinyLM(layers=3, hidden=41), comm)
        before = whole([rank_runs(model)]) if comm.size == 1 else None
        try:
            load_checkpoint(model, None, tmp_path / "step-00000002")
        finally:
            assert before is None or whole([rank_runs(model)]).keys() == before.keys()
            if before:
                assert_same_bits(whole([rank_runs(model)]), before)

    text = same_error(1, work)
    assert "not in the model: blocks.3" in text
    assert "blocks.0.up.weight (40, 24) instead of (41, 24)" in text


def test_without_an_optimizer_in_it_none_is_loaded(tmp_path):
    def work(model, comm):
        model = fully_shard(model, comm)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)
            checkpoints.load(model, adamw(model))

    assert "saved without an optimizer" in same_error(2, work)
