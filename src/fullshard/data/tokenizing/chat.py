"""A question and its answer in a tokenizer's chat template: prompt and completion."""

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
    """Encode prompts and completions, whose concatenation is the template of the complete conversation.

    The prompt is the template of the user's turn with the beginning of the assistant's. The completion is the rest of
    the template of both turns: the target and the end of the turn. A token that spans the boundary belongs to the
    completion. Texts that are too long are truncated at the end; the template is not.

    Args:
        sources: The user's messages.
        targets: The assistant's answers.
        tokenizer: A tokenizer with a chat template.
        limits: Maximum tokens of a prompt and of a completion, including the template's.

    Returns:
        Prompts and completions.

    Raises:
        DataError: The template's conversation does not begin with its prompt, the template fails, or a limit leaves no
            room for a token of text.
    """
    rows = [_split(source, target, tokenizer) for source, target in zip(sources, targets, strict=True)]
    pairs = _encode_pairs(rows, tokenizer)
    lengths = [(len(prompt), len(completion)) for prompt, completion in pairs]
    for row, (prompt, completion) in enumerate(pairs):
        if len(prompt) > limits[0] or len(completion) > limits[1]:
            pairs[row] = _shortened(sources[row], targets[row], tokenizer, limits)
    prompts, completions = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    return (prompts, [prompt for prompt, _ in lengths]), (completions, [completion for _, completion in lengths])


def _split(source: str, target: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Render the prompt and the complete conversation."""
    user = {"role": "user", "content": source}
    render: Any = tokenizer.apply_chat_template
    try:
        prompt = render([user], tokenize=False, add_generation_prompt=True)
        full = render([user, {"role": "assistant", "content": target}], tokenize=False)
    except Exception as error:  # a template is a program and may raise any exception
        raise DataError(
            f"The tokenizer's chat template failed: {error}. Set data.chat_template: false to do without it."
        ) from error
    if not full.startswith(prompt):
        raise DataError(
            "The tokenizer's chat template cannot be used for training: a conversation must begin with its "
            f"prompt. The prompt ends with {prompt[-40:]!r}, where the conversation has "
            f"{full[max(0, len(prompt) - 40) : len(prompt)]!r}. Set data.chat_template: false to do without it."
        )
    return prompt, full


def _encode_pairs(
    rows: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Encode each prompt and completion without adding special tokens, which the template contains."""
    encode: Any = tokenizer
    options = {"add_special_tokens": False, "verbose": False}
    prompts = encode(text=[prompt for prompt, _ in rows], **options)["input_ids"]
    fulls = encode(text=[full for _, full in rows], **options)["input_ids"]
    pairs = []
    for prompt, full in zip(prompts, fulls, strict=True):
        boundary = len(prompt) if full[: len(prompt)] == prompt else _common(prompt, full)
        pairs.append((full[:boundary], full[boundary:]))
    return pairs


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def _shortened(
    source: str, target: str, tokenizer: PreTrainedTokenizerBase, limits: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Encode one row with its texts truncated to both limits."""
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
                        f"A max_{name}_length of {limits[side]} leaves no room for text: the chat template needs more. "
                        f"Use at least {limits[side] + 1 - keep[side]}."
                    )
                texts[side] = str(tokenizer.decode(ids[side][: keep[side]], clean_up_tokenization_spaces=False))
