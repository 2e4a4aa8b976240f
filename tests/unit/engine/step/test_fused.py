"""Weight gradients written straight into the lane."""

import torch
from torch import nn

from fullshard import fully_shard
from fullshard.core.engine.step.lane import Lane
from fullshard.core.testing import run_ranks
from support.optimizers import copies


class AsOnCuda(torch.Tensor):
    """A tensor that takes the way of CUDA tensors, which index_put_ takes on CPU as well."""

    is_cuda = True


def test_the_way_of_an_embeddings_gradient_on_cuda_gives_the_same(monkeypatch):
    reference = nn.Embedding(6, 4, padding_idx=2)
    models = copies(reference, 1)
    tokens = torch.tensor([[1, 1, 5], [2, 0, 1]])
    weights = torch.linspace(-1, 1, 24).view(2, 3, 4)
    (reference(tokens) * weights).sum().backward()
    gradient_of = Lane.gradient_of

    def on_cuda(lane, place):
        view, empty = gradient_of(lane, place)
        return view.as_subclass(AsOnCuda), empty

    monkeypatch.setattr(Lane, "gradient_of", on_cuda)

    def work(comm):
        model = fully_shard(models[0], comm, wrap=None)
        (model(tokens) * weights).sum().backward()
        return model.weight.grad

    (gradient,) = run_ranks(1, work)
    torch.testing.assert_close(gradient.as_subclass(torch.Tensor), reference.weight.grad)
