"""Models of torch's FSDP1 and ours whose wrappers have process groups or strategies of their own, on 4 gloo processes.

The mixture of experts is that of torch's own tests: an expert wrapped on a group of ranks, the rest on all of them.
"""

import functools
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard.compat.torch_fsdp as our_fsdp
from fullshard.errors import ShardingError
from support.both_fsdps import OURS, TORCH, compare, language_model, whole, wrapped
from support.models import batches, lm_loss
from support.rank_script import parse, print_result, run_checks

CASES = {}
FSDP = our_fsdp.FullyShardedDataParallel
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def case(work):
    CASES[work.__name__] = work
    return work


@functools.cache
def group_of(size):
    """This rank's group of ``size`` neighbours."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    return groups[dist.get_rank() // size]


def experts_of(size):
    """Modules that follow each other. The third is another one in each group of ``size`` ranks."""
    torch.manual_seed(0)
    first, shared, last = nn.Linear(8, 12), nn.Linear(12, 23), nn.Linear(12, 8)
    torch.manual_seed(42 + dist.get_rank() // size)
    return [first, shared, nn.Linear(23, 12), last]


def mixture(house, size, strategy="FULL_SHARD", **options):
    """The second on all ranks and the third on groups of ``size``, with a wrapper around all."""
    first, shared, expert, last = experts_of(size)
    options["sharding_strategy"] = house.ShardingStrategy[strategy]
    shared = wrapped(house, shared, **options)
    expert = wrapped(house, expert, process_group=group_of(size), **options)
    return wrapped(house, nn.Sequential(first, shared, expert, last), **options)


def trained(house, model, *, max_norm=None, steps=4):
    """The optimizer; losses, norms, and the full weights of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7 + dist.get_rank())
    losses, norms = [], []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        if max_norm is not None:
            norms.append(model.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, {"losses": losses, "norms": norms, "weights": whole(house, model)}


@case
def experts_on_each_rank():
    for strategy in STRATEGIES:
        compare(*(trained(one, mixture(one, 1, strategy))[1] for one in (OURS, TORCH)))


@case
def experts_of_two_ranks():
    for strategy in STRATEGIES:
        compare(*(trained(one, mixture(one, 2, strategy))[1] for one in (OURS, TORCH)))


@case
def experts_that_a_policy_puts_on_their_group():
    def run(house):
        model = nn.Sequential(*experts_of(2))
        choose = house.wrap.CustomPolicy(lambda module: module is model[2] and {"process_group": group_of(2)})
        return trained(house, wrapped(house, model, auto_wrap_policy=choose), max_norm=0.05)[1]

    compare(run(OURS), run(TORCH))


@case
def clipping_with_experts():
    """Where torch has one norm for all ranks, ours is the same; where an expert is not sharded, ours is one still."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        compare(*(trained(one, mixture(one, 2, strategy), max_norm=0.05)[1] for one in (OURS, TORCH)))
    for size, strategy in ((1, "FULL_SHARD"), (2, "NO_SHARD")):
        norms = trained(OURS, mixture(OURS, size, strategy), max_norm=0.05)[1]["norms"]
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, norms)
        assert by_rank == [norms] * len(by_rank)


@case
def accumulation_with_experts():
    grads = []
    for one in (OURS, TORCH):
        model = mixture(one, 2)
        torch.manual_seed(dist.get_rank())
        with model.no_sync():
            model(torch.randn(4, 8)).square().mean().backward()
        model(torch.randn(4, 8)).square().mean().backward()
        grads.append(whole(one, model, grads=True))
    compare(*grads)


@case
def offloaded_experts():
    """torch's needs an accelerator, so that ours is compared with torch's without offload."""
    for strategy in STRATEGIES:
        ours = mixture(OURS, 2, strategy, cpu_offload=OURS.CPUOffload(True))
        compare(trained(OURS, ours)[1], trained(TORCH, mixture(TORCH, 2, strategy))[1])


@case
def state_of_experts():
    """Full state dicts are each group's own, load again, and those of all ranks together are refused."""
    theirs, ours = mixture(TORCH, 2), mixture(OURS, 2)
    (their_optimizer, run), (optimizer, _) = (trained(one, model) for one, model in ((TORCH, theirs), (OURS, ours)))
    found = ours.state_dict()
    assert list(found) == list(run["weights"])
    compare(dict(found), run["weights"])
    saved = full_optimizer(our_fsdp, ours, optimizer)
    compare(saved["state"], full_optimizer(torch_fsdp, theirs, their_optimizer)["state"])
    other = mixture(OURS, 2)
    again = trained(OURS, other, steps=1)[0]
    other.load_state_dict(found)
    again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, saved))
    for model, one in ((ours, optimizer), (other, again)):
        model(torch.ones(2, 8)).square().mean().backward()
        one.step()
    compare(whole(OURS, other), whole(OURS, ours), tolerance=0)
    refused_together(ours, optimizer, saved)


def full_optimizer(package, model, optimizer):
    """Its full state dict; with torch's default, offload_to_cpu, the CPU reads freed memory."""
    of_optimizer = package.FullOptimStateDictConfig(offload_to_cpu=False)
    fsdp, kind = package.FullyShardedDataParallel, package.StateDictType.FULL_STATE_DICT
    fsdp.set_state_dict_type(model, kind, package.FullStateDictConfig(), of_optimizer)
    return fsdp.optim_state_dict(model, optimizer)


def refused_together(model, optimizer, saved):
    types, rule = our_fsdp.StateDictType, r"2\.weight and 1 other parameters .* some of the model's 4 ranks only"
    full, of_optimizer = our_fsdp.FullStateDictConfig, our_fsdp.FullOptimStateDictConfig
    for settings in (
        (types.SHARDED_STATE_DICT,),
        (types.FULL_STATE_DICT, full(rank0_only=True), of_optimizer(rank0_only=True)),
    ):
        FSDP.set_state_dict_type(model, *settings)
        with pytest.raises(ShardingError, match=rule):
            model.state_dict()
        with pytest.raises(ShardingError, match=rule):
            FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(ShardingError, match=rule):
        FSDP.scatter_full_optim_state_dict(saved, model, optim=optimizer)


def partly_sharded(house, *, by_hand=False, **options):
    """Blocks on every rank beside one that is cut, around which the rest is cut too."""
    model, options = language_model(), {"process_group": group_of(2), **options}
    strategies = [house.ShardingStrategy[name] for name in ("NO_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]
    of_block = dict(zip(model.blocks, strategies, strict=True))
    if by_hand:
        for index, (block, strategy) in enumerate(of_block.items()):
            model.blocks[index] = wrapped(house, block, sharding_strategy=strategy, **options)
        return wrapped(house, model, **options)
    choose = house.wrap.CustomPolicy(lambda module: module in of_block and {"sharding_strategy": of_block[module]})
    return wrapped(house, model, auto_wrap_policy=choose, **options)


def trained_on_two(house, model, steps=3):
    """The optimizer; losses, norms and weights: the batches are of the two ranks of a group."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for tokens in batches(steps, 4):
        loss = lm_loss(model, tokens.chunk(2)[dist.get_rank() % 2])
        loss.backward()
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, {"losses": losses, "norms": norms, "weights": whole(house, model)}


@case
def blocks_on_every_rank():
    for by_hand in (False, True):
        compare(*(trained_on_two(one, partly_sharded(one, by_hand=by_hand))[1] for one in (OURS, TORCH)))


@case
def offloaded_blocks_of_two_strategies():
    """torch's needs an accelerator, so that ours is compared with torch's without offload."""
    ours = partly_sharded(OURS, cpu_offload=OURS.CPUOffload(True))
    theirs = partly_sharded(TORCH)
    compare(trained_on_two(OURS, ours)[1], trained_on_two(TORCH, theirs)[1])


@case
def state_of_two_strategies():
    """Full and sharded state dicts of the model and its optimizer are torch's, and load into one strategy."""
    expected = trained_on_two(TORCH, partly_sharded(TORCH))[1]["weights"]
    model = partly_sharded(OURS)
    optimizer = trained_on_two(OURS, model)[0]
    types = our_fsdp.StateDictType
    found = dict(model.state_dict())
    compare({name: found[name] for name in expected}, expected)
    one_strategy = wrapped(OURS, language_model(), process_group=group_of(2))
    one_strategy.load_state_dict(found)
    compare(whole(OURS, one_strategy), whole(OURS, model), tolerance=0)
    saved = FSDP.optim_state_dict(model, optimizer)
    plain = language_model()
    unsharded = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for tokens in batches(3, 4):
        lm_loss(plain, tokens).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        unsharded.step()
        unsharded.zero_grad()
    for name, param in plain.named_parameters():
        compare(saved["state"][name], unsharded.state[param])
    FSDP.set_state_dict_type(model, types.SHARDED_STATE_DICT)
    parts, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]
    for name in expected:
        compare(parts[name].full_tensor(), found[name], tolerance=0)
        compare(states[name]["exp_avg"].full_tensor(), saved["state"][name]["exp_avg"], tolerance=0)
    again = trained_on_two(OURS, one_strategy, steps=1)[0]
    again.load_state_dict(FSDP.optim_state_dict_to_load(one_strategy, again, saved))
    one_strategy.load_state_dict(found)
    for one, stepping in ((model, optimizer), (one_strategy, again)):
        lm_loss(one, batches(1, 4)[0].chunk(2)[dist.get_rank() % 2]).backward()
        stepping.step()
    compare(whole(OURS, one_strategy), whole(OURS, model))


def main():
    options = parse(CASES, __doc__, ranks=4)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    print_result(run_checks(CASES, options.only))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
