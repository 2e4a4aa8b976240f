"""FSDP2's names: bottom-up calls, policies, the module's methods, clipping, state dicts."""

import io

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

from fullshard import fully_shard as native_fully_shard
from fullshard import units, unsharded
from fullshard.compat.torch_fsdp.api import StateDictType
from fullshard.compat.torch_fsdp.fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.compat.torch_fsdp.state_dict_type import set_state_dict_type
from fullshard.errors import ConfigError, MismatchError, ShardingError, WrapError
from fullshard.testing import RecordingComm, run_ranks
from support.models import KINDS, Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, assert_same_run, optimizer_for, replicas, train_sharded, train_unsharded

SIZE = 2


def shard(model, comm, **options):
    for block in model.blocks:
        fully_shard(block, mesh=comm, **options)
    return fully_shard(model, mesh=comm, **options)


def with_models(size, work, make=TinyLM):
    """``work(comm, model)`` on each of ``size`` ranks, with equal models."""
    _, models = replicas(make, size)
    return run_ranks(size, lambda comm: work(comm, models[comm.rank]))


def rows_of(comm, steps):
    """This rank's rows of each batch."""
    first = comm.rank * ROWS_PER_RANK
    return [tokens[first : first + ROWS_PER_RANK] for tokens in batches(steps, comm.size * ROWS_PER_RANK)]


def plain_run(model, data, **clip):
    optimizer, losses, norms = optimizer_for(model), [], []
    for tokens in data:
        loss = lm_loss(model, tokens)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, None


@pytest.mark.parametrize("kind", ["lm", "lm_two_forwards", "lm_checkpoint_reentrant", "lm_frozen_parts"])
def test_bottom_up_calls_give_the_unsharded_run(kind):
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, SIZE)
    data = batches(2, SIZE * ROWS_PER_RANK)
    plain = train_unsharded(reference, loss_of, data)

    def work(comm):
        return train_sharded(shard(models[comm.rank], comm), comm, loss_of, data, sharded=True)

    for run in run_ranks(SIZE, work):
        assert_same_run(run, plain)


def test_blocks_and_root_stay_fsdp_modules_and_keep_their_units():
    def work(comm):
        model = shard(TinyLM(), comm)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, TinyLM)
        assert [isinstance(block, FSDPModule) and isinstance(block, Block) for block in model.blocks] == [True] * 4
        assert not isinstance(model.embed, FSDPModule)
        assert type(model.blocks[0]).__name__ == "FSDPBlock"
        return [row.unit for row in units(model).rows]

    assert run_ranks(1, work)[0] == ["(root)", *(f"blocks.{i}" for i in range(4))]


def test_a_root_alone_is_one_unit():
    def work(comm):
        return len(units(fully_shard(TinyLM(), mesh=comm)).rows)

    assert run_ranks(1, work) == [1]


def test_a_list_of_modules_is_one_unit_and_a_slice_of_a_container_is_plain():
    def work(comm):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        pair = [model[0], model[1]]
        assert fully_shard(pair, mesh=comm) is pair
        assert all(isinstance(one, FSDPModule) for one in pair)
        model = fully_shard(model, mesh=comm)
        model(torch.ones(2, 4)).sum().backward()
        assert type(model[:2]) is nn.Sequential
        return [row.unit for row in units(model).rows]

    assert run_ranks(1, work)[0] == ["(root)", "0 + 1"]


def test_an_embedding_of_its_own_keeps_the_engines_ways():
    def work(comm, model):
        ledger = RecordingComm(comm)
        fully_shard(model[0], mesh=ledger)
        fully_shard(model, mesh=ledger)
        model(torch.arange(4)).sum().backward()
        ledger.entries.clear()
        model(torch.arange(4)).sum().backward()
        return ledger.names.count("all_gather")

    found = with_models(SIZE, work, lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)))
    assert found == [2, 2]  # nothing is gathered again in backward


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, None), (2.0, False), (1.0, None), (float("inf"), None)])
def test_torchs_clip_grad_norm_is_that_of_the_unsharded_run(norm_type, foreach):
    reference, models = replicas(TinyLM, SIZE)
    data = batches(3, SIZE * ROWS_PER_RANK)
    clip = {"norm_type": norm_type, "foreach": foreach}
    _, norms, _ = plain_run(reference, data, **clip)

    def work(comm):
        model = shard(models[comm.rank], comm)
        optimizer, found = optimizer_for(model), []
        for tokens in data:
            lm_loss(model, tokens[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK]).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **clip).item())
            optimizer.step()
            optimizer.zero_grad()
        with unsharded(model):
            return found, {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = dict(reference.named_parameters())
    for found, weights in run_ranks(SIZE, work):
        assert found == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0)


def test_a_gradients_norm_is_the_whole_gradients_and_a_rank_without_rows_takes_part():
    def work(comm, model):
        model = fully_shard(model, mesh=comm)
        model(torch.ones(2, 3)).sum().backward()
        weight = model.weight
        norms = [weight.grad.norm(), torch.linalg.vector_norm(weight.grad.detach()), torch.norm(weight.grad)]
        assert type(weight.grad * 2) is torch.Tensor
        return len(weight), [norm.item() for norm in norms]

    rows, norms = zip(
        *with_models(SIZE, work, lambda: nn.Linear(3, 1)), strict=True
    )  # one row: one rank has none of the weight
    assert sorted(rows) == [0, 1]
    assert norms[0] == norms[1] == pytest.approx([2 * 3**0.5] * 3)


def test_norms_of_parts_of_a_gradient_are_refused():
    def work(comm):
        model = fully_shard(nn.Linear(4, 4), mesh=comm)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ConfigError, match="rank's rows"):
            model.weight.grad.norm(dim=0)

    run_ranks(1, work)


def test_torchs_scaler_skips_on_every_rank_what_overflows_on_one():
    def work(comm, model):
        model = fully_shard(model, mesh=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(2, 40)).sum()).backward()
        if comm.rank == 1:
            model.weight.grad[0, 0] = float("inf")
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        return torch.equal(model.weight, before)

    assert with_models(SIZE, work, lambda: nn.Linear(40, 40)) == [True, True]


@pytest.mark.parametrize("recurse", [True, False])
def test_without_gradient_sync_nothing_is_reduced_and_the_sum_comes_right(recurse):
    reference, models = replicas(TinyLM, SIZE)
    for tokens in batches(2, SIZE * ROWS_PER_RANK):
        lm_loss(reference, tokens).backward()

    def work(comm):
        ledger = RecordingComm(comm)
        model = shard(models[comm.rank], ledger)
        target = model if recurse else model.blocks[1]
        counts = []
        for sync, tokens in zip((False, True), rows_of(comm, 2), strict=True):
            target.set_requires_gradient_sync(sync, recurse=recurse)
            lm_loss(model, tokens).backward()
            counts.append(ledger.names.count("reduce_scatter"))
        return counts, {p.shard_meta.name: (p.shard_meta.row_range, p.grad) for p in model.parameters()}

    for counts, grads in run_ranks(SIZE, work):
        assert counts == ([0, 5] if recurse else [4, 9])
        for name, ((first, last), grad) in grads.items():
            expected = dict(reference.named_parameters())[name].grad
            if expected is None:
                assert grad is None
            else:
                torch.testing.assert_close(grad.as_subclass(torch.Tensor), expected[first:last], atol=1e-5, rtol=0)


def test_hybrid_meshes_and_requires_all_reduce():
    reference, models = replicas(TinyLM, 4)
    for tokens in batches(2, 4 * ROWS_PER_RANK):
        lm_loss(reference, tokens).backward()
    expected = dict(reference.named_parameters())

    def work(comm):
        replicate, inside = comm.split([[0, 2], [1, 3]]), comm.split([[0, 1], [2, 3]])
        ledger = RecordingComm(replicate)
        model = shard(models[comm.rank], (ledger, inside))
        lm_loss(model, rows_of(comm, 1)[0]).backward()  # in the first pass ranks compare what they do
        model.zero_grad()
        counts = []
        for across, tokens in zip((False, True), rows_of(comm, 2), strict=True):
            model.set_requires_all_reduce(across)
            before = ledger.names.count("all_reduce")
            lm_loss(model, tokens).backward()
            counts.append(ledger.names.count("all_reduce") - before)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        return counts, norm, {p.shard_meta.name: (p.shard_meta.row_range, p.grad) for p in model.parameters()}

    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    for counts, found, grads in run_ranks(4, work):
        assert counts == [1, 6]  # one for each unit, and one for the flags of parameters
        torch.testing.assert_close(found, norm)
        for name, ((first, last), grad) in grads.items():
            if expected[name].grad is not None:
                torch.testing.assert_close(
                    grad.as_subclass(torch.Tensor), expected[name].grad[first:last], atol=1e-5, rtol=0
                )


def gathers(model, ledger, tokens):
    """All-gathers of one forward, and of its backward."""
    ledger.entries.clear()
    loss = lm_loss(model, tokens)
    forward = ledger.names.count("all_gather")
    loss.backward()
    return forward, ledger.names.count("all_gather") - forward


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, (5, 4)), (True, (5, 5)), (False, (5, 0)), (1, (5, 0)), (SIZE, (5, 5))],
)
def test_reshard_after_forward_says_what_backward_gathers(given, expected):
    def work(comm, model):
        ledger = RecordingComm(comm)
        model = shard(model, ledger, reshard_after_forward=given)
        counts = [gathers(model, ledger, tokens) for tokens in rows_of(comm, 2)]
        model.set_reshard_after_forward(False)
        kept = gathers(model, ledger, rows_of(comm, 1)[0])
        model.set_reshard_after_forward(True)
        return counts, kept, gathers(model, ledger, rows_of(comm, 1)[0])

    for counts, kept, freed in with_models(SIZE, work):
        assert counts == [expected, expected]
        assert kept == (5, 0)
        assert freed == (5, 5)


def test_reshard_after_forward_refuses_smaller_groups_and_other_values():
    def work(comm, model):
        with pytest.raises(ConfigError, match="4 ranks is not supported"):
            fully_shard(model, mesh=comm, reshard_after_forward=2)
        model = fully_shard(model, mesh=comm)
        with pytest.raises(ConfigError, match="True or False"):
            model.set_reshard_after_forward(2)

    with_models(4, work)


def test_without_reshard_after_backward_the_next_forward_gathers_nothing_until_a_step():
    reference, models = replicas(TinyLM, SIZE)
    data = batches(3, SIZE * ROWS_PER_RANK)
    optimizer = optimizer_for(reference)
    for tokens in data[:2]:
        lm_loss(reference, tokens).backward()
    optimizer.step()
    expected = lm_loss(reference, data[2]).item()

    def work(comm):
        ledger = RecordingComm(comm)
        model = shard(models[comm.rank], ledger)
        model.set_reshard_after_backward(False)
        optimizer = optimizer_for(model)
        counts = [gathers(model, ledger, tokens) for tokens in rows_of(comm, 2)]
        optimizer.step()
        ledger.entries.clear()
        loss = lm_loss(model, rows_of(comm, 3)[2])
        return counts, ledger.names.count("all_gather"), loss.item()

    losses = []
    for counts, after_step, loss in run_ranks(SIZE, work):
        assert counts == [(5, 4), (0, 4)] or counts == [(5, 4), (0, 0)]
        assert after_step == 5
        losses.append(loss)
    assert sum(losses) / SIZE == pytest.approx(expected, abs=1e-5)


def test_unshard_and_reshard_show_full_parameters_and_rows():
    def work(comm, model):
        ledger = RecordingComm(comm)
        model = shard(model, ledger)
        block = model.blocks[0]
        handle = block.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        handle.wait()
        handle.wait()
        shown = block.up.weight.shape
        block.reshard()
        assert model.unshard() is None
        before = ledger.names.count("all_gather")
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        gathered = ledger.names.count("all_gather") - before
        return tuple(shown), len(block.up.weight), gathered

    for shown, rows, gathered in with_models(SIZE, work):
        assert shown == (40, 24)
        assert 0 < rows < 40
        assert gathered == 8  # the root was there already


def test_unshard_after_a_step_gathers_what_the_step_left():
    def work(comm, model):
        model = shard(model, comm)
        block = model.blocks[0]
        block.unshard()
        block.reshard()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        block.unshard()
        before = block.up.weight.detach().clone()
        block.reshard()
        return before.unique().tolist()

    assert with_models(SIZE, work) == [[1.0], [1.0]]


def test_reshard_inside_the_modules_own_forward_is_refused():
    class Reshards(nn.Linear):
        def forward(self, x):
            self.reshard()
            return super().forward(x)

    def work(comm):
        model = fully_shard(Reshards(4, 4), mesh=comm)
        with pytest.raises(ShardingError, match="own forward"):
            model(torch.ones(1, 4))

    run_ranks(1, work)


def test_prefetch_lists_say_what_is_gathered_when():
    def work(comm, model):
        model = shard(model, comm)
        first, second, third, last = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        last.set_modules_to_backward_prefetch([third, second])
        runtime = model._fullshard_runtime
        with pytest.raises(ConfigError, match="fully_shard was called on"):
            first.set_modules_to_forward_prefetch([model.embed])
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        return runtime.schedule.forward_lists, runtime.schedule.backward_lists

    assert with_models(SIZE, work)[0] == ({1: [2, 3]}, {4: [3, 2]})


def test_prefetch_lists_said_before_the_roots_call_hold_after_it():
    def work(comm):
        model = TinyLM()
        for block in model.blocks:
            fully_shard(block, mesh=comm)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        model.blocks[1].set_requires_gradient_sync(False)
        model = fully_shard(model, mesh=comm)
        runtime = model._fullshard_runtime
        return runtime.schedule.forward_lists, [unit.options.reduce_gradients for unit in runtime.units]

    assert run_ranks(1, work)[0] == ({1: [3]}, [True, True, False, True, True])


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_divide_factors_and_hooks_act_on_the_modules_own_unit():
    def work(comm, model):
        torch.manual_seed(0)
        model = shard(model, comm)
        tokens = rows_of(comm, 1)[0]
        lm_loss(model, tokens).backward()
        plain = gradients(model)
        model.zero_grad()
        model.blocks[0].set_gradient_divide_factor(4.0)
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            model.blocks[1].set_reduce_scatter_divide_factor(1.0)
        model.blocks[2].set_all_reduce_hook(lambda gradient: gradient.mul_(3))
        lm_loss(model, tokens).backward()
        factors = [SIZE / 4, SIZE / 1, 3.0, 1.0]
        for name, gradient in gradients(model).items():
            number = name.removeprefix("blocks.").partition(".")[0]
            factor = factors[int(number)] if number.isdigit() else 1.0
            torch.testing.assert_close(
                gradient.as_subclass(torch.Tensor), plain[name].as_subclass(torch.Tensor) * factor
            )

    with_models(SIZE, work)


def test_what_cannot_be_followed_is_refused_by_name():
    def work(comm):
        model = shard(TinyLM(), comm)
        with pytest.raises(ConfigError, match="set_custom_all_gather"):
            model.set_custom_all_gather(object())
        with pytest.raises(ConfigError, match="set_custom_reduce_scatter"):
            model.set_custom_reduce_scatter(object())
        with pytest.raises(ConfigError, match="stream"):
            model.set_all_reduce_hook(print, stream=object())
        with pytest.raises(ConfigError, match="above zero"):
            model.set_gradient_divide_factor(0)
        with pytest.raises(ConfigError, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(0)
        with pytest.raises(ShardingError, match="on the root"):
            model.blocks[0].reset_iter_state()
        with pytest.raises(ConfigError, match="fully_shard was called on"):
            share_comm_ctx([nn.Linear(1, 1)])

    run_ranks(1, work)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(1)}, ConfigError, "Shard\\(0\\)"),
        (lambda m: {"dp_mesh_dims": torch_fsdp.DataParallelMeshDims(shard="dp")}, ConfigError, "dp_mesh_dims"),
        (lambda m: {"mp_policy": torch_fsdp.MixedPrecision()}, ConfigError, "mp_policy"),
        (lambda m: {"offload_policy": torch_fsdp.CPUOffload(True)}, ConfigError, "offload_policy"),
        (lambda m: {"reshard_after_forward": "yes"}, ConfigError, "reshard_after_forward"),
        (lambda m: {"module": m.blocks}, WrapError, "no forward"),
        (lambda m: {"module": []}, ConfigError, "empty"),
        (lambda m: {"module": "model"}, ConfigError, "takes a module"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_and_nothing_has_changed(change, error, words):
    def work(comm):
        model = TinyLM()
        with pytest.raises(error, match=words):
            fully_shard(**({"module": model, "mesh": comm} | change(model)))
        assert type(model) is TinyLM
        fully_shard(model, mesh=comm, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(0))
        with pytest.raises(ShardingError, match="sharded already"):
            fully_shard(model, mesh=comm)

    run_ranks(1, work)


@pytest.mark.parametrize("theirs", [False, True])
def test_policies_of_ours_and_of_torch(theirs):
    source = torch_fsdp if theirs else None
    precision = (source.MixedPrecisionPolicy if source else MixedPrecisionPolicy)(
        param_dtype=torch.bfloat16, output_dtype=torch.float32
    )
    offload = (source.CPUOffloadPolicy if source else CPUOffloadPolicy)(pin_memory=False)

    def work(comm):
        model = fully_shard(TinyLM(), mesh=comm, mp_policy=precision, offload_policy=offload)
        unit = model._fullshard_runtime.root
        assert model(rows_of(comm, 1)[0]).dtype == torch.float32
        assert unit.policy.precision.param == unit.policy.precision.reduce == "bfloat16"
        assert unit.policy.offload.pin_memory is False
        none = (source.OffloadPolicy if source else OffloadPolicy)()
        return fully_shard(nn.Linear(2, 2), mesh=comm, offload_policy=none)._fullshard_runtime.root.policy.offload

    assert run_ranks(1, work) == [None]


def test_ignored_parameters_of_a_block_stay_so_in_the_roots_call():
    def work(comm, model):
        kept = model.blocks[0].side.weight
        fully_shard(model.blocks[0], mesh=comm, ignored_params={kept})
        model = fully_shard(model, mesh=comm)
        return hasattr(kept, "shard_meta"), tuple(model.blocks[0].side.weight.shape)

    assert with_models(SIZE, work) == [(False, (24, 24))] * SIZE


def test_modules_without_parameters_are_fsdp_modules_without_a_unit():
    def work(comm):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fully_shard(model[1], mesh=comm)
        fully_shard(model, mesh=comm)
        model[1].unshard()
        model[1].reshard()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 4)).sum().backward()
        return isinstance(model[1], FSDPModule), len(units(model).rows)

    assert run_ranks(1, work) == [(True, 1)]


def test_a_registered_method_of_a_block_computes_with_full_parameters():
    class Scores(nn.Linear):
        def score(self, x):
            return x @ self.weight.t()

    def work(comm):
        model = nn.Sequential(Scores(4, 4), nn.Linear(4, 4))
        expected = model[0].score(torch.ones(1, 4)).detach()
        fully_shard(model[0], mesh=comm)
        fully_shard(model, mesh=comm)
        register_fsdp_forward_method(model[0], "score")
        register_fsdp_forward_method(nn.Linear(1, 1), "anything")
        with pytest.raises(ShardingError, match="no method rank"):
            register_fsdp_forward_method(model[0], "rank")
        torch.testing.assert_close(model[0].score(torch.ones(1, 4)), expected)

    torch.manual_seed(0)
    run_ranks(1, work)


def test_state_dicts_of_root_and_blocks_are_this_ranks_part_and_come_back():
    def work(comm, model):
        model = shard(model, comm)
        whole, part = model.state_dict(), model.blocks[0].state_dict()
        assert set(part) == {name.removeprefix("blocks.0.") for name in whole if name.startswith("blocks.0.")}
        assert whole["embed.weight"].shape == (50, 24)  # the whole tensor's, as a DTensor has it
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(whole)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        model.blocks[0].load_state_dict(part)
        with unsharded(model):
            assert model.state_dict()["embed.weight"].shape == (50, 24)

    with_models(SIZE, work)


def test_a_part_is_not_saved_for_the_whole():
    def work(comm, model):
        model = shard(model, comm)
        with pytest.raises(ShardingError, match="one rank's part"):
            torch.save(model.state_dict(), io.BytesIO())
        set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), io.BytesIO())
        return {name: tuple(value.shape) for name, value in get_model_state_dict(model).items()}

    expected = {name: tuple(value.shape) for name, value in TinyLM().state_dict().items()}
    assert with_models(SIZE, work) == [expected] * SIZE


@pytest.mark.parametrize("size", [1, 3])
def test_full_tensor_gives_whole_parameters_gradients_and_states_whoever_holds_them(size):
    reference, models = replicas(TinyLM, size)
    data = batches(2, size * ROWS_PER_RANK)
    optimizer = optimizer_for(reference)
    lm_loss(reference, data[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    lm_loss(reference, data[1]).backward()
    expected = dict(reference.state_dict())
    expected |= {f"gradient of {n}": p.grad for n, p in reference.named_parameters() if p.grad is not None}
    params = dict(reference.named_parameters())
    expected |= {f"moment of {n}": optimizer.state[p]["exp_avg"] for n, p in params.items() if p in optimizer.state}

    def work(comm):
        model = shard(models[comm.rank], comm)
        mine = optimizer_for(model)
        lm_loss(model, rows_of(comm, 2)[0]).backward()
        mine.step()
        mine.zero_grad()
        lm_loss(model, rows_of(comm, 2)[1]).backward()
        found = {name: p.full_tensor() for name, p in model.named_parameters(remove_duplicate=False)}
        found |= {f"gradient of {n}": p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        names = [name for name, _ in model.named_parameters()]
        for number, values in mine.state_dict()["state"].items():
            found[f"moment of {names[number]}"] = values["exp_avg"].full_tensor()
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), found[name])
            assert torch.equal(value.to(torch.float64).cpu().full_tensor(), found[name].double())
        doubled = next(p.grad for p in model.parameters() if p.grad is not None).double()
        assert doubled.full_tensor().dtype == torch.float64
        return found

    for found in run_ranks(size, work):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_full_tensor_of_another_parameter_on_each_rank_is_told():
    def work(comm, model):
        model = shard(model, comm)
        (model.head if comm.rank else model.unused).weight.full_tensor()

    with pytest.raises(MismatchError, match=r"full_tensor\(\) of shape"):
        with_models(SIZE, work)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_torchs_getters_give_whole_states_that_may_be_saved(cpu_offload):
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)

    def states(model, optimizer, tokens):
        lm_loss(model, tokens).backward()
        optimizer.step()
        state, optim = get_state_dict(model, optimizer, options=options)
        return state, optim["state"], [group["params"] for group in optim["param_groups"]]

    reference, models = replicas(TinyLM, SIZE)
    expected = states(reference, optimizer_for(reference), batches(1, SIZE * ROWS_PER_RANK)[0])

    def work(comm):
        model = shard(models[comm.rank], comm)
        found = states(model, optimizer_for(model), rows_of(comm, 1)[0])
        torch.save(found, io.BytesIO())
        # Whoever else asks still gets parts.
        assert model.state_dict()["embed.weight"].flat.numel() < found[0]["embed.weight"].numel()
        parts = get_model_state_dict(model, options=StateDictOptions(cpu_offload=cpu_offload))
        assert all(torch.equal(value.full_tensor(), found[0][name]) for name, value in parts.items())
        return found

    for found in run_ranks(SIZE, work):
        torch.testing.assert_close(found[:2], expected[:2], atol=1e-6, rtol=1e-5)
        assert found[2] == expected[2]


def test_optimizer_states_know_their_place_after_a_step():
    def work(comm, model):
        model = shard(model, comm)
        optimizer = optimizer_for(model)
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        optimizer.step()
        state = optimizer.state_dict()
        state["state"] = {number: dict(values) for number, values in state["state"].items()}
        params = list(model.parameters())
        shapes = {params[number].shard_meta.name: values["exp_avg"].shape for number, values in state["state"].items()}
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in params if p in optimizer.state)
        kept = {p: values["exp_avg"] for p, values in optimizer.state.items()}
        for values in optimizer.state.values():
            values["exp_avg"] = torch.zeros_like(values["exp_avg"])
        optimizer.load_state_dict(state)
        assert all(torch.equal(optimizer.state[p]["exp_avg"], value) for p, value in kept.items())
        return shapes

    for shapes in with_models(SIZE, work):
        assert shapes["blocks.0.up.weight"] == (40, 24)


def test_to_empty_keeps_what_fully_shard_gave_to_a_meta_model():
    def work(comm):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        model.to_empty(device="cpu")
        with pytest.raises(ShardingError, match="shards are on cpu"):
            model.to_empty(device="cuda")
        model.double()
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        with unsharded(model):
            full = [p.detach().clone() for p in model.parameters()]
        return [(p.dtype, p.abs().sum().item() > 0, p.isfinite().all().item()) for p in full]

    assert run_ranks(SIZE, work) == [[(torch.float64, True, True)] * 4] * SIZE


@pytest.mark.parametrize(
    "options",
    [{"mp_policy": torch_fsdp.MixedPrecisionPolicy()}, {"offload_policy": torch_fsdp.CPUOffloadPolicy()}],
)
def test_the_native_door_names_the_compat_one_for_torchs_policies(options):
    def work(comm):
        with pytest.raises(ConfigError, match=r"fullshard\.compat\.torch_fsdp"):
            native_fully_shard(TinyLM(), comm, wrap=None, **options)

    run_ranks(1, work)


def test_every_public_name_of_torchs_module_class_is_ours():
    def public(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(torch_fsdp.FSDPModule) <= public(FSDPModule)


def scale(model):
    for param in model.parameters():
        param.data.mul_(0.5)


CHANGES = {
    "fused_step": lambda model: torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step(),
    "data": scale,
}


@pytest.mark.parametrize("keep", ["after_backward", "unshard"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_stays_gathered_is_gathered_anew_after_changes_that_no_version_counts(change, keep):
    reference, models = replicas(TinyLM, SIZE)
    data = batches(1, SIZE * ROWS_PER_RANK)[0]
    lm_loss(reference, data).backward()
    CHANGES[change](reference)
    expected = lm_loss(reference, data[:2]).item()

    def work(comm):
        model = shard(models[comm.rank], comm)
        model.set_reshard_after_backward(keep != "after_backward")
        lm_loss(model, rows_of(comm, 1)[0]).backward()
        if keep == "unshard":
            for module in (model, *model.blocks):
                module.unshard(async_op=True)
        CHANGES[change](model)
        return lm_loss(model, data[:2]).item()

    assert run_ranks(SIZE, work) == pytest.approx([expected] * SIZE, abs=1e-5)
