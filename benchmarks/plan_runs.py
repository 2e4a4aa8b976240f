"""Run files whose plans are compared with their steps on real CPU ranks: the program's half of ``plan.py``."""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from fullshard.core.comm import Comm
from fullshard.program.config import RunConfig, load_run
from fullshard.program.data import Batch, steps
from fullshard.program.models import Objective, train_tokenizer
from fullshard.program.train.evaluation.evaluate import evaluate
from fullshard.program.train.run.assemble import Assembly, assemble
from fullshard.program.train.run.step import StepSpec, issue_step
from fullshard.program.train.run_plan import largest_steps, plan_prepared
from fullshard.program.train.setup.prepare import prepare

Mark = Callable[[str], None]
"""Says that a phase begins."""

EVALUATION = "evaluation"
"""The phase of a plan's evaluation of the loss."""

ROWS = 40
LORA = {"type": "lora", "r": 8}
_SETTINGS = {"eval_strategy": "no", "learning_rate": 1e-4, "num_train_epochs": 1}


def words(count: int, start: int) -> str:
    """Return ``count`` words, the same for the same arguments."""
    drawn = random.Random(start)
    return " ".join(f"w{drawn.randrange(200)}" for _ in range(count))


@cache
def files(make: Callable[[], PreTrainedModel]) -> Path:
    """Write rows, a tokenizer and a model's directory once, and return where; before ranks are forked."""
    directory = Path(tempfile.mkdtemp(prefix="planned-"))
    drawn = random.Random(0)
    pairs = [(words(drawn.randint(4, 60), 2 * row), words(drawn.randint(2, 24), 2 * row + 1)) for row in range(ROWS)]
    table = "source,target\n" + "".join(f"{source},{target}\n" for source, target in pairs)
    (directory / "train.csv").write_text(table)
    torch.manual_seed(0)
    make().save_pretrained(directory / "model")
    train_tokenizer([text for pair in pairs for text in pair], 600).save_pretrained(directory / "model")
    return directory


@dataclass(frozen=True)
class Run:
    """One planned and measured run file."""

    model: str
    make: Callable[[], PreTrainedModel] = field(repr=False)
    ranks: int = 2
    training: tuple[tuple[str, Any], ...] = ()
    sharding: tuple[tuple[str, Any], ...] = ()
    adapter: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()  # of the model's section
    evaluates: bool = False
    ranks_each: None = None

    @property
    def name(self) -> str:
        """What differs from the defaults."""
        given = [f"{key}={value}" for key, value in (*self.training, *self.sharding, *self.adapter, *self.options)]
        given += ["evaluates"] if self.evaluates else []
        return " ".join(["run", self.model, f"{self.ranks}r", *given])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as they go into the results."""
        return {key: value for key, value in asdict(self).items() if key not in ("make", "ranks_each")}

    @property
    def config(self) -> RunConfig:
        """The run file."""
        directory = files(self.make)
        model: dict[str, Any] = {"path": str(directory / "model"), **dict(self.options)}
        if self.adapter:
            model["adapter"] = dict(self.adapter)
        data = {"train_file": str(directory / "train.csv"), "cache_dir": str(directory / "cache")}
        values = {
            "output_dir": str(directory / "out"),
            "model": model,
            "data": {**data, "source_column": "source", "target_column": "target", "max_source_length": 128},
            "training": {**_SETTINGS, **dict(self.training)},
            "sharding": dict(self.sharding),
        }
        if self.evaluates:
            values["data"]["validation_fraction"] = 0.2
            values["training"]["eval_strategy"] = "epoch"
            values["evaluation"] = {"metric": "perplexity"}
        path = directory / f"{abs(hash(self))}.yaml"
        if not path.exists():  # planned before ranks are forked, which read it at once
            path.write_text(yaml.safe_dump(values))
        return load_run(path, [])

    def predict(self) -> dict[str, Any]:
        """Plan the run; its tokens are in the cache afterwards."""
        return plan_prepared(self.config, prepare(self.config), self.ranks).as_dict()

    def build(self, axes: Sequence[Comm]) -> tuple[Any, list[Callable[[Mark], None]]]:
        """Return the model and its steps: thrice the largest, or of batches of all sizes the run's epoch, twice."""
        config, comm = self.config, axes[0]
        data = prepare(config)
        parts = assemble(config, comm, data)
        parts.model.train()
        given = largest_steps(config, data, comm.size) * 3
        if config.training.packing or config.training.per_device_train_batch_tokens is not None:
            spec = replace(parts.collate, packed=config.training.packing)
            given = [*steps(data.train_set, parts.plan, comm.rank, spec)] * 2
        made = [partial(_step, parts, batches) for batches in given]
        return parts.model, [*made, *([partial(_evaluate, parts)] if self.evaluates else [])]


def _step(parts: Assembly, batches: list[Batch], mark: Mark) -> None:
    mark("forward")
    training, causal = parts.config.training, parts.collate.causal
    objective = Objective(training.label_smoothing_factor, training.z_loss)
    spec = StepSpec(1, 0.0, 1e-4, training.max_grad_norm, causal, objective=objective, router_loss=parts.router_loss)
    issue_step(parts.model, parts.optimizer, batches, parts.comm, spec, parts.scaler).report()


def _evaluate(parts: Assembly, mark: Mark) -> None:
    mark(EVALUATION)
    assert parts.evaluation is not None, "its run has held-out rows"
    evaluate(parts.model, parts.tokenizer, parts.evaluation, parts.comm, step=1, epoch=1.0)
