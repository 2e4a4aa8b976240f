"""The file of ``fullshard config --default``, and what a user is told of a file."""

import pytest
import yaml
from accelerate.commands.config import config_args

from fullshard.compat.accelerate_config.explain import default_values, next_commands, summary
from fullshard.compat.accelerate_config.file import read_accelerate_file
from support.accelerate_files import VERSION_2


@pytest.mark.parametrize(("gpus", "bf16"), [(0, False), (8, True)])
def test_the_default_file_is_the_machines_and_read_by_accelerate_too(gpus, bf16, tmp_path):
    path, values = tmp_path / "f.yaml", default_values(gpus, bf16=bf16)
    path.write_text(yaml.safe_dump(values))
    file, theirs = read_accelerate_file(path), config_args.load_config_from_file(str(path))
    assert (file.use_cpu, file.num_processes, file.mixed_precision) == (not gpus, gpus or 2, "bf16" if bf16 else "no")
    assert (file.warnings, file.is_sharded, file.strategy) == ((), True, "FULL_SHARD")
    assert (theirs.distributed_type, theirs.num_processes) == ("FSDP", gpus or 2)
    assert (theirs.mixed_precision, theirs.fsdp_config) == (file.mixed_precision, values["fsdp_config"])


def test_a_file_is_explained_with_the_commands_that_use_it(tmp_path, read):
    path = tmp_path / "two.yaml"
    path.write_text(VERSION_2)
    file = read_accelerate_file(path)
    shown = "\n".join(summary(file))
    assert "4 ranks on each of 2 machines, on one GPU each, computing in bfloat16" in shown
    for word in ("SHARD_GRAD_OP: ", "SIZE_BASED_WRAP: ", "SHARDED_STATE_DICT: ", "2,000 parameters", "recomputed"):
        assert word in shown
    (command,) = next_commands(file)
    assert f"fullshard launch --config_file {path} script.py" in command
    shown = "\n".join(summary(read(use_cpu=True)))
    for word in (
        "2 ranks on this machine, on the CPU, computing in float32",
        "class T5Block",
        "host memory",
        "On CPUs",
    ):
        assert word in shown
    shown = "\n".join(summary(read("distributed_type: MULTI_CPU\nnum_processes: 2\n")))
    assert "MULTI_CPU does not configure sharding" in shown
    assert len(next_commands(read())) == 3
