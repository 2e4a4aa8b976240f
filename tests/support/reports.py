"""Reports of a run with the values that a test is about; other fields that need one are 0."""

import dataclasses


def made(kind, **values):
    """A report of this class."""
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    return kind(**(dict.fromkeys(needed, 0) | values))
