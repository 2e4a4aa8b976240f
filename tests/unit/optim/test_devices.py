"""Gradients in host memory with collectives on a device: which device each tensor is on, with fake tensors."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fullshard.core.comm.protocol import DONE
from fullshard.core.optim import ShardedGradScaler, clip_grad_norm_


class DeviceComm:
    """Takes tensors of a CUDA device that need not exist."""

    rank, size, device = 0, 2, torch.device("cuda:0")

    def __init__(self):
        self.taken = []

    def announce(self, what):
        pass

    def all_reduce(self, tensor, op="sum"):
        self.taken.append((tensor.device, tensor.dtype, op))
        return DONE


def offloaded_model(dtype=torch.float32):
    model, comm = torch.nn.Linear(4, 4, dtype=dtype), DeviceComm()
    for param in model.parameters():
        param.shard_comm, param.grad = comm, torch.ones_like(param)
    return model, comm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_travels_on_the_device_and_gradients_stay_where_they_are(norm_type, dtype):
    with FakeTensorMode():
        model, comm = offloaded_model(dtype)
        total = clip_grad_norm_(model, 1.0, norm_type)
        assert total.device == comm.device
        assert {p.grad.device.type for p in model.parameters()} == {"cpu"}
        assert comm.taken == [(comm.device, torch.float32, "max" if math.isinf(norm_type) else "sum")]


@pytest.mark.parametrize("verb", ["unscale_", "step"])
def test_the_scale_follows_gradients_to_host_memory_and_the_flag_travels_on_the_device(verb):
    with FakeTensorMode():
        model, comm = offloaded_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu")
        assert scaler.scale(torch.ones((), device="cuda")).device == comm.device
        if verb == "unscale_":
            scaler.unscale_(optimizer)
        else:
            with pytest.raises(DataDependentOutputException):  # it asks for the flag's value, and there is none
                scaler.step(optimizer)
        assert scaler._scale.device.type == "cpu"
        flags = scaler._found_inf_per_device(optimizer)
        assert [(device.type, flag.device.type) for device, flag in flags.items()] == [("cpu", "cpu")]
        assert comm.taken == [(comm.device, torch.float32, "max")]
        assert scaler.scale(torch.ones((), device="cuda")).device == comm.device
