"""The rank program of ``fullshard tune`` with the ways of ``fake_ways`` that FAKE_WAYS names."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fullshard.program.launch.programs import tune
from support.fake_ways import replace_ways


def main(arguments=None):
    replace_ways(*os.environ["FAKE_WAYS"].split())
    return tune.main(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
