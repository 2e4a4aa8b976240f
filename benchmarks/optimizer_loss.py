"""The demo trained with each optimizer: loss and accuracy after the same steps, and the memory of its state.

    python benchmarks/optimizer_loss.py [--out PATH] [--steps N] [--ranks N] [--only NAME,…] [--rate NAME=RATE …]

Runs examples/banking77_tiny.yaml with another `training.optimizer` and, with --rate, another learning rate; weights,
rows and schedule are the same. One evaluation after the last step. The result goes to
benchmarks/results/optimizer_loss.json. Exits with 1 if a run failed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from ranks import RankFailed, on_ranks, reason

from fullshard.core.comm import Comm
from fullshard.program.config import RunConfig, load_run
from fullshard.program.train import train
from fullshard.program.train.dry_run import dry_run
from fullshard.program.train.reporting.reports import StepReport
from fullshard.program.train.setup.prepare import prepare

LATEST = Path(__file__).parent / "results" / "optimizer_loss.json"
DEMO = Path(__file__).parents[1] / "examples" / "banking77_tiny.yaml"
NAMES = ("adamw", "adamw_bf16", "adamw_8bit", "adafactor", "muon")
LAST = 20
TIMEOUT_S = 1800.0

DEFINITIONS = {
    "final_loss": "Training loss of the last step, per target token.",
    "last_loss": f"Mean training loss of the last {LAST} steps.",
    "to_adamw": "last_loss less AdamW's.",
    "held_out_loss, exact_match": "Of the model after the last step, on the held-out rows.",
    "state_bytes": "Optimizer state that each rank holds at the end, in rank order.",
    "foretold_bytes": "What `fullshard config check --dry-run` says of rank 0.",
    "step_seconds": "Median over the steps but the one that is recorded, which is slow on the CPU.",
}


class Steps:
    """A sink that records the steps."""

    def __init__(self) -> None:
        """Start without steps."""
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        """Record a step."""
        self.reports.append(report)

    def __getattr__(self, _: str) -> Any:
        """Ignore all other events of a run."""
        return lambda *_args, **_named: None


def config_of(name: str, options: argparse.Namespace, directory: Path) -> RunConfig:
    """Return the demo's settings with one optimizer."""
    rates = dict(one.split("=") for one in options.rate)
    changes = [
        f"training.optimizer={name}",
        f"output_dir={directory / name}",
        f"training.max_steps={options.steps}",
        f"training.num_train_epochs={options.steps}",
        "training.eval_strategy=steps",
        f"training.eval_steps={options.steps}",
        "training.save_strategy=no",
        "evaluation.num_samples_shown=0",
    ]
    changes += ["training.adam_beta2=null"] if name == "adafactor" else []
    changes += [f"training.learning_rate={rates[name]}"] if name in rates else []
    return load_run(DEMO, changes)


def work(comm: Comm, config: RunConfig) -> dict[str, Any]:
    """Train on one rank and return the figures."""
    steps = Steps()
    sinks: list[Any] = [steps] if comm.rank == 0 else []
    summary = train(config, comm, sinks, prepared=prepare(config))
    if comm.rank:
        return {}
    losses = [report.loss for report in steps.reports]
    return {
        "learning_rate": config.training.learning_rate,
        "final_loss": losses[-1],
        "last_loss": statistics.mean(losses[-LAST:]),
        "held_out_loss": summary.loss,
        "exact_match": summary.value,
        "state_bytes": [rank.optimizer for rank in summary.memory],
        "parameter_bytes": [rank.parameters for rank in summary.memory],
        "step_seconds": statistics.median(report.seconds for report in steps.reports),
        "losses": [round(loss, 5) for loss in losses],
    }


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return every optimizer's figures, and whether all runs succeeded."""
    outcomes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.only.split(","):
            config = config_of(name, options, Path(directory))
            try:
                found = on_ranks(options.ranks, work, config, timeout_s=TIMEOUT_S)[0]
            except RankFailed as error:
                outcomes[name] = {"failed": reason(error)}
                print(f"{name}: failed: {error}", flush=True)
                continue
            found["foretold_bytes"] = dry_run(config, options.ranks).optimizer
            outcomes[name] = found
            print(
                f"{name:11} last loss {found['last_loss']:.4f}, held-out {found['held_out_loss']:.4f}, exact match "
                f"{found['exact_match']:.2%}, state of rank 0 {found['state_bytes'][0]:,} bytes "
                f"({found['foretold_bytes']:,} predicted), {found['step_seconds']:.3f} s a step",
                flush=True,
            )
    well = [one for one in outcomes.values() if "failed" not in one]
    for one in well:
        one["to_adamw"] = one["last_loss"] - outcomes["adamw"]["last_loss"] if "adamw" in outcomes else None
    return outcomes, len(well) == len(outcomes)


def main() -> int:
    """Run the optimizers and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--rate", action="append", default=[], metavar="NAME=RATE")
    options = parser.parse_args()
    outcomes, well = measure(options)
    result = {"steps": options.steps, "ranks": options.ranks, "definitions": DEFINITIONS, "optimizers": outcomes}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
