"""The behaviours on gloo processes."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import GlooComm
from support import group_cases
from support.behaviours import BEHAVIOURS
from support.rank_script import parse, print_result


def main():
    options = parse(BEHAVIOURS, __doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"\d+ of ignored_params are trainable")
    everyone = fullshard.init(timeout_s=100)
    print_result(group_cases.run_cases(BEHAVIOURS, options.only, group_cases.Groups(GlooComm), everyone))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
