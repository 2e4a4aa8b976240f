"""The command line starts without the packages that take seconds to import."""

import subprocess
import sys

import pytest

from support.tiny_run import write_run_file

HEAVY = ("torch", "transformers", "tokenizers", "peft", "accelerate", "numpy", "huggingface_hub", "datasets")


@pytest.mark.parametrize("arguments", [["--help"], ["init", "--help"], ["train", "--help"], ["config", "check"]])
def test_nothing_heavy_is_imported(arguments, tmp_path):
    if "check" in arguments:
        arguments = [*arguments, str(write_run_file(tmp_path))]
    code = (
        "import contextlib, sys\nfrom fullshard.program.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n    assert not main(sys.argv[1:])\n"
        f"print('imported:', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported:"
