"""Where the tests find torchao: in a folder of its own, because transformers imports it where it is installed."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "torchao"

needs_torchao = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs torchao in its folder (make installs it)")


def let_import_torchao() -> None:
    """Make torchao importable in this process; called by rank programs only, before they import it."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
