"""FSDP1's wrapper on rank threads: which modules it wraps, its arguments, and training as unsharded."""

import functools
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.distributed import fsdp as theirs
from transformers.models.t5.modeling_t5 import T5Block

from fullshard.compat.torch_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.compat.torch_fsdp.wrap import RepeatedBlocks, wrap
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, WrapError
from support.models import Block, TinyLM, batches, lm_loss, seq2seq_loss, t5
from support.parity import ROWS_PER_RANK, assert_same_run, optimizer_for, replicas, train_unsharded

STEPS = 3


BLOCKS = ModuleWrapPolicy({Block})


T5_BLOCKS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})


def pair_of_groups(comm):
    """Of 4 ranks, this rank's (shard, replicate)."""
    return comm.split([[0, 1], [2, 3]]), comm.split([[0, 2], [1, 3]])


def train(model, comm, loss_of, data):
    """As a script of torch's tutorials does it: losses, norms and final weights."""
    optimizer, losses, norms = optimizer_for(model), [], []
    for tokens in data:
        loss = loss_of(model, tokens[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK])
        loss.backward()
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().reshape(1).clone()
        comm.all_reduce(mean).wait()
        losses.append(mean.item() / comm.size)
    with FSDP.summon_full_params(model):
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return losses, norms, weights


def assert_as_unsharded(make, loss_of, wrapped, ranks=2):
    reference, models = replicas(make, ranks)
    data = batches(STEPS, ranks * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)
    for run in run_ranks(ranks, lambda comm: train(wrapped(models[comm.rank], comm), comm, loss_of, data)):
        assert_same_run(run, plain)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"auto_wrap_policy": BLOCKS},
        {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": None},
        {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.NO_SHARD},
        {"auto_wrap_policy": BLOCKS, "backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
        {"auto_wrap_policy": BLOCKS, "cpu_offload": CPUOffload(offload_params=True), "use_orig_params": True},
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=500)},
    ],
    ids=["one unit", "blocks", "shard_grad_op", "no_shard", "prefetch", "offload", "size"],
)
def test_a_wrapped_model_trains_as_the_unsharded_one(arguments):
    assert_as_unsharded(TinyLM, lm_loss, lambda model, comm: FSDP(model, comm, **arguments))


def test_t5_with_its_shared_embedding_trains_as_the_unsharded_one():
    def wrapped(model, comm):
        model = FSDP(model, comm, auto_wrap_policy=T5_BLOCKS, device_id=torch.device("cpu"))
        assert len(FSDP.fsdp_modules(model)) == 1 + 4
        return model

    assert_as_unsharded(t5, seq2seq_loss, wrapped)


def test_adapters_on_t5_with_pefts_policy_train_as_the_unsharded_ones():
    def adapted():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft uses names that transformers renamed
            config = LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM", init_lora_weights="gaussian")
            model = get_peft_model(t5(), config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.1)
        return model

    def wrapped(model, comm):
        policy = fsdp_auto_wrap_policy(model)
        model = FSDP(model, comm, auto_wrap_policy=policy)
        assert any(isinstance(one.module, T5Block) for one in FSDP.fsdp_modules(model))
        assert model.peft_config is model.module.peft_config
        return model

    assert_as_unsharded(adapted, seq2seq_loss, wrapped)


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_a_pair_of_groups_shards_inside_the_first_and_replicates_over_the_second(strategy):
    def wrapped(model, comm):
        pair = pair_of_groups(comm)
        model = FSDP(model, pair, sharding_strategy=strategy, auto_wrap_policy=BLOCKS)
        assert model.world_size == 4
        assert all(param.shard_comm is pair[0] for param in model.parameters())
        return model

    assert_as_unsharded(TinyLM, lm_loss, wrapped, ranks=4)


def by_hand(model, comm):
    for index in (0, 2):
        model.blocks[index] = FSDP(model.blocks[index], comm)
    model.blocks[1].up = FSDP(model.blocks[1].up, comm, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    return model


@pytest.mark.parametrize("policy", [None, RepeatedBlocks()])
def test_a_model_wrapped_by_hand_inside_trains_as_the_unsharded_one(policy):
    def wrapped(model, comm):
        inner = by_hand(model, comm).blocks[0]
        assert inner.check_is_root()
        model = FSDP(model, comm, auto_wrap_policy=policy)
        assert not inner.check_is_root()
        assert FSDP.fsdp_modules(model, root_only=True) == [model]
        assert model.blocks[0] is inner
        return model

    assert_as_unsharded(TinyLM, lm_loss, wrapped)


class Two(nn.Module):
    """Two models under a module that is not wrapped."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x):
        return self.second(self.first(x))


def test_each_outermost_wrapper_is_a_root_of_its_own_under_a_plain_module():
    reference, models = replicas(Two, 2)
    torch.manual_seed(3)
    data = torch.randn(4, 6)
    reference(data).square().mean().backward()
    reference.eval()

    def work(comm):
        model = models[comm.rank]
        model.first = FSDP(model.first, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        model.second = FSDP(model.second, comm)
        assert FSDP.fsdp_modules(model, root_only=True) == [model.first, model.second]
        model(data).square().mean().backward()
        for one in (model.first, model.second):
            with FSDP.summon_full_params(one, with_grads=True):
                yielded = {name: p.grad.clone() for name, p in one.named_parameters()}
            expected = getattr(reference, "first" if one is model.first else "second")
            for name, param in expected.named_parameters():
                torch.testing.assert_close(yielded[name], param.grad)
        state = model.state_dict()
        assert state.keys() == reference.state_dict().keys()
        torch.testing.assert_close(state, dict(reference.state_dict()))
        doubled = {name: value * 2 for name, value in state.items()}
        model.load_state_dict(doubled)
        torch.testing.assert_close(model.state_dict(), doubled)
        del doubled["first.0.weight"]
        assert model.load_state_dict(doubled, strict=False).missing_keys == ["first.0.weight"]
        with pytest.raises(RuntimeError, match=r"first\.other"):
            model.load_state_dict(state | {"first.other": data})

    run_ranks(2, work)


def test_wrap_inside_enable_wrap_wraps_while_the_model_is_built():
    class Built(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = wrap(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
            self.two = wrap(nn.Linear(4, 4))
            self.three = nn.Linear(4, 1)

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    def make(comm):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if comm is None:
                return Built()
            with enable_wrap(wrapper_cls=FSDP, process_group=comm, sync_module_states=True):
                return wrap(Built())

    expected = make(None)(torch.ones(2, 4))

    def work(comm):
        model = make(comm)
        assert model.one.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        assert [one.check_is_root() for one in FSDP.fsdp_modules(model)] == [True, False, False]
        return model(torch.ones(2, 4)).shape

    assert run_ranks(2, work) == [expected.shape] * 2


def test_a_custom_policy_gives_units_their_own_strategy_and_dtypes():
    _, models = replicas(TinyLM, 2)
    seen = {}

    def policy_for(model):
        def choose(module):
            if module is model.blocks[1]:
                return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
            if module is model.blocks[2]:
                return {"mixed_precision": MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)}
            return module in set(model.blocks)

        return CustomPolicy(choose)

    def work(comm):
        model = models[comm.rank]
        blocks = list(model.blocks)
        mixed = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        wrapped = FSDP(model, comm, auto_wrap_policy=policy_for(model), mixed_precision=mixed)
        for index, block in enumerate(blocks):
            block.up.register_forward_hook(
                lambda m, args, out, index=index: seen.__setitem__(index, (args[0].dtype, out.dtype))
            )
        lm_loss(wrapped, batches(1, 2)[0]).backward()
        return [unit.policy.strategy.name for unit in wrapped.module._fullshard_runtime.units]

    units = run_ranks(2, work)
    assert units == [["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD"]] * 2
    assert {index: dtypes[1] for index, dtypes in seen.items()} == {
        0: torch.bfloat16,
        1: torch.bfloat16,
        2: torch.float32,
        3: torch.bfloat16,
    }


def test_a_custom_policy_cannot_change_what_is_the_whole_models():
    def work(comm):
        policy = CustomPolicy(lambda module: {"param_init_fn": print} if isinstance(module, Block) else False)
        with pytest.raises(ConfigError, match="sets param_init_fn of Block"):
            FSDP(TinyLM(), comm, auto_wrap_policy=policy)
        policy = CustomPolicy(lambda module: {"backward_prefetch": None} if isinstance(module, Block) else False)
        model = FSDP(TinyLM(), comm, auto_wrap_policy=policy)
        assert (model.backward_prefetch, model.blocks[0].backward_prefetch) == (BackwardPrefetch.BACKWARD_PRE, None)

    run_ranks(1, work)


def test_attributes_items_and_names_are_those_of_the_wrapped_module():
    _, models = replicas(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 2)

    def work(comm):
        model = models[comm.rank]
        model.label = "mine"
        wrapped = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        assert wrapped.module is model
        assert wrapped.label == "mine"
        assert isinstance(wrapped[0], FSDP)
        assert isinstance(wrapped[0].module, nn.Linear)
        assert wrapped[0].in_features == 3
        assert list(wrapped) == [wrapped[0], wrapped[1], wrapped[2]]
        with pytest.raises(TypeError, match="len"):
            len(wrapped)
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            _ = wrapped.missing
        assert [name for name, _ in wrapped.named_parameters()][:2] == ["0.weight", "0.bias"]
        assert next(name for name, _ in wrapped.named_buffers("m")) == "m.1.running_mean"
        assert {p.shard_meta.name for p in wrapped.parameters()} >= {"0.weight", "2.bias"}
        assert (wrapped.rank, wrapped.world_size) == (comm.rank, 2)
        return repr(wrapped)

    shown = run_ranks(2, work)[0]
    assert shown.splitlines()[:4] == [
        "FullyShardedDataParallel(",
        "  (_fsdp_wrapped_module): Sequential(",
        "    (0): FullyShardedDataParallel(",
        "      (_fsdp_wrapped_module): Linear(in_features=3, out_features=4, bias=True)",
    ]
    assert shown.splitlines()[-2:] == ["  )", ")"]


def test_a_module_at_two_places_has_one_wrapper():
    def work(comm):
        shared = nn.Linear(3, 3)
        model = FSDP(nn.Sequential(shared, nn.Sequential(shared)), comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        assert model[0] is model[1][0]
        model(torch.ones(1, 3)).sum().backward()

    run_ranks(1, work)


def test_a_module_without_parameters_is_wrapped_and_does_nothing():
    def work(comm):
        model = FSDP(nn.Sequential(FSDP(nn.ReLU(), comm), nn.Linear(2, 2)), comm)
        assert model(torch.ones(1, 2)).shape == (1, 2)
        assert FSDP(nn.ReLU(), comm)(-torch.ones(1)).item() == 0.0

    run_ranks(1, work)


def test_ignored_modules_and_parameters_stay_as_they_are():
    _, models = replicas(Two, 2)

    def work(comm):
        model = models[comm.rank]
        norm, bias = model.second[1], model.first[0].bias
        mixed = MixedPrecision(buffer_dtype=torch.float64)
        model.first = FSDP(model.first, comm, ignored_states=[bias])
        model = FSDP(model, comm, ignored_modules=[norm], mixed_precision=mixed)
        assert isinstance(model.module.first.module[0].bias, nn.Parameter)
        assert model.module.first.module[0].bias is bias
        assert bias.shape == (8,)
        assert norm.running_mean.dtype == torch.float32
        sharded = {name for name, param in model.named_parameters() if hasattr(param, "shard_meta")}
        assert sharded == {"first.0.weight", "first.2.weight", "first.2.bias"} | {
            f"second.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
        }
        model(torch.ones(4, 6)).sum().backward()

    run_ranks(2, work)


def test_what_cannot_be_ignored_is_refused():
    def work(comm):
        model = Two()
        model.first = FSDP(model.first, comm)
        with pytest.raises(WrapError, match="already wrapped"):
            FSDP(model, comm, ignored_modules=[model.first])
        with pytest.raises(ConfigError, match="Cannot pass both"):
            FSDP(model, comm, ignored_modules=[], ignored_states=[])
        with pytest.raises(ConfigError, match=r"Linear'>, <class 'torch\.nn\.parameter\.Parameter"):
            FSDP(model, comm, ignored_states=[model.second[0], model.second[2].bias])
        whole = Two()
        with pytest.warns(UserWarning, match="ignore the top-level module"):
            assert not FSDP(whole, comm, ignored_modules=[whole])._is_sharded

    run_ranks(1, work)


def test_a_wrapper_of_which_all_is_ignored_has_the_plain_state():
    def work(comm):
        plain, model = Two(), Two()
        model.second = FSDP(model.second, comm, ignored_modules=list(model.second))
        wrapped = FSDP(model, comm, ignored_modules=[model.first, *model.second])
        with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
            assert list(wrapped.state_dict(prefix="a.")) == [f"a.{name}" for name in plain.state_dict()]
            wrapped.load_state_dict(plain.state_dict())
        assert torch.equal(wrapped(torch.ones(2, 6)), plain(torch.ones(2, 6)))

    run_ranks(1, work)


def test_a_plain_module_loads_into_wrappers_with_nothing_to_shard():
    def work(comm):
        plain, model = Two(), Two()
        model.first = FSDP(model.first, comm)
        for place, module in enumerate(model.second):
            model.second[place] = FSDP(module, comm, ignored_states=list(module.parameters()))
        model.second = FSDP(model.second, comm, ignored_modules=list(model.second[0].module.modules()))
        assert list(model.state_dict()) == list(plain.state_dict())
        missing, unexpected = model.load_state_dict(plain.state_dict())
        assert (missing, unexpected) == ([], [])
        assert torch.equal(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))

    run_ranks(1, work)


def test_the_old_spelling_of_the_policy_is_taken_with_a_warning():
    _, models = replicas(TinyLM, 1)

    def work(comm):
        with pytest.warns(FutureWarning, match="was renamed to auto_wrap_policy"):
            model = FSDP(models[0], comm, fsdp_auto_wrap_policy=BLOCKS)
        with pytest.raises(ConfigError, match="old name"):
            FSDP(TinyLM(), comm, auto_wrap_policy=BLOCKS, fsdp_auto_wrap_policy=BLOCKS)
        return len(FSDP.fsdp_modules(model))

    assert run_ranks(1, work) == [5]


def test_what_cannot_be_done_is_refused_by_name():
    def work(comm):
        for arguments, text in (
            ({"sharding_strategy": "FULL_SHARD"}, "sharding_strategy must be"),
            ({"backward_prefetch": 1}, "backward_prefetch must be"),
            ({"mixed_precision": torch.bfloat16}, "must be a MixedPrecision or None"),
            ({"cpu_offload": True}, "cpu_offload must be CPUOffload"),
            ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "a pair of groups"),
            ({"device_mesh": object()}, "pass only one"),
            ({"param_init_fn": 1}, "param_init_fn to be callable"),
        ):
            with pytest.raises(ValueError, match=text) as caught:
                FSDP(TinyLM(), comm, **arguments)
            assert isinstance(caught.value, ConfigError)
        with pytest.raises(ConfigError, match="as one group or None for FULL_SHARD"):
            FSDP(TinyLM(), (comm, comm))
        with pytest.warns(UserWarning, match="do not implement forward, such as this ModuleList"):
            model = FSDP(nn.ModuleList([nn.Linear(2, 2)]), comm)
        with pytest.raises(ConfigError, match="register_comm_hook is not supported"):
            model.register_comm_hook(None, lambda state, grad: None)

    run_ranks(1, work)


def test_arguments_of_torchs_own_classes_are_taken():
    def work(comm):
        return (
            FSDP(
                TinyLM(),
                comm,
                sharding_strategy=theirs.ShardingStrategy.SHARD_GRAD_OP,
                backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST,
                mixed_precision=theirs.MixedPrecision(param_dtype=torch.bfloat16),
                cpu_offload=theirs.CPUOffload(offload_params=False),
                auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({Block}),
            )
            .module._fullshard_runtime.units[1]
            .policy
        )

    policy = run_ranks(1, work)[0]
    assert (policy.strategy.name, policy.precision.param, policy.precision.reduce) == (
        "SHARD_GRAD_OP",
        "bfloat16",
        "bfloat16",
    )
