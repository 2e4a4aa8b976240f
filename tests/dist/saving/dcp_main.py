"""torch's distributed checkpoints on gloo processes, written by ours and read by torch's, and in reverse.

Every case writes into a directory of its own; ``dcp_three_main.py`` reads some of them afterwards.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard as torch_fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from fullshard import ShardingStrategy, fully_shard, step_in_backward
from fullshard.errors import CheckpointError
from fullshard.state.saving.dcp import load_dcp, save_dcp
from support.models import TinyLM, batches, seq2seq_loss, t5
from support.odd import adafactor, adagrad, eight_bit, gathered, odd, odd_loss
from support.rank_script import parse, print_result, run_checks
from support.states import assert_same_bits

FULL = StateDictOptions(full_state_dict=True)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def grouped(model):
    matrices = [p for name, p in model.named_parameters() if "norm" not in name]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": norms, "lr": 3e-3}], lr=1e-2)


def made(make, seed):
    """The model before it is sharded; ``t5()`` and ``Odd()`` of two seeds have nothing in common."""
    torch.manual_seed(seed)
    return make()


def train(model, optimizer, loss_of, steps=2, seed=1):
    for tokens in batches(steps, 2, seed=seed):
        loss_of(model, tokens).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def ours(make=t5, seed=0, optimizer_of=adamw, **options):
    model = fully_shard(made(make, seed), **options)
    return model, optimizer_of(model)


def theirs(make=t5, seed=0, optimizer_of=adamw):
    model = made(make, seed)
    for block in [*model.encoder.block, *model.decoder.block]:
        torch_fully_shard(block)
    torch_fully_shard(model)
    return model, optimizer_of(model)


def torch_state_of(model, optimizer):
    """Theirs, in the form of :func:`gathered`; a tied tensor under its first name."""
    weights = get_model_state_dict(model, options=FULL)
    named = [*model.named_parameters(), *model.named_buffers()]
    first = {name.removeprefix("_fsdp_wrapped_module.") for name, _ in named}
    state = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    found = {f"model/{name}": value for name, value in weights.items() if name in first}
    found |= {f"optimizer/{name}/{key}": value for name, of in state.items() for key, value in of.items()}
    return {name: value.reshape(-1) for name, value in found.items() if isinstance(value, torch.Tensor)}


def torch_load(model, optimizer, path):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def torch_save(model, optimizer, path):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def ours_in_torch(directory, optimizer_of):
    """A torch run goes on where ours was: tied names are all there, groups have their options."""
    model, optimizer = ours(optimizer_of=optimizer_of)
    train(model, optimizer, seq2seq_loss)
    save_dcp(model, optimizer, directory)
    other, its_optimizer = theirs(seed=5, optimizer_of=optimizer_of)
    for group in its_optimizer.param_groups:
        group["lr"] = 0.5
    torch_load(other, its_optimizer, directory)
    assert_same_bits(torch_state_of(other, its_optimizer), gathered(model, optimizer))
    for option in ("lr", "weight_decay"):
        assert [g[option] for g in its_optimizer.param_groups] == [g[option] for g in optimizer.param_groups]


def torch_in_ours(directory, optimizer_of):
    """Our run goes on where torch's was, and both stay together."""
    other, its_optimizer = theirs(optimizer_of=optimizer_of)
    train(other, its_optimizer, seq2seq_loss)
    torch_save(other, its_optimizer, directory)
    model, optimizer = ours(seed=5, optimizer_of=optimizer_of)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    load_dcp(model, optimizer, directory)
    assert_same_bits(gathered(model, optimizer), torch_state_of(other, its_optimizer))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in its_optimizer.param_groups]
    for one, its in ((model, optimizer), (other, its_optimizer)):
        train(one, its, seq2seq_loss, seed=3)
    after, expected = gathered(model, optimizer), torch_state_of(other, its_optimizer)
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=1e-4)


def save_odd(model, optimizer, directory, name):
    train(model, optimizer, odd_loss)
    save_dcp(model, optimizer, directory / name)
    state = gathered(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, directory / f"{name}.pt")
    return state


def loads_odd(directory, name, optimizer_of, state):
    """Into nothing, and into state that is there."""
    other = odd(5)
    fresh = optimizer_of(other)
    for _ in range(2):
        load_dcp(other, fresh, directory / name)
        assert_same_bits(gathered(other, fresh), state)
        train(other, fresh, odd_loss, steps=1)


def every_shape(directory):
    """Rows, elements, scalars, buffers and left-out parameters come back, also state that is not by element."""
    for name, make in (("odd", adagrad), ("adafactor", adafactor), ("eight_bit", eight_bit)):
        model = odd(0)
        state = save_odd(model, make(model), directory, name)
        loads_odd(directory, name, make, state)
    if dist.get_rank() == 0:
        keys = dcp.FileSystemReader(directory / "odd").read_metadata().state_dict_metadata
        assert "model.kept_too" in keys
        assert "model.norm.num_batches_tracked" in keys
        assert "model.passing" not in keys


def unsharded_adafactor_in_ours(directory):
    """What torch wrote of Hugging Face's Adafactor of a plain model."""
    model = made(t5, 0)
    optimizer = transformers.Adafactor(model.parameters(), beta1=0.9)
    train(model, optimizer, seq2seq_loss)
    torch_save(model, optimizer, directory / "plain")
    other, fresh = ours(seed=5, optimizer_of=adafactor)
    load_dcp(other, fresh, directory / "plain")
    assert_same_bits(gathered(other, fresh), torch_state_of(model, optimizer))


def tied_once(directory):
    """All names of a tied tensor are at the same place in the files."""
    stored = dcp.FileSystemReader(directory / "ours").read_metadata().storage_data
    places = {}
    for index, info in stored.items():
        places.setdefault(index.fqn, {})[index.offset] = (info.relative_path, info.offset, info.length)
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    first, *others = (places[f"model.{name}.weight"] for name in names)
    assert len(first) == 2
    assert others == [first] * 3
    size = sum(file.stat().st_size for file in (directory / "ours").glob("*.distcp"))
    assert size <= sum(length for _, _, length in {place for of in places.values() for place in of.values()})


def copies(directory):
    """Ranks that hold the same shards write them once."""
    model = odd(0, strategy=ShardingStrategy.NO_SHARD)
    state = save_odd(model, adagrad(model), directory, "copies")
    metadata = dcp.FileSystemReader(directory / "copies").read_metadata()
    assert all(len(entry.chunks) == 1 for entry in metadata.state_dict_metadata.values() if hasattr(entry, "chunks"))
    loads_odd(directory, "copies", adagrad, state)


def stepping_in_backward(directory):
    """An optimizer for each parameter is written as groups, and read by one optimizer, and the other way round."""

    def sharded(seed):
        model = fully_shard(made(t5, seed))
        return model, step_in_backward(model, lambda p: torch.optim.AdamW(p, lr=1e-2))

    model, steps = sharded(0)
    train(model, None, seq2seq_loss)
    save_dcp(model, steps, directory / "steps")
    state = gathered(model, steps)
    other, fresh = sharded(5)
    load_dcp(other, fresh, directory / "steps")
    assert_same_bits(gathered(other, fresh), state)
    one, optimizer = ours(seed=5)
    load_dcp(one, optimizer, directory / "steps")
    assert_same_bits(gathered(one, optimizer), state)
    one, optimizer = theirs(seed=5)
    torch_load(one, optimizer, directory / "steps")
    assert_same_bits(torch_state_of(one, optimizer), state)


def ddp_in_ours(directory):
    """What DDP saved; its names are without 'module.'."""
    model = nn.parallel.DistributedDataParallel(made(t5, 0))
    optimizer = adamw(model)
    train(model.module, optimizer, seq2seq_loss)
    torch_save(model, optimizer, directory / "ddp")
    other, fresh = ours(seed=5)
    load_dcp(other, fresh, directory / "ddp")
    assert_same_bits(gathered(other, fresh), torch_state_of(model.module, optimizer))


def classic_fsdp_in_ours(directory):
    """What torch's older FSDP saved, which flattens parameters."""
    model = FullyShardedDataParallel(made(TinyLM, 0), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = adamw(model)
    for tokens in batches(2, 2):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        torch_save(model, optimizer, directory / "fsdp")
        expected = torch_state_of(model, optimizer)
    other, fresh = ours(TinyLM, seed=5)
    load_dcp(other, fresh, directory / "fsdp")
    assert_same_bits(gathered(other, fresh), expected)


def refused(work, *texts):
    """``work`` raises, on every rank the same text."""
    try:
        work()
    except CheckpointError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was raised")
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, text)
    assert len(set(parts)) == 1, parts
    for expected in texts:
        assert expected in text, text


def misfits(directory):
    """One clear error on every rank, and nothing has changed."""
    model, optimizer = ours()
    before = gathered(model, optimizer)
    refused(lambda: save_dcp(model, optimizer, directory / "ours"), "already holds a distributed checkpoint")
    refused(lambda: load_dcp(model, optimizer, directory / "none"), ".metadata")
    refused(lambda: load_dcp(model, optimizer, directory / "odd"), "missing", "not in the model", "conv.weight")
    save_dcp(model, None, directory / "bare")
    refused(lambda: load_dcp(model, optimizer, directory / "bare"), "optimizer=None")
    refused(lambda: load_dcp(model, adamw(model), directory / "ours"), "2 groups")
    if dist.get_rank() == 0:
        (directory / "theirs" / "__1_0.distcp").write_bytes(b"")
    dist.barrier()
    assert_same_bits(gathered(model, optimizer), before)
    refused(lambda: load_dcp(model, optimizer, directory / "theirs_sgd" / "nothing"), "not a complete")
    refused(lambda: load_dcp(model, grouped(model), directory / "theirs"), "cannot be read: rank")


CASES = {
    "ours_in_torch_adamw": lambda directory: ours_in_torch(directory / "ours", grouped),
    "torch_in_ours_adamw": lambda directory: torch_in_ours(directory / "theirs", grouped),
    "ours_in_torch_momentum": lambda directory: ours_in_torch(directory / "ours_sgd", momentum),
    "torch_in_ours_momentum": lambda directory: torch_in_ours(directory / "theirs_sgd", momentum),
} | {
    case.__name__: case
    for case in (
        every_shape,
        unsharded_adafactor_in_ours,
        tied_once,
        copies,
        stepping_in_backward,
        ddp_in_ours,
        classic_fsdp_in_ours,
        misfits,
    )
}


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"\d+ of ignored_params are trainable")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group("gloo")
    print_result(run_checks(CASES, options.only, options.directory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
