"""A run whose checkpoints are in an object store resumes from there, bit for bit."""

import pytest

from fullshard.errors import ConfigError
from fullshard.state.storage import as_place, find_checkpoints
from support import object_stores
from support.interrupted_run import OFTEN, assert_same, before, run, run_until_stopped

pytestmark = pytest.mark.usefixtures("unmetered")


def test_a_run_with_its_checkpoints_in_a_store_goes_on_to_the_bit(tmp_path, uninterrupted):
    with object_stores.memory() as url:
        stopped = run_until_stopped(tmp_path, before(5), training__checkpoints_to=url, **OFTEN)
        newest = find_checkpoints(as_place(url))[-1]
        assert stopped.checkpoint == str(newest)
        assert not (tmp_path / "out" / "checkpoints").exists()
        memory = run(tmp_path, training__checkpoints_to=url, **OFTEN)
        assert memory.begun[0].resumed_step == 5
        assert_same(tmp_path, uninterrupted)
        assert "finished.json" in as_place(url).sizes()
        with pytest.raises(ConfigError, match="holds a finished run"):
            run(tmp_path, training__checkpoints_to=url, **OFTEN)
        first = find_checkpoints(as_place(url))[0]
        (tmp_path / "b").mkdir()
        again = run(tmp_path / "b", resume=str(first), **OFTEN)
        assert f"step-{again.begun[0].resumed_step:08d}" == first.name.partition(".")[0]
