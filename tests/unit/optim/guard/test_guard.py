"""Optimizers that are not elementwise are refused on shards before any change; others are accepted."""

import pytest
import torch
from torch import nn

from fullshard import fully_shard, step_in_backward
from fullshard.errors import ConfigError
from fullshard.optim.guard.guard import why_not_elementwise
from fullshard.optim.guard.trial import Split, steps_parts_equally
from fullshard.optim.muon.muon import Muon
from fullshard.testing import run_ranks


class Sums(torch.optim.SGD):
    """Keeps the sum of every row, of whatever rows it is given; steps nothing but a model's own, so no trial."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                assert hasattr(param, "shard_meta")
                if param.grad is not None:
                    self.state[param]["sums"] = param.grad.flatten(1).sum(1) if param.ndim > 1 else param.grad.sum()
        return super().step(closure)


class ByElement(torch.optim.SGD):
    """Unknown, and harmless."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param] |= {"mine": param.grad.clone(), "step": torch.tensor(1.0), "note": "ok"}
        return super().step(closure)


def renamed(name, module="elsewhere"):
    return type(name, (torch.optim.SGD,), {"__module__": module})


def sharded(comm, inputs=8, outputs=12):
    """A linear layer of equal weights on every rank, after a backward."""
    model = nn.Linear(inputs, outputs, bias=False)
    nn.init.constant_(model.weight, 0.5)
    fully_shard(model, comm, wrap=None)
    model(torch.ones(2, inputs)).sum().backward()
    return model


def changes(model, optimizer):
    """Whether a step changes this rank's weights."""
    before = model.weight.detach().clone()
    optimizer.step()
    return not torch.equal(before, model.weight)


REFUSED = {
    "torch's Adafactor": (
        torch.optim.Adafactor,
        r"full matrices.*weight, \(12, 8\), over 3 of 3.*optim.TorchAdafactor",
    ),
    "torch's Muon": (torch.optim.Muon, r"Use fullshard.optim.Muon"),
    "torch's LBFGS": (torch.optim.LBFGS, r"sums over all parameters.*AdamW"),
    "transformers' Adafactor": (
        renamed("Adafactor", "transformers.optimization"),
        r"optim.Adafactor, which has transf",
    ),
    "a known name": (renamed("GaLoreAdamW8bit"), r"GaLoreAdamW8bit uses full matrices"),
    "a name with underscores": (renamed("Adam_mini"), r"Adam_mini uses full matrices"),
    "over all parameters": (renamed("Prodigy"), r"sums over all parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_known_classes_are_refused_on_every_rank_before_anything_changes(name):
    kind, text = REFUSED[name]

    def work(comm):
        model = sharded(comm)
        optimizer = kind(model.parameters())
        before = model.weight.detach().clone()
        with pytest.raises(ConfigError, match=text) as told:
            optimizer.step()
        assert torch.equal(model.weight, before)
        assert not any(optimizer.state.values())
        return str(told.value)

    assert len(set(run_ranks(3, work))) == 1


def test_a_rank_without_rows_refuses_too():
    def work(comm):
        model = sharded(comm, 160, 2)
        assert 1 < len(model.weight.shard_meta.owners) < comm.size
        with pytest.raises(ConfigError, match="uses full matrices"):
            torch.optim.Adafactor(model.parameters()).step()
        return model.weight.numel()

    assert 0 in run_ranks(4, work)


def test_whole_matrices_are_left_alone():
    def work(comm):
        model = sharded(comm, 8, 2)  # less than the smallest shard
        assert len(model.weight.shard_meta.owners) == 1
        return changes(model, torch.optim.Adafactor(model.parameters()))

    assert sorted(run_ranks(2, work)) == [False, True]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, renamed("Prodigy")])
def test_one_rank_is_left_alone(kind):
    def work(comm):
        model = sharded(comm)
        optimizer = kind(model.parameters())
        return [optimizer.step(lambda: model(torch.ones(2, 8)).sum()) is not None]

    assert run_ranks(1, work) == [[True]]


def test_an_unknown_class_with_state_of_rows_is_refused_after_its_first_step():
    def work(comm):
        model = sharded(comm)
        with pytest.raises(
            ConfigError, match=r"Sums is not elementwise: its state 'sums' of weight, \(12, 8\), has shape"
        ):
            Sums(model.parameters(), lr=0.1).step()

    run_ranks(3, work)


@pytest.mark.parametrize("kind", [ByElement, torch.optim.AdamW])
def test_elementwise_classes_are_left_alone(kind):
    def work(comm):
        model = sharded(comm)
        optimizer = kind(model.parameters(), lr=0.1)
        return changes(model, optimizer) and changes(model, optimizer)

    assert run_ranks(2, work) == [True, True]


def test_an_unknown_class_is_judged_once():
    def work(comm):
        model = sharded(comm)
        optimizer = ByElement(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.state[model.weight]["late"] = torch.zeros(5)
        optimizer.step()

    run_ranks(2, work)


class Blocks(torch.optim.SGD):
    """As bitsandbytes' of 8 bits are."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params, bits):
        super().__init__(params, lr=0.1)
        self.args = type("Args", (), {"optim_bits": bits})()


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "refused"), [(12, 8, 8, True), (12, 256, 8, False), (12, 8, 32, False)]
)
def test_blocks_of_8_bits_are_refused_where_ranks_cut_them(rows, columns, bits, refused):
    def work(comm):
        model = sharded(comm, columns, rows)
        optimizer = Blocks(model.parameters(), bits)
        if refused:
            with pytest.raises(ConfigError, match=r"quantises blocks of 256 elements.*Use fullshard.optim.AdamW8bit"):
                optimizer.step()
        else:
            optimizer.step()

    run_ranks(2, work)


def test_ours_are_left_alone():
    def work(comm):
        model = sharded(comm)
        return changes(model, Muon([{"params": list(model.parameters()), "use_muon": True}], lr=0.1))

    assert run_ranks(2, work) == [True, True]


def test_step_in_backward_refuses_them_on_every_rank_at_once():
    def work(comm):
        model = sharded(comm, 160, 2)
        with pytest.raises(ConfigError, match="Adafactor uses full matrices"):
            step_in_backward(model, torch.optim.Adafactor)
        return model.weight.numel()

    assert 0 in run_ranks(4, work)


class ByNorm(torch.optim.SGD):
    """Unknown by name; divides a gradient by the norm of what it is given."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad /= param.grad.norm()
        return super().step(closure)


class Cautious(torch.optim.AdamW):
    """Not elementwise by option: scales by how many elements of the whole agree with their gradient."""

    def __init__(self, params, caution=False, **options):
        super().__init__(params, **options)
        self.defaults["caution"] = caution
        for group in self.param_groups:
            group["caution"] = caution

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and group["caution"] and self.state[param]:
                    param.grad *= (self.state[param]["exp_avg"] * param.grad > 0).float().mean()
        return super().step(closure)


class Listed(ByNorm):
    """With an option that has no hash."""

    def __init__(self, params, rates):
        super().__init__(params, lr=rates[0])
        self.defaults["rates"] = rates


class Stacked(torch.optim.Optimizer):
    """Elementwise, with three momenta in one tensor, as AggMo."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    buffers = self.state[param].setdefault("buffers", param.new_zeros(3, *param.shape))
                    buffers.mul_(0.9).add_(param.grad)
                    param.sub_(buffers.sum(0), alpha=group["lr"])


class StackedUntried(Stacked):
    """The same, of which no other can be made from its defaults."""

    def __init__(self, params, needed):
        super().__init__(params)


class Noisy(torch.optim.SGD):
    """Draws random numbers, so that a trial says nothing."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad += torch.randn_like(param)
        return super().step(closure)


TRIED = {
    "a norm": (ByNorm, True),
    "an option": (lambda params: Cautious(params, caution=True), True),
    "the option left out": (Cautious, False),
    "stacked state": (Stacked, False),
    "random numbers": (Noisy, False),
    "options without a hash": (lambda params: Listed(params, [0.1]), True),
}


@pytest.mark.parametrize("name", TRIED)
def test_unknown_classes_are_tried_on_every_rank_before_anything_changes(name):
    make, refused = TRIED[name]

    def work(comm):
        model = sharded(comm, 160, 2)
        optimizer = make(model.parameters())
        before = model.weight.detach().clone()
        if not refused:
            return model.weight.numel() == 0 or changes(model, optimizer)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"\(in a trial .*such as weight, \(2, 160\), over"):
                optimizer.step()
        assert torch.equal(model.weight, before)
        return not any(optimizer.state.values())

    assert all(run_ranks(4, work))


def test_a_trial_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="differently each time"):
        steps_parts_equally(lambda params: Noisy(params, lr=0.1), Split.ROWS)
    assert torch.equal(before, torch.get_rng_state())


def test_strange_state_is_refused_where_the_class_cannot_be_tried():
    def work(comm):
        model = sharded(comm)
        with pytest.raises(ConfigError, match="its state 'buffers' of weight"):
            StackedUntried(model.parameters(), "this").step()

    run_ranks(2, work)


def test_matrices_cut_by_rows_may_be_stepped_by_rows():
    class ByRow(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None and param.ndim > 1:
                        param.grad /= param.grad.norm(dim=1, keepdim=True)
            return super().step(closure)

    def work(comm):
        by_rows = sharded(comm, 8, 16)
        assert changes(by_rows, ByRow(by_rows.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="ByRow is not elementwise"):
            ByRow(sharded(comm, 9600, 2).parameters(), lr=0.1).step()

    run_ranks(4, work)


def test_a_class_is_tried_once_for_equal_options():
    made = []

    class Counted(torch.optim.SGD):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr)
            made.append(self)

    def work(comm):
        model = sharded(comm)
        for optimizer in [Counted(model.parameters()) for _ in range(5)]:
            optimizer.step()
            optimizer.step()
        return len(made)

    assert run_ranks(2, work)[0] <= 2 * (5 + 4)


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
        ("LAMB8bit", "bitsandbytes.optim.lamb", "uses full matrices"),
        ("LARS8bit", "bitsandbytes.optim.lars", "uses full matrices"),
        ("AdamW8bit", "torchao.optim.adam", "quantises blocks of 256"),
        ("AdamW4bit", "torchao.optim.adam", "quantises blocks of 256"),
        ("AdamWFp8", "torchao.optim.adam", "quantises blocks of 256"),
        ("_AdamW", "torchao.optim.adam", None),
    ],
)
def test_libraries_of_narrow_states_are_judged_by_name(name, module, text):
    def work(comm):
        model = sharded(comm)
        optimizer = renamed(name, module)(model.parameters(), lr=0.1)
        if text is None:
            assert changes(model, optimizer)
        else:
            with pytest.raises(ConfigError, match=text):
                optimizer.step()

    run_ranks(2, work)


@pytest.mark.parametrize("name", ["StableAdamW", "AdamP", "SGDP", "NvNovoGrad", "Mars", "FusedNovoGrad", "Nero"])
def test_known_names_need_no_trial(name):
    assert why_not_elementwise(renamed(name)) == "full matrices"
