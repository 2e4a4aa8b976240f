"""A small run file whose files exist."""

import pytest

RUN = """
output_dir: runs/x
model:
  config: {model_type: t5, d_model: 16}
  tokenizer: {vocab_size: 100}
data:
  train_file: rows/train.csv
  validation_file: rows/test.csv
  source_column: text
  target_column: category
training:
  learning_rate: 2e-3
"""


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("train.csv", "test.csv"):
        (tmp_path / "rows" / name).write_text("text,category\na,b\n")
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path
