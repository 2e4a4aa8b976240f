"""``fullshard launch``: run somebody's script as ranks, on one machine or several."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from fullshard.cli.common import load_program, positive, whole_number
from fullshard.compat.accelerate_config.environment import launch_environment, launch_warnings
from fullshard.compat.accelerate_config.file import AccelerateFile, read_accelerate_file
from fullshard.errors import ConfigError
from fullshard.launch import choose_nproc
from fullshard.launch.machines import DYNAMIC, Nodes, Wishes, parse_endpoint, plan_machines, slurm_wishes

PROGRAM = "fullshard.launch.script"

DESCRIPTION = """\
Run a script as ranks, one for each GPU (or 2 on the CPU), with torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. Options stand before the script; what follows is the script's.

Lines come out with their rank in front. When a rank fails, the others are ended, the traceback of the one that failed
first is shown last, and its exit code is passed on (128 + n for signal n). Ctrl-C and SIGTERM end all ranks.

Several machines: start the same command on each, with its own --node_rank; they meet at machine 0 (--rdzv_endpoint).
Under Slurm, srun --ntasks-per-node=1 fullshard launch ... needs neither. The command line goes before the file, the
file before Slurm.
"""

EPILOG = """\
examples:
  fullshard launch script.py --epochs 3
  fullshard launch --config_file fsdp.yaml --nproc_per_node 4 script.py --epochs 3
  fullshard launch -m package.module --epochs 3
  fullshard launch --nnodes 2 --node_rank 0 --rdzv_endpoint node0:29500 script.py    (and --node_rank 1 on the other)
  srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 fullshard launch script.py
"""

_ELSEWHERE: Mapping[tuple[str, ...], str] = {
    ("--num_processes", "--num-processes"): "--nproc_per_node, which counts the ranks of one machine",
    ("--num_machines", "--num-machines"): "--nnodes",
    ("--machine_rank", "--machine-rank"): "--node_rank",
    ("--main_process_ip", "--main-process-ip", "--master_addr", "--master-addr"): "--rdzv_endpoint HOST:PORT",
    ("--main_process_port", "--main-process-port", "--master_port", "--master-port"): "--rdzv_endpoint HOST:PORT",
    ("--rdzv_conf", "--rdzv-conf"): "--rdzv_timeout SECONDS",
    ("--standalone",): "nothing: one machine takes a free port of its own",
    ("--multi_gpu", "--multi-gpu", "--use_fsdp", "--use-fsdp"): "nothing: what the script does is its own matter",
}
"""Options of torchrun and `accelerate launch` that have another name here."""


def add_parser(verbs: Any) -> None:
    """Add the verb's parser to those of ``fullshard``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "launch",
        help="run a script of your own as ranks, on one machine or several",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="fullshard launch [options] SCRIPT [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config_file", "--config-file", metavar="F", type=Path, help="Accelerate's configuration file"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument(
        "--nproc_per_node", "--nproc-per-node", metavar="N", type=_nproc, help="ranks on this machine: a number, or gpu"
    )
    _add_machines(parser)
    parser.add_argument(
        "--max_restarts",
        "--max-restarts",
        metavar="N",
        type=_count,
        default=0,
        help="how often all ranks are started anew after one has failed (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print how it ended as JSON; ranks' output goes to stderr")
    for names, here in _ELSEWHERE.items():
        parser.add_argument(*names, nargs="?", action=_Elsewhere, const=here, help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", metavar="args", nargs=argparse.REMAINDER, help="what the script is given")
    parser.set_defaults(run=run)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    """The options about several machines."""
    parser.add_argument(
        "--nnodes", metavar="N", type=_nodes, help="machines (default 1); MIN:MAX with --rdzv_backend c10d"
    )
    parser.add_argument("--node_rank", "--node-rank", metavar="K", type=_count, help="number of this machine, from 0")
    parser.add_argument(
        "--rdzv_endpoint",
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where machines meet: machine 0 and a free port there (default 29500)",
    )
    parser.add_argument(
        "--rdzv_backend",
        "--rdzv-backend",
        metavar="NAME",
        help="static: by --node_rank (default); c10d: in the order in which they come",
    )
    parser.add_argument("--rdzv_id", "--rdzv-id", metavar="ID", help="keeps runs apart that meet at the same place")
    parser.add_argument(
        "--rdzv_timeout",
        "--rdzv-timeout",
        metavar="S",
        type=positive,
        default=600,
        help="seconds that machines have to come together (default 600)",
    )


class _Elsewhere(argparse.Action):
    """An option that other launchers have: says what it is called here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is another launcher's; here it is {self.const}")


def _nproc(text: str) -> int:
    """A number of ranks; ``gpu`` is the number of GPUs."""
    if text != "gpu":
        try:
            return positive(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; or gpu: a rank for each GPU of this machine") from None
    if not torch.cuda.device_count():
        raise argparse.ArgumentTypeError("this machine shows no GPU; give a number")
    return torch.cuda.device_count()


def _nodes(text: str) -> Nodes:
    try:
        return Nodes.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, at least 1; got {text!r}") from None


def _count(text: str) -> int:
    """A whole number of at least 0."""
    return whole_number(text, least=0)


def run(options: argparse.Namespace) -> int:
    """Run the script's ranks of this machine.

    Args:
        options: The parsed command line.

    Returns:
        The exit code of the rank that failed first, 0 if none did.

    Raises:
        ConfigError: The settings are wrong, or the script is not there.
        ProcessGroupError: The machines did not come together.
    """
    if not options.module:
        _check_script(Path(options.script))
    file = None if options.config_file is None else read_accelerate_file(options.config_file)
    environment = {} if file is None else launch_environment(file)
    for warning in () if file is None else [*file.warnings, *launch_warnings(file)]:
        print(f"fullshard: {warning}", file=sys.stderr, flush=True)
    if "CUDA_VISIBLE_DEVICES" in environment:  # before GPUs are counted
        os.environ["CUDA_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"]
    wishes = [_of_command_line(options), _of_file(file), slurm_wishes(os.environ)]
    use_cpu = file is not None and file.use_cpu
    plan = plan_machines([wish for wish in wishes if wish], _nproc_on_cpu if use_cpu else choose_nproc)
    if plan.backend == DYNAMIC and options.node_rank is not None:
        print(f"fullshard: --node_rank has no effect with rdzv_backend {DYNAMIC}", file=sys.stderr, flush=True)
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


def _check_script(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Give a script, or -m and the name of a module.")
    if not path.is_file():
        raise ConfigError(f"There is no script {path} (looked in {Path.cwd()}). Options stand before the script.")


def _nproc_on_cpu(requested: int | None) -> int:
    """As :func:`choose_nproc`, where the file says ``use_cpu: true``."""
    return requested or 2


def _of_command_line(options: argparse.Namespace) -> Wishes:
    host, port = (None, None) if options.rdzv_endpoint is None else parse_endpoint(options.rdzv_endpoint)
    return Wishes(
        "the command line",
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        nproc=options.nproc_per_node,
        host=host,
        port=port,
        backend=options.rdzv_backend,
        run_id=options.rdzv_id,
    )


def _of_file(file: AccelerateFile | None) -> Wishes | None:
    """What the file says: its defaults say nothing."""
    if file is None:
        return None
    machines = Nodes(file.num_machines, file.num_machines) if "num_machines" in file.raw else None
    return Wishes(
        str(file.path),
        nnodes=machines,
        node_rank=file.machine_rank if "machine_rank" in file.raw else None,
        processes=file.num_processes,
        host=file.main_process_ip,
        port=file.main_process_port,
        backend=file.rdzv_backend if "rdzv_backend" in file.raw else None,
    )
