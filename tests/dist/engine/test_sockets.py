"""Between machines a reduce-scatter travels while the next unit computes; on one machine the wait does the work."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = pytest.mark.dist


def test_reduces_are_hidden_where_messages_travel_and_the_weights_are_the_same():
    script = Path(__file__).with_name("sockets_main.py")
    apart, together = (run_processes(2, script, how) for how in ("apart", "together"))
    assert (apart["behind"], apart["under_way"]) == (1, 1)
    assert (together["behind"], together["under_way"]) == (0, 0)
    assert apart["sha256"] == together["sha256"]
