"""``--config_file``: Accelerate's configuration file in addition to a run file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from fullshard.compat.accelerate_config.file import AccelerateFile, read_accelerate_file
from fullshard.compat.accelerate_config.translate import Setting, nested, translate
from fullshard.errors import ConfigError
from fullshard.program.config import load_run
from fullshard.program.launch import launched_elsewhere
from fullshard.program.launch.messages import say


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add ``--config_file`` to a verb that accepts Accelerate's configuration file."""
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        type=Path,
        help="Accelerate's configuration file (YAML) with the run's sharding, precision and ranks",
    )


def file_overrides(options: argparse.Namespace) -> list[str]:
    """Return the settings of ``--config_file`` as overrides of the run file; empty without one.

    Settings without effect are reported on standard error, once: by the launching process, or by rank 0 under torchrun.
    GPUs that the file does not list are hidden from this process and its children.

    Args:
        options: The parsed command line: ``config``, ``overrides`` and ``config_file``.

    Raises:
        ConfigError: The file is invalid, or contradicts the run file or an override.
    """
    if options.config_file is None:
        return []
    file = read_accelerate_file(options.config_file)
    translation = translate(file)
    settings = dict(translation.settings)
    warnings = list(translation.warnings)
    if launched_elsewhere():
        settings.pop("nproc", None)
        started = int(os.environ["WORLD_SIZE"])
        if file.num_processes not in (None, started):
            where = file.where("num_processes")
            warnings.append(f"{file.as_written('num_processes')} in {where}, has no effect: {started} ranks run")
    _require_agreement(options.config, options.overrides, file, settings)
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            say(f"warning: {warning}")
    hidden = "" if file.use_cpu else file.gpu_ids
    if hidden is not None:  # before torch counts GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden
    return [f"{key}={json.dumps(setting.value)}" for key, setting in settings.items()]


def require_one_machine(options: argparse.Namespace) -> None:
    """Refuse to start only this machine's ranks if the file is for several machines.

    Raises:
        ConfigError: The file is for several machines.
    """
    if options.config_file is None:
        return
    file = read_accelerate_file(options.config_file)
    if file.num_machines == 1:
        return
    raise ConfigError(
        f"{file.as_written('num_machines')} in {file.where('num_machines')}: fullshard train starts ranks on this "
        "machine only. Run this on every machine, with its own machine_rank in its file:\n"
        f"  fullshard launch --config_file {file.path} -m fullshard train {options.config} "
        f"--config_file {file.path}"
    )


def _require_agreement(
    run_file: Path, overrides: Sequence[str], file: AccelerateFile, settings: dict[str, Setting]
) -> None:
    """Refuse a run file and a configuration file that contradict each other."""
    given = load_run(run_file, overrides, under=nested(settings)).as_flat()
    problems = [
        f"  {key}: {json.dumps(given[key])} in the run file or its overrides, and {setting.as_written} in "
        f"{file.where(setting.origin)}, which is {key}: {json.dumps(setting.value)}"
        for key, setting in settings.items()
        if given[key] != setting.value
    ]
    if problems:
        raise ConfigError(
            "\n".join(
                [
                    f"{run_file} and {file.path} set different values. Set the same value in both, or only in one:",
                    *problems,
                ]
            )
        )
