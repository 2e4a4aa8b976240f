"""``fullshard launch``: runs a user's script as ranks, on one machine or several."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from fullshard.compat.accelerate_config.file import AccelerateFile
from fullshard.compat.accelerate_config.options import (
    add_options,
    bare_environment,
    environment_of,
    launch_environment,
    launch_warnings,
    read_settings,
    spellings,
    warnings_of,
)
from fullshard.errors import ConfigError
from fullshard.program.cli.common import add_json, load_program, positive, whole_number
from fullshard.program.launch import choose_nproc, gpu_count
from fullshard.program.launch.messages import say
from fullshard.program.launch.script.machines import (
    MachineSettings,
    Nodes,
    parse_endpoint,
    plan_machines,
    slurm_settings,
)
from fullshard.program.launch.streams import guard_streams

PROGRAM = "fullshard.program.launch.script.run"

SUMMARY = "run your own script as ranks, on one machine or several"

DESCRIPTION = """\
Run a script as ranks, one per GPU (or 2 on the CPU), with torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. Put options before the script; everything after it is passed to the script.

On one machine each output line is prefixed with its rank. When a rank fails, the others are ended, the traceback of the
rank that failed first is printed last, and its exit code is returned (128 + n for signal n). Ctrl-C and SIGTERM end all
ranks; those of fullshard train save first, and the exit code is 75.

On several machines, start the same command on each, with its own --node_rank; they meet at machine 0 (--rdzv_endpoint),
and torchrun's agent starts and restarts the ranks. Under Slurm, srun --ntasks-per-node=1 fullshard launch ... needs
neither option. The command line overrides the file, the file overrides Slurm.

The options of accelerate launch work as well, before the script: --mixed_precision, --use_fsdp, --fsdp_*, --dynamo_*,
--parallelism_config_*, --cpu, --gpu_ids, --debug, --num_cpu_threads_per_process. They override the file.
"""

EPILOG = """\
examples:
  fullshard launch script.py --epochs 3
  fullshard launch --config_file fsdp.yaml --nproc_per_node 4 script.py --epochs 3
  fullshard launch --num_processes 4 --mixed_precision bf16 --use_fsdp --fsdp_version 2 script.py --epochs 3
  fullshard launch -m package.module --epochs 3
  fullshard launch --nnodes 2 --node_rank 0 --rdzv_endpoint node0:29500 script.py    (and --node_rank 1 on the other)
  srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 fullshard launch script.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.usage = "fullshard launch [options] SCRIPT [args ...]"
    parser.allow_abbrev = False
    parser.add_argument(
        "--config_file", "--config-file", metavar="F", type=Path, help="Accelerate's configuration file"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--nproc_per_node", "--nproc-per-node", metavar="N", type=_nproc, help="ranks on this machine: a number, or gpu"
    )
    ranks.add_argument(*spellings("num_processes"), metavar="N", type=positive, help="ranks on all machines together")
    _add_machines(parser)
    parser.add_argument(
        "--max_restarts",
        "--max-restarts",
        metavar="N",
        type=_count,
        default=0,
        help="how many times to restart all ranks after one has failed (default 0)",
    )
    add_json(parser, help="print the outcome as JSON; the ranks' output goes to stderr")
    here = "--rdzv_timeout SECONDS"
    rdzv_conf: list[str] = spellings("rdzv_conf")
    parser.add_argument(*rdzv_conf, nargs="?", action=_OtherLaunchersOption, const=here, help=argparse.SUPPRESS)
    add_options(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", metavar="args", nargs=argparse.REMAINDER, help="arguments of the script")


def _add_machines(parser: argparse.ArgumentParser) -> None:
    """Add the options for several machines."""
    parser.add_argument(
        "--nnodes",
        *spellings("num_machines"),
        metavar="N",
        type=_nodes,
        help="number of machines (default 1), or MIN:MAX",
    )
    parser.add_argument(
        *spellings("node_rank"),
        *spellings("machine_rank"),
        metavar="K",
        type=_count,
        help="number of this machine, from 0",
    )
    parser.add_argument(
        "--rdzv_endpoint",
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where machines meet: machine 0 and a free port there (default 29500)",
    )
    parser.add_argument(
        *spellings("main_process_ip"), *spellings("master_addr"), metavar="HOST", help="the same, without the port"
    )
    parser.add_argument(
        *spellings("main_process_port"), *spellings("master_port"), metavar="PORT", type=_count, help="the port alone"
    )
    parser.add_argument(
        "--rdzv_backend",
        "--rdzv-backend",
        metavar="NAME",
        help="torch's: static, or c10d, the default with --max_restarts or MIN:MAX machines",
    )
    parser.add_argument("--rdzv_id", "--rdzv-id", metavar="ID", help="distinguishes runs with the same endpoint")
    parser.add_argument(
        "--rdzv_timeout",
        "--rdzv-timeout",
        metavar="S",
        type=positive,
        default=600,
        help="seconds to wait for all machines (default 600)",
    )


class _OtherLaunchersOption(argparse.Action):
    """An option of another launcher; its error names the equivalent here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is an option of another launcher; here it is {self.const}")


def _nproc(text: str) -> int:
    """Parse a number of ranks; ``gpu`` is the number of GPUs."""
    if text != "gpu":
        try:
            return positive(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; or gpu: one rank per GPU of this machine") from None
    if not gpu_count():
        raise argparse.ArgumentTypeError("this machine has no GPU; give a number")
    return gpu_count()


def _nodes(text: str) -> Nodes:
    try:
        return Nodes.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, at least 1; got {text!r}") from None


def _count(text: str) -> int:
    """Parse a whole number of at least 0."""
    return whole_number(text, least=0)


def run(options: argparse.Namespace) -> int:
    """Run the script's ranks on this machine."""
    guard_streams(outlived=True)
    path = Path(options.script)
    if not options.module and path.is_dir():
        raise ConfigError(f"{path} is a directory. Give a script, or -m and the name of a module.")
    if not options.module and not path.is_file():
        raise ConfigError(f"There is no script {path} (looked in {Path.cwd()}). Put options before the script.")
    file = read_settings(options.config_file, options)
    settings = bare_environment(os.environ) if file is None else launch_environment(file)
    environment = environment_of(options) | settings
    for warning in [*warnings_of(options), *(() if file is None else [*file.warnings, *launch_warnings(file)])]:
        say(warning)
    use_cpu = file is not None and file.use_cpu
    if use_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # fullshard.init() uses the GPUs that a rank can see
    if "CUDA_VISIBLE_DEVICES" in environment:  # set before GPUs are counted
        os.environ["CUDA_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"]
    sources = [_of_command_line(options), _of_file(file), slurm_settings(os.environ)]
    choose = (lambda n: n or 2) if use_cpu else choose_nproc
    plan = plan_machines([source for source in sources if source], choose, restarts=options.max_restarts > 0)
    program = load_program(PROGRAM)
    outcome = program.run_script(
        program.Job(
            arguments=["module" if options.module else "script", options.script, *options.arguments],
            plan=plan,
            environment=environment,
            max_restarts=options.max_restarts,
            timeout_s=float(options.rdzv_timeout),
            as_json=options.json,
        )
    )
    if options.json:
        print(json.dumps(outcome.as_dict()), flush=True)
    return outcome.exit_code


def _of_command_line(options: argparse.Namespace) -> MachineSettings:
    host, port = options.main_process_ip, options.main_process_port
    if options.rdzv_endpoint is not None:
        if host is not None or port is not None:
            raise ConfigError(
                f"--rdzv_endpoint {options.rdzv_endpoint} is where machines meet, and so are --main_process_ip and "
                "--main_process_port. Give one of them."
            )
        host, port = parse_endpoint(options.rdzv_endpoint)
    return MachineSettings(
        "the command line",
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        nproc=options.nproc_per_node,
        processes=options.num_processes,
        host=host,
        port=port,
        backend=options.rdzv_backend,
        run_id=options.rdzv_id,
    )


def _of_file(file: AccelerateFile | None) -> MachineSettings | None:
    """Return the settings that the file contains, without defaults for missing keys."""
    if file is None:
        return None
    machines = Nodes(file.num_machines, file.num_machines) if "num_machines" in file.raw else None
    return MachineSettings(
        str(file.path),
        nnodes=machines,
        node_rank=file.machine_rank if "machine_rank" in file.raw else None,
        processes=file.num_processes,
        host=file.main_process_ip,
        port=file.main_process_port,
        backend=file.rdzv_backend if "rdzv_backend" in file.raw else None,
    )
