"""The plugin reads what Accelerate's reads: fields, words, numbers, environment variables."""

import contextlib
import dataclasses
import functools
import os
import unittest.mock

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from accelerate import FullyShardedDataParallelPlugin as Theirs
from torch import nn

from fullshard.compat.accelerate import FullyShardedDataParallelPlugin as Plugin
from fullshard.compat.accelerate.prepare import blocks_of, shard
from fullshard.compat.torch_fsdp import api, fsdp2, wrap
from fullshard.core.comm import SoloComm
from fullshard.core.engine.setup.wrap import find_units
from fullshard.errors import ConfigError, ProcessGroupError, WrapError
from support.models import Block, TinyLM, t5
from support.releases import as_accelerate_1_15

NO_EFFECT = "ignore:.*has no effect"


def plain(value):
    """A value as words, whichever library's class it is of."""
    if isinstance(value, functools.partial):
        return value.func.__name__, {key: plain(given) for key, given in value.keywords.items()}
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(value):
        return value.__name__
    return getattr(value, "name", value)


def as_words(plugin):
    return {field.name: plain(getattr(plugin, field.name)) for field in dataclasses.fields(Theirs)}


@pytest.fixture(autouse=True)
def _environment():
    with unittest.mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("FSDP_")]:
            del os.environ[name]
        yield


@as_accelerate_1_15
def test_the_fields_are_accelerates_in_their_order():
    assert [field.name for field in dataclasses.fields(Plugin)] == [field.name for field in dataclasses.fields(Theirs)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"fsdp_version": 2},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "2"},
        {"sharding_strategy": torch_fsdp.ShardingStrategy.NO_SHARD},
        {"sharding_strategy": "hybrid_shard_zero2"},
        {"backward_prefetch": "BACKWARD_POST"},
        {"backward_prefetch": "1"},
        {"backward_prefetch": "NO_PREFETCH"},
        {"cpu_offload": True},
        {"cpu_offload": torch_fsdp.CPUOffload(offload_params=True)},
        {"fsdp_version": 2, "cpu_offload": True},
        {"fsdp_version": 2, "cpu_offload": torch_fsdp.CPUOffloadPolicy(pin_memory=False)},
        {"fsdp_version": 2, "reshard_after_forward": "false"},
        {"state_dict_type": "SHARDED_STATE_DICT"},
        {"state_dict_type": "full_state_dict", "fsdp_version": 2},
        {"state_dict_type": "3"},
        {"mixed_precision_policy": "bf16"},
        {"mixed_precision_policy": "fp16", "fsdp_version": 2},
        {"mixed_precision_policy": torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16)},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "A,B"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7},
        {"auto_wrap_policy": "NO_WRAP"},
        {"activation_checkpointing": True},
        {"ignored_modules": "a.*"},
        {"use_orig_params": True, "forward_prefetch": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::FutureWarning", NO_EFFECT)
def test_a_field_means_what_it_means_in_accelerate(given):
    mine, theirs = as_words(Plugin(**given)), as_words(Theirs(**given))
    for name in ("mixed_precision_policy", "state_dict_config", "optim_state_dict_config"):
        if theirs[name] is not None and mine[name] is not None:
            assert mine[name][0] == theirs[name][0]
            theirs[name], mine[name] = (
                {k: v for k, v in one[name][1].items() if k[0] != "_"} for one in (theirs, mine)
            )
    assert mine == theirs


ENVIRONMENT = {
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "T5Block",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_IGNORED_MODULES": "lm_head",
}


@pytest.mark.parametrize("changes", [{}, {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}], ids=str)
def test_the_environment_means_what_it_means_in_accelerate(changes):
    os.environ.update(ENVIRONMENT | changes)
    mine, theirs = as_words(Plugin()), as_words(Theirs())
    for name in ("state_dict_config", "optim_state_dict_config"):
        mine.pop(name), theirs.pop(name)
    assert mine == theirs


def test_a_strategy_given_as_reshard_after_forward_counts_in_version_1():
    assert Plugin(reshard_after_forward="SHARD_GRAD_OP").sharding_strategy is api.ShardingStrategy.SHARD_GRAD_OP


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"sharding_strategy": "FULL"}, "sharding_strategy must be one of FULL_SHARD, .* got 'FULL'"),
        ({"sharding_strategy": 9}, "got 9"),
        ({"reshard_after_forward": True}, "needs fsdp_version=2. With version 1 use sharding_strategy=FULL_SHARD"),
        ({"auto_wrap_policy": "wrap"}, "auto_wrap_policy must be transformer_based_wrap, size_based_wrap, no_wrap"),
        ({"cpu_offload": "perhaps"}, "cpu_offload .*must be true or false; got 'perhaps'"),
        ({"cpu_offload": object()}, "CPUOffload or an OffloadPolicy"),
        ({"fsdp_version": 3}, "fsdp_version must be 1 or 2; got 3"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "not LOCAL_STATE_DICT"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True and fsdp_version=2"),
        ({"mixed_precision_policy": "int8"}, "one of fp8, fp16, bf16, fp32; got 'int8'"),
        (
            {"mixed_precision_policy": {"param_dtype": torch.int8}},
            "this one has param_dtype=torch.int8, no reduce_dtype",
        ),
        ({"mixed_precision_policy": 7}, "must be a MixedPrecision with fsdp_version=1; got 7"),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": "many"}, "min_num_params .* got 'many'"),
    ],
)
def test_what_a_field_does_not_take_is_named(given, match):
    with pytest.raises(ConfigError, match=match):
        Plugin(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"limit_all_gathers": False},
        {"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"},
        {"fsdp_version": 2, "backward_prefetch": "BACKWARD_PRE"},
        {"fsdp_version": 2, "use_orig_params": True},
        {"fsdp_version": 2, "param_init_fn": lambda module: None},
        {"fsdp_version": 2, "sync_module_states": True},
        {"fsdp_version": 2, "forward_prefetch": True},
    ],
    ids=lambda given: list(given)[-1],
)
def test_what_has_no_effect_is_named_in_a_warning(given):
    with pytest.warns(UserWarning, match=f"{list(given)[-1]}.* has no effect: "):
        Plugin(**given)


def test_the_models_own_blocks_are_wrapped_where_no_class_is_named():
    plugin, model = Plugin(auto_wrap_policy="transformer_based_wrap"), t5()
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.func is wrap.transformer_auto_wrap_policy
    assert {cls.__name__ for cls in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]} == {"T5Block"}


def test_a_class_that_the_model_has_not_is_told_with_those_it_has():
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"])
    with pytest.raises(
        WrapError, match=r"has Layer, but TinyLM has no such module\. Classes that it has more than once: Block\."
    ):
        plugin.set_auto_wrap_policy(TinyLM())


@pytest.mark.parametrize(("size", "expected"), [(0, None), (50, 50)])
def test_a_size_of_zero_wraps_nothing(size, expected):
    plugin = Plugin(auto_wrap_policy="size_based_wrap", min_num_params=size)
    plugin.set_auto_wrap_policy(TinyLM())
    policy = plugin.auto_wrap_policy
    assert policy is expected if expected is None else policy.keywords == {"min_num_params": expected}


def test_precision_is_set_once_unless_told_to_override():
    plugin = Plugin()
    plugin.set_mixed_precision("bf16", buffer_autocast=True)
    assert plugin.mixed_precision_policy == api.MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    plugin.set_mixed_precision(torch.float16, override=True)
    assert plugin.mixed_precision_policy.param_dtype == torch.float16
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}
    second = Plugin(fsdp_version=2, mixed_precision_policy=dtypes)
    assert isinstance(second.mixed_precision_policy, fsdp2.MixedPrecisionPolicy)
    assert second.mixed_precision_policy.reduce_dtype == torch.float32


def test_another_state_dict_type_brings_its_own_settings():
    plugin = Plugin(state_dict_type="SHARDED_STATE_DICT")
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_config == api.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    mine = api.FullStateDictConfig(rank0_only=False)
    assert Plugin(state_dict_config=mine).state_dict_config is mine


def test_efficient_loading_is_told_to_transformers_and_takes_rank_0s_values():
    plugin = Plugin(cpu_ram_efficient_loading=True)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    assert plugin.sync_module_states


@pytest.mark.parametrize("version", [1, 2])
def test_one_large_unit_that_nobody_asked_for_is_told(version):
    def made(model, **options):
        with contextlib.suppress(ProcessGroupError):  # version 1 shards over processes, and here are none
            shard(model, Plugin(fsdp_version=version, **options), SoloComm(torch.device("cpu")))

    def large():
        return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())

    with pytest.warns(UserWarning, match=r"All 1,049,600 parameters of Sequential .* no repeated blocks") as caught:
        made(large())
    assert "plugin" not in str(caught[0].message)
    made(large(), auto_wrap_policy="no_wrap")
    made(nn.Linear(4, 4))


@pytest.mark.parametrize("options", [{}, {"auto_wrap_policy": "transformer_based_wrap"}])
def test_without_a_policy_the_blocks_are_those_that_fully_shard_finds(options):
    for model in (TinyLM(), t5(), nn.Sequential(*(Block(8, 16) for _ in range(3)))):
        if options and hasattr(model, "config"):
            continue  # it names its blocks
        expected = [module for _, modules in find_units(model, "auto") for module in modules]
        assert blocks_of(model, Plugin(**options)) == expected
        assert len(expected) > 2
    assert blocks_of(TinyLM(), Plugin(auto_wrap_policy="no_wrap")) == []
