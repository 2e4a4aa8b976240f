"""The unit table without ranks is the table that ranks print."""

import pytest

from fullshard import units
from fullshard.comm import run_ranks
from fullshard.config import RunConfig
from fullshard.errors import WrapError
from fullshard.train.assemble import assemble, make_model, make_tokenizer, read_train_rows
from fullshard.train.inspection import inspect_units
from support.tiny_run import MODEL, settings


def config(directory, **changes):
    return RunConfig.model_validate(settings(directory, **changes))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wrap", ["auto", "none", ["T5Block"]])
def test_equals_what_ranks_have(tmp_path, size, wrap, one_at_a_time):
    settings_ = config(tmp_path, sharding__wrap=wrap)
    tables = run_ranks(size, lambda comm: units(assemble(settings_, comm).model))
    table = inspect_units(settings_, size)
    assert all(table == other for other in tables)
    assert table.world_size == size


def test_a_model_too_large_for_this_machine_takes_no_memory(tmp_path):
    large = MODEL | {"d_model": 8192, "d_ff": 65536, "num_layers": 48, "num_decoder_layers": 48, "num_heads": 128}
    table = inspect_units(config(tmp_path, model={"config": large, "tokenizer": {"vocab_size": 60}}), 1024)
    assert sum(row.parameters for row in table.rows) > 100e9
    assert len(table.rows) == 97


def test_a_directory_is_read(tmp_path):
    settings_ = config(tmp_path)
    tokenizer = make_tokenizer(settings_, read_train_rows(settings_))
    make_model(settings_, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    table = inspect_units(config(tmp_path, model={"path": str(tmp_path / "model")}), 2)
    assert table == inspect_units(settings_, 2)


def test_wrapping_errors_come_out(tmp_path):
    with pytest.raises(WrapError, match="T5Block"):
        inspect_units(config(tmp_path, sharding__wrap=["T5Blok"]), 2)
