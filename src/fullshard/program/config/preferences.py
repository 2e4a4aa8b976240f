"""Settings that training on preferences refuses, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullshard.program.config.data import DataConfig
from fullshard.program.config.model import ModelConfig
from fullshard.program.config.training import TrainingConfig
from fullshard.program.metrics import METRICS, REWARDS

_OF_PAIRS: Mapping[str, tuple[str, Any, str]] = {
    "per_device_train_batch_tokens": (
        "training",
        None,
        "batches are pairs: set training.per_device_train_batch_size to a number of them",
    ),
    "label_smoothing_factor": ("training", 0.0, "it changes the cross-entropy, of which this loss is none"),
    "z_loss": ("training", 0.0, "it changes the cross-entropy, of which this loss is none"),
    "streaming": ("data", False, "pairs are tokenized before training"),
    "weight_column": ("data", None, "each pair counts once"),
    "target_lists": ("data", "references", "a pair has one chosen completion"),
}
"""Options with the only value that preferences take, and why."""

_OF_ONE: Mapping[str, tuple[str, ...]] = {
    "beta": ("dpo", "ipo", "simpo", "orpo", "kto"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Options with the objectives that have them."""


def require_objective(training: TrainingConfig, data: DataConfig, model: ModelConfig, tables: str) -> None:
    """Raise ValueError if settings contradict ``training.objective``."""
    objective = training.objective
    for name, objectives in _OF_ONE.items():
        if training.given(name) and objective not in objectives:
            raise ValueError(f"training.{name} needs training.objective: {' or '.join(objectives)}; got {objective}")
    if objective in ("sft", "kto") and data.rejected_column is not None:
        raise ValueError(
            f"data.rejected_column is for pairs of completions: set training.objective, such as dpo; got {objective}"
        )
    if objective == "sft":
        if data.label_column is not None:
            raise ValueError(
                "data.label_column says which completions are better, which training.objective: kto, dpo, ipo, simpo "
                "and orpo learn from; got sft. Set one of them, or leave it out"
            )
        return
    _require_rows(training, data)
    if tables == "home":
        raise ValueError(
            f"sharding.tables: home sends tokens to the output layer's rows, which training.objective: {objective} "
            "cannot use. Set sharding.tables: gather, or leave it out"
        )
    adapter = model.adapter
    if adapter is not None and adapter.type in ("prompt", "prefix") and training.preference_has_reference:
        raise ValueError(
            f"model.adapter.type: {adapter.type} changes the model before it is trained, and the reference of "
            f"training.objective: {objective} is the model at the start. Use lora, or objective simpo or orpo"
        )


def _require_rows(training: TrainingConfig, data: DataConfig) -> None:
    """Raise ValueError if rows, or how they are batched, are not those of preferences."""
    if training.objective == "kto" and data.sets:
        raise ValueError("data.sets cannot be used with training.objective: kto: its reference point is of one set")
    for name, (section, value, why) in _OF_PAIRS.items():
        given = [getattr(one, name) for one in ([training] if section == "training" else data.parts.values())]
        if any(one != value for one in given):
            raise ValueError(f"{section}.{name} cannot be used with training.objective: {training.objective}: {why}")
    odd = next((one.format for one in data.parts.values() if one.format in ("wikihow", "phrasebank")), None)
    if odd is not None:
        raise ValueError(f"data.format: {odd} has no preferences, which training.objective: {training.objective} needs")


def require_metrics(training: TrainingConfig, metrics: tuple[str, ...]) -> None:
    """Raise ValueError if metrics are not those of ``training.objective``."""
    objective = training.objective
    fitting = [name for name in METRICS if (name in REWARDS) == (objective != "sft")]
    fitting = ["rewards/margins"] if objective == "kto" else fitting  # a label alone is neither right nor wrong
    wrong = [name for name in metrics if name not in fitting]
    if training.eval_strategy == "no" or not wrong:
        return
    raise ValueError(
        f"evaluation has {', '.join(wrong)}, which training.objective: {training.objective} cannot measure: its "
        f"metrics are {', '.join(fitting)}"
    )
