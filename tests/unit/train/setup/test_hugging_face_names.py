"""An option with a name of Hugging Face's does what theirs does, or its documentation says what differs."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Seq2SeqTrainingArguments, Trainer

from fullshard.program.config import EvaluationConfig, RunConfig, TrainingConfig
from fullshard.program.train.setup.choices import advice
from fullshard.program.train.setup.optimizers import make_optimizer
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.steps import learning_rate_schedule, make_plan
from support.tiny_run import settings

THEIRS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments)}
SECTIONS = {"": RunConfig, "training.": TrainingConfig, "evaluation.": EvaluationConfig}
ALIKE = [
    (prefix + name, section.model_fields[name], THEIRS[name])
    for prefix, section in SECTIONS.items()
    for name in section.model_fields
    if name in THEIRS and name != "output_dir"
]
UNSET = {"max_steps": -1, "gradient_checkpointing": None, "report_to": "none", "push_to_hub": False}
"""Values with which theirs says that an option is not set."""


@pytest.mark.parametrize(("name", "ours", "theirs"), ALIKE, ids=[name for name, *_ in ALIKE])
def test_a_default_is_theirs_or_the_documentation_says_so(name, ours, theirs):
    leaf = name.rpartition(".")[2]
    unset = not ours.default and leaf in UNSET and theirs.default == UNSET[leaf]
    assert ours.default == theirs.default or unset or "Hugging Face" in ours.description


@pytest.mark.parametrize(("name", "value"), [("max_steps", -1), ("max_grad_norm", 0), ("push_to_hub", False)])
def test_an_option_may_be_unset_as_theirs_is(name, value):
    assert getattr(TrainingConfig(**{name: value}), name) is None


def test_true_is_no_repository():
    with pytest.raises(ValueError, match="ada/my-t5; got true"):
        TrainingConfig(push_to_hub=True)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Returns their Trainer for arguments; the data does not matter."""

    def make(**more):
        directory = str(tmp_path_factory.mktemp("theirs"))
        given = Seq2SeqTrainingArguments(output_dir=directory, use_cpu=True, **more)
        return Trainer(torch.nn.Linear(1, 1), given)

    return make


@pytest.mark.parametrize("epochs", [1, 2.5, 3])
@pytest.mark.parametrize("most", [-1, 1, 7, 99])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("warmup", [0, 2, 0.3])
def test_the_number_of_steps_and_of_those_that_warm_up_is_theirs(tmp_path, trainer, epochs, most, accumulation, warmup):
    given = {"num_train_epochs": epochs, "max_steps": most, "gradient_accumulation_steps": accumulation}
    given |= {"per_device_train_batch_size": 4, "warmup_steps": warmup}
    theirs = trainer(**given)
    rows = torch.utils.data.DataLoader(range(25), batch_size=4)
    steps = theirs.set_initial_training_values(theirs.args, rows)[-1]
    config = RunConfig.model_validate(settings(tmp_path, training=given))
    schedule = learning_rate_schedule(config, -(-len(rows) // accumulation))
    assert (schedule.total_steps, schedule.warmup_steps) == (steps, theirs.args.get_warmup_steps(steps))


def test_a_line_says_that_epochs_do_not_count(tmp_path):
    config = RunConfig.model_validate(settings(tmp_path, training__max_steps=99, training__num_train_epochs=3))
    data = prepare(config)
    notes = advice(config, data, make_plan(config, data.train_set, 1, causal=False), 1)
    assert notes[0] == "training.max_steps: 99 steps, 24.75 epochs; training.num_train_epochs=3 does not count"


FEW = ("num_layers", "num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers")
MODELS = ["t5", "bart", "marian", "gpt2", "llama", "qwen3", "gemma2", "mamba", "phi", "opt", "bloom"]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("kind", MODELS)
def test_weight_decay_is_for_their_parameters(tmp_path, trainer, kind, optimizer):
    config = AutoConfig.for_model(kind)
    for name in FEW:
        if hasattr(config, name):
            setattr(config, name, 1)
    with torch.device("meta"):
        make = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = make.from_config(config)
    decayed = set(trainer().get_decay_parameter_names(model))
    given = RunConfig.model_validate(settings(tmp_path, training__weight_decay=0.1, training__optimizer=optimizer))
    names = {param: name for name, param in model.named_parameters() if param.requires_grad}
    ours = [
        {names[param] for param in group["params"]}
        for group in make_optimizer(model, given).param_groups
        if group["weight_decay"]
    ]
    assert set().union(*ours) == decayed & set(names.values())
    assert set(names.values()) - decayed
