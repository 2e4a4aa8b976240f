"""``training.ema_decay``: torch's average of the weights after each step is evaluated, kept and published."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullshard.errors import RunStopped
from fullshard.program.config import TrainingConfig
from fullshard.program.train import StopRequest
from fullshard.state.saving.export import ExportOptions, export
from support.interrupted_run import Director, run
from support.tiny_run import MODEL

pytestmark = pytest.mark.usefixtures("unmetered", "one_at_a_time")

DECAY, STEPS = 0.7, 4
# Threads draw from one generator, so that dropout would differ from run to run.
CONFIG = MODEL | {"num_layers": 1, "num_decoder_layers": 1, "dropout_rate": 0.0}
AVERAGED = {
    "model": {"config": CONFIG, "tokenizer": {"vocab_size": 60}},
    "ranks": 2,
    "training__ema_decay": DECAY,
    "training__max_steps": STEPS,
    "training__save_strategy": "steps",
    "training__save_steps": 1,
    "training__save_total_limit": None,
    "training__eval_strategy": "steps",
    "training__eval_steps": 1,
}


def weights(directory):
    return load_file(directory / "model.safetensors")


def exported(directory, step, target):
    report = export(directory / f"out/checkpoints/step-{step:08d}", target, ExportOptions())
    return weights(target), report.notes


def test_torchs_average_of_the_trained_weights_is_published_and_resumed(tmp_path):
    for name in ("through", "stopped", "plain"):
        (tmp_path / name).mkdir()
    memory = run(tmp_path / "through", **AVERAGED)
    run(tmp_path / "plain", **{**AVERAGED, "training__ema_decay": None})
    holder, theirs, after = nn.ParameterDict(), None, {}
    for step in range(1, STEPS + 1):
        found, notes = exported(tmp_path / "plain", step, tmp_path / str(step))
        assert not notes
        for name, value in found.items():
            holder[name.replace(".", "/")] = nn.Parameter(value.clone())
        theirs = theirs or AveragedModel(holder, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        theirs.update_parameters(holder)
        averages = dict(theirs.module.named_parameters())
        after[step] = {name: averages[name.replace(".", "/")].detach().clone() for name in found}
    best, published = memory.ended[0].best_step, weights(tmp_path / "through/out")
    for name, value in published.items():
        torch.testing.assert_close(value, after[best][name], atol=1e-6, rtol=0, msg=name)
    assert best > 1
    again, notes = exported(tmp_path / "through", best, tmp_path / "exported")
    assert notes == ("the trained weights are their moving average, which the checkpoint has",)
    assert all(torch.equal(value, again[name]) for name, value in published.items())
    assert any(not torch.equal(value, weights(tmp_path / str(best))[name]) for name, value in published.items())

    stop = StopRequest()
    director = Director(("step", 2), lambda: setattr(stop, "requested", True))
    with pytest.raises(RunStopped):
        run(tmp_path / "stopped", director, stop=stop, **AVERAGED)
    resumed = run(tmp_path / "stopped", **AVERAGED)
    assert resumed.begun[0].resumed_step
    losses = [one.loss for one, _ in resumed.evaluations]
    assert losses == [one.loss for one, _ in memory.evaluations][-len(losses) :]
    again = weights(tmp_path / "stopped/out")
    assert all(torch.equal(value, again[name]) for name, value in published.items())


def test_the_average_is_evaluated_and_the_steps_are_as_without_it(tmp_path):
    changes = {**AVERAGED, "ranks": 1}
    found = []
    for decay in (DECAY, None):
        (tmp_path / str(decay)).mkdir()
        found.append(run(tmp_path / str(decay), **{**changes, "training__ema_decay": decay}))
    ours, plain = found
    assert [one.loss for one in ours.steps] == [one.loss for one in plain.steps]
    ours, plain = ([report.loss for report, _ in one.evaluations] for one in (ours, plain))
    assert ours[0] == plain[0]  # the first average is a copy
    assert all(one != other for one, other in zip(ours[1:], plain[1:], strict=True))


def test_zero_is_no_average():
    assert TrainingConfig(ema_decay=0).ema_decay is None
