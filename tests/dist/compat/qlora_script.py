"""A QLoRA script for Accelerate: bitsandbytes' layers by transformers, LoRA by peft; arguments: model, output."""

import sys

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig


def main():
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    accelerator = Accelerator()
    model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], quantization_config=settings, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, lora_alpha=8)).train()
    rows = [
        {"input_ids": torch.arange(i, i + 8) % 50 + 3, "labels": torch.arange(i, i + 5) % 50 + 3} for i in range(16)
    ]
    loader = DataLoader(rows, batch_size=4 // accelerator.num_processes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean()
        accelerator.print(f"loss {mean.item():.6f}")
    state = accelerator.get_state_dict(model)
    whole = accelerator.unwrap_model(model)
    whole.save_pretrained(sys.argv[2], is_main_process=accelerator.is_main_process, state_dict=state)


if __name__ == "__main__":
    main()
