"""``ShardedGradScaler`` with torch's arguments, on rank threads."""

import torch
from torch import nn

from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, ShardedGradScaler
from fullshard.core.testing import run_ranks
from support.parity import replicas


def test_the_scaler_takes_torchs_arguments_and_skips_on_all_ranks():
    _, models = replicas(lambda: nn.Linear(64, 64, bias=False), 2)

    def work(comm):
        model = FSDP(models[comm.rank], comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", 8.0, 0.25, 3.0, 1, process_group=comm)
        assert scaler.is_enabled()
        scales = []
        for spoilt in (False, True, False):
            before = next(model.parameters()).detach().clone()
            loss = model(torch.ones(1, 64)).sum()
            scaler.scale(loss).backward()
            if spoilt and comm.rank == 1:
                next(model.parameters()).grad.to_local()[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            assert torch.equal(before, next(model.parameters())) == spoilt
        other = ShardedGradScaler()
        other.load_state_dict(scaler.state_dict())
        assert other.get_scale() == scaler.get_scale()
        return scales

    assert run_ranks(2, work) == [[24.0, 6.0, 18.0]] * 2


def test_further_ranks_of_the_scalers_group_skip_too():
    def work(comm):
        solo, everyone = comm.split([[0], [1]]), comm
        torch.manual_seed(0)
        model = FSDP(nn.Linear(2, 2), solo)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=everyone)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if comm.rank == 1:
            next(model.parameters()).grad.to_local()[0, 0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(2, work) == [4.0, 4.0]
