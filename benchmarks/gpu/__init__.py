"""What only a GPU can tell, in stages that keep a time budget: ``python -m benchmarks.gpu --help``.

Needs torch, transformers and ``PYTHONPATH=src``; no network, no installed package. Modules of the folder above are
imported by their own names, as they import each other.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ABOVE = str(ROOT / "benchmarks")

if _ABOVE not in sys.path:
    sys.path.append(_ABOVE)
