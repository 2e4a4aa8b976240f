"""Optimizers on CUDA devices, a rank each: how far they are from the unsharded run, and whether a step waits."""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fullshard
from fullshard import CPUOffload, fully_shard, optim
from support import staged_comm
from support.optimizers import LAYOUTS, batches, of_rank, train, train_by_parts, update_errors, whole, zoo
from support.rank_script import found, parse, print_result

MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "Adafactor": lambda params: optim.Adafactor(params),
    "TorchAdafactor": lambda params: optim.TorchAdafactor(params, lr=1e-2),
    "Muon": lambda params: optim.Muon(params, lr=1e-2, ns_dtype=torch.float32),
    "AdamW8bit": lambda params: optim.AdamW8bit(params, lr=1e-3),
    "AdamWBF16": lambda params: optim.AdamWBF16(params, lr=1e-3),
}


@contextmanager
def no_waiting():
    """A step that waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OnTheHost:
    """An optimizer of a model's copy in host memory: a processor rounds some operations in another way than a GPU."""

    def __init__(self, model, make):
        self.params = list(model.parameters())
        self.copies = [param.detach().cpu().requires_grad_() for param in self.params]
        self.optimizer = make(self.copies)

    def zero_grad(self):
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self):
        for param, copy in zip(self.params, self.copies, strict=True):
            copy.grad = param.grad.cpu()
        self.optimizer.step()
        for param, copy in zip(self.params, self.copies, strict=True):
            param.copy_(copy)


def on(device, data):
    return [tuple(part.to(device) for part in batch) for batch in data]


def case(comm, make, **options):
    """The worst parameter's relative update error after 20 steps, and whether the last step waited for the GPU."""
    data = on(comm.device, batches(21, comm.size))
    mine = [of_rank(batch, comm.rank) for batch in data]
    model = fully_shard(zoo(), comm, **options)
    optimizer = make(model.parameters())
    train(model, optimizer, mine[:20])
    ours = {name: param.cpu() for name, param in whole(model).items()}
    plain = zoo().to(comm.device)
    beside = OnTheHost(plain, make) if "offload_policy" in options else make(plain.parameters())
    train_by_parts(plain, beside, data[:20], comm.size)
    errors = update_errors(ours, {name: param.detach().cpu() for name, param in plain.named_parameters()})
    waited = ""
    if "offload_policy" not in options:
        optimizer.zero_grad()
        (model(mine[20][0]) - mine[20][1]).square().mean().backward()
        try:
            with no_waiting():
                optimizer.step()
        except RuntimeError as error:
            waited = str(error).splitlines()[0]
    return {"error": max(errors.values()), "waited": waited}


def main():
    options = parse(MAKERS, __doc__, torch.cuda.device_count(), gpus=None)
    torch.backends.cuda.matmul.allow_tf32 = False
    comm = staged_comm.init()
    results = {}
    for name in options.only:
        make = MAKERS[name]
        for layout, options in LAYOUTS.items():
            results[f"{name}, {layout}"] = found(case, comm, make, **options)
        results[f"{name}, offloaded"] = found(case, comm, make, wrap=None, offload_policy=CPUOffload())
    print_result(comm.all_gather_object(results))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
