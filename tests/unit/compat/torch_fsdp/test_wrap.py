"""The modules that a wrap policy chooses are those that torch's own code chooses."""

import copy
import dataclasses
import functools
import threading
import warnings

import pytest
import torch
import torch.distributed.fsdp.api
import torch.distributed.fsdp.wrap as theirs
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.models.t5.modeling_t5 import T5Block

import fullshard.compat.torch_fsdp
import fullshard.compat.torch_fsdp.wrap as ours
from fullshard.errors import ConfigError, WrapError
from support.models import Block, TinyLM, t5, t5_untied


class Nested(nn.Module):
    """Lists in lists, a dict, attention, batch norm, and a module at two places."""

    def __init__(self):
        super().__init__()
        self.lists = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))
        self.dict = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(6, 6), nn.ReLU())})
        self.attention = nn.MultiheadAttention(16, 2)
        self.layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32)
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        self.again = self.conv[0]


def lora():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses names that transformers renamed
        return get_peft_model(t5(), LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"))


MODELS = {"lm": TinyLM, "nested": Nested, "t5": t5, "t5_untied": t5_untied, "lora": lora}

LINEAR = (nn.Linear,)
POLICIES = {
    "always": lambda house: house.always_wrap_policy,
    "lambda": lambda house: functools.partial(
        house.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, (nn.Linear, Block))
    ),
    "transformer": lambda house: functools.partial(
        house.transformer_auto_wrap_policy, transformer_layer_cls={T5Block, Block, nn.TransformerEncoderLayer}
    ),
    "or": lambda house: functools.partial(
        house._or_policy,
        policies=[
            functools.partial(house.transformer_auto_wrap_policy, transformer_layer_cls={T5Block, Block}),
            functools.partial(house.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Embedding)),
        ],
    ),
    "module_function": lambda house: functools.partial(house._or_policy, policies=[house.ModuleWrapPolicy(LINEAR)]),
    "module": lambda house: house.ModuleWrapPolicy({T5Block, Block, nn.Linear}),
    "custom": lambda house: house.CustomPolicy(lambda module: isinstance(module, (T5Block, Block, nn.Conv2d))),
    "leaves": lambda house: functools.partial(
        house.size_based_auto_wrap_policy, min_num_params=50, force_leaf_modules={nn.Sequential, T5Block}
    ),
    "no_linear": lambda house: functools.partial(
        house.size_based_auto_wrap_policy, min_num_params=50, exclude_wrap_modules=set(LINEAR)
    ),
    "plain": lambda _house: lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel % 3 == 0,
    "stops": lambda _house: (
        lambda module, recurse, nonwrapped_numel: nonwrapped_numel > 500 if recurse else nonwrapped_numel < 900
    ),
} | {
    f"size_{numel}": lambda house, numel=numel: functools.partial(
        house.size_based_auto_wrap_policy, min_num_params=numel
    )
    for numel in (1, 60, 1000, 10**8)
}


class Around(nn.Module):
    """Stands for torch's wrapper, which needs a process group."""

    def __init__(self, module, **_kwargs):
        super().__init__()
        self.around = module


def chosen_by_torch(model, policy, ignored_modules, ignored_params, alone):
    """Names of the modules that torch wraps."""
    names = {module: name for name, module in model.named_modules()}
    if isinstance(policy, theirs._Policy):
        found = policy._run_policy(model, ignored_modules, {"mixed_precision": None})
        if alone:
            found = theirs._run_mixed_precision_override_policy(model, alone, ignored_modules, {}, found)
        return {names[module] for module in found if module is not model}
    if alone:
        alone = functools.partial(theirs._wrap_module_cls_individually, module_classes=alone)
        policy = functools.partial(theirs._or_policy, policies=[policy, alone])
    theirs._recursive_wrap(model, policy, Around, ignored_modules, ignored_params, only_wrap_children=True)
    return {names[module.around] for module in model.modules() if isinstance(module, Around)}


def chosen_here(model, policy, ignored_modules=frozenset(), ignored_params=frozenset(), alone=()):
    names = {module: name for name, module in model.named_modules()}
    ignored = set(ignored_modules), set(ignored_params)
    return {names[module] for module in ours.modules_to_wrap(model, policy, {}, ignored, alone)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_modules_are_chosen_as_by_torch(kind, policy):
    with torch.device("meta"):
        model = MODELS[kind]()
    for alone in ((), (_BatchNorm,)):
        expected = chosen_by_torch(copy.deepcopy(model), POLICIES[policy](theirs), set(), set(), alone)
        assert chosen_here(model, POLICIES[policy](ours), alone=alone) == expected
        assert chosen_here(model, POLICIES[policy](theirs), alone=alone) == expected


@pytest.mark.parametrize("policy", ["always", "size_60", "size_1000", "module", "custom", "lambda"])
def test_ignored_modules_are_neither_asked_about_nor_counted_as_in_torch(policy):
    def ignored(model):
        modules = {*model.lists[1].modules(), *model.conv.modules()}
        return modules, {param for module in modules for param in module.parameters()}

    model, other = Nested(), Nested()
    expected = chosen_by_torch(other, POLICIES[policy](theirs), *ignored(other), ())
    assert chosen_here(model, POLICIES[policy](ours), *ignored(model)) == expected
    assert not any(name.startswith("conv") for name in expected)


def test_the_policy_that_peft_makes_chooses_adapters_and_blocks():
    model = lora()
    found = chosen_here(model, fsdp_auto_wrap_policy(model))
    other = copy.deepcopy(model)
    assert found == chosen_by_torch(other, fsdp_auto_wrap_policy(other), set(), set(), ())
    assert "base_model.model.encoder.block.0" in found
    assert "base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.default" in found


def test_a_policy_of_torchs_is_refused_where_a_module_was_wrapped_by_hand():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2)))
    by_hand = nn.Module()
    by_hand._fsdp_wrapped_module = model[1][0]
    model[1][0] = by_hand
    with pytest.raises(WrapError, match=r"found 1\.0 in Sequential"):
        chosen_here(model, ours.always_wrap_policy)
    assert not chosen_here(model, ours.RepeatedBlocks())


def test_a_custom_policy_gives_a_module_its_own_arguments():
    model = TinyLM()
    policy = ours.CustomPolicy(lambda m: {"cpu_offload": "own"} if m is model.embed else isinstance(m, Block))
    found = ours.modules_to_wrap(model, policy, {"cpu_offload": "root's", "rank": 0}, (set(), set()))
    assert found[model.embed] == {"cpu_offload": "own", "rank": 0}
    assert found[model.blocks[0]] == {"cpu_offload": "root's", "rank": 0}


def test_what_is_no_policy_is_refused():
    with pytest.raises(ConfigError, match="auto_wrap_policy must be a function"):
        chosen_here(TinyLM(), {Block})
    with pytest.raises(ConfigError, match="it returned 3"):
        chosen_here(TinyLM(), ours.CustomPolicy(lambda _: 3))


def test_wrap_wraps_inside_enable_wrap_only_and_its_arguments_come_first():
    made = []

    def wrapper(module, **kwargs):
        made.append(kwargs)
        return nn.Sequential(module)

    layer = nn.Linear(2, 2)
    assert ours.wrap(layer, a=1) is layer
    with ours.enable_wrap(wrapper_cls=wrapper, a=1, b=2):
        assert ours.wrap(layer, b=3)[0] is layer
        with pytest.raises(WrapError, match="cannot be nested"), ours.enable_wrap(wrapper_cls=wrapper):
            pass
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(ours.wrap(layer)))
        thread.start()
        thread.join()
    assert made == [{"a": 1, "b": 3}]
    assert elsewhere == [layer]  # another rank's thread
    assert ours.wrap(layer) is layer


def test_every_name_of_torchs_module_is_here():
    here = fullshard.compat.torch_fsdp
    assert set(torch.distributed.fsdp.__all__) <= set(here.__all__)
    assert set(theirs.__all__) <= set(ours.__all__)
    wrapping = set(theirs.__all__) - {"wrap"}  # a module here and there
    assert wrapping <= set(here.__all__)
    assert all(hasattr(here, name) for name in here.__all__)


@pytest.mark.parametrize("name", torch.distributed.fsdp.api.__all__)
def test_arguments_have_torchs_members_fields_and_defaults(name):
    here, there = getattr(fullshard.compat.torch_fsdp.api, name), getattr(torch.distributed.fsdp.api, name)
    if dataclasses.is_dataclass(there):
        fields, expected = ([(f.name, f.default) for f in dataclasses.fields(one)] for one in (here, there))
        assert fields == expected
    else:
        assert list(here.__members__) == list(there.__members__)
