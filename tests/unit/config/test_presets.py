"""The run files in examples/ hold valid settings and read the data they speak of, in the form it is shipped in."""

import json
import shutil
from pathlib import Path

import pytest

from fullshard.errors import ConfigError
from fullshard.program.config import load_run
from fullshard.program.data import read_split
from fullshard.program.train.setup.prepare import source_spec

EXAMPLES = Path(__file__).parents[3] / "examples"
PRESETS = ("answers_t5", "banking77_tiny", "causal_sft", "phrasebank_lora", "preferences_t5", "scitldr_t5")
PRESETS += ("t5_3b_qlora", "wikihow_t5")

ARTICLE = "Some words. " * 20
PAPER = json.dumps({"source": ["One.", "Two."], "target": ["First.", "Second."], "paper_id": "p", "title": "t"}) + "\n"
FILES = {
    "answers_t5": {"preferences/answers.csv": "prompt,answer\na,b\n"},
    "preferences_t5": {
        "preferences/train.csv": "prompt,chosen,rejected\na,b,c\n",
        "preferences/held_out.csv": "prompt,chosen,rejected\na,b,c\n",
    },
    "banking77_tiny": {"banking77/train.csv": "text,category\na,b\n", "banking77/test.csv": "text,category\na,b\n"},
    "causal_sft": {
        "instructions.jsonl": "".join(
            json.dumps({"instruction": f"do {n}", "input": "", "output": "done"}) + "\n" for n in range(200)
        )
    },
    "phrasebank_lora": {
        "phrasebank/Sentences_AllAgree.txt": "".join(f"Sales rose {n} % .@positive\n" for n in range(50))
    },
    "t5_3b_qlora": {"banking77/train.csv": "text,category\na,b\n", "banking77/test.csv": "text,category\na,b\n"},
    "scitldr_t5": {"scitldr/train.jsonl": PAPER, "scitldr/dev.jsonl": PAPER},
    "wikihow_t5": {
        "wikihow/wikihowAll.csv": "headline,title,text\n" + "".join(f"Do.,How to {n},{ARTICLE}\n" for n in range(200))
    },
}
SOURCES = {
    "answers_t5": ("a", ("b",)),
    "preferences_t5": ("a", ("b",)),
    "banking77_tiny": ("a", ("b",)),
    "causal_sft": ("do ", ("done",)),
    "phrasebank_lora": ("Sales rose ", ("positive",)),
    "scitldr_t5": ("One. Two.", ("First.", "Second.")),
    "t5_3b_qlora": ("a", ("b",)),
    "wikihow_t5": (ARTICLE, ("Do.",)),
}


def test_these_are_all_of_them():
    assert sorted(path.stem for path in EXAMPLES.glob("*.yaml")) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_its_data(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path)
    for place, content in FILES[name].items():
        (tmp_path / "data" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / place).write_text(content)
    (tmp_path / "runs/answers").mkdir(parents=True)
    config = load_run(tmp_path / f"{name}.yaml")
    evaluates = config.training.eval_strategy != "no"
    assert config.data.holds_out or not evaluates
    spec = source_spec(config.data, config.training.objective)
    source, references = SOURCES[name]
    for split in ("train", "validation")[: 1 + config.data.holds_out]:
        example = read_split(spec, split).examples[0]
        assert example.source.startswith(source)
        assert example.references == references


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_without_its_data_names_each_missing_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path / f"{name}.yaml")
    for place in FILES[name]:
        assert f"{tmp_path / 'data' / place}" in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_starts_with_what_it_is_and_its_command(name):
    text = (EXAMPLES / f"{name}.yaml").read_text()
    head = text.partition("\noutput_dir:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"#   fullshard train examples/{name}.yaml" in head.splitlines()
