"""``MixedPrecision(full_in_eval=True)``: in eval() parameters have their own dtypes, and training is as without."""

import copy

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, ShardingStrategy, fully_shard, no_sync, unsharded
from fullshard.core.engine import root_held
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ShardingError
from support.models import TinyLM, batches, lm_loss, lm_with_frozen_parts
from support.parity import alone, assert_gradients, on_ranks, optimizer_for, replicas, sharded_gradients

SIZE = 2
BF16 = MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16, full_in_eval=True)
TOKENS = batches(1, 2 * SIZE)[0]


def rows(comm):
    return TOKENS.chunk(SIZE)[comm.rank]


@pytest.mark.parametrize(
    ("make", "strategy"), [(TinyLM, ShardingStrategy.NO_SHARD), (lm_with_frozen_parts, ShardingStrategy.FULL_SHARD)]
)
def test_evaluation_and_its_gradients_are_those_of_the_unsharded_model(make, strategy):
    reference, models = replicas(make, SIZE)
    parts = [lm_loss(reference, part) for part in TOKENS.chunk(SIZE)]
    (sum(parts) / SIZE).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=BF16, strategy=strategy).eval()
        loss = lm_loss(model, rows(comm))
        loss.backward()
        return loss.detach(), sharded_gradients(model)

    results = run_ranks(SIZE, work)
    for (loss, _), part in zip(results, parts, strict=True):
        torch.testing.assert_close(loss, part.detach(), atol=1e-6, rtol=1e-6)
    assert_gradients([grads for _, grads in results], reference)


def test_training_is_the_same_with_evaluations_in_between():
    _, models = replicas(TinyLM, 2 * SIZE)

    def work(comm):
        runs = []
        for evaluates, model in ((True, models[comm.rank]), (False, models[SIZE + comm.rank])):
            comm_of_run = RecordingComm(comm)
            model = fully_shard(model, comm_of_run, mp_policy=BF16)
            optimizer = optimizer_for(model)
            sent, dtypes = [], []
            for tokens in batches(3, 2 * SIZE):
                before = len(comm_of_run.entries)
                loss = lm_loss(model, tokens.chunk(SIZE)[comm.rank])
                loss.backward()
                gathers = [one for one in comm_of_run.entries[before:] if one.collective == "all_gather"]
                sent.append(sum(one.sent_bytes for one in gathers))
                optimizer.step()
                optimizer.zero_grad()
                if evaluates:
                    before = len(comm_of_run.entries)
                    with torch.no_grad():
                        dtypes.append(model.eval()(tokens).dtype)
                    gathers = [one for one in comm_of_run.entries[before:] if one.collective == "all_gather"]
                    # The forward's half of a step's gathers, in four bytes an element and not two.
                    dtypes.append(sum(one.sent_bytes for one in gathers))
                    model.train()
            runs.append((sent, [rows_of(p.detach()).clone() for p in model.parameters()], dtypes))
        (sent, weights, dtypes), (sent_without, weights_without, _) = runs
        assert sent == sent_without
        assert dtypes[0::2] == [torch.float32] * 3
        assert len(set(dtypes[1::2])) == 1
        assert dtypes[1] > sent[-1] / 2
        for one, other in zip(weights, weights_without, strict=True):
            assert torch.equal(one, other)

    run_ranks(SIZE, work)


class Noting(nn.Module):
    """Notes the dtypes of its input, weight and buffers."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), []

    def forward(self, x):
        y = self.norm(self.linear(x.to(self.linear.weight.dtype)))
        self.seen.append((x.dtype, self.linear.weight.dtype, self.norm.running_mean.dtype, y.dtype))
        return y


@pytest.mark.parametrize("kept", [(), ("norm",)])
def test_buffers_inputs_and_kept_modules_follow_the_mode(kept):
    half, wide = torch.bfloat16, torch.float32

    model = nn.Sequential(Noting(), nn.Linear(4, 2))
    noting = model[0]
    policy = MixedPrecision(param=half, buffer=half, keep_fp32=kept, full_in_eval=True)
    alone(noting, wrap=None, mp_policy=policy)
    model = alone(model, wrap=None, mp_policy=policy)
    for training in (True, False, False, True):
        model.train(training)(torch.ones(4, 4)).sum().backward()
    of_training = (half, half, wide if kept else half, half)
    assert noting.seen == [of_training, (wide,) * 4, (wide,) * 4, of_training]


def test_the_mode_may_not_change_while_gradients_wait():
    def work(comm, model):
        with no_sync(model):
            lm_loss(model, rows(comm)).backward()
        with pytest.raises(ShardingError, match=r"set to evaluate, in other dtypes .* unit \(root\)"):
            lm_loss(model.eval(), rows(comm))
        lm_loss(model.train(), rows(comm)).backward()
        lm_loss(model.eval(), rows(comm))

    on_ranks(SIZE, TinyLM, work, mp_policy=BF16)


def test_contexts_that_show_parameters_follow_the_mode():
    reference, models = replicas(TinyLM, SIZE)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=BF16)
        lm_loss(model, rows(comm)).backward()
        model.eval()
        with root_held(model), torch.no_grad():
            held = lm_loss(model, rows(comm))
        model.train()
        lm_loss(model, rows(comm)).backward()
        model.eval()
        with unsharded(model), torch.no_grad():
            shown = lm_loss(model, rows(comm))
        return held, shown, lm_loss(reference, rows(comm)).detach()

    for held, shown, expected in run_ranks(SIZE, work):
        torch.testing.assert_close(held, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(shown, expected, atol=1e-6, rtol=1e-6)


def test_a_copy_is_refused_as_without_it():
    model = alone(nn.Linear(4, 4), wrap=None, mp_policy=BF16)
    with pytest.raises(ShardingError):
        copy.deepcopy(model)
