"""One question and its answer in a tokenizer's chat template: the prompt, and what the assistant is to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Side = tuple[list[list[int]], list[int]]
"""Ids of each row, and their lengths before truncation."""


def encode_chats(
    sources: Sequence[str], targets: Sequence[str], tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int]
) -> tuple[Side, Side]:
    """Prompts and completions; joined they are the ids of the template of the whole conversation.

    The prompt is the template of the user's turn with the beginning of the assistant's, the completion is the rest of
    the template of both turns: the target and what closes the turn. Where a token spans the border between the two, it
    belongs to the completion. Of texts that are too long the end is cut off, never a part of the template.

    Args:
        sources: What the user says.
        targets: What the assistant answers.
        tokenizer: With a chat template.
        limits: Most tokens of a prompt and of a completion, the template's own included.

    Returns:
        Prompts and completions.

    Raises:
        DataError: The template's prompt is not how its conversation begins, the template fails, or a limit leaves no
            room for a token of text.
    """
    rows = [_split(source, target, tokenizer) for source, target in zip(sources, targets, strict=True)]
    pairs = _encode_pairs(rows, tokenizer)
    full = [(len(prompt), len(completion)) for prompt, completion in pairs]
    for row, (prompt, completion) in enumerate(pairs):
        if len(prompt) > limits[0] or len(completion) > limits[1]:
            pairs[row] = _shortened(sources[row], targets[row], tokenizer, limits)
    prompts, completions = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    return (prompts, [lengths[0] for lengths in full]), (completions, [lengths[1] for lengths in full])


def _split(source: str, target: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text of the prompt and of the whole conversation."""
    user = {"role": "user", "content": source}
    render: Any = tokenizer.apply_chat_template
    try:
        prompt = render([user], tokenize=False, add_generation_prompt=True)
        whole = render([user, {"role": "assistant", "content": target}], tokenize=False)
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(
            f"The tokenizer's chat template failed: {error}. Set data.chat_template: false to do without it."
        ) from error
    if not whole.startswith(prompt):
        raise DataError(
            "The tokenizer's chat template cannot be trained on: a conversation must begin with the prompt that asks "
            f"for its answer. The prompt ends with {prompt[-40:]!r}, there the conversation has "
            f"{whole[max(0, len(prompt) - 40) : len(prompt)]!r}. Set data.chat_template: false to do without it."
        )
    return prompt, whole


def _encode_pairs(
    rows: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Ids of each prompt and completion. The template has written the special tokens: none are added."""
    encode: Any = tokenizer
    options = {"add_special_tokens": False, "verbose": False}
    prompts = encode(text=[prompt for prompt, _ in rows], **options)["input_ids"]
    wholes = encode(text=[whole for _, whole in rows], **options)["input_ids"]
    pairs = []
    for prompt, whole in zip(prompts, wholes, strict=True):
        border = len(prompt) if whole[: len(prompt)] == prompt else _common(prompt, whole)
        pairs.append((whole[:border], whole[border:]))
    return pairs


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def _shortened(
    source: str, target: str, tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """The same with ends of the texts cut off until both limits are kept."""
    encode: Any = tokenizer
    texts = [source, target]
    ids = [encode(text=text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    keep = [len(ids[0]), len(ids[1])]
    while True:
        pair = _encode_pairs([_split(texts[0], texts[1], tokenizer)], tokenizer)[0]
        over = [max(0, len(part) - limit) for part, limit in zip(pair, limits, strict=True)]
        if not any(over):
            return pair
        for side, name in enumerate(("source", "target")):
            if over[side]:
                keep[side] -= over[side]
                if keep[side] < 1:
                    raise DataError(
                        f"A max_{name}_length of {limits[side]} leaves no room for text: the chat template takes more. "
                        f"Use at least {limits[side] + 1 - keep[side]}."
                    )
                texts[side] = str(tokenizer.decode(ids[side][: keep[side]], clean_up_tokenization_spaces=False))
