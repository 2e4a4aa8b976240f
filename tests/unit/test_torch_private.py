"""Private names of torch: all in one file; without one, importing works, and what needs it says which is missing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import fullshard
from fullshard.core import torch_private

ROOMS = ("layout", "comm", "shards", "quantized", "engine", "optim", "testing")
SOURCE = Path(torch_private.__file__).read_text()


def printed(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")


def test_the_engines_rooms_import_no_private_name_of_torch():
    found = []
    for path in (path for room in ROOMS for path in (Path(fullshard.__file__).parent / "core" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module, *(one.name for one in node.names)] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Attribute) and re.match(r"(torch|dist|init)\.[\w.]+$", ast.unparse(node)):
                names = ["torch", ast.unparse(node)]
            private = [one for one in names if one and re.search(r"(^|\.)_[a-zA-Z]", one)]
            if names and str(names[0]).startswith("torch") and private:
                found.append((path.name, private[0]))
    of_classes = {("linear.py", "torch.Tensor._make_subclass"), ("linear.py", "torch.Tensor._make_wrapper_subclass")}
    # an operator's name, and a name of torch that is replaced, whether it is there or not
    assert set(found) - of_classes == {
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
    }
    assert instances.keys() == torch_private.ATTRIBUTES.keys()
    for kind, names in torch_private.ATTRIBUTES.items():
        assert [name for name in names if not hasattr(instances[kind], name)] == []


WITHOUT = """
import importlib, re, sys, torch, torch.distributed, torch.nn.init, torch.optim, torch.utils._pytree
names = re.findall(r'_named\\("(.+?)", "(.+?)"\\)', open(sys.argv[1]).read())
for module, name in names:
    delattr(importlib.import_module(module), name)
import fullshard, fullshard.core.engine.setup.api, fullshard.core.optim, fullshard.core.quantized
import fullshard.core.testing
from fullshard.core import torch_private
from fullshard.errors import ConfigError
for variable in re.findall(r'^(\\w+)(?:: .*)? = _named', open(sys.argv[1]).read(), re.M):
    try:
        getattr(torch_private, variable)()
    except ConfigError as error:
        print(error)
try:
    torch_private.in_backward()
except ConfigError as error:
    print(error)
print(len(names))
"""


def test_without_any_of_the_names_importing_works_and_calls_say_which_is_missing():
    path = torch_private.__file__
    output = subprocess.run([sys.executable, "-c", WITHOUT, path], capture_output=True, text=True, check=True).stdout
    *told, count = output.splitlines()
    names = re.findall(r'_named\("(.+?)", "(.+?)"\)', SOURCE)
    assert int(count) == len(names) > 10
    for name in {name for _, name in names} - {"_IncompatibleKeys"}:  # made when it is asked for
        assert any(f".{name} of torch, which version {torch.__version__} does not have" in line for line in told), name
    assert f"torch._C._current_graph_task_id of torch, which version {torch.__version__}" in told[-1]


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
            fullshard.engine.FirstValues(from_rank0=True)))
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
