"""Laws of one step: the loss is the global mean per target token, however rows are dealt, added up, and read."""

import copy
import json
import math
import sys
import threading
from functools import partial

import pytest
import torch

from fullshard import MixedPrecision, ShardingStrategy, fully_shard, unsharded
from fullshard.core.comm.device import Device
from fullshard.core.engine.tables import loss as loss_module
from fullshard.core.optim import ShardedGradScaler
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import TrainingError
from fullshard.program.models import Objective, fuse_head
from fullshard.program.train.run import loop, step as step_module
from fullshard.program.train.run.step import StepSpec
from fullshard.program.train.setup.model import loss_sum
from support.interrupted_run import assert_same, metrics, run, run_until_stopped
from support.models import VOCAB, gpt2, t5
from support.one_step import batch_from, one_step as step_once, tokenized, train_step, twins

ROWS = tokenized(
    [[5, 6, 1], [7, 8, 9, 10, 1], [11, 1], [12, 13, 14, 1]], [[20, 1], [21, 22, 23, 24, 1], [25, 26, 1], [27, 1]]
)
TARGET_TOKENS = 12


def batch_of(rows, *, causal=False, fillers=()):
    return batch_from(ROWS, rows, causal=causal, fillers=fillers)


def spec(**changes):
    values = {"step": 1, "epoch": 0.5, "learning_rate": 1e-2, "max_grad_norm": 1.0, "causal": False}
    return StepSpec(**(values | changes))


one_step = partial(step_once, optimizer=torch.optim.AdamW)


def reference_step(model, step_spec):
    """The same step by hand, on all rows at once, with Hugging Face's own loss."""
    batch = batch_of(range(4), causal=step_spec.causal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=step_spec.learning_rate)
    loss = model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, labels=batch.labels_BT).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), step_spec.max_grad_norm)
    optimizer.step()
    return loss.item(), norm.item(), dict(model.named_parameters())


@pytest.mark.parametrize(
    "deal",
    [
        [[[0, 1, 2, 3]]],
        [[[0, 1], [2, 3]]],
        [[[0], [1, 2, 3]]],
        [[[0, 1]], [[2, 3]]],
        [[[1]], [[0, 2, 3]]],
        [[[3], [0]], [[1], [2]]],
    ],
)
@pytest.mark.parametrize("make", [t5, gpt2])
def test_every_deal_of_the_rows_gives_the_same_step(deal, make):
    """``deal``: for each rank its micro-batches of rows."""
    torch.manual_seed(0)
    model = make()
    causal = not model.config.is_encoder_decoder
    step_spec = spec(causal=causal)
    models = [copy.deepcopy(model) for _ in deal]
    loss, norm, weights = reference_step(model, step_spec)
    runs = run_ranks(
        len(deal),
        lambda comm: one_step(
            models[comm.rank], comm, [batch_of(rows, causal=causal) for rows in deal[comm.rank]], step_spec
        ),
    )
    for report, ours in runs:
        assert report.loss == pytest.approx(loss, abs=1e-5)
        assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        assert report.target_tokens == TARGET_TOKENS
        assert report.tokens == 14 + 12
        for name, weight in weights.items():
            assert torch.allclose(ours[name], weight, atol=2e-4), name
    assert len({report.loss for report, _ in runs}) == 1


def test_the_norm_is_measured_and_left_alone_without_a_limit():
    torch.manual_seed(0)
    model = t5()
    limited = one_step(copy.deepcopy(model), *alone(), spec(max_grad_norm=1e-3))[0]
    free = one_step(copy.deepcopy(model), *alone(), spec(max_grad_norm=None))[0]
    assert limited.grad_norm == free.grad_norm > 1e-3


def alone():
    return run_ranks(1, lambda comm: comm)[0], [batch_of(range(4))]


def test_the_step_uses_the_rate_it_is_told():
    torch.manual_seed(0)
    model = t5()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, after = one_step(model, *alone(), spec(learning_rate=0.0))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_no_number_stops_every_rank_before_the_weights_change(size):
    models = twins(t5, size)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        if comm.rank == size - 1:  # one rank's shard is enough
            with torch.no_grad():
                next(p for p in model.parameters() if p.nbytes).fill_(math.nan)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(TrainingError) as caught:
            train_step(model, optimizer, [batch_of(range(4))], comm, spec(step=7, learning_rate=0.5))
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, model.parameters(), strict=True))
        return str(caught.value)

    texts = run_ranks(size, work)
    assert len(set(texts)) == 1
    assert texts[0].startswith("Step 7: the loss is nan")
    assert "The weights are those after step 6." in texts[0]
    assert "0.5" in texts[0]


def test_the_error_names_rows_and_parameters_and_advises_fp32_only_where_it_is_not():
    models = twins(t5)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        batches, texts = [batch_of([comm.rank]), batch_of([2 + comm.rank])], []
        for precision in ("fp32", "bf16"):
            # one parameter's gradient is spoilt after backward, where a hook sees it
            bad = model.get_parameter("encoder.final_layer_norm.weight")
            handle = bad.register_post_accumulate_grad_hook(lambda p: p.grad.fill_(math.inf) if p.nbytes else None)
            with pytest.raises(TrainingError) as caught:
                train_step(model, optimizer, batches, comm, spec(precision=precision))
            handle.remove()
            texts.append(str(caught.value))
        return texts

    (full, half), other = run_ranks(2, work)
    assert other == [full, half]
    assert "rank 0: 0, 2; rank 1: 1, 3." in full
    assert "not finite in 1 parameters: encoder.final_layer_norm.weight." in full
    assert "precision=fp32" not in full
    assert "training.precision=fp32 (it is bf16)" in half


def test_a_step_that_is_not_finite_is_left_out_on_every_rank_and_counted():
    models = twins(t5)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        bad = model.get_parameter("encoder.final_layer_norm.weight")
        handle = bad.register_post_accumulate_grad_hook(lambda p: p.grad.fill_(math.nan) if p.nbytes else None)
        reports = []
        for step in (1, 2):
            before = [p.detach().clone() for p in model.parameters()]
            reports.append(
                train_step(model, optimizer, [batch_of([comm.rank])], comm, spec(step=step, on_nonfinite="skip"))
            )
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert same == (step == 1)
            assert (step == 1) == all(p.grad is None for p in model.parameters())
            assert (step == 1) == (not optimizer.state)
            handle.remove()
        return reports

    for reports in run_ranks(2, work):
        assert [report.skipped for report in reports] == [True, False]
        assert math.isfinite(reports[0].loss)
        assert math.isnan(reports[0].grad_norm)


def test_training_smooths_labels_and_evaluation_does_not():
    torch.manual_seed(0)
    model = t5()
    objective = Objective(label_smoothing=0.2, z_loss=0.1)
    with torch.no_grad():
        plain = loss_sum(model, batch_of(range(4)), causal=False).item()
        smoothed = loss_sum(model, batch_of(range(4)), causal=False, objective=objective).item()
    report, _ = one_step(copy.deepcopy(model), *alone(), spec(objective=objective))
    assert report.loss == pytest.approx(smoothed / TARGET_TOKENS, rel=1e-6)
    assert report.loss > 1.05 * plain / TARGET_TOKENS


@pytest.mark.parametrize("make", [t5, gpt2])
def test_a_fused_head_takes_the_same_steps(make):
    torch.manual_seed(0)
    model = make()
    causal = not model.config.is_encoder_decoder
    deal = [batch_of([0, 1], causal=causal), batch_of([2, 3], causal=causal)]
    models = [copy.deepcopy(model) for _ in range(4)]
    for fused in models[2:]:
        fuse_head(fused)
    step_spec = spec(causal=causal)
    plain, fused = (
        run_ranks(2, lambda comm, two=two: one_step(two[comm.rank], comm, [deal[comm.rank]], step_spec))
        for two in (models[:2], models[2:])
    )
    for (report, weights), (expected, theirs) in zip(fused, plain, strict=True):
        assert report.loss == pytest.approx(expected.loss, rel=1e-6)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        for name, weight in theirs.items():
            assert torch.allclose(weights[name], weight, atol=2e-4), name


def test_every_rank_tells_the_memory_of_all(monkeypatch):
    reserved = iter((5, 7))
    monkeypatch.setattr(step_module, "reserved_memory_bytes", lambda device: next(reserved))
    models = twins(t5)
    first, second = run_ranks(2, lambda comm: one_step(models[comm.rank], comm, [batch_of([0])], spec())[0])
    assert first.memory_bytes_per_rank == second.memory_bytes_per_rank
    assert len(first.memory_bytes_per_rank) == 2
    assert first.reserved_bytes == second.reserved_bytes == 7
    assert all(0 < nbytes <= first.memory_bytes for nbytes in first.memory_bytes_per_rank)


def fp16(model, comm):
    return fully_shard(model, comm, mp_policy=MixedPrecision(param="float16", reduce="float32"))


def test_in_fp16_an_overflow_is_left_out_and_halves_the_scale_and_training_goes_on():
    models = twins(gpt2)

    def work(comm):
        model = fp16(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**30)
        batches, reports = [batch_of([2 * comm.rank, 2 * comm.rank + 1], causal=True)], []
        for step in range(1, 25):
            reports.append(train_step(model, optimizer, batches, comm, spec(step=step, causal=True), scaler))
        restored = ShardedGradScaler("cpu")
        restored.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
        assert restored.get_scale() == scaler.get_scale()
        return reports

    first, second = run_ranks(2, work)
    assert [r.skipped for r in first] == [r.skipped for r in second]
    skipped = sum(report.skipped for report in first)
    assert 0 < skipped < 20
    assert [r.loss_scale for r in first[: skipped + 1]] == [2.0 ** (30 - n) for n in range(skipped + 1)]
    assert first[0].loss == first[skipped].loss
    assert first[-1].loss < first[0].loss


def test_in_fp16_a_loss_that_is_no_number_still_stops():
    torch.manual_seed(0)
    model = gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)

    def work(comm):
        sharded = fp16(model, comm)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1.0)
        with pytest.raises(TrainingError, match="the loss is nan"):
            train_step(
                sharded, optimizer, [batch_of([0], causal=True)], comm, spec(causal=True), ShardedGradScaler("cpu")
            )

    run_ranks(1, work)


def test_a_rank_with_fillers_alone_changes_nothing():
    """The same step, and the same counts, as without them."""
    torch.manual_seed(0)
    model = t5()
    models = [copy.deepcopy(model) for _ in range(2)]
    report, weights = one_step(model, run_ranks(1, lambda comm: comm)[0], [batch_of([0, 1])], spec())
    deal = [[batch_of([0, 1])], [batch_of([3], fillers=[3])]]
    runs = run_ranks(2, lambda comm: one_step(models[comm.rank], comm, deal[comm.rank], spec()))
    for ours, after in runs:
        assert ours.loss == pytest.approx(report.loss, rel=1e-6)
        assert (ours.target_tokens, ours.tokens) == (report.target_tokens, report.tokens)
        for name, weight in weights.items():
            assert torch.allclose(after[name], weight, atol=2e-4), name


@pytest.mark.parametrize("asked", [[False, False], [True, False], [False, True]])
def test_all_ranks_hear_that_one_is_asked_to_stop(asked):
    models = twins(t5, len(asked))
    runs = run_ranks(2, lambda comm: one_step(models[comm.rank], comm, [batch_of([0])], spec(stop=asked[comm.rank]))[0])
    assert [report.stop_requested for report in runs] == [any(asked)] * 2


def test_fillers_count_in_no_loss():
    torch.manual_seed(0)
    model = t5().eval()
    with torch.no_grad():
        alone_ = loss_sum(model, batch_of([0, 1]), causal=False)
        with_filler = loss_sum(model, batch_of([0, 1, 3], fillers=[3]), causal=False)
        only_fillers = loss_sum(model, batch_of([3], fillers=[3]), causal=False)
    assert with_filler.item() == pytest.approx(alone_.item(), rel=1e-5)
    assert only_fillers.item() == 0.0


@pytest.mark.parametrize("scale", [None, 64.0])
def test_a_fused_head_knows_the_gradient_that_comes(scale, monkeypatch):
    """Then it rounds once: what is left to multiply by is one."""
    left, backward = [], loss_module._LinearCrossEntropy.backward

    def spy(ctx, gradient):
        left.append((gradient / ctx.factor).item())
        return backward(ctx, gradient)

    monkeypatch.setattr(loss_module._LinearCrossEntropy, "backward", staticmethod(spy))
    torch.manual_seed(0)
    model = t5()
    fuse_head(model)

    def work(comm):
        sharded = fully_shard(model, comm, mp_policy=MixedPrecision(param="bfloat16", reduce="float32"))
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
        scaler = None if scale is None else ShardedGradScaler("cpu", init_scale=scale)
        train_step(sharded, optimizer, [batch_of([0]), batch_of([1, 2, 3])], comm, spec(), scaler)

    run_ranks(1, work)
    assert left == [1.0, 1.0]


pytestmark = pytest.mark.usefixtures("unmetered")

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
SAVES = {
    "training__save_strategy": "steps",
    "training__save_steps": 3,
    "training__eval_strategy": "steps",
    "training__eval_steps": 4,
}


class QueueingDevice(Device):
    """The CPU, of which it is said that reading a number waits."""

    @property
    def queues(self):
        return True


@pytest.fixture
def _queues(monkeypatch):
    for module in (loop, step_module):
        monkeypatch.setattr(module, "device_of", QueueingDevice)


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    directory = tmp_path_factory.mktemp("early")
    run(directory, **SAVES)
    return directory


@pytest.mark.usefixtures("_queues")
def test_a_run_is_the_same_run(tmp_path, early):
    run(tmp_path, **SAVES)
    assert_same(tmp_path, early)


@pytest.mark.usefixtures("_queues")
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_stop_saves_the_step_that_was_under_way_and_a_resumed_run_is_the_same(tmp_path, early, at):
    left = run_until_stopped(tmp_path, ("step", at), **SAVES)
    assert 0 <= left.step - at <= 3  # asked while the next step is under way, told by the one after, read one later
    assert [record["step"] for record in metrics(tmp_path) if record["kind"] == "step"] == list(range(1, left.step + 1))
    run(tmp_path, **SAVES)
    assert_same(tmp_path, early)


@pytest.mark.usefixtures("_queues")
def test_a_loss_that_is_not_finite_is_an_error_before_anything_is_saved(tmp_path):
    options = {"training__learning_rate": 1e30, "training__lr_scheduler_type": "constant", "training__warmup_steps": 0}
    # With this seed step 2 is not the heaviest, whose record waits for the device.
    with pytest.raises(TrainingError, match=r"Step 2: the loss is .*The weights have been updated with it"):
        run(tmp_path, seed=1, **options)
    assert not list((tmp_path / "out").glob("checkpoints/step-*"))


@pytest.mark.usefixtures("_queues")
def test_whether_to_skip_is_decided_at_once(tmp_path, early):
    run(tmp_path, training__on_nonfinite="skip", **SAVES)
    assert metrics(tmp_path) == metrics(early)


def reads_by(function, monkeypatch):
    """Names of functions of ours in which this thread read a tensor's value while ``function`` ran."""
    found, here = [], threading.get_ident()

    def recording(original):
        def read(tensor, *args, **kwargs):
            code = sys._getframe(1).f_code
            if threading.get_ident() == here and "/fullshard/" in code.co_filename:
                found.append(code.co_qualname)
            return original(tensor, *args, **kwargs)

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, recording(getattr(torch.Tensor, name)))
        function()
    return found


def test_a_late_step_reads_nothing_before_its_report(monkeypatch):
    models = twins(t5)
    read = {}

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        micro_batches = [batch_of([2 * comm.rank]), batch_of([2 * comm.rank + 1])]
        issued = []

        def issue():
            step = spec(step=len(issued) + 1)
            issued.append(step_module.issue_step(model, optimizer, micro_batches, comm, step, late=True))

        issue()
        issue()
        issued[-1].report()
        if comm.rank == 0:
            read["issue"] = reads_by(issue, monkeypatch)
            read["report"] = reads_by(issued[-1].report, monkeypatch)
        else:
            issue()

    run_ranks(2, work)
    # The engine compares ranks by numbers that are on the host on a CPU. On CUDA it compares each collective in the
    # first step only, and `read_later` reads what a side stream has copied in the step before.
    assert set(read["issue"]) <= {"Agreement.before", "Device.read_later.<locals>.read"}
    assert read["report"] == ["IssuedStep._numbers"]


TIMES = 4  # micro-batches of a rank
IDS = torch.randint(3, VOCAB, (16, 9), generator=torch.Generator().manual_seed(0)).tolist()
MANY_ROWS = tokenized(
    [[*row[: 2 + index % 3], 1] for index, row in enumerate(IDS)],
    [[*row[: 1 + index % 4], 1] for index, row in enumerate(IDS)],
)
TWO_BY_TWO = ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def batch_of_many(rows):
    return batch_from(MANY_ROWS, rows, causal=False)


def stepped(size, *, full, replicas=1, **options):
    """A step of four micro-batches: of each rank the weights, and what was sent to its shard group and its replicas."""
    torch.manual_seed(0)
    model = t5()
    models = [copy.deepcopy(model) for _ in range(size)]
    spec = StepSpec(step=1, epoch=0.5, learning_rate=1e-2, max_grad_norm=1.0, causal=False, unsharded=full)

    def work(comm):
        groups = [RecordingComm(comm.split(groups)) for groups in TWO_BY_TWO] if replicas > 1 else [RecordingComm(comm)]
        mesh = tuple(groups) if replicas > 1 else groups[0]
        sharded = fully_shard(models[comm.rank], mesh, **options)
        mine = range(comm.rank, 16, size)
        batches = [batch_of_many(mine[part::TIMES]) for part in range(TIMES)]
        for group in groups:
            group.entries.clear()
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        report = train_step(sharded, optimizer, batches, comm, spec)
        entries = [list(group.entries) for group in groups]
        with unsharded(sharded):
            weights = {name: p.detach().clone() for name, p in sharded.named_parameters()}
        lanes = [lane for unit in sharded._fullshard_runtime.units for lane in unit.lanes]
        return report, weights, entries, sum(4 * lane.layout.shard_numel for lane in lanes)

    return model, run_ranks(size, work)


def sent(entries, kind, least=0):
    return [entry.sent_bytes for entry in entries if entry.collective == kind and entry.sent_bytes >= least]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_is_that_of_the_unsharded_model_and_gradients_travel_as_rarely_as_they_can(replicas, full):
    size = 2 * replicas
    strategy = ShardingStrategy.HYBRID_SHARD if replicas > 1 else ShardingStrategy.FULL_SHARD
    model, runs = stepped(size, full=full, replicas=replicas, strategy=strategy, tables="gather")
    batch = batch_of_many(range(16))
    loss = model(input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, labels=batch.labels_BT).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    for report, weights, entries, shards in runs:
        assert report.loss == pytest.approx(loss.item(), abs=1e-5)
        for name, weight in model.named_parameters():
            assert torch.allclose(weights[name], weight, rtol=0, atol=1e-5), name
        # To the other rank that shares the shards: each micro-batch half of all gradients, or once a step.
        assert sum(sent(entries[-1], "reduce_scatter")) == (1 if full else TIMES) * shards
        if replicas > 1:  # to the replica: this rank's sums, once a step; flags and norms are smaller
            assert sum(sent(entries[0], "all_reduce", least=1000)) == shards


def test_full_gradients_of_bf16_compute_accumulate_in_fp32():
    """A bf16 sum of four would differ by 2^-8 of a gradient."""
    options = {"mp_policy": MixedPrecision(param="bfloat16", reduce="float32")}
    (_, in_shards), (_, in_full) = (stepped(2, full=full, **options) for full in (False, True))
    for (one, ours, *_), (other, theirs, *_) in zip(in_shards, in_full, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-7) for name in ours)
