"""torch's FSDP2 and fullshard's names for it side by side on gloo processes."""

import functools
import io
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp as theirs, tensor as theirs_tensors
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from dist.compat.fsdp2_full_states import ByGetters, ByHand, resumed
from fullshard.compat.torch_fsdp import fsdp2 as ours, tensor as ours_tensors
from fullshard.errors import ShardingError
from support.rank_script import parse, print_result, run_checks
from support.tiny_lm import Block, TinyLM, batches, lm_loss

ROWS = 2
BFLOAT16 = 1e-2  # gradients of a tied weight are added up in float32 here, in bfloat16 there
MESH = None


def rows(steps):
    rank = dist.get_rank()
    return [tokens[rank * ROWS : (rank + 1) * ROWS] for tokens in batches(steps, 2 * ROWS)]


def model_of(seed=0, make=TinyLM):
    torch.manual_seed(seed)
    return make(layers=3)


def shard(api, model, **options):
    for block in model.blocks:
        api.fully_shard(block, mesh=MESH, **options)
    return api.fully_shard(model, mesh=MESH, **options)


def whole(values, params):
    """The full tensors behind every rank's parts by name, of DTensors and of fullshard's rows; None of no rank's."""
    mine = {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            mine[name] = value.full_tensor()
        elif value is not None:
            mine[name] = value.as_subclass(torch.Tensor)
    everyones = [None, None]
    dist.all_gather_object(everyones, mine)
    found = {}
    for name in dict.fromkeys(name for parts in everyones for name in parts):
        parts = [parts[name] for parts in everyones if name in parts]
        meta = getattr(params[name], "shard_meta", None)
        found[name] = parts[0] if meta is None else torch.cat(parts).reshape(meta.global_shape)
    return found


def number(norm):
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def gradients(model):
    params = dict(model.named_parameters())
    found = whole({name: param.grad for name, param in params.items()}, params)
    return {f"gradient of {name}": value for name, value in found.items()}


def parameters(model):
    params = dict(model.named_parameters())
    return whole({name: param.detach() for name, param in params.items()}, params)


def train(model, steps=2, loss_of=lm_loss, before=lambda step: None, micro=1):
    """Losses, norms and weights of AdamW steps with torch's own clipping."""
    optimizer, seen, data = torch.optim.AdamW(model.parameters(), lr=1e-3), {}, rows(steps * micro)
    for step in range(steps):
        for part in range(micro):
            before(step * micro + part)
            loss = loss_of(model, data[step * micro + part])
            loss.backward()
            seen[f"loss {step}.{part}"] = loss.detach()
        if step == 0:
            seen |= gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen[f"norm {step}"] = torch.tensor(number(norm))
        optimizer.step()
        optimizer.zero_grad()
    return seen | parameters(model)


def bottom_up(api):
    return train(shard(api, model_of()))


def root_alone(api):
    return train(api.fully_shard(model_of(), mesh=MESH))


def lists_of_modules(api):
    model = model_of()
    api.fully_shard([model.blocks[0], model.blocks[1]], mesh=MESH)
    return train(api.fully_shard(model, mesh=MESH))


def gradient_sync(api):
    model = shard(api, model_of())
    return train(model, before=lambda i: model.set_requires_gradient_sync(i % 2 == 1), micro=2)


def gradient_sync_of_one_block(api):
    model = shard(api, model_of())
    return train(model, before=lambda i: model.blocks[1].set_requires_gradient_sync(i % 2 == 1, recurse=False), micro=2)


def last_backward(api):
    model = shard(api, model_of())
    return train(model, before=lambda i: model.set_is_last_backward(i % 2 == 1), micro=2)


def prefetch_setters(api):
    model = shard(api, model_of())
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return train(model)


def divide_factor(api):
    model = shard(api, model_of())
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_gradient_divide_factor(8.0)
    return train(model, steps=1)


def reshard_setters(api):
    model = shard(api, model_of())
    model.set_reshard_after_forward(False)
    model.blocks[0].set_reshard_after_forward(True, recurse=False)
    return train(model, before=lambda i: model.set_reshard_after_backward(i % 2 == 1), micro=2)


def keeping_after_forward(api):
    return train(shard(api, model_of(), reshard_after_forward=False))


def unshard_and_reshard(api):
    model = shard(api, model_of())

    def before(_step):
        model.blocks[0].unshard(async_op=True).wait()
        model.unshard()
        model.blocks[1].unshard()
        model.blocks[1].reshard()

    shape = torch.tensor(model.blocks[0].up.weight.shape)
    model.blocks[0].unshard()
    shown = model.blocks[0].up.weight.detach().clone()
    model.blocks[0].reshard()
    return {
        "shape": shape if isinstance(model.blocks[0].up.weight, DTensor) else torch.tensor([40, 24]),
        "shown": shown,
    } | (train(model, before=before))


def all_reduce_hook(api):
    model = shard(api, model_of())
    model.blocks[2].set_all_reduce_hook(lambda gradient: gradient.mul_(3))
    return train(model, steps=1)


NEWER_HINTS = {
    "set_reduce_scatter_unused_params": False,
    "set_reduce_scatter_max_input_buffers": 2,
    "set_separate_reduce_scatter_group": False,
}
"""Hints that torch 2.11 lacks; without effect on the numbers, as ours are."""


def hints(api):
    model = shard(api, model_of())
    model.set_post_optim_event(None)
    for name, value in NEWER_HINTS.items():
        if api is ours or hasattr(model, name):
            getattr(model, name)(value)
    api.share_comm_ctx([model, *model.blocks])
    return train(model)


def ignored_parameters(api):
    model = model_of()
    kept = model.blocks[0].norm.weight.requires_grad_(False)
    for block in model.blocks:
        api.fully_shard(block, mesh=MESH, ignored_params={kept})
    return train(api.fully_shard(model, mesh=MESH, ignored_params={kept}))


def frozen_parameters(api):
    model = model_of()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return train(shard(api, model))


def mixed_precision(api):
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(api, model_of(), mp_policy=policy)
    seen = train(model)
    return seen | {"output": torch.tensor(model(rows(1)[0]).dtype == torch.bfloat16)}


def output_dtype(api):
    model = model_of()
    policy = api.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)
    model = api.fully_shard(model, mesh=MESH, mp_policy=policy)
    return {"wide": torch.tensor(model(rows(1)[0]).dtype == torch.float32)} | train(model, steps=1)


class Scored(TinyLM):
    def score(self, tokens):
        return torch.nn.functional.linear(self.embed(tokens), self.embed.weight).float()


def forward_methods(api):
    model = shard(api, model_of(make=Scored))
    api.register_fsdp_forward_method(model, "score")

    def loss_of(model, tokens):
        return torch.nn.functional.cross_entropy(model.score(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return train(model, steps=1, loss_of=loss_of)


def hybrid(api):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = model_of()
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh)
    model = api.fully_shard(model, mesh=mesh)
    data, seen = rows(2), {}
    for across, tokens in zip((False, True), data, strict=True):
        model.set_requires_all_reduce(across)
        lm_loss(model, tokens).backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            seen[name] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()
    return seen


def classes(api):
    model = shard(api, model_of())
    found = [isinstance(model, api.FSDPModule), isinstance(model, TinyLM)]
    found += [isinstance(block, api.FSDPModule) and isinstance(block, Block) for block in model.blocks]
    found += [isinstance(model.embed, api.FSDPModule), type(model.blocks[0]).__name__ == "FSDPBlock"]
    return {"classes": torch.tensor(found)}


def stepped_beside_replicate(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    for tokens in rows(2):
        optimizer.zero_grad()
        lm_loss(model, tokens).backward()
        optimizer.step()
    return gradients(model) | parameters(model)


def inside_of_replicate(api):
    """torch's ``replicate`` leaves sharded blocks out."""
    model = model_of()
    model.unused.requires_grad_(False)
    for block in model.blocks:
        api.fully_shard(block, mesh=MESH)
    return stepped_beside_replicate(replicate(model))


def around_replicate(api):
    """A block that ``replicate`` took is left out of the root's unit."""
    model = model_of()
    replicate(model.blocks[0])
    for block in model.blocks[1:]:
        api.fully_shard(block, mesh=MESH)
    api.fully_shard(model, mesh=MESH)
    assert isinstance(model.embed.weight, (DTensor, ours_tensors.DTensor))
    assert not isinstance(model.blocks[0].up.weight, ours_tensors.DTensor)
    return stepped_beside_replicate(model)


def full_tensors(api):
    """Whole values as FSDP2's tutorial asks for them: of parameters, gradients, state dicts and the optimizer."""
    model, optimizer = stepped(api, 1)
    lm_loss(model, rows(2)[1]).backward()
    found = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    found |= {f"gradient of {n}": p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"state {name}": value.full_tensor() for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{key} of {number}": value.full_tensor() for key, value in values.items() if key != "step"}
    for module in (model, *model.blocks):
        module.unshard()
        module.reshard()
    return found | {f"again {name}": param.full_tensor().detach() for name, param in model.named_parameters()}


def full_state_dicts(api):
    """What torch's functions gather: everywhere, or to host memory of the first rank."""
    model, optimizer = stepped(api, 1)
    found = {}
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload, ignore_frozen_params=offload)
        state, optim = get_state_dict(model, optimizer, options=options)
        assert bool(state) == bool(optim) == (not offload or dist.get_rank() == 0)
        torch.save((state, optim), io.BytesIO())
        found |= {f"{offload} {name}": value for name, value in state.items()}
        for name, values in optim.get("state", {}).items():
            found |= {f"{offload} {key} of {name}": torch.as_tensor(value) for key, value in values.items()}
        found |= {f"{offload} groups": torch.tensor([len(group["params"]) for group in optim.get("param_groups", [])])}
        if not offload:
            again, its = stepped(api, 2)
            set_state_dict(again, its, model_state_dict=state, optim_state_dict=optim, options=options)
            found |= {f"again {name}": value for name, value in parameters(again).items()}
            for number, values in its.state_dict()["state"].items():
                found |= {f"again {number} {key}": values[key].full_tensor() for key in values if key != "step"}
    return found


def full_states_of(api, way):
    def make(seed):
        model = model_of(seed=seed)
        model.unused.requires_grad_(False)
        return shard(api, model)

    tensors = theirs_tensors if api is theirs else ours_tensors
    seen, model = resumed(tensors, make, MESH, rows(4), way)
    return seen | parameters(model)


def full_states_by_hand(api):
    return full_states_of(api, ByHand)


def full_states_by_getters(api):
    return full_states_of(api, ByGetters)


SIDE_BY_SIDE = {
    one.__name__: one
    for one in (
        bottom_up, root_alone, lists_of_modules, gradient_sync, gradient_sync_of_one_block, last_backward,
        prefetch_setters, divide_factor, reshard_setters, keeping_after_forward, unshard_and_reshard, all_reduce_hook,
        hints, ignored_parameters, frozen_parameters, mixed_precision, output_dtype, forward_methods, hybrid, classes,
        inside_of_replicate, around_replicate,
        full_tensors, full_state_dicts, full_states_by_hand, full_states_by_getters,
    )
}  # fmt: skip


def compare(scenario):
    expected, found = scenario(theirs), scenario(ours)
    assert expected.keys() == found.keys(), f"{expected.keys() ^ found.keys()}"
    tolerance = BFLOAT16 if scenario in (mixed_precision, output_dtype) else 1e-5
    for name, value in expected.items():
        ours_of_it = found[name].as_subclass(torch.Tensor).to(value.dtype)
        torch.testing.assert_close(ours_of_it, value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def stepped(api, seed):
    """A model and its optimizer after a step."""
    model = model_of(seed=seed)
    model.unused.requires_grad_(False)  # torch refuses to load no state for what could be trained
    model = shard(api, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    lm_loss(model, rows(1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def checkpoint_from(source, target, save=dcp.save):
    """A checkpoint that ``source`` wrote through torch is what ``target`` reads through torch, and goes on from."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    one, its = stepped(source, 1)
    model, optim = get_state_dict(one, its)
    saving = save({"model": model, "optim": optim}, checkpoint_id=folder[0])
    if save is dcp.async_save:
        saving.result()
        dist.barrier()
    two, mine = stepped(target, 2)
    model, optim = get_state_dict(two, mine)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(two, mine, model_state_dict=state["model"], optim_state_dict=state["optim"])
    expected, found = parameters(one), parameters(two)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for model, optimizer in ((one, its), (two, mine)):
        lm_loss(model, rows(2)[1]).backward()
        optimizer.step()
    expected, found = parameters(one), parameters(two)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def full_state_dicts_are_loaded():
    """What torch's functions broadcast or cut is taken by rows."""
    full = model_of(seed=3).state_dict()
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ):
        model = shard(ours, model_of(seed=1))
        given = full if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}
        set_model_state_dict(model, dict(given), options=options)
        for name, value in parameters(model).items():
            assert torch.equal(value, full[name]), name


def theirs_to_ours():
    checkpoint_from(theirs, ours)


def ours_to_theirs():
    checkpoint_from(ours, theirs)


def ours_to_ours():
    checkpoint_from(ours, ours)


def ours_in_the_background():
    checkpoint_from(ours, ours, dcp.async_save)


def a_step_right_after_a_save_in_the_background():
    """The files hold the values of before it."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    one, optimizer = stepped(ours, 1)
    expected = {name: value.clone() for name, value in parameters(one).items()}
    saving = dcp.async_save({"model": one.state_dict()}, checkpoint_id=folder[0])
    lm_loss(one, rows(2)[1]).backward()
    optimizer.step()
    saving.result()
    dist.barrier()
    assert any(not torch.equal(value, expected[name]) for name, value in parameters(one).items())
    two, _ = stepped(ours, 2)
    dcp.load({"model": two.state_dict()}, checkpoint_id=folder[0])
    for name, value in parameters(two).items():
        assert torch.equal(value, expected[name]), name


def a_checkpoint_is_loaded_into_the_parameters():
    """Without ``load_state_dict``: the values of a state dict are the parameters' memory."""
    for api in (theirs, ours):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        one, _ = stepped(api, 1)
        dcp.save(one.state_dict(), checkpoint_id=folder[0])
        two, _ = stepped(api, 2)
        dcp.load(two.state_dict(), checkpoint_id=folder[0])
        expected, found = parameters(one), parameters(two)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def within_torchs_ddp():
    for shard in (ours.fully_shard, fullshard.fully_shard):
        model = shard(torch.nn.Linear(8, 16))
        before = fullshard.full_state_dict(model)
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
        refused = ""
        try:
            torch.nn.parallel.DistributedDataParallel(model)
        except ShardingError as error:
            refused = str(error)
        assert "rank 0's rows" in refused
        after = fullshard.full_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in (before or {}).items())


CHECKPOINTS = {
    one.__name__: one
    for one in (
        *(theirs_to_ours, ours_to_theirs, ours_to_ours, ours_in_the_background),
        a_step_right_after_a_save_in_the_background,
        within_torchs_ddp,
        *(full_state_dicts_are_loaded, a_checkpoint_is_loaded_into_the_parameters),
    )
}


CASES = {name: functools.partial(compare, one) for name, one in SIDE_BY_SIDE.items()} | CHECKPOINTS


def main():
    global MESH
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    fullshard.init(timeout_s=100)
    MESH = init_device_mesh("cpu", (2,))
    print_result(run_checks(CASES, options.only))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
