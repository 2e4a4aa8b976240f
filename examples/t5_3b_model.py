"""Save a T5 in the sizes of t5-3b with random weights: ``fullshard launch --nproc_per_node 2 t5_3b_model.py DIR``.

2.85 billion parameters in bf16: 5.7 GB in files of at most 1 GB, and as much memory over both ranks. For trials of
memory and speed where the Hub cannot be reached. The tokenizer is trained on the texts beside this file.
"""

import csv
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

import fullshard

SIZES = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "num_layers": 24, "vocab_size": 32128}


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer with T5's special tokens; on any rank the same."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    pieces.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def main() -> None:
    """Make the tokenizer and the model, which are written a unit at a time."""
    directory = Path(sys.argv[1])
    with (Path(__file__).parent / "data" / "banking77" / "train.csv").open(newline="", encoding="utf-8") as file:
        texts = [cell for row in csv.reader(file) for cell in row]
    tokenizer = train_tokenizer(texts, 2000)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**SIZES, decoder_start_token_id=0)).bfloat16()
    fullshard.init()
    torch.manual_seed(0)
    fullshard.save(fullshard.fully_shard(model), directory, tokenizer=tokenizer, max_shard_size="1GB")
    fullshard.shutdown()


if __name__ == "__main__":
    main()
