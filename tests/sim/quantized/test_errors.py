"""What cannot be right is refused with one clear error, before memory is taken, and leaves the model as it was."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullshard import Checkpoints, Pretrained, Quantize, fully_shard, load_checkpoint, unsharded
from fullshard.core.quantized import QuantizedLinear, formats
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, MismatchError, ShardingError
from support import quantized
from support.quantized import NF4, t5


def skeleton(*, frozen=True):
    with torch.device("meta"):
        model = t5()
    model.tie_weights()
    return model.requires_grad_(requires_grad=not frozen)


def refused(model, match, weights=None, error=ConfigError):
    """Shard on two ranks, and expect an error on both and no change."""
    models = [model, copy.deepcopy(model)]
    before = [(name, type(one)) for name, one in model.named_modules()]

    def rank(comm):
        mine = models[comm.rank]
        with pytest.raises(error, match=match):
            fully_shard(mine, comm, weights=weights)
        assert [(name, type(one)) for name, one in mine.named_modules()] == before
        assert all(name.rpartition(".")[2] in ("weight", "bias") for name, _ in mine.named_parameters())

    run_ranks(2, rank)


EVERYTHING = Quantize("nf4", skip=("encoder", "decoder", "lm_head"))
SKIPS = {"lm_haed": "lm_head", "decoder.blok.0": "decoder.block.0", "zzz": "none"}
REFUSED = {
    "full fine-tuning": (NF4, r"Quantised weights are frozen.*are trainable"),
    "nothing to quantise": (EVERYTHING, "nothing to quantise"),
    **{
        name: (
            Quantize("nf4", skip=("wo", name)),
            rf"Quantize\(skip=…\) has '{name}', which is no module of T5.*Names like it: {near}",
        )
        for name, near in SKIPS.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantised_is_refused(case, tmp_path):
    quantized.saved(t5, tmp_path)
    quantize, match = REFUSED[case]
    refused(skeleton(frozen=case != "full fine-tuning"), match, Pretrained(tmp_path, quantize=quantize))


def test_a_model_in_memory_is_refused(tmp_path):
    model, _ = quantized.saved(t5, tmp_path)
    model.requires_grad_(requires_grad=False)
    refused(model, "on the meta device", Pretrained(tmp_path, quantize=NF4))


def test_weights_that_do_not_fit_leave_the_layers_as_they_were(tmp_path):
    quantized.saved(quantized.gpt2, tmp_path)
    refused(skeleton(), "do not fit", Pretrained(tmp_path, quantize=NF4), error=CheckpointError)


@pytest.mark.parametrize(
    ("found", "match"),
    [(None, "bitsandbytes, which is missing"), (SimpleNamespace(__version__="0.49.2"), "0.50 or newer; found 0.49.2")],
)
def test_bitsandbytes_missing_or_too_old(found, match, tmp_path, monkeypatch):
    quantized.saved(t5, tmp_path)
    formats.bitsandbytes.cache_clear()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "bitsandbytes", found)
        patched.delitem(sys.modules, "bitsandbytes.nn", raising=False)
        refused(skeleton(), f"{match}.*fullshard\\[quantization\\]", Pretrained(tmp_path, quantize=NF4))
    formats.bitsandbytes.cache_clear()


def test_blocks_of_another_size_are_refused():
    library = formats.bitsandbytes()
    layer = library.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    layer.weight = library.nn.Params4bit(layer.weight.data, blocksize=128, quant_type="nf4", module=layer)
    model = nn.Sequential(layer.to("cpu"), nn.Linear(64, 64))

    def rank(comm):
        mine = copy.deepcopy(model)
        with pytest.raises(ConfigError, match="0 has blocks of 128 weights"):
            fully_shard(mine, comm, wrap=None)

    run_ranks(2, rank)


def test_a_layer_of_fp4_is_refused_before_anything_changes():
    library = formats.bitsandbytes()
    layer = library.nn.Linear4bit(64, 64, bias=False).to("cpu")  # bitsandbytes' default

    def rank(comm):
        mine = nn.Sequential(nn.Linear(64, 64), copy.deepcopy(layer))
        with pytest.raises(ConfigError, match=r"^1 is a Linear4bit of fp4.*nf4"):
            fully_shard(mine, comm, wrap=None)
        assert type(mine[1]) is library.nn.Linear4bit

    run_ranks(2, rank)


def test_a_layer_that_is_not_quantised_yet_is_refused():
    library = formats.bitsandbytes()
    model = nn.Sequential(library.nn.Linear4bit(64, 64, quant_type="nf4"), nn.Linear(64, 64))
    refused_layer = "not quantised yet"

    def rank(comm):
        with pytest.raises(ConfigError, match=refused_layer):
            fully_shard(copy.deepcopy(model), comm, wrap=None)

    run_ranks(2, rank)


def test_ranks_that_quantise_differently_are_told(tmp_path):
    quantized.saved(t5, tmp_path)
    types = ("nf4", "int8")

    def rank(comm):
        weights = Pretrained(tmp_path, quantize=Quantize(types[comm.rank]))
        with pytest.raises(MismatchError, match="Ranks hold different models or policies"):
            fully_shard(skeleton(), comm, weights=weights)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "settings", [{"type": "fp8"}, {"type": "nf4", "compute_dtype": "int8"}], ids=["type", "compute dtype"]
)
def test_settings_are_checked_when_they_are_made(settings):
    with pytest.raises(ConfigError, match="must be one of"):
        Quantize(**settings)


def test_codes_cannot_require_gradients(tmp_path):
    quantized.saved(t5, tmp_path)

    def rank(comm):
        model = fully_shard(skeleton(), comm, weights=Pretrained(tmp_path, quantize=NF4))
        layer = next(one for one in model.modules() if isinstance(one, QuantizedLinear))
        codes, scales = layer.stored
        with pytest.raises(ShardingError, match=r"nf4 cannot require gradients.*quantised"):
            codes.requires_grad_()
        with pytest.raises(ShardingError, match=r"nf4_double_scales cannot require gradients.*quantised"):
            scales.requires_grad = True
        with pytest.raises(ShardingError, match="quantised weight, which is frozen"):
            model.requires_grad_()
        model.requires_grad_(requires_grad=False)

    run_ranks(2, rank)


def test_a_checkpoint_of_another_quantisation_is_refused(tmp_path):
    _, path = quantized.saved(t5, tmp_path / "model")
    folder = tmp_path / "checkpoints"

    def save(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        with Checkpoints(folder, ranks=comm) as checkpoints:
            checkpoints.save(model, None, step=1)

    run_ranks(2, save)

    def load(comm, quantize):
        model = quantized.sharded_from_files(t5, path, comm, quantize)
        load_checkpoint(model, None, folder / "step-00000001")

    for other in (Quantize("int8", skip=quantized.SKIP), Quantize("nf4", double_quant=False, skip=quantized.SKIP)):
        with pytest.raises(
            CheckpointError, match=r"quantisation is nf4 \(double\), the model's (int8|nf4).*the same Quantize"
        ):
            run_ranks(2, lambda comm, other=other: load(comm, other))


def a_normal_fill(weight):
    weight.data.normal_()


def an_assigned_row(weight):
    weight[0] = 1


def assigned_data(weight):
    weight.data = torch.zeros(64, 64)


def a_wish_for_gradients(weight):
    weight.requires_grad = True


WRITES = (
    a_normal_fill,
    an_assigned_row,
    assigned_data,
    a_wish_for_gradients,
    lambda weight: weight.requires_grad_(),
    lambda weight: weight.detach().add_(1),
    lambda weight: weight.view(-1).zero_(),
    lambda weight: weight.t().split(8)[1].mul_(2),
    lambda weight: torch.add(weight, 1, out=weight),
    lambda weight: torch._foreach_add_([weight], 1.0),
)


def test_no_write_to_a_quantised_weight_is_lost_in_silence(tmp_path):
    _, path = quantized.saved(t5, tmp_path)

    def rank(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        layer = next(one for one in model.modules() if isinstance(one, QuantizedLinear))
        assert (tuple(layer.weight.shape), layer.weight.dtype) == ((64, 64), torch.float32)
        with pytest.raises(ShardingError, match=r"inside `with fullshard.unsharded"):
            layer.weight.sum()
        with unsharded(model), torch.no_grad():
            for write in WRITES:
                with pytest.raises(ShardingError, match=r"quantised weight.*frozen"):
                    write(layer.weight)
            with pytest.raises(ShardingError, match=r"layer\.weight = .* would replace"):
                layer.weight = nn.Parameter(torch.zeros(64, 64))
            with pytest.raises(ValueError, match="read-only"):
                layer.weight.detach().numpy().fill(0)
            plain = layer.weight.clone()
            assert type(plain) is torch.Tensor
            for copied in (copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight.detach()))):
                assert type(copied) is torch.Tensor
                assert torch.equal(copied.zero_(), torch.zeros(64, 64))
            assert torch.equal(layer.weight[3], plain[3])
            assert layer.weight.data[3].tolist() == plain[3].tolist()

    run_ranks(2, rank)


def test_peft_does_not_merge_into_a_quantised_weight_in_silence(tmp_path):
    _, path = quantized.saved(t5, tmp_path)

    def rank(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        for safe in (False, True):
            with unsharded(model), pytest.raises(ShardingError, match="fullshard export RUN --merge"):
                model.merge_adapter(safe_merge=safe)

    run_ranks(2, rank)


@pytest.mark.parametrize("quantize", [NF4, Quantize("int8", skip=quantized.SKIP)], ids=lambda one: one.type)
def test_layers_of_bitsandbytes_that_ran_before_keep_no_full_weight_and_are_not_merged_into(quantize):
    model, _ = quantized.saved(t5)
    model = quantized.reference(model, quantize)
    tokens = torch.arange(2, 10).reshape(2, 4)
    plain = model(input_ids=tokens, decoder_input_ids=tokens).logits.detach()

    def rank(comm):
        mine = fully_shard(copies[comm.rank], comm)
        layers = [one for one in mine.modules() if isinstance(one, QuantizedLinear)]
        assert not any("state" in vars(one) or "quant_state" in vars(one) for one in layers)
        assert mine(input_ids=tokens, decoder_input_ids=tokens).logits.detach() == pytest.approx(plain, abs=1e-5)
        with unsharded(mine), pytest.raises(ShardingError, match=r"quantised weight, which is frozen.*--merge"):
            mine.merge_adapter()
        for asked in ("quant_state", "has_fp16_weights"):  # by peft's own layers over bitsandbytes', in a merge
            with pytest.raises(AttributeError, match=rf"{asked}.*quantised weight, which is frozen.*--merge"):
                getattr(layers[0].weight, asked)

    copies = [copy.deepcopy(model) for _ in range(2)]
    run_ranks(2, rank)


def test_a_norm_of_codes_is_refused_on_every_rank_and_none_waits(tmp_path):
    _, path = quantized.saved(t5, tmp_path)

    def rank(comm):
        model = quantized.sharded_from_files(t5, path, comm, NF4)
        # Of a layer as small as this some ranks have no row, so torch would raise on the others alone.
        codes = [p for p in model.parameters() if p.dtype == torch.uint8]
        for norm in (torch.Tensor.norm, torch.linalg.vector_norm, lambda p: torch._foreach_norm([p])):
            with pytest.raises(ShardingError, match=r"needs floating numbers.*torch\.uint8"):
                norm(codes[0])
        assert codes[0].float().norm() > 0

    run_ranks(2, rank)
