"""Muon on one device, and the plan of which rank orthogonalises which matrix."""

import copy
import json
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fullshard.core.optim.muon import Muon, muon_groups
from fullshard.core.optim.muon_rounds import RoundPlan, SplitMatrix, newton_schulz, newton_schulz_flops, plan_rounds
from fullshard.errors import ConfigError

RANKS = 4


@st.composite
def split_matrices(draw, everywhere=False, most=12):
    """Matrices that two to four of the ranks hold parts of."""
    made = []
    for _ in range(draw(st.integers(0, most))):
        first = 0 if everywhere else draw(st.integers(0, RANKS - 2))
        count = RANKS if everywhere else draw(st.integers(2, RANKS - first))
        pieces = tuple(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)))
        made.append(SplitMatrix(first, pieces, draw(st.integers(1, 30))))
    return made


loads = st.lists(st.integers(0, 60), min_size=RANKS, max_size=RANKS)


def work_of(plan: RoundPlan, fixed):
    total = list(fixed)
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        total[owner] += matrix.work
    return total


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads, st.integers(1, 200))
def test_every_rank_has_the_same_plan_and_owners_hold_a_part(matrices, fixed, max_numel):
    plans = [plan_rounds(list(matrices), list(fixed), max_numel) for _ in range(RANKS)]
    assert all(plan == plans[0] for plan in plans)
    assert all(owner in matrix.sharers for matrix, owner in zip(matrices, plans[0].owners, strict=True))
    assert sorted(index for indices in plans[0].rounds for index in indices) == list(range(len(matrices)))


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads, st.integers(1, 200))
def test_no_owner_gathers_more_in_a_round_than_it_may_but_for_one_matrix(matrices, fixed, max_numel):
    plan = plan_rounds(matrices, fixed, max_numel)
    for indices, rank in product(plan.rounds, range(RANKS)):
        gathered = [matrices[index].numel for index in indices if plan.owners[index] == rank]
        assert sum(gathered) <= max_numel or len(gathered) == 1


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads, st.integers(1, 200))
def test_there_are_no_rounds_in_which_nobody_gathers_what_would_have_fitted_before(matrices, fixed, max_numel):
    plan = plan_rounds(matrices, fixed, max_numel)
    for earlier, later in zip(plan.rounds, plan.rounds[1:], strict=False):
        for rank in {plan.owners[index] for index in later}:
            before = [matrices[index].numel for index in earlier if plan.owners[index] == rank]
            after = [matrices[index].numel for index in later if plan.owners[index] == rank]
            assert sum(before) + after[0] > max_numel


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads)
def test_no_rank_is_loaded_above_its_sharers_by_more_than_its_last_matrix(matrices, fixed):
    """When a matrix was given to its owner, that was the least loaded sharer, so not above their mean."""
    plan = plan_rounds(matrices, fixed, 100)
    total = work_of(plan, fixed)
    for rank in range(RANKS):
        owned = [matrix for matrix, owner in zip(matrices, plan.owners, strict=True) if owner == rank]
        if owned:
            smallest = min(owned, key=lambda matrix: matrix.work).work
            candidates = [matrix for matrix in owned if matrix.work == smallest]
            bounds = [
                Fraction(sum(total[sharer] for sharer in last.sharers) - last.work, len(last.pieces)) + last.work
                for last in candidates
            ]
            assert total[rank] <= max(bounds)


@settings(max_examples=25, deadline=None)
@given(split_matrices(everywhere=True, most=5))
def test_where_all_ranks_share_all_matrices_the_largest_load_is_at_most_that_of_graham(matrices):
    plan = plan_rounds(matrices, [0] * RANKS, 100)
    best = min(
        max(sum(m.work for m, owner in zip(matrices, owners, strict=True) if owner == rank) for rank in range(RANKS))
        for owners in product(range(RANKS), repeat=len(matrices))
    )
    assert max(work_of(plan, [0] * RANKS)) <= (Fraction(4, 3) - Fraction(1, 3 * RANKS)) * best


def test_matrices_that_are_whole_on_a_rank_count_as_its_work():
    halves = SplitMatrix(0, (5, 5), 10)
    assert plan_rounds([halves, halves, halves], [0, 25], 100).owners == (0, 0, 0)
    assert plan_rounds([halves, halves, halves], [0, 0], 100).owners.count(0) in (1, 2)


def test_of_equally_loaded_ranks_the_one_that_holds_most_is_the_owner():
    assert plan_rounds([SplitMatrix(1, (5, 7, 6), 10)], [0] * 4, 100).owners == (2,)


def test_work_is_the_flops_of_the_three_products_of_each_iteration():
    assert newton_schulz_flops(300, 20, 5) == newton_schulz_flops(20, 300, 5)
    assert newton_schulz_flops(20, 300, 5) == 5 * (2 * 20 * 20 * 300 + 2 * 20**3 + 2 * 20 * 20 * 300)


SHAPES = [(20, 20), (20, 20), (300, 24), (24, 300), (2, 20), (64, 1)]
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def params_of(shapes, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def run(optimizer, params, steps=5, seed=1):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=draw).to(param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "original", "nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "weight_decay": 0.5},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 10.0},
    ],
)
def test_matrices_end_as_with_torchs_muon(options, dtype):
    shapes = SHAPES
    if dtype == torch.bfloat16:
        # There torch's divides the momentum buffer itself where it is not nesterov's, and its addition rounds a
        # transposed matrix, its result of an upright one, in another way than others.
        options = {**options, "nesterov": True}
        shapes = [shape for shape in SHAPES if shape[0] <= shape[1]]
    ours, theirs = params_of(shapes, dtype), params_of(shapes, dtype)
    assert_same(run(Muon(ours, lr=0.02, **options), ours), run(torch.optim.Muon(theirs, lr=0.02, **options), theirs))


def test_momentum_is_not_changed_by_normalising_it():
    (param,) = params_of([(4, 4)], torch.bfloat16)
    optimizer = Muon([param], momentum=0.5, nesterov=False)
    param.grad = torch.full((4, 4), 8.0, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full((4, 4), 4.0, dtype=torch.bfloat16))


def test_the_rest_ends_as_with_torchs_adamw_and_has_its_state():
    shapes = [(20,), (), (4, 5, 6), (3, 1, 2, 2)]
    options = {"lr": 0.01, "weight_decay": 0.3}
    ours, theirs = params_of(shapes), params_of(shapes)
    muon = Muon(ours, adamw_betas=(0.8, 0.95), adamw_eps=1e-5, **options)
    adamw = torch.optim.AdamW(theirs, betas=(0.8, 0.95), eps=1e-5, **options)
    assert_same(run(muon, ours), run(adamw, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        state, reference = muon.state[mine], adamw.state[other]
        assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
            key: (value.shape, value.dtype) for key, value in reference.items()
        }


def test_groups_have_the_options_of_torchs_optimizers_and_json_can_hold_them():
    matrix, vector, other = params_of([(3, 4), (5,), (6, 2)])
    muon = Muon([{"params": [vector, matrix], "lr": 0.5, "mark": 1}, {"params": [other], "use_muon": False}])
    torchs = torch.optim.Muon([matrix]).param_groups[0]
    adamw = {"params", "lr", "betas", "eps", "weight_decay", "use_muon"}
    first, second, third = muon.param_groups
    assert first["params"][0] is matrix
    assert second["params"][0] is vector
    assert third["params"][0] is other
    assert first.keys() == {*torchs, "use_muon", "ns_dtype", "mark"}
    assert second.keys() == {*adamw, "mark"}
    assert third.keys() == adamw
    assert [group["lr"] for group in muon.param_groups] == [0.5, 0.5, 1e-3]
    assert first["ns_dtype"] == "bfloat16"
    json.dumps(muon.state_dict()["param_groups"])


def test_names_stay_with_their_parameters():
    matrix, vector = params_of([(3, 4), (5,)])
    first, second = Muon([("bias", vector), ("weight", matrix)]).param_groups
    assert (first["param_names"], second["param_names"]) == (["weight"], ["bias"])


def test_an_option_of_one_optimizer_reaches_its_part_of_a_group_only():
    first, second = Muon([{"params": params_of([(3, 4), (5,)]), "momentum": 0.5, "betas": (0.1, 0.2)}]).param_groups
    assert first["momentum"] == 0.5
    assert second["betas"] == (0.1, 0.2)
    assert "betas" not in first
    assert "momentum" not in second


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": "vector", "use_muon": True}, r"parameter number 0 of its group has shape \(5,\)"),
        ({"params": "named", "use_muon": True}, r"parameter bias has shape \(5,\)"),
        ({"params": "matrix", "use_muon": True, "betas": (0.9, 0.99)}, "of the other optimizer: betas"),
        ({"params": "matrix", "use_muon": False, "momentum": 0.9}, "of the other optimizer: momentum"),
        ({"params": "matrix", "eps": 1e-6}, "Set use_muon=True or use_muon=False"),
        ({"params": "matrix", "lr": -1.0}, "Muon's lr must be 0 or more"),
        ({"params": "matrix", "ns_steps": 100}, "0 to 99 steps"),
        ({"params": "matrix", "adjust_lr_fn": "none"}, "adjust_lr_fn must be None, 'original' or"),
        (
            {"params": "matrix", "ns_dtype": torch.float16},
            "ns_dtype must be one of bfloat16, float32, float64; got float16",
        ),
        ({"params": "vector", "betas": (0.9, 1.0)}, "betas of Muon's AdamW"),
    ],
)
def test_a_group_that_cannot_be_is_refused_and_nothing_is_added(group, message):
    matrix, vector = params_of([(3, 4), (5,)])
    given = {"matrix": [matrix], "vector": [vector], "named": [("bias", vector)]}[group["params"]]
    with pytest.raises(ConfigError, match=message):
        Muon([{**group, "params": given}])
    optimizer = Muon(params_of([(2, 2)]))
    with pytest.raises(ConfigError, match=message):
        optimizer.add_param_group({**group, "params": given})
    assert len(optimizer.param_groups) == 1


def test_a_set_of_parameters_is_refused_as_torch_does():
    with pytest.raises(TypeError, match="ordered collections"):
        Muon([{"params": set(params_of([(2, 2)]))}])


def test_a_group_without_parameters_stays():
    assert len(Muon([{"params": []}, {"params": params_of([(2, 2)])}]).param_groups) == 2


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.positions = nn.Embedding(20, 4)
        self.rise = nn.Linear(4, 20, bias=False)  # as wide as there are positions
        self.hidden = nn.Linear(4, 4)
        self.square = nn.Linear(4, 4, bias=False)
        self.wide = nn.Linear(4, 9, bias=False)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 9)
        self.after = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.table.weight


def test_a_model_that_says_what_its_head_is_is_believed():
    model = Model(tied=False)
    model.get_output_embeddings = lambda: model.after
    groups = muon_groups(model)
    assert any(param is model.head.weight for param in groups[0]["params"])
    assert any(param is model.after.weight for param in groups[1]["params"])


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_options_of_adamw_that_muon_lacks_are_refused(option):
    with pytest.raises(ConfigError, match=f"Muon does not implement {option}; a parameter group has {option}=True"):
        Muon([{"params": params_of([(5,)]), "use_muon": False, option: True}])
    optimizer = Muon(params_of([(5,)]))
    state = optimizer.state_dict()
    state["param_groups"][0][option] = True
    with pytest.raises(ConfigError, match=f"Muon does not implement {option}"):
        optimizer.load_state_dict(state)


def test_steps_are_counted_whatever_the_default_dtype():
    param = params_of([(5,)])[0]
    optimizer = Muon([param])
    torch.set_default_dtype(torch.bfloat16)
    try:
        param.grad = torch.ones_like(param)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[param]["step"].dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_go_to_muon_embeddings_head_and_other_shapes_to_adamw(tied):
    model = Model(tied)
    groups = muon_groups(model, weight_decay=0.2, adamw_lr=1e-4, adamw_weight_decay=0.01)
    names = {id(param): name for name, param in model.named_parameters()}
    muon, decayed, plain = ({names[id(param)] for param in group["params"]} for group in groups)
    assert muon == {"rise.weight", "hidden.weight", "square.weight", "wide.weight", "after.weight"}
    assert decayed == {"table.weight", "positions.weight", "conv.weight"} | (set() if tied else {"head.weight"})
    assert plain == {"hidden.bias", "conv.bias", "norm.weight", "norm.bias", "head.bias"}
    assert [(group["weight_decay"], group.get("lr")) for group in groups] == [(0.2, None), (0.01, 1e-4), (0.0, 1e-4)]


def test_groups_of_a_model_without_matrices_or_embeddings():
    assert [group["use_muon"] for group in muon_groups(nn.LayerNorm(3))] == [False]
    assert [group["use_muon"] for group in muon_groups(nn.Linear(3, 3, bias=False))] == [True]


def test_the_state_of_torchs_muon_is_taken_over():
    theirs, ours = params_of(SHAPES), params_of(SHAPES)
    reference = torch.optim.Muon(theirs, lr=0.02)
    for mine, other in zip(ours, run(reference, theirs), strict=True):
        mine.data.copy_(other)
    optimizer = Muon(ours)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.param_groups[0]["ns_dtype"] == "bfloat16"
    assert_same(run(optimizer, ours, seed=2), run(reference, theirs, seed=2))


def test_state_of_groups_in_another_order_is_refused():
    matrix, vector = params_of([(3, 4), (5,)])
    optimizer = Muon([{"params": [matrix]}, {"params": [vector]}])
    turned = Muon([{"params": [vector]}, {"params": [matrix]}])
    with pytest.raises(ConfigError, match="use_muon=False where this optimizer's has True"):
        optimizer.load_state_dict(turned.state_dict())


def test_a_state_that_went_through_json_and_a_copy_go_on_alike():
    params = params_of([(3, 4), (5,)])
    optimizer = Muon(params)
    run(optimizer, params)
    twin, twins = copy.deepcopy((optimizer, params))
    twin.param_groups = json.loads(json.dumps([{**group, "params": []} for group in twin.param_groups]))
    for group, original in zip(twin.param_groups, optimizer.param_groups, strict=True):
        group["params"] = [twins[next(i for i, p in enumerate(params) if p is q)] for q in original["params"]]
    assert_same(run(twin, twins, seed=3), run(optimizer, params, seed=3))
    twin.add_param_group({"params": params_of([(2, 2)])})
    assert twin.param_groups[-1]["use_muon"]


def test_parameters_without_gradient_are_left_alone_and_have_no_state():
    matrix, vector, idle = params_of([(3, 4), (5,), (4, 4)])
    optimizer = Muon([matrix, vector, idle])
    before = idle.detach().clone()
    run(optimizer, [matrix, vector])
    assert torch.equal(idle, before)
    assert idle not in optimizer.state


def test_the_loss_of_a_closure_is_returned():
    (matrix,) = params_of([(3, 4)])
    optimizer = Muon([matrix])

    def closure():
        optimizer.zero_grad()
        loss = matrix.square().sum()
        loss.backward()
        return loss

    before = matrix.square().sum().item()
    assert optimizer.step(closure).item() == pytest.approx(before)
    assert matrix.square().sum().item() < before


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        Muon(table.parameters()).step()


def test_half_precision_gradients_of_wide_parameters_are_computed_with_in_float32():
    (param,) = params_of([(8, 8)])
    param.grad_dtype = torch.bfloat16
    param.grad = torch.full((8, 8), 1.0, dtype=torch.bfloat16)
    optimizer = Muon([param], momentum=0.999)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    torch.testing.assert_close(buffer, torch.full((8, 8), 0.001))


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (9, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_newton_schulz_brings_singular_values_near_one_and_keeps_its_input(shape, dtype):
    draw = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(shape[0], min(shape), generator=draw))
    right, _ = torch.linalg.qr(torch.randn(shape[1], min(shape), generator=draw))
    matrix = (left * torch.linspace(0.2, 3.0, min(shape)) @ right.mT).to(dtype)
    before = matrix.clone()
    result = newton_schulz(matrix, COEFFICIENTS, 5, 1e-7)
    assert torch.equal(matrix, before)
    assert (result.shape, result.dtype) == (shape, dtype)
    values = torch.linalg.svdvals(result.double())
    assert ((values > 0.6) & (values < 1.3)).all()
    aligned = left.mT.double() @ result.double() @ right.double()  # the singular vectors stay: it is diagonal
    assert (aligned - aligned.diagonal().diag()).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30)])
def test_matrices_at_once_are_what_they_are_one_by_one(shape):
    matrices = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices[2] *= 1e4
    alone = torch.stack([newton_schulz(one, COEFFICIENTS, 5, 1e-7) for one in matrices])
    torch.testing.assert_close(newton_schulz(matrices, COEFFICIENTS, 5, 1e-7), alone)


def test_a_matrix_of_zeros_stays_one():
    assert not newton_schulz(torch.zeros(3, 4), COEFFICIENTS, 5, 1e-7).any()
