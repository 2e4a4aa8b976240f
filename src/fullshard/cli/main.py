"""The command line: the public name of ``fullshard.program.cli.main``."""

from fullshard.program.cli.main import entry as entry, main as main

if __name__ == "__main__":
    entry()
