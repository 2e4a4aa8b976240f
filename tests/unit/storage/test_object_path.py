"""What a store lists under a prefix: its objects, without those that mark directories."""

import pytest

from fullshard.state.storage import completion, copy_small_files, object_path
from fullshard.state.storage.object_path import ObjectPath
from fullshard.state.storage.object_store import ObjectStore

LISTED = {"config.json": 2, "sub/model.bin": 4, "sub/deep/a": 1, "empty": 0, "b": 3, "b/c": 3}


@pytest.mark.parametrize("slash", ["", "/"])  # before a key, as some file systems list it
@pytest.mark.parametrize(
    "marks", [["/", "sub/", "sub/deep/", "alone/", "other//"], ["sub", "sub/deep"]], ids=["named", "without-slash"]
)
def test_marks_of_directories_are_no_files(marks, slash, tmp_path, monkeypatch):
    keys = {f"{slash}bucket/run/model/{name}": {"size": size, "type": "file"} for name, size in LISTED.items()}
    keys |= {f"{slash}bucket/run/model/{name}".replace("//", "/", 1): {"size": 0, "type": "file"} for name in marks}
    monkeypatch.setattr(object_path, "request", lambda url, action: keys)
    place = ObjectPath("s3://bucket/run/model")
    assert place.sizes() == ObjectStore().sizes(place) == LISTED
    del keys[f"{slash}bucket/run/model/b"]  # no disk has a file and a directory of one name
    monkeypatch.setattr(completion, "read_bounded", lambda path, nbytes: b"x" * nbytes)
    copy_small_files(place.parent, tmp_path / "copy")
    copied = {str(one.relative_to(tmp_path / "copy")) for one in (tmp_path / "copy").rglob("*") if one.is_file()}
    assert copied == LISTED.keys() - {"b"}
