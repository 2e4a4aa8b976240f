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
import fullshard, torch
comm = fullshard.init()
total = torch.ones(3, device=comm.device)
comm.all_reduce(total).wait()
print(comm.device, int(total.sum()))
fullshard.shutdown()
"""


def test_the_user_is_told_once_that_ranks_share_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    (tmp_path / "script.py").write_text(SCRIPT)
    outputs = run_ranks(2, tmp_path / "script.py", gpus=first_gpu())
    assert [out for out, _ in outputs] == ["cuda:0 6\n"] * 2
    told = [err.count("2 ranks share GPU 0: collectives go through host memory") for _, err in outputs]
    assert told == [1, 0]
