"""``--config_file``: a configuration file of Accelerate beside a run file, for verbs that read one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fullshard.compat.accelerate_config.file import AccelerateFile, read_accelerate_file
from fullshard.compat.accelerate_config.translate import Setting, nested, translate
from fullshard.config import load_run
from fullshard.errors import ConfigError
from fullshard.launch import launched_elsewhere


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """The argument of a verb that also takes a configuration file of Accelerate."""
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        type=Path,
        help="Accelerate's configuration file (YAML): its sharding, precision and ranks are the run's",
    )


def file_overrides(options: argparse.Namespace) -> list[str]:
    """What ``--config_file`` sets, as overrides of the run file; [] without one.

    What has no effect is said on standard error, once: by the launching process, or by rank 0 under torchrun. GPUs that
    the file leaves out are hidden from this process and those that it starts.

    Args:
        options: The parsed command line: ``config``, ``overrides`` and ``config_file``.

    Raises:
        ConfigError: The file is wrong, or says something else than the run file or an override does.
    """
    if options.config_file is None:
        return []
    file = read_accelerate_file(options.config_file)
    translation = translate(file)
    settings = dict(translation.settings)
    warnings = list(translation.warnings)
    if launched_elsewhere():
        warnings += _leave_ranks(file, settings)
    _require_agreement(options.config, options.overrides, file, settings)
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            print(f"fullshard: warning: {warning}", file=sys.stderr, flush=True)
    _hide_gpus(file)
    return [f"{key}={json.dumps(setting.value)}" for key, setting in settings.items()]


def require_one_machine(options: argparse.Namespace) -> None:
    """Refuse to start the ranks of one machine where the file is for several.

    Raises:
        ConfigError: It is.
    """
    if options.config_file is None:
        return
    file = read_accelerate_file(options.config_file)
    if file.num_machines == 1:
        return
    raise ConfigError(
        f"{file.said('num_machines')} in {file.where('num_machines')}: fullshard train by itself starts ranks on this "
        "machine only. Run on every machine, each with its own machine_rank in its file:\n"
        f"  fullshard launch --config_file {file.path} -m fullshard.cli.main train {options.config} "
        f"--config_file {file.path}"
    )


def _leave_ranks(file: AccelerateFile, settings: dict[str, Setting]) -> list[str]:
    """Take out the number of ranks, which are there already; a warning where the file has another one."""
    settings.pop("nproc", None)
    started = int(os.environ["WORLD_SIZE"])
    if file.num_processes in (None, started):
        return []
    return [f"{file.said('num_processes')} in {file.where('num_processes')}, has no effect: {started} ranks are there"]


def _require_agreement(
    run_file: Path, overrides: Sequence[str], file: AccelerateFile, settings: dict[str, Setting]
) -> None:
    """Refuse two files that say different things.

    Raises:
        ConfigError: They do; all of it in one message.
    """
    given = load_run(run_file, overrides, under=nested(settings)).as_flat()
    problems = [
        f"  {key}: {json.dumps(given[key])} in the run file or its overrides, and {setting.said} in "
        f"{file.where(setting.origin)}, which is {key}: {json.dumps(setting.value)}"
        for key, setting in settings.items()
        if given[key] != setting.value
    ]
    if problems:
        raise ConfigError(
            "\n".join(
                [
                    f"{run_file} and {file.path} say different things. Let them say the same, or leave it out of one:",
                    *problems,
                ]
            )
        )


def _hide_gpus(file: AccelerateFile) -> None:
    """Show the GPUs that the file names only, to this process and its children, before anybody has looked."""
    if file.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif file.gpu_ids is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = file.gpu_ids
