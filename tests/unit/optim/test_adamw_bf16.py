"""AdamW with stochastically rounded bfloat16 states, on one device."""

import pytest
import torch
from torch import nn

from fullshard.core.optim import lowbit
from fullshard.core.optim.lowbit import AdamW8bit, AdamWBF16, random_words, round_to_bfloat16, sixteen_bits, stream_key
from fullshard.errors import ConfigError

CPU = torch.device("cpu")


def params(dtype=torch.float32, sizes=((70, 40), (13,), ())):
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in sizes]


def step(optimizer, parameters, steps, seed=1):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in parameters:
            param.grad = (torch.randn(param.shape, generator=draw) / 10).to(param.dtype)
        optimizer.step()
    return parameters


def splitmix64(seed, count):
    """The published generator, with Python's integers."""
    mask, numbers = 2**64 - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


def test_random_words_are_splitmix64s_and_any_part_of_them_is_computed_alone():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # as published for this seed
    for key in (1234567, 2**64 - 3):
        expected = splitmix64(key, 1003)
        words = random_words(key, 0, 1003, CPU)
        assert [word % 2**64 for word in words.tolist()] == expected
        assert torch.equal(random_words(key, 17, 50, CPU), words[17:50])
        for field in range(3):
            bits = sixteen_bits(words, field)
            assert bits.tolist() == [word >> 16 * field & 0xFFFF for word in expected]
    later = random_words(5, 2**40, 2**40 + 3, CPU)
    assert later.tolist() != random_words(5, 0, 3, CPU).tolist()


def test_each_seed_step_and_parameter_has_a_stream_of_its_own():
    keys = {stream_key(seed, step, number) for seed in range(9) for step in range(9) for number in range(9)}
    assert len(keys) == 9**3
    assert all(0 <= key < 2**64 for key in keys)
    assert stream_key(-1, 2**70) == stream_key(2**64 - 1, 0)  # any integer will do


def test_rounding_is_right_on_average():
    # The mean of n roundings of a value is off by a standard deviation of at most gap / 2 / sqrt(n); five of them pass.
    count, values = 4096, torch.tensor([1.0017, -3.14159, 1e-3, 7e-41, -2.7e20, 0.5000001])
    bits = sixteen_bits(random_words(7, 0, count * len(values), CPU), 1)
    rounded = round_to_bfloat16(values.repeat(count), bits).view(count, -1)
    below = (values.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((rounded == below) | (rounded == above)).all()
    off = (rounded.double().mean(0) - values.double()).abs() / (above.double() - below.double()).abs()
    assert (off < 5 * 0.5 / count**0.5).all()
    assert (rounded[:, :4] == above[:4]).any(0).all()


def test_bits_of_one_word_are_not_related():
    words = random_words(stream_key(0, 1, 2), 0, 2**15, CPU)
    fields = torch.stack([sixteen_bits(words, field).double() / 65536 for field in range(3)])
    assert (fields.mean(1) - 0.5).abs().max() < 5 * 0.29 / 2**7.5
    others = torch.cat([fields, fields[:1].roll(1, 1), sixteen_bits(random_words(1, 0, 2**15, CPU), 0)[None].double()])
    assert (torch.corrcoef(others).fill_diagonal_(0)).abs().max() < 5 / 2**7.5


def test_what_bfloat16_holds_stays_exactly():
    exact = torch.cat([torch.randn(500).bfloat16().float(), torch.tensor([0.0, -0.0, 3.3895e38, 1e-40])])
    exact = exact.bfloat16().float()
    for bits in (0, 1, 0xFFFF):
        rounded = round_to_bfloat16(exact, torch.full(exact.shape, bits, dtype=torch.int32))
        assert torch.equal(rounded.float().view(torch.int32), exact.view(torch.int32))


def test_infinities_and_nans_stay():
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([torch.inf, -torch.inf]), payloads])
    for bits in (0, 0xFFFF):
        rounded = round_to_bfloat16(values, torch.full(values.shape, bits, dtype=torch.int32))
        assert rounded[:2].tolist() == [torch.inf, -torch.inf]
        assert rounded[2:].isnan().all()


def test_the_state_is_half_of_adamws_with_its_keys():
    parameters = params()
    step(optimizer := AdamWBF16(parameters), parameters, 1)
    state = optimizer.state[parameters[0]]
    assert {key: (value.dtype, value.shape) for key, value in state.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.bfloat16, (70, 40)),
        "exp_avg_sq": (torch.bfloat16, (70, 40)),
    }


def test_the_second_moment_does_not_stand_still():
    # 2,000 steps of gradient 1 after one of gradient 1.1: nearest rounding keeps 1.1's square for ever.
    param = nn.Parameter(torch.zeros(4096))
    optimizer = AdamWBF16([param], betas=(0.9, 0.999))
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param]["exp_avg_sq"].fill_(1.2109375)
    for _ in range(300):
        optimizer.step()
    expected = 1 + 0.2109375 * 0.999**300
    assert abs(optimizer.state[param]["exp_avg_sq"].double().mean().item() - expected) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_run_is_adamws_within_the_rounding(dtype):
    ours, theirs, start = params(dtype), params(), params()
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine)
    step(AdamWBF16(ours, lr=1e-2), ours, 20)
    step(torch.optim.AdamW(theirs, lr=1e-2), theirs, 20)
    for mine, other, first in zip(ours, theirs, start, strict=True):
        off = (mine.float() - other).abs().max() / (other - first).abs().max()
        assert off < (0.05 if dtype == torch.float32 else 0.4)  # a weight in bfloat16 is 1/128 wide at 1


def test_bfloat16_weights_follow_small_updates_on_average():
    # A step of 1e-4 is a fortieth of bfloat16's gap at 1; to the nearest, the weights would never move.
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamWBF16([param], lr=1e-4, weight_decay=0)
    for _ in range(50):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert abs(1 - param.double().mean().item() - 50e-4) < 5e-4


def test_a_seed_makes_the_run():
    runs = [params(torch.bfloat16) for _ in range(3)]
    for seed, run in zip((3, 3, 4), runs, strict=True):
        step(AdamWBF16(run, lr=1e-2, seed=seed), run, 3)
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_a_chunk_at_a_time_is_the_same(monkeypatch):
    whole, pieces = params(torch.bfloat16), params(torch.bfloat16)
    step(AdamWBF16(whole), whole, 3)
    monkeypatch.setattr(lowbit, "CHUNK", 256)
    step(AdamWBF16(pieces), pieces, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(dtype):
    through, first = params(dtype), params(dtype)
    step(optimizer := AdamWBF16(through, seed=5), through, 5)
    step(optimizer, through, 5, seed=2)
    step(stopped := AdamWBF16(first, seed=5), first, 5)
    resumed = AdamWBF16(first)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.param_groups[0]["seed"] == 5
    assert resumed.state[first[0]]["exp_avg"].dtype == torch.bfloat16
    step(resumed, first, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(through, first, strict=True))


def test_states_are_exchanged_with_torchs_adamw():
    parameters = params()
    step(adamw := torch.optim.AdamW(parameters, lr=1e-2), parameters, 3)
    narrow = AdamWBF16(parameters)
    narrow.load_state_dict(adamw.state_dict() | {"param_groups": narrow.state_dict()["param_groups"]})
    state = narrow.state[parameters[0]]
    assert torch.equal(state["exp_avg"], adamw.state[parameters[0]]["exp_avg"].bfloat16())
    step(narrow, parameters, 1)
    groups = {"param_groups": adamw.state_dict()["param_groups"]}
    adamw.load_state_dict(narrow.state_dict() | groups)
    step(adamw, parameters, 1)
    assert adamw.state[parameters[0]]["step"] == 5


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBF16])
@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_options_of_adamw_that_narrow_ones_lack_are_refused(kind, option):
    with pytest.raises(
        ConfigError, match=f"{kind.__name__} does not implement {option}; a parameter group has {option}=True"
    ):
        kind([{"params": params(), option: True}])
    optimizer = kind(params())
    state = optimizer.state_dict()
    state["param_groups"][0] |= {option: True, "lr": 7.0}
    with pytest.raises(ConfigError, match=f"{kind.__name__} does not implement {option}"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3
