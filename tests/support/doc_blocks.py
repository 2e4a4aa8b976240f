"""Code blocks of the documentation's pages, and a folder with the files that a page's reader has."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.report_run import write_finished
from support.t5_directory import write_t5

ROOT = Path(__file__).parents[2]
BANKING77 = ROOT / "examples" / "data" / "banking77"

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|fails): (?P<value>[^>]+) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_GIVEN_RUN = "<!-- given: a finished run in runs/mine -->"
_GIVEN_FILE = re.compile(r"<!-- given: (\S+) of (\S+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: Line of the page that it begins at.
        language: bash, python, yaml or text.
        title: File that the block is; None: it is run as it is.
        code: Its text.
        not_run: Why it is not run; None: it is.
        exit_code: What its last command ends with.
    """

    line: int
    language: str
    title: str | None
    code: str
    not_run: str | None
    exit_code: int

    def commands(self):
        """The command lines of fullshard in a bash block, each as a list of arguments."""
        for line in self.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "fullshard" in words:
                words = words[words.index("fullshard") + 1 :]
                end = next((i for i, word in enumerate(words) if word in ("|", "||", "&&", "&", ";", ">")), len(words))
                yield words[:end]
                words = words[end:]


def blocks_of(page):
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        mark, value = found["mark"], found["value"]
        yield Block(
            line=text[: found.start("code")].count("\n"),
            language=found["language"],
            title=found["title"],
            code=found["code"],
            not_run=value if mark == "not run" else None,
            exit_code=int(value) if mark == "fails" else 0,
        )


def write_readers_files(folder):
    """Write what the pages take for granted: a tiny T5, three CSV files, conversations, texts, the examples."""
    with (BANKING77 / "train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    _write_rows(folder / "train.csv", rows[::160][:60])
    _write_rows(folder / "held_out.csv", rows[1::1200][:6])
    write_t5(folder / "my-t5", [" ".join(row) for row in rows[:400]])
    _write_talks(folder / "talks.jsonl")
    (folder / "texts").mkdir()
    texts = ["\n".join(text for text, _ in rows[start : start + 20]) for start in range(0, 800, 20)]
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = [[text, label, f"not {label}"] for text, label in rows[::160][:60]]
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "chosen", "rejected"], *pairs])
    (folder / "examples").symlink_to(ROOT / "examples")


def write_given(page, folder):
    """Write what the page itself says is given."""
    text = page.read_text(encoding="utf-8")
    if _GIVEN_RUN in text:
        write_finished(folder / "runs" / "mine")
    for name, other in _GIVEN_FILE.findall(text):
        block = next(block for block in blocks_of(page.parent / other) if block.title == name)
        (folder / name).write_text(block.code)


def run_block(block, folder):
    """Run a block in ``folder``, or write the file that it is; raises AssertionError with its output if it fails."""
    if block.title:
        (folder / block.title).write_text(block.code)
        return
    program = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [*program, "-c", block.code],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    output = f"{block.code}\nexit code {ended.returncode}\n{ended.stdout}{ended.stderr}"
    assert ended.returncode == block.exit_code, output


def _write_talks(path):
    with path.open("w") as file:
        for number in range(60):
            texts = (f"Where is parcel {number}?", "On its way.", "And my refund?", f"Refund {number} is paid.")
            roles = ("user", "assistant") * 2
            turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")


def _write_rows(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows((text, label.replace("_", " ")) for text, label in rows)
