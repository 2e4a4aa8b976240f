"""Folders of the two example programs, with small data and a tiny T5 where they look for t5-base."""

import csv
import json
import random
import shutil
from pathlib import Path

from support.t5_directory import write_t5

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = [first + second for first in "blmr" for second in ("a", "el", "in", "oro", "us")]
SENTENCES = {
    "positive": "profit of the company rose to {} million",
    "negative": "profit of the company fell to {} million",
    "neutral": "the company has {} plants",
}


def write_seq2seq(folder):
    """The programs of ``examples/fsdp_seq2seq`` with ``data/wikihowAll.csv``."""
    for path in (EXAMPLES / "fsdp_seq2seq").glob("*.py"):
        shutil.copy(path, folder)
    draw = random.Random(0)
    steps = [[" ".join(draw.choices(WORDS, k=9)) + "." for _ in range(3)] for _ in range(22)]
    (folder / "data").mkdir()
    with (folder / "data" / "wikihowAll.csv").open("w", newline="") as file:
        table = csv.writer(file, quoting=csv.QUOTE_ALL)
        table.writerow(["headline", "title", "text"])
        for number, lines in enumerate(steps):
            summary = "\n" + ",\n".join(" ".join(line.split()[:2]) + "." for line in lines)
            table.writerow([summary, f"How to Do {number}", "\n".join(lines)])
    write_t5(folder / "t5-base", [line for lines in steps for line in lines])


def write_lora(folder):
    """The program of ``examples/accelerate_lora`` with its configuration file and sentences."""
    for name in ("train.py", "fsdp_config.yaml"):
        shutil.copy(EXAMPLES / "accelerate_lora" / name, folder)
    rows = [{"sentence": text.format(n), "label": label} for n in range(10) for label, text in SENTENCES.items()]
    for name, part in {"train": rows[:24], "held_out": rows[24:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    write_t5(folder / "t5-base", [" ".join(row.values()) for row in rows])
