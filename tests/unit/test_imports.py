"""What importing costs, and what comes with it; each in a new process, since this one has imported everything."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "datasets", "pyarrow")


def printed(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_command_line_starts_without_torch():
    code = f"import sys, fullshard.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    assert printed(code) == "[]"


@pytest.mark.parametrize(
    "door",
    [
        "from fullshard import fully_shard",
        pytest.param("import fullshard.compat.torch_fsdp", marks=pytest.mark.slow),
        pytest.param("import fullshard.compat.accelerate", marks=pytest.mark.slow),
    ],
)
def test_whoever_can_shard_a_model_has_optimizers_judged(door):
    assert printed(f"{door}; import sys; print('fullshard.optim.guard.guard' in sys.modules)") == "True"


def test_every_public_name_and_room_is_an_attribute():
    names = "set(fullshard.__all__) | set(fullshard._ROOMS)"
    code = f"import fullshard; print(all(hasattr(fullshard, n) and n in dir(fullshard) for n in {names}))"
    assert printed(code) == "True"
    with pytest.raises(subprocess.CalledProcessError):
        printed("import fullshard; fullshard.nothing")


def test_what_was_set_in_place_of_a_name_stays_when_the_library_is_imported():
    code = "import fullshard; fullshard.save = 1; fullshard.fully_shard; print(fullshard.save)"
    assert printed(code) == "1"
