"""Settings of preferences: what is chosen for them, and what they refuse by name."""

import pytest
from pydantic import ValidationError

from fullshard.program.config import RunConfig
from fullshard.program.models.preferences import ObjectiveName

BASE = {
    "output_dir": "out",
    "model": {"path": "google/flan-t5-small"},
    "data": {"dataset_name": "me/pairs"},
    "training": {"objective": "dpo"},
}


def config_of(**changes):
    values = {name: dict(one) if isinstance(one, dict) else one for name, one in BASE.items()}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section] = {**values.get(section, {}), key: value} if key else value
    return RunConfig.model_validate(values)


def test_metric_and_output_layers_are_chosen_unless_they_are_set():
    config = config_of()
    assert config.evaluation.metric == "rewards/accuracies"
    assert config.sharding.tables == "gather"
    assert config_of(evaluation__metric="rewards/margins").evaluation.metric == "rewards/margins"
    searched = config_of(sharding="auto").sharding
    assert (searched.auto, searched.tables) == (True, "gather")
    assert RunConfig.model_validate(config.as_plain()) == config, "a recorded run reads itself"
    sft = config_of(training__objective="sft")
    assert (sft.evaluation.metric, sft.sharding.tables) == ("exact_match", "auto")


def test_every_objective_that_is_allowed_has_a_loss():
    allowed = RunConfig.model_fields["training"].annotation.model_fields["objective"].annotation.__args__
    assert set(allowed) == {"sft", *ObjectiveName.__args__}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("training__label_smoothing_factor", 0.1, "training.label_smoothing_factor cannot be used"),
        ("training__z_loss", 0.1, "training.z_loss cannot be used"),
        ("training__per_device_train_batch_tokens", 512, "set training.per_device_train_batch_size to a number of"),
        ("training__simpo_gamma", 1.0, "training.simpo_gamma needs training.objective: simpo; got dpo"),
        ("data__streaming", True, "data.streaming cannot be used"),
        ("data__weight_column", "w", "data.weight_column cannot be used"),
        ("data__target_lists", "join", "data.target_lists cannot be used"),
        ("data", {"sets": {"a": {"dataset_name": "me/a", "weight_column": "w"}}}, "data.weight_column cannot be used"),
        ("data", {"train_file": "x.csv", "format": "phrasebank", "validation_fraction": 0.1}, "phrasebank has no pref"),
        ("sharding__tables", "home", "sharding.tables: home sends tokens"),
        ("evaluation__metrics", ["rougeL"], "evaluation has rougeL, which training.objective: dpo cannot measure"),
        ("training__desirable_weight", 2.0, "training.desirable_weight needs training.objective: kto; got dpo"),
        ("model", {"path": "m", "adapter": {"type": "prompt"}}, "model.adapter.type: prompt changes the model before"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(option, value, message):
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        config_of(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("training__beta", 0.2, "training.beta needs training.objective: dpo or ipo or simpo or orpo or kto; got sft"),
        ("data__rejected_column", "bad", "data.rejected_column is for pairs of completions"),
        ("evaluation__metrics", ["rewards/margins"], "evaluation has rewards/margins, which training.objective: sft"),
    ],
)
def test_options_of_preferences_are_refused_without_them(option, value, message):
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        config_of(training__objective="sft", **{option: value})


def test_labels_are_measured_by_margins_and_have_no_rejected_column():
    config = config_of(training__objective="kto")
    assert (config.evaluation.metric, config.training.preference_has_reference) == ("rewards/margins", True)
    with pytest.raises(ValidationError, match=r"evaluation has rewards/accuracies.*its metrics are rewards/margins"):
        config_of(training__objective="kto", evaluation__metrics=["rewards/accuracies"])
    with pytest.raises(ValidationError, match=r"data\.sets cannot be used with training\.objective: kto"):
        config_of(training__objective="kto", data={"sets": {"a": {"dataset_name": "me/a"}}})
    with pytest.raises(ValidationError, match=r"data\.rejected_column is for pairs of completions.*got kto"):
        config_of(training__objective="kto", data__rejected_column="bad")


def test_a_prompt_adapter_may_be_trained_without_a_reference():
    config = config_of(training__objective="orpo", model={"path": "m", "adapter": {"type": "prompt"}})
    assert config.training.objective == "orpo"
