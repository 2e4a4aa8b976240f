"""Requests to stop a run early: set on any rank, obeyed by all ranks at the next step."""

from __future__ import annotations

from typing import Self


class StopRequest:
    """A request to stop on this rank; used as a context while training can obey it.

    Attributes:
        requested: True to stop; may be set at any time, from any thread.
    """

    def __init__(self) -> None:
        """Start without a request."""
        self.requested = False

    def __enter__(self) -> Self:
        """Enter when training begins."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave when training is over."""
