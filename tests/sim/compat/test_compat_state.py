"""State through torch's FSDP1 names on rank threads: full parameters on show, state dicts, optimizer states."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers.models.t5.modeling_t5 import T5Block

from fullshard.compat.torch_fsdp.api import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.compat.torch_fsdp.wrap import ModuleWrapPolicy
from fullshard.engine import units, unsharded
from fullshard.errors import CheckpointError, ConfigError, ProcessGroupError, ShardingError
from fullshard.saving.shard_tensor import ShardTensor
from fullshard.testing import run_ranks
from support.models import Block, TinyLM, batches, lm_loss, lm_with_frozen_parts, seq2seq_loss, t5
from support.parity import replicas

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Normed(nn.Module):
    """Buffers, one of them not saved, state beside tensors, a part left out, and three rows for four ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.apart = nn.Linear(3, 3)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.seen = 0

    def forward(self, x):
        return self.apart(self.last(self.norm(self.first(x))))

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def normed_loss(model, tokens):
    return model(tokens[:, :6].float()).square().mean()


def wrapped_normed(model, comm, **options):
    return FSDP(model, comm, ignored_modules=[model.apart], **options)


POLICY = ModuleWrapPolicy({Block, T5Block})
KINDS = {
    "lm": (TinyLM, lm_loss, functools.partial(FSDP, auto_wrap_policy=POLICY)),
    "lm_frozen_parts": (lm_with_frozen_parts, lm_loss, functools.partial(FSDP, auto_wrap_policy=POLICY)),
    "t5": (t5, seq2seq_loss, functools.partial(FSDP, auto_wrap_policy=POLICY)),
    "normed": (Normed, normed_loss, wrapped_normed),
}


def same(ours, theirs):
    """Names, their order, dtypes and values."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, atol=0, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert ours[name] == value


def on_ranks(kind, size, work, **options):
    """``work(comm, model, plain)`` on each rank, of a wrapped model and an equal plain one."""
    make, _, wrap = KINDS[kind]
    reference, models = replicas(make, 2 * size)
    del reference
    return run_ranks(size, lambda c: work(c, wrap(models[c.rank], c, **options), models[size + c.rank]))


# Full parameters shown


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
        with pytest.raises(ShardingError, match="during forward"):
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


# The model's state dict


@pytest.mark.parametrize(("kind", "size"), [("lm", 1), *((kind, 4) for kind in KINDS)])
def test_a_full_state_dict_is_the_plain_model_s_and_loads_into_it(kind, size):
    def work(comm, model, plain):
        state = model.state_dict()
        same(state, plain.state_dict())
        same(model.module.state_dict(), plain.state_dict())
        tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
        assert all(v.untyped_storage().nbytes() == v.nbytes for v in tensors)  # what is saved alone is written alone
        changed = {n: v + 1 if isinstance(v, torch.Tensor) else {"seen": 3} for n, v in plain.state_dict().items()}
        model.load_state_dict(changed)
        plain.load_state_dict(changed)
        same(model.state_dict(), plain.state_dict())
        assert not {v.data_ptr() for v in state.values() if isinstance(v, torch.Tensor)} & {
            p.data_ptr() for p in model.parameters() if p.numel()
        }
        tokens = batches(1, 2)[0]
        torch.testing.assert_close(KINDS[kind][1](model.eval(), tokens), KINDS[kind][1](plain.eval(), tokens))

    on_ranks(kind, size, work)


@pytest.mark.parametrize("config", [FullStateDictConfig(), FullStateDictConfig(True, True)])
def test_after_training_a_full_state_dict_is_what_the_plain_run_has(config):
    def work(comm, model, plain):
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            seq2seq_loss(one, batches(1, 2)[0]).backward()
            optimizer.step()
        with FSDP.state_dict_type(model, FULL, config):
            state = model.state_dict()
            if config.rank0_only and comm.rank > 0:
                assert state == {}
                return
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5)

    on_ranks("t5", 3, work)


def test_under_mixed_precision_and_offload_it_is_as_kept():
    def work(comm, model, plain):
        same(model.state_dict(), plain.state_dict())
        model.load_state_dict(plain.state_dict())
        with FSDP.summon_full_params(model):
            assert model.shared.weight.dtype == torch.float32
        seq2seq_loss(model, batches(1, 2)[0]).backward()

    on_ranks("t5", 2, work, mixed_precision=BF16, cpu_offload=CPUOffload(offload_params=True))


def test_gathering_holds_one_unit_beside_the_shards():
    def work(comm, model, plain):
        seen = []
        gather = comm.all_gather

        def spy(full, shard):
            seen.append(full.numel())
            return gather(full, shard)

        comm.all_gather = spy
        with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
            model.state_dict()
        largest = max(row.parameters for row in units(model.module).rows)
        assert 0 < max(seen) < 1.1 * largest < sum(p.numel() for p in plain.parameters()) / 2

    on_ranks("t5", 2, work)


def test_a_part_gives_and_takes_its_own_names():
    def work(comm, model, plain):
        part, plain_part = model.encoder.block[1], plain.encoder.block[1]
        same(part.state_dict(), plain_part.state_dict())
        same(part.state_dict(prefix="x."), plain_part.state_dict(prefix="x."))
        part.load_state_dict({name: value * 2 for name, value in plain_part.state_dict().items()})
        doubled = plain.encoder.block[1].layer[0].layer_norm.weight * 2
        assert torch.equal(model.state_dict()["encoder.block.1.layer.0.layer_norm.weight"], doubled)

    on_ranks("t5", 2, work)


def test_a_module_around_a_model_gives_and_takes_all_names():
    _, models = replicas(TinyLM, 4)

    def work(comm):
        outer = nn.ModuleDict({"a": FSDP(models[comm.rank], comm, auto_wrap_policy=POLICY), "b": nn.Linear(2, 2)})
        plain = nn.ModuleDict({"a": models[2 + comm.rank], "b": copy.deepcopy(outer["b"])})
        same(outer.state_dict(), plain.state_dict())
        outer.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
        assert torch.equal(outer.state_dict()["a.head.weight"], plain["a"].embed.weight + 1)

    run_ranks(2, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", [SHARDED, LOCAL])
def test_sharded_and_local_state_dicts_come_back(kind, chosen):
    def work(comm, model, plain):
        FSDP.set_state_dict_type(model, chosen)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        if chosen is SHARDED:
            parts = {name: v for name, v in state.items() if isinstance(v, ShardTensor)}
            assert parts.keys() <= plain.state_dict().keys()
            for name, part in parts.items():
                flat = plain.state_dict()[name].reshape(-1)
                assert torch.equal(part.flat, flat[part.start : part.start + part.flat.numel()])
                assert part.shape == plain.state_dict()[name].shape
        state = copy.deepcopy(state) if chosen is LOCAL else state
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(state)
        FSDP.set_state_dict_type(model, FULL)
        same(model.state_dict(), plain.state_dict())

    on_ranks(kind, 4, work)


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing():
    def work(comm, model, plain):
        good = plain.state_dict()
        texts = []
        for state, strict in (
            ({name: value for name, value in good.items() if "up" not in name}, True),
            (good | {"other": torch.zeros(1)}, True),
            (good | {"blocks.0.up.weight": torch.zeros(3, 3)}, False),
            (good | ({"blocks.0.up.weight": torch.zeros(3, 3)} if comm.rank == 1 else {}), False),
        ):
            with pytest.raises(ShardingError) as caught:
                model.load_state_dict({name: value + 1 for name, value in state.items()}, strict=strict)
            texts.append(str(caught.value))
        with pytest.raises(ShardingError, match="assign"):
            model.load_state_dict(good, assign=True)
        same(model.state_dict(), good)
        loose = model.load_state_dict({"other": torch.zeros(1), "head.weight": good["head.weight"]}, strict=False)
        assert loose.unexpected_keys == ["other"]
        assert "blocks.0.up.weight" in loose.missing_keys
        assert "embed.weight" not in loose.missing_keys
        return texts

    first, second = on_ranks("lm", 2, work)
    assert first == second
    assert "blocks.3.up.weight" in first[0]
    assert "other" in first[1]
    assert "(3, 3) where the model has (40, 24)" in first[2]


# Which state dict


def test_the_type_is_kept_returned_and_put_back():
    def work(comm, model, plain):
        assert FSDP.get_state_dict_type(model).state_dict_type is FULL
        former = FSDP.set_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True))
        assert former.state_dict_type is FULL

        def look():
            settings = FSDP.get_state_dict_type(model)
            assert settings.state_dict_config.rank0_only
            assert settings.optim_state_dict_config == FullOptimStateDictConfig()
            raise KeyError

        with pytest.raises(KeyError), FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            look()
        assert FSDP.get_state_dict_type(model).state_dict_config.offload_to_cpu
        for kind, config, optim in (
            (FULL, LocalStateDictConfig(), None),
            (SHARDED, None, FullOptimStateDictConfig()),
            ("full", None, None),
        ):
            with pytest.raises(ConfigError):
                FSDP.set_state_dict_type(model, kind, config, optim)
        assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED

    on_ranks("lm", 2, work)
    with pytest.raises(ShardingError, match="contains no sharded model"):
        FSDP.get_state_dict_type(TinyLM())


# peft


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapted_model_gives_its_adapter_on_every_rank(tmp_path):
    def make():
        config = LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"])
        return get_peft_model(t5(), config)

    _, models = replicas(make, 4)

    def work(comm):
        model, plain = FSDP(models[comm.rank], comm, auto_wrap_policy=POLICY), models[2 + comm.rank]
        for one in (model, plain):
            optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
            seq2seq_loss(one.eval(), batches(1, 2)[0]).backward()
            optimizer.step()
        ours, theirs = get_peft_model_state_dict(model.module), get_peft_model_state_dict(plain)
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5)
        model.module.save_pretrained(str(tmp_path / str(comm.rank)))
        assert any(p.numel() for p in model.parameters())

    run_ranks(2, work)
    assert len({(tmp_path / str(rank) / "adapter_model.safetensors").read_bytes() for rank in range(2)}) == 1


# The optimizer's state


def groups_of(model):
    """Two groups, in another order than the model's."""
    small = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    return [{"params": small, "lr": 3e-3}, {"params": rest, "weight_decay": 0.1}]


def adamw(model):
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adagrad(model):
    """It has state where a rank has no rows, and counts no steps there."""
    return torch.optim.Adagrad(model.parameters(), lr=1e-2)


def train(model, optimizer, loss_of, seed=1):
    for tokens in batches(2, 2, seed=seed):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(comm, model, plain, kind, optimizer_of):
    both = [(one, optimizer_of(one)) for one in (model, plain)]
    for one, optimizer in both:
        train(one, optimizer, KINDS[kind][1])
    return both[0][1], both[1][1]


def assert_close_states(ours, theirs):
    """State dicts by name or number."""
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert list(ours["state"][key]) == list(state)
        for what, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours["state"][key][what], value, atol=1e-6, rtol=1e-4)
            else:
                assert ours["state"][key][what] == value
    assert ours["param_groups"] == theirs["param_groups"]


def by_name(optimizer, model):
    return FSDP.rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer)


def sorted_groups(state):
    return state | {"param_groups": [g | {"params": sorted(g["params"])} for g in state["param_groups"]]}


CASES = [
    ("lm", adamw, 1),
    ("lm", momentum, 4),
    ("lm_frozen_parts", adamw, 4),
    ("t5", adamw, 2),
    ("normed", adamw, 4),
    ("normed", adagrad, 4),
]


@pytest.mark.parametrize(("kind", "optimizer_of", "size"), CASES)
def test_optimizer_state_is_the_plain_optimizer_s_by_name(kind, optimizer_of, size):
    def work(comm, model, plain):
        optimizer, other = trained(comm, model, plain, kind, optimizer_of)
        state = FSDP.optim_state_dict(model, optimizer)
        expected = by_name(other, plain)
        assert_close_states(sorted_groups(state), expected)
        assert_close_states(sorted_groups(FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())), expected)
        legacy = FSDP.full_optim_state_dict(model, optimizer)
        assert legacy == {} if comm.rank else legacy.keys() == state.keys()
        plain_again = optimizer_of(plain)
        numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain, optim=plain_again)
        assert_close_states(numbered, other.state_dict())
        plain_again.load_state_dict(numbered)
        # Back, into what is there.
        FSDP.optim_state_dict_to_load(model, optimizer, expected, load_directly=True)
        assert_close_states(sorted_groups(FSDP.optim_state_dict(model, optimizer)), expected)

    on_ranks(kind, size, work)


def test_it_comes_back_on_another_number_of_ranks_and_the_runs_stay_together():
    def save(comm, model, plain):
        optimizer, _ = trained(comm, model, plain, "lm", adamw)
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)

    weights, state = on_ranks("lm", 2, save)[0]

    def load(comm, model, plain, how):
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
        rank0 = state if comm.rank == 0 else None
        cut = {
            "to_load": lambda: FSDP.optim_state_dict_to_load(model, optimizer, state),
            "shard": lambda: FSDP.shard_full_optim_state_dict(state, model, optim=optimizer),
            "scatter": lambda: FSDP.scatter_full_optim_state_dict(rank0, model, optim=optimizer),
        }[how]()
        optimizer.load_state_dict(cut)
        assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-2]
        train(model, optimizer, lm_loss, seed=3)
        return model.state_dict()

    runs = [
        on_ranks("lm", size, lambda c, m, p, how=how: load(c, m, p, how))[0]
        for size, how in ((2, "to_load"), (3, "shard"), (4, "scatter"))
    ]
    for other in runs[1:]:
        for name, value in runs[0].items():
            torch.testing.assert_close(other[name], value, atol=2e-6, rtol=1e-4)


def test_rank0_only_gives_and_takes_it_on_rank_0():
    def work(comm, model, plain):
        optimizer, _ = trained(comm, model, plain, "lm", adamw)
        FSDP.set_state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True))
        state = FSDP.optim_state_dict(model, optimizer)
        assert (state == {}) is (comm.rank > 0)
        fresh = adamw(model)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    on_ranks("lm", 3, work)


@pytest.mark.parametrize("kind", [SHARDED, LOCAL])
def test_sharded_and_local_optimizer_states_come_back(kind):
    def work(comm, model, plain):
        optimizer, _ = trained(comm, model, plain, "lm", adamw)
        FSDP.set_state_dict_type(model, kind)
        state = FSDP.optim_state_dict(model, optimizer)
        assert any(isinstance(v, ShardTensor) for of in state["state"].values() for v in of.values()) is (
            kind is SHARDED
        )
        fresh = adamw(model)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        legacy = adamw(model)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        legacy.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, model, legacy))
        for one in (fresh, legacy):
            for param, theirs in optimizer.state.items():
                if param.numel():
                    assert all(torch.equal(one.state[param][key], theirs[key]) for key in theirs)

    on_ranks("lm", 4, work)


def test_without_an_optimizer_numbers_are_those_of_the_parameters():
    def work(comm, model, plain):
        optimizer, other = trained(comm, model, plain, "lm", momentum)
        state = FSDP.optim_state_dict(model, optimizer)
        fresh = momentum(model)
        fresh.load_state_dict(FSDP.shard_full_optim_state_dict(state, model))
        for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
            assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
        numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain)
        assert_close_states(numbered, other.state_dict())
        named = FSDP.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
        assert set(named["state"]) <= set(state["state"])

    on_ranks("lm", 2, work)


def test_states_that_do_not_fit_are_refused():
    class Pair:
        def size(self):
            return 7

    def work(comm, model, plain):
        optimizer, other = trained(comm, model, plain, "lm", adamw)
        state = FSDP.optim_state_dict(model, optimizer)
        texts = []
        for wrong, match in (
            (other.state_dict(), "rekey_optim_state_dict"),
            ({}, "rank0_only"),
            ({**state, "state": {**state["state"], "embed.weight": {"exp_avg": torch.zeros(3, 3)}}}, "shape"),
            ({**state, "param_groups": state["param_groups"][:1]}, "did not step"),
        ):
            with pytest.raises(CheckpointError, match=match) as caught:
                FSDP.optim_state_dict_to_load(model, optimizer, wrong)
            texts.append(str(caught.value))
        with pytest.raises(ProcessGroupError, match="7 ranks"):
            FSDP.optim_state_dict(model, optimizer, group=Pair())
        with pytest.raises(CheckpointError, match="names or all numbers"):
            FSDP.rekey_optim_state_dict(
                {"state": {0: {}, "a": {}}, "param_groups": []}, OptimStateKeyType.PARAM_ID, plain
            )
        with pytest.warns(FutureWarning, match="optim_input"):
            FSDP.rekey_optim_state_dict(
                other.state_dict(), OptimStateKeyType.PARAM_NAME, plain, groups_of(plain), optim=other
            )
        return texts

    first, second = on_ranks("lm", 2, work)
    assert first == second


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
