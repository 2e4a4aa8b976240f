"""torch's ``FullyShardedDataParallel`` and ours side by side on gloo processes."""

import functools
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.t5.modeling_t5 import T5Block

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard.compat.torch_fsdp as our_fsdp
from fullshard.core.shards import rows_of
from fullshard.errors import ProcessGroupError, ShardingError
from support.both_fsdps import OURS, TORCH, compare, language_model, whole, wrapped
from support.models import Block, batches, lm_loss, seq2seq_loss, t5
from support.rank_script import parse, print_result, run_checks

BF16 = torch.bfloat16
CASES = {}


def case(work):
    CASES[work.__name__] = work
    return work


def seq2seq_model():
    torch.manual_seed(0)
    return t5()


def blocks(house):
    return house.wrap.ModuleWrapPolicy({Block})


def names(model):
    """Of the wrapped modules."""
    wrappers = (our_fsdp.FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel)
    found = [name for name, module in model.named_modules() if isinstance(module, wrappers)]
    return {name.replace("_fsdp_wrapped_module.", "") for name in found}


def train(house, model, loss_of=lm_loss, steps=2):
    """Losses, norms, the gradients of the last step and the weights after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for tokens in batches(steps, 4):
        optimizer.zero_grad()
        loss = loss_of(model, tokens.chunk(2)[dist.get_rank()])
        loss.backward()
        norms.append(model.clip_grad_norm_(1.0).item())
        losses.append(loss.item())
        grads = whole(house, model, grads=True)
        optimizer.step()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": whole(house, model)}


def same_run(arguments, make=language_model, loss_of=lm_loss, tolerance=1e-5):
    """Both train alike and wrap the same modules, with ``arguments(house)``."""
    runs = []
    for one in (OURS, TORCH):
        model = wrapped(one, make(), **arguments(one))
        runs.append((train(one, model, loss_of), names(model)))
    (ours, our_names), (theirs, their_names) = runs
    assert our_names == their_names, (our_names, their_names)
    compare(ours, theirs, tolerance)


@case
def public_attributes():
    """Those of every wrapper, with torch's values."""

    def of(house):
        arguments = {"sharding_strategy": house.ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True}
        model = wrapped(house, language_model(), auto_wrap_policy=blocks(house), **arguments)
        values = ("cpu_offload", "mixed_precision", "forward_prefetch", "limit_all_gathers", "compute_device")
        return [
            ({name: str(getattr(one, name)) for name in (*values, "rank", "world_size")})
            | {name: getattr(one, name).name for name in ("sharding_strategy", "backward_prefetch", "training_state")}
            for one in house.FullyShardedDataParallel.fsdp_modules(model)
        ]

    assert of(OURS) == of(TORCH), (of(OURS), of(TORCH))


@case
def no_policy():
    same_run(lambda house: {})


@case
def ModuleWrapPolicy():
    same_run(lambda house: {"auto_wrap_policy": blocks(house)})


@case
def transformer_auto_wrap_policy():
    same_run(
        lambda house: {
            "auto_wrap_policy": functools.partial(
                house.wrap.transformer_auto_wrap_policy, transformer_layer_cls={T5Block}
            )
        },
        seq2seq_model,
        seq2seq_loss,
    )


@case
def size_based_auto_wrap_policy():
    def untied():
        model = language_model()
        model.head = nn.Linear(24, 50, bias=False)
        return model

    def arguments(house):
        policy = functools.partial(house.wrap.size_based_auto_wrap_policy, min_num_params=900)
        return {"auto_wrap_policy": policy}

    same_run(arguments, untied)


@case
def lambda_auto_wrap_policy():
    same_run(
        lambda house: {
            "auto_wrap_policy": functools.partial(
                house.wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, (Block, nn.LayerNorm))
            )
        }
    )


@case
def or_policy():
    def policy(house):
        part = functools.partial
        return part(
            house.wrap._or_policy,
            policies=[
                part(house.wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
                part(house.wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            ],
        )

    same_run(lambda house: {"auto_wrap_policy": policy(house)})


@case
def CustomPolicy():
    def choose(house, module):
        if isinstance(module, Block):
            return {"sharding_strategy": house.ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.LayerNorm)

    same_run(lambda house: {"auto_wrap_policy": house.wrap.CustomPolicy(functools.partial(choose, house))})


@case
def torchs_own_policy():
    same_run(lambda house: {"auto_wrap_policy": torch_wrap.ModuleWrapPolicy({Block, nn.LayerNorm})})


@case
def always_wrap_policy():
    def untied():
        model = language_model()
        model.head = nn.Linear(24, 50, bias=False)
        del model.blocks[1:]
        return model.blocks[0]

    chosen = []
    for one in (OURS, TORCH):
        model = wrapped(one, untied(), auto_wrap_policy=one.wrap.always_wrap_policy)
        model(torch.ones(2, 24)).sum().backward()
        chosen.append((names(model), whole(one, model, grads=True)))
    assert chosen[0][0] == chosen[1][0]
    compare(chosen[0][1], chosen[1][1])


@case
def FULL_SHARD():
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "sharding_strategy": house.ShardingStrategy.FULL_SHARD})


@case
def SHARD_GRAD_OP():
    same_run(
        lambda house: {"auto_wrap_policy": blocks(house), "sharding_strategy": house.ShardingStrategy.SHARD_GRAD_OP}
    )


@case
def NO_SHARD():
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "sharding_strategy": house.ShardingStrategy.NO_SHARD})


def hybrid(strategy, shape):
    mesh = init_device_mesh("cpu", shape)
    same_run(
        lambda house: {
            "auto_wrap_policy": blocks(house),
            "sharding_strategy": house.ShardingStrategy[strategy],
            "device_mesh": mesh,
        }
    )


@case
def HYBRID_SHARD():
    hybrid("HYBRID_SHARD", (1, 2))


@case
def HYBRID_SHARD_ZERO2():
    hybrid("_HYBRID_SHARD_ZERO2", (1, 2))


@case
def hybrid_without_groups():
    """One machine, as ``LOCAL_WORLD_SIZE`` says; torch counts GPUs, so that it is compared with FULL_SHARD."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    ours = wrapped(
        OURS, language_model(), sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=blocks(OURS)
    )
    assert {param.shard_comm.size for param in ours.parameters()} == {2}
    theirs = wrapped(TORCH, language_model(), auto_wrap_policy=blocks(TORCH))
    compare(train(OURS, ours), train(TORCH, theirs))
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    inner = wrapped(OURS, language_model().blocks[0], sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD)
    outer = wrapped(OURS, nn.Sequential(inner, nn.Linear(24, 24)), sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD)
    assert {param.shard_comm.size for param in outer.parameters()} == {1}
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())
    with pytest.raises(ProcessGroupError, match="same number of ranks"):
        wrapped(OURS, language_model(), sharding_strategy=OURS.ShardingStrategy.HYBRID_SHARD)
    del os.environ["LOCAL_WORLD_SIZE"]


@case
def process_group():
    group = dist.new_group([0, 1])
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "process_group": group})


@case
def pair_of_process_groups():
    shard = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    same_run(
        lambda house: {
            "auto_wrap_policy": blocks(house),
            "process_group": (shard, alone),
            "sharding_strategy": house.ShardingStrategy.HYBRID_SHARD,
        }
    )


@case
def device_mesh():
    mesh = init_device_mesh("cpu", (2,))
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "device_mesh": mesh})


@case
def BACKWARD_PRE():
    same_run(
        lambda house: {"auto_wrap_policy": blocks(house), "backward_prefetch": house.BackwardPrefetch.BACKWARD_PRE}
    )


@case
def BACKWARD_POST():
    same_run(
        lambda house: {"auto_wrap_policy": blocks(house), "backward_prefetch": house.BackwardPrefetch.BACKWARD_POST}
    )


@case
def no_backward_prefetch():
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "backward_prefetch": None})


@case
def forward_prefetch():
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "forward_prefetch": True})


@case
def limit_all_gathers():
    same_run(lambda house: {"auto_wrap_policy": blocks(house), "limit_all_gathers": False})


@case
def use_orig_params():
    """Without it torch shows flat parameters; losses and norms are the same, the names are ours alone."""
    runs = []
    for one in (OURS, TORCH):
        model = wrapped(one, language_model(), use_orig_params=False, auto_wrap_policy=blocks(one))
        tokens = batches(1, 4)[0].chunk(2)[dist.get_rank()]
        loss = lm_loss(model, tokens)
        loss.backward()
        runs.append((loss.item(), model.clip_grad_norm_(1.0).item(), whole(one, model)))
    compare(*runs)


@case
def cpu_offload():
    """torch's needs an accelerator, so that ours is compared with torch's without offload."""
    ours = wrapped(OURS, language_model(), auto_wrap_policy=blocks(OURS), cpu_offload=OURS.CPUOffload(True))
    theirs = wrapped(TORCH, language_model(), auto_wrap_policy=blocks(TORCH), cpu_offload=TORCH.CPUOffload(False))
    compare(train(OURS, ours), train(TORCH, theirs))


def mixed_run(tolerance=2e-2, **settings):
    def arguments(house):
        return {"auto_wrap_policy": blocks(house), "mixed_precision": house.MixedPrecision(**settings)}

    losses = []
    for one in (OURS, TORCH):
        model = wrapped(one, language_model(), **arguments(one))
        losses.append(train(one, model)["losses"])
        assert all(param.dtype == torch.float32 for param in model.parameters())
    compare(*losses, tolerance=tolerance)


@case
def param_dtype():
    mixed_run(param_dtype=BF16)


@case
def reduce_dtype():
    mixed_run(param_dtype=BF16, reduce_dtype=torch.float32)


class Noting(nn.Module):
    """Notes the dtypes in its parts, with a buffer and batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 1.5))
        self.seen = []

    def forward(self, x):
        y = self.first(x.to(self.first.weight.dtype))
        self.seen.append((x.dtype, y.dtype, self.scale.dtype))
        z = self.norm(y)
        self.seen.append((z.dtype, self.norm.weight.dtype, self.norm.running_mean.dtype))
        return (z * self.scale).to(z.dtype)


def noted(house, policy=(), **settings):
    model = nn.Sequential(Noting(), nn.Linear(4, 2))
    found = wrapped(
        house,
        model,
        mixed_precision=house.MixedPrecision(**settings),
        auto_wrap_policy=house.wrap.ModuleWrapPolicy(policy) if policy else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = found(torch.linspace(-1, 1, 16).view(4, 4))
    out.float().square().mean().backward()
    grads = {name: grad.dtype for name, grad in whole(house, found, grads=True).items()}
    buffers = {name.replace("_fsdp_wrapped_module.", ""): b.dtype for name, b in found.named_buffers()}
    return model[0].seen, out.dtype, names(found), grads, buffers


def same_dtypes(**settings):
    ours, theirs = (noted(one, **settings) for one in (OURS, TORCH))
    assert ours == theirs, (ours, theirs)


@case
def buffer_dtype():
    same_dtypes(policy={Noting}, param_dtype=BF16, buffer_dtype=BF16)


@case
def cast_forward_inputs():
    same_dtypes(policy={Noting}, param_dtype=BF16, cast_forward_inputs=True)


@case
def cast_root_forward_inputs():
    same_dtypes(policy={Noting}, param_dtype=BF16, cast_root_forward_inputs=False)


@case
def module_classes_to_ignore():
    same_dtypes(policy={nn.Linear}, param_dtype=BF16, cast_forward_inputs=True, reduce_dtype=BF16)
    same_dtypes(policy={Noting}, param_dtype=BF16, buffer_dtype=BF16, _module_classes_to_ignore=[nn.BatchNorm1d])


@case
def keep_low_precision_grads():
    """torch's runs with flat parameters only, since tensors have a ``grad_dtype``."""
    norms = []
    for one in (OURS, TORCH):
        settings = one.MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True)
        model = wrapped(
            one, language_model(), mixed_precision=settings, auto_wrap_policy=blocks(one), use_orig_params=one is OURS
        )
        lm_loss(model, batches(1, 4)[0].chunk(2)[dist.get_rank()]).backward()
        assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {BF16}
        norms.append(model.clip_grad_norm_(1e9).item())
    compare(*norms, tolerance=2e-2)
    model = wrapped(OURS, language_model(), mixed_precision=settings, auto_wrap_policy=blocks(OURS))
    lm_loss(model, batches(1, 4)[0].chunk(2)[dist.get_rank()]).backward()
    assert {grad.dtype for grad in whole(OURS, model, grads=True).values()} == {BF16}


@case
def ignored_modules():
    losses = []
    for one in (OURS, TORCH):
        model = language_model()
        norm = model.blocks[1].norm
        model = wrapped(one, model, ignored_modules=[norm], auto_wrap_policy=one.wrap.ModuleWrapPolicy({nn.LayerNorm}))
        loss = lm_loss(model, batches(1, 4)[0].chunk(2)[dist.get_rank()])
        loss.backward()
        assert norm.weight.shape == (24,)
        losses.append((loss.item(), norm.weight.grad, names(model), model.clip_grad_norm_(1.0).item()))
    assert losses[0][2] == losses[1][2]
    compare(losses[0][:2], losses[1][:2])


@case
def ignored_states():
    for one in (OURS, TORCH):
        model = language_model()
        bias = model.blocks[1].side.bias
        model = wrapped(one, model, ignored_states=[bias], auto_wrap_policy=blocks(one))
        lm_loss(model, batches(1, 4)[0].chunk(2)[dist.get_rank()]).backward()
        assert bias.shape == bias.grad.shape == (24,)
        assert any(param is bias for param in model.parameters())


@case
def sync_module_states():
    """torch's needs an accelerator, so that ours is compared with what rank 0 had."""
    model, expected = language_model(), dict(language_model().named_parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())
    model = wrapped(OURS, model, sync_module_states=True, auto_wrap_policy=blocks(OURS))
    compare(whole(OURS, model), {name: param.detach() for name, param in expected.items()}, tolerance=0)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)))


@case
def param_init_fn():
    def fill(module):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for index, param in enumerate(module.parameters(recurse=False)):
                param.copy_(torch.arange(rows_of(param).numel()).view_as(param) + 10 * index)

    states = []
    for one in (OURS, TORCH):
        with torch.device("meta"):
            model = small()
        policy = one.wrap.ModuleWrapPolicy({nn.Sequential})
        states.append(whole(one, wrapped(one, model, param_init_fn=fill, auto_wrap_policy=policy)))
    compare(*states, tolerance=0)


@case
def meta_with_sync_module_states():
    """How a large checkpoint is loaded on rank 0 alone; torch's needs an accelerator."""
    expected = dict(small().named_parameters())
    model, init = small(), None
    if dist.get_rank():
        with torch.device("meta"):
            model = small()

        def init(module):
            module.to_empty(device="cpu", recurse=False)

    model = wrapped(OURS, model, param_init_fn=init, sync_module_states=True)
    compare(whole(OURS, model), {name: param.detach() for name, param in expected.items()}, tolerance=0)


@case
def device_id():
    for one in (OURS, TORCH):
        assert wrapped(one, small(), device_id=torch.device("cpu")).compute_device == torch.device("cpu")


@case
def attributes():
    for one in (OURS, TORCH):
        inner = small()
        inner.label = "mine"
        model = wrapped(one, inner, auto_wrap_policy=one.wrap.ModuleWrapPolicy({nn.Sequential}))
        assert model.module is inner
        assert model.label == "mine"
        assert isinstance(model[1], one.FullyShardedDataParallel)
        assert len(list(model)) == 2
        assert (model.rank, model.world_size) == (dist.get_rank(), 2)
        assert model.sharding_strategy == one.ShardingStrategy.FULL_SHARD
        assert not hasattr(model, "missing")


@case
def printed():
    ours, theirs = (
        repr(wrapped(one, small(), auto_wrap_policy=one.wrap.ModuleWrapPolicy({nn.Linear}))) for one in (OURS, TORCH)
    )
    assert ours == theirs, f"{ours}\n{theirs}"


@case
def fsdp_modules_and_check_is_root():
    for one in (OURS, TORCH):
        model = wrapped(one, small(), auto_wrap_policy=one.wrap.ModuleWrapPolicy({nn.Sequential, nn.Linear}))
        around = nn.Sequential(model, nn.Linear(3, 3))
        model(torch.ones(1, 4))
        of = one.FullyShardedDataParallel.fsdp_modules
        assert of(around) == [model, model[0], model[1], model[1][0]]
        assert of(around, root_only=True) == [model]
        assert [each.check_is_root() for each in of(model)] == [True, False, False, False]


@case
def nested_by_hand():
    def make(house):
        model = language_model()
        model.blocks[1] = wrapped(house, model.blocks[1])
        model.blocks[2].up = wrapped(house, model.blocks[2].up)
        return wrapped(house, model)

    ours, theirs = make(OURS), make(TORCH)
    assert names(ours) == names(theirs)
    compare(train(OURS, ours), train(TORCH, theirs))


@case
def several_roots():
    grads = []
    for one in (OURS, TORCH):
        torch.manual_seed(0)
        model = nn.Sequential(wrapped(one, nn.Linear(4, 4)), nn.ReLU(), wrapped(one, nn.Linear(4, 2)))
        model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
        grads.append([whole(one, part, grads=True) for part in (model[0], model[2])])
        assert one.FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model[0], model[2]]
    compare(*grads)


@case
def wrap_and_enable_wrap():
    def make(house):
        torch.manual_seed(0)
        arguments = {"device_id": torch.device("cpu"), "use_orig_params": True}
        with house.wrap.enable_wrap(wrapper_cls=house.FullyShardedDataParallel, **arguments):
            inner = house.wrap.wrap(nn.Linear(4, 4), sharding_strategy=house.ShardingStrategy.SHARD_GRAD_OP)
            model = house.wrap.wrap(nn.Sequential(inner, nn.Linear(4, 2)))
        assert isinstance(house.wrap.wrap(nn.Linear(2, 2)), nn.Linear)
        model(torch.ones(2, 4) + dist.get_rank()).square().sum().backward()
        return names(model), model[0].sharding_strategy.name, whole(house, model, grads=True)

    ours, theirs = make(OURS), make(TORCH)
    assert ours[:2] == theirs[:2]
    compare(ours[2], theirs[2])


@case
def no_sync():
    grads = []
    for one in (OURS, TORCH):
        model = wrapped(one, language_model(), auto_wrap_policy=blocks(one))
        first, second = batches(2, 4)
        with model.no_sync():
            lm_loss(model, first.chunk(2)[dist.get_rank()]).backward()
        lm_loss(model, second.chunk(2)[dist.get_rank()]).backward()
        grads.append(whole(one, model, grads=True))
        with pytest.raises((RuntimeError, ShardingError), match=r"root|outermost"), model.blocks[0].no_sync():
            pass
    compare(*grads)


@case
def clip_grad_norm_():
    for arguments in ((1e-2,), (0.5, 1.0), (1e-3, float("inf")), (1e-3, "inf")):
        found = []
        for one in (OURS, TORCH):
            model = wrapped(one, language_model(), auto_wrap_policy=blocks(one))
            lm_loss(model, batches(1, 4)[0].chunk(2)[dist.get_rank()]).backward()
            found.append((model.clip_grad_norm_(*arguments).item(), whole(one, model, grads=True)))
        compare(*found)


@case
def apply():
    states = []

    def double(module):
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
            with torch.no_grad():
                module.weight.mul_(2)

    for one in (OURS, TORCH):
        model = wrapped(one, language_model(), auto_wrap_policy=blocks(one))
        order = []
        assert model.apply(double) is model
        model.apply(lambda module, order=order: order.append(type(module).__name__))
        states.append((whole(one, model), order))
    compare(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


@case
def named_parameters_and_buffers():
    found = []
    for one in (OURS, TORCH):
        model = wrapped(
            one,
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            auto_wrap_policy=one.wrap.ModuleWrapPolicy({nn.Linear}),
        )
        with one.FullyShardedDataParallel.summon_full_params(model):
            found.append(([n for n, _ in model.named_parameters()], [n for n, _ in model.named_buffers()]))
    assert found[0] == found[1]


@case
def ShardedGradScaler():
    scales = []
    for one in (OURS, TORCH):
        torch.manual_seed(0)
        model = wrapped(one, nn.Linear(16, 16, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = one.scaler(device="cpu", init_scale=16.0, growth_interval=2)
        history = []
        for step in range(5):
            scaler.scale(model(torch.ones(1, 16)).mean()).backward()
            if step == 2 and dist.get_rank() == 1:
                grad = next(model.parameters()).grad
                (grad.to_local() if one is OURS else grad).view(-1)[0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append(scaler.get_scale())
        scales.append(
            (
                history,
                whole(one, model)["weight"],
                scaler.state_dict().keys()
                == {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"},
            )
        )
    assert scales[0][0] == scales[1][0], scales
    assert scales[0][2] == scales[1][2] is True
    compare(scales[0][1], scales[1][1])


def main():
    options = parse(CASES, __doc__)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    print_result(run_checks(CASES, options.only))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
