"""Entry point of ``python -m fullshard``, the same program as ``fullshard``."""

from fullshard.cli.main import entry

if __name__ == "__main__":
    entry()
