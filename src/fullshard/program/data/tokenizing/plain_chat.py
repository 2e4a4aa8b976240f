"""The chat template for causal models whose tokenizer has none: each turn is a line that begins with its role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
_TURN = (
    "{{ message.role }}: {{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
)
_TURNS = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    f"{_TURN}{{% if message.role == 'assistant' %}}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
)
_ANSWER = "{% if add_generation_prompt %}{{ '\\n' }}assistant:{% endif %}"


def add_plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Give a tokenizer the plain chat template; return a note for the user; any process.

    Each turn is a line, ``role: content``, and the assistant's ends with the end-of-sequence token. The text begins
    with the special tokens that the tokenizer puts before a text. The template is saved with the model.
    """
    encode: Any = tokenizer
    bare = encode(text="a", add_special_tokens=False)["input_ids"]
    full = encode(text="a", add_special_tokens=True)["input_ids"]
    head = "".join(tokenizer.convert_ids_to_tokens(full[: full.index(bare[0])] if bare and bare[0] in full else []))
    start = f"{{{{ {head!r} }}}}" if head else ""
    tokenizer.chat_template = f"{start}{_TOOLS}{_TURNS}{_ANSWER}"
    turns = [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]
    shown = str(tokenizer.apply_chat_template(turns, tokenize=False))
    return (
        f"the tokenizer has no chat template: conversations are rendered as {shown!r}. This template is saved with "
        "the model (data.chat_template)"
    )
