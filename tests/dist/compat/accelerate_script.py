"""A script for Accelerate, as users write it; accelerate_main.py runs it as it is and with its imports changed."""

import accelerate
import torch
from accelerate import Accelerator, DistributedType, skip_first_batches
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, find_executable_batch_size, set_seed
from torch.utils.data import DataLoader

logger = get_logger(__name__)
ranks = PartialState()


def train(make, loss_of, rows):
    """Train for two epochs, the second one resumed in its middle; every rank."""
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[handler])
    assert accelerator.num_processes == ranks.num_processes
    assert accelerator.distributed_type in (DistributedType.FSDP, DistributedType.MULTI_CPU)
    set_seed(7)
    losses, tried = [], []

    @find_executable_batch_size(starting_batch_size=4)
    def inner(batch_size):
        tried.append(batch_size)
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size, shuffle=True))
        for epoch in range(2):
            batches = skip_first_batches(loader, 1) if epoch else loader
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
            logger.info("epoch %d", epoch, main_process_only=True)
        return {"losses": losses, "tried": tried, "weights": accelerator.get_state_dict(model)}

    return inner()


VERSION = accelerate.__version__
