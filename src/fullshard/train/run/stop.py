"""The wish to stop a run before its end: somebody sets it on any rank, and all ranks hear of it in the next step."""

from __future__ import annotations

from typing import Self


class StopRequest:
    """Whether this rank is asked to stop. Entered by the run while it trains and can heed it.

    Attributes:
        requested: Set it at any time, from any thread.
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.requested = False

    def __enter__(self) -> Self:
        """Training begins."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Training is over."""
