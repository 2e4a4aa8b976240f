"""Two and four ranks on one CUDA device: collectives in host memory, with real streams and page-locked buffers."""

from pathlib import Path

import pytest
import torch

from support.behaviours import BEHAVIOURS
from support.processes import first_gpu, run_processes, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test of a module starts the ranks

OTHERS = ("collectives", "late", "late_on_another_stream", "no_wait", "saved")


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    script = Path(__file__).with_name("staged_main_gpu.py")
    return run_processes(request.param, script, timeout_s=280, gpus=first_gpu())


@pytest.mark.parametrize("name", [*OTHERS, *BEHAVIOURS])
def test_it_holds_on_a_shared_device(outcomes, name):
    for rank, text in enumerate(outcomes[name]):
        assert not text, f"rank {rank}:\n{text}"


SCRIPT = """
import fullshard
from fullshard.errors import ProcessGroupError
try:
    fullshard.init()
except ProcessGroupError as error:
    print(error)
"""


def test_init_refuses_ranks_that_share_a_gpu_alike_on_each(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (tmp_path / "script.py").write_text(SCRIPT)
    outputs = [out for out, _ in run_ranks(2, tmp_path / "script.py", gpus=first_gpu())]
    assert outputs[0] == outputs[1]
    assert "2 ranks have 1 GPUs, and ranks 0, 1 have the same one" in outputs[0]
