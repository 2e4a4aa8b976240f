"""The parts that a run's settings turn into."""

import pytest
import torch

from fullshard.core.comm import together
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import DataError, MismatchError
from fullshard.program.config import RunConfig
from fullshard.program.train.run.assemble import assemble
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.steps import learning_rate_schedule, make_plan
from support.alone import alone
from support.tiny_run import settings


def config(directory, **changes):
    return RunConfig.model_validate(settings(directory, **changes))


def test_parts_fit_together(tmp_path):
    parts = assemble(config(tmp_path, training__gradient_checkpointing=True), alone())
    assert len(parts.train_set) == 25
    assert len(parts.evaluation.rows.examples) == 7
    assert parts.evaluation.generation.max_new_tokens == 4
    assert parts.evaluation.baseline.name == "always 'card_arrival'"
    assert parts.evaluation.baseline.value == pytest.approx(2 / 7)
    assert parts.collate.pad_token_id == 0
    assert not parts.collate.causal
    assert parts.model.training
    assert any(getattr(module, "gradient_checkpointing", False) for module in parts.model.modules())


def test_sample_limits_draw_rows(tmp_path):
    parts = assemble(config(tmp_path, data__max_train_samples=6, data__max_eval_samples=2), alone())
    assert len(parts.train_set) == 6
    assert [example.line for example in parts.evaluation.rows.examples] not in ([], [2, 3])


def told_alike(comm, action):
    """The error that ``action`` ends with on every rank, in the same words."""
    with pytest.raises(MismatchError) as error:
        action()
    return set(comm.all_gather_object(str(error.value)))


def test_settings_that_differ_between_ranks_are_told(tmp_path):
    settings_ = [config(tmp_path, training__learning_rate=rate) for rate in (1e-3, 2e-3)]
    said = run_ranks(2, lambda comm: told_alike(comm, lambda: assemble(settings_[comm.rank], comm)))
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert "training.learning_rate is 0.001 on rank 0 and 0.002 on rank 1" in said[0].pop()


def test_rows_that_differ_between_ranks_are_told_whatever_their_files_are_called(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    settings_ = [config(tmp_path / name) for name in ("here", "there")]
    file = tmp_path / "there" / "train.csv"
    file.write_text(file.read_text().replace("card", "cord", 1))

    def work(comm):
        mine = settings_[comm.rank].model_copy(update={"output_dir": tmp_path / "out"})
        return told_alike(comm, lambda: assemble(mine, comm))

    said = run_ranks(2, work)
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert "The training rows differ between ranks: rank 0 has 25 of " in said[0].pop()


def test_no_evaluation_reads_no_held_out_file(tmp_path):
    values = settings(tmp_path, training__eval_strategy="no")
    (tmp_path / "held_out.csv").unlink()
    assert assemble(RunConfig.model_validate(values), alone()).evaluation is None


def test_the_optimizer_has_every_shard_also_empty_ones_so_that_ranks_agree_about_them(tmp_path, one_at_a_time):
    settings_ = config(tmp_path)

    def work(comm):
        parts = assemble(settings_, comm)
        held = [p for group in parts.optimizer.param_groups for p in group["params"]]
        return (
            [rows_of(p).numel() for p in parts.model.parameters()],
            [rows_of(p).numel() for p in held],
            parts.parameters,
        )

    for every, held, total in run_ranks(2, work):
        assert 0 in every
        assert sorted(held) == sorted(every)
        assert sum(held) < total


@pytest.mark.parametrize(
    ("changes", "world_size", "per_epoch", "total"),
    [
        ({}, 1, 4, 8),  # 25 rows in 7 micro-batches of 4, two a step
        ({}, 2, 2, 4),  # 13 rows a rank in 4 micro-batches
        ({"training__gradient_accumulation_steps": 1}, 2, 4, 8),
        ({"training__max_steps": 3}, 1, 4, 3),
        ({"training__max_steps": 99}, 1, 4, 99),  # more than two epochs
        ({"training__max_steps": -1}, 1, 4, 8),
    ],
)
def test_steps(tmp_path, changes, world_size, per_epoch, total):
    run = config(tmp_path, **changes)
    plan = make_plan(run, prepare(run).train_set, world_size, causal=False)
    schedule = learning_rate_schedule(run, plan.num_steps)
    assert (schedule.steps_per_epoch, schedule.total_steps) == (per_epoch, total)


def test_bf16_computes_in_bf16_and_keeps_fp32_shards(tmp_path):
    parts = assemble(config(tmp_path, training__precision="bf16", sharding__wrap=["T5Block"]), alone())
    assert {p.dtype for p in parts.model.parameters()} == {torch.float32}
    logits = parts.model(input_ids=torch.tensor([[3, 1]]), decoder_input_ids=torch.tensor([[0]])).logits
    assert logits.dtype == torch.bfloat16


def test_a_failure_on_one_rank_is_raised_on_all():
    def work(comm):
        def action():
            if comm.rank == 1:
                raise DataError("train.csv:3 is broken")
            return "fine"

        with pytest.raises(DataError, match="is broken"):
            together(comm, action)
        assert together(comm, lambda: comm.rank) == comm.rank

    run_ranks(3, work)
