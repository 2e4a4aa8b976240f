"""State through FSDP1's names on gloo processes: each case does the same with torch's and with ours."""

import functools
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_api
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard.compat.torch_fsdp.api as our_api
from fullshard.compat.torch_fsdp import load_sharded_optimizer_state_dict as load_ours
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as OurFSDP
from fullshard.compat.torch_fsdp.wrap import ModuleWrapPolicy as OurPolicy
from fullshard.errors import CheckpointError
from support.rank_script import parse, print_result, run_checks
from support.tiny_lm import Block, TinyLM, batches, lm_loss

ON_DEVICE = {"offload_to_cpu": False}


class LM(TinyLM):
    """Every parameter is used: torch makes zeros of what is not."""

    def __init__(self):
        super().__init__(layers=2)
        del self.unused
        self.register_buffer("scale", torch.ones(3))


class Side:
    """One of the two: the class, its arguments' names, and a trained model."""

    def __init__(self, fsdp, api, policy, steps=2, seed=0):
        torch.manual_seed(seed)
        self.fsdp, self.api = fsdp, api
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        self.model = fsdp(LM(), auto_wrap_policy=policy({Block}), **options)
        self.optimizer = adamw(self.model)
        for tokens in batches(steps, 4, seed=seed + 1):
            lm_loss(self.model, tokens[2 * dist.get_rank() :][:2]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def optim_state(self):
        """The full state; with torch's default, offload_to_cpu, the CPU reads freed memory."""
        self.set_type("FULL_STATE_DICT", ("FullStateDictConfig", {}), ("FullOptimStateDictConfig", ON_DEVICE))
        return self.fsdp.optim_state_dict(self.model, self.optimizer)

    def set_type(self, name, *configs):
        configs = [getattr(self.api, config)(**options) for config, options in configs]
        return self.fsdp.set_state_dict_type(self.model, getattr(self.api.StateDictType, name), *configs)


def adamw(model):
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    return torch.optim.AdamW([{"params": norms, "lr": 3e-3}, {"params": rest}], lr=1e-2)


def sides(**options):
    return Side(TorchFSDP, torch_api, TorchPolicy, **options), Side(OurFSDP, our_api, OurPolicy, **options)


@functools.cache
def pair():
    """Two trained ones that no case changes but in the type of their state dicts."""
    return sides()


def same(theirs, ours, *, order=True):
    """Equal names, and values up to what the order of additions makes of them."""
    assert (list(theirs) == list(ours)) if order else (theirs.keys() == ours.keys()), (list(theirs), list(ours))
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == ours[name].dtype, name
            torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
        else:
            assert value == ours[name], name


def same_state(theirs, ours):
    assert theirs.keys() == ours.keys()
    for name, state in theirs.get("state", {}).items():
        same(state, ours["state"][name], order=False)
    assert theirs.get("state", {}).keys() == ours.get("state", {}).keys()
    assert groups_of(theirs) == groups_of(ours)


def groups_of(state):
    """The groups; torch's getters make lists of the tuples of a model that is not torch's FSDP1."""
    groups = state.get("param_groups", [])
    return [{key: list(v) if isinstance(v, tuple) else v for key, v in group.items()} for group in groups]


def summon(directory):
    """Names, values, and which of them each option shows; torch's offload_to_cpu reads freed memory on the CPU."""
    for options in ({}, {"writeback": False}, {"rank0_only": True, "writeback": False}, {"recurse": False}):
        seen = []
        for side in pair():
            with side.fsdp.summon_full_params(side.model, **options):
                whole = {n: p.detach().clone() for n, p in side.model.named_parameters()}
                expected = LM().state_dict()
                shown = {n: p for n, p in whole.items() if p.shape == expected[n].shape}
                # Whether whole rows or a run of elements is on a rank differs: some parameters are whole by chance.
                seen.append({n: p for n, p in shown.items() if n in ("embed.weight", "blocks.0.up.weight")})
        same(*seen)
        assert ("blocks.0.up.weight" in seen[1]) is (
            options.get("recurse", True) and not (options.get("rank0_only") and dist.get_rank() > 0)
        )


def summon_writeback(directory):
    """Changes stay, or do not."""
    for writeback in (True, False):
        found = []
        for side in sides(steps=0):
            with side.fsdp.summon_full_params(side.model, writeback=writeback), torch.no_grad():
                side.model.module.blocks[0].module.up.weight.mul_(3)
            found.append(side.model.state_dict())
        same(*found)


def summon_with_grads(directory):
    """The full gradient is that of the joint batch."""
    found = []
    for side in sides(steps=0):
        lm_loss(side.model, batches(1, 4)[0][2 * dist.get_rank() :][:2]).backward()
        with side.fsdp.summon_full_params(side.model, with_grads=True, writeback=False):
            found.append({n: p.grad.clone() for n, p in side.model.named_parameters()})
    same(*found)


def summon_refusals(directory):
    """What torch refuses is refused."""
    for side in sides(steps=0):
        for enter in (
            lambda side=side: side.fsdp.summon_full_params(side.model, rank0_only=True, writeback=True),
            lambda side=side: side.fsdp.summon_full_params(side.model),
        ):
            try:
                with side.fsdp.summon_full_params(side.model), enter():
                    raise LookupError
            except LookupError:
                raise AssertionError("nothing was refused") from None
            except Exception:
                continue


def summon_forward(directory):
    """A forward inside computes what one outside does, and ours changes nothing (torch's overwrites weights)."""
    tokens = batches(1, 2)[0]
    for side in sides(steps=0):
        outside = side.model(tokens)
        with side.fsdp.summon_full_params(side.model):
            torch.testing.assert_close(side.model(tokens), outside)
    torch.testing.assert_close(side.model(tokens), outside, atol=0, rtol=0)


def full_state_dict(directory):
    """With torch's offload_to_cpu the CPU reads freed memory, so that ours is on its own there."""
    theirs, ours = pair()
    for side in (theirs, ours):
        side.set_type("FULL_STATE_DICT")
    same(theirs.model.state_dict(), ours.model.state_dict())
    for side in (theirs, ours):
        side.set_type("FULL_STATE_DICT", ("FullStateDictConfig", {"rank0_only": True}))
    same(theirs.model.state_dict(), ours.model.state_dict())
    expected = ours.model.state_dict()
    assert bool(expected) is (dist.get_rank() == 0)
    ours.set_type("FULL_STATE_DICT", ("FullStateDictConfig", {"offload_to_cpu": True, "rank0_only": True}))
    same(expected, ours.model.state_dict())


def full_state_dict_loads_across(directory):
    theirs, ours = pair()
    for side in (theirs, ours):
        side.set_type("FULL_STATE_DICT")
    other, fresh = sides(steps=0, seed=5)
    other.model.load_state_dict(ours.model.state_dict())
    fresh.model.load_state_dict(theirs.model.state_dict())
    same(other.model.state_dict(), fresh.model.state_dict())
    same(other.model.state_dict(), ours.model.state_dict())
    for side in (theirs, ours):
        found = side.model.load_state_dict({"other": torch.zeros(1)}, strict=False)
        assert found.unexpected_keys == ["other"]
        assert "blocks.0.up.weight" in found.missing_keys


def nested_state_dict(directory):
    theirs, ours = pair()
    for side in (theirs, ours):
        side.set_type("FULL_STATE_DICT")
    same(theirs.model.module.blocks[1].state_dict(), ours.model.module.blocks[1].state_dict())


def sharded_state_dict(directory):
    """torch.distributed.checkpoint brings it from one to the other, both ways."""
    for write, read in ((0, 1), (1, 0), (1, 1)):
        writer, reader = sides()[write], sides(steps=0, seed=5)[read]
        path = directory / f"{write}{read}"
        for side in (writer, reader):
            side.set_type("SHARDED_STATE_DICT")
        dcp.save({"model": writer.model.state_dict()}, checkpoint_id=path)
        state = {"model": reader.model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        reader.model.load_state_dict(state["model"])
        for side in (writer, reader):
            side.set_type("FULL_STATE_DICT")
        same(writer.model.state_dict(), reader.model.state_dict())


def local_state_dict(directory):
    """Ours only: torch has none with use_orig_params."""
    (_, ours), (_, other) = sides(), sides(steps=0, seed=5)
    for side in (ours, other):
        side.set_type("LOCAL_STATE_DICT")
    other.model.load_state_dict(ours.model.state_dict())
    for side in (ours, other):
        side.set_type("FULL_STATE_DICT")
    same(ours.model.state_dict(), other.model.state_dict())


def types_of_state_dicts(directory):
    """Settings are returned, kept and put back, and misfits refused."""
    for side in sides(steps=0):
        api, kinds = side.api, side.api.StateDictType
        former = side.set_type("SHARDED_STATE_DICT")
        assert former.state_dict_type is kinds.FULL_STATE_DICT
        assert former.state_dict_config == api.FullStateDictConfig()
        with side.fsdp.state_dict_type(side.model, kinds.FULL_STATE_DICT, api.FullStateDictConfig(True, True)):
            settings = side.fsdp.get_state_dict_type(side.model)
            assert settings.state_dict_config == api.FullStateDictConfig(True, True)
            assert settings.optim_state_dict_config == api.FullOptimStateDictConfig()
        assert side.fsdp.get_state_dict_type(side.model).state_dict_type is kinds.SHARDED_STATE_DICT
        try:
            side.set_type("FULL_STATE_DICT", ("LocalStateDictConfig", {}))
        except Exception:
            continue
        raise AssertionError("nothing was refused")


def optim_state_dict(directory):
    theirs, ours = pair()
    same_state(theirs.optim_state(), ours.optim_state())
    for side in (theirs, ours):
        configs = ("FullStateDictConfig", {}), ("FullOptimStateDictConfig", ON_DEVICE | {"rank0_only": True})
        side.set_type("FULL_STATE_DICT", *configs)
    given = [
        side.fsdp.optim_state_dict(side.model, side.optimizer, side.optimizer.state_dict()) for side in (theirs, ours)
    ]
    same_state(*given)
    assert bool(given[1]) is (dist.get_rank() == 0)


def full_optim_state_dict(directory):
    """Torch's has freed memory for values on the CPU: names and groups are compared."""
    theirs, ours = pair()
    for rank0_only in (True, False):
        found = [
            side.fsdp.full_optim_state_dict(side.model, side.optimizer, rank0_only=rank0_only)
            for side in (theirs, ours)
        ]
        assert found[0].get("state", {}).keys() == found[1].get("state", {}).keys()
        assert found[0].get("param_groups") == found[1].get("param_groups")
    same_state(ours.optim_state(), found[1])


def goes_on(load):
    """A state of one goes into the other, and both runs stay together."""
    trained, fresh = pair(), sides(steps=0, seed=5)
    states = [side.optim_state() for side in trained]
    weights = trained[0].model.state_dict()
    for side, state in zip(fresh, reversed(states), strict=True):
        side.model.load_state_dict(weights)
        load(side, state)
        for tokens in batches(2, 4, seed=9):
            lm_loss(side.model, tokens[2 * dist.get_rank() :][:2]).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
    same(*(side.model.state_dict() for side in fresh))
    same_state(*(side.optim_state() for side in fresh))


def optim_state_dict_to_load(directory):
    goes_on(
        lambda side, state: side.fsdp.optim_state_dict_to_load(side.model, side.optimizer, state, load_directly=True)
    )


def shard_full_optim_state_dict(directory):
    goes_on(
        lambda side, state: side.optimizer.load_state_dict(
            side.fsdp.shard_full_optim_state_dict(state, side.model, optim=side.optimizer)
        )
    )


def scatter_full_optim_state_dict(directory):
    goes_on(
        lambda side, state: side.optimizer.load_state_dict(
            side.fsdp.scatter_full_optim_state_dict(
                state if dist.get_rank() == 0 else None, side.model, optim=side.optimizer
            )
        )
    )


def sharded_optim_state_dict(directory):
    """Ours is carried by torch.distributed.checkpoint."""
    (_, ours), (_, other) = sides(), sides(steps=1, seed=5)
    for side in (ours, other):
        side.set_type("SHARDED_STATE_DICT")
    state = ours.fsdp.optim_state_dict(ours.model, ours.optimizer)
    dcp.save({"optim": state["state"]}, checkpoint_id=directory / "optim")
    new = other.fsdp.optim_state_dict(other.model, other.optimizer)
    dcp.load({"optim": new["state"]}, checkpoint_id=directory / "optim")
    other.fsdp.optim_state_dict_to_load(other.model, other.optimizer, new, load_directly=True)
    same_state(ours.optim_state(), other.optim_state())


def load_sharded_optimizer_state_dict(directory):
    """As torch's documentation has it: what either wrote, into an optimizer that has not stepped yet."""
    for write in (0, 1):
        writer, (_, reader) = sides()[write], sides(steps=0, seed=5)
        for side in (writer, reader):
            configs = [("ShardedStateDictConfig", {}), ("ShardedOptimStateDictConfig", ON_DEVICE)]
            side.set_type("SHARDED_STATE_DICT", *configs)
        optim = writer.fsdp.optim_state_dict(writer.model, writer.optimizer)
        path = directory / f"optimizer{write}"
        dcp.save({"model": writer.model.state_dict(), "optimizer": optim}, checkpoint_id=path)
        state = reader.model.state_dict()
        found = load_ours(state, "optimizer", dcp.FileSystemReader(path))
        flat = reader.fsdp.optim_state_dict_to_load(reader.model, reader.optimizer, found["optimizer"])
        reader.optimizer.load_state_dict(flat)
        with pytest.raises(CheckpointError, match="has no key 'optim'; it has model, optimizer"):
            load_ours(state, "optim", dcp.FileSystemReader(path))
        even = dcp.load_sharded_optimizer_state_dict(state, "optimizer", dcp.FileSystemReader(path))
        with pytest.raises(CheckpointError, match=r"Import that function from fullshard\.compat\.torch_fsdp"):
            reader.fsdp.optim_state_dict_to_load(reader.model, reader.optimizer, even["optimizer"])
        same_state(writer.optim_state(), reader.optim_state())


def flatten_sharded_optim_state_dict(directory):
    """What sharded_optim_state_dict gave comes back."""
    (_, ours), (_, other) = sides(), sides(steps=0, seed=5)
    state = ours.fsdp.sharded_optim_state_dict(ours.model, ours.optimizer)
    other.optimizer.load_state_dict(ours.fsdp.flatten_sharded_optim_state_dict(state, other.model, other.optimizer))
    same_state(*(side.fsdp.optim_state_dict(side.model, side.optimizer) for side in (ours, other)))


def rekey_optim_state_dict(directory):
    """Names to numbers of an unsharded optimizer and back."""
    found = []
    for side in pair():
        state = side.optim_state()
        plain = LM()
        kinds = side.api.OptimStateKeyType if hasattr(side.api, "OptimStateKeyType") else torch_keys()
        numbered = side.fsdp.rekey_optim_state_dict(state, kinds.PARAM_ID, plain, optim=adamw(plain))
        adamw(plain).load_state_dict(numbered)
        named = side.fsdp.rekey_optim_state_dict(numbered, kinds.PARAM_NAME, plain, optim=adamw(plain))
        found.append((numbered, named))
    for theirs, ours in zip(*found, strict=True):
        same_state(theirs, ours)


def torch_keys():
    return torch_api.fully_sharded_data_parallel.OptimStateKeyType


def torchs_getters(directory):
    """Full states by ``torch.distributed.checkpoint.state_dict``, and back by its setters."""
    options = StateDictOptions(full_state_dict=True)
    found = []
    for one, other in zip(sides(), sides(steps=1, seed=3), strict=True):
        model, optim = get_state_dict(one.model, one.optimizer, options=options)
        kept = {name: value.clone() for name, value in model.items()}
        set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optim, options=options)
        found.append((kept, other.optim_state(), other.model.state_dict()))
    for place in (0, 2):
        same(found[0][place], found[1][place])
    same_state(found[0][1], found[1][1])


def checkpoints_by_torchs_getters(directory):
    """What one side saved through torch, the other reads through torch; in the background too."""
    for number, (source, target, save) in enumerate(
        ((0, 1, dcp.save), (1, 0, dcp.save), (1, 1, dcp.async_save), (1, 1, dcp.save))
    ):
        one, other = sides()[source], sides(steps=1, seed=3)[target]
        path = directory / f"getters_{number}"
        state = dict(zip(("model", "optim"), get_state_dict(one.model, one.optimizer), strict=True))
        saving = save(state, checkpoint_id=path)
        if save is dcp.async_save:
            saving.result()
        dist.barrier()
        state = dict(zip(("model", "optim"), get_state_dict(other.model, other.optimizer), strict=True))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        same_state(one.optim_state(), other.optim_state())
        same(one.model.state_dict(), other.model.state_dict())


CASES = (
    torchs_getters,
    checkpoints_by_torchs_getters,
    summon,
    summon_writeback,
    summon_with_grads,
    summon_refusals,
    summon_forward,
    full_state_dict,
    full_state_dict_loads_across,
    nested_state_dict,
    sharded_state_dict,
    local_state_dict,
    types_of_state_dicts,
    optim_state_dict,
    full_optim_state_dict,
    optim_state_dict_to_load,
    shard_full_optim_state_dict,
    scatter_full_optim_state_dict,
    sharded_optim_state_dict,
    load_sharded_optimizer_state_dict,
    flatten_sharded_optim_state_dict,
    rekey_optim_state_dict,
)


def main():
    cases = {case.__name__: case for case in CASES}
    options = parse(cases, __doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, about its own names
    dist.init_process_group("gloo")
    print_result(run_checks(cases, options.only, options.directory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
