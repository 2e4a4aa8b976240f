"""FLOPs of a token are counted from the weights it meets."""

import torch
from transformers import T5ForConditionalGeneration

from fullshard.program.train.reporting.flops import Flops, count_flops, peak_flops
from support.models import gpt2, t5


def numel(modules):
    return sum(module.weight.numel() for module in modules if isinstance(module, torch.nn.Linear))


def test_an_encoder_decoder_counts_what_each_side_meets():
    model = t5()
    assert isinstance(model, T5ForConditionalGeneration)
    cross = [layer for block in model.decoder.block for layer in (block.layer[1].EncDecAttention.k,)]
    cross += [block.layer[1].EncDecAttention.v for block in model.decoder.block]
    source = numel(model.encoder.modules()) + numel(cross)
    everything = numel(model.modules())
    assert count_flops(model) == (6.0 * source, 6.0 * (everything - source))


def test_frozen_weights_need_no_gradient_of_their_own():
    model = gpt2()
    whole, nothing = count_flops(model)
    model.requires_grad_(False)
    assert (count_flops(model)[0] / whole, nothing) == (4 / 6, 0.0)


def test_utilisation_is_the_needed_over_the_possible():
    step = {"tokens": 30, "target_tokens": 10, "seconds": 2.0}
    assert Flops(source_token=100.0, target_token=50.0, peak=1000.0).utilisation(**step) == 2500 / 2.0 / 1000.0
    assert Flops(source_token=100.0, target_token=0.0, peak=1000.0).utilisation(**step) == 3000 / 2.0 / 1000.0


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu"), "bf16") is None
