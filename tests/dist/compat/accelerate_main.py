"""Scripts under accelerate's own Accelerator (DDP on CPU) and under fullshard's, on gloo processes."""

import contextlib
import functools
import io
import json
import os
import pickle
import re
import sys
import unittest.mock
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedType, GradScalerKwargs, ProjectConfiguration
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap
from torch.utils.data import DataLoader
from transformers import T5ForConditionalGeneration

import fullshard
from fullshard.compat.accelerate import Accelerator, FullyShardedDataParallelPlugin
from fullshard.compat.torch_fsdp.checkpointing import CheckpointWrapper, OffloadWrapper
from fullshard.compat.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from fullshard.errors import ConfigError
from support.models import Block, TinyLM, bart, lm_loss, t5
from support.rank_script import parse, print_result, run_checks, traceback_of
from support.releases import ACCELERATE_1_15

OURS = "fullshard.compat.accelerate"
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap"}
BOTH = [CheckpointWrapper, OffloadWrapper]
directory = Path()  # main sets it


def reset():
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def reset_library_state(accelerator):
    """Make the library's shared state, which ``theirs`` replaced, that of ``accelerator`` again."""
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP)


def theirs(**options):
    reset()
    return accelerate.Accelerator(cpu=True, **options)


def ours(plugin=None, **options):
    reset()
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**(BLOCKS | (plugin or {}))), **options)


def lora():
    config = LoraConfig(task_type="SEQ_2_SEQ_LM", inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.0)
    return get_peft_model(t5(), config)


def seq2seq_rows(count=16):
    generator = torch.Generator().manual_seed(3)

    def row(length):
        return torch.randint(3, 50, (length,), generator=generator)

    return [{"input_ids": row(6), "labels": row(5)} for _ in range(count)]


def lm_rows(count=16):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 50, (9,), generator=generator) for _ in range(count)]


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def weights(accelerator, model):
    """The whole trained model, the same on both ranks, by the plain model's names."""
    state = accelerator.get_state_dict(model)
    box = [{name: value.clone() for name, value in state.items()}]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def train_seq2seq(accelerator, make, steps=2, policy=None):
    """The PEFT guide's loop."""
    model = seeded(make)
    loader = DataLoader(seq2seq_rows(4 * steps), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = adam(model)
    schedule = decay(optimizer)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None and policy is not None:
        accelerator.state.fsdp_plugin.auto_wrap_policy = policy(model)
    model, loader, optimizer, schedule = accelerator.prepare(model, loader, optimizer, schedule)
    losses, rates = [], []
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        guesses = [torch.argmax(model(**batch).logits, -1) for batch in loader]
    guesses = accelerator.gather_for_metrics(guesses[0])
    return {"losses": losses, "rates": rates, "guesses": guesses, "weights": weights(accelerator, model)}, model


@functools.cache
def reference(make):
    return train_seq2seq(theirs(), make)[0]


def close(mine, other, tolerance=1e-5):
    assert type(mine) is type(other) or isinstance(mine, (int, float)), (type(mine), type(other))
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), sorted(mine.keys() ^ other.keys())
        for name in mine:
            close(mine[name], other[name], tolerance)
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            close(one, two, tolerance)
    elif isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)
    elif isinstance(mine, float):
        assert abs(mine - other) <= tolerance * max(1.0, abs(other)), (mine, other)
    else:
        assert mine == other, (mine, other)


CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def seq2seq(name, make, policy=None, **plugin):
    def run():
        result, model = train_seq2seq(ours(plugin), make, policy=policy)
        close(result, reference(make))
        assert isinstance(model, FSDP) is (plugin.get("fsdp_version", 1) == 1)
        units = fullshard.units(model.module if isinstance(model, FSDP) else model)
        assert len(units.rows) > 4, "the model is one unit"

    run.__name__ = name
    check(run)


for version in (1, 2):
    for kind, make in (("t5", t5), ("lora", lora)):
        for offload in (False, True):
            named = f"{kind}_v{version}{'_offload' if offload else ''}"
            seq2seq(named, make, fsdp_version=version, cpu_offload=offload)
    seq2seq(f"bart_v{version}", bart, fsdp_version=version)
seq2seq("peft_policy_lora_v1", lora, policy=fsdp_auto_wrap_policy)
seq2seq("peft_policy_full_v1", t5, policy=fsdp_auto_wrap_policy)
seq2seq("peft_policy_full_v2", t5, policy=fsdp_auto_wrap_policy, fsdp_version=2)
seq2seq("size_based_wrap", t5, auto_wrap_policy="size_based_wrap", min_num_params=3000)
seq2seq("shard_grad_op", t5, sharding_strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_POST")
seq2seq("no_shard", t5, sharding_strategy=3)
seq2seq("no_reshard_v2", t5, fsdp_version=2, reshard_after_forward=False)


def train_lm(accelerator, act=lambda *_: None, steps=3, accumulation=1, prepare=None, seed=0):
    """A loop with everything between backward and step: ``act(accelerator, model)``."""
    model = seeded(TinyLM, seed)
    optimizer = adam(model)
    schedule = decay(optimizer)
    loader = DataLoader(lm_rows(4 * steps * accumulation), batch_size=2)
    if prepare is not None:
        model, optimizer, schedule, loader = prepare(accelerator, model, optimizer, schedule, loader)
    else:
        schedule, loader, optimizer, model = accelerator.prepare(schedule, loader, optimizer, model)
    noted = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = lm_loss(model, tokens)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                noted.append(act(accelerator, model))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            noted.append(loss.item())
    return {"noted": noted, "weights": weights(accelerator, model)}


LM = {"transformer_cls_names_to_wrap": ["Block"]}


def their_lm(options=None, **kwargs):
    # TinyLM has a module without use: DDP must look for it.
    handlers = [accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)]
    return train_lm(theirs(kwargs_handlers=handlers, **(options or {})), **kwargs)


def same_lm(version=1, options=None, plugin=None, **kwargs):
    options = options or {}
    expected = their_lm(options, **kwargs)
    close(train_lm(ours(LM | {"fsdp_version": version} | (plugin or {}), **options), **kwargs), expected)


@check
def prepare():
    same_lm(1)
    same_lm(2)


@check
def blocks_are_found_without_settings():
    """By one import; the model keeps its names and classes, and nothing is said of a plugin."""
    plain = {name: type(module).__name__ for name, module in seeded(TinyLM).named_modules()}
    for settings in ({}, {"fsdp_version": 2}, {"activation_checkpointing": True}):
        inside = []

        def look(accelerator, model, inside=inside):
            inside[:] = [accelerator.unwrap_model(model)]

        reset()
        plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(**settings)} if settings else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "(?i).*(one unit|plugin)")
            found = train_lm(Accelerator(**plugin), act=look)
        expected = their_lm()
        found["noted"], expected["noted"] = found["noted"][1::2], expected["noted"][1::2]
        close(found, expected)
        assert [row.unit for row in fullshard.units(inside[0]).rows] == ["(root)", *(f"blocks.{i}" for i in range(4))]
        if "activation_checkpointing" not in settings:
            assert {name: type(module).__name__ for name, module in inside[0].named_modules()} == plain


@check
def prepare_with_a_seed_of_each_rank():
    same_lm(1, seed=torch.distributed.get_rank())
    same_lm(2, seed=torch.distributed.get_rank())


@check
def prepare_one_by_one():
    def optimizer_last(accelerator, model, optimizer, schedule, loader):
        model = accelerator.prepare(model)
        loader = accelerator.prepare(loader)
        optimizer = accelerator.prepare(optimizer)
        return model, optimizer, accelerator.prepare(schedule), loader

    def with_methods(accelerator, model, optimizer, schedule, loader):
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare_optimizer(optimizer)
        schedule = accelerator.prepare_scheduler(schedule)
        return model, optimizer, schedule, accelerator.prepare_data_loader(loader)

    same_lm(prepare=optimizer_last)
    same_lm(prepare=with_methods)


@check
def prepare_with_state():
    """An optimizer that has stepped on the unsharded model goes on."""

    def stepped(accelerator, model, optimizer, schedule, loader):
        lm_loss(model, torch.stack(lm_rows(3))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.prepare(model, optimizer, schedule, loader)

    same_lm(prepare=stepped)


@check
def activation_checkpointing():
    again = {"activation_checkpointing": True}
    for version, others, kinds in ((1, {}, [CheckpointWrapper]), (2, {"activation_checkpointing_offload": True}, BOTH)):
        model = ours(LM | again | others | {"fsdp_version": version}).prepare(seeded(TinyLM))
        for kind in kinds:
            assert sum(isinstance(module, kind) for module in model.modules()) == 4
    same_lm(1, plugin=again)
    same_lm(2, plugin=again)
    same_lm(2, plugin=again | {"activation_checkpointing_offload": True})


@check
def prepare_names_strangers():
    accelerator = ours(LM)
    optimizer = torch.optim.SGD([*TinyLM().parameters()], lr=1.0)
    model = seeded(TinyLM)
    optimizer.add_param_group({"params": list(model.parameters())})
    with pytest.raises(ConfigError, match=re.escape("do not belong to the sharded TinyLM: number 0 of group 0")):
        accelerator.prepare(model, optimizer)


@check
def prepare_evaluation_only():
    accelerator = ours(LM)
    model, expected = accelerator.prepare(seeded(TinyLM)), seeded(TinyLM)
    tokens = torch.stack(lm_rows(2))
    with torch.no_grad():
        close(model.eval()(tokens), expected.eval()(tokens))
    plain = accelerator.prepare_model(seeded(TinyLM), evaluation_mode=True)
    assert type(plain) is TinyLM
    close(plain(tokens).detach(), expected(tokens).detach())


@check
def several_models():
    accelerator = ours(LM)
    one, two = seeded(TinyLM), seeded(TinyLM)
    optimizers = adam(one), adam(two)
    prepared = accelerator.prepare(optimizers[1], two, optimizers[0], one)
    assert [id(m) for m in accelerator._models] == [id(prepared[1]), id(prepared[3])]
    for optimizer, model in ((prepared[2], prepared[3]), (prepared[0], prepared[1])):
        known = {id(p) for p in model.parameters()}
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == known


@check
def backward():
    same_lm(act=lambda a, m: None, options={"gradient_accumulation_steps": 1})


@check
def accumulate():
    for version in (1, 2):
        same_lm(version, {"gradient_accumulation_steps": 2}, accumulation=2)


@check
def no_sync():
    accelerator = ours(LM)
    model = accelerator.prepare(seeded(TinyLM))
    plain = seeded(TinyLM)
    rows = torch.stack(lm_rows(8)).view(4, 2, -1)
    mine = rows[accelerator.process_index * 2 : accelerator.process_index * 2 + 2]
    with accelerator.no_sync(model):
        lm_loss(model, mine[0]).backward()
        assert all(p.grad is None for p in model.parameters())
    lm_loss(model, mine[1]).backward()
    for tokens in rows:
        (lm_loss(plain, tokens) / 2).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if q.grad is not None and p.nbytes:
            first, last = p.shard_meta.row_range
            close(p.grad.as_subclass(torch.Tensor), q.grad[first:last])
    with accelerator.no_sync(plain):
        pass


@check
def clip_grad_norm_():
    for norm in (2, 1, float("inf")):
        for version in (1, 2) if norm == 2 else (1,):
            same_lm(version, act=lambda a, m, norm=norm: float(a.clip_grad_norm_(m.parameters(), 0.5, norm)))
    some = lambda a, m: float(a.clip_grad_norm_([p for p in m.parameters() if p.requires_grad][2:5], 0.01))  # noqa: E731
    same_lm(act=some)


@check
def clip_grad_value_():
    for version in (1, 2):
        same_lm(version, act=lambda a, m: a.clip_grad_value_(m.parameters(), 1e-3))


def order(accelerator, context):
    """Which of two ranks was first inside, by a file."""
    path = directory / f"order_{context}"
    with getattr(accelerator, context)():
        if not accelerator.is_main_process:
            assert path.exists()
        else:
            path.touch()
    accelerator.wait_for_everyone()
    return path.exists()


for context in ("main_process_first", "local_main_process_first"):
    CHECKS[context] = functools.partial(lambda context: order(ours(), context) or pytest.fail(context), context)


@check
def wait_for_everyone():
    accelerator = ours()
    if accelerator.is_main_process:
        (directory / "waited").touch()
    accelerator.wait_for_everyone()
    assert (directory / "waited").exists()


def of_both(ask):
    """What both libraries' objects say."""
    expected = ask(theirs())
    close(ask(ours()), expected)
    return expected


def metrics(accelerator):
    loader = accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=2))
    found = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert torch.equal(found, torch.arange(5.0))
    return found, accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True)


def printed(accelerator):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        accelerator.print("here", accelerator.num_processes)
    assert out.getvalue() == ("here 2\n" if torch.distributed.get_rank() == 0 else "")
    return out.getvalue()


def done_by_ranks(accelerator):
    done = []
    for name in ("on_main_process", "on_local_main_process", "on_last_process"):
        getattr(accelerator, name)(lambda name=name: done.append(name))()
    accelerator.on_process(lambda: done.append("one"), process_index=1)()
    accelerator.on_local_process(lambda: done.append("local"), local_process_index=0)()
    return done


def triggered(accelerator):
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    found = [accelerator.check_trigger(), accelerator.check_trigger()]
    assert found == [True, False]
    return found


def split(accelerator):
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        return mine


def skipped(accelerator):
    return list(accelerator.skip_first_batches(accelerator.prepare(DataLoader(torch.arange(16), batch_size=2)), 2))


WHO = (
    *("process_index", "local_process_index", "num_processes", "is_main_process", "is_local_main_process"),
    *("is_last_process", "use_distributed", "mixed_precision", "gradient_accumulation_steps", "split_batches"),
    *("even_batches", "sync_gradients"),
)
QUESTIONS = {
    "gather": lambda a: a.gather({"x": torch.arange(3) + a.process_index, "y": [torch.ones(1, 2)]}),
    "gather_for_metrics": metrics,
    "reduce": lambda a: [a.reduce(torch.ones(2) * (1 + a.process_index), how) for how in ("sum", "mean")],
    "pad_across_processes": lambda a: a.pad_across_processes(torch.ones(1 + a.process_index, 2), pad_index=7),
    "print_": printed,
    "on_main_process_": done_by_ranks,
    "who_am_i": lambda a: [str(a.device), *(getattr(a, name) for name in WHO)],
    "trigger": triggered,
    "split_between_processes": split,
    "skip_first_batches": skipped,
}
CHECKS.update({name: functools.partial(of_both, ask) for name, ask in QUESTIONS.items()})


@check
def state_fsdp_plugin():
    for version in (1, 2):
        accelerator = ours({"fsdp_version": version})
        assert accelerator.distributed_type == accelerator.state.distributed_type == DistributedType.FSDP
        assert accelerator.is_fsdp2 is accelerator.state.is_fsdp2 is (version == 2)
        assert accelerator.state.fsdp_plugin is Accelerator().state.fsdp_plugin


@check
def several_accelerators():
    """Each shards as its own plugin says; one without a plugin takes the first's."""
    reset()
    kinds = [{"fsdp_version": 1}, {"fsdp_version": 2}]
    first, second = (Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**BLOCKS, **LM, **kind)) for kind in kinds)
    third = Accelerator()
    assert [a.is_fsdp2 for a in (first, second, third)] == [False, True, False]
    assert third.state.fsdp_plugin is first.state.fsdp_plugin is AcceleratorState().fsdp_plugin
    models = [a.prepare(seeded(TinyLM)) for a in (first, second, third)]
    assert [isinstance(model, FSDP) for model in models] == [True, False, True]
    expected = their_lm()
    for accelerator in (first, second):
        reset_library_state(accelerator)
        close(train_lm(accelerator), expected)


@check
def accelerates_own_plugin():
    """Of both versions, with words, torch's objects and torch's policies."""
    theirs_ = accelerate.FullyShardedDataParallelPlugin
    for version, others in ((1, {"sharding_strategy": "SHARD_GRAD_OP"}), (2, {"reshard_after_forward": False})):
        options = {
            "fsdp_version": version,
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["Block"],
            "mixed_precision_policy": "fp32",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_offload": True,
            "activation_checkpointing": True,
            **others,
        }
        given, mine = theirs_(**options), FullyShardedDataParallelPlugin(**options)
        reset()
        accelerator = Accelerator(fsdp_plugin=given)
        assert accelerator.state.fsdp_plugin == mine
        units = fullshard.units(accelerator.unwrap_model(accelerator.prepare(seeded(TinyLM))))
        assert len(units.rows) > 3
    reset()
    policy = functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    accelerator = Accelerator(fsdp_plugin=theirs_(auto_wrap_policy=policy))
    close(train_lm(accelerator), their_lm())


@check
def parallelism_config():
    for sizes in ({"dp_shard_size": 2}, {"dp_replicate_size": 2}):
        config = accelerate.ParallelismConfig(**sizes)
        for version in (1, 2):
            expected = their_lm()
            accelerator = ours(LM | {"fsdp_version": version}, parallelism_config=config)
            assert accelerator.parallelism_config is config
            assert accelerator.torch_device_mesh.mesh.tolist() == [0, 1]
            close(train_lm(accelerator), expected)
            model = accelerator.unwrap_model(accelerator.prepare(seeded(TinyLM)))
            full = all(p.nbytes == q.nbytes for p, q in zip(model.parameters(), TinyLM().parameters(), strict=True))
            assert full is ("dp_replicate_size" in sizes)
            assert accelerator.should_save_model is accelerator.is_local_main_process
    assert accelerator.data_parallel_rank == accelerator.process_index
    with pytest.raises(ConfigError, match=re.escape("there are 2")):
        ours(parallelism_config=accelerate.ParallelismConfig(dp_shard_size=4))
    with pytest.raises(ConfigError, match="tp_size=2"):
        ours(parallelism_config=accelerate.ParallelismConfig(tp_size=2))
    given = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    with unittest.mock.patch.dict(os.environ, given):
        assert ours().parallelism_config.dp_shard_size == 2


@check
def by_changing_the_name_of_the_package():
    text = Path(__file__).with_name("accelerate_script.py").read_text()
    with_ours = re.sub(r"^(import|from) accelerate\b(.*)", rf"\1 {OURS}\2", text, flags=re.MULTILINE)
    with_ours = with_ours.replace(f"import {OURS}\n", f"import {OURS} as accelerate\n")
    assert with_ours.count(OURS) == text.count("accelerate import") + text.count("from accelerate.") + 1
    results = []
    for program in (text, with_ours):
        reset()
        if program is text:
            PartialState(cpu=True)  # without a GPU, Accelerate's own is one process without this
        names = {"__name__": "script"}
        exec(program, names)
        result = names["train"](lambda: seeded(TinyLM), lm_loss, lm_rows())
        result["weights"] = dict(result["weights"]) if torch.distributed.get_rank() == 0 else {}
        results.append(result)
    assert (results[1]["tried"][0], results[1]["tried"][-1]) == (4, 2)
    results[0]["weights"] = {name.removeprefix("module."): value for name, value in results[0]["weights"].items()}
    close(results[1], results[0])


@check
def one_model_by_accelerates_functions():
    from fullshard.compat.accelerate import utils  # noqa: PLC0415 (a name that a finder makes)

    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        accelerator = ours(LM | {"state_dict_type": kind})
        plugin = accelerator.state.fsdp_plugin
        plain = seeded(TinyLM)
        model, optimizer = accelerator.prepare(plain, adam(plain))
        lm_loss(model, torch.stack(lm_rows(2))).backward()
        optimizer.step()
        path, expected = directory / f"functions_{kind}", weights(accelerator, model)
        utils.save_fsdp_model(plugin, accelerator, model, path)
        utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
        moments = [state["exp_avg"].clone() for state in optimizer.optimizer.state.values() if state]
        lm_loss(model, torch.stack(lm_rows(2))).backward()
        optimizer.step()
        utils.load_fsdp_model(plugin, accelerator, model, path)
        utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
        close(weights(accelerator, model), expected, 0)
        found = [state["exp_avg"] for state in optimizer.optimizer.state.values() if state]
        assert all(torch.equal(one, two) for one, two in zip(found, moments, strict=True))
        assert utils.extract_model_from_parallel(model) is plain
        assert utils.is_peft_model(accelerator.prepare(lora()))
        if not ACCELERATE_1_15:
            continue  # no such argument
        with pytest.raises(ConfigError, match="use_dcp=False"):
            utils.save_fsdp_model(plugin, accelerator, model, path, use_dcp=False)


@check
def from_the_environment():
    reset()
    given = {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false", "ACCELERATE_USE_FSDP": "true"}
    os.environ.update(given)
    try:
        accelerator = Accelerator()
        assert accelerator.is_fsdp2
        assert accelerator.state.fsdp_plugin.reshard_after_forward is False
        assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    finally:
        for name in given:
            os.environ.pop(name, None)


@check
def unwrap_model():
    for version in (1, 2):
        accelerator = ours(LM | {"fsdp_version": version})
        plain = seeded(TinyLM)
        model = accelerator.prepare(plain)
        assert accelerator.unwrap_model(model) is plain
        assert accelerator.unwrap_model(plain) is plain


@check
def get_state_dict():
    for version in (1, 2):
        accelerator = ours(BLOCKS | {"fsdp_version": version})
        model, plain = accelerator.prepare(seeded(t5)), seeded(t5)
        state = accelerator.get_state_dict(model)
        close(dict(state), dict(plain.state_dict()) if accelerator.is_main_process else {}, 0)
        close(dict(accelerator.get_state_dict(plain)), dict(plain.state_dict()), 0)


@check
def save_model():
    for version in (1, 2):
        accelerator = ours(LM | {"fsdp_version": version})
        model = accelerator.prepare(seeded(TinyLM))
        path = directory / f"model_{version}"
        accelerator.save_model(model, path, max_shard_size="8KB")
        accelerator.wait_for_everyone()
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        saved = {name: tensor for file in set(index.values()) for name, tensor in load_file(path / file).items()}
        close(saved, {name: p.detach() for name, p in seeded(TinyLM).named_parameters()}, 0)


def new_run(plugin, make=TinyLM, **options):
    accelerator = ours(plugin, **options)
    model = seeded(make)
    optimizer = adam(model)
    schedule = decay(optimizer)
    loader = DataLoader(lm_rows(32), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)


class Counter:
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def go_on(run, counter, batches):
    accelerator, model, optimizer, schedule, _ = run
    noted = []
    for tokens in batches:
        loss = lm_loss(model, tokens) + 0 * torch.rand(())  # the random state goes on too
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.seen += 1
        noted += [loss.item(), torch.rand(()).item()]
    return noted, weights(accelerator, model)


def goes_on_bit_for_bit(plugin, name):
    counter = Counter()
    run = new_run(plugin)
    run[0].register_for_checkpointing(counter)
    batches = list(run[4])
    go_on(run, counter, batches[:3])
    path = directory / name
    calls = []
    handle = run[0].register_save_state_pre_hook(
        lambda models, states, where: calls.append((len(models), states, where))
    )
    run[0].save_state(path)
    assert calls == [(1, [], f"{path}.tmp")], calls
    handle.remove()
    expected = go_on(run, counter, batches[3:6])
    again, other = new_run(plugin), Counter()
    again[0].register_for_checkpointing(other)
    again[0].register_load_state_pre_hook(lambda models, where: calls.append((models, where)))
    again[0].load_state(path)
    assert calls[1:] == [([], str(path))]
    assert other.seen == 3
    assert again[3].get_last_lr() == pytest.approx([1e-3 / 7])  # three steps of two processes each
    close(go_on(again, other, batches[3:6]), expected, 0)
    run[0].save_state(path)  # over what is there
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        torch.save(weights_now(again), directory / f"{name}.pt")
    else:
        weights_now(again)
    again[0].save_state(directory / f"{name}_end")


def weights_now(run):
    return run[0].get_state_dict(run[1])


@check
def save_state_full():
    goes_on_bit_for_bit(LM | {"state_dict_type": "FULL_STATE_DICT"}, "full_1")
    goes_on_bit_for_bit(LM | {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}, "full_2")


@check
def save_state_sharded():
    goes_on_bit_for_bit(LM | {"state_dict_type": "SHARDED_STATE_DICT"}, "sharded_1")
    goes_on_bit_for_bit(LM | {"fsdp_version": 2}, "sharded_2")


@check
def save_state_local():
    goes_on_bit_for_bit(LM | {"state_dict_type": "LOCAL_STATE_DICT"}, "local_1")


@check
def save_state_named_automatically():
    project = ProjectConfiguration(
        project_dir=str(directory / "project"), automatic_checkpoint_naming=True, total_limit=2
    )
    run = new_run(LM, project_config=project)
    for _ in range(3):
        run[0].save_state()
    run[0].wait_for_everyone()
    names = sorted(path.name for path in (directory / "project" / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"], names
    assert run[0].save_iteration == 3
    run[0].load_state()


@check
def save_state_that_fails_leaves_the_last_one():
    project = ProjectConfiguration(
        project_dir=str(directory / "full_disk"), automatic_checkpoint_naming=True, total_limit=1
    )
    run = new_run(LM | {"state_dict_type": "SHARDED_STATE_DICT"}, project_config=project)
    run[0].save_state()
    path = directory / "replaced"
    naming = run[0].project_configuration
    naming.automatic_checkpoint_naming = False
    run[0].save_state(path)
    if torch.distributed.get_rank() == 0:
        (path / "notes.txt").write_text("the user's")
    before = weights_now(run)
    go_on(run, Counter(), list(run[4])[:1])

    def refuse(*_):
        raise OSError(28, "No space left on device")

    for automatic, where in ((True, None), (False, path)):
        naming.automatic_checkpoint_naming = automatic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "save", refuse)
            with pytest.raises(fullshard.CheckpointError, match="No space"):
                run[0].save_state(where)
        run[0].load_state(where)
        close(weights_now(run), before, 0)
    run[0].save_state(path)
    torch.distributed.barrier()
    assert (path / "notes.txt").read_text() == "the user's"
    assert [one.name for one in path.parent.glob("replaced*")] == ["replaced"]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path.rename(f"{path}.old")  # as a kill between two renames leaves it
    torch.distributed.barrier()
    run[0].load_state(path)


@check
def load_state_tells_every_rank():
    run = new_run(LM)
    for path, what in (("nowhere", "is not a directory"), ("full_1", "pytorch_model_fsdp")):
        (directory / "empty").mkdir(exist_ok=True)
        with pytest.raises(fullshard.CheckpointError, match=re.escape(what)):
            run[0].load_state(directory / (path if path == "nowhere" else "empty"))


class Poison:
    """Makes a directory when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (str(directory / "ran"),)


@check
def load_state_runs_nothing_that_a_file_names():
    """One error on every rank that names the file and the function."""
    kinds = {
        "SHARDED_STATE_DICT": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "scheduler.bin"],
        "FULL_STATE_DICT": ["pytorch_model_fsdp.bin", "optimizer.bin", "custom_checkpoint_0.pkl"],
        "LOCAL_STATE_DICT": ["pytorch_model_fsdp_rank1.bin", "random_states_1.pkl"],
    }
    rank = torch.distributed.get_rank()
    for kind, files in kinds.items():
        run = new_run(LM | {"state_dict_type": kind})
        run[0].register_for_checkpointing(Counter())
        go_on(run, Counter(), list(run[4])[:1])
        for name in files:
            path = directory / f"poisoned_{name.replace('/', '_')}"
            run[0].save_state(path)
            run[0].wait_for_everyone()
            if rank == 0 and name.endswith("metadata"):
                (path / name).write_bytes(pickle.dumps(Poison()))
            elif rank == 0:
                torch.save(Poison(), path / name)
            run[0].wait_for_everyone()
            with pytest.raises(fullshard.CheckpointError, match=r"posix\.mkdir") as info:
                run[0].load_state(path)
            texts = [None, None]
            torch.distributed.all_gather_object(texts, str(info.value))
            assert texts[0] == texts[1]
            assert name.partition("/")[0] in texts[0] or name == "scheduler.bin", texts[0]
            assert not (directory / "ran").exists(), name
    path = directory / "poisoned_custom_checkpoint_0.pkl"
    run = new_run(LM | {"state_dict_type": "FULL_STATE_DICT"})
    run[0].register_for_checkpointing(Counter())
    if rank == 0:
        torch.save(Trusted(7), path / "custom_checkpoint_0.pkl")
    run[0].wait_for_everyone()
    with pytest.raises(fullshard.CheckpointError, match=r"it names \S*Trusted, .*add_safe_globals"):
        run[0].load_state(path)
    run[0].load_state(path, load_kwargs={"weights_only": False})  # who asks for it gets Accelerate's own
    assert run[0]._custom_objects[0].seen == 7


class Trusted(dict):
    """A state of a class of the user's."""

    def __init__(self, seen=0):
        super().__init__(seen=seen)


class Notes(GeneralTracker):
    name = "notes"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.noted = []

    @property
    def tracker(self):
        return self.noted

    @on_main_process
    def store_init_configuration(self, values):
        self.noted.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.noted.append((values, step))

    @on_main_process
    def finish(self):
        self.noted.append("end")


@check
def trackers():
    def ask(accelerator, notes):
        accelerator.init_trackers("project", {"lr": 1})
        accelerator.log({"loss": 1.0}, step=3)
        assert accelerator.get_tracker("notes") is notes or not accelerator.is_main_process
        for tracker in accelerator.trackers:
            tracker.finish()
        return notes.noted

    first = Notes()
    expected = ask(theirs(log_with=first), first)
    second = Notes()
    close(ask(ours(log_with=second), second), expected)


@check
def free_memory():
    run = new_run(LM)
    accelerator, *rest = run
    gone = accelerator.free_memory(*rest)
    assert list(gone) == [None] * 4
    assert [accelerator._models, accelerator._optimizers, accelerator._places] == [[], [], []]
    del run, rest


@check
def autocast():
    def ask(accelerator):
        with accelerator.autocast():
            return str(nn.Linear(2, 2)(torch.ones(1, 2)).dtype)

    expected = ask(theirs(mixed_precision="bf16"))
    assert expected == ask(ours(mixed_precision="bf16")) == "torch.bfloat16"
    of_both(ask)


@check
def bf16():
    for version in (1, 2):
        accelerator = ours(BLOCKS | {"fsdp_version": version}, mixed_precision="bf16")
        model = seeded(t5)
        seen = []
        block = model.decoder.block[0].layer[2]
        block.register_forward_hook(
            lambda *_, block=block, seen=seen: seen.append(block.DenseReluDense.wi.weight.dtype)
        )
        model, optimizer = accelerator.prepare(model, adam(model))
        batch = {key: torch.stack([row[key] for row in seq2seq_rows(2)]) for key in ("input_ids", "labels")}
        output = model(**batch)
        assert output.logits.dtype == (torch.float32 if version == 1 else torch.bfloat16)  # 2's policy casts outputs
        output.loss.backward()
        assert seen == [torch.bfloat16]
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        assert accelerator.state.fsdp_plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16


@check
def narrow_parameters_are_trained_in_float32():
    accelerator = ours(LM, mixed_precision="bf16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = accelerator.prepare(seeded(TinyLM).to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert any("from 16 bits to float32" in str(one.message) for one in told) is accelerator.is_main_process


@check
def fp16_scaler():
    for version in (1, 2):
        plugin = LM | {"fsdp_version": version}
        handlers = [GradScalerKwargs(init_scale=64.0, growth_interval=1)]
        accelerator = ours(plugin, mixed_precision="fp16", kwargs_handlers=handlers)
        model = seeded(TinyLM)
        model, optimizer = accelerator.prepare(model, adam(model))
        assert accelerator.scaler.get_scale() == 64.0
        tokens = torch.stack(lm_rows(2))
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(lm_loss(model, tokens))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        plain = seeded(TinyLM)
        lm_loss(plain, tokens).backward()
        torch.testing.assert_close(
            norm, nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]), rtol=1e-2, atol=0
        )
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        assert accelerator.scaler.get_scale() == 128.0
        assert any((p != q).any() for p, q in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        loss = lm_loss(model, tokens) * (float("inf") if accelerator.process_index == 1 else 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(loss)
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@check
def plugin_bf16_policy():
    accelerator = ours(LM | {"mixed_precision_policy": "bf16"})
    model = accelerator.prepare(seeded(TinyLM))
    assert model(torch.stack(lm_rows(2))).dtype == torch.bfloat16


@check
def save_pretrained():
    """Every rank calls it on what prepare returned, and by the pattern of Accelerate's pages."""
    for version in (1, 2):
        for make in (t5, lora) if version == 1 else (lora,):
            accelerator = ours(BLOCKS | {"fsdp_version": version})
            model, plain = accelerator.prepare(seeded(make)), seeded(make)
            path = directory / f"pretrained_{make.__name__}_{version}"
            model.save_pretrained(path / "all")
            accelerator.wait_for_everyone()
            accelerator.unwrap_model(model).save_pretrained(
                path / "one",
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(model),
            )
            accelerator.wait_for_everyone()
            plain.save_pretrained(path / "plain")
            accelerator.wait_for_everyone()
            name = "model.safetensors" if make is t5 else "adapter_model.safetensors"
            expected = path / "plain"
            for how in ("all", "one"):
                close(load_file(path / how / name), load_file(expected / name), 0)
                here, there = ({p.name for p in which.iterdir()} for which in (path / how, expected))
                assert here == there, (here, there)
            if make is t5:
                config = json.loads((path / "all" / "config.json").read_text())
                assert config["architectures"] == ["T5ForConditionalGeneration"], config
                T5ForConditionalGeneration.from_pretrained(path / "all")
            else:
                PeftModel.from_pretrained(t5(), path / "all")


@check
def generate():
    for version in (1, 2):
        for make in (t5, lora) if version == 1 else (lora,):
            accelerator = ours(BLOCKS | {"fsdp_version": version})
            model, plain = accelerator.prepare(seeded(make)).eval(), seeded(make).eval()
            mine = torch.stack([row["input_ids"] for row in seq2seq_rows(4)])[accelerator.process_index :: 2]
            # One rank ends after 2 tokens, the other after 6: units are gathered until both have finished.
            length = 2 if accelerator.process_index else 6
            options = {"max_new_tokens": length, "min_new_tokens": length}
            close(model.generate(input_ids=mine, **options), plain.generate(input_ids=mine, **options))


@check
def cpu_ram_efficient_loading():
    path = directory / "efficient"
    if torch.distributed.get_rank() == 0:
        seeded(t5).save_pretrained(path)
    torch.distributed.barrier()
    for version in (1, 2):
        accelerator = ours(BLOCKS | {"fsdp_version": version, "cpu_ram_efficient_loading": True})
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"
        model = T5ForConditionalGeneration.from_pretrained(path)
        if not accelerator.is_main_process:  # as releases of transformers that load on the first rank only leave it
            with torch.device("meta"):
                model = t5()
        optimizer = adam(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        known = {id(p) for p in model.parameters()}
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == known
        close(weights(accelerator, model), dict(seeded(t5).state_dict()), 0)


@check
def sync_module_states():
    accelerator = ours(LM | {"sync_module_states": True})
    torch.manual_seed(accelerator.process_index)
    model = accelerator.prepare(TinyLM())
    torch.manual_seed(0)
    close(weights(accelerator, model), dict(TinyLM().state_dict()), 0)


@check
def ignored_modules():
    for version in (1, 2):
        accelerator = ours(LM | {"fsdp_version": version, "ignored_modules": r"blocks\.\d\.side"})
        model = accelerator.prepare(seeded(TinyLM))
        left = {name for name, p in accelerator.unwrap_model(model).named_parameters() if not hasattr(p, "shard_meta")}
        left = {fullshard.core.engine.plain_name(name) for name in left}
        assert left == {f"blocks.{i}.side.{what}" for i in range(4) for what in ("weight", "bias")}, left


@check
def wrapped_by_hand():
    accelerator = ours(LM)
    model = FSDP(seeded(TinyLM), auto_wrap_policy=None)
    optimizer = adam(model)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model
    again = accelerator.prepare(prepared)
    assert again is prepared
    assert len(accelerator._models) == 1


@check
def other_ways_are_refused():
    reset()
    for option in ({"deepspeed_plugin": object()}, {"megatron_lm_plugin": object()}):
        with pytest.raises(ConfigError, match=re.escape(next(iter(option)))):
            Accelerator(**option)
    with pytest.warns(UserWarning, match="DistributedDataParallelKwargs has no effect"):
        ours(kwargs_handlers=[accelerate.DistributedDataParallelKwargs()])
    with pytest.raises(ConfigError, match="LOMO"):
        ours().lomo_backward(torch.ones(()), 0.1)


@check
def dynamo_compiles_the_units():
    compiled = []
    with unittest.mock.patch.object(nn.Module, "compile", lambda self, **options: compiled.append((self, options))):
        accelerator = ours(LM, dynamo_backend="eager")
        model = accelerator.prepare(seeded(TinyLM))
    assert [one for one, _ in compiled] == [child.module for child in accelerator.unwrap_model(model).blocks]
    assert compiled[0][1]["backend"] == "eager"
    with pytest.raises(ConfigError, match="no units inside"):
        ours({"auto_wrap_policy": "no_wrap"}, dynamo_backend="eager").prepare(seeded(TinyLM))


def end_training():
    ours().end_training()
    assert not torch.distributed.is_initialized(), "the process group is there still"


def alone():
    """One process without a process group: the same object; it reads what the cases save_state_* wrote."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    kinds = {"full_1": "FULL_STATE_DICT", "sharded_1": "SHARDED_STATE_DICT"}
    for name, kind in kinds.items():
        counter = Counter()
        run = new_run(LM | {"state_dict_type": kind})
        accelerator = run[0]
        assert (accelerator.num_processes, accelerator.distributed_type) == (1, DistributedType.FSDP)
        accelerator.register_for_checkpointing(counter)
        accelerator.load_state(directory / f"{name}_end")
        assert counter.seen == 6
        close(weights_now(run), torch.load(directory / f"{name}.pt"), 0)
        close(float(run[2].state[next(iter(run[2].state))]["step"]), 6.0)
        go_on(run, counter, list(run[4])[:1])
        assert accelerator.gather(torch.ones(1)).tolist() == [1.0]
        accelerator.wait_for_everyone()
    accelerator.end_training()
    assert not torch.distributed.is_initialized()


def main():
    global directory
    options = parse(CHECKS | {"end_training": end_training, "alone": alone}, __doc__)
    directory = options.directory
    rank = int(os.environ["RANK"])  # which ``alone`` takes out of the environment
    torch.distributed.init_process_group("gloo")
    results = run_checks(CHECKS, [name for name in options.only if name in CHECKS])
    results["end_training"] = traceback_of(end_training)
    if "alone" in options.only and rank == 0:
        results["alone"] = traceback_of(alone)
    print_result(results, rank)


if __name__ == "__main__":
    main()
