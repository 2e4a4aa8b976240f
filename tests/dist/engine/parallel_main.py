"""Models that tensor parallelism has divided, sharded further: on four gloo ranks, as 2 x 2, 1 x 4 and 4 x 1."""

import inspect
import json
import os
import re
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers.distributed.tensor_parallel
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard import load_dcp, save_dcp
from fullshard.compat.torch_fsdp import fsdp2, tensor as ours_tensors
from fullshard.core.engine import load_weights
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.shards import run_of
from fullshard.errors import CheckpointError, ConfigError, MismatchError, ProcessGroupError, ShardingError, WrapError
from fullshard.optim import Adafactor
from fullshard.state.saving.export import ExportOptions, export
from fullshard.state.storage.contents import verify
from fullshard.variables import SCRATCH_VARIABLE
from support.models import batches, causal_loss, llama, lm_loss, seq2seq_loss, t5_untied
from support.rank_script import parse, print_result, run_checks

STEPS, ROWS, DEVICE = 3, 4, "cpu"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


parallelize = partial(parallelize_module, src_data_rank=None)  # ranks have made the same values


@cache
def mesh_of(data, tensor):
    return init_device_mesh(DEVICE, (data, tensor), mesh_dim_names=("dp", "tp"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Sequence(nn.Module):
    """Its norms compute parts of the sequence: their gradients are sums over the ranks that divide it."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(52, 16), nn.LayerNorm(16), nn.Linear(16, 52)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequence():
    torch.manual_seed(0)
    return Sequence()


def divide_sequence(model, tp):
    rows = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=rows),
        "blocks.*.down": RowwiseParallel(output_layouts=rows),
    }
    return parallelize(model, tp, plan)


def make_llama(**changes):
    torch.manual_seed(0)
    return llama(num_attention_heads=4, num_key_value_heads=4, **changes)


def divide_llama(model, tp):
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"self_attn.{name}_proj": columns for name in "qkv"} | {"self_attn.o_proj": rows}
    plan |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    return parallelize(model, tp, {f"model.layers.*.{name}": how for name, how in plan.items()})


def divide_by_plan(model, tp):
    """As transformers itself divides the model, by the plan of its class."""
    apply = transformers.distributed.tensor_parallel.apply_tensor_parallelism
    plan = {}
    names = dict(model.named_parameters())  # a tied one once
    for name, module in model.named_modules():
        if style := model.tp_plan.get(re.sub(r"\.\d+", ".*", name)):
            own = (f"{name}.{key}" for key, _ in module.named_parameters(recurse=False))
            plan |= dict.fromkeys((one for one in own if one in names), style) | {name: style}
    apply(model, tp, plan) if "tp_plan" in inspect.signature(apply).parameters else apply(model, tp)
    model.tie_weights()
    return model


def make_t5():
    torch.manual_seed(0)
    return t5_untied()


def divide_t5(model, tp):
    """Each rank has some heads, with their columns of the position bias."""
    for module in model.modules():
        if hasattr(module, "has_relative_attention_bias"):
            module.n_heads, module.inner_dim = module.n_heads // tp.size(), module.inner_dim // tp.size()
            how = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
            parallelize(module, tp, how)
            if module.has_relative_attention_bias:
                parallelize(module, tp, {"relative_attention_bias": ColwiseParallel()})
        if hasattr(module, "wi_0"):
            parallelize(module, tp, {"wi_0": ColwiseParallel(), "wi_1": ColwiseParallel(), "wo": RowwiseParallel()})
    return model


MODELS = {
    "sequence": (sequence, divide_sequence, lm_loss, lambda m: m.blocks),
    "llama": (make_llama, divide_llama, causal_loss, lambda m: m.model.layers),
    "planned": (make_llama, divide_by_plan, causal_loss, lambda m: m.model.layers),
    "t5": (make_t5, divide_t5, seq2seq_loss, lambda m: [*m.encoder.block, *m.decoder.block]),
}


def shard(api, model, blocks, dp, **options):
    for block in blocks(model):
        api(block, mesh=dp, **options)
    return api(model, mesh=dp, **options)


def core(module, **options):
    return fullshard.fully_shard(module, wrap=None, **options)


def train(model, loss_of, mesh=None, clip=None, optimizer=None):
    """The losses and gradient norms of some steps; without a mesh, on the rows of all ranks."""
    clip = clip or torch.nn.utils.clip_grad_norm_
    optimizer, seen = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for tokens in (tokens.to(DEVICE) for tokens in batches(STEPS, ROWS)):
        mine = tokens if mesh is None else tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = loss_of(model, mine)
        loss.backward()
        norm = clip(model if clip is fullshard.clip_grad_norm_ else model.parameters(), 0.1)
        mean = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        seen += [mean, norm.full_tensor() if isinstance(norm, DTensor) else norm]
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([one.detach().float() for one in seen])


def clip_torchs(params, most):
    """torch's own clipping refuses models of which some parameters are not divided, because their meshes differ."""
    params = list(params)
    norm = torch.stack([param.grad.full_tensor().norm() for param in params]).norm()
    for param in params:
        param.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def full(model):
    return {
        name: param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
        for name, param in model.named_parameters()
    }


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def divided(kind, data=2, tensor=2):
    make, divide, _, _ = MODELS[kind]
    model = make()
    return divide(
        model if any(p.is_meta for p in model.parameters()) else model.to(DEVICE), mesh_of(data, tensor)["tp"]
    )


def sharded(kind, data=2, tensor=2, api=core, **options):
    return shard(api, divided(kind, data, tensor), MODELS[kind][3], mesh_of(data, tensor)["dp"], **options)


def trained(kind, data=2, tensor=2, **options):
    model, mesh = sharded(kind, data, tensor, **options), mesh_of(data, tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, MODELS[kind][2], mesh, optimizer=optimizer)
    return model, optimizer


def equals_unsharded_and_torchs(kind, data=2, tensor=2):
    """Losses, norms and weights are those of the unsharded model, and of torch's FSDP2 on the same mesh."""
    make, _, loss_of, _ = MODELS[kind]
    mesh, alone = mesh_of(data, tensor), make().to(DEVICE)
    expected = train(alone, loss_of)
    model = sharded(kind, data, tensor)
    found = train(model, loss_of, mesh, fullshard.clip_grad_norm_)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_close(full(model), full(alone))
    if data > 1:
        other = sharded(kind, data, tensor, torchs)
        torch.testing.assert_close(train(other, loss_of, mesh, clip_torchs), found, **TOLERANCE)
        assert_close(full(other), full(model))


def llama_as_2_x_2(_):
    equals_unsharded_and_torchs("llama")


def llama_by_transformers_plan_as_2_x_2(_):
    equals_unsharded_and_torchs("planned")


def make_tied():
    return make_llama(tie_word_embeddings=True)


def divide_tables(model, tp, *names):
    how = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize(divide_llama(model, tp), tp, {name: how[name] for name in names or how})


def tied_tables_are_one_or_refused(_):
    """torch divides a tied table into two parameters: refused, until they are tied again."""
    mesh = mesh_of(2, 2)
    for names in ((), ("model.embed_tokens",), ("lm_head",)):
        with expect(WrapError, "lm_head.weight and model.embed_tokens.weight are one parameter"):
            fullshard.fully_shard(divide_tables(make_tied(), mesh["tp"], *names), mesh["dp"])
        with expect(WrapError, "LlamaForCausalLM.tie_weights()"):
            shard(
                fsdp2.fully_shard, divide_tables(make_tied(), mesh["tp"], *names), lambda m: m.model.layers, mesh["dp"]
            )
    reference = make_tied()
    expected = train(reference, causal_loss)
    again, planned = divide_tables(make_tied(), mesh["tp"]), divide_by_plan(make_tied(), mesh["tp"])
    again.tie_weights()
    for model in (again, planned, divide_llama(make_tied(), mesh["tp"])):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        fullshard.fully_shard(model, mesh["dp"])
        torch.testing.assert_close(train(model, causal_loss, mesh), expected, **TOLERANCE)
        assert_close(full(model), full(reference))
    apart = divide_tables(make_tied(), mesh["tp"])
    with torch.no_grad():
        apart.lm_head.weight.to_local()[0, 0] += 1  # of a file with two tables
    fullshard.fully_shard(apart, mesh["dp"])


def llama_of_from_pretrained_as_1_x_4(directory):
    """transformers divides what it loads over all ranks: the other axis has one rank."""
    mesh, path = mesh_of(1, 4), Path(directory) / "pretrained"
    if dist.get_rank() == 0:
        make_llama(vocab_size=52).save_pretrained(path)
    dist.barrier()
    model = transformers.LlamaForCausalLM.from_pretrained(path, tp_plan="auto", dtype="float32")
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    fullshard.fully_shard(model, mesh["dp"])
    alone = make_llama(vocab_size=52)
    torch.testing.assert_close(
        train(model, causal_loss, mesh, fullshard.clip_grad_norm_), train(alone, causal_loss), **TOLERANCE
    )
    assert_close(full(model), full(alone))


def t5_as_2_x_2(_):
    equals_unsharded_and_torchs("t5")


def sequence_as_2_x_2(_):
    equals_unsharded_and_torchs("sequence")


def sequence_as_1_x_4(_):
    equals_unsharded_and_torchs("sequence", 1, 4)


def sequence_as_4_x_1(_):
    equals_unsharded_and_torchs("sequence", 4, 1)


def norms_count_each_element_once(_):
    """torch's clipping, and sums, norms and sizes of single shards, are those of the full tensors."""
    alone, model = sequence(), sharded("sequence")
    torch.testing.assert_close(train(model, lm_loss, mesh_of(2, 2)), train(alone, lm_loss), **TOLERANCE)
    for (name, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert other.numel() == one.numel(), name
        assert other.shard_meta.global_shape == other.global_shape == one.shape, name
        for function in (torch.norm, torch.sum, torch.mean, torch.amax, torch.std):
            torch.testing.assert_close(function(other.detach()), function(one.detach()), **TOLERANCE)
    assert fullshard.units(model).blocks == 2
    assert sum(row.parameters for row in fullshard.units(model).rows) == sum(p.numel() for p in alone.parameters())


def initialisers_draw_the_full_tensors(_):
    """Each rank keeps its part of one draw, of the full shape."""
    alone, model = sequence(), sharded("sequence")
    for each in (alone, model):
        torch.manual_seed(3)
        for param in each.parameters():
            if param.dim() > 1:
                nn.init.kaiming_uniform_(param)
            else:
                nn.init.normal_(param)
    assert_close(full(model), full(alone))


def other_ways_of_training_agree(_):
    """Accumulation, recomputed blocks, narrow precision and offload: as without tensor parallelism."""

    def steps(model, mesh):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for block in model.blocks:
            block.forward = lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False)
        for tokens in batches(2, 8):
            own = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
            with fullshard.no_sync(model):
                lm_loss(model, own[:1]).backward()
            losses.append(lm_loss(model, own[1:]))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(loss.detach()) for loss in losses], full(model)

    for options in (
        {},
        {"strategy": fullshard.ShardingStrategy.NO_SHARD},
        {"mp_policy": fullshard.MixedPrecision(param="bfloat16", reduce="float32")},
    ):
        plain = core(sequence(), mesh=mesh_of(2, 2)["dp"], **options)
        expected, found = steps(plain, mesh_of(2, 2)), steps(sharded("sequence", **options), mesh_of(2, 2))
        loose = {"rtol": 3e-2, "atol": 3e-2} if "mp_policy" in options else TOLERANCE
        torch.testing.assert_close(found, expected, **loose)


def full_parameters_are_dtensors_inside_unsharded(_):
    """They can be changed in place, and a use of one that was kept after that is refused."""
    model = sharded("sequence")
    before = full(model)
    with fullshard.unsharded(model):
        kept = model.blocks[0].up.weight
        assert isinstance(kept, DTensor)
        assert (kept.shape, kept.placements) == ((32, 16), (Shard(0),))
        torch.testing.assert_close(kept.full_tensor(), before["blocks.0.up.weight"])
        lm_loss(model, batches(1, 2)[0])
        with torch.no_grad():
            kept.mul_(2)
        with expect(ShardingError, "changes nothing"):
            kept.data = kept.detach() * 0
    with expect(ShardingError, "after its unit released it"):
        kept + 1
    after = full(model)
    torch.testing.assert_close(after.pop("blocks.0.up.weight"), before.pop("blocks.0.up.weight") * 2)
    assert_close(after, before)


def full_state_dicts_have_full_tensors(directory):
    """``full_state_dict``, ``full_tensors`` and ``save`` write them once; ``load_state_dict`` takes them."""
    for kind in ("sequence", "t5"):
        model, _ = trained(kind)
        expected, found = full(model), fullshard.full_state_dict(model)
        assert bool(found) == (dist.get_rank() == 0)
        streamed = {
            name: one.clone()
            for _, unit in fullshard.full_tensors(model)
            for name, one in unit.items()
            if one is not None
        }
        limited = {}
        for runs in fullshard.core.engine.full_runs(model, 2000):
            for name, start, flat in runs:
                limited.setdefault(name, torch.full(expected[name].shape, torch.nan)).view(-1)[
                    start : start + flat.numel()
                ] = flat
        path = Path(directory) / f"model-{kind}"
        fullshard.save(model, path)
        if dist.get_rank() == 0:
            assert_close({name: found[name] for name in expected}, expected)
            assert_close({name: streamed[name] for name in expected}, expected)
            assert_close({name: limited[name] for name in expected}, expected)
            assert_close(load_file(path / "model.safetensors"), expected)
        other = sharded(kind)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(expected)
        assert_close(full(other), expected)


def distributed_checkpoints_fit_other_meshes(directory):
    """DCP's boxes are those of the full parameters: written at 2 x 2, read at 1 x 4, without division, and back."""
    loss_of = MODELS["sequence"][2]
    model, optimizer = trained("sequence")
    path = Path(directory) / "dcp"
    save_dcp(model, optimizer, path)
    expected = full(model)
    others = [
        (sharded("sequence", 1, 4), mesh_of(1, 4)),
        (core(sequence(), mesh=mesh_of(4, 1)["dp"]), mesh_of(4, 1)),
        (sharded("sequence"), mesh_of(2, 2)),
    ]
    for number, (other, mesh) in enumerate(others):
        steps = torch.optim.AdamW(other.parameters(), lr=1e-3)
        load_dcp(other, steps, path)
        assert_close(full(other), expected)
        if number == 1:  # and back
            save_dcp(other, steps, path.with_name("back"))
            again, of_again = trained("sequence")
            load_dcp(again, of_again, path.with_name("back"))
            assert_close(full(again), expected)
        train(other, loss_of, mesh, optimizer=steps)
        others[number] = full(other)
    train(model, loss_of, mesh_of(2, 2), optimizer=optimizer)
    for found in others:
        assert_close(found, full(model))
    plain = sequence()
    train(plain, loss_of, optimizer=(of_plain := torch.optim.AdamW(plain.parameters(), lr=1e-3)))
    before = full(model)
    fullshard.load_optimizer_state(model, optimizer, of_plain.state_dict())
    for (name, param), one in zip(model.named_parameters(), plain.parameters(), strict=True):
        mine, meta = optimizer.state[param].get("exp_avg_sq"), param.shard_meta
        if mine is not None:  # this rank has rows of it
            rows = run_of(of_plain.state[one]["exp_avg_sq"], meta.block, *meta.element_range)
            torch.testing.assert_close(mine.reshape(-1), rows, msg=name)
    assert_close(full(model), before)
    dcp.load({"model": (state := plain.state_dict())}, checkpoint_id=path)
    assert_close(state, expected)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def held_by(model, optimizer):
    """What this rank holds, by name."""
    named = {name: param.detach() for name, param in model.named_parameters()}
    states = {
        f"{name}/{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    return {name: torch.as_tensor(one.as_subclass(torch.Tensor)).clone() for name, one in {**named, **states}.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


def loaded(model, path, step=STEPS):
    optimizer = adamw(model)
    restored = fullshard.load_checkpoint(model, optimizer, path / f"step-{step:08d}")
    return held_by(model, optimizer), optimizer, restored


def saved(model, optimizer, path, **options):
    with fullshard.Checkpoints(path) as checkpoints:
        checkpoints.save(model, optimizer, step=STEPS, **options)


def checkpoints_have_full_parameters(directory):
    """What ranks write together, one rank reads alone."""
    path, (model, optimizer) = Path(directory) / "own", trained("sequence")
    average = ExponentialMovingAverage(model, 0.5)
    lm_loss(model, batches(1, 4)[0]).backward()
    optimizer.step()
    average.update()
    saved(model, optimizer, path, average=average, gradients=True)
    expected, gradients = full(model), {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    alone = core(sequence(), mesh=mesh_of(4, 1)["tp"])
    of_alone = ExponentialMovingAverage(alone, 0.5)
    fullshard.load_checkpoint(alone, None, path / f"step-{STEPS:08d}", average=of_alone)
    assert_same(full(alone), expected)
    assert_same({name: param.grad.full_tensor() for name, param in alone.named_parameters()}, gradients)
    with average.applied(), of_alone.applied():
        assert_same(full(alone), full(model))


def checkpoints_fit_other_meshes(directory, kind="sequence"):
    """Written at 2 x 2, read at 1 x 4, by 4 ranks, 2 and 1 without division, and back: bit for bit, and trained on."""
    make, _, loss_of, _ = MODELS[kind]
    path, (model, optimizer) = Path(directory) / f"own-{kind}", trained(kind)
    torch.manual_seed(dist.get_rank())
    saved(model, optimizer, path, background=True)
    drawn, expected, held = torch.rand(4), full(model), held_by(model, optimizer)
    alone, pair = (lambda: core(make(), mesh=mesh_of(4, 1)["tp"])), (lambda: core(make(), mesh=mesh_of(2, 2)["dp"]))
    everything, _, _ = loaded(alone(), path)
    assert_same({name: everything[name] for name in expected}, expected)
    assert_same(full((two := pair(), loaded(two, path))[0]), expected)
    train(model, loss_of, mesh_of(2, 2), optimizer=optimizer)
    for data, tensor in ((2, 2), (1, 4), (4, 1)):
        other = sharded(kind, data, tensor) if tensor > 1 else core(make(), mesh=mesh_of(4, 1)["dp"])
        found, steps, restored = loaded(other, path)
        assert restored.rng_restored == (tensor == 2)
        if tensor == 2:
            assert_same(found, held)
            assert torch.equal(torch.rand(4), drawn)
        assert_same(full(other), expected)
        saved(other, steps, back := path.with_name(f"own-{kind}-{tensor}"))
        assert_same(loaded(alone(), back)[0], everything)
        assert_same(loaded(sharded(kind), back)[0], held)
        train(other, loss_of, mesh_of(data, tensor), optimizer=steps)
        assert_close(full(other), full(model))
    if dist.get_rank() == 0:
        assert verify(path).problems == verify(back).problems == 0
        export(path / f"step-{STEPS:08d}", path / "exported", ExportOptions())
        assert_same(load_file(path / "exported" / "model.safetensors"), expected)
        index = json.loads((path / f"step-{STEPS:08d}" / "index.json").read_text())
        assert (index["version"], index["divided_by"]) == (3, 2)
        assert json.loads((back / f"step-{STEPS:08d}" / "index.json").read_text())["version"] == 2


def checkpoints_of_a_llama_fit_other_meshes(directory):
    checkpoints_fit_other_meshes(directory, "llama")


def snapshots_are_put_back(directory):
    """A rank's own state, bit for bit; refused on another mesh."""
    (model, optimizer), kept = trained("sequence"), Path(directory) / "snapshots"
    held = held_by(model, optimizer)
    os.environ[SCRATCH_VARIABLE] = str(kept / "keep")
    with fullshard.Checkpoints(kept / "run", in_memory=1) as checkpoints:
        assert checkpoints.snapshot(model, optimizer, step=STEPS)
        checkpoints.in_memory.wait()
        path = checkpoints.in_memory.newest()
    del os.environ[SCRATCH_VARIABLE]
    train(model, lm_loss, mesh_of(2, 2), optimizer=optimizer)
    assert fullshard.load_checkpoint(model, optimizer, path).rng_restored
    assert_same(held_by(model, optimizer), held)
    other = sharded("sequence", 1, 4)
    with expect(CheckpointError, "Shard the model as before"):
        fullshard.load_checkpoint(other, adamw(other), path)


def buffers_that_are_dtensors_are_saved(directory):
    """``parallelize_module`` makes such buffers of the modules that it divides."""
    path, models, tp = Path(directory) / "buffers", [], mesh_of(2, 2)["tp"]
    for value in (1.0, 0.0):
        model = divided("sequence")
        model.norm.register_buffer("seen", DTensor.from_local(torch.full((3,), value, device=DEVICE), tp))
        models.append(core(model, mesh=mesh_of(2, 2)["dp"]))
    saved(models[0], None, path)
    fullshard.load_checkpoint(models[1], None, path / f"step-{STEPS:08d}")
    assert models[1].norm.seen.to_local().tolist() == [1.0] * 3
    if state := fullshard.full_state_dict(models[1]):
        assert state["norm.seen"].tolist() == [1.0] * 3
    del models[0].norm.seen
    models[0].norm.register_buffer("seen", DTensor.from_local(torch.zeros(3, device=DEVICE), tp, [Shard(0)]))
    with expect(ShardingError, "norm.seen (6,) is a DTensor placed"):
        fullshard.load_checkpoint(models[0], None, path / f"step-{STEPS:08d}")


def full_optimizer_states_are_those_of_unsharded_optimizers(_):
    """On the first rank; and back from it, on another mesh."""
    model, optimizer = trained("sequence")
    shared = [fullshard.full_optimizer_state(model, optimizer)]
    assert bool(shared[0]) == (dist.get_rank() == 0)
    dist.broadcast_object_list(shared)
    alone = sequence()
    train(alone, lm_loss, optimizer=(of_alone := adamw(alone)))
    expected = of_alone.state_dict()
    for number, values in expected["state"].items():
        assert_close(shared[0]["state"][number], values)
    adamw(sequence()).load_state_dict(shared[0])
    other = sharded("sequence", 1, 4)
    fullshard.load_optimizer_state(other, of_other := adamw(other), shared[0])
    again = fullshard.full_optimizer_state(other, of_other)
    for number, values in (again["state"] if again else {}).items():
        assert_same(values, shared[0]["state"][number])


def weights_are_read_into_models_on_the_meta_device(directory):
    """Each rank its part, also of a model that has values or was sharded before."""
    for kind in ("sequence", "llama"):
        source, path = sharded(kind), Path(directory) / f"weights-{kind}"
        with torch.no_grad():
            for param in source.parameters():
                nn.init.normal_(param)
        fullshard.save(source, path)
        expected, mesh = full(source), mesh_of(2, 2)
        with torch.device("meta"):
            model = divided(kind)
        fullshard.fully_shard(model, mesh["dp"], weights=(read := fullshard.Pretrained(path)))
        assert_same(full(model), expected)
        assert read.bytes_read < sum(param.nbytes for param in expected.values())
        assert_same(
            full(fullshard.fully_shard(divided(kind), mesh["dp"], weights=fullshard.Pretrained(path))), expected
        )
        other = sharded(kind, 1, 4)
        load_weights(other, fullshard.Pretrained(path))
        assert_same(full(other), expected)
        MODELS[kind][2](model, batches(1, 2)[0]).backward()


def meta_models_are_initialised_as_full_ones(_):
    """The draws of ``reset_parameters`` and of a function are those of full shapes, whatever each rank's seed."""

    def function(module):
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            param.normal_(std=param.shape[0])

    for initialize in (None, function):
        first = fullshard.FirstValues(initialize=initialize)
        found = []
        for data, tensor in ((4, 1), (2, 2), (1, 4)):
            with torch.device("meta"):
                model = divided("sequence", data, tensor) if tensor > 1 else sequence()
            torch.manual_seed(7 + dist.get_rank())
            found.append(full(fullshard.fully_shard(model, mesh_of(data, tensor)["dp"], first_values=first)))
        assert float(found[0]["blocks.0.down.weight"].std()) > 0.01
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])


def fsdp2s_face_takes_them(directory):
    """Under FSDP2's names: training, torch's getters and setters, and DCP, to and from torch's own FSDP2."""
    mesh = mesh_of(2, 2)
    model, theirs = sharded("sequence", api=fsdp2.fully_shard), sharded("sequence", api=torchs)
    optimizer, of_theirs = (torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, theirs))
    found, expected = (
        train(one, lm_loss, mesh, optimizer=steps) for one, steps in ((model, optimizer), (theirs, of_theirs))
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)
    whole = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in model.state_dict().items()
    }
    assert_close(whole, full(theirs))
    options = StateDictOptions(full_state_dict=True)
    assert_close(get_model_state_dict(model, options=options), get_model_state_dict(theirs, options=options))
    ours, others = (
        get_optimizer_state_dict(one, steps, options=options)["state"]
        for one, steps in ((model, optimizer), (theirs, of_theirs))
    )
    for name, values in others.items():
        assert_close(ours[name], values)
    paths = [str(Path(directory) / name) for name in ("ours", "theirs")]
    for one, path in zip((model, theirs), paths, strict=True):
        dcp.save({"model": one.state_dict()}, checkpoint_id=path)
    for make, path in ((torchs, paths[0]), (fsdp2.fully_shard, paths[1])):
        other = sharded("sequence", api=make)
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(0)
        state = other.state_dict()
        dcp.load({"model": state}, checkpoint_id=path)
        other.load_state_dict(state)
        assert_close(full(other), full(theirs))
    other = sharded("sequence", api=fsdp2.fully_shard)
    params, wanted = dict(other.named_parameters()), full(theirs)
    parts = {
        name: ours_tensors.distribute_tensor(one, (p := params[name]).device_mesh, p.placements)
        for name, one in wanted.items()
    }
    other.load_state_dict(parts, assign=True)
    assert_close(full(other), wanted)
    other = sharded("sequence", api=fsdp2.fully_shard)
    set_model_state_dict(other, get_model_state_dict(theirs, options=options), options=options)
    assert_close(full(other), full(theirs))


class expect:
    """Like pytest.raises."""

    def __init__(self, kind, text):
        self.kind, self.text = kind, text

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert isinstance(error, self.kind), f"{self.kind} expected, got {error!r}"
        assert self.text in str(error), f"{self.text!r} expected, got {error!r}"
        return True


def what_is_not_there_is_refused_by_name(directory):
    mesh, path = mesh_of(2, 2), Path(directory) / "refused"
    model, _ = trained("sequence")
    with expect(ProcessGroupError, "are in both"):
        fullshard.fully_shard(divided("sequence"))
    with expect(ProcessGroupError, "are in both"):
        fullshard.fully_shard(shard(torchs, sequence(), MODELS["sequence"][3], mesh["dp"]), mesh["dp"])
    with expect(WrapError, "cannot be cut into equal parts"):
        fullshard.fully_shard(parallelize(nn.Linear(4, 3), mesh["tp"], ColwiseParallel()), mesh["dp"])
    with expect(WrapError, "mesh of 2 axes"):
        fullshard.fully_shard(shard(torchs, divided("sequence"), MODELS["sequence"][3], mesh["dp"]), mesh["dp"])
    with expect(MismatchError, "tensor parallelism hold different values of model.embed_tokens.weight"):
        torch.manual_seed(mesh["tp"].get_local_rank())
        fullshard.fully_shard(divide_llama(llama(), mesh["tp"]), mesh["dp"])
    with expect(MismatchError, "different values of embed.weight"):
        below = divided("sequence")
        torch.manual_seed(mesh["tp"].get_local_rank())
        below.embed = core(nn.Embedding(52, 16), mesh=mesh["dp"])
        fullshard.fully_shard(below, mesh["dp"])
    with expect(ShardingError, "blocks.0.up.weight (32, 16) is a DTensor placed"):
        ignores = divided("sequence")
        fullshard.fully_shard(ignores, mesh["dp"], ignored_params=[ignores.blocks[0].up.weight])
        fullshard.Checkpoints(path).save(ignores, None, step=1)
    with expect(ConfigError, "tensor parallelism divides"):
        Adafactor(model.parameters())
    with expect(ConfigError, "Use an elementwise optimizer"):
        train(model, lm_loss, mesh, optimizer=torch.optim.Adafactor(model.parameters()))
    weight = model.blocks[0].up.weight
    with expect(ShardingError, "tensor parallelism divides too"):
        weight.detach() * torch.ones(32, 16)
    with expect(ShardingError, "sort over rows"):
        weight.detach().sort(dim=0)


CASES = {
    "llama_as_2_x_2": llama_as_2_x_2,
    "llama_by_transformers_plan_as_2_x_2": llama_by_transformers_plan_as_2_x_2,
    "tied_tables_are_one_or_refused": tied_tables_are_one_or_refused,
    "llama_of_from_pretrained_as_1_x_4": llama_of_from_pretrained_as_1_x_4,
    "t5_as_2_x_2": t5_as_2_x_2,
    "sequence_as_2_x_2": sequence_as_2_x_2,
    "sequence_as_1_x_4": sequence_as_1_x_4,
    "sequence_as_4_x_1": sequence_as_4_x_1,
    "norms_count_each_element_once": norms_count_each_element_once,
    "initialisers_draw_the_full_tensors": initialisers_draw_the_full_tensors,
    "other_ways_of_training_agree": other_ways_of_training_agree,
    "full_parameters_are_dtensors_inside_unsharded": full_parameters_are_dtensors_inside_unsharded,
    "full_state_dicts_have_full_tensors": full_state_dicts_have_full_tensors,
    "distributed_checkpoints_fit_other_meshes": distributed_checkpoints_fit_other_meshes,
    "checkpoints_have_full_parameters": checkpoints_have_full_parameters,
    "checkpoints_fit_other_meshes": checkpoints_fit_other_meshes,
    "buffers_that_are_dtensors_are_saved": buffers_that_are_dtensors_are_saved,
    "full_optimizer_states_are_those_of_unsharded_optimizers": full_optimizer_states_are_those_of_unsharded_optimizers,
    "weights_are_read_into_models_on_the_meta_device": weights_are_read_into_models_on_the_meta_device,
    "meta_models_are_initialised_as_full_ones": meta_models_are_initialised_as_full_ones,
    "snapshots_are_put_back": snapshots_are_put_back,
    "checkpoints_of_a_llama_fit_other_meshes": checkpoints_of_a_llama_fit_other_meshes,
    "fsdp2s_face_takes_them": fsdp2s_face_takes_them,
    "what_is_not_there_is_refused_by_name": what_is_not_there_is_refused_by_name,
}


if __name__ == "__main__":
    options = parse(CASES, __doc__, ranks=4)
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    result = run_checks(CASES, options.only, shared[0])
    print_result(result)
    dist.destroy_process_group()
