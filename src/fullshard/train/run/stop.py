"""Requests to stop a run early: set on any rank, heeded by all ranks in the next step."""

from __future__ import annotations

from typing import Self


class StopRequest:
    """A request to stop on this rank. The run is inside this context while it trains and can heed the request.

    Attributes:
        requested: Whether to stop; may be set at any time, from any thread.
    """

    def __init__(self) -> None:
        """Start without a request."""
        self.requested = False

    def __enter__(self) -> Self:
        """Enter when training begins."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave when training is over."""
