"""Optimizers that are not elementwise are refused on shards before any change; others are accepted."""

import copy
import inspect
import math

import bitsandbytes
import pytest
import torch
import transformers
from torch import nn

from fullshard import fully_shard, step_in_backward
from fullshard.core.optim.guard import refuse_parts, trust
from fullshard.core.optim.muon import Muon
from fullshard.core.optim.trial import Split, steps_parts_equally
from fullshard.core.shards import Shard, rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, ShardingError


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


class Base(torch.optim.SGD):
    """Its step is wrapped by torch once an instance of just this class was made."""

    def step(self, closure=None):
        return super().step(closure)


class SeesParameters(Base):
    """Notes what its step is given before and after the step of its base."""

    def step(self, closure=None):
        seen = [type(self.param_groups[0]["params"][0])]
        super().step(closure)
        self.seen = [*seen, type(self.param_groups[0]["params"][0])]


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
    before = rows_of(model.weight).clone()
    optimizer.step()
    return not torch.equal(before, rows_of(model.weight))


TRIED_MATRIX = r"in a trial a matrix and its parts.*weight, \(12, 8\), over 3 of 3.*"
REFUSED = {
    "torch's Adafactor": (torch.optim.Adafactor, TRIED_MATRIX + r"optim\.TorchAdafactor, which has torch's"),
    "torch's Muon": (torch.optim.Muon, r"Use fullshard.optim.Muon"),
    "torch's LBFGS": (torch.optim.LBFGS, r"sums over all parameters.*AdamW"),
    "transformers' Adafactor": (transformers.Adafactor, TRIED_MATRIX + r"optim\.Adafactor, which has transf"),
    "a name that a trial cannot judge": (renamed("AdamP"), r"AdamP uses full matrices"),
    "a name with underscores": (renamed("Adam_P"), r"Adam_P uses full matrices"),
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
        with pytest.raises(ConfigError, match="Adafactor is not elementwise"):
            torch.optim.Adafactor(model.parameters()).step()
        return rows_of(model.weight).numel()

    assert 0 in run_ranks(4, work)


def test_whole_matrices_are_left_alone():
    def work(comm):
        model = sharded(comm, 8, 2)  # less than the smallest shard
        assert len(model.weight.shard_meta.owners) == 1
        return changes(model, torch.optim.Adafactor(model.parameters()))

    assert sorted(run_ranks(2, work)) == [False, True]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, renamed("AdamP")])
def test_one_rank_is_left_alone(kind):
    def work(comm):
        model = sharded(comm)
        optimizer = kind(model.parameters())
        return [optimizer.step(lambda: model(torch.ones(2, 8)).sum()) is not None]

    assert run_ranks(1, work) == [[True]]


def test_an_unknown_class_with_state_of_rows_is_refused():
    def work(comm):
        model = sharded(comm)
        with pytest.raises(ConfigError, match=r"Whether Sums is elementwise could not be tested"):
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
        with pytest.raises(ConfigError, match="Adafactor is not elementwise"):
            step_in_backward(model, torch.optim.Adafactor)
        return rows_of(model.weight).numel()

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


class FindsItsRate(torch.optim.Optimizer):
    """As DoG: a rate from 1e-6 on, by how far all parameters have moved and by all their gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})
        self.start, self.sum, self.far = None, 0.0, 1e-6

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        self.start = self.start or [param.clone() for param in params]
        moved = [(param - start).square().sum().item() for param, start in zip(params, self.start, strict=True)]
        self.far = max(self.far, math.sqrt(sum(moved)))
        self.sum += sum(param.grad.square().sum().item() for param in params)
        for param in params:
            param.sub_(param.grad, alpha=self.far / math.sqrt(self.sum))


TRIED = {
    "a norm": (ByNorm, True),
    "an option": (lambda params: Cautious(params, caution=True), True),
    "the option left out": (Cautious, False),
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
            return changes(model, optimizer) or rows_of(model.weight).numel() == 0
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"\(in a trial .*such as weight, \(2, 160\), over"):
                optimizer.step()
        assert torch.equal(model.weight, before)
        return not any(optimizer.state.values())

    assert all(run_ranks(4, work))


def test_a_tried_class_that_cannot_step_shards_gets_rows_with_a_warning_that_says_why():
    reference = nn.Linear(160, 2, bias=False)
    models = [copy.deepcopy(reference) for _ in range(4)]
    plain = Stacked(reference.parameters())
    for _ in range(2):
        reference(torch.ones(2, 160)).sum().backward()
        plain.step()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        optimizer = Stacked(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 160)).sum().backward()
            optimizer.step()
        return model.weight.full_tensor()

    with pytest.warns(UserWarning, match=r"Stacked cannot step shards \(.*a parameter.*trial of 12 steps") as told:
        found = run_ranks(4, work)
    assert len(told) == 4  # once a rank
    for full in found:
        torch.testing.assert_close(full, reference.weight.detach(), atol=1e-6, rtol=0)


class LateClipping(torch.optim.SGD):
    """Clips each gradient by its norm from the 14th step on, or the momentum, or all gradients together."""

    def __init__(self, params, of="gradient"):
        super().__init__(params, lr=0.05, momentum=0.5)
        self.of, self.steps = of, 0

    def step(self, closure=None):
        self.steps += 1
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param in params if self.steps >= 14 else ():
            if self.of == "gradient":
                param.grad.mul_(0.01 / param.grad.norm().clamp_min(0.01))
            elif self.of == "momentum":
                param.grad.mul_(0.01 / self.state[param]["momentum_buffer"].norm().clamp_min(0.01))
        if self.of == "all" and self.steps >= 14:
            torch.nn.utils.clip_grad_norm_(params, 0.01)
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """Torch's step under another name."""


class AskedFor(LateClipping):
    """Known to its user as elementwise."""


KINDS = [(torch.optim.AdamW, True), (Renamed, True), (LateClipping, False), (AskedFor, True)]


@pytest.mark.parametrize(("kind", "is_plain"), KINDS)
def test_torchs_steps_and_those_that_asked_for_it_compute_with_plain_tensors(kind, is_plain):
    trust(AskedFor, plain_rows=True)
    seen = []

    class Watched(torch.overrides.TorchFunctionMode):
        """What computes with the model's own parameter; hooks that other tests left may read its attributes."""

        def __init__(self, param):
            self.param = param

        def __torch_function__(self, func, types, args=(), kwargs=None):
            reads = getattr(func, "__name__", "") == "__get__"
            if not reads and any(issubclass(kind, Shard) for kind in types) and any(one is self.param for one in args):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    def work(comm):
        model = sharded(comm)
        optimizer = kind(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()  # tries the class
        with Watched(model.weight):
            optimizer.step()

    run_ranks(2, work)
    assert (not seen) == is_plain


def test_a_trial_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="differently each time"):
        steps_parts_equally(lambda params: Noisy(params, lr=0.1), Split.ROWS)
    assert torch.equal(before, torch.get_rng_state())


UNTRIED = {
    "needs an argument": (lambda params: StackedUntried(params, "this"), "missing 1 required positional argument"),
    "draws random numbers": (Noisy, "steps the same values differently each time"),
    "moves too little": (FindsItsRate, r"in 12 steps it moves values by at most \de-0[678].*by sums over all"),
}


@pytest.mark.parametrize("name", UNTRIED)
def test_a_class_that_cannot_be_tried_is_refused_unless_it_is_trusted(name):
    make, why = UNTRIED[name]

    def work(comm):
        model = sharded(comm)
        with pytest.raises(ConfigError, match=rf"could not be tested \(.*{why}.*fullshard\.optim\.trust\("):
            make(model.parameters()).step()

    run_ranks(2, work)


def test_a_trusted_class_gets_shards_whose_norms_are_those_of_the_full_tensors():
    class Trusted(ByNorm):
        pass

    trust(Trusted)
    torch.manual_seed(0)
    reference = nn.Linear(8, 12, bias=False)
    models = [copy.deepcopy(reference) for _ in range(2)]
    reference(torch.ones(2, 8)).sum().backward()
    Trusted(reference.parameters(), lr=0.1).step()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        model(torch.ones(2, 8)).sum().backward()
        Trusted(model.parameters(), lr=0.1).step()
        return model.weight.full_tensor()

    for full in run_ranks(2, work):
        torch.testing.assert_close(full, reference.weight.detach(), atol=1e-6, rtol=0)


class ByAllNorms(torch.optim.SGD):
    """Clips by the norm of all gradients that it sees, as Adan does with max_grad_norm."""

    def __init__(self, params, lr=0.1, largest=0.0):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["largest"] = largest

    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        if self.param_groups[0]["largest"]:
            torch.nn.utils.clip_grad_norm_(params, self.param_groups[0]["largest"])
        return super().step(closure)


def test_a_class_that_sums_over_all_gradients_is_refused_also_where_nothing_is_split():
    model = nn.Linear(4, 2, bias=False)
    models = [model, copy.deepcopy(model)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        model(torch.ones(1, 4)).sum().backward()
        ByAllNorms(model.parameters()).step()
        with pytest.raises(ConfigError, match=r"ByAllNorms (uses several parameters|is not elementwise)"):
            ByAllNorms(model.parameters(), largest=0.01).step()

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

    assert run_ranks(2, work)[0] <= 2 * (5 + 8)  # a trial of each of two kinds makes four


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
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


NOT_ELEMENTWISE = {
    "Adafactor",
    "LAMB",
    "LAMB32bit",
    "LAMB8bit",
    "LARS",
    "LARS32bit",
    "LARS8bit",
    "LBFGS",
    "Muon",
    "PytorchLARS",
}
OF_LIBRARIES = sorted(
    {
        one
        for library in (torch.optim, transformers.optimization, bitsandbytes.optim)
        for one in vars(library).values()
        if isinstance(one, type) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
    },
    key=lambda kind: (kind.__module__, kind.__name__),
)


def test_of_the_installed_libraries_those_are_refused_that_use_full_matrices():
    def work(comm):
        model = sharded(comm, 256, 12)  # ranks cut no block of 8 bits
        refused = set()
        for kind in OF_LIBRARIES:
            taken = inspect.signature(kind).parameters
            options = {"lr": 0.1, "momentum": 0.9} if "momentum" in taken else {}
            try:
                refuse_parts(kind(model.parameters(), **options))
            except ConfigError as error:
                refused.add(kind.__name__ + " untested" * ("could not be tested" in str(error)))
        return refused

    assert len(OF_LIBRARIES) > 40
    assert run_ranks(2, work) == [NOT_ELEMENTWISE] * 2


@pytest.mark.parametrize("call", [lambda step: step(), lambda step: step(None), lambda step: step(closure=None)])
def test_a_step_without_a_closure_gives_no_state_to_a_rank_without_rows(call):
    def work(comm):
        model = sharded(comm, outputs=1)
        optimizer = torch.optim.AdamW(model.parameters())
        call(optimizer.step)
        return bool(optimizer.state), rows_of(model.weight).numel() > 0

    assert [has_state == has_rows for has_state, has_rows in run_ranks(2, work)] == [True, True]


def stepped(model, of, rows):
    optimizer = LateClipping(model.parameters(), of)
    for step in range(18):
        model(rows + step / 20).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("of", ["gradient", "momentum", "all"])
def test_what_a_tried_class_does_after_its_trial_is_over_the_full_tensors(of):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    models = [copy.deepcopy(reference) for _ in range(4)]
    rows = torch.linspace(-1, 1, 24).view(3, 8)
    stepped(reference, of, rows)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        optimizer = stepped(model, of, rows)
        kinds = {type(value) for state in optimizer.state.values() for value in state.values()}
        assert kinds <= {torch.Tensor, type(None)}  # as plain as without the guard: they are pickled by torch.save
        return [param.full_tensor() for param in model.parameters()]

    for found in run_ranks(4, work):
        torch.testing.assert_close(found, [param.detach() for param in reference.parameters()], atol=1e-5, rtol=0)


def test_a_late_norm_in_a_step_in_backward_is_refused_where_other_ranks_would_be_waited_for():
    models = [copy.deepcopy(model) for model in [nn.Linear(8, 3)] for _ in range(4)]

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        step_in_backward(model, LateClipping)
        for _ in range(14):
            model(torch.ones(2, 8)).square().mean().backward()

    with pytest.raises(ShardingError, match=r"norm of shards needs every rank, but the step of (weight|bias) in backw"):
        run_ranks(4, work, timeout_s=20)


def test_a_step_sees_the_same_parameters_after_the_step_of_its_base():
    def work(comm):
        model = sharded(comm)
        optimizer = SeesParameters(model.parameters(), lr=0.1)
        seen = []
        for made in (False, True):
            if made:
                Base([nn.Parameter(torch.ones(1))], lr=0.1)
            optimizer.step()
            seen += optimizer.seen
        return seen

    for seen in run_ranks(2, work):
        assert len(set(seen)) == 1
