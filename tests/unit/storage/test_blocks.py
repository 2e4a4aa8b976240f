"""Tensors of which ranks have blocks: what one division writes, another one and no division read, by any runs."""

import random
from dataclasses import replace
from math import prod

import pytest
import torch

from fullshard.core.layout import Block
from fullshard.errors import CheckpointError
from fullshard.state.storage import CheckpointReader, Index, Piece, reader, shard_file
from fullshard.state.storage.index import merge_tensors, parse_index, require_covered
from fullshard.state.storage.shard_file import write_shard_file

DIVISIONS = [None, (0, 2), (1, 2), (1, 3), (2, 2)]
SHAPES = [(4, 6, 4), (2, 12, 10)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several stored blocks in a run."""
    for module in (reader, shard_file):
        monkeypatch.setattr(module, "BLOCK_BYTES", 44)


def block_of(full, block):
    """The elements of a block, flattened, cut by torch."""
    return full.flatten() if block is None else full.chunk(block.count, block.dim)[block.index].flatten()


def pieces_of(name, full, division, ranks, chance):
    """What each rank writes: runs of its block, cut anywhere."""
    blocks = [None] if division is None else [Block(division[0], index, division[1]) for index in range(division[1])]
    for block in blocks:
        flat = block_of(full, block)
        cuts = sorted(chance.sample(range(1, flat.numel()), ranks - 1))
        for start, stop in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
            yield Piece(name, tuple(full.shape), start, flat[start:stop], block)


def written(directory, tensors, division):
    """An index of ``tensors``, saved by three ranks for each block."""
    chance = random.Random(3)
    by_tensor = [list(pieces_of(name, full, division, 3, chance)) for name, full in tensors.items()]
    ranks = list(zip(*by_tensor, strict=True))
    files = [directory / f"shard-{rank:05d}-of-{len(ranks):05d}.safetensors" for rank in range(len(ranks))]
    parts = [write_shard_file(file, own, lambda _: None) for file, own in zip(files, ranks, strict=True)]
    merged = merge_tensors(parts)
    require_covered(merged, "here")
    return Index(1, len(ranks), None, {}, (), {}, {}, (), merged, divided_by=division and division[1])


@pytest.mark.parametrize("division", DIVISIONS)
def test_each_division_reads_what_another_one_wrote(tmp_path, division):
    tensors = {f"model/{n}": torch.randn(shape, dtype=torch.float64).float() for n, shape in enumerate(SHAPES)}
    index = written(tmp_path, tensors, division)
    assert parse_index(index.as_json().encode(), tmp_path) == replace(index, groups=[], policies=[])
    source, chance = CheckpointReader(tmp_path, index), random.Random(5)
    for other in DIVISIONS:
        for name, full in tensors.items():
            for piece in pieces_of(name, full, other, 2, chance):
                for dtype in (torch.float32, torch.float64):
                    found = torch.full_like(piece.tensor, torch.nan, dtype=dtype)
                    source.read(replace(piece, tensor=found))
                    assert torch.equal(found, piece.tensor.to(dtype)), (division, other, name)


@pytest.mark.parametrize(("division", "version"), [(None, 2), ((0, 2), 3), ((1, 2), 3)])
def test_only_divided_ones_are_of_a_version_that_earlier_readers_refuse(tmp_path, division, version):
    index = written(tmp_path, {"model/a": torch.randn(4, 6, 4)}, division)
    text = index.as_json()
    assert f'"version":{version},' in text
    assert ("order" in text) == (division == (1, 2))
    with pytest.raises(CheckpointError, match="this fullshard reads up to 3"):
        parse_index(text.replace(f'"version":{version},', '"version":4,').encode(), tmp_path)


def test_runs_that_are_there_twice_are_refused(tmp_path):
    index = written(tmp_path, {"model/a": torch.randn(4, 6, 4)}, None)
    entry = index.tensors["model/a"]
    twice = {"model/a": replace(entry, pieces=(*entry.pieces, entry.pieces[-1]))}
    with pytest.raises(CheckpointError, match="do not cover its 96 elements: after 96 there is a gap or an overlap"):
        parse_index(replace(index, tensors=twice).as_json().encode(), tmp_path)


@pytest.mark.parametrize("order", [[0, 2], [3, 2], [1, 4], [1, 0], [1], [1, 2, 3], "ab"])
def test_orders_that_are_none_are_refused(tmp_path, order):
    index = written(tmp_path, {"model/a": torch.randn(4, 6, 4)}, (1, 2))
    entry = index.tensors["model/a"]
    assert prod(entry.shape) == 96
    forged = replace(index, tensors={"model/a": replace(entry, order=order)})
    with pytest.raises(CheckpointError, match="order"):
        parse_index(forged.as_json().encode(), tmp_path)
