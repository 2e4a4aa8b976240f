"""Text written by a sharded model: ranks in lockstep, however many tokens each of them needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fullshard.comm import Comm
from fullshard.config import RunConfig
from fullshard.data import Batch
from fullshard.engine import root_held
from fullshard.errors import ConfigError
from fullshard.models import base_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_INPUT_NAMES = ("decoder_input_ids", "input_ids", "inputs_embeds")


@dataclass(frozen=True)
class GenerationSpec:
    """How text is written; the options of the run file's ``evaluation`` section of the same names.

    Attributes:
        max_new_tokens: Most tokens of a row's text.
        min_new_tokens: Fewest.
        num_beams: Width of the beam search; 1: greedy.
        length_penalty: Power of the length that beams' scores are divided by.
        no_repeat_ngram_size: No sequence of so many tokens is written twice in a row's text; 0: any may.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> GenerationSpec:
        """What a run's settings say."""
        settings = config.evaluation
        return cls(
            max_new_tokens=settings.max_new_tokens or config.data.max_target_length,
            min_new_tokens=settings.min_new_tokens,
            num_beams=settings.num_beams,
            length_penalty=settings.length_penalty,
            no_repeat_ngram_size=settings.no_repeat_ngram_size,
        )

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """A model's own generation settings, with what is decided here in their place: no sampling, these lengths."""
        config = copy.deepcopy(own)
        config.update(
            max_new_tokens=self.max_new_tokens,
            max_length=None,
            min_new_tokens=self.min_new_tokens or None,
            min_length=None,
            num_beams=self.num_beams,
            length_penalty=self.length_penalty if self.num_beams > 1 else None,
            early_stopping=config.early_stopping if self.num_beams > 1 else None,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            num_return_sequences=1,
            return_dict_in_generate=False,
            use_cache=True,
        )
        return config


def require_right_text(model: PreTrainedModel, batch_size: int) -> None:
    """Refuse to write what a model would not write alone; any rank, before the first :func:`generate`.

    Args:
        model: The sharded model, with its adapter if it has one.
        batch_size: Rows of a batch; of several the shorter ones are padded.

    Raises:
        ConfigError: It has a prompt adapter, and rows would be padded on the left.
    """
    kinds = {str(one.peft_type) for one in getattr(model, "peft_config", {}).values()}
    if "PeftType.PROMPT_TUNING" in kinds and not model.config.is_encoder_decoder and batch_size > 1:
        raise ConfigError(
            "A prompt adapter of a decoder-only model writes other text where its input is padded, because peft counts "
            f"padding as positions; batches of {batch_size} rows are padded. Set training.per_device_eval_batch_size "
            "to 1 (fullshard predict: --batch-size 1), or take a prefix adapter."
        )


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Batch, comm: Comm, spec: GenerationSpec
) -> list[str]:
    """Write a text for each row of a batch; on every rank together, each with its own batch.

    It is what the unsharded model's ``generate`` writes. Every token is a forward of the decoder, which all ranks must
    make together, so a rank whose rows are finished goes on with one token that counts for nothing until all are.

    Args:
        model: The sharded model, in evaluation mode; also with a peft adapter around it.
        tokenizer: Turns generated ids into text.
        batch: On the model's device.
        comm: The ranks the model is sharded over.
        spec: Lengths and beams.

    Returns:
        A text for each row, fillers included, without white space at its ends.
    """
    writer = base_of(model)  # what generate calls for every token, also inside an adapter
    # The root stays gathered until the last rank is done: ranks that only join in call the model as generate does.
    with _settings(writer, spec), root_held(model), _Lockstep(writer, comm):
        ids = model.generate(  # type: ignore[operator]
            input_ids=batch.prompt_ids_BP, attention_mask=batch.prompt_mask_BP, synced_gpus=False
        )
    if not model.config.is_encoder_decoder:
        ids = ids[:, batch.prompt_ids_BP.shape[1] :]  # a decoder repeats its prompt
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@contextmanager
def _settings(writer: Any, spec: GenerationSpec) -> Iterator[None]:
    """While entered, ``generate`` does as the spec says.

    Settings that are given to ``generate`` do not do: where they are None, the model's own ones are put in again.
    """
    own = writer.generation_config
    writer.generation_config = spec.config(own)
    try:
        yield
    finally:
        writer.generation_config = own


class _Lockstep:
    """While entered, every forward of a module is made by all ranks; left when the last rank needs no more.

    Before each forward the ranks count those that still write. A rank that has left its ``generate`` counts itself out
    and joins the others' forwards.
    """

    def __init__(self, writer: Any, comm: Comm) -> None:
        """``writer`` is called by ``generate`` for every token."""
        self._writer = writer
        self._comm = comm
        self._idle: dict[str, Any] = {}

    def __enter__(self) -> None:
        """Watch the module's forwards."""
        if self._comm.size > 1:
            self._hook = self._writer.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Join the other ranks until all have left; not after an error, which ends the run."""
        if self._comm.size == 1:
            return
        self._hook.remove()
        while kind is None and self._count(writes=False):
            self._writer(**self._idle)
        self._idle = {}

    def _before(self, _module: Any, _args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        self._idle = _one_token(inputs)
        self._count(writes=True, read=False)

    def _count(self, *, writes: bool, read: bool = True) -> int:
        """How many ranks write. Reading it would make a GPU wait, and a rank that writes has no use for it."""
        number = torch.tensor(int(writes), device=self._comm.device)
        self._comm.all_reduce(number).wait()
        return int(number) if read else 0


def _one_token(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a forward that runs the same units as another one: of its last token, with no cache to spoil."""
    name = next(name for name in _INPUT_NAMES if inputs.get(name) is not None)
    call = {name: inputs[name][:, -1:], "use_cache": False}
    if inputs.get("encoder_outputs") is not None:
        call |= {"encoder_outputs": inputs["encoder_outputs"], "attention_mask": inputs["attention_mask"]}
    return call
