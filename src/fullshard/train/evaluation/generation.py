"""Text generation with a sharded model: ranks run forwards in lockstep, however many tokens each of them needs."""

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
    """Settings of text generation; the options of the same names in the run file's ``evaluation`` section.

    Attributes:
        max_new_tokens: Maximum number of tokens of a row's text.
        min_new_tokens: Minimum number of tokens.
        num_beams: Width of the beam search; 1: greedy.
        length_penalty: Exponent of the length that a beam's score is divided by.
        no_repeat_ngram_size: A text repeats no sequence of this many tokens; 0: no limit.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> GenerationSpec:
        """Return the generation settings of a run."""
        settings = config.evaluation
        return cls(
            max_new_tokens=settings.max_new_tokens or config.data.max_target_length,
            min_new_tokens=settings.min_new_tokens,
            num_beams=settings.num_beams,
            length_penalty=settings.length_penalty,
            no_repeat_ngram_size=settings.no_repeat_ngram_size,
        )

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """Return a copy of a model's own generation settings with these settings and without sampling."""
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
    """Raise if padding would change the generated text; any rank, before the first :func:`generate`.

    Args:
        model: The sharded model, with its adapter if it has one.
        batch_size: Rows of a batch; in a batch of several rows, shorter ones are padded.

    Raises:
        ConfigError: It has a prompt adapter, and rows would be padded on the left.
    """
    kinds = {str(one.peft_type) for one in getattr(model, "peft_config", {}).values()}
    if "PeftType.PROMPT_TUNING" in kinds and not model.config.is_encoder_decoder and batch_size > 1:
        raise ConfigError(
            "With a prompt adapter, padding changes the text of a decoder-only model, because peft counts padding as "
            f"positions; batches of {batch_size} rows are padded. Set training.per_device_eval_batch_size to 1 "
            "(fullshard predict: --batch-size 1), or use a prefix adapter."
        )


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Batch, comm: Comm, spec: GenerationSpec
) -> list[str]:
    """Generate a text for each row of a batch; every rank calls it, each with its own batch.

    The texts are those of the unsharded model's ``generate``. Every token is a forward of the decoder, which all ranks
    must run together, so a rank whose rows are finished runs forwards of one dummy token until all ranks are finished.

    Args:
        model: The sharded model, in evaluation mode; also with a peft adapter around it.
        tokenizer: The model's tokenizer.
        batch: On the model's device.
        comm: The ranks the model is sharded over.
        spec: Lengths and beams.

    Returns:
        A text for each row, fillers included, without leading and trailing white space.
    """
    writer = base_of(model)  # generate calls it for every token, also inside an adapter
    # The root stays gathered until the last rank is finished, because dummy forwards need it as well.
    with _settings(writer, spec), root_held(model), _Lockstep(writer, comm):
        ids = model.generate(  # type: ignore[operator]
            input_ids=batch.prompt_ids_BP, attention_mask=batch.prompt_mask_BP, synced_gpus=False
        )
    if not model.config.is_encoder_decoder:
        ids = ids[:, batch.prompt_ids_BP.shape[1] :]  # a decoder-only model returns the prompt as well
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@contextmanager
def _settings(writer: Any, spec: GenerationSpec) -> Iterator[None]:
    """Context in which ``generate`` uses the settings of the spec.

    They are not passed to ``generate``, because it replaces settings of None by the model's own.
    """
    own = writer.generation_config
    writer.generation_config = spec.config(own)
    try:
        yield
    finally:
        writer.generation_config = own


class _Lockstep:
    """Context in which all ranks run the same number of forwards of a module.

    Before each forward, an all-reduce counts the ranks that still generate. A rank that has left its ``generate`` runs
    dummy forwards until no rank does.
    """

    def __init__(self, writer: Any, comm: Comm) -> None:
        """Follow the forwards of ``writer``, the module that ``generate`` calls for every token."""
        self._writer = writer
        self._comm = comm
        self._idle: dict[str, Any] = {}

    def __enter__(self) -> None:
        """Count ranks before each forward from now on."""
        if self._comm.size > 1:
            self._hook = self._writer.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Run dummy forwards until all ranks are finished; not after an error, which ends the run."""
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
        """Count the ranks that generate; 0 if ``read`` is false: reading would make a GPU wait."""
        number = torch.tensor(int(writes), device=self._comm.device)
        self._comm.all_reduce(number).wait()
        return int(number) if read else 0


def _one_token(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a dummy forward that runs the same units: the last token, without the cache."""
    name = next(name for name in _INPUT_NAMES if inputs.get(name) is not None)
    call = {name: inputs[name][:, -1:], "use_cache": False}
    if inputs.get("encoder_outputs") is not None:
        call |= {"encoder_outputs": inputs["encoder_outputs"], "attention_mask": inputs["attention_mask"]}
    return call
