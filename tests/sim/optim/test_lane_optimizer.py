"""Optimizers on flat tensors: the results of the class itself, with everything around a step."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fullshard import Checkpoints, clip_grad_norm_, fully_shard
from fullshard.comm import SoloComm
from fullshard.errors import ConfigError
from fullshard.optim import AdamW8bit, Places, repoint
from fullshard.optim.lane.lane_optimizer import LaneOptimizer
from fullshard.policy import CPUOffload, MixedPrecision
from fullshard.testing import run_ranks
from support.optimizers import LAYOUTS, batches, loss_of, of_rank, sharded_weights, whole, zoo

CLASSES = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "foreach AdamW": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2, weight_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
}


def in_lanes(make):
    """The same class and options, in lanes."""
    return lambda params: LaneOptimizer(make.func, params, **make.keywords)


def assert_equal(ours, reference):
    """But for the last bit: where a vector ends, a CPU computes its last elements one by one, and rounds otherwise."""
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, atol=1e-7, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def alone(model):
    """The model sharded for one rank."""
    return fully_shard(model, SoloComm(torch.device("cpu")), wrap=None)


def flats(optimizer):
    return [flat for group in optimizer._inner.param_groups for flat in group["params"]]


def two_groups(model):
    """Matrices decay, the rest does not; in the order of names."""
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]
    known = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in known]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]


@pytest.mark.parametrize("name", CLASSES)
def test_steps_are_those_of_the_class(name):
    make = CLASSES[name]
    plain, lanes = (
        sharded_weights(lambda model, of=of: of(model.parameters()), 2, 4, wrap=None) for of in (make, in_lanes(make))
    )
    assert_equal(lanes, plain)
    assert all(value.isfinite().all() for value in lanes.values())


def run_of(make, ranks, *, steps=10, layout="one unit", groups=two_groups, **options):
    """Weights of a run with a schedule, clipping, two groups and parameters without a gradient in some steps."""
    models = [zoo() for _ in range(ranks)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **LAYOUTS[layout], **options)
        optimizer = make(groups(model))
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step / 5))
        for step, batch in enumerate(batches(steps, ranks)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, of_rank(batch, comm.rank)).backward()
            clip_grad_norm_(model, 0.5)
            if step % 5 == 3 or step == 0:
                for param in (model.many[1].weight, model.norm.bias, model.scale):
                    param.grad = None
            optimizer.step()
            schedule.step()
        return whole(model)

    return run_ranks(ranks, work)[0]


@pytest.mark.parametrize(("ranks", "layout", "steps"), [(2, "one unit", 10), (3, "a unit each", 5), (4, "one unit", 5)])
def test_schedules_clipping_groups_and_missing_gradients_are_those_of_the_class(ranks, layout, steps):
    make, options = CLASSES["AdamW"], {"layout": layout, "steps": steps}
    assert_equal(run_of(in_lanes(make), ranks, **options), run_of(make, ranks, **options))


def test_offloaded_shards_are_stepped_alike():
    make, options = CLASSES["AdamW"], {"offload_policy": CPUOffload(pin_memory=False)}
    assert_equal(run_of(in_lanes(make), 2, steps=4, **options), run_of(make, 2, steps=4, **options))


def test_gradients_that_arrive_in_another_dtype_are_stepped_alike():
    make, options = CLASSES["AdamW"], {"mp_policy": MixedPrecision(reduce="bfloat16")}
    assert_equal(run_of(in_lanes(make), 2, steps=4, **options), run_of(make, 2, steps=4, **options))


def test_a_lane_is_one_tensor_and_its_gradients_are_not_copied():
    models = [zoo() for _ in range(2)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        optimizer = LaneOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        loss_of(model, of_rank(batches(1, 2)[0], comm.rank)).backward()
        seen = []
        optimizer._inner.register_step_pre_hook(
            lambda inner, _args, _kwargs: seen.extend(p.grad.untyped_storage().data_ptr() for p in flats(optimizer))
        )
        optimizer.step()
        held = [p for p in model.parameters() if p.nbytes]
        assert len(flats(optimizer)) == len({p.untyped_storage().data_ptr() for p in held})
        assert set(seen) == {p.grad.untyped_storage().data_ptr() for p in held}
        return len(held)

    assert min(run_ranks(2, work)) > 4


def test_replaced_gradients_are_used():
    model, other = (alone(zoo()) for _ in range(2))
    data = batches(1, 1)[0]
    optimizers = [LaneOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)]
    optimizers.append(torch.optim.SGD(other.parameters(), lr=0.1))
    for one, optimizer in zip((model, other), optimizers, strict=True):
        loss_of(one, data).backward()
        one.tall.weight.grad = one.tall.weight.grad * 3
        one.many[0].weight.grad = one.many[0].weight.grad.t()  # the same memory, in another order
        optimizer.step()
    assert_equal(whole(model), whole(other))


def test_parameters_without_a_gradient_keep_value_and_state():
    model = alone(zoo())
    optimizer = LaneOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(3, 1)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if step == 1:
            left_out = model.many[2].weight
            left_out.grad = None
            before = left_out.detach().clone()
        optimizer.step()
        if step == 1:
            assert torch.equal(left_out, before)
            assert optimizer.state[left_out]["step"] == 1
    assert optimizer.state[left_out]["step"] == 2
    assert optimizer.state[model.many[1].weight]["step"] == 3
    never = alone(zoo())
    optimizer = LaneOptimizer(torch.optim.AdamW, never.parameters(), lr=0.1)
    optimizer.step()
    assert not optimizer.state


def test_states_are_views_of_what_is_stepped():
    model = alone(zoo())
    optimizer = LaneOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    for batch in batches(2, 1):
        loss_of(model, batch).backward()
        optimizer.step()
    storages = {state["exp_avg"].untyped_storage().data_ptr() for state in optimizer.state.values()}
    assert len(storages) == len(flats(optimizer)) < 5
    assert all(state["exp_avg"].shape == param.shape for param, state in optimizer.state.items())


@pytest.mark.parametrize("change", ["in place", "a number in place", "replaced", "removed"])
def test_what_is_changed_of_a_state_is_stepped_with(change):
    results = []
    for make in (CLASSES["AdamW"], in_lanes(CLASSES["AdamW"])):
        model = alone(zoo())
        optimizer = make(model.parameters())
        for step, batch in enumerate(batches(3, 1)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            state = optimizer.state[model.many[0].weight]
            if step == 1 and change == "in place":
                state["exp_avg"].zero_()
            elif step == 1 and change == "a number in place":
                state["step"].fill_(20)
            elif step == 1 and change == "replaced":
                state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])
            elif step == 1:
                del optimizer.state[model.many[0].weight]
        results.append(whole(model))
    assert_equal(*results)


@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "SGD", "NAdam", "Adagrad"])
@pytest.mark.parametrize("way", ["into lanes", "out of lanes", "lanes"])
def test_state_dicts_are_exchanged_with_the_class(name, way):
    plain, lanes = CLASSES[name], in_lanes(CLASSES[name])
    first, second = {"into lanes": (plain, lanes), "out of lanes": (lanes, plain), "lanes": (lanes, lanes)}[way]
    results = []
    for makes in ((plain, plain), (first, second)):
        model = alone(zoo())
        optimizer = makes[0](two_groups(model))
        for step, batch in enumerate(batches(6, 1)):
            if step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = makes[1](two_groups(model))
                optimizer.load_state_dict(saved)
                keys = [set(state) for state in optimizer.state_dict()["state"].values()]
                assert keys == [set(state) for state in saved["state"].values()]
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if step == 1:
                model.many[0].weight.grad = None
            optimizer.step()
        results.append(whole(model))
    assert_equal(*results)


@pytest.mark.parametrize("way", ["into lanes", "out of lanes"])
def test_checkpoints_are_exchanged_with_the_class_and_other_world_sizes(tmp_path, way):
    plain, lanes = CLASSES["AdamW"], in_lanes(CLASSES["AdamW"])
    first, second = (plain, lanes) if way == "into lanes" else (lanes, plain)

    def half(comm, folder, make, steps, load):
        model = fully_shard(zoos[comm.rank], comm, wrap=None)
        optimizer = make(two_groups(model))
        checkpoints = Checkpoints(tmp_path / folder, ranks=comm)
        if load:
            checkpoints.load(model, optimizer)
        for batch in steps:
            optimizer.zero_grad()
            joint = [part[comm.rank * len(part) // comm.size :][: len(part) // comm.size] for part in batch]
            loss_of(model, joint).backward()
            optimizer.step()
        checkpoints.save(model, optimizer, step=1 + load)
        checkpoints.close()
        return whole(model)

    results, data = [], batches(6, 4)
    for folder, makes in (("plain", (plain, plain)), ("mixed", (first, second))):
        zoos = [zoo() for _ in range(4)]
        run_ranks(4, lambda comm, name=folder, make=makes[0]: half(comm, name, make, data[:3], load=False))
        zoos = [zoo(1) for _ in range(2)]
        results.append(
            run_ranks(2, lambda comm, name=folder, make=makes[1]: half(comm, name, make, data[3:], load=True))[0]
        )
    assert_equal(*results)


def test_an_unsharded_model_is_stepped_parameter_by_parameter():
    model, other = zoo(), zoo()
    optimizers = [LaneOptimizer(torch.optim.AdamW, model.named_parameters(), lr=0.1)]
    optimizers.append(torch.optim.AdamW(other.named_parameters(), lr=0.1))
    for one, optimizer in zip((model, other), optimizers, strict=True):
        for batch in batches(2, 1):
            loss_of(one, batch).backward()
            optimizer.step()
    assert_equal(dict(model.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize("make", [CLASSES["AdamW"], in_lanes(CLASSES["AdamW"])], ids=["AdamW", "lanes"])
def test_one_that_was_made_and_stepped_before_sharding_goes_on_after_it(make):
    """Against the run that never was sharded."""
    first, *rest = batches(4, 2)
    reference, models = zoo(), [zoo() for _ in range(2)]
    plain = CLASSES["AdamW"](two_groups(reference))
    for batch in (first, *rest):
        plain.zero_grad()
        loss_of(reference, batch).backward()
        plain.step()

    def work(comm):
        model = models[comm.rank]
        optimizer = make(two_groups(model))
        loss_of(model, first).backward()
        optimizer.step()
        places = Places(model)
        fully_shard(model, comm, wrap=None)
        repoint(optimizer, [places])
        for batch in rest:
            optimizer.zero_grad()
            loss_of(model, of_rank(batch, comm.rank)).backward()
            optimizer.step()
        return whole(model), len(flats(optimizer)) if isinstance(optimizer, LaneOptimizer) else 0

    ours, runs = run_ranks(2, work)[0]
    for name, value in reference.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert runs < 15


def test_state_of_before_sharding_that_was_not_repointed_is_refused():
    models = [zoo() for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        optimizer = LaneOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        loss_of(model, batches(1, 2)[0]).backward()
        optimizer.step()
        fully_shard(model, comm, wrap=None)
        optimizer.step()

    with pytest.raises(ConfigError, match=r"repoint\(optimizer, places\)"):
        run_ranks(2, work)


def test_added_groups_and_casts_are_followed():
    results = []
    for make in (CLASSES["AdamW"], in_lanes(CLASSES["AdamW"])):
        model = alone(zoo())
        known, *later = two_groups(model)
        optimizer = make([known])
        for step, (tokens, targets) in enumerate(batches(4, 1)):
            if step == 1:
                optimizer.add_param_group(later[0])
            if step == 2:
                model.double()
                optimizer.load_state_dict(optimizer.state_dict())  # states follow the parameters' dtype
            optimizer.zero_grad()
            loss_of(model, (tokens, targets.to(model.scale.dtype))).backward()
            optimizer.step()
        results.append(whole(model))
    assert_equal(*results)


def test_frozen_parameters_stay():
    model = alone(zoo())
    optimizer = LaneOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1, weight_decay=0.5)
    model.many[0].weight.requires_grad_(False)
    before = model.many[0].weight.detach().clone()
    for batch in batches(2, 1):
        loss_of(model, batch).backward()
        optimizer.step()
    assert torch.equal(model.many[0].weight, before)


def test_a_closure_is_called_with_gradients_enabled():
    model = alone(zoo())
    optimizer = LaneOptimizer(torch.optim.SGD, model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batches(1, 1)[0])
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)


class ByNorm(torch.optim.SGD):
    """Divides a gradient by the norm of the whole tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad /= param.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, ByNorm])
def test_classes_that_are_not_elementwise_are_refused(kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__} is not elementwise: .*Use "):
        LaneOptimizer(kind, [nn.Parameter(torch.zeros(4, 4))])


class OfBlocks(torch.optim.SGD):
    """As bitsandbytes' with optim_bits=8."""

    __module__ = "bitsandbytes.optim.sgd"
    args = SimpleNamespace(optim_bits=8)


class Large(ByNorm):
    """Looks at whole tensors of 4096 elements and more, at the elements of smaller ones."""

    def step(self, closure=None):
        if sum(param.numel() for group in self.param_groups for param in group["params"]) >= 4096:
            return super().step(closure)
        return torch.optim.SGD.step(self, closure)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (AdamW8bit, "some of its states are not elementwise. Use AdamW8bit itself"),
        (OfBlocks, "quantises blocks"),
        (Large, "in a trial a matrix"),
    ],
)
def test_classes_of_blocks_are_refused_also_where_small_tensors_are_stepped_by_element(kind, text):
    with pytest.raises(ConfigError, match=f"{kind.__name__} is not elementwise: .*{text}"):
        LaneOptimizer(kind, [nn.Parameter(torch.zeros(4, 4))])


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_runs_cannot_have_are_refused(option):
    with pytest.raises(ConfigError, match=f"does not take {option}=True"):
        LaneOptimizer(torch.optim.AdamW, [nn.Parameter(torch.zeros(4))], **{option: True})


def test_options_that_the_class_refuses_are_told():
    with pytest.raises(ConfigError, match=r"AdamW is elementwise, and the test failed \(TypeError: .*'speed'"):
        LaneOptimizer(torch.optim.AdamW, [nn.Parameter(torch.zeros(4))], speed=3)


def test_a_copy_is_refused():
    optimizer = LaneOptimizer(torch.optim.AdamW, [nn.Parameter(torch.zeros(4))])
    with pytest.raises(ConfigError, match=r"Save state_dict\(\)"):
        copy.deepcopy(optimizer)
