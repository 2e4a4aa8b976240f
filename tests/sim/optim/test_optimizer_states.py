"""State of every optimizer can be saved, resharded, and converted from and to the unsharded optimizer's."""

import copy

import pytest
import torch
import transformers

from fullshard import Checkpoints, ShardingStrategy, fully_shard, load_checkpoint, step_in_backward
from fullshard.compat.torch_fsdp import fsdp2
from fullshard.compat.torch_fsdp.api import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.core.engine import local_tensors
from fullshard.core.optim.adafactor import Adafactor, TorchAdafactor
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.optim.lowbit import AdamW8bit, AdamWBF16
from fullshard.core.optim.muon import Muon, muon_groups
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError
from fullshard.state.saving.dcp import load_dcp, save_dcp
from fullshard.state.saving.optimizer_state import full_optimizer_state, load_optimizer_state
from fullshard.state.storage import read_index
from support.optimizers import LAYOUTS, assert_same_updates, batches, loss_of, of_rank, train, zoo
from support.parity import two_by_two, weights_of
from support.states import assert_same_bits, rank_runs, whole as put_together

OURS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "adafactor": lambda m: Adafactor(m.parameters(), beta1=0.9),
    "torch adafactor": lambda m: TorchAdafactor(m.parameters()),
    "muon": lambda m: Muon(muon_groups(m), lr=1e-2, ns_dtype=torch.float32),
    "8 bit": lambda m: AdamW8bit(m.parameters(), lr=1e-2),
    "bf16": lambda m: AdamWBF16(m.parameters(), lr=1e-2),
}
"""Optimizers of sharded models."""

SHAPES = ("adamw", "adafactor", "torch adafactor", "muon", "8 bit")
"""Those whose states differ in more than their keys."""

THEIRS = OURS | {
    "adafactor": lambda m: transformers.Adafactor(m.parameters(), beta1=0.9),
    "torch adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}
"""What the unsharded model has: the optimizer that ours stands for, where there is one that runs here."""


def trained(kind, steps=2):
    """An unsharded model and its optimizer after some steps."""
    model = zoo()
    optimizer = THEIRS[kind](model)
    train(model, optimizer, batches(steps, 2))
    return model, optimizer


def on_ranks(size, model, work, **options):
    """``work(comm, sharded model)`` on each rank, of copies of ``model``."""
    models = [copy.deepcopy(model) for _ in range(size)]
    return run_ranks(size, lambda comm: work(comm, fully_shard(models[comm.rank], comm, **options)))


def assert_same(ours, theirs):
    """Two state dicts are the same: numbers, keys, dtypes and bits."""
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert ours["state"][number].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(ours["state"][number][key], value, atol=0, rtol=0, msg=f"{number} {key}")
    for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert mine["params"] == group["params"]


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, "a unit each") for kind in SHAPES] + [("adafactor", "one unit"), ("8 bit", "one unit")]
)
def test_the_unsharded_state_goes_in_and_comes_out_to_the_bit(kind, layout):
    model, optimizer = trained(kind)
    state = optimizer.state_dict()

    def work(comm, sharded):
        its = OURS[kind](sharded)
        load_optimizer_state(sharded, its, state)
        return full_optimizer_state(sharded, its)

    full, *others = on_ranks(3, model, work, **LAYOUTS[layout])
    assert_same(full, state)
    assert others == [{}, {}]


@pytest.mark.parametrize("kind", OURS)
def test_training_goes_from_unsharded_to_sharded_and_back_as_if_it_had_stayed(kind):
    model, optimizer = trained(kind)
    alone = copy.deepcopy(model)
    its = THEIRS[kind](alone)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(alone, its, batches(4, 2, seed=1))

    def work(comm, sharded):
        its = OURS[kind](sharded)
        load_optimizer_state(sharded, its, optimizer.state_dict())
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(4, 2, seed=1)[:2]])
        return weights_of(sharded), full_optimizer_state(sharded, its)

    weights, state = on_ranks(2, model, work, **LAYOUTS["one unit"])[0]
    model.load_state_dict(weights)
    optimizer = THEIRS[kind](model)
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(4, 2, seed=1)[2:])
    # A sum that differs in its last bit can round a bfloat16 moment the other way.
    tolerance = 1e-2 if kind == "bf16" else 1e-4
    assert_same_updates(dict(model.named_parameters()), dict(alone.named_parameters()), tolerance)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("adamw", 2, 3), ("torch adafactor", 2, 3), ("muon", 3, 2), ("adafactor", 3, 1), ("8 bit", 4, 2)],
)
def test_checkpoints_are_loaded_by_other_world_sizes_and_layouts_to_the_bit(kind, before, after, tmp_path):
    def save(comm, model):
        optimizer = OURS[kind](model)
        train(model, optimizer, [of_rank(batch, comm.rank) for batch in batches(2, before)])
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=2)
        return rank_runs(model, optimizer)

    def load(comm, model):
        optimizer = OURS[kind](model)
        found = []
        for _ in range(2):  # into nothing, and into state that is there
            load_checkpoint(model, optimizer, tmp_path / "step-00000002")
            loaded = rank_runs(model, optimizer)
            train(model, optimizer, [of_rank(batch, comm.rank) for batch in batches(1, after)])
            found.append(rank_runs(model, optimizer))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one[-1], other[-1]), one[0]
        return loaded

    saved = put_together(on_ranks(before, zoo(), save, **LAYOUTS["a unit each"]))
    assert_same_bits(put_together(on_ranks(after, zoo(1), load, **LAYOUTS["one unit"])), saved)
    index = read_index(tmp_path / "step-00000002")
    assert {name for name in saved if name.startswith("optimizer/")} == {
        name for name in index.tensors if name.startswith("optimizer/")
    }


def test_state_keeps_its_precision_where_weights_are_half_of_it(tmp_path):
    for kind in ("adafactor", "8 bit", "bf16"):
        model = zoo().bfloat16()
        optimizer = OURS[kind](model)
        train(model, optimizer, [(tokens, targets.bfloat16()) for tokens, targets in batches(2, 2)])
        state = optimizer.state_dict()

        def work(comm, sharded, kind=kind, state=state):
            its = OURS[kind](sharded)
            load_optimizer_state(sharded, its, state)
            with Checkpoints(tmp_path / kind, ranks=comm) as checkpoints:
                checkpoints.save(sharded, its, step=1)
                again = OURS[kind](sharded)
                checkpoints.load(sharded, again)
            return full_optimizer_state(sharded, again)

        assert_same(on_ranks(2, model, work)[0], state)


def test_muons_state_is_exchanged_with_torchs_muon_and_adamw(tmp_path):
    """In memory, and from one file with both."""
    model = zoo()
    hidden, *rest = ([*group["params"]] for group in muon_groups(model))
    muon = torch.optim.Muon(hidden, lr=1e-2)
    adamw = torch.optim.AdamW([{"params": group} for group in rest], lr=1e-3)
    for batch in batches(2, 2):
        train(model, muon, [batch])
        adamw.step()

    torch.save([muon.state_dict(), adamw.state_dict()], tmp_path / "both.pt")

    def work(comm, sharded):
        its, of_file = OURS["muon"](sharded), OURS["muon"](sharded)
        load_optimizer_state(sharded, its, [muon.state_dict(), adamw.state_dict()])
        load_optimizer_state(sharded, of_file, tmp_path / "both.pt")
        for one, other in zip(rank_runs(sharded, of_file), rank_runs(sharded, its), strict=True):
            assert torch.equal(one[-1], other[-1]), one[0]
        assert [group["lr"] for group in its.param_groups] == [1e-2, 1e-3, 1e-3]
        return full_optimizer_state(sharded, its, groups=[0]), full_optimizer_state(sharded, its, groups=[1, 2])

    of_muon, of_adamw = on_ranks(2, model, work)[0]
    assert_same(of_muon, muon.state_dict())
    assert_same(of_adamw, adamw.state_dict())
    muon.load_state_dict(of_muon)
    adamw.load_state_dict(of_adamw)


def test_quantised_state_that_bitsandbytes_hides_from_fsdp_is_found():
    model, optimizer = trained("8 bit")
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        hidden = {key: values.pop(key) for key in list(values) if key != "step"}
        values["__bnb_optimizer_quant_state__"] = hidden

    def work(comm, sharded):
        its = OURS["8 bit"](sharded)
        load_optimizer_state(sharded, its, state)
        return full_optimizer_state(sharded, its)

    assert_same(on_ranks(2, model, work)[0], optimizer.state_dict())


def test_optimizers_that_step_in_backward_are_numbered_as_one():
    reference = zoo()
    optimizer = OURS["adamw"](reference)
    train(reference, optimizer, batches(2, 3))

    def work(comm, model):
        steps = step_in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1))
        for batch in batches(2, 3):
            tokens, targets = of_rank(batch, comm.rank)
            (model(tokens) - targets).square().mean().backward()
        return full_optimizer_state(model, steps)

    full = on_ranks(3, zoo(), work)[0]
    assert [group["params"] for group in full["param_groups"]] == [list(range(len(list(reference.parameters()))))]
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(full["state"][number][key], value, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["adafactor", "8 bit"])
def test_copies_of_shards_give_it_once(kind, tmp_path):
    model, optimizer = trained(kind)
    models = [copy.deepcopy(model) for _ in range(4)]

    def work(comm):
        sharded = fully_shard(models[comm.rank], two_by_two(comm), strategy=ShardingStrategy.HYBRID_SHARD)
        its = OURS[kind](sharded)
        load_optimizer_state(sharded, its, optimizer.state_dict())
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(sharded, its, step=1)
        load_checkpoint(sharded, again := OURS[kind](sharded), tmp_path / "step-00000001")
        return full_optimizer_state(sharded, again)

    full, *others = run_ranks(4, work)
    assert_same(full, optimizer.state_dict())
    assert others == [{}] * 3


def test_of_an_optimizer_that_wraps_another_the_one_inside_says_where_state_lies():
    class Wrapping(torch.optim.Optimizer):
        """As accelerate's AcceleratedOptimizer, which needs its whole state to be made."""

        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.state, self.param_groups = optimizer.state, optimizer.param_groups

    model, optimizer = trained("adafactor")

    def work(comm, sharded):
        its = OURS["adafactor"](sharded)
        load_optimizer_state(sharded, its, optimizer.state_dict())
        return full_optimizer_state(sharded, Wrapping(its))

    assert_same(on_ranks(2, model, work)[0], optimizer.state_dict())


def test_another_shape_is_refused_by_name_and_changes_nothing():
    model, optimizer = trained("adafactor")
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_sq_row"] = torch.zeros(7)

    def work(comm, sharded):
        its = OURS["adafactor"](sharded)
        with pytest.raises(CheckpointError, match=r"'exp_avg_sq_row' of .* has shape \(7,\)") as error:
            load_optimizer_state(sharded, its, state)
        assert not any(its.state.values())
        other = OURS["adamw"](sharded)
        with pytest.raises(CheckpointError, match=r"exp_avg_sq_row' of .* another optimizer"):
            load_optimizer_state(sharded, other, optimizer.state_dict())
        return str(error.value)

    assert len(set(on_ranks(2, model, work))) == 1


def options_of(group):
    return {key: value for key, value in group.items() if key != "params"}


def as_it_is(model, optimizer):
    """Copies of this rank's weights, states and options."""
    weights = [param.detach().clone() for param in model.parameters()]
    states = copy.deepcopy([dict(values) for values in optimizer.state.values() if values])
    return weights, states, [options_of(group) for group in optimizer.param_groups]


def assert_unchanged(model, optimizer, before):
    weights, states, groups = before
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    now = [values for values in optimizer.state.values() if values]
    for values, then in zip(now, states, strict=True):
        assert values.keys() == then.keys()
        assert all(torch.equal(torch.as_tensor(values[key]), torch.as_tensor(then[key])) for key in then)
    assert [options_of(group) for group in optimizer.param_groups] == groups


def save(way, comm, model, optimizer, path):
    """Write under ``path`` what :func:`load` reads; nothing for a state dict."""
    if way == "dcp":
        save_dcp(model, optimizer, path / "dcp")
    elif way == "checkpoint":
        with Checkpoints(path, ranks=comm) as checkpoints:
            checkpoints.save(model, optimizer, step=1)


def load(way, model, optimizer, path, state):
    """From what was saved under ``path``, or from an unsharded optimizer's ``state``."""
    if way == "dcp":
        load_dcp(model, optimizer, path / "dcp")
    elif way == "checkpoint":
        load_checkpoint(model, optimizer, path / "step-00000001")
    else:
        load_optimizer_state(model, optimizer, state)


@pytest.mark.parametrize(
    ("kind", "way"),
    [("adafactor", "state dict"), ("torch adafactor", "checkpoint"), ("muon", "checkpoint"), ("8 bit", "state dict")],
)
def test_state_of_another_optimizer_is_refused_and_changes_nothing(kind, way, tmp_path):
    model, adamw = trained("adamw", 1)

    def work(comm, sharded):
        other = OURS["adamw"](sharded)
        load_optimizer_state(sharded, other, adamw.state_dict())
        save(way, comm, sharded, other, tmp_path)
        its = OURS[kind](sharded)
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(1, 2)])
        before = as_it_is(sharded, its)
        with pytest.raises(
            CheckpointError, match=r"exp_avg, exp_avg_sq, step; \w+ keeps .*another optimizer's"
        ) as error:
            load(way, sharded, its, tmp_path, adamw.state_dict())
        assert_unchanged(sharded, its, before)
        return str(error.value)

    assert len(set(on_ranks(2, model, work, **LAYOUTS["a unit each"]))) == 1


def test_of_plain_optimizers_the_state_that_is_there_tells_what_fits():
    model, adamw = trained("adamw", 1)

    def work(comm, sharded):
        its = OURS["momentum"](sharded)
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(1, 2)])
        before = as_it_is(sharded, its)
        with pytest.raises(CheckpointError, match=r"this optimizer keeps momentum_buffer\. It is another optimizer's"):
            load_optimizer_state(sharded, its, adamw.state_dict())
        assert_unchanged(sharded, its, before)

    on_ranks(2, model, work)


def test_options_of_another_kind_are_refused_also_without_state():
    model, adamw = trained("adamw", 0)

    def work(comm, sharded):
        its = OURS["adafactor"](sharded)
        with pytest.raises(CheckpointError, match=r"'eps' of .* a number, 1e-08; here it is a list of 2"):
            load_optimizer_state(sharded, its, adamw.state_dict())

    on_ranks(2, model, work)


def test_a_misfit_that_one_rank_alone_holds_changes_no_rank():
    model, optimizer = trained("8 bit", 1)
    state = copy.deepcopy(optimizer.state_dict())
    name = [name for name, param in model.named_parameters()].index("tall.weight")
    state["state"][name]["state1"] = state["state"][name]["state1"].float()

    def work(comm, sharded):
        its = OURS["8 bit"](sharded)
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(1, 2)])
        before = as_it_is(sharded, its)
        with pytest.raises(
            CheckpointError, match=r"keeps state1 of tall\.weight as torch\.uint8; .* torch\.float32"
        ) as error:
            load_optimizer_state(sharded, its, state)
        assert_unchanged(sharded, its, before)
        return str(error.value)

    assert len(set(on_ranks(4, model, work))) == 1


@pytest.mark.parametrize("way", ["state dict", "checkpoint", "dcp"])
def test_another_code_book_is_refused_and_ours_is_never_written_into(way, tmp_path):
    model, optimizer = trained("8 bit", 1)
    state = copy.deepcopy(optimizer.state_dict())
    others = torch.linspace(-1, 1, 256)
    for values in state["state"].values():
        values |= {"qmap1": others} if "qmap1" in values else {}
    size = 1 if way == "dcp" else 2

    def work(comm, sharded):
        its, foreign = OURS["8 bit"](sharded), OURS["8 bit"](sharded)
        for one in (foreign, its):
            train(sharded, one, [of_rank(batch, comm.rank) for batch in batches(1, size)])
        book = its._books_on(torch.device("cpu"))[0].values
        for values in foreign.state.values():
            values |= {"qmap1": others} if "qmap1" in values else {}
        save(way, comm, sharded, foreign, tmp_path)
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(1, size)])
        before, codes = as_it_is(sharded, its), book.clone()
        with pytest.raises(CheckpointError, match=r"qmap1.* has other numbers than this optimizer's"):
            load(way, sharded, its, tmp_path, state)
        assert torch.equal(book, codes)
        assert_unchanged(sharded, its, before)

    on_ranks(size, model, work)


@pytest.mark.parametrize("way", ["state dict", "checkpoint", "dcp"])
def test_all_parameters_share_one_code_book_after_loading(way, tmp_path):
    model, optimizer = trained("8 bit", 1)
    size = 1 if way == "dcp" else 2

    def work(comm, sharded):
        its = OURS["8 bit"](sharded)
        load_optimizer_state(sharded, its, optimizer.state_dict())
        save(way, comm, sharded, its, tmp_path)
        load(way, sharded, its := OURS["8 bit"](sharded), tmp_path, optimizer.state_dict())
        book = its._books_on(torch.device("cpu"))[0].values
        assert {values["qmap1"].data_ptr() for values in its.state.values() if "qmap1" in values} == {book.data_ptr()}

    on_ranks(size, model, work)


def test_parameters_that_differ_between_ranks_are_refused():
    def work(comm, model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.nbytes])
        with pytest.raises(CheckpointError, match="different parameters, or another order, on rank 1"):
            full_optimizer_state(model, optimizer)

    on_ranks(2, zoo(), work, **LAYOUTS["one unit"])


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("adafactor", "full"),
        ("8 bit", "rank 0"),
        ("adafactor", "sharded"),
        ("8 bit", "sharded"),
        ("adafactor", "local"),
    ],
)
def test_through_torchs_names_it_comes_back(kind, chosen):
    model, optimizer = trained(kind)
    state = optimizer.state_dict()
    models = [copy.deepcopy(model) for _ in range(3)]
    types = {"sharded": StateDictType.SHARDED_STATE_DICT, "local": StateDictType.LOCAL_STATE_DICT}

    def work(comm):
        sharded = FSDP(models[comm.rank], comm)
        its = OURS[kind](sharded)
        load_optimizer_state(sharded.module, its, state)
        config = FullOptimStateDictConfig(rank0_only=True) if chosen == "rank 0" else None
        full = FullStateDictConfig(rank0_only=chosen == "rank 0")
        kinds = types.get(chosen, StateDictType.FULL_STATE_DICT)
        with FSDP.state_dict_type(sharded, kinds, full if config else None, config):
            given = FSDP.optim_state_dict(sharded, its)
            again = OURS[kind](sharded)
            again.load_state_dict(FSDP.optim_state_dict_to_load(sharded, again, given))
        for param, values in its.state.items():
            for key, value in values.items():
                torch.testing.assert_close(again.state[param][key], value, atol=0, rtol=0)
        return full_optimizer_state(sharded.module, again), given

    (found, given), *_ = run_ranks(3, work)
    assert_same(found, state)
    if chosen in ("full", "rank 0"):
        names = [name for group in given["param_groups"] for name in group["params"]]
        for number, name in enumerate(names):
            for key, value in state["state"][number].items():
                torch.testing.assert_close(given["state"][name][key], value, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["adafactor", "8 bit"])
def test_torchs_fully_shard_knows_where_state_lies_after_a_step(kind):
    """FSDP2's names: the optimizer's own state dict has parts, and takes parts and whole tensors."""
    model, optimizer = trained(kind)
    models = [copy.deepcopy(model) for _ in range(3)]

    def work(comm):
        sharded = fsdp2.fully_shard(models[comm.rank], mesh=comm)
        its = OURS[kind](sharded)
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(1, 3)])
        given = its.state_dict()
        parts = {
            (number, key): getattr(value, "written", (0, value.numel()))  # else it is whole
            for number, values in given["state"].items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and value.ndim
        }
        before = full_optimizer_state(sharded, its)
        again = OURS[kind](sharded)  # it describes its state, and takes parts, once it has stepped
        train(sharded, again, [of_rank(batch, comm.rank) for batch in batches(1, 3, seed=1)])
        again.load_state_dict(given)
        after = full_optimizer_state(sharded, again)
        if comm.rank == 0:
            assert_same(after, before)
        load_optimizer_state(sharded, its, optimizer.state_dict())
        return full_optimizer_state(sharded, its), parts

    found = run_ranks(3, work)
    assert_same(found[0][0], optimizer.state_dict())
    # What two ranks hold of blocks and columns is read by both and written by one.
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                written = [parts.get((number, key), (0, 0)) for _, parts in found]
                assert sum(stop - start for start, stop in written) == value.numel(), (number, key)


def test_the_average_of_the_weights_is_saved_and_loaded_by_any_world_size(tmp_path):
    def save(comm, model):
        average = ExponentialMovingAverage(model, 0.5)
        optimizer = OURS["momentum"](model)
        for batch in batches(3, 2):
            train(model, optimizer, [of_rank(batch, comm.rank)])
            average.update()
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.save(model, step=1)
            checkpoints.save(model, step=2, average=average)
        return averages(model, average)

    def load(comm, model):
        average = ExponentialMovingAverage(model, 0.5)
        with pytest.raises(CheckpointError, match="saved without an average"):
            load_checkpoint(model, None, tmp_path / "step-00000001", average=average)
        assert average.updates == 0
        with Checkpoints(tmp_path, ranks=comm) as checkpoints:
            checkpoints.load(model, average=average)
        assert average.updates == 3
        return averages(model, average)

    def averages(model, average):
        held = {local.name: local for local in local_tensors(model)}
        return [
            (name, held[name].shape, held[name].start, tensor.detach().reshape(-1).clone())
            for name, tensor in average.averages.items()
        ]

    saved = put_together(on_ranks(2, zoo(), save, **LAYOUTS["a unit each"]))
    assert_same_bits(put_together(on_ranks(3, zoo(1), load, **LAYOUTS["one unit"])), saved)


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon", "8 bit"])
def test_a_deep_copy_steps_its_shards_as_the_original_does_and_is_not_saved_for_it(kind):
    def params_of(optimizer):
        return [param for group in optimizer.param_groups for param in group["params"]]

    def work(comm, model):
        optimizer, data = OURS[kind](model), [of_rank(batch, comm.rank) for batch in batches(2, 2)]
        train(model, optimizer, data[:1])
        optimizer.zero_grad()
        loss_of(model, data[1]).backward()
        pairs = list(zip(params_of(optimizer), params_of(twin := copy.deepcopy(optimizer)), strict=True))
        for param, its in pairs:
            its.grad = None if param.grad is None else param.grad.clone()
        optimizer.step()
        twin.step()
        assert all(its is not param and torch.equal(its, param) for param, its in pairs)
        for param, its in pairs:
            assert all(
                torch.equal(torch.as_tensor(twin.state[its][k]), torch.as_tensor(v))
                for k, v in optimizer.state[param].items()
            )
        with pytest.raises(CheckpointError, match=r"steps a parameter of shape .* that the model does not have"):
            full_optimizer_state(model, twin)

    on_ranks(2, zoo(), work, **LAYOUTS["a unit each"])


@pytest.mark.parametrize(("kind", "way"), [("8 bit", "checkpoint"), ("bf16", "state dict"), ("muon", "state dict")])
def test_an_option_of_adamw_that_ours_lacks_is_refused_out_of_a_state_and_changes_nothing(kind, way, tmp_path):
    model, optimizer = trained(kind, 1)
    state = optimizer.state_dict()
    state["param_groups"][-1]["maximize"] = True

    def work(comm, sharded):
        its = OURS[kind](sharded)
        train(sharded, its, [of_rank(batch, comm.rank) for batch in batches(1, 2)])
        its.param_groups[-1]["maximize"] = True
        save(way, comm, sharded, its, tmp_path)
        del its.param_groups[-1]["maximize"]
        before = as_it_is(sharded, its)
        with pytest.raises(CheckpointError, match="does not implement maximize; a parameter group has maximize=True"):
            load(way, sharded, its, tmp_path, state)
        assert_unchanged(sharded, its, before)

    on_ranks(2, model, work)


@pytest.mark.parametrize("way", ["state dict", "checkpoint", "dcp"])
def test_adamws_moments_go_on_in_bfloat16(way, tmp_path):
    model, optimizer = trained("adamw")
    size = 1 if way == "dcp" else 2

    def work(comm, sharded):
        wide, narrow = OURS["adamw"](sharded), OURS["bf16"](sharded)
        load_optimizer_state(sharded, wide, optimizer.state_dict())
        save(way, comm, sharded, wide, tmp_path)
        load(way, sharded, narrow, tmp_path, optimizer.state_dict())
        for param in sharded.parameters():
            param.grad = torch.zeros_like(param) if param.nbytes else None
        narrow.step()
        for param, values in narrow.state.items():
            if values:
                assert [values[key].dtype for key in ("exp_avg", "exp_avg_sq")] == [torch.bfloat16] * 2
                # decayed by a tenth of itself, and rounded twice
                torch.testing.assert_close(
                    values["exp_avg"].float(), wide.state[param]["exp_avg"] * 0.9, atol=1e-30, rtol=2e-2
                )

    on_ranks(size, model, work)


@pytest.mark.parametrize(("kind", "way"), [("adafactor", "to load"), ("muon", "shard"), ("8 bit", "scatter")])
def test_through_torchs_names_another_optimizers_state_is_refused(kind, way):
    model, adamw = trained("adamw", 1)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(comm):
        sharded = FSDP(models[comm.rank], comm)
        other = OURS["adamw"](sharded)
        load_optimizer_state(sharded.module, other, adamw.state_dict())
        given = FSDP.full_optim_state_dict(sharded, other, rank0_only=False)
        its = OURS[kind](sharded)
        take = {
            "to load": lambda: FSDP.optim_state_dict_to_load(sharded, its, given),
            "shard": lambda: FSDP.shard_full_optim_state_dict(given, sharded, optim=its),
            "scatter": lambda: FSDP.scatter_full_optim_state_dict(given, sharded, optim=its),
        }
        with pytest.raises(CheckpointError, match=r"another optimizer's|here it is a|different options") as error:
            take[way]()
        return str(error.value)

    assert len(set(run_ranks(2, work))) == 1
