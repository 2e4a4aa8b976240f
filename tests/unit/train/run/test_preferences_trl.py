"""DPO and KTO of a causal model take the steps of TRL's trainers on the same batches."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.core.testing import run_ranks
from fullshard.program.config import RunConfig
from fullshard.program.train import train
from fullshard.program.train.setup.prepare import prepare
from fullshard.program.train.setup.steps import make_plan
from support.preference_runs import STEPS, pair_settings
from support.tiny_run import Memory
from support.trained_tokenizer import byte_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unmetered"),
    pytest.mark.filterwarnings("ignore"),  # of its libraries
]
PAIRS, EACH = 40, 4
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
WORDS = ("sleep well", "run", "go away now", "no")


def saved_model(directory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, pad_token_id=0, **sizes))
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def tokenizer():
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


def as_turns(rows):
    """Pairs of conversations whose prompts are their common beginnings."""
    sides = [
        [[{"role": "user", "content": row[0]}, {"role": "assistant", "content": text}] for text in row[1:]]
        for row in rows
    ]
    return {"chosen": [one for one, _ in sides], "rejected": [other for _, other in sides]}


def as_texts(rows):
    return dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*rows, strict=True)), strict=True))


def as_labels(rows):
    texts = as_texts(rows)
    labels = [text in WORDS[:2] for text in texts["chosen"]]
    return {"prompt": texts["prompt"], "completion": texts["chosen"], "label": labels}


@pytest.mark.parametrize("form", [as_texts, as_turns, as_labels])
def test_ten_steps_are_those_of_trl(tmp_path, form):
    path, objective = saved_model(tmp_path / "start"), "kto" if form is as_labels else "dpo"
    changes = {"training__per_device_train_batch_size": EACH // 2, "training__objective": objective}
    values = pair_settings(tmp_path, model={"path": path}, **changes)
    chats = {} if form is as_turns else {"separator": "", "chat_template": False}
    values["data"] |= {
        "train_file": str(tmp_path / "train.jsonl"),
        "max_source_length": 40,
        "max_target_length": 20,
    } | chats
    rows = [(f"cats {n} ", WORDS[n % 4], WORDS[(n + 1 + n % 3) % 4]) for n in range(PAIRS)]
    columns = form(rows)
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    config = RunConfig.model_validate(values)
    memory = Memory()
    run_ranks(2, lambda comm: train(config, comm, [memory] if comm.rank == 0 else []))
    plan = make_plan(config, prepare(config).train_set, 2, causal=True)
    order = []
    for step in range(STEPS):
        places = [plan.step_places(step, rank)[0][0] for rank in range(2)]
        order += (np.concatenate(places)[::2] // 2).tolist()
    assert sorted(order) == list(range(PAIRS))
    others = [order.index((row + 1) % PAIRS) for row in order]
    theirs = trained_by_trl(path, form([rows[row] for row in order]), tmp_path / "trl", others)
    for step, logged in zip(memory.steps, theirs[0], strict=True):
        assert step.loss == pytest.approx(logged["loss"], abs=1e-5)
        assert step.rewards == pytest.approx({name: logged[name] for name in step.rewards}, abs=1e-5)
    for name, weight in load_file(config.output_dir / "model.safetensors").items():
        assert torch.allclose(weight, theirs[1][name], atol=1e-5), name


def trained_by_trl(path, columns, directory, others):
    """TRL's records of the steps and its last weights; each step takes the next rows.

    ``others``: with labels, the place of the row whose completion is each row's unrelated one.
    """
    base, settings = (trl.KTOTrainer, trl.KTOConfig) if "label" in columns else (trl.DPOTrainer, trl.DPOConfig)

    class InOrder(base):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

    columns = datasets.Dataset.from_dict(columns)
    arguments = settings(
        output_dir=str(directory),
        beta=0.1,
        per_device_train_batch_size=EACH,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=64,
    )
    model = LlamaForCausalLM.from_pretrained(path)
    trainer = InOrder(model=model, args=arguments, train_dataset=columns, processing_class=tokenizer())
    if "label" in columns.column_names:
        rows = trainer.train_dataset
        unrelated = [rows["completion_ids"][place] for place in others]
        trainer.train_dataset = rows.remove_columns("KL_completion_ids").add_column("KL_completion_ids", unrelated)
    trainer.train()
    return [one for one in trainer.state.log_history if "loss" in one], trainer.model.state_dict()
