"""Every function of torch on shards: right, about the rows here and documented so, or refused; nothing else.

A sample of the calls in ``sweep.py``. ``python -m users.sweep``, in ``tests``, prints the outcomes of more; see
docs/evidence/shards.md.
"""

import pytest

from users.sweep import sweep


def failures(share):
    found = sweep(share)
    assert len(found) > 10_000 * share
    return [f"{one.name}{one.call} of {one.subject}: {detail}" for one, kind, detail in found if kind == "failed"]


@pytest.mark.timeout(300)
def test_a_sample_of_calls_is_right_local_or_refused():
    assert failures(0.1) == []
