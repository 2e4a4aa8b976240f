"""A JSON file that is not trusted costs little: it is bounded before it is parsed, and a flipped bit is found in it."""

import json
import os

import pytest

from fullshard.state.storage.json_file import Bounds, parse_bounded, read_json, require_sealed, seal

FEW = Bounds(10_000, 100, 100)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_sealed_text_is_json_and_every_flipped_bit_of_it_is_found(indent):
    text = seal(json.dumps({"version": 2, "names": ["ä", "b"], "deep": {"own_sha256": "0"}}, indent=indent))
    values = json.loads(text)
    assert values.pop("own_sha256")
    assert values == {"version": 2, "names": ["ä", "b"], "deep": {"own_sha256": "0"}}
    content = text.encode()
    require_sealed(content, needed=True)
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            try:
                same = parse_bounded(bytes(flipped), FEW)
                require_sealed(bytes(flipped), needed=True)
            except ValueError:
                continue
            assert same == json.loads(text), (position, bit)  # only white space after the seal


def test_a_text_without_a_seal_is_refused_only_where_it_needs_one():
    require_sealed(b'{"version": 1}')
    with pytest.raises(ValueError, match="its last entry is not own_sha256"):
        require_sealed(b'{"version": 2}', needed=True)
    moved = seal('{"a": 1}').replace('"}', '","b":2}').encode()
    with pytest.raises(ValueError, match="its last entry is not own_sha256"):
        require_sealed(moved, needed=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" " * 10_001, r"it has 10,001 bytes; at most 10,000 are read"),
        (b"{" + b",".join(b'"%d":0' % number for number in range(101)) + b"}", "up to 101 names; at most 100"),
        (b"[" + b"0," * 100 + b"0]", "up to 101 values; at most 100"),
        (b"[" * 101, "up to 101 values; at most 100"),
    ],
    ids=["bytes", "names", "values", "lists"],
)
def test_what_is_too_much_is_refused_before_it_is_parsed(content, words, tmp_path, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_json(tmp_path / "x.json", FEW)
    with pytest.raises(ValueError, match=words):
        parse_bounded(content, FEW)


def test_a_hundred_thousand_levels_are_a_value_error():
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_bounded(deep, Bounds(1 << 20, 1 << 20, 1 << 20))
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_bounded(b'{"":' * 100_000 + b"0" + b"}" * 100_000, Bounds(1 << 20, 1 << 20, 1 << 20))


def test_a_pipe_or_a_directory_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_json(path)
