"""The way ``liger``, with kernels of plain torch in Liger's place: what is replaced, and only there."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.llama import modeling_llama

from fullshard import fully_shard
from fullshard.errors import ModelError
from fullshard.program.models import compile_blocks, enable_activation_checkpointing
from fullshard.program.speed import WAYS, Facts, apply_ways
from support import fake_liger
from support.fake_liger import CALLS
from support.models import causal_loss, gpt2, llama, seq2seq_loss, t5, t5_untied
from support.parity import assert_trains_alike

ON_GPU = Facts(torch.device("cuda"), torch.float32, packing=False, longest=8)
KINDS = {"t5": (t5, seq2seq_loss), "t5 1.1": (t5_untied, seq2seq_loss), "llama": (llama, causal_loss)}
TOKENS = torch.arange(1, 13).reshape(2, 6)


@pytest.fixture
def liger(monkeypatch):
    fake_liger.install(monkeypatch)


def changed(make, **options):
    torch.manual_seed(0)
    model = make(**options).train()
    apply_ways(model, ["liger"], ON_GPU)
    return model


def loss_and_gradients(model, loss_of):
    loss = loss_of(model, TOKENS)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_plain_model(kind, recompute, liger):
    make, loss_of = KINDS[kind]
    plain = make().train()
    if recompute:
        enable_activation_checkpointing(plain)
    model = copy.deepcopy(plain)
    names = list(model.state_dict())
    apply_ways(model, ["liger"], ON_GPU)
    ours, theirs = (loss_and_gradients(one, loss_of) for one in (model, plain))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    again = 1 + recompute
    expected = (
        {"norm": 4 * again + 1, "mlp": 2 * again, "rope": 2 * again} if kind == "llama" else {"norm": 10 * again + 2}
    )
    assert expected == CALLS
    assert list(model.state_dict()) == names


def test_other_models_of_the_process_are_left_alone(liger):
    theirs = dict(vars(modeling_llama))
    changed(llama)
    assert dict(vars(modeling_llama)) == theirs
    causal_loss(llama(), TOKENS)
    assert not CALLS


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_the_unsharded_model(kind, liger):
    """A norm keeps its weight, a view of a gathered buffer, for its backward."""
    make, loss_of = KINDS[kind]

    def shard(model, comm):
        apply_ways(model, ["liger"], ON_GPU)
        return fully_shard(model, comm)

    assert_trains_alike(lambda: make().train(), loss_of, shard=shard)
    assert CALLS["norm"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's call of transformers
def test_an_adapter_stays(liger):
    def adapted():
        return get_peft_model(llama(), LoraConfig(r=2, target_modules=["gate_proj", "q_proj"]))

    plain, model = adapted(), changed(adapted)
    model.load_state_dict(plain.state_dict())
    for one in (plain, model):
        causal_loss(one, TOKENS).backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    assert CALLS["mlp"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_call_the_kernels(liger):
    plain, model = llama(), changed(llama)
    model.load_state_dict(plain.state_dict())
    compile_blocks(model, backend="eager")
    torch.testing.assert_close(causal_loss(model, TOKENS), causal_loss(plain, TOKENS))
    assert CALLS["rope"]


def test_what_does_not_fit_is_told(liger, monkeypatch):
    on_cpu = Facts(torch.device("cpu"), torch.float32, packing=False, longest=8)
    assert WAYS["liger"].misfit(t5(), on_cpu) == "Liger's kernels run on GPUs, and the ranks compute on the cpu"
    with pytest.raises(ModelError, match=r"liger does not apply: Liger has no kernels for models of the type gpt2\."):
        apply_ways(gpt2(), ["liger"], ON_GPU)
    monkeypatch.setattr("fullshard.program.speed.liger.find_spec", lambda name: None)
    assert "pip install 'fullshard[kernels]'" in WAYS["liger"].misfit(t5(), ON_GPU)
