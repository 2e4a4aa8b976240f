"""Private names of torch: all in one file; without one, importing works, and what needs it says which is missing."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fullshard
from fullshard.core import torch_private

SOURCE = Path(torch_private.__file__).read_text()


def printed(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")


def test_no_other_file_uses_a_private_name_of_torch():
    found = set()
    for path in Path(fullshard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path != Path(torch_private.__file__) else ():
            names = [node.module, *(one.name for one in node.names)] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Attribute) and re.match(r"(torch|dist|init|theirs)\.[\w.]+$", ast.unparse(node)):
                names = ["torch", ast.unparse(node)]
            private = [one for one in names if one and re.search(r"(^|\.)_[a-zA-Z]", one)]
            if names and str(names[0]).startswith("torch") and private:
                found.add((path.name, private[0]))
    of_classes = {("linear.py", "torch.Tensor._make_subclass"), ("linear.py", "torch.Tensor._make_wrapper_subclass")}
    # an operator's name, and a name of torch that is replaced, whether it is there or not
    assert found - of_classes == {
        ("hooks.py", "torch.ops.aten._unsafe_view"),
        ("elementwise.py", "init._calculate_fan_in_and_fan_out"),
    }


def test_the_installed_torch_has_every_attribute_that_is_read_in_place():
    tensor = torch.zeros(1, requires_grad=True)
    instances = {
        "torch.nn.Module": nn.Linear(1, 1),
        "torch.Tensor": tensor,
        "torch.UntypedStorage": tensor.untyped_storage(),
        "torch.optim.SGD": torch.optim.SGD([tensor]),
        "torch.amp.GradScaler": torch.amp.GradScaler("cpu"),
        "torch._ops.OpOverload": torch.ops.aten.add.Tensor,
        "torch.distributed.device_mesh.DeviceMesh": DeviceMesh,
        "torch.distributed.fsdp.MixedPrecision": fsdp.MixedPrecision,
        "torch.distributed.fsdp.ShardingStrategy": fsdp.ShardingStrategy,
        "torch.distributed.fsdp.wrap.ModuleWrapPolicy": ModuleWrapPolicy,
    }
    assert instances.keys() == torch_private.ATTRIBUTES.keys()
    for kind, names in torch_private.ATTRIBUTES.items():
        assert [name for name in names if not hasattr(instances[kind], name)] == []


NAMES = re.findall(r'^(\w+)(?:: .*)? = _named\("(.+?)", "(.+?)"\)', SOURCE, re.M)
PLAN = """fullshard.plan(lambda: nn.Linear(2, 2), lambda: torch.ones(1, 2), world_size=2, rank=0, wrap=None,
                         loss_fn=lambda model, batch: model(batch).sum())"""
USERS = {
    **{("torch._subclasses.fake_tensor", name): PLAN for name in ("FakeTensorMode", "UnsupportedOperatorException")},
    ("torch.utils._python_dispatch", "TorchDispatchMode"): PLAN,
    ("torch._C", "_storage_Use_Count"): PLAN,
    ("torch.utils._python_dispatch", "_disable_current_modes"): "planner.real_tensors()",
    ("torch._C", "DispatchKey"): "torch_private.run_composite(torch.ops.aten.mse_loss.default, (), {})",
    ("torch._C", "_current_graph_task_id"): "torch_private.in_backward()",
    ("torch.nn.modules.module", "_IncompatibleKeys"): "torch_private.incompatible_keys([], [])",
    ("torch.distributed.checkpoint._nested_dict", "unflatten_state_dict"): "torch_private.unflatten({}, {})",
    **{
        (f"torch.distributed.{module}", name): "import fullshard.compat.torch_fsdp"
        for module, name in (
            ("algorithms._checkpoint.checkpoint_wrapper", "CheckpointImpl"),
            ("checkpoint.state_dict", "_state_dict_fn"),
            ("checkpoint.state_dict", "_maybe_full_or_cpu_state_dict"),
        )
    },
}
WITHOUT = """
import importlib, os
import torch
from torch import nn
import torch.distributed.fsdp, torch.distributed.checkpoint.state_dict, torch.utils.flop_counter
import torch.distributed.tensor, torch.testing, torch.distributed.algorithms._checkpoint.checkpoint_wrapper

for module, name, code in {cases!r}:
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    delattr(importlib.import_module(module), name)
    import fullshard.library, fullshard.core.testing
    from fullshard import planner
    from fullshard.errors import ConfigError
    from fullshard.core import torch_private
    try:
        exec(code)
    except ConfigError as error:
        print(name, error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_without_one_of_the_names_importing_works_and_its_user_says_which_is_missing():
    cases = [(*key, code) for key, code in USERS.items()]
    cases += [(*name, f"torch_private.{use}()") for use, *name in NAMES if tuple(name) not in USERS]
    assert len(cases) > 25
    told = printed(WITHOUT.format(cases=cases))[:-1]
    assert [line.partition(" ")[0] for line in told] == [name for _, name, _ in cases]
    for (module, name, _), line in zip(cases, told, strict=True):
        assert f"{module}.{name} of torch, which version {importlib.metadata.version('torch')} does not have" in line


LIFETIME = """
import copy, gc, torch
from torch import nn
torchs = torch.autograd.backward
import fullshard
from fullshard import fully_shard
from fullshard.core.comm import SoloComm
from fullshard.core.testing import run_ranks
replaced = lambda: torch.autograd.backward is not torchs
print("imported", replaced())

def asked_for(model):
    # Also after the pass is over: the graph is kept.
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True, inputs=[model.weight])
    one = model.weight.grad.full_tensor().clone()
    loss.backward(inputs=model.bias)
    assert torch.equal(one, torch.full((4, 3), 2.0))
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 2.0))

def many(comm):
    for _ in range(20):
        asked_for(fully_shard(nn.utils.skip_init(nn.Linear, 3, 4).requires_grad_(), comm, wrap=None, first_values=
            fullshard.FirstValues(from_rank0=True)))
        if comm.rank % 2:
            gc.collect()

model = fully_shard(nn.Linear(3, 4), SoloComm(torch.device("cpu")), wrap=None)
print("sharded", replaced())
asked_for(model)
del model
gc.collect()
print("freed", replaced())
run_ranks(4, many)
gc.collect()
print("freed by threads", replaced())
model = fully_shard(nn.Linear(3, 4), SoloComm(torch.device("cpu")), wrap=None)
ours = torch.autograd.backward
torch.autograd.backward = lambda *args, **kwargs: ours(*args, **kwargs)
del model
gc.collect()
model = fully_shard(nn.Linear(3, 4), SoloComm(torch.device("cpu")), wrap=None)
asked_for(model)
print("wrapped by others", replaced())
"""


def test_torchs_backward_is_replaced_only_while_a_sharded_model_lives():
    assert printed(LIFETIME)[:-1] == [
        "imported False",
        "sharded True",
        "freed False",
        "freed by threads False",
        "wrapped by others True",
    ]
