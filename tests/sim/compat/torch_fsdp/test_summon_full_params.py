"""``summon_full_params`` on rank threads."""

import pytest
import torch
from torch import nn

from fullshard.compat.torch_fsdp.api import ShardingStrategy
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.core.engine import unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, ShardingError
from support.fsdp1 import BF16, KINDS, POLICY, on_ranks, same
from support.models import TinyLM, batches, lm_loss, seq2seq_loss
from support.parity import replicas


@pytest.mark.parametrize("kind", KINDS)
def test_full_parameters_are_plain_ones_of_the_plain_model(kind):
    def work(comm, model, plain):
        before = [p for _, p in model.named_parameters()]
        with FSDP.summon_full_params(model):
            shown = dict(model.named_parameters())
            same(shown, dict(plain.named_parameters()))
            assert all(type(p) is nn.Parameter for p in shown.values())
            assert [p.requires_grad for p in shown.values()] == [p.requires_grad for p in plain.parameters()]
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    on_ranks(kind, 3, work)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": BF16}, {"sharding_strategy": ShardingStrategy.NO_SHARD}])
def test_inside_it_runs_and_learns_as_the_plain_model(options):
    def work(comm, model, plain):
        tokens = batches(1, 2)[0]
        with FSDP.summon_full_params(model, writeback=False):
            losses = [seq2seq_loss(one, tokens) for one in (model, plain)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            model.generate(tokens, max_new_tokens=2)
        assert all(p.grad is None for p in model.parameters())
        seq2seq_loss(model, tokens).backward()

    on_ranks("t5", 2, work, **options)


@pytest.mark.parametrize("writeback", [True, False])
def test_writeback_says_whether_changes_stay(writeback):
    def work(comm, model, plain):
        def change():
            model.shared.weight.data.mul_(2)
            raise KeyError

        with pytest.raises(KeyError), FSDP.summon_full_params(model, writeback=writeback):
            change()
        expected = plain.shared.weight * (2 if writeback else 1)
        assert torch.equal(model.state_dict()["lm_head.weight"], expected)

    on_ranks("t5", 3, work)


def test_rank0_only_shows_them_on_rank_0():
    def work(comm, model, plain):
        shapes = {name: p.shape for name, p in model.named_parameters()}
        tokens = batches(1, 2)[0]
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
            if comm.rank == 0:
                same(dict(model.named_parameters()), dict(plain.named_parameters()))
                same(model.state_dict(), plain.state_dict())
                assert torch.equal(lm_loss(model, tokens), lm_loss(plain, tokens))
            else:
                assert {name: p.shape for name, p in model.named_parameters()} == shapes
                for use in (lambda: lm_loss(model, tokens), model.state_dict):
                    with pytest.raises(ShardingError, match="rank0_only=False"):
                        use()
        assert torch.isfinite(lm_loss(model, tokens))
        with pytest.raises(ConfigError, match="writeback=False"), FSDP.summon_full_params(model, rank0_only=True):
            pass

    on_ranks("lm", 2, work)


def test_recurse_false_shows_what_the_module_s_own_unit_holds():
    def work(comm, model, plain):
        tokens = batches(1, 2)[0]
        with FSDP.summon_full_params(model, recurse=False):
            assert torch.equal(model.shared.weight, plain.shared.weight)
            assert model.encoder.block[0].layer[0].SelfAttention.q.weight.shape[0] < 32
            with torch.no_grad():
                assert torch.equal(seq2seq_loss(model, tokens), seq2seq_loss(plain, tokens))
                got = model.generate(tokens, max_new_tokens=3, do_sample=False)
        assert torch.equal(got, plain.generate(tokens, max_new_tokens=3, do_sample=False))
        with FSDP.summon_full_params(model.encoder.block[0]):
            same(dict(model.encoder.block[0].named_parameters()), dict(plain.encoder.block[0].named_parameters()))
            assert model.shared.weight.shape[0] < plain.shared.weight.shape[0]
            assert torch.isfinite(seq2seq_loss(model, tokens))

    on_ranks("t5", 2, work)


def test_evaluation_in_full_precision_by_torchs_variable_is_refused_for_it(monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")

    def work(comm):
        FSDP(TinyLM(), comm)  # computes in full precision anyway
        with pytest.raises(NotImplementedError, match=r"FSDP_USE_FULL_PREC_IN_EVAL=1 .*summon_full_params"):
            FSDP(TinyLM(), comm, mixed_precision=BF16)

    run_ranks(1, work)


def test_with_grads_shows_the_whole_gradient_and_takes_changes_back():
    def work(comm, model, plain):
        tokens = batches(1, 4)[0]
        lm_loss(model, tokens[2 * comm.rank :][:2]).backward()
        lm_loss(plain, tokens).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if theirs.grad is None:
                    assert ours.grad is None
                else:
                    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)
            model.embed.weight.grad.zero_()
        assert model.embed.weight.grad.abs().sum() == 0
        assert model.blocks[0].up.weight.grad.abs().sum() > 0
        torch.optim.SGD(model.parameters(), 0.1).step()

    on_ranks("lm", 2, work)


def test_what_cannot_be_shown_is_refused_and_leaves_the_shards():
    def work(comm, model, plain):
        with FSDP.summon_full_params(model):
            inner = FSDP.summon_full_params(model.blocks[0])
            for again in (FSDP.summon_full_params(model), inner, unsharded(model.module)):
                with pytest.raises(ShardingError, match="shown already"), again:
                    pass
        shards = list(model.parameters())
        with pytest.raises(ShardingError, match=r"blocks\.0\.up\.weight"), FSDP.summon_full_params(model):
            model.blocks[0].up.weight = nn.Parameter(torch.zeros(40, 24))
        assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))

        def inside(*_):
            with FSDP.summon_full_params(model):
                pass

        handle = model.blocks[0].register_forward_pre_hook(inside)
        with pytest.raises(ShardingError, match="during forward/backward"):
            model(batches(1, 2)[0])
        handle.remove()
        assert torch.isfinite(lm_loss(model, batches(1, 2)[0]))

    on_ranks("lm", 2, work)


def test_a_module_around_several_models_shows_all_of_them():
    _, models = replicas(TinyLM, 4)

    def work(comm):
        both = nn.ModuleList([FSDP(models[2 * comm.rank + i], comm, auto_wrap_policy=POLICY) for i in range(2)])
        with FSDP.summon_full_params(both):
            assert [one.embed.weight.shape for one in both] == [(50, 24)] * 2
        with FSDP.summon_full_params(both, recurse=False):
            assert both[0].embed.weight.shape != (50, 24)

    run_ranks(2, work)


def test_a_step_while_full_parameters_are_on_show_is_refused_and_not_overwritten():
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=POLICY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        lm_loss(model, batches(1, 2)[0]).backward()
        before = model.state_dict()["blocks.0.up.weight"]
        with (
            pytest.raises(ShardingError, match=r"the shards were changed .* Step outside"),
            FSDP.summon_full_params(model),
        ):
            optimizer.step()
        after = model.state_dict()["blocks.0.up.weight"]
        with FSDP.summon_full_params(model, writeback=False):
            optimizer.step()
        return torch.equal(before, after), torch.equal(after, model.state_dict()["blocks.0.up.weight"])

    assert run_ranks(2, work) == [(False, False)] * 2
