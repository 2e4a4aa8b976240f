"""Collectives in host memory, with the CPU in place of a GPU, and the behaviours over them."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fullshard
from fullshard.core.comm import staged
from support import staged as cases
from support.rank_script import parse, print_result
from support.saving_case import saving


def saved(ranks):
    found = saving(ranks.comm)
    assert all(found.values()), found


CASES = {**cases.CASES, "optimizers": lambda ranks: cases.optimizers(ranks.comm), "saving": saved}


def main():
    options = parse(CASES, __doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"\d+ of ignored_params are trainable")
    everyone = fullshard.init(timeout_s=100)
    staged.STAGE_BYTES = 4 * cases.PIECE  # most of what is sent takes several pieces
    print_result(cases.run_cases(CASES, options.only, cases.Groups(cases.on_host), everyone))
    fullshard.shutdown()


if __name__ == "__main__":
    main()
