"""torch's FSDP1 and ours, with the same names, for scripts that run both."""

from types import SimpleNamespace

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.sharded_grad_scaler as torch_scaler
import torch.distributed.fsdp.wrap as torch_wrap

import fullshard.compat.torch_fsdp as our_fsdp
import fullshard.compat.torch_fsdp.wrap as our_wrap
from support.tiny_lm import TinyLM

FSDP1 = ("FullyShardedDataParallel", "ShardingStrategy", "BackwardPrefetch", "MixedPrecision", "CPUOffload")


def house(package, wrap, scaler):
    return SimpleNamespace(**{name: getattr(package, name) for name in FSDP1}, wrap=wrap, scaler=scaler)


TORCH = house(torch_fsdp, torch_wrap, torch_scaler.ShardedGradScaler)
OURS = house(our_fsdp, our_wrap, our_fsdp.ShardedGradScaler)


def language_model():
    torch.manual_seed(0)
    model = TinyLM(layers=3)
    del model.unused
    return model


def wrapped(house, model, **arguments):
    return house.FullyShardedDataParallel(
        model, **({"device_id": torch.device("cpu"), "use_orig_params": True} | arguments)
    )


def whole(house, model, *, grads=False):
    """Full values, or gradients, by name."""
    with house.FullyShardedDataParallel.summon_full_params(model, with_grads=grads, writeback=not grads):
        found = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        return {
            name: (param.grad if grads else param).detach().clone()
            for name, param in found.items()
            if not grads or param.grad is not None
        }


def compare(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
