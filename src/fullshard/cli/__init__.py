"""For ``python -m fullshard.cli.main``; the verbs are in ``fullshard.program.cli``."""
