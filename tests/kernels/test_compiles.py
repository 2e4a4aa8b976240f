"""The kernels compile for the cards of the table, within their shared memory; no card is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arch", "shared_kib"), [(90, 227), (80, 163), (89, 99)])
def test_every_kernel_compiles_within_a_cards_shared_memory(arch, shared_kib, tmp_path):
    command = [
        sys.executable,
        SUPPORT / "compile_kernels.py",
        str(arch),
        str(shared_kib),
        "encoder",
        "decoder",
        "cross",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\n")
    sizes = [int(line.split()[-1]) for line in found if line]
    assert len(sizes) == 9
    assert max(sizes) <= shared_kib << 10
