"""Which rows a step has does not depend on how ranks, batch size and accumulation divide it."""

import pytest

from fullshard.program.config import RunConfig
from fullshard.program.data import padding_share, steps
from fullshard.program.train.setup.prepare import collate_spec, prepare
from fullshard.program.train.setup.steps import make_plan
from support.tiny_run import settings, write_rows

DIVISIONS = [(1, 1, 6), (3, 1, 2), (2, 3, 1), (6, 1, 1), (1, 6, 1), (1, 2, 3), (2, 1, 3)]
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


def rows_of_steps(directory, changes, division):
    """For each of the steps of two epochs the rows, target tokens and tokens of all ranks."""
    ranks, each, accumulation = division
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
    first = rows_of_steps(tmp_path, changes, DIVISIONS[0])
    assert len({tokens for _, _, tokens in first}) > 1
    for division in DIVISIONS[1:]:
        assert rows_of_steps(tmp_path, changes, division) == first, division


def test_grouping_by_step_still_saves_padding(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, training__per_device_train_batch_size=2))
    prepared = prepare(config)
    shares = []
    for how in ("group_by_length", "random"):
        training = config.training.model_copy(update={"train_sampling_strategy": how})
        plan = make_plan(config.model_copy(update={"training": training}), prepared.train_set, 2, causal=False)
        shares.append(padding_share(plan, prepared.train_set, causal=False))
    assert shares[0] < shares[1]
