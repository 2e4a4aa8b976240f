"""Shortening of conversations: the oldest turns are dropped; the system's turn and the question stay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fullshard.program.data.examples import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def without_oldest(conversation: Conversation) -> Conversation | None:
    """Return a conversation without its oldest turns, up to the user's next turn; None if the user has no later turn.

    Turns of the system at the beginning stay.
    """
    messages = conversation.messages
    end = len(conversation.history)
    start = len(conversation.system_turns)
    later = next((i for i in range(start + 1, end) if messages[i]["role"] == "user"), None)
    if later is None:
        return None
    gone = later - start
    answers = tuple(answer - gone for answer in conversation.answers if answer >= later)
    return replace(conversation, messages=messages[:start] + messages[later:], answers=answers)


def fitting_history(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, prefix: str, limit: int) -> str:
    """Return prefix and history within ``limit`` tokens including special ones, if dropping turns suffices."""
    encode: Any = tokenizer
    while True:
        text = prefix + conversation.history_text
        if len(encode(text=text, verbose=False)["input_ids"]) <= limit:
            return text
        shorter = without_oldest(conversation)
        if shorter is None:
            return text
        conversation = shorter
