"""Checkpoints of odd models, in odd places and at odd moments: what cannot be kept right is refused, never lost."""

import hashlib
import json
import threading

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, fully_shard, load_checkpoint
from fullshard.checkpoint import CheckpointReader, Piece, find_checkpoints, read_index, writer
from fullshard.comm import run_ranks
from fullshard.errors import CheckpointError, FullshardError
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": -1}, "at least 0; got -1"),
        ({"step": 1.0}, "an int"),
        (
            {"step": 1, "values": {"scheduler": [{"milestones": {30: 1}}]}},
            r"\['scheduler'\]\[0\]\['milestones'\] has the",
        ),
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


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    path = tmp_path / "checkpoints" / "step-00000001"

    def work(model, comm):
        with Checkpoints(path.parent, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)
        (path / "shard-00000-of-00001.safetensors").rename(tmp_path / "other.safetensors")
        text = (path / "index.json").read_text().replace("shard-00000-of-00001", "../../other")
        (path / "index.json").write_text(text)
        hashed = {"index_sha256": hashlib.sha256(text.encode()).hexdigest(), "files": {"index.json": len(text)}}
        done = json.loads((path / "complete.json").read_text()) | hashed
        (path / "complete.json").write_text(json.dumps(done))
        with pytest.raises(CheckpointError, match=r"other\.safetensors, which is no file of the checkpoint"):
            load_checkpoint(model, None, path)

    on_ranks(1, work)


def test_one_rank_without_host_memory_ends_the_save_on_every_rank(tmp_path, monkeypatch):
    def work(model, comm):
        def refuse(_):
            raise RuntimeError("not enough memory")

        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            if comm.rank == 1:
                monkeypatch.setattr(checkpoints, "_host_copies", refuse)
            with pytest.raises(RuntimeError if comm.rank else FullshardError, match="not enough memory"):
                checkpoints.save(model, step=1, background=True)

    on_ranks(2, work)


def test_after_an_error_nothing_is_written_once_the_lock_is_free(tmp_path, monkeypatch):
    threads, real = [], writer.Save._write_mine

    def never_on_rank_1(save):
        if save.plan.rank == 0:
            threads.append(threading.current_thread())
            real(save)

    monkeypatch.setattr(writer.Save, "_write_mine", never_on_rank_1)

    def work(model, comm):
        def fail():
            with Checkpoints(tmp_path, ranks=comm) as checkpoints:
                checkpoints.save(model, step=1, background=True)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        return comm.rank or threads[0].is_alive()

    assert on_ranks(2, work) == [False, 1]
    assert find_checkpoints(tmp_path) == []


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
