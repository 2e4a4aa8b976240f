"""Text generation with a sharded model, by the run's settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from fullshard.core.comm import Comm, free_memory, lacking
from fullshard.core.engine import units
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.data import Batch
from fullshard.program.models import base_of
from fullshard.program.models.model_types import GATE

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GenerationSpec:
    """Settings of text generation; the options of the same names in the run file's ``evaluation`` section."""

    max_new_tokens: int  # maximum number of tokens of a row's text
    min_new_tokens: int = 0  # minimum number of tokens
    num_beams: int = 1  # width of the beam search; 1: greedy
    length_penalty: float = 1.0  # exponent of the length that a beam's score is divided by
    no_repeat_ngram_size: int = 0  # a text repeats no sequence of this many tokens; 0: no limit
    temperature: float = 0.0  # of sampling, with the model's own top_k and top_p; 0: no sampling

    @classmethod
    def of(cls, config: RunConfig) -> GenerationSpec:
        """Return the generation settings of a run."""
        values = dict(config.evaluation)
        values["max_new_tokens"] = values["max_new_tokens"] or config.data.max_target_length
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """Return a copy of a model's own generation settings with these settings."""
        config = copy.deepcopy(own)
        draws = self.temperature > 0
        config.update(
            max_new_tokens=self.max_new_tokens,
            max_length=None,
            min_new_tokens=self.min_new_tokens or None,
            min_length=None,
            num_beams=self.num_beams,
            length_penalty=self.length_penalty if self.num_beams > 1 else None,
            early_stopping=config.early_stopping if self.num_beams > 1 else None,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            do_sample=draws,
            temperature=self.temperature if draws else None,
            top_k=own.top_k if draws else None,
            top_p=own.top_p if draws else None,
            num_return_sequences=1,
            return_dict_in_generate=False,
            use_cache=True,
        )
        return config


def fits_at_once(model: PreTrainedModel, comm: Comm) -> bool:
    """Return whether all units take at most half of each rank's free memory; the rest is for caches and activations.

    Every rank calls it and gets the same answer; False where the system does not report its free memory.
    """
    needed = sum(row.gathered_bytes for row in units(model).rows)
    ranks = comm.all_gather_object((needed, free_memory(comm.device)))
    return all(free for _, free in ranks) and lacking(ranks, share=0.5) is None


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
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Batch,
    spec: GenerationSpec,
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """Generate a text for each row of a batch; every rank calls it, each with its own batch.

    The texts are those of the unsharded model's ``generate``.

    Args:
        model: The sharded model, in evaluation mode; also with a peft adapter around it.
        tokenizer: The model's tokenizer.
        batch: On the model's device.
        spec: Lengths and beams.
        more: Further keyword arguments of the model's ``generate``, such as a streamer.

    Returns:
        A text for each row, fillers included, without leading and trailing white space.
    """
    assert batch.prompt_ids_BP is not None, "batches of an evaluation have prompts"
    writer = base_of(model)  # the inner model, which generate calls for every token also inside an adapter
    with _settings(writer, spec):
        ids = model.generate(  # type: ignore[operator]
            input_ids=batch.prompt_ids_BP, attention_mask=batch.prompt_mask_BP, synced_gpus=False, **(more or {})
        )
    if not model.config.is_encoder_decoder:
        ids = ids[:, batch.prompt_ids_BP.shape[1] :]  # a decoder-only model returns the prompt as well
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@contextmanager
def _settings(writer: Any, spec: GenerationSpec) -> Iterator[None]:
    """Apply the spec's settings to ``generate`` inside the context.

    They are not passed to ``generate``, because it replaces settings of None by the model's own.
    """
    own, routers = writer.generation_config, getattr(writer.config, GATE, None)
    writer.generation_config = spec.config(own)
    if routers:  # transformers cannot compute the routers' loss for a single token
        setattr(writer.config, GATE, False)
    try:
        yield
    finally:
        writer.generation_config = own
        if routers:
            setattr(writer.config, GATE, routers)
