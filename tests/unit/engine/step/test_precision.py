"""Tensors are found and cast in whatever modules take and return."""

from collections import defaultdict, namedtuple
from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutput

from fullshard.core.engine.step.precision import cast_floats, map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    value: torch.Tensor
    note: str = "kept"


def nested(tensor):
    return {
        "a": [tensor, 1, None],
        "b": Pair(tensor, (tensor,)),
        "c": Record(tensor),
        "d": BaseModelOutput(last_hidden_state=tensor),
    }


def test_tensors_are_found_at_every_depth():
    assert len(list(tensors_in(nested(torch.ones(2))))) == 5


def test_casting_reaches_every_depth_and_keeps_types():
    result = cast_floats(nested(torch.ones(2)), "bfloat16")
    assert all(t.dtype == torch.bfloat16 for t in tensors_in(result))
    assert isinstance(result["b"], Pair)
    assert result["c"].note == "kept"
    assert isinstance(result["d"], BaseModelOutput)


def test_integers_are_not_cast_and_nothing_to_cast_is_the_same_object():
    value = nested(torch.ones(2, dtype=torch.int64))
    assert cast_floats(value, "bfloat16") is value
    assert cast_floats(value, None) is value
    assert map_tensors(value, lambda t: t) is value


def test_a_dict_of_another_class_is_copied_with_what_it_carries():
    value = defaultdict(list, a=torch.ones(2))
    result = cast_floats(value, "bfloat16")
    assert result["a"].dtype == torch.bfloat16
    assert result.default_factory is list
    assert value["a"].dtype == torch.float32
