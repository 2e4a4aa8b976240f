"""What only a GPU can tell, in stages that keep a time budget: ``python -m benchmarks.gpu --help``.

Needs torch, transformers and ``PYTHONPATH=src``; no network, no installed package. Modules of the folder above are
imported by their own names, as they import each other.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ABOVE = str(ROOT / "benchmarks")

if _ABOVE not in sys.path:
    sys.path.append(_ABOVE)

# As fullshard's launchers do, for every engine; before torch is imported, which reads it.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
