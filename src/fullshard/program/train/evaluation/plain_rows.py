"""How a trained model reads plain text: alone, or as the user's turn of a conversation, as in its training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.program.config import recorded_turns
from fullshard.program.data import Turn, asked_note


@dataclass(frozen=True)
class PlainRows:
    """How rows of plain text are read."""

    # the system's turns before the user's; None: the text is a source, as in training rows that are no conversations
    system_turns: Sequence[Turn] | None = None
    notes: tuple[str, ...] = ()  # a line for the user, or none


def plain_rows(run: Path | None, name: str | None, system: str | None, *, chats: bool) -> PlainRows:
    """Return how a model reads plain text; any process.

    Args:
        run: Directory of the run that trained it; None: there is none.
        name: The set of a mixture that the text belongs to; None: there is one set.
        system: The system's turn given by the user, empty for none; None: the one recorded with the run.
        chats: True if a chat template is applied to its sources.

    Raises:
        ConfigError: A system turn is given, but the model does not read turns; or the run's record cannot be read.
    """
    recorded = None if run is None else recorded_turns(run, name)
    if system is not None:
        if recorded is None and not chats:
            raise ConfigError(
                "--system gives a turn of a conversation, but this model reads no turns: its training rows were no "
                "conversations, and no chat template is used. Leave --system out."
            )
        turns = [{"role": "system", "content": system}] if system.strip() else []
        return PlainRows(turns, (asked_note(turns, "given by --system" if turns else "--system is empty"),))
    if recorded is None:
        return PlainRows()
    if not recorded.known:
        source = "the run's version of fullshard did not record one; give the one of its training rows with --system"
    elif recorded.system is None:
        source = "those of the training rows differ; give one with --system"
    elif recorded.system:
        source = "that of the training rows; --system gives another"
    else:
        source = "the training rows have none; --system gives one"
    return PlainRows(recorded.system or (), (asked_note(recorded.system or (), source),))
