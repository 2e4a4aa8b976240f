"""The steps of a run: their rows, however they are divided, and the learning rate of the schedulers people know."""

from dataclasses import asdict

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_scheduler
from transformers.optimization import Adafactor

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig, TrainingConfig
from fullshard.program.data import CollateSpec, padding_share, steps
from fullshard.program.train.setup.prepare import collate_spec, prepare
from fullshard.program.train.setup.steps import (
    BatchPartition,
    LearningRateSchedule,
    began_with,
    learning_rate,
    learning_rate_schedule,
    make_plan,
    schedule_notes,
)
from support.tiny_run import settings, write_rows


@pytest.mark.parametrize(
    ("ranks", "each", "accumulation"), [(8, 4, 2), (4, 4, 4), (2, 4, 8), (1, 4, 16), (16, 4, 1), (64, 1, 1)]
)
def test_other_ranks_take_the_same_rows_in_micro_batches_that_are_not_larger(ranks, each, accumulation):
    assert BatchPartition(8, 4, 2, False).on(ranks) == BatchPartition(ranks, each, accumulation, False)


@pytest.mark.parametrize(("ranks", "each", "accumulation"), [(1, 1, 6), (3, 1, 2), (2, 3, 1), (1, 6, 1)])
def test_rows_are_grouped_by_the_global_batch(ranks, each, accumulation):
    assert BatchPartition(ranks, each, accumulation, False).group == 6


def test_micro_batches_become_smaller_where_they_must():
    assert BatchPartition(3, 4, 1, False).on(2) == BatchPartition(2, 3, 2, False)


def test_a_token_budget_stays_as_it_is():
    assert BatchPartition(4, 1000, 1, True).on(2) == BatchPartition(2, 1000, 2, True)
    assert BatchPartition(4, 1000, 1, True).on(2).group == BatchPartition(4, 1000, 1, True).group
    assert BatchPartition(4, 1000, 2, True).group == 8
    with pytest.raises(ConfigError, match="4 micro-batches a step, and 3 ranks"):
        BatchPartition(4, 1000, 1, True).on(3)


def test_settings_that_were_changed_hold():
    began = BatchPartition(2, 4, 1, False)
    assert began_with(BatchPartition(1, 4, 1, False), began) == began
    changed = BatchPartition(1, 4, 2, False)
    assert began_with(changed, began) == changed
    assert began_with(changed, None) == changed


@pytest.mark.parametrize("values", [{}, {"division": None}, {"division": {"ranks": 2}}, {"division": 3}])
def test_values_of_older_versions_have_none(values):
    assert BatchPartition.began(values) is None


def test_it_is_read_from_what_it_wrote():
    partition = BatchPartition(2, 4, 3, True)
    assert BatchPartition.began({"division": asdict(partition)}) == partition


PARTITIONS = [(1, 1, 6), (3, 1, 2), (2, 3, 1), (6, 1, 1), (1, 6, 1), (1, 2, 3), (2, 1, 3)]
MIXTURE = dict.fromkeys(("train_file", "validation_file", "source_column", "target_column"))
KINDS = {
    "plain": {},
    "random": {"training__train_sampling_strategy": "random"},
    "packing": {"training__packing": True},
    "streaming": {"data__streaming": True},
    "mixture": {f"data__{name}": None for name in MIXTURE},
    "sample": {"data__max_train_samples": 17},
    "tokens": {"training__per_device_train_batch_tokens": 40},
}


def rows_of_steps(directory, changes, partition):
    """For each of the steps of two epochs the rows, target tokens and tokens of all ranks."""
    ranks, each, accumulation = partition
    sizes = {"training__per_device_train_batch_size": each, "training__gradient_accumulation_steps": accumulation}
    if "training__per_device_train_batch_tokens" in changes:
        # The budget is of a micro-batch: only ranks and accumulation divide it.
        sizes = {"training__per_device_train_batch_size": 8, "training__gradient_accumulation_steps": 6 // ranks}
    config = RunConfig.model_validate(settings(directory, **changes | sizes))
    prepared = prepare(config)
    first = make_plan(config, prepared.train_set, ranks, causal=False)
    spec = collate_spec(prepared.tokenizer, causal=False)
    found = []
    for epoch in range(2):
        plan = first.for_epoch(epoch)
        for micro_batches in zip(*(steps(prepared.train_set, plan, rank, spec) for rank in range(ranks)), strict=True):
            batches = [batch for some in micro_batches for batch in some]
            pairs = (pair for batch in batches for pair in zip(batch.indices, batch.fillers, strict=True))
            rows = sorted(index for index, filler in pairs if not filler)
            found.append((rows, sum(one.target_tokens for one in batches), sum(one.tokens for one in batches)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_run_has_the_same_rows_in_each_step(tmp_path, kind):
    changes = dict(KINDS[kind])
    if kind == "mixture":
        write_rows(tmp_path / "few.csv", 9, start=50)
        files = {"one": "train.csv", "two": "few.csv"}
        of_set = {name: {"train_file": str(tmp_path / file), "weight": 1} for name, file in files.items()}
        changes |= {"data__sets": of_set, "training__eval_strategy": "no"}
    first = rows_of_steps(tmp_path, changes, PARTITIONS[0])
    assert len({tokens for _, _, tokens in first}) > 1
    for partition in PARTITIONS[1:]:
        assert rows_of_steps(tmp_path, changes, partition) == first, partition


def test_grouping_by_step_still_saves_padding(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, training__per_device_train_batch_size=2))
    prepared = prepare(config)
    shares = []
    for how in ("group_by_length", "random"):
        training = config.training.model_copy(update={"train_sampling_strategy": how})
        plan = make_plan(config.model_copy(update={"training": training}), prepared.train_set, 2, causal=False)
        shares.append(padding_share(plan, prepared.train_set, CollateSpec(0)))
    assert shares[0] < shares[1]


def factors_of(make, steps, lr=1.0):
    """Rates that a torch scheduler gives to steps 0, 1, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("warmup", [0, 1, 4, 10, 12])
def test_linear_equals_transformers(warmup):
    schedule = LearningRateSchedule("linear", total_steps=10, steps_per_epoch=5, warmup_steps=warmup)
    expected = factors_of(lambda o: get_linear_schedule_with_warmup(o, warmup, 10), 10)
    assert [schedule.factor(step) for step in range(10)] == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_cosine_equals_transformers(warmup):
    schedule = LearningRateSchedule("cosine", total_steps=10, steps_per_epoch=5, warmup_steps=warmup)
    expected = factors_of(lambda o: get_cosine_schedule_with_warmup(o, warmup, 10), 10)
    assert [schedule.factor(step) for step in range(10)] == pytest.approx(expected)


THEIRS = [
    ("linear", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 2e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.75}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("warmup_stable_decay", {"num_decay_steps": 3}),
    ("warmup_stable_decay", {"num_decay_steps": 3, "num_stable_steps": 2, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}),
]


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(("kind", "options"), THEIRS)
@pytest.mark.filterwarnings("ignore:Both num_training_steps")
def test_the_rates_are_transformers_to_the_bit(tmp_path, kind, options, warmup):
    given = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": warmup, "learning_rate": 2e-3}
    config = RunConfig.model_validate(settings(tmp_path, training={**given, "max_steps": 10}))
    schedule = learning_rate_schedule(config, 5)

    def make(optimizer):
        more = {"num_warmup_steps": warmup, "num_training_steps": 10}
        return get_scheduler(kind, optimizer, **more, scheduler_specific_kwargs=options)

    rates = [learning_rate(config.training, schedule, step, 0) for step in range(1, 11)]
    assert rates == factors_of(make, 10, lr=2e-3)


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("polynomial", {"lr_end": 1.0}, "lr_end (1.0) must be smaller than initial lr"),
        ("cosine_with_min_lr", {"min_lr": 1.0}, "the rate would be 466.573 times learning_rate"),
        ("cosine_with_restarts", {"num_cycles": "three"}, "could not convert"),
        ("warmup_stable_decay", {"num_decay_steps": 8}, "4 steps of warm-up and 8 of decay are more than the run's 10"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "cubic"}, "Unknown decay type: cubic"),
    ],
)
def test_a_schedule_that_cannot_be_used_says_why(tmp_path, kind, options, problem):
    given = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": 4, "learning_rate": 2e-3}
    config = RunConfig.model_validate(settings(tmp_path, training={**given, "max_steps": 10}))
    with pytest.raises(ConfigError) as caught:
        learning_rate_schedule(config, 5)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"training.lr_scheduler_type: {kind} with lr_scheduler_kwargs: ")


def test_a_note_says_which_schedules_do_not_follow_the_time(tmp_path):
    for kind, options, said in [
        ("linear", {}, 0),
        ("inverse_sqrt", {}, 1),
        ("warmup_stable_decay", {"num_decay_steps": 2}, 0),
        ("warmup_stable_decay", {"num_decay_steps": 2, "num_stable_steps": 3}, 1),
    ]:
        given = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "max_train_minutes": 5}
        config = RunConfig.model_validate(settings(tmp_path, training={**given, "max_steps": 10}))
        assert len(schedule_notes(config, learning_rate_schedule(config, 5))) == said


@pytest.mark.parametrize(
    ("kind", "options"), [("inverse_sqrt", {}), ("warmup_stable_decay", {"num_decay_steps": 2, "num_stable_steps": 60})]
)
def test_a_schedule_that_does_not_follow_the_time_stays_as_it_is(kind, options):
    given = {"total_steps": 100, "steps_per_epoch": 50, "warmup_steps": 10, "warmup_share": 0.1, "options": options}
    schedule = LearningRateSchedule(kind, **given)
    within = schedule.within(100, steps=20, seconds=20, pace_s=1.5)
    assert within.total_steps == 74
    assert [within.factor(step) for step in range(100)] == [schedule.factor(step) for step in range(100)]


def test_step_equals_torch_stepped_once_an_epoch():
    schedule = LearningRateSchedule("step", total_steps=18, steps_per_epoch=3, step_epochs=2, gamma=0.7)
    expected = factors_of(lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.7), 6)
    assert [schedule.factor(step) for step in range(18)] == pytest.approx([f for f in expected for _ in range(3)])


def test_constant_after_warmup():
    schedule = LearningRateSchedule("constant", total_steps=6, steps_per_epoch=3, warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_rate_is_the_peak_times_the_factor_of_the_steps_before():
    schedule = LearningRateSchedule("linear", total_steps=10, steps_per_epoch=5)
    settings = TrainingConfig(learning_rate=2e-3)
    assert [learning_rate(settings, schedule, step, 3) for step in (1, 6)] == pytest.approx([2e-3, 1e-3])


@pytest.mark.parametrize("skipped", [0, 2])
def test_adafactors_own_rate_equals_transformers_but_for_the_scale(skipped):
    """Of a parameter whose root mean square is one; steps that were left out do not count."""
    settings = TrainingConfig(optimizer="adafactor", learning_rate=None, lr_scheduler_type="constant")
    schedule = LearningRateSchedule("constant", total_steps=20_000, steps_per_epoch=20_000)
    (group,) = Adafactor([torch.nn.Parameter(torch.ones(1))]).param_groups
    for step in (3, 100, 9_999, 10_001, 20_000):
        expected = Adafactor._get_lr(group, {"step": step - skipped, "RMS": 1.0})
        assert learning_rate(settings, schedule, step, skipped) == pytest.approx(expected)
