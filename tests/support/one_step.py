"""A step of the program whose numbers are read at once."""

from fullshard.program.train.run.step import issue_step


def train_step(*inputs):
    """Issue a step with the arguments of ``issue_step``, and report it."""
    return issue_step(*inputs).report()
