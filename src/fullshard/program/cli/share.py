"""``fullshard share``: uploads a finished run's model and card to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.errors import ConfigError
from fullshard.program.cli.common import ByteProgress, add_base, add_json, load_program
from fullshard.program.launch.messages import say
from fullshard.sizes import format_bytes

PROGRAM = "fullshard.program.sharing"
EXPORT = "fullshard.state.saving.export"

MERGED_NAME = "merged.tmp"
"""Directory inside the run's for the model that --merge writes; deleted afterwards."""

SUMMARY = "upload a finished run to the Hugging Face Hub"

DESCRIPTION = """\
Upload a finished run's model and its card to the Hugging Face Hub.

RUN is the run's output_dir. First prints what will be uploaded: files, bytes, licence. The repository is created if
there is none. Everything is uploaded in one commit: the repository is either unchanged or complete, even if this
command is killed. If it is run again, files that have arrived are not sent again. A run with an adapter uploads the
adapter. Data, checkpoints and logs are not uploaded. The card is written anew without its samples, which are
texts of held-out rows. The token is that of HF_TOKEN or of `hf auth login`, and is never printed.
"""

EPILOG = """\
examples:
  fullshard share runs/mine --repo ada/my-t5 --dry-run     # only prints what would be uploaded; needs no network
  fullshard share runs/mine --repo ada/my-t5 --private
  fullshard share runs/lora --repo ada/my-llama --merge    # the base model with the adapter merged into it

training.push_to_hub: ada/my-t5 in the run file does it at the end of training.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="output_dir of a finished run")
    parser.add_argument("--repo", metavar="OWNER/NAME", required=True, help="repository on the Hub")
    parser.add_argument("--private", action="store_true", help="create the repository as private; refuse a public one")
    parser.add_argument("--dry-run", action="store_true", help="print what would be uploaded, and upload nothing")
    parser.add_argument(
        "--merge", action="store_true", help="LoRA: the base model with the adapter merged into it, not the adapter"
    )
    add_base(parser)
    parser.add_argument("--with-samples", action="store_true", help="keep the card's samples, texts of held-out rows")
    parser.add_argument(
        "--with-data", action="store_true", help="upload the data files and the predictions too, and keep the samples"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Print what is uploaded, and upload it; one process."""
    program = load_program(PROGRAM)
    program.require_repo(options.repo)
    with _merged(program, options) as merged:
        contents = program.contents_of(
            options.run_directory, options.repo, samples=options.with_samples, data=options.with_data, merged=merged
        )
        tell = say if options.json else print
        for line in _described(contents, options):
            tell(line)
        values = {"repo": options.repo, "private": options.private, **contents.as_dict()}
        if options.dry_run:
            values["dry_run"] = True
        else:
            title = f"Model of {options.run_directory.resolve().name}"
            wanted = program.Upload(options.repo, contents.files, title, options.private)
            done = program.upload(wanted, progress=sys.stderr.isatty())
            values |= done.as_dict()
            for name in done.deleted:
                tell(f"deleted there, not part of this model: {name}")
            tell(f"{'uploaded to' if done.changed else 'already up to date:'} {done.url}")
    if options.json:
        print(json.dumps(values))


@contextmanager
def _merged(program: ModuleType, options: argparse.Namespace) -> Iterator[Path | None]:
    """Yield a directory of the run with the merged model if ``--merge`` is set; it is deleted afterwards."""
    if not options.merge:
        if options.base is not None:
            raise ConfigError("--base is for --merge, which reads the base model. Add --merge, or leave --base out.")
        yield None
        return
    export = load_program(EXPORT)
    program.require_finished(options.run_directory)
    checkpoint = export.choose_checkpoint(options.run_directory)
    target = options.run_directory / MERGED_NAME
    shutil.rmtree(target, ignore_errors=True)  # left by a killed command
    try:
        with ByteProgress("merging") as progress:
            export.export(checkpoint, target, export.ExportOptions(lora="merge", base=options.base), progress)
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _described(contents: Any, options: argparse.Namespace) -> list[str]:
    kind = "private" if options.private else "public"
    verb = "would upload" if options.dry_run else "uploading"
    size = f"{len(contents.files)} files, {format_bytes(contents.nbytes)}"
    lines = [f"{verb} to {options.repo} ({kind}, if it does not exist yet): {size}"]
    if options.private:
        lines = [f"{verb} to {options.repo} (private): {size}"]
    lines += [f"  {file.name:<40} {format_bytes(file.nbytes):>12}" for file in contents.files]
    lines += [f"licence: {'; '.join(contents.licences)}"]
    return [*lines, *(f"note: {note}" for note in contents.notes)]
