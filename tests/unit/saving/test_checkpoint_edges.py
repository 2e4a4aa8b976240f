"""Checkpoints of odd models, in odd places and at odd moments: what cannot be kept right is refused, never lost."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fullshard import Checkpoints, fully_shard, load_checkpoint, save
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, FullshardError
from fullshard.state.saving import checkpoints
from fullshard.state.storage import CheckpointReader, Piece, find_checkpoints, read_index, writer
from support.forged import as_version_1, forge_completion
from support.models import TinyLM, batches, lm_loss
from support.parity import replicas


def on_ranks(size, work, make=TinyLM):
    """``work(model, comm)`` on each rank with equal sharded models."""
    _, models = replicas(make, size)
    return run_ranks(size, lambda comm: work(fully_shard(models[comm.rank], comm, wrap=None), comm), timeout_s=20.0)


class Buffers(nn.Module):
    """One with the buffers that it is given."""

    def __init__(self, **buffers):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def test_a_buffer_without_elements_comes_back(tmp_path):
    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)
            return checkpoints.load(model).step

    assert on_ranks(2, work, lambda: Buffers(empty=torch.empty(0, 3), none=None)) == [1, 1]


def test_a_buffer_that_differs_between_ranks_is_saved_as_one_rank_has_it(tmp_path):
    numel = 20_000  # ranks share the writing of parameters of this size

    def work(model, comm):
        model.statistics.fill_(comm.rank + 1)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)

    on_ranks(2, work, lambda: Buffers(statistics=torch.zeros(numel)))
    path, saved = tmp_path / "step-00000001", torch.empty(numel)
    CheckpointReader(path, read_index(path)).read(Piece("model/statistics", (numel,), 0, saved))
    assert torch.equal(saved, torch.ones(numel))


def test_a_tied_parameter_whose_other_name_comes_first_keeps_its_state_and_gradient(tmp_path):
    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        lm_loss(model, batches(1, 4)[0]).backward()
        optimizer.step()
        return optimizer

    def head_first():
        model = TinyLM()
        head = model._modules.pop("head")
        model._modules = {"head": head, **model._modules}
        return model

    def save(model, comm):
        optimizer = trained(model)
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=1, gradients=True)
        weight = model.embed.weight
        return weight.grad, optimizer.state[weight]["exp_avg"]

    def load(model, comm):
        assert next(model.named_parameters())[0] == "head.weight"
        optimizer = torch.optim.AdamW(model.parameters())
        load_checkpoint(model, optimizer, tmp_path / "step-00000001")
        weight = model.head.weight
        return weight.grad, optimizer.state[weight]["exp_avg"]

    saved, loaded = on_ranks(1, save)[0], on_ranks(1, load, head_first)[0]
    assert all(torch.equal(one, other) for one, other in zip(saved, loaded, strict=True))


def test_two_tensors_of_what_the_model_ties_are_refused(tmp_path):
    def untied():
        model = TinyLM()
        model.head.weight = nn.Parameter(model.head.weight.detach() + 1)
        return model

    def save(model, comm):
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)

    def load(model, comm):
        before = model.embed.weight.detach().clone()
        with pytest.raises(CheckpointError, match=r"2 tensors .* ties embed\.weight and head\.weight"):
            load_checkpoint(model, None, tmp_path / "step-00000001")
        assert torch.equal(model.embed.weight, before)

    on_ranks(2, save, untied)
    on_ranks(2, load)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": -1}, "at least 0; got -1"),
        ({"step": 1.0}, "an int"),
        (
            {"step": 1, "values": {"scheduler": [{"milestones": {30: 1}}]}},
            r"\['scheduler'\]\[0\]\['milestones'\] has the",
        ),
        ({"step": 1, "values": {"x": torch.ones(2)}}, "values must be representable in JSON"),
    ],
)
def test_what_would_not_be_found_or_not_come_back_the_same_is_refused(options, words, tmp_path):
    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm) as checkpoints, pytest.raises(CheckpointError, match=words):
            checkpoints.save(model, **options)

    on_ranks(2, work)


def test_a_metric_that_is_no_number_does_not_push_out_the_best(tmp_path):
    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm, keep_last=1, keep_best=1) as checkpoints:
            for step, metric in enumerate([float("nan"), 0.9, 0.1, 0.2], start=1):
                checkpoints.save(model, step=step, metric=metric)
            return checkpoints.best().name

    assert on_ranks(1, work) == ["step-00000002"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_that_was_moved_and_linked_keeps_no_run_from_going_on(step, tmp_path):
    directory, archive = tmp_path / "checkpoints", tmp_path / "archive"

    def save(step):
        def work(model, comm):
            with Checkpoints(directory, ranks=comm, keep_last=1) as checkpoints:
                checkpoints.save(model, step=step)

        on_ranks(1, work)

    save(1)
    (directory / "step-00000001").rename(archive)
    (directory / "step-00000001").symlink_to(archive)
    (directory / "step-00000001.tmp").mkdir()  # of a save that was killed
    save(step)
    save(3)
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "step-00000003"]
    assert (archive / "complete.json").exists()


def test_one_rank_without_host_memory_ends_the_save_on_every_rank(tmp_path, monkeypatch):
    def work(model, comm):
        def refuse(_):
            raise RuntimeError("not enough memory")

        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            if comm.rank == 1:
                monkeypatch.setattr(checkpoints._copies, "pairs", refuse)
            with pytest.raises(RuntimeError if comm.rank else FullshardError, match="not enough memory"):
                checkpoints.save(model, step=1, background=True)

    on_ranks(2, work)


def fails_with(error, directory, model, comm):
    with Checkpoints(directory, ranks=comm) as checkpoints:
        checkpoints.save(model, step=1, background=True)
        raise error


def test_after_ctrl_c_nothing_is_written_once_the_lock_is_free(tmp_path, monkeypatch):
    threads, real = [], writer.Save._write_mine

    def never_on_rank_1(save):
        if save.job.rank == 0:
            threads.append(threading.current_thread())
            real(save)

    monkeypatch.setattr(writer.Save, "_write_mine", never_on_rank_1)

    def work(model, comm):
        with pytest.raises(KeyboardInterrupt):
            fails_with(KeyboardInterrupt, tmp_path, model, comm)
        return comm.rank or threads[0].is_alive()

    assert on_ranks(2, work) == [False, 1]
    assert find_checkpoints(tmp_path) == []


def test_a_save_that_is_under_way_when_training_fails_ends_first(tmp_path, monkeypatch):
    """Also if another rank has not written its part yet: here it does so only once rank 0 waits for it."""
    waits, write, poll = threading.Event(), writer.Save._write_mine, writer.Save.poll

    def late_on_rank_1(save):
        if save.job.rank == 1:
            waits.wait()
        write(save)

    def polled(save, seconds):
        if save.job.rank == 0:
            waits.set()
        return poll(save, seconds)

    monkeypatch.setattr(writer.Save, "_write_mine", late_on_rank_1)
    monkeypatch.setattr(writer.Save, "poll", polled)

    def work(model, comm):
        with pytest.raises(ZeroDivisionError):
            fails_with(ZeroDivisionError, tmp_path, model, comm)

    on_ranks(2, work)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001"]


def test_after_going_back_the_new_checkpoints_are_the_newest(tmp_path):
    """And not those of later steps that were left behind."""

    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm, keep_last=2) as checkpoints:
            for step in (200, 300):
                checkpoints.save(model, step=step)
            checkpoints.load(model, path=tmp_path / "step-00000200")
            checkpoints.save(model, step=210)
            first = checkpoints.latest().name
            checkpoints.save(model, step=220)
            return first, checkpoints.load(model).step

    assert on_ranks(2, work) == [("step-00000210", 220)] * 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000210", "step-00000220"]


def save_metrics(directory, metrics, **options):
    """One checkpoint for each metric, steps from 1; the name of the best one."""

    def work(model, comm):
        with Checkpoints(directory, ranks=comm, **options) as checkpoints:
            for step, metric in enumerate(metrics, start=1):
                checkpoints.save(model, step=step, metric=metric)
            return checkpoints.best().name

    (name,) = on_ranks(1, work)
    return name


def best_of(directory, **options):
    def work(_, comm):
        with Checkpoints(directory, ranks=comm, **options) as checkpoints:
            return checkpoints.best().name

    return on_ranks(1, work)[0]


def forget_direction(directory):
    """As an earlier version wrote its checkpoints."""
    later = ("greater_is_better", "sha256")
    for path in directory.glob("step-*"):
        as_version_1(path)
        forge_completion(path, lambda done: json.dumps({name: done[name] for name in done if name not in later}))


def test_of_a_loss_the_smallest_is_the_best_and_kept_and_known_later(tmp_path):
    best = save_metrics(tmp_path, [3.0, 1.0, 2.0, 2.5], keep_last=1, keep_best=1, greater_is_better=False)
    assert best == "step-00000002"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert best_of(tmp_path) == "step-00000002"
    assert read_index(tmp_path / "step-00000002").greater_is_better is False


def test_where_no_direction_was_recorded_the_caller_says_it(tmp_path):
    save_metrics(tmp_path, [3.0, 1.0, 2.0], keep_last=None)
    forget_direction(tmp_path)
    assert best_of(tmp_path) == "step-00000001"
    assert best_of(tmp_path, greater_is_better=False) == "step-00000002"


def test_a_directory_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def work(model, comm):
        with Checkpoints("mine", ranks=comm) as checkpoints:
            monkeypatch.chdir(tmp_path / "elsewhere")
            checkpoints.save(model, step=1)
            return checkpoints.latest()

    assert on_ranks(1, work) == [tmp_path / "mine" / "step-00000001"]


@pytest.mark.parametrize("damage", ["flipped", "header", "cut"])
def test_damage_names_the_newest_other_whole_checkpoint_and_what_to_type(damage, tmp_path):
    path, other = tmp_path / "step-00000003", tmp_path / "step-00000002"

    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm, keep_last=None) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(model, step=step)
        if comm.rank == 0:
            file = path / "shard-00001-of-00002.safetensors"
            content = bytearray(file.read_bytes())
            content[{"flipped": -1, "header": 9, "cut": 0}[damage]] ^= 1
            file.write_bytes(content[:-1] if damage == "cut" else content)
        comm.barrier()
        with pytest.raises(CheckpointError) as info:
            load_checkpoint(model, None, path)
        return str(info.value)

    first, second = on_ranks(2, work)
    assert first == second
    assert f"The newest other complete one is {other}." in first
    assert f"resume={other} to fullshard train, path='{other}' to Checkpoints.load" in first


def test_without_another_whole_checkpoint_that_is_said(tmp_path):
    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)
        (tmp_path / "step-00000001" / "index.json").unlink()
        (tmp_path / "step-00000002").mkdir()  # torn as well
        with pytest.raises(CheckpointError, match="There is no other complete checkpoint in "):
            load_checkpoint(model, None, tmp_path / "step-00000001")

    on_ranks(1, work)


EXACT = {
    "complex64": torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3),
    "conjugated": torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    "float8_e4m3fn": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "float8_e5m2": torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2),
    "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
}


@pytest.mark.parametrize("kind", EXACT)
def test_complex_and_fp8_buffers_come_back_to_the_bit(kind, tmp_path):
    expected = EXACT[kind].resolve_conj().contiguous()

    def work(model, comm):
        with Checkpoints(tmp_path / "checkpoints", ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)
            model.values.copy_(torch.zeros_like(expected))
            checkpoints.load(model)
        save(model, tmp_path / "full")
        return bytes(model.values.resolve_conj().contiguous().view(torch.uint8).flatten().tolist())

    found = on_ranks(2, work, lambda: Buffers(values=EXACT[kind].clone()))
    assert found == [bytes(expected.view(torch.uint8).flatten().tolist())] * 2
    stored = load_file(tmp_path / "full" / "model.safetensors")["values"]
    assert stored.dtype == expected.dtype
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("background", [False, True])
def test_a_buffer_that_no_file_holds_is_refused_by_name_with_the_remedy(background, tmp_path):
    words = r"'model/values' is torch\.complex128.*view_as_real.*persistent=False"

    def work(model, comm):
        with pytest.raises(CheckpointError, match=words), Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1, background=background)

    on_ranks(2, work, lambda: Buffers(values=torch.zeros(3, dtype=torch.complex128)))


@pytest.mark.parametrize("with_block", [True, False])
def test_a_foreground_save_that_is_interrupted_commits_nothing(tmp_path, monkeypatch, with_block):
    """Its thread reads the shards, which may change as soon as save() has raised."""
    raised, write, saves = threading.Event(), writer.Save._write_mine, []

    def late(save):
        saves.append(save)
        raised.wait()
        write(save)

    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.Save, "_write_mine", late)
    monkeypatch.setattr(checkpoints, "await_all", interrupted)

    def save(model, comm):
        made = Checkpoints(tmp_path, ranks=comm)
        try:
            made.save(model, step=5)
        except KeyboardInterrupt as error:
            raised.set()
            if with_block:
                made.__exit__(KeyboardInterrupt, error, None)
            raise

    def work(model, comm):
        with pytest.raises(KeyboardInterrupt):
            save(model, comm)

    on_ranks(1, work)
    saves[0]._thread.join()
    assert find_checkpoints(tmp_path) == []
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("first", [ValueError, KeyboardInterrupt])
def test_ctrl_c_while_an_error_waits_for_the_save_frees_the_directory(tmp_path, monkeypatch, first):
    waits, write, poll = threading.Event(), writer.Save._write_mine, writer.Save.poll

    def late(save):
        waits.wait()
        write(save)

    def polled(save, seconds):
        monkeypatch.setattr(writer.Save, "poll", poll)
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.Save, "_write_mine", late)

    def work(model, comm):
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1, background=True)
            monkeypatch.setattr(writer.Save, "poll", polled)
            threading.Timer(0.2, waits.set).start()
            raise first

    def interrupted(model, comm):
        with pytest.raises(KeyboardInterrupt):
            work(model, comm)
        Checkpoints(tmp_path, ranks=comm).close()  # not locked

    on_ranks(1, interrupted)
    assert find_checkpoints(tmp_path) == []
