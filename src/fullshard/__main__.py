"""``python -m fullshard`` is the program ``fullshard``."""

from fullshard.cli.main import entry

if __name__ == "__main__":
    entry()
