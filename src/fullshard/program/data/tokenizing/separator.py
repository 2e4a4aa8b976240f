"""The text between source and target of a causal model without a chat template, so that words do not merge."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LINE_BREAK = "\n"


def choose_separator(given: str | None, template: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """Choose the separator for a causal model without a chat template; any process.

    Args:
        given: ``data.separator``; None chooses a line break, unless the source already ends with a separator: a
            special token, or text of the template after its last column.
        template: ``data.template``.
        tokenizer: The model's tokenizer.
    """
    if given is not None:
        return given
    return "" if special_tail(tokenizer) or _ends_with_text(template) else LINE_BREAK


def describe_separator(separator: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note for the user."""
    full = _encode(tokenizer, "a", add_special_tokens=True)
    tail = tokenizer.convert_ids_to_tokens(full[len(full) - special_tail(tokenizer) :])
    shown = separator + "".join(tail)
    if shown:
        return f"source and target are separated by {shown!r} (data.separator)"
    return "nothing is put between source and target (data.separator)"


def special_tail(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of special tokens that the tokenizer puts after a text."""
    bare, full = _encode(tokenizer, "a"), _encode(tokenizer, "a", add_special_tokens=True)
    starts = range(len(full) - len(bare) + 1)
    start = next((start for start in starts if full[start : start + len(bare)] == bare), 0)
    return len(full) - start - len(bare)


def separator_ids(tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Return the ids of the separator after a text.

    Raises:
        DataError: The tokenizer drops it.
    """
    if not separator:
        return []
    before, both = _encode(tokenizer, "a"), _encode(tokenizer, f"a{separator}")
    ids = both[len(before) :] if both[: len(before)] == before else _encode(tokenizer, separator)
    if not ids:
        raise DataError(
            f"The tokenizer drops the separator {separator!r} between source and target. Set data.separator to a text "
            "that it keeps, such as ' ->', or to '' for none."
        )
    return ids


def _ends_with_text(template: str | None) -> bool:
    """Return whether a template has text after its last column."""
    if template is None:
        return False
    *_, (_, last, _, _) = string.Formatter().parse(template)
    return last is None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False) -> list[int]:
    encode: Any = tokenizer
    return encode(text=text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
