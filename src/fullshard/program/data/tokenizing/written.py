"""Targets as the tokenizer writes them: what a model can generate, which may differ from the text of the data."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fullshard.program.data.tokenizing.tokenize import CHUNK_ROWS, TokenizeSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN, _MOST = 3, 60
_MOST_LOST = 40


@dataclass(frozen=True)
class Unwritten:
    """Targets that are not the same after encoding and decoding."""

    rows: int  # rows with such a target
    total: int  # all rows
    examples: tuple[tuple[str, str], ...]  # the most frequent ones, each with what it becomes
    lost: str  # characters that none of them keeps, the most frequent first
    nothing: int  # rows with a target of which nothing is left

    def note(self, name: str) -> str:
        """Return a message for the user about the rows of ``name``, such as training."""
        shown = "; ".join(f"{_cut(text)!r} becomes {_cut(written)!r}" for text, written in self.examples)
        lines = [
            f"{self.rows:,} of {self.total:,} {name} targets are not the same after the tokenizer's encoding and "
            f"decoding, so a model cannot write them: {shown}.",
            "  metrics compare with the target as the tokenizer writes it.",
        ]
        if self.nothing:
            lines.append(
                f"  of {self.nothing:,} nothing is left: no prediction is right for them, also not an empty one"
            )
        if self.lost:
            # JSON's escapes are YAML's
            words = json.dumps(list(self.lost), ensure_ascii=False)
            lines.append(f"  to keep lost characters: model.new_tokens: {words}; or write them otherwise in the data")
        else:
            lines.append("  they differ in white space or in the order of characters only")
        return "\n".join(lines)


def written_forms(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, spec: TokenizeSpec) -> dict[str, str]:
    """Return each distinct text as a model writes it if it repeats it: encoded as a target, decoded as predictions are.

    Any process, alone. The texts are not truncated.
    """
    distinct = list(dict.fromkeys(texts))
    encode: Any = tokenizer
    options = {"verbose": False, **({"add_special_tokens": False} if spec.causal else {})}
    found: dict[str, str] = {}
    for start in range(0, len(distinct), CHUNK_ROWS):
        part = distinct[start : start + CHUNK_ROWS]
        ids = encode(**{"text" if spec.causal else "text_target": part}, **options)["input_ids"]
        written = tokenizer.batch_decode(ids, skip_special_tokens=True)
        found |= {text: one.strip() for text, one in zip(part, written, strict=True)}
    return found


def find_unwritten(targets: Sequence[str], forms: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the JSON values of :class:`Unwritten` for the rows' targets; None: all survive.

    White space around a text, and how its letters are composed, make no difference.
    """
    counts = Counter(target for target in targets if not _is_same(target, forms[target]))
    if not counts:
        return None
    lost: Counter[str] = Counter()
    for text, rows in counts.items():
        for one in set(_composed(text)) - set(forms[text]):
            lost[one] += rows
    frequent = [text for text, _ in counts.most_common(_SHOWN)]
    kept = sorted(lost, key=lambda one: (-lost[one], one))[:_MOST_LOST]
    examples = tuple((text, forms[text]) for text in frequent)
    nothing = sum(rows for text, rows in counts.items() if not forms[text])
    return asdict(Unwritten(counts.total(), len(targets), examples, "".join(kept), nothing))


def references_of(forms: Mapping[str, str]) -> dict[str, str]:
    """Return what metrics compare with: each text as it is written; itself if nothing of it is.

    An empty prediction is no right answer where the tokenizer knows none of a target's characters.
    """
    return {text: written or text for text, written in forms.items()}


def _is_same(text: str, written: str) -> bool:
    return _composed(text) == _composed(written)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."
