"""State through torch's FSDP1 names on gloo processes, torch's and ours side by side."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

NAMES = (
    "torchs_getters",
    "checkpoints_by_torchs_getters",
    "summon",
    "summon_writeback",
    "summon_with_grads",
    "summon_refusals",
    "summon_forward",
    "full_state_dict",
    "full_state_dict_loads_across",
    "nested_state_dict",
    "sharded_state_dict",
    "local_state_dict",
    "types_of_state_dicts",
    "optim_state_dict",
    "full_optim_state_dict",
    "optim_state_dict_to_load",
    "shard_full_optim_state_dict",
    "scatter_full_optim_state_dict",
    "sharded_optim_state_dict",
    "load_sharded_optimizer_state_dict",
    "flatten_sharded_optim_state_dict",
    "rekey_optim_state_dict",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    script = Path(__file__).with_name("fsdp1_state_main.py")
    return run_processes(2, script, "--directory", str(tmp_path_factory.mktemp("states")), timeout_s=110)


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_as_torch_s(results, name):
    assert not results[name], results[name]
