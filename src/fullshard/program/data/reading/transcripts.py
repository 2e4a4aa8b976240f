"""Pairs of texts that begin with their prompt, as in transcripts of a dialogue: where the prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from fullshard.program.data.examples import Example, InputRow
from fullshard.program.data.reading.cells import cell_of, cell_text
from fullshard.program.data.reading.row import Row, UnusableRowError

_MARKS = (":", "\uff1a")
"""Ends of a speaker's mark: a colon, also a full-width one."""


def common_beginning(one: str, other: str) -> str:
    """Return what two texts begin with, as TRL's ``extract_prompt`` does, but never up to the middle of a word.

    A blank between the common beginning and the rest belongs to the rest.
    """
    end = min(_common(one, other), len(one) - 1, len(other) - 1)
    while end > 0 and one[end - 1].isalnum() and (one[end].isalnum() or other[end].isalnum()):
        end -= 1
    return one[: end - 1] if end > 0 and one[end - 1] == " " else one[: max(end, 0)]


def _common(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass(frozen=True)
class TranscriptRecipe:
    """How the cells of a row become two completions of the prompt that both texts begin with."""

    chosen: str  # column of the preferred text
    rejected: str  # column of the other one
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The distinct names that it reads."""
        return [self.chosen, self.rejected]

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: A cell is missing, empty or not text, or the texts do not begin alike.
        """
        if row.problem is not None:
            raise UnusableRowError(row.problem)
        texts = [cell_text(name, cell_of(row, name)) for name in self.columns]
        for name, text in zip(self.columns, texts, strict=True):
            if not text.strip():
                raise UnusableRowError(f"column {name!r} is empty")
        prompt = common_beginning(*texts)
        if not prompt.strip():
            raise UnusableRowError(
                f"columns {self.chosen!r} and {self.rejected!r} do not begin alike, and no column has their prompt "
                "(data.source_column)"
            )
        for name, text in zip(self.columns, texts, strict=True):
            # A speaker's mark alone, where the other text goes on.
            if _common(*texts) >= len(text.rstrip()) and text.rstrip().endswith(_MARKS):
                raise UnusableRowError(f"column {name!r} has no answer after what both texts begin with")
        chosen, rejected = (Example(prompt, (text[len(prompt) :],), row.line) for text in texts)
        return Example(prompt, chosen.references, row.line, rejected=rejected)

    def input_row(self, row: Row) -> InputRow:
        """Return the prompt of a row; raises as :meth:`example`."""
        return InputRow(self.example(row).source, row.line)


def are_transcripts(rows: Sequence[Row], names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether the two named columns of all rows begin alike, and no other column may hold a prompt.

    Answers of one prompt may begin with the same word, so a text of several words in another column is taken for it.
    """
    pairs = [[row.cells.get(name) for name in names] for row in rows if row.problem is None]
    texts = [pair for pair in pairs if all(isinstance(cell, str) and cell.strip() for cell in pair)]
    if not texts or not all(common_beginning(str(one), str(other)).strip() for one, other in texts):
        return False
    cells = [row.cells.get(name) for row in rows for name in others]
    return not any(isinstance(cell, str) and " " in cell.strip() for cell in cells)
