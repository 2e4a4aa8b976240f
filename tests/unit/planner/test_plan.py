"""Properties of plans: what must hold whatever the figures are."""

import resource
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fullshard
from fullshard import ShardingStrategy, optim
from fullshard.core.comm import MemoryMeter
from fullshard.errors import ConfigError, ModelError
from fullshard.planner import Plan, PlannedStep, TooMuchWorkError, highest, simulate
from support.planned import batch, make_model

MIB = 1 << 20


class Wide(nn.Module):
    """Blocks of linear layers; ``loss`` is the mean of the output."""

    def __init__(self, layers=4, width=256):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def plan_wide(world_size=1, rows=8, **options):
    loss = options.pop("loss_fn", lambda model, x: model(x).mean())
    options.setdefault("rank", 0)
    return fullshard.plan(Wide, lambda: torch.zeros(rows, 256), world_size=world_size, loss_fn=loss, **options)


def test_more_ranks_never_predict_more():
    peaks = [plan_wide(size).peak_bytes for size in (1, 2, 3, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0] / 2


def test_a_smaller_batch_never_predicts_more():
    plans = [fullshard.plan(make_model, partial(batch, rows), world_size=2, rank=0) for rows in (1, 3, 8)]
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("NO_SHARD", marks=pytest.mark.slow)])
def test_checkpointing_never_predicts_more(strategy):
    plain, saving = (
        fullshard.plan(
            partial(make_model, checkpointing=on),
            partial(batch, 8, 128),
            world_size=2,
            rank=0,
            strategy=ShardingStrategy[strategy],
        )
        for on in (False, True)
    )
    assert saving.peak_bytes < plain.peak_bytes
    assert saving.parts["activations_and_temporaries"] < plain.parts["activations_and_temporaries"]


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_the_plans_of_all_ranks_add_up_to_the_model(size):
    plans = [plan_wide(size, rank=rank) for rank in range(size)]
    assert sum(plan.parameters for plan in plans) == sum(p.numel() for p in Wide().parameters())


def test_no_shard_on_one_rank_is_the_unsharded_model():
    plan = plan_wide(1, strategy=ShardingStrategy.NO_SHARD, rows=0)
    held = sum(p.nbytes for p in Wide().parameters())
    steps = 4 * len(list(Wide().parameters()))  # AdamW counts the steps of each parameter
    assert plan.parts["shards"] == held
    assert plan.parts["optimizer_state"] == 2 * held + steps
    assert plan.parts["gathered_units"] == 0
    assert plan.collectives == plan.sent_bytes == {}
    # Built before it is sharded, one unit after the other: the model and a copy of its largest unit.
    assert held <= plan.phase_peaks["before_first_step"] < 2 * held
    assert 0 <= plan.phase_peaks["optimizer"] - 4 * held - steps < 64


def test_no_shard_on_one_rank_peaks_where_the_unsharded_model_does():
    plan = plan_wide(1, strategy=ShardingStrategy.NO_SHARD)
    with MemoryMeter(torch.device("cpu")) as tracker:
        model = Wide()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.zeros(8, 256)).mean().backward()
            optimizer.step()
    assert plan.peak_bytes == pytest.approx(
        tracker.peak_bytes - tracker.start_bytes, rel=0.005
    )  # the engine's order differs by one gradient of an activation


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
def test_the_parts_add_up_to_the_highest_phase(strategy):
    plan = fullshard.plan(make_model, batch, world_size=2, rank=0, strategy=strategy)
    assert sum(plan.parts.values()) == plan.peak_bytes
    assert plan.peak_bytes == max(size for phase, size in plan.phase_peaks.items() if phase != "before_first_step")
    assert all(size >= 0 for size in plan.parts.values())


def test_a_hybrid_strategy_sends_inside_and_across():
    hybrid = partial(plan_wide, strategy=ShardingStrategy.HYBRID_SHARD)
    plan = hybrid(4, ranks_each=2)
    assert plan.collectives["all_reduce"] > plan_wide(4).collectives["all_reduce"]
    assert plan.parts["shards"] == plan_wide(2).parts["shards"]
    with pytest.raises(ConfigError, match=r"ranks_each must divide world_size \(4\); got 3"):
        hybrid(4, ranks_each=3)


def test_a_plan_does_not_allocate_what_it_plans():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = fullshard.plan(
        lambda: Wide(layers=4, width=4096), lambda: torch.zeros(4, 4096), world_size=64, rank=0, loss_fn=_mean
    )
    assert plan.phase_peaks["before_first_step"] > 2000 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # ru_maxrss is in KiB


def _mean(model, x):
    return model(x).mean()


def test_the_fullest_rank_is_planned():
    plans = [fullshard.plan(make_model, batch, world_size=2, rank=rank, optimizer_fn=_muon) for rank in (0, 1, None)]
    assert plans[2] == max(plans[:2], key=lambda plan: plan.peak_bytes)


def _muon(model):
    return optim.Muon(optim.muon_groups(model), lr=1e-3)


def test_what_depends_on_computed_values_is_refused():
    def reading(model, x):
        return model(x).mean() * (2 if model(x).sum() > 0 else 1)

    with pytest.raises(ModelError, match="reads a number that has to be computed"):
        plan_wide(loss_fn=reading)


def test_what_a_step_reads_may_be_assumed_and_what_the_model_reads_may_not():
    def build(comm, *, forward_reads):
        model = fullshard.fully_shard(Wide(), comm)
        if forward_reads:
            model.blocks[0].register_forward_hook(lambda _module, _inputs, output: output * output.max().item())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            optimizer.zero_grad()
            loss = model(torch.zeros(8, 256)).mean()
            loss.backward()
            assert loss.item() == 3.0
            optimizer.step()

        return PlannedStep(model, optimizer, step, assumed=lambda: 3.0)

    assert simulate(partial(build, forward_reads=False), 0, 2).peaks["optimizer"] > 0
    with pytest.raises(ModelError, match="reads a number"):
        simulate(partial(build, forward_reads=True), 0, 2)


def test_an_evaluation_is_a_phase_of_its_own():
    def build(comm, evaluates=None):
        model = fullshard.fully_shard(Wide(), comm)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            optimizer.zero_grad()
            model(torch.zeros(8, 256)).mean().backward()
            optimizer.step()

        @torch.no_grad()
        def evaluate(_tracker):
            model(torch.zeros(4096, 256))

        return PlannedStep(model, optimizer, step, after={"evaluation": evaluate} if evaluates else {})

    without, with_one = simulate(build, 0, 2), simulate(partial(build, evaluates=True), 0, 2)
    assert with_one.peaks["evaluation"] > 4096 * 1024 * 4
    assert "evaluation" not in without.peaks
    assert (with_one.parts, with_one.account, with_one.sent) == (without.parts, without.account, without.sent)


def test_a_phase_that_is_too_much_work_is_named_and_the_steps_stay():
    def build(comm):
        model = fullshard.fully_shard(Wide(), comm)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            optimizer.zero_grad()
            model(torch.zeros(8, 256)).mean().backward()
            optimizer.step()

        def too_much(_tracker):
            raise TooMuchWorkError

        return PlannedStep(
            model, optimizer, step, after={"quick": lambda tracker: None, "late": too_much, "last": too_much}
        )

    found = simulate(build, 0, 2)
    assert found.unplanned == ("late", "last")
    assert found.peaks["quick"] > 0
    assert found.peaks["backward"] > 0


def test_whole_numbers_of_the_batch_are_known():
    def masked(model, inputs):
        x, mask = inputs
        return model(x[mask.nonzero().squeeze(1)]).mean() if mask.any() else model(x).mean()

    def planned(kept):
        mask = (torch.arange(8) < kept).long()
        return fullshard.plan(Wide, lambda: (torch.zeros(8, 256), mask), world_size=1, loss_fn=masked).peak_bytes

    assert planned(1) < planned(7) <= planned(8)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "at least 1; got 0"),
        ({"world_size": 2, "rank": 2}, "0 to 1; got 2"),
        ({"weights": object()}, "does not support weights="),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        plan_wide(**arguments)


def test_nothing_is_left_behind():
    plan_wide(2)
    assert float(torch.ones(3).sum()) == 3.0
    storage = torch.ones(4).untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_device_needs_one_percent_more_than_the_peak():
    plan = Plan(1, 0, 1, 1000, {}, {}, {"before_first_step": 900, "forward": 1000}, {}, {}, {})
    assert (plan.fits(1009), plan.fits(1010)) == (False, True)
    for phase in ("before_first_step", "evaluation"):
        assert Plan(1, 0, 1, 1000, {}, {}, {phase: 2000, "forward": 1000}, {}, {}, {}).needed_bytes == 2020


def test_a_model_on_the_meta_device_is_planned_as_one_with_memory():
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}

    def llama(device):
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))

    ids = torch.ones(2, 16, dtype=torch.int64)
    plans = [
        fullshard.plan(partial(llama, device), lambda: {"input_ids": ids, "labels": ids}, world_size=2, rank=0)
        for device in ("cpu", "meta")  # its rotary table is a buffer that its module fills after sharding
    ]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    assert plans[1].phase_peaks["before_first_step"] < plans[0].phase_peaks["before_first_step"]


def lora(model_fn):
    def make():
        return get_peft_model(model_fn(), LoraConfig(task_type="SEQ_2_SEQ_LM", r=4)).train()

    return make


def mixtral(experts=None):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}
    config = MixtralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    if experts is not None:
        config._experts_implementation = experts
    return MixtralForCausalLM(config).train()


def plan_mixtral(size, rank=None, rows=2, **options):
    ids = torch.ones(rows, 32, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return fullshard.plan(partial(mixtral, **options), lambda: inputs, world_size=size, rank=rank)


def test_an_adapters_model_needs_no_gradients_and_no_state_of_what_is_frozen():
    full, adapted = (fullshard.plan(make, batch, world_size=2, rank=0) for make in (make_model, lora(make_model)))
    assert 0 < adapted.parts["optimizer_state"] < full.parts["optimizer_state"] / 5
    # Of the full model's state, gradients and shards, which a step of the optimizer has, a quarter is shards.
    assert adapted.phase_peaks["optimizer"] < full.phase_peaks["optimizer"] / 3
    assert adapted.peak_bytes < full.peak_bytes


def test_frozen_weights_replicated_send_nothing_and_are_held_on_every_rank():
    sharded, kept = (
        fullshard.plan(lora(make_model), batch, world_size=2, rank=0, frozen=where) for where in ("shard", "replicate")
    )
    frozen = sum(p.nbytes for p in make_model().parameters())
    assert kept.parts["shards"] - sharded.parts["shards"] == pytest.approx(frozen / 2, rel=0.01)
    assert kept.sent_bytes["all_gather"] < sharded.sent_bytes["all_gather"] / 5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft's own use of a deprecated name
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_an_adapters_plans_of_all_ranks_add_up_to_the_model(size):
    plans = [fullshard.plan(lora(make_model), batch, world_size=size, rank=rank) for rank in range(size)]
    assert sum(plan.parameters for plan in plans) == sum(p.numel() for p in lora(make_model)().parameters())


@pytest.mark.slow
def test_a_mixture_of_experts_is_planned_whatever_its_routing():
    peaks = [plan_mixtral(size).peak_bytes for size in (1, 2, 4)]
    assert peaks == sorted(peaks, reverse=True)
    assert sum(plan_mixtral(3, rank).parameters for rank in range(3)) == sum(p.numel() for p in mixtral().parameters())
    assert plan_mixtral(2, 0, rows=1).peak_bytes < plan_mixtral(2, 0, rows=8).peak_bytes


def test_a_loop_over_the_experts_that_were_chosen_is_refused():
    with pytest.raises(ModelError, match=r"reads a number|depends on"):
        plan_mixtral(1, experts="eager")


def test_both_checkpointings_predict_less_than_none():
    def peak(**changes):
        def make():
            model = make_model()
            if changes:
                model.gradient_checkpointing_enable(changes)
            if changes.get("use_reentrant"):
                model.enable_input_require_grads()
            return model

        return fullshard.plan(make, partial(batch, 8, 128), world_size=2, rank=0).peak_bytes

    plain = peak()
    assert peak(use_reentrant=False) < plain
    assert peak(use_reentrant=True) < plain


@pytest.mark.parametrize("make", [make_model, lora(make_model)], ids=["full", "lora"])
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, pytest.param(ShardingStrategy.SHARD_GRAD_OP, marks=pytest.mark.slow)]
)
def test_more_ranks_never_predict_more_of_a_transformer(make, strategy):
    peaks = [fullshard.plan(make, batch, world_size=n, rank=0, strategy=strategy).peak_bytes for n in (1, 2, 4, 16)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
def test_the_rank_is_chosen_that_is_fullest_in_any_phase():
    """Rank 1 holds more in a step, rank 0 most before the first one: its plan says what a device must have."""

    def build(comm):
        passing = torch.empty(50_000_000 * (2 - comm.rank), dtype=torch.uint8)
        model = fullshard.fully_shard(make_model(), comm)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        del passing

        def step():
            optimizer.zero_grad()
            model(**batch()).loss.backward()
            optimizer.step()

        return PlannedStep(model, optimizer, step)

    for ranks in ([0, 1], [1, 0]):
        assert highest(build, ranks, 2).rank == 0
