"""The unit table as text: what fits on a line, and what is left out where it does not."""

import pytest

from fullshard.core.engine.full.table import UnitRow, UnitTable


def row(unit, kind, parameters, trainable=None):
    trainable = parameters if trainable is None else trainable
    return UnitRow(unit, kind, parameters, trainable, 19, 2, 0.0004, 2 * parameters, 4 * parameters)


def lines_of(*rows):
    return str(UnitTable(rows, 2)).splitlines()


def test_a_narrow_table_says_everything():
    lines = lines_of(row("(root)", "T5", 500), *(row(f"encoder.block.{n}", "T5Block", 2048) for n in range(3)))
    assert lines[0] == "4 units over 2 ranks"
    assert lines[1].split() == ["unit", "class", "parameters", "tensors", "lanes", "padding", "bytes/rank", "gathered"]
    assert lines[4].startswith("encoder.block.0 .. 2 (x3)  T5Block       6,144       57      6    0.04%    12.0 KiB")
    assert lines[-1].split() == ["total", "6,644", "76", "8", "0.04%", "13.0", "KiB", "26.0", "KiB"]


def adapter_rows():
    kind, million = "PeftModelForSeq2SeqLM", 10**6
    yield row("(root)", kind, 222 * million, 0)
    for part, count in (("encoder", 12), ("decoder", 12)):
        for n in range(count):
            yield row(f"base_model.model.{part}.block.{n}", "CheckpointedT5Block", 9 * million, 73728)


def test_an_adapters_table_is_120_wide_and_keeps_the_names_that_matter():
    lines = lines_of(*adapter_rows())
    assert max(map(len, lines)) <= 120
    assert lines[0] == "25 units over 2 ranks; all but the root are inside base_model.model"
    assert "trainable" in lines[1]
    text = "\n".join(lines)
    assert "encoder.block.0 .. 11 (x12)" in text
    assert "CheckpointedT5Block" in text
    assert "222,000,000" in text


@pytest.mark.parametrize("length", [60, 200])
def test_names_of_any_length_leave_the_numbers_and_the_ends_of_units(length):
    long = "x" * length
    lines = lines_of(row("(root)", f"Root{long}", 10**12), row(f"{long}.block.0", f"Block{long}", 10**12, 5))
    assert max(map(len, lines)) <= 120
    assert all("1,000,000,000,000" in line for line in lines[3:5])
    assert "block.0  Block" in lines[4]
    assert "…" in lines[4]
