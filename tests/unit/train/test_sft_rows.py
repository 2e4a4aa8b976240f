"""Conversations give the token ids, labels and loss of TRL's SFTTrainer on the same rows."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.program.data import (
    CollateSpec,
    RowRef,
    SourceSpec,
    TokenizeSpec,
    add_plain_template,
    collate,
    read_split,
    tokenize,
)
from fullshard.program.train.setup.model import loss_sum
from support.trained_tokenizer import byte_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

MARKED = (
    "<s>{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def talk(number):
    """A conversation of one to three answers, with a system turn in every other and a tool's in every third."""
    turns = [{"role": "system", "content": f"Be brief {number}."}] if number % 2 else []
    for answer in range(1 + number % 3):
        turns.append({"role": "user", "content": f"What is {number} + {answer}?"})
        if number % 3 == 0:
            turns.append({"role": "assistant", "content": f"add({number}, {answer})"})
            turns.append({"role": "tool", "content": str(number + answer)})
        turns.append({"role": "assistant", "content": f"It is {number + answer}."})
    return turns


def case(kind):
    """Rows, the tokenizer, and TRL's options."""
    tokenizer = byte_tokenizer()
    talks = [talk(number) for number in range(8)]
    if kind == "messages":
        tokenizer.chat_template = MARKED
        return [{"messages": one} for one in talks], tokenizer, {"assistant_only_loss": True}
    rows = [{"prompt": one[:-1], "completion": one[-1:]} for one in talks]
    if kind == "marked completion":
        tokenizer.chat_template = MARKED
        return rows, tokenizer, {"assistant_only_loss": True}
    if kind == "completion":
        tokenizer.chat_template = UNMARKED
    else:
        add_plain_template(tokenizer)
    return rows, tokenizer, {}


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["messages", "completion", "marked completion", "plain completion"])
def test_as_trl(tmp_path, kind):
    rows, tokenizer, options = case(kind)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    examples = read_split(SourceSpec(train_file=path), "train").examples
    tokenized = tokenize(examples, tokenizer, TokenizeSpec(400, 400, causal=True))
    batch = collate([RowRef(row) for row in range(len(rows))], tokenized, CollateSpec(0, causal=True))

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=512, pad_token_id=0, **sizes))
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": [], "max_length": None}
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**settings, per_device_train_batch_size=8, disable_tqdm=True, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    theirs = trainer.data_collator([trainer.train_dataset[row] for row in range(len(rows))])
    assert batch.input_ids_BS.tolist() == theirs["input_ids"].tolist()
    assert batch.labels_BT.tolist() == theirs["labels"].tolist()
    model.eval()
    with torch.no_grad():
        expected = trainer.compute_loss(model, {key: value.clone() for key, value in theirs.items()})
        ours = loss_sum(model, batch, causal=True) / batch.target_tokens
    assert ours.item() == pytest.approx(expected.item(), abs=1e-6)
    assert 0 < batch.target_tokens < batch.attention_mask_BS.sum()
