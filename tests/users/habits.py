"""What users do to parameters and gradients between passes, as a table; a new habit costs one function.

Each function gets a model and its batches, trains, and returns the numbers that a user would log. It runs on the
unsharded model with the joint batches, and on every rank with that rank's rows of them.
"""

import copy
import io
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

LR = 0.1


@dataclass(frozen=True)
class Habit:
    """One habit: equal to the unsharded run, or refused with an error that matches ``refused``."""

    run: object
    refused: str | None = None


HABITS: dict[str, Habit] = {}
_drawing = threading.Lock()  # ranks that are threads share torch's random state


@contextmanager
def seeded(seed):
    """Seed torch, as every rank does alike."""
    with _drawing:
        torch.manual_seed(seed)
        yield


def habit(function):
    """Enter a function into the table."""
    HABITS[function.__name__] = Habit(function)
    return function


def loss_of(model, batch):
    return model(batch).square().mean()


def sgd(model, batches, before_step=lambda model: None, loss=None, optimizer=None):
    """Plain training; returns what ``before_step`` returns at each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LR)
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        (loss or loss_of)(model, batch).backward()
        seen.append(before_step(model))
        optimizer.step()
    return seen


def by_hand(model, batches, step):
    """Training without an optimizer: ``step(parameters)`` moves them after each backward."""
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
        step(list(model.parameters()))


def gradients(model):
    return [p.grad for p in model.parameters()]


# Clipping and norms


@habit
def torchs_clip_grad_norm(model, batches):
    return sgd(model, batches, lambda m: clip_grad_norm_(m.parameters(), 0.1))


@habit
def torchs_clip_by_foreach(model, batches):
    return sgd(model, batches, lambda m: clip_grad_norm_(m.parameters(), 0.1, foreach=True))


@habit
def torchs_clip_by_other_orders(model, batches):
    return sgd(
        model, batches, lambda m: [clip_grad_norm_(m.parameters(), 0.2, order) for order in (1.0, 3.0, float("inf"))]
    )


@habit
def get_total_norm(model, batches):
    return sgd(model, batches, lambda m: torch.nn.utils.get_total_norm(gradients(m)))


@habit
def clipping_each_parameter(model, batches):
    def clip(m):
        return [clip_grad_norm_(p, 0.05) for p in m.parameters()]

    return sgd(model, batches, clip)


@habit
def clipping_values(model, batches):
    return sgd(model, batches, lambda m: clip_grad_value_(m.parameters(), 0.01))


@habit
def adaptive_gradient_clipping(model, batches):
    def unitwise(x):
        return x.norm() if x.ndim <= 1 else x.norm(dim=tuple(range(1, x.ndim)), keepdim=True)

    def clip(m):
        for p in m.parameters():
            largest = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.01)
            norm = unitwise(p.grad.detach())
            clipped = p.grad * (largest / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm < largest, p.grad, clipped))

    return sgd(model, batches, clip)


@habit
def logging_norms_of_gradients(model, batches):
    return sgd(model, batches, lambda m: [p.grad.norm().item() for p in m.parameters()])


@habit
def logging_statistics(model, batches):
    def look(m):
        values = []
        for p in m.parameters():
            values += [p.mean(), p.std(), p.var(), p.abs().max(), p.min(), p.sum(), p.detach().square().sum().sqrt()]
            values += [p.grad.abs().mean(), (p == 0).sum(), p.count_nonzero(), p.norm(1), p.norm(float("inf"))]
            values += [p.amax(0) if p.dim() > 1 else p.amax(), p.norm(dim=0) if p.dim() > 1 else p.norm()]
            values += [p.mean(0) if p.dim() > 1 else p.mean()]
        return values

    return sgd(model, batches, look)


@habit
def root_of_the_sum_of_squares(model, batches):
    return sgd(model, batches, lambda m: sum((g**2).sum() for g in gradients(m)).sqrt())


@habit
def looking_for_nan(model, batches):
    def look(m):
        bad = [bool(p.grad.isnan().any()) or not bool(p.grad.isfinite().all()) for p in m.parameters()]
        return [float(one) for one in bad]

    return sgd(model, batches, look)


@habit
def counting_parameters(model, batches):
    sgd(model, batches)
    return [sum(p.numel() for p in model.parameters()), sum(p.grad.numel() for p in model.parameters())]


@habit
def mean_of_all_elements(model, batches):
    def mean(m):
        total = sum(p.grad.sum() for p in m.parameters())
        return total / sum(p.numel() for p in m.parameters())

    return sgd(model, batches, mean)


# Methods that compare or change gradients


@habit
def projecting_conflicting_gradients(model, batches):
    for batch in batches:
        kept = []
        for loss in (loss_of(model, batch), model(batch).abs().mean()):
            model.zero_grad()
            loss.backward()
            kept.append([p.grad.clone() for p in model.parameters()])
        first, second = kept
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        square = sum(b.square().sum() for b in second)
        share = torch.clamp(dot, max=0) / square
        with torch.no_grad():
            for p, a, b in zip(model.parameters(), first, second, strict=True):
                p -= LR * (a - share * b + b)
    return [dot]


@habit
def sharpness_aware_minimisation(model, batches):
    for batch in batches:
        loss_of(model, batch).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            moved = []
            for p in model.parameters():
                step = p.grad * (0.05 / (norm + 1e-12))
                p.add_(step)
                moved.append(step)
        model.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for p, step in zip(model.parameters(), moved, strict=True):
                p.sub_(step)
                p.sub_(p.grad, alpha=LR)
        model.zero_grad()
    return [norm]


@habit
def sharpness_aware_with_saved_data(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for batch in batches:
        loss_of(model, batch).backward()
        old = {p: p.data.clone() for p in model.parameters()}
        scale = 0.05 / torch.nn.utils.get_total_norm(gradients(model))
        for p in model.parameters():
            p.data.add_(p.grad * scale)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for p in model.parameters():
            p.data = old[p]
        optimizer.step()
        optimizer.zero_grad()


@habit
def centralising_gradients(model, batches):
    def centralise(m):
        for p in m.parameters():
            if p.grad.dim() > 1:
                p.grad.data.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))

    return sgd(model, batches, centralise)


@habit
def cosine_to_the_last_gradient(model, batches):
    last = {}

    def compare(m):
        found = []
        for p in m.parameters():
            flat = p.grad.flatten()
            if p in last:
                found.append(F.cosine_similarity(flat, last[p], dim=0))
                found.append(torch.dot(flat, last[p]) / (flat.norm() * last[p].norm()))
            last[p] = flat.clone()
        return found

    return sgd(model, batches, compare)


@habit
def gradient_noise_of_a_common_seed(model, batches):
    def add(m):
        with seeded(3):
            for p in m.parameters():
                p.grad.add_(torch.randn_like(p.grad) * 0.01)

    return sgd(model, batches, add)


@habit
def signs(model, batches):
    return sgd(model, batches, lambda m: [p.grad.sign_() for p in m.parameters()] and None)


@habit
def normalised_gradients(model, batches):
    def normalise(m):
        for p in m.parameters():
            p.grad = p.grad / (p.grad.norm() + 1e-8)

    return sgd(model, batches, normalise)


@habit
def accumulated_gradients_divided(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in batches:
        loss_of(model, batch).backward()
    for p in model.parameters():
        p.grad /= len(batches)
    optimizer.step()


# Steps without an optimizer, and hooks of one


@habit
def a_step_by_data(model, batches):
    by_hand(model, batches, lambda params: [p.data.add_(p.grad, alpha=-LR) for p in params])


@habit
def a_step_by_assigned_data(model, batches):
    by_hand(model, batches, lambda params: [setattr(p, "data", p.data - LR * p.grad) for p in params])


@habit
def a_step_in_place(model, batches):
    @torch.no_grad()
    def step(params):
        for p in params:
            p -= LR * p.grad

    by_hand(model, batches, step)


@habit
def momentum_by_hand(model, batches):
    moments = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def step(params):
        for p, m in zip(params, moments, strict=True):
            m.lerp_(p.grad, 0.1)
            p.sub_(LR * m)

    by_hand(model, batches, step)
    return [m.norm() for m in moments]


@habit
def momentum_in_tensors_of_the_shards_shape(model, batches):
    moments = [torch.zeros(p.shape) for p in model.parameters()]

    @torch.no_grad()
    def step(params):
        for p, m in zip(params, moments, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.sub_(LR * m)

    by_hand(model, batches, step)
    return [m.norm() for m in moments]


@habit
def trust_ratios(model, batches):
    @torch.no_grad()
    def step(params):
        for p in params:
            update = p.grad + 0.01 * p
            ratio = p.norm() / update.norm().clamp(min=1e-6)
            p.add_(update * ratio.clamp(max=10.0), alpha=-LR)

    by_hand(model, batches, step)


@habit
def clipping_in_a_step_hook(model, batches):
    norms = []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer.register_step_pre_hook(lambda *_: norms.append(clip_grad_norm_(model.parameters(), 0.1)))
    optimizer.register_step_post_hook(lambda *_: norms.append(sum(p.detach().norm() for p in model.parameters())))
    sgd(model, batches, optimizer=optimizer)
    return norms


@habit
def a_closure(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            return loss

        optimizer.step(closure)
    return norms


@habit
def adamw_with_groups(model, batches):
    groups = [{"params": [p]} for p in model.parameters()]
    sgd(model, batches, optimizer=torch.optim.AdamW(groups, lr=0.01))


# Penalties


@habit
def an_l2_penalty(model, batches):
    found = []

    def loss(m, batch):
        penalty = sum(p.square().sum() for p in m.parameters())
        found.append(penalty.detach())
        return loss_of(m, batch) + 0.01 * penalty

    sgd(model, batches, loss=loss)
    return found


@habit
def a_penalty_of_norms(model, batches):
    def loss(m, batch):
        return loss_of(m, batch) + 0.01 * sum(p.norm() + p.abs().mean() for p in m.parameters())

    sgd(model, batches, loss=loss)


@habit
def elastic_weight_consolidation(model, batches):
    loss_of(model, batches[0]).backward()
    fisher = {name: p.grad.detach() ** 2 for name, p in model.named_parameters()}
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []

    def loss(m, batch):
        penalty = sum((fisher[name] * (p - old[name]) ** 2).sum() for name, p in m.named_parameters())
        found.append(penalty.detach())
        return loss_of(m, batch) + 10.0 * penalty

    sgd(model, batches, loss=loss)
    return found


# Vectors


@habit
def parameters_as_a_vector(model, batches):
    seen = sgd(model, batches, lambda m: parameters_to_vector(m.parameters()).norm().detach())
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(0.9 * vector, model.parameters())
    return [*seen, vector.norm(), vector.sum(), vector.numel()]


@habit
def gradients_as_a_vector(model, batches):
    def look(m):
        vector = torch.cat([p.grad.view(-1) for p in m.parameters()])
        return [vector.norm(), vector.dot(vector), vector.abs().max()]

    return sgd(model, batches, look)


# Averages and values put into shards


@habit
def an_average_swapped_in(model, batches):
    shadow = [p.data.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        for average, p in zip(shadow, model.parameters(), strict=True):
            average.mul_(0.5).add_(p.data, alpha=0.5)
        backup = [p.data for p in model.parameters()]
        for p, average in zip(model.parameters(), shadow, strict=True):
            p.data = average
        with torch.no_grad():
            losses.append(model(torch.ones(2, 6)).sum())
        for p, kept in zip(model.parameters(), backup, strict=True):
            p.data = kept
    return losses


@habit
def an_average_copied_in(model, batches):
    shadow = copy.deepcopy(list(model.parameters()))
    sgd(model, batches)
    with torch.no_grad():
        for average, p in zip(shadow, model.parameters(), strict=True):
            average.lerp_(p, 0.25)
            p.copy_(average)
    return [average.detach().norm() for average in shadow]


@habit
def full_tensors_copied_in(model, batches):
    sgd(model, batches)
    with seeded(5):
        other = Net()
    with torch.no_grad():
        for p, full in zip(model.parameters(), other.parameters(), strict=True):
            p.mul_(0.5).add_(full, alpha=0.5)
            p.copy_(0.5 * (p + full.data))


@habit
def full_gradients_assigned(model, batches):
    sgd(model, batches)
    with seeded(5):
        other = Net()
    for p, full in zip(model.parameters(), other.parameters(), strict=True):
        p.grad = full.detach().clone()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return [p.grad.norm() for p in model.parameters()]


@habit
def soft_thresholds_and_clamps(model, batches):
    sgd(model, batches)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.sign() * (p.abs() - 0.01).clamp(min=0))
            p.clamp_(-0.3, 0.3)


@habit
def rows_of_a_largest_norm(model, batches):
    sgd(model, batches)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                norms = p.norm(dim=1, keepdim=True)
                p.mul_(norms.clamp(max=0.5) / (norms + 1e-7))


@habit
def pruning_by_a_mask(model, batches):
    sgd(model, batches)
    with torch.no_grad():
        for p in model.parameters():
            p[p.abs() < 0.1] = 0.0
            p.masked_fill_(p > 0.4, 0.4)
    return [sum((p == 0).sum() for p in model.parameters())]


@habit
def rows_set_by_number(model, batches):
    sgd(model, batches)
    with torch.no_grad():
        model[0].weight[0] = 0.0
        model[0].weight[2:5] = 1.0
        model[0].weight.data[-1] = torch.arange(6.0)
        model[0].weight[:, 1] = 3.0
        model[0].bias[:] = 0.25


@habit
def frozen_in_the_middle(model, batches):
    sgd(model, batches[:2])
    for p in model[0].parameters():
        p.requires_grad_(False)
    model.zero_grad()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR)
    loss_of(model, batches[2]).backward()
    norm = clip_grad_norm_(trained, 0.1)
    optimizer.step()
    return [norm]


# Initialisers


@habit
def initialisers(model, batches):
    init = nn.init
    with seeded(7):
        init.xavier_uniform_(model[0].weight)
        init.trunc_normal_(model[0].bias, std=0.1)
        init.kaiming_normal_(model[2].weight)
        init.uniform_(model[2].bias)
        init.orthogonal_(model[4].weight)
        init.normal_(model[4].bias, std=0.02)
    sgd(model, batches)
    with seeded(8):
        init.kaiming_uniform_(model[0].weight, a=5**0.5)
        init.xavier_normal_(model[2].weight)
        init.constant_(model[0].bias, 0.5)
        init.ones_(model[2].bias)
        init.zeros_(model[4].bias)
        model[4].weight.data.normal_(0, 0.02)


@habit
def initialisers_of_the_modules(model, batches):
    sgd(model, batches)
    with seeded(7):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


@habit
def an_initialiser_applied_to_the_modules(model, batches):
    sgd(model, batches)
    model.apply(lambda m: isinstance(m, nn.Linear) and m.weight.data.fill_(0.25))


# Refused, by name


REFUSED = {
    r"svdvals of .*weight, a shard": lambda weight: torch.linalg.svdvals(weight.detach()),
    r"(matmul|rmatmul|mm) of .*weight, a shard": lambda weight: weight.detach() @ torch.ones(6, 2),
    r"numpy of .*weight, a shard": lambda weight: weight.detach().numpy(),
    r"index of rows of .*weight, a shard": lambda weight: weight[0],
    r"is a shard, this rank's rows, and pickling|cannot be copied or pickled": lambda weight: torch.save(
        weight, io.BytesIO()
    ),
    r"histc of .*weight, a shard": lambda weight: torch.histc(weight.detach()),
    r"topk over rows of .*(weight|bias), a shard": lambda weight: weight.detach().flatten().topk(3).values,
    r"(T|t) of .*weight, a shard": lambda weight: weight.T,
    r"median over rows of .*weight, a shard": lambda weight: weight.detach().median(),
    r"tolist of .*weight, a shard": lambda weight: weight.tolist(),
}
for _text, _use in REFUSED.items():
    HABITS[_text.partition(" of ")[0]] = Habit(lambda model, batches, use=_use: [use(model[0].weight)], _text)


class Net(nn.Sequential):
    """Rows that do not divide evenly, and a bias of which most ranks hold nothing."""

    def __init__(self):
        super().__init__(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 3))
