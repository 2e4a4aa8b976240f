"""Run files made from Accelerate's configuration files, with sections for the user to fill in."""

from __future__ import annotations

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.compat.accelerate_config.keys import as_yaml
from fullshard.compat.accelerate_config.translate import Translation

LEFT = ("output_dir", "model", "data")
"""Required sections of the run file that Accelerate's file has no settings for."""

_TO_FILL_IN = """\
# To fill in: remove the # and set your own values.
# output_dir: runs/mine  # where the run writes its model and its records
# model:
#   path: google-t5/t5-small  # a directory with config.json, weights and tokenizer, or a Hub id
# data:
#   train_file: train.csv  # csv, tsv, jsonl, json or parquet
#   validation_fraction: 0.1  # or validation_file: the rows to measure on
#   source_column: text
#   target_column: label
"""


def run_file_text(file: AccelerateFile, translation: Translation) -> str:
    """Return the run file: settings with their origin, sections to fill in, and warnings as comments."""
    lines = [f"# Made from {file.path} by `fullshard config convert`.", _TO_FILL_IN]
    section = ""
    for key, setting in sorted(translation.settings.items(), key=lambda item: ("." in item[0], item[0])):
        home, _, name = key.rpartition(".")
        if home != section:
            lines.append(f"{home}:")
            section = home
        lines.append(f"{'  ' if home else ''}{name}: {as_yaml(setting.value)}  # {setting.as_written}")
    if translation.warnings:
        lines += ["", "# Not carried over:", *(f"# - {warning}" for warning in translation.warnings)]
    return "\n".join(lines) + "\n"
