"""Rows written to files of every format that a run reads."""

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from fullshard.program.data import SourceSpec, read_split

FORMATS = ("rows.jsonl", "rows.json", "rows.parquet", "dataset", "rows.csv")


def write_rows(path, rows, **options):
    """Write rows in the format of the path's suffix, without one as a dataset; cells of CSV are text or JSON."""
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(rows[0])
                texts = ([cell if isinstance(cell, str) else json.dumps(cell) for cell in row.values()] for row in rows)
                writer.writerows(texts)
        case _:
            datasets.Dataset.from_list(rows).save_to_disk(path)
            return SourceSpec(dataset_name=str(path), **options)
    return SourceSpec(train_file=path, **options)


def pairs(table):
    """Return source and target of each row."""
    return [(row.source, row.target) for row in table.examples]


def write(path, content):
    """Write text or bytes as they are."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path, source="text", target="label", **options):
    """Read the training rows of a file."""
    return read_split(SourceSpec(train_file=path, source_column=source, target_column=target, **options), "train")
