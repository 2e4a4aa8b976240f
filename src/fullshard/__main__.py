"""Entry point of ``python -m fullshard``, the same program as ``fullshard``."""

from fullshard.program.cli.main import entry

if __name__ == "__main__":
    entry()
