"""What importing costs, and what comes with it; each in a new process, since this one has imported everything."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numpy", "datasets", "pyarrow")


def printed(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_command_line_starts_without_torch():
    code = f"import sys, fullshard.program.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    assert printed(code) == "[]"


@pytest.mark.parametrize(
    "door",
    [
        "from fullshard import fully_shard",
        pytest.param("import fullshard.compat.torch_fsdp", marks=pytest.mark.slow),
        pytest.param("import fullshard.compat.accelerate", marks=pytest.mark.slow),
    ],
)
def test_whoever_can_shard_a_model_has_optimizers_judged_and_waits_for_no_pydantic(door):
    names = "('fullshard.core.optim.guard', 'pydantic')"
    assert printed(f"{door}; import sys; print(*(name in sys.modules for name in {names}))") == "True False"


NAMES = """
import sys, fullshard.program.launch.programs.train
print([name for name in ("peft", "bitsandbytes", "datasets") if name in sys.modules])
import fullshard
fullshard.save = 1
print(hasattr(fullshard, "nothing"))
fullshard.fully_shard
print(fullshard.save)
del fullshard.save
names = {*fullshard.__all__, "compat", "optim"}
print(all(hasattr(fullshard, name) and name in dir(fullshard) for name in names))
"""


@pytest.fixture(scope="module")
def of_names():
    """What one process, which takes seconds, says of a run's imports, a name that is not there, one set, and all."""
    return printed(NAMES).splitlines()


def test_every_public_name_and_room_is_an_attribute(of_names):
    assert (of_names[1], of_names[3]) == ("False", "True")


def test_what_was_set_in_place_of_a_name_stays_when_the_library_is_imported(of_names):
    assert of_names[2] == "1"


def test_a_run_imports_peft_only_where_it_uses_it(of_names):
    """It takes three seconds where bitsandbytes is installed, which it imports."""
    assert of_names[0] == "[]"


def test_public_names_stay_where_they_are():
    """A name that goes needs a line in the changelog, and one here."""
    names = (Path(__file__).parents[1] / "golden" / "public_names.txt").read_text().split()
    split = [name.rpartition(".") for name in names]
    assert [f"{module}.{name}" for module, _, name in split if not hasattr(import_module(module), name)] == []
    library = sorted(name for module, _, name in split if module == "fullshard")
    assert sorted(import_module("fullshard").__all__) == library
