"""Lightning's Trainer and Fabric under DDP and under its FSDP strategy on fullshard's engine, on gloo processes."""

import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.nn import functional
from torch.utils.data import DataLoader

import fullshard
from fullshard.compat import redirect
from fullshard.compat.torch_fsdp import CheckpointWrapper, FullyShardedDataParallel as FSDP
from support.rank_script import parse, print_result, run_checks

CASES = {}
LAYER = nn.TransformerEncoderLayer
VOCAB, STEPS, LATER = 50, 5, 8
QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "accelerator": "cpu",
    "devices": 2,
}
directory = Path()  # main sets it


def case(function):
    CASES[function.__name__] = function
    return function


class OnCpu(FSDPStrategy):
    """Lightning refuses its own class without a GPU, but not a class made from it."""


class FabricOnCpu(FabricFSDP):
    """The same for Fabric."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.Sequential(*[LAYER(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        logits = self.head(self.blocks(self.embed(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.losses, self.held_out = [], []

    def training_step(self, batch, _):
        loss = self.net(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        loss = self.net(batch)
        self.log("held_out", loss, sync_dist=True)
        self.held_out.append(loss.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(rows=32):
    """Batches of two rows; Lightning gives each rank its own."""
    tokens = torch.randint(VOCAB, (rows, 8), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=2)


def sharded_strategy(**options):
    return OnCpu(auto_wrap_policy={LAYER}, **options)


def fitted(strategy, steps=STEPS, resume=None, module=None, **options):
    """Train; the module and the trainer."""
    trainer = lightning.Trainer(
        strategy=strategy,
        max_steps=steps,
        default_root_dir=directory,
        **QUIET,
        **{"enable_checkpointing": False, "limit_val_batches": 0} | options,
    )
    module = module or Module()
    trainer.fit(module, data(), data(8), ckpt_path=resume)
    return module, trainer


def assert_close(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)


@case
def trainer_takes_ddps_steps():
    theirs, _ = fitted("ddp")
    with redirect():
        ours, trainer = fitted(sharded_strategy())
    assert isinstance(trainer.strategy.model, FSDP)
    assert sum(isinstance(module, FSDP) for module in trainer.strategy.model.modules()) == 3
    assert len(ours.losses) == STEPS
    assert_close(ours.losses, theirs.losses)


@case
def trainer_takes_them_under_each_strategy_and_with_checkpointed_activations():
    theirs, _ = fitted("ddp", accumulate_grad_batches=2)
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        with redirect():
            ours, _ = fitted(sharded_strategy(sharding_strategy=strategy), accumulate_grad_batches=2)
        assert_close(ours.losses, theirs.losses)
    with redirect():
        options = {"activation_checkpointing_policy": {LAYER}}
        ours, trainer = fitted(sharded_strategy(**options), accumulate_grad_batches=2)
    assert sum(isinstance(module, CheckpointWrapper) for module in trainer.strategy.model.modules()) == 2
    assert_close(ours.losses, theirs.losses)


def resumed(kind):
    """Losses after a checkpoint of ``kind``, those of DDP's own resume, and the path."""
    _, trainer = fitted("ddp")
    trainer.save_checkpoint(directory / f"ddp-{kind}.ckpt")
    theirs, _ = fitted("ddp", LATER, directory / f"ddp-{kind}.ckpt")
    path = directory / f"{kind}.ckpt"
    with redirect():
        _, trainer = fitted(sharded_strategy(state_dict_type=kind))
        trainer.save_checkpoint(path)
        ours, _ = fitted(sharded_strategy(state_dict_type=kind), LATER, path)
    assert len(ours.losses) == LATER - STEPS
    assert_close(ours.losses, theirs.losses)
    return path


@case
def trainer_resumes_from_a_sharded_checkpoint():
    assert resumed("sharded").is_dir()


@case
def trainer_resumes_from_a_full_checkpoint_which_ddp_reads_too():
    path = resumed("full")
    assert path.is_file()
    theirs, _ = fitted("ddp", LATER, directory / "ddp-full.ckpt")
    ours, _ = fitted("ddp", LATER, path)
    assert_close(ours.losses, theirs.losses)
    plain = Module.load_from_checkpoint(path, weights_only=True)
    assert plain.net.head.weight.shape == (VOCAB, 32)


@case
def trainer_resumes_from_a_checkpoint_of_ddp():
    _, trainer = fitted("ddp")
    trainer.save_checkpoint(directory / "from-ddp.ckpt")
    theirs, _ = fitted("ddp", LATER, directory / "from-ddp.ckpt")
    with redirect():
        ours, _ = fitted(sharded_strategy(), LATER, directory / "from-ddp.ckpt")
    assert_close(ours.losses, theirs.losses)


@case
def trainer_evaluates_and_keeps_the_best():
    found = {}
    for name, strategy in (("ddp", lambda: "ddp"), ("ours", sharded_strategy)):
        keeper = ModelCheckpoint(directory / f"best-{name}", monitor="held_out", save_top_k=1)
        options = {"enable_checkpointing": True, "limit_val_batches": 2, "val_check_interval": 2}
        with redirect():
            module, _ = fitted(strategy(), callbacks=[keeper], **options)
        found[name] = (module, keeper)
    assert_close(found["ours"][0].held_out, found["ddp"][0].held_out)
    assert_close(found["ours"][1].best_model_score.item(), found["ddp"][1].best_model_score.item())
    best = [torch.load(found[name][1].best_model_path, weights_only=True)["state_dict"] for name in ("ours", "ddp")]
    assert best[0].keys() == best[1].keys()
    for name in best[0]:
        torch.testing.assert_close(best[0][name], best[1][name], rtol=0, atol=1e-5)


@case
def trainer_evaluates_and_fits_again_what_it_has_fitted():
    found = []
    for strategy in (lambda: "ddp", sharded_strategy):
        with redirect():
            module, trainer = fitted(strategy())
            trainer.limit_val_batches = 2
            trainer.validate(module, data(8), verbose=False)
            fitted(strategy(), module=module)
        found.append((module.losses, module.held_out))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert_close(ours, theirs)


class Wrapping(Module):
    """Wraps by hand, in the context in which Lightning calls ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            from torch.distributed.fsdp.wrap import wrap  # noqa: PLC0415

            net = Net()
            net.blocks = nn.Sequential(*[wrap(block) for block in net.blocks])
            self.net = wrap(net)


@case
def trainer_takes_modules_that_wrap_themselves():
    theirs, _ = fitted("ddp")
    with redirect():
        ours, trainer = fitted(OnCpu(), module=Wrapping())
    assert sum(isinstance(module, FSDP) for module in trainer.strategy.model.modules()) == 3
    assert_close(ours.losses, theirs.losses)


class Clipping(Module):
    """Clips by torch's function; Lightning refuses ``gradient_clip_val`` under FSDP."""

    def configure_gradient_clipping(self, *_, **__):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


@case
def trainer_clips_as_ddp():
    theirs, _ = fitted("ddp", gradient_clip_val=0.5)
    unclipped, _ = fitted("ddp")
    with redirect():
        ours, _ = fitted(sharded_strategy(), module=Clipping())
    assert_close(ours.losses, theirs.losses)
    assert max(abs(a - b) for a, b in zip(theirs.losses, unclipped.losses, strict=True)) > 1e-4


def by_fabric(strategy, path=None, *, load=None):
    """Losses, norms and the model of a run of Fabric."""
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if load is not None:
        fabric.load(load, state)
    losses, norms = [], []
    batches = list(fabric.setup_dataloaders(data()))
    for batch in batches[state["step"] : state["step"] + 3]:
        with fabric.no_backward_sync(model):
            fabric.backward(model(batch))
        loss = model(batch.flip(1))
        fabric.backward(loss)
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state["step"] += 1
    if path is not None:
        fabric.save(path, state)
    return losses, norms, model


@case
def fabric_takes_ddps_steps_and_its_norms():
    losses, norms, _ = by_fabric("ddp")
    with redirect():
        ours, our_norms, model = by_fabric(FabricOnCpu(auto_wrap_policy={LAYER}))
    assert isinstance(model._forward_module, FSDP)
    assert_close(ours, losses)
    assert_close(our_norms, norms)


@case
def fabric_saves_and_loads_both_kinds():
    by_fabric("ddp", directory / "fabric-ddp.ckpt")
    losses, norms, _ = by_fabric("ddp", load=directory / "fabric-ddp.ckpt")
    for kind in ("full", "sharded"):
        path = directory / f"fabric-{kind}.ckpt"
        with redirect():
            by_fabric(FabricOnCpu(auto_wrap_policy={LAYER}, state_dict_type=kind), path)
            ours, our_norms, _ = by_fabric(FabricOnCpu(auto_wrap_policy={LAYER}, state_dict_type=kind), load=path)
        assert path.is_dir() == (kind == "sharded")
        assert_close(ours, losses)
        assert_close(our_norms, norms)


@case
def torchs_own_names_are_back():
    import torch.distributed.fsdp as names  # noqa: PLC0415

    assert names.FullyShardedDataParallel is TorchFSDP


def main():
    global directory
    options = parse(CASES, __doc__)
    directory = options.directory
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    fullshard.init(timeout_s=100)
    print_result(run_checks(CASES, options.only))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
