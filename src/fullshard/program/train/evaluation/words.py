"""Words of text in any script, for metrics whose packages know only the letters a to z or words between spaces."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Protocol

import regex

_NO_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts without spaces between words."""

_WORD = regex.compile(
    rf"(?V1)[[\p{{L}}\p{{N}}]&&[{_NO_SPACES}]]\p{{M}}*"  # a character with its marks
    # the joiners inside of Persian and Hindi words are no letters
    rf"|[[\p{{L}}\p{{N}}]--[{_NO_SPACES}]][[\p{{L}}\p{{M}}\p{{N}}\u200c\u200d]--[{_NO_SPACES}]]*"
)
_ROUGE = "words of any script; characters in scripts without spaces"
_HAN = regex.compile(r"\p{Han}")
_OTHER_NO_SPACES = regex.compile(rf"(?V1)[[{_NO_SPACES}]--\p{{Han}}]")
_ANY_NO_SPACES = regex.compile(f"[{_NO_SPACES}]")
_LETTER = regex.compile(r"\p{L}")
_SENTENCE_END = re.compile(
    # also the ends of Hindi, Arabic, Urdu and Amharic sentences; those of Chinese and Japanese need no space after them
    r"(?<=[.!?।॥؟۔።])\s+|(?<=[。！？｡])(?![。！？｡”’」』）])\s*"  # noqa: RUF001
)


class Tokenizer(Protocol):
    """What rouge-score takes as its ``tokenizer``."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        ...


class WordsOfAnyScript:
    """A tokenizer for rouge-score, whose own one drops all letters but a to z; of ASCII text, words are as by that one.

    Words of other text are runs of letters, marks and digits of any script, in compatibility form (NFKC) and lower
    case; in scripts without spaces between words, single characters.
    """

    def __init__(self, ascii_words: Tokenizer) -> None:
        """Take rouge-score's own tokenizer, which also stems words of a to z."""
        self._ascii_words = ascii_words

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        if text.isascii():
            return self._ascii_words.tokenize(text)
        found = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
        return [one for word in found for one in (self._ascii_words.tokenize(word) if word.isascii() else [word])]


def composed(text: str) -> str:
    """Return the text in composed form (NFC): tokenizers compose letters, so a model cannot write them otherwise."""
    return unicodedata.normalize("NFC", text)


def sentences(text: str) -> list[str]:
    """Split a text into sentences, which end with a full stop, exclamation or question mark of any script."""
    return [one for one in _SENTENCE_END.split(text.strip()) if one]


def bleu_words(references: Sequence[str]) -> str:
    """Return the name of sacrebleu's tokenizer for a row: 13a, its default, for scripts with spaces between words.

    Chinese has ``zh``, which takes other words as 13a does. Where most letters are of a script without spaces and not
    all of them are Chinese characters, as in Japanese and Thai, it is ``char``, as sacrebleu's own tokenizers of these
    need further packages or downloads.
    """
    text = "".join(references)
    if text.isascii():
        return "13a"
    without = len(_ANY_NO_SPACES.findall(text))
    if _OTHER_NO_SPACES.search(text) and 2 * without > len(_LETTER.findall(text)):
        return "char"
    return "zh" if _HAN.search(text) else "13a"


def counted_words(metrics: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return how the words of text beyond ASCII are counted, by metric, for the record; any rank, alone.

    Args:
        metrics: Names of metrics.
        references: The correct texts of each row.

    Returns:
        Nothing for a metric whose package counts the words of these rows by its defaults.
    """
    found = {name: _ROUGE for name in metrics if name.startswith("rouge") and _have_other_letters(references)}
    tokenizers = sorted(set(map(bleu_words, references)) if "bleu" in metrics else {"13a"})
    return found if tokenizers == ["13a"] else {**found, "bleu": f"sacrebleu's {' and '.join(tokenizers)}"}


def describe_words(words: Mapping[str, str]) -> str:
    """Return a sentence for the user about what :func:`counted_words` returned."""
    return "words are counted so: " + "; ".join(
        f"{' and '.join(name for name in words if words[name] == how)}: {how}" for how in dict.fromkeys(words.values())
    )


def _have_other_letters(references: Sequence[Sequence[str]]) -> bool:
    texts = (text for right in references for text in right if not text.isascii())
    return any(not letter.isascii() for text in texts for letter in _LETTER.findall(text))
