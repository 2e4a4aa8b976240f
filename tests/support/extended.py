"""Tensor subclasses that say what is gathered of them, as torch's FSDP2 takes them, and models that have some."""

import torch
from torch import nn
from torch.utils import _pytree as pytree


class _Around(torch.Tensor):
    """A tensor around one plain tensor."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda one: one._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, spec, size, stride):
        return cls(inner["_data"])

    def __repr__(self):
        return f"{type(self).__name__}({self._data})"


class Scaled(_Around):
    """Sent in int8 with a scale for each row."""

    def fsdp_pre_all_gather(self, mesh):
        scales = self._data.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return ((self._data / scales).round().to(torch.int8), scales), {"ranks": mesh.size()}

    @torch.no_grad()
    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        codes, scales = gathered
        assert codes.dtype == torch.int8
        assert metadata["ranks"] >= 1
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(codes * scales)
            return None
        made = (codes * scales).to(param_dtype)
        return made, (codes, scales, made)


class Halved(_Around):
    """Sent in bfloat16; asks for everything, and pads its last rows itself."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert outer_stride == torch.empty(outer_size).stride()
        assert type(module) is nn.Linear
        assert type(mp_policy).__name__ == "MixedPrecisionPolicy"
        rows = -(-outer_size[0] // mesh.size())
        sent = self._data.new_zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        sent[: len(self._data)] = self._data
        return (sent,), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (sent,) = gathered
        assert metadata is None
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(sent[: len(out)])
            return None
        made = sent.to(param_dtype)
        return made, (sent, made)


def rounded(kind, full):
    """What a model computes with whose weight ``full`` is of ``kind``."""
    if kind is Halved:
        return full.to(torch.bfloat16).to(full.dtype)
    scales = full.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (full / scales).round() * scales


def blocks(kind: type | None = Scaled, *, wide=64, count=3, frozen=()):
    """A model of blocks whose matrices are of ``kind``, and biases plain; ``frozen``: names of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, wide), nn.ReLU(), nn.Linear(wide, 32)) for _ in range(count)))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and kind is not None:
            module.weight = nn.Parameter(kind(module.weight.detach()), f"{name}.weight" not in frozen)
    return model


class Codes(torch.Tensor):
    """Frozen int8 codes with a scale for each row, and a table that all rows share."""

    @staticmethod
    def __new__(cls, codes, scales, table):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes, scales, table):
        self.codes, self.scales, self.table = codes, scales, table

    @classmethod
    def of(cls, full):
        scales = full.abs().amax(1).clamp_min(1e-12) / 127
        return cls((full / scales[:, None]).round().to(torch.int8), scales, torch.arange(3.0))

    def full(self):
        return self.codes * self.scales[:, None]

    def __tensor_flatten__(self):
        return ["codes", "scales", "table"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, spec, size, stride):
        return cls(inner["codes"], inner["scales"], inner["table"])

    def fsdp_pre_all_gather(self, mesh):
        return (self.codes, self.scales), self.table

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        codes, scales = gathered
        assert metadata.equal(torch.arange(3.0))
        if out is not None:
            assert isinstance(out, Codes)
            assert out.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
            return None
        return Codes(codes, scales, metadata), (codes, scales)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        one = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(one.codes.detach(), one.scales.detach(), one.table)
        if func is torch.ops.aten.split.Tensor:
            parts = zip(one.codes.split(args[1]), one.scales.split(args[1]), strict=True)
            return [cls(codes, scales, one.table) for codes, scales in parts]
        if func is torch.ops.aten._to_copy.default:
            changes = {key: value for key, value in kwargs.items() if key != "dtype"}
            return cls(one.codes.to(**changes), one.scales.to(**changes), one.table.to(**changes))
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.full(), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self):
        return f"Codes({self.codes}, {self.scales})"


def blocks_over_codes(**shape):
    """The model whose first matrix of each block is of codes, frozen."""
    model = blocks(None, **shape)
    for block in model:
        block[0].weight = nn.Parameter(Codes.of(block[0].weight.detach()), requires_grad=False)
    return model
