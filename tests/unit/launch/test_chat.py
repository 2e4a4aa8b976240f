"""The line of ``fullshard chat`` about the model that answers."""

import pytest
import torch

from fullshard.core.testing import run_ranks
from fullshard.program.config import RunConfig
from fullshard.program.launch.programs.chat import about_model
from fullshard.program.train.setup.devices import Devices
from support.tiny_run import settings


@pytest.mark.parametrize(
    ("devices", "computed"), [(Devices(), ""), (Devices(gpu=True, bf16=True), ", computed in bf16")]
)
def test_the_line_about_the_model_has_the_precision_that_auto_is(tmp_path, devices, computed, monkeypatch):
    config = RunConfig.model_validate(settings(tmp_path, training__precision="auto"))
    monkeypatch.setattr(Devices, "of_ranks", classmethod(lambda cls, comm: devices))
    (line,) = run_ranks(1, lambda comm: about_model("here", torch.nn.Linear(2, 3), config, comm))
    assert line == f"here: Linear, 9 parameters in float32{computed}, on the CPU"
