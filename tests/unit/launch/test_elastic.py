"""The options that torch's elastic agent gets from a plan, as torchrun's own parser reads them, and what came of it."""

import time

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.program.launch.failure import Failure
from fullshard.program.launch.script.elastic import _failure, _options, in_order
from fullshard.program.launch.script.machines import MachinePlan, Nodes


def parsed(tmp_path, plan, **more):
    options = _options(plan, tmp_path, **({"max_restarts": 0, "timeout_s": 9.0} | more))
    return torchrun.config_from_args(torchrun.parse_args([*options, "child.py", "script", "s.py", "--lr", "1"]))


def test_machines_with_numbers(tmp_path):
    plan = MachinePlan(Nodes(2, 2), 1, 3, "127.0.0.1", 29_511, "static", "none")
    config, _, arguments = parsed(tmp_path, plan)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 3, 0)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("static", "127.0.0.1:29511", "none")
    assert config.rdzv_configs == {"rank": 1, "timeout": "9"}
    assert set(config.signals_to_handle.split(",")) >= {"SIGTERM", "SIGUSR1"}
    assert arguments[1:] == ["child.py", "script", "s.py", "--lr", "1"]


@pytest.mark.parametrize(("number", "host"), [(0, "1"), (1, "0"), (None, None)])
def test_machines_that_torch_numbers(tmp_path, number, host):
    plan = MachinePlan(Nodes(1, 4), number, 8, "::1", 29_511, "c10d", "slurm-1.0")
    config, _, _ = parsed(tmp_path, plan, max_restarts=3)
    assert (config.min_nodes, config.max_nodes, config.max_restarts, config.run_id) == (1, 4, 3, "slurm-1.0")
    assert config.rdzv_endpoint == "[::1]:29511"
    assert config.rdzv_configs["join_timeout"] == config.rdzv_configs["read_timeout"] == "9"
    assert config.rdzv_configs.get("is_host") == host


def test_the_cause_is_first_and_what_the_agent_ended_or_what_has_saved_is_last(tmp_path):
    def told(rank, code, failure=None):
        path = tmp_path / str(rank)
        if failure is not None:
            failure.write(path)
        return ProcessFailure(rank, 100 + rank, code, str(path))

    raised = Failure(1, "ValueError", "the cause", "trace", 1, time.time() + 5)
    saved = Failure(2, "RunStopped", "Stopped after step 3.", None, 75, 1.0, {"stopped": True})
    # The agent's own times are whole seconds, before the report's.
    found = in_order({0: told(0, -15), 1: told(1, 1, raised), 2: told(2, 75, saved), 3: told(3, -9)})
    assert [failure.rank for failure in found] == [3, 1, 2, 0]
    assert [failure.rank for failure in in_order({0: told(0, -15), 1: told(1, 1, raised)})] == [1, 0]


def test_a_script_that_recorded_its_error_and_crashed_has_the_shells_code():
    assert _failure(0, -6, {"message": {"message": "ValueError: x"}}, 2.0).exit_code == 134


def test_the_failure_of_a_rank_is_what_it_wrote_or_what_its_exit_code_says():
    own = Failure(1, "DataError", "no rows", None, 3, 1.0)
    assert _failure(1, 3, own._content(), 2.0) == own
    assert "killed by signal 9" in _failure(1, -9, {"message": "<NONE>"}, 2.0).message
    recorded = {"message": "ValueError: x", "extraInfo": {"py_callstack": "trace", "timestamp": "5"}}
    found = _failure(0, 1, {"message": recorded}, 2.0)
    assert (found.kind, found.message, found.trace, found.time_s) == ("ValueError", "x", "trace", 5.0)
