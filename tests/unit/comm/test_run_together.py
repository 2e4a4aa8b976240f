"""An error on one rank is raised on every rank, and none waits for it."""

import pytest

from fullshard.core.comm import together, together_in_background
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, FullshardError


@pytest.mark.parametrize("way", [together, together_in_background])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_user_error_ends_every_rank_too(way, rank):
    def work(comm):
        def action():
            if comm.rank == rank:
                raise ValueError("temperature is set, do_sample is not")

        with pytest.raises(ValueError if comm.rank == rank else FullshardError) as info:
            way(comm, action)
        assert way(comm, lambda: comm.rank) == comm.rank
        return str(info.value)

    texts = run_ranks(2, work, timeout_s=20.0)
    assert texts[rank] == "temperature is set, do_sample is not"
    assert f"Rank {rank} failed:" in texts[1 - rank]
    assert "in action" in texts[1 - rank]


def test_of_several_failures_the_first_ranks_is_told():
    def work(comm):
        def action():
            raise CheckpointError("no") if comm.rank else KeyError("metric")

        with pytest.raises((KeyError, FullshardError)) as info:
            together(comm, action)
        return info.type, str(info.value)

    first, *others = run_ranks(3, work, timeout_s=20.0)
    assert first[0] is KeyError
    assert others[0] == others[1]
    assert "KeyError: 'metric'" in others[0][1]
