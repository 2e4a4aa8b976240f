"""8-bit AdamW on one device: codes, blocks, state; compared with bitsandbytes and torchao if installed."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fullshard.core.layout import ShardMeta, plan_unit
from fullshard.core.optim import lowbit
from fullshard.core.optim.lowbit import (
    BLOCK,
    AdamW8bit,
    CodeBook,
    any_block_is_split,
    block_maxima,
    chunks,
    dequantise,
    dynamic_codes,
    quantise,
    split_blocks,
)
from fullshard.errors import CheckpointError, ConfigError

SIZES = [(40, 256), (300, 24), (2, 9601), (40,), ()]


def params(dtype=torch.float32, sizes=SIZES):
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in sizes]


def step(optimizer, parameters, steps, seed=1):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in parameters:
            param.grad = (torch.randn(param.shape, generator=draw) / 10).to(param.dtype)
        optimizer.step()
    return parameters


def errors(ours, theirs, start):
    return [((a - b).abs().max() / (b - c).abs().max()).item() for a, b, c in zip(ours, theirs, start, strict=True)]


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_dynamic_tree_quantisation(signed):
    codes = dynamic_codes(signed=signed)
    assert codes.shape == (256,)
    assert (codes.diff() > 0).all()
    assert codes[-1] == 1
    assert 0 in codes
    # Exponent 0 has all fraction bits: 64 equal parts of 0.1 to 1 with a sign, 128 without; exponent -6 has 1 or 2.
    parts = 64 if signed else 128
    middles = 0.1 + 0.9 * (torch.arange(parts) + 0.5) / parts
    torch.testing.assert_close(codes[-1 - parts : -1], middles)
    least = [0.55e-6] if signed else [0.325e-6, 0.775e-6]
    torch.testing.assert_close(codes[codes > 0][: len(least)], torch.tensor(least))
    if signed:
        negative = -codes[codes < 0].flip(0)
        assert torch.equal(negative, codes[codes > 0][:-1])  # all but 1 itself


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_that_of_a_search_for_every_number(signed):
    codes = dynamic_codes(signed=signed)
    book = CodeBook.of(codes)
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    upper = upper[upper.view(torch.float32).isfinite()]
    both = [torch.bucketize((upper | low).view(torch.float32), book.midpoints[:-1]) for low in (0, 0xFFFF)]
    assert (both[0] - both[1]).abs().max() == 1  # one midpoint at most between numbers of the same upper bits
    middle = book.midpoints[:-1]
    around = [torch.nextafter(middle, torch.tensor(to)) for to in (-2.0, 2.0)]
    numbers = torch.cat([*around, middle, codes, upper.view(torch.float32)])
    assert torch.equal(book.nearest(numbers).long(), torch.bucketize(numbers, middle))


def test_a_run_that_begins_and_ends_inside_blocks_gets_their_codes():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    book = CodeBook.of(dynamic_codes(signed=True))
    scales = block_maxima(values)
    codes = quantise(values, scales, book)
    assert torch.equal(scales, torch.stack([block.abs().max() for block in values.split(BLOCK)]))
    assert torch.equal(codes[200:700], quantise(values[200:700], scales[:3], book, 200))
    back = dequantise(codes, scales, book.values)
    assert torch.equal(back[200:700], dequantise(codes[200:700], scales[:3], book.values, 200))
    # Nearest of 256: the widest gap is below 1/68 of the block's scale.
    assert ((back - values).abs() <= scales.repeat_interleave(BLOCK)[:1000] / 136).all()
    assert (book.values[quantise(torch.zeros(3), torch.zeros(1), book).long()] == 0).all()


def test_cut_blocks_are_those_that_several_ranks_hold():
    for shapes, ranks in [(((300, 24), (70, 70)), 3), (((64, 64),), 32), (((2, 9600),), 4), (((64, 256),), 4)]:
        for lane in plan_unit(shapes, ranks).lanes:
            for place in lane.placements:
                shape = shapes[place.index]
                metas = [ShardMeta("w", (), shape, lane, place, rank) for rank in range(ranks)]
                held = {}
                for rank, meta in enumerate(metas):
                    for element in range(*meta.element_range):
                        held.setdefault(element // BLOCK, {}).setdefault(rank, []).append(element)
                for rank, meta in enumerate(metas):
                    expected = [
                        (index, (of[rank][0], of[rank][-1] + 1), list(of))
                        for index, of in held.items()
                        if rank in of and len(of) > 1
                    ]
                    assert [(block.index, block.held, list(block.owners)) for block in split_blocks(meta)] == expected
                    assert any_block_is_split(meta) == any(len(of) > 1 for of in held.values())


def test_the_state_is_a_quarter_of_adamws_and_in_bitsandbytes_format():
    big, small = params(sizes=[(512, 256), (63, 65)])
    optimizer = AdamW8bit([big, small])
    step(optimizer, [big, small], 1)
    state, of_small = optimizer.state[big], optimizer.state[small]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items() if key != "step"} == {
        **{f"state{n}": (torch.uint8, (512, 256)) for n in (1, 2)},
        **{f"qmap{n}": (torch.float32, (256,)) for n in (1, 2)},
        **{f"absmax{n}": (torch.float32, (512,)) for n in (1, 2)},
    }
    own = sum(value.nbytes for key, value in state.items() if key.startswith(("state", "absmax")))
    assert own / big.numel() == 2 + 2 * 4 / BLOCK
    assert sorted(of_small) == ["state1", "state2", "step"]
    assert of_small["state1"].dtype == torch.float32
    assert state["step"] == 1


def test_small_parameters_are_stepped_as_torchs_adamw_does_and_large_ones_nearly():
    ours, theirs, start = params(), params(), params()
    step(AdamW8bit(ours, lr=1e-2), ours, 20)
    step(torch.optim.AdamW(theirs, lr=1e-2), theirs, 20)
    found = errors(ours, theirs, start)
    assert max(found[:3]) < 0.1
    assert max(found[3:]) < 1e-6


def test_a_chunk_at_a_time_is_the_same(monkeypatch):
    whole, pieces = params(), params()
    step(AdamW8bit(whole), whole, 3)
    monkeypatch.setattr(lowbit, "CHUNK", 4 * BLOCK)
    assert len(list(chunks(100, 5000))) == 5
    step(AdamW8bit(pieces), pieces, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(dtype):
    through, first = params(dtype), params(dtype)
    step(optimizer := AdamW8bit(through), through, 5)
    step(optimizer, through, 5, seed=2)
    step(stopped := AdamW8bit(first), first, 5)
    resumed = AdamW8bit(first)
    saved = stopped.state_dict()
    saved["state"] = {number: pickle.loads(pickle.dumps(state)) for number, state in saved["state"].items()}
    resumed.load_state_dict(saved)
    state = resumed.state[first[0]]
    assert (state["state1"].dtype, state["absmax1"].dtype, state["step"]) == (torch.uint8, torch.float32, 5)
    assert state["qmap1"] is resumed.state[first[1]]["qmap1"]
    step(resumed, first, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(through, first, strict=True))


def test_a_state_dict_wrapped_as_bitsandbytes_does_is_taken():
    parameters = params()
    step(optimizer := AdamW8bit(parameters), parameters, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {
        number: {"step": state.pop("step"), "__bnb_optimizer_quant_state__": state}
        for number, state in saved["state"].items()
    }
    loaded = AdamW8bit(parameters)
    loaded.load_state_dict(saved)
    for param in parameters:
        assert list(loaded.state[param]) == ["step", *list(optimizer.state[param])[1:]]
        assert torch.equal(loaded.state[param]["state1"], optimizer.state[param]["state1"])


def test_copies_of_an_optimizer_step():
    parameters = params()
    optimizer = AdamW8bit(parameters)
    step(optimizer, parameters, 1)
    both = copy.deepcopy((optimizer, parameters))
    step(*both, 1)
    step(optimizer, parameters, 1)
    assert all(torch.equal(a, b) for a, b in zip(parameters, both[1], strict=True))


def test_what_is_not_finite_spoils_its_block_and_no_other():
    (param,) = params(sizes=[(32, 256)])
    param.grad = torch.ones_like(param)
    param.grad[3, 5] = torch.nan
    optimizer = AdamW8bit([param])
    optimizer.step()
    optimizer.step()
    bad = param.isnan().any(1).nonzero().flatten().tolist()
    assert bad == [3]


def test_a_parameter_without_gradient_is_left_alone():
    first, second = params(sizes=[(64, 64), (64, 64)])
    first.grad, before = torch.ones_like(first), second.detach().clone()
    optimizer = AdamW8bit([first, second])
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


def test_a_closure_is_called_with_gradients():
    (param,) = params(sizes=[(3,)])

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    assert AdamW8bit([param]).step(closure) == (params(sizes=[(3,)])[0].square().sum())


@pytest.mark.parametrize(
    "wrong", [{"lr": -1}, {"eps": -1e-8}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"weight_decay": float("nan")}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be zero or more"):
        AdamW8bit(params(), **wrong)


def test_parameters_with_gaps_are_refused():
    param = nn.Parameter(torch.randn(4, 3).t())
    param.grad = torch.ones_like(param)
    with pytest.raises(ConfigError, match=r"need contiguous parameters; one of shape \(3, 4\)"):
        AdamW8bit([param]).step()


def test_states_of_other_optimizers_are_refused():
    parameters = params()
    step(adamw := torch.optim.AdamW(parameters), parameters, 1)
    with pytest.raises(CheckpointError, match=r"keeps state1 and state2 as uint8 .* of 10240 the loaded ones are"):
        AdamW8bit(parameters).load_state_dict(adamw.state_dict())
    step(linear := AdamW8bit(parameters), parameters, 1)
    state = copy.deepcopy(linear.state_dict())
    state["state"][1]["qmap2"] = torch.linspace(0, 1, 256)
    with pytest.raises(CheckpointError, match="qmap2 in the loaded state has others"):
        AdamW8bit(parameters).load_state_dict(state)


def test_a_refused_state_leaves_all_states_as_they_were():
    parameters = params()
    step(optimizer := AdamW8bit(parameters), parameters, 2)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 7.0
    del wrong["state"][1]["qmap2"]
    with pytest.raises(CheckpointError, match="qmap2 in the loaded state has others"):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    assert all(torch.equal(after["state"][n]["state1"], before["state"][n]["state1"]) for n in before["state"])


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_bitsandbytes(signed):
    bnb = pytest.importorskip("bitsandbytes")
    assert torch.equal(dynamic_codes(signed=signed), bnb.functional.create_dynamic_map(signed))


@pytest.mark.parametrize("to_ours", [True, False])
def test_states_are_exchanged_with_bitsandbytes(to_ours):
    theirs = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    source, target = (theirs, AdamW8bit) if to_ours else (AdamW8bit, theirs)
    first = params()
    before = source(first, lr=1e-2)
    step(before, first, 5)
    second = copy.deepcopy(first)
    after = target(second, lr=1e-2)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    start = [param.detach().clone() for param in first]
    step(before, first, 1, seed=2)
    step(after, second, 1, seed=2)
    assert max(errors(first, second, start)) < 1e-4


def test_the_step_is_torchaos(monkeypatch):
    pytest.importorskip("torchao")
    theirs_module = pytest.importorskip("torchao.optim.adam")
    monkeypatch.setattr(theirs_module.torch, "compile", lambda function, **options: function)
    sizes = [(40, 256), (20, 1024)]  # torchao quantises multiples of 256
    ours, theirs, start = params(sizes=sizes), params(sizes=sizes), params(sizes=sizes)
    step(AdamW8bit(ours), ours, 2)
    step(theirs_module.AdamW8bit(theirs), theirs, 2)
    assert max(errors(ours, theirs, start)) < 1e-2
