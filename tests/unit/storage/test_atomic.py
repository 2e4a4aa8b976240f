"""Laws of atomic directories: whole or absent, whatever moment the writer dies at."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from fullshard.errors import CheckpointError
from fullshard.state.storage import atomic, atomic_directory, publish_model, recover, write_text
from fullshard.state.storage.weight_files import WEIGHTS_INDEX_NAME as INDEX


class Killed(BaseException):
    """Stands for SIGKILL: from the moment it is raised, no file operation of the writer happens any more."""


class Executioner:
    """Lets a number of file operations pass and none after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        self.left = allowed
        for name in ("rename", "replace", "fsync", "link", "unlink"):
            monkeypatch.setattr(os, name, self.guard(getattr(os, name)))
        monkeypatch.setattr(shutil, "rmtree", self.guard(shutil.rmtree))

    def guard(self, operation):
        def guarded(*args, **kwargs):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return operation(*args, **kwargs)

        return guarded


def write(final: Path, text: str) -> None:
    with atomic_directory(final) as directory:
        (directory / "weights").write_text(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "more").write_text(text)


def content(directory: Path) -> set[str]:
    return {(directory / "weights").read_text(), (directory / "sub" / "more").read_text()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_appears_whole_with_its_parents_and_is_replaced_at_the_end_only(tmp_path):
    write(tmp_path / "runs" / "best", "one")
    with atomic_directory(tmp_path / "runs" / "best") as directory:
        (directory / "weights").write_text("half")
        assert content(tmp_path / "runs" / "best") == {"one"}
    write(tmp_path / "runs" / "best", "two")
    assert content(tmp_path / "runs" / "best") == {"two"}
    assert names(tmp_path / "runs") == ["best"]


def test_an_error_inside_leaves_the_old_one(tmp_path):
    write(tmp_path / "best", "one")

    def fail(directory):
        (directory / "weights").write_text("half")
        raise KeyError

    with pytest.raises(KeyError), atomic_directory(tmp_path / "best") as directory:
        fail(directory)
    assert content(tmp_path / "best") == {"one"}
    assert names(tmp_path) == ["best"]


def test_a_refusing_file_system_is_a_checkpoint_error(tmp_path, monkeypatch):
    write(tmp_path / "best", "one")

    def full(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    rename = os.rename
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path / "best", "two")
    assert content(tmp_path / "best") == {"one"}
    assert names(tmp_path) == ["best"]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "best").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        write(tmp_path / "best", "one")
    assert (tmp_path / "best").read_text() == "mine"


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "best").symlink_to(tmp_path / "disk")
    write(tmp_path / "best", "one")
    assert (tmp_path / "best").is_symlink()
    assert content(tmp_path / "disk") == {"one"}


def test_killed_at_every_operation_a_whole_one_is_found(tmp_path, monkeypatch):
    """At each point a reader that looks for `best`, then `best.old`, finds old or new, and the next save works."""
    found = []
    for allowed in range(100):
        final = tmp_path / str(allowed) / "best"
        write(final, "one")
        with monkeypatch.context() as patch:
            executioner = Executioner(patch, allowed)
            with contextlib.suppress(Killed):
                write(final, "two")
            finished = executioner.left > 0
        whole = final if final.exists() else final.with_name("best.old")
        found.append(content(whole))
        recover(final)
        assert content(final) == found[-1]
        assert names(final.parent) == ["best"]
        write(final, "three")
        assert content(final) == {"three"}
        if finished:
            break
    assert len(found) > 8
    assert found[0] == {"one"}
    assert found[-1] == {"two"}
    assert sorted(found, key=lambda seen: seen == {"two"}) == found  # once new, always new


def test_synced_before_it_is_renamed(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    write(tmp_path / "best", "one")
    inside = {str(tmp_path / "best.tmp" / name) for name in ("weights", "sub/more", "sub", ".")}
    assert {str(Path(event)) for event in events[: events.index("rename")]} == {str(Path(p)) for p in inside}
    assert events[events.index("rename") + 1 :] == [str(tmp_path)]


SINGLE = ("config.json", "model.safetensors")
SEVERAL = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX)
MORE = ("config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX)


def saved(source: Path, files: tuple[str, ...]) -> Path:
    """A model of such files; each holds the name of the directory."""
    source.mkdir()
    for name in files:
        (source / name).write_text(source.name)
    return source


def seen_by_a_reader(directory: Path) -> set[str]:
    """What a loader takes: the single file if there is one, else what the index names; nothing without either."""
    if (directory / "model.safetensors").exists():
        read = ["config.json", "model.safetensors"]
    elif (directory / INDEX).exists():
        files = SEVERAL if (directory / INDEX).read_text() == "two" else MORE
        read = [*files, *(path.name for path in directory.glob("model-*-of-*"))]
    else:
        return set()
    return {(directory / name).read_text() for name in read}


@pytest.mark.parametrize(
    ("before", "after"), [(SINGLE, SINGLE), (SINGLE, SEVERAL), (MORE, SINGLE), (MORE, SEVERAL)], ids=str
)
def test_killed_while_publishing_a_reader_finds_one_model_whole_or_none(tmp_path, monkeypatch, before, after):
    target = tmp_path / "run"
    target.mkdir()
    (target / "metrics.jsonl").write_text("kept")
    one, two = saved(tmp_path / "one", before), saved(tmp_path / "two", after)
    publish_model(one, target)
    assert names(target) == sorted((*before, "metrics.jsonl"))
    found = []
    for allowed in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda path, missing_ok=False: _unlink(path, missing_ok))
            executioner = Executioner(patch, allowed)
            with contextlib.suppress(Killed):
                publish_model(two, target)
            finished = executioner.left > 0
        found.append(seen_by_a_reader(target))
        assert found[-1] in ({"one"}, {"two"}, set())
        if finished:
            break
        publish_model(one, target)
        assert seen_by_a_reader(target) == {"one"}
    assert len(found) > 2 * len(after)
    assert found[0] == {"one"}
    assert set() in found
    assert seen_by_a_reader(target) == {"two"}
    assert names(target) == sorted((*after, "metrics.jsonl"))
    assert (target / "metrics.jsonl").read_text() == "kept"


def _unlink(path: Path, missing_ok: bool) -> None:
    """By ``os.unlink``, which the executioner guards; a file that is not there costs no operation."""
    if path.exists() or not missing_ok:
        os.unlink(path)


def test_publish_copies_where_there_are_no_links(tmp_path, monkeypatch):
    source, target = saved(tmp_path / "best", SINGLE), tmp_path / "run"
    target.mkdir()

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    publish_model(source, target)
    assert (target / "model.safetensors").read_text() == "best"


def test_publish_that_the_file_system_refuses_says_where_the_model_is(tmp_path):
    source = saved(tmp_path / "best", SINGLE)
    with pytest.raises(CheckpointError, match="best, which is complete"):
        publish_model(source, tmp_path / "nowhere")


def test_write_text_replaces_whole(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_text(path, "one")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", full)
        with pytest.raises(CheckpointError, match="No space left"):
            write_text(path, "two")
    assert path.read_text() == "one"
    assert names(tmp_path) == ["summary.json"]
