"""A conversation with a trained model, which answers each text as ``fullshard predict`` would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList, TextStreamer

from fullshard.core.comm import Comm
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.data import EpochPlan, InputRow, Turn, batches, tokenize, uses_chat_template
from fullshard.program.models import is_causal
from fullshard.program.train.evaluation.generation import GenerationSpec, generate, require_right_text
from fullshard.program.train.setup.prepare import collate_spec, tokenize_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """Answer of a model."""

    text: str  # without leading and trailing white space
    prompt: str  # what the model read, decoded from the token ids with special tokens
    cut: bool  # whether data.max_source_length removed turns or tokens from the prompt


class Talk:
    """A conversation, or texts that are answered independently; one process is the only rank.

    A causal model whose tokenizer has a chat template gets the conversation so far, rendered by it. An encoder-decoder
    trained on conversations gets it as its source. Any other model gets each text alone.

    Attributes:
        remembers: True if the model is given the conversation so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        comm: Comm,
        *,
        temperature: float = 0.0,
        system_turns: Sequence[Turn] | None = None,
    ) -> None:
        """Start without turns.

        Args:
            model: The sharded model, in evaluation mode.
            tokenizer: The model's tokenizer.
            config: Lengths, prefix, separator, beams.
            comm: The ranks it is sharded over: this process only.
            temperature: Temperature of sampling; 0 takes the most likely tokens, as ``predict`` does.
            system_turns: The system's turns that a conversation begins with; None: the model was not trained on
                conversations.

        Raises:
            ConfigError: Sampling is combined with beam search, or the separator would not be used.
        """
        require_right_text(model, batch_size=1)
        self._model, self._tokenizer, self._comm = model, tokenizer, comm
        self._tokens = tokenize_spec(config, tokenizer, causal=is_causal(model))
        self._collate = collate_spec(tokenizer, causal=self._tokens.causal)
        self._generation = replace(GenerationSpec.of(config), temperature=temperature)
        if temperature > 0 and self._generation.num_beams > 1:
            raise ConfigError(
                f"A temperature of {temperature:g} samples tokens, which a beam search of width "
                f"{self._generation.num_beams} does not. Set --num-beams 1, or leave out --temperature."
            )
        chats = uses_chat_template(tokenizer, self._tokens)
        self.remembers = chats if self._tokens.causal else system_turns is not None
        self._opening: Sequence[Turn] = system_turns or ()
        self._turns: list[Turn] = []

    @property
    def streams(self) -> bool:
        """True if text can be shown as it is generated; the text of a beam search is known only at its end."""
        return self._generation.num_beams == 1

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self._turns = []

    def answer(
        self, text: str, write: Callable[[str], None] | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> Answer:
        """Answer a text, and append both to the conversation.

        Args:
            text: The user's turn, or a source.
            write: Receives parts of the answer as they are generated, without special tokens.
            stopped: Called after each token; if it returns True, the answer ends with that token.

        Raises:
            DataError: A limit leaves no room for the text, or the chat template fails. The text is forgotten.
        """
        row = InputRow(text, 1)
        if self.remembers:
            row = row.after((*self._opening, *self._turns))
        tokenized = tokenize([row.example], self._tokenizer, self._tokens)
        plan = EpochPlan(1, 1, 1, training=False)
        (batch,) = batches(tokenized, plan, 0, self._collate)

        def ends(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((ids.shape[0],), stopped(), dtype=torch.bool, device=ids.device)

        more: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([ends])}  # type: ignore[list-item]
        if write is not None and self.streams:
            more["streamer"] = _Parts(self._tokenizer, write)
        (written,) = generate(self._model, self._tokenizer, batch.to(self._comm.device), self._generation, more)
        if write is not None and not self.streams:
            write(written)
        if self.remembers:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": written}]
        prompt = self._tokenizer.decode(tokenized.source_ids[0].tolist(), clean_up_tokenization_spaces=False)
        return Answer(written, str(prompt), tokenized.cut[0])


class _Parts(TextStreamer):
    """Passes on the text of tokens once later ones cannot change it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self._write = write
        self._begun = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002 (transformers' own)
        """Pass on a part of the answer, without white space at its beginning."""
        text = text if self._begun else text.lstrip()
        if text:
            self._begun = True
            self._write(text)
