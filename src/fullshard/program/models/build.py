"""Models and tokenizers: loaded from a local Hugging Face directory, or created from a config and texts."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from fullshard.core.transformers_private import attentions, class_of, one_at_a_time, without_bar
from fullshard.errors import ModelError
from fullshard.file_names import stays_inside
from fullshard.program.models.packing import sliding_window

ModelClass = Literal["auto", "seq2seq", "causal"]

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
"""T5's special tokens; a trained tokenizer gives them T5's ids 0, 1 and 2."""

PUNCTUATION = r"[^\w\s▁]"
"""Matches every character that is not part of a word; the word marker is part of one."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*", "*.tiktoken")
SENTENCEPIECE_HINT = (
    " (The directory has no tokenizer.json. A SentencePiece file is read with: pip install sentencepiece protobuf.)"
)
SHOWN_NAMES = 5

_SPECIAL_IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, sentinels: int = 0, *, ends: bool = True
) -> PreTrainedTokenizerFast:
    """Train a subword tokenizer with T5's special tokens. The same texts give the same tokenizer, on any rank.

    Byte-pair encoding on words marked by SentencePiece's word marker. (T5 uses a unigram model, but its trainer
    computes different scores on every run, and so a different order of ids.) No piece spans two words, two parts of an
    identifier joined by underscores, or a word and a punctuation mark, so that a small vocabulary has complete
    words. A character that is not in the texts becomes ``<unk>``. Encoding and decoding a text returns it in Unicode's
    canonical composition.

    Args:
        texts: Texts to learn the pieces from, sources and targets.
        vocab_size: Maximum number of pieces, including special tokens.
        sentinels: Number of T5's sentinel tokens, ``<extra_id_0>`` and so on, for span corruption.
        ends: Whether the tokenizer ends each text with ``</s>``. A causal model of plain text goes on with its prompts.

    Returns:
        A tokenizer with ``<pad>`` 0, ``</s>`` 1 and ``<unk>`` 2.

    Raises:
        ModelError: The vocabulary is smaller than the special tokens and the alphabet.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Split(Regex(PUNCTUATION), "isolated"),
            pre_tokenizers.Split("_", "merged_with_next"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    extra = [f"<extra_id_{number}>" for number in range(sentinels)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS, UNK, *extra], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise ModelError(
            f"A vocabulary of {vocab_size} is too small: the special tokens and the characters of the texts alone are "
            f"{size}. Use a larger vocab_size."
        )
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
        )
    special: dict[str, Any] = {"extra_special_tokens": extra} if extra else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, **special)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face directory, without the network; any rank, alone.

    A tokenizer without a padding token (GPT-2's) pads with its end-of-sequence token; padding is masked everywhere.

    Raises:
        ModelError: There is no such directory or no tokenizer in it, it cannot be read, or it has no end-of-sequence
            token.
    """
    directory = _require_directory(path)
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelError(
            f"{directory} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Save it there with tokenizer.save_pretrained."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        hint = "" if (directory / "tokenizer.json").exists() else SENTENCEPIECE_HINT
        raise ModelError(f"The tokenizer in {directory} cannot be loaded: {error}{hint}") from error
    for name in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        if "/" in name or not stays_inside(name):  # each is saved in a file of its name
            raise ModelError(
                f"The tokenizer in {directory} has a chat template named {name!r}, which is not the name of a file. "
                "Rename or delete it in tokenizer_config.json."
            )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"The tokenizer in {directory} has no end-of-sequence token: set eos_token and save it again.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_model(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_class: ModelClass = "auto",
    attention: str | None = None,
    seed: int,
) -> PreTrainedModel:
    """Build a model with new weights, in training mode, on the CPU in fp32; any rank. A seed gives the same weights.

    The vocabulary size and the ids of special tokens are the tokenizer's, unless the config has them. Torch's global
    random state does not change.

    Args:
        config: ``model_type`` and any options of that type's Hugging Face configuration.
        tokenizer: The tokenizer the model is for.
        model_class: ``seq2seq``, ``causal``, or ``auto``: by the type.
        attention: transformers' ``attn_implementation``; None: transformers' default.
        seed: Seed of the weights.

    Raises:
        ModelError: The type or an option is unknown (the message names the nearest one), a value is invalid, the type
            has no such class or no such attention, or the vocabulary is smaller than the tokenizer's.
    """
    hf_config = _make_config(config, tokenizer)
    auto_class = _auto_class(hf_config, model_class)
    _require_vocabulary(hf_config, tokenizer)
    _require_attention(hf_config, auto_class, attention)
    with one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = auto_class.from_config(hf_config, attn_implementation=attention)
        except (ImportError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise ModelError(f"No {hf_config.model_type} model can be built from this config: {error}") from error
    return model.train()


def load_model(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_class: ModelClass = "auto",
    attention: str | None = None,
    grow: int | None = None,
) -> PreTrainedModel:
    """Load a model, in training mode, on the CPU in fp32, without the network; any rank, alone.

    Args:
        path: A local Hugging Face directory, with ``config.json`` and weights.
        tokenizer: The tokenizer the model is used with.
        model_class: ``seq2seq``, ``causal``, or ``auto``: by the config.
        attention: transformers' ``attn_implementation``; None: transformers' default.
        grow: Seed of the values of new rows, if the model's vocabulary may be smaller than the tokenizer's; they are
            those of transformers' ``resize_token_embeddings``. None: it may not.

    Raises:
        ModelError: There is no such directory, config or weights, weights are missing or have another shape (they would
            silently be random), the type has no such class, or the vocabulary is smaller than the tokenizer's.
    """
    directory, hf_config, auto_class = _read_config(path, tokenizer, model_class, grows=grow is not None)
    _require_attention(hf_config, auto_class, attention)
    try:
        # Mismatched shapes are ignored here and reported below with their names, like missing weights.
        with one_at_a_time, without_bar():
            model, info = auto_class.from_pretrained(
                directory,
                config=hf_config,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"The weights in {directory} cannot be loaded: {error}") from error
    _require_all_weights(directory, info)
    if grow is not None:
        add_rows(model, tokenizer, grow)
    return model.train()


def add_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Add rows to a model's tables, in place, if they have none for some ids; any rank. A seed gives the same values.

    They are those of transformers' ``resize_token_embeddings``; on the meta device there are none.
    """
    if lacks_rows(model.config, tokenizer):
        has_values = not model.get_input_embeddings().weight.is_meta
        with one_at_a_time, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # By itself it would tie by the configuration: an output layer whose own weights were loaded would be lost.
            model.tie_weights = partial(type(model).tie_weights, model, recompute_mapping=False)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=has_values)
            del model.tie_weights


def build_skeleton(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_class: ModelClass = "auto",
    attention: str | None = None,
    grows: bool = False,
) -> PreTrainedModel:
    """Build the model of a local Hugging Face directory without its weights, on the meta device; any rank, alone.

    It is the model of :func:`load_model` with the same arguments, but without memory: weights are read into the shards
    later. It is in training mode and its parameters are fp32. If it ``grows``, its vocabulary may be smaller than the
    tokenizer's: rows are added later.

    Raises:
        ModelError: There is no such directory or config, the type has no such class, or the vocabulary is smaller than
            the tokenizer's.
    """
    directory, hf_config, auto_class = _read_config(path, tokenizer, model_class, grows=grows)
    _require_attention(hf_config, auto_class, attention)
    try:
        with one_at_a_time, torch.device("meta"):
            model = auto_class.from_config(hf_config, dtype=torch.float32, attn_implementation=attention)
        if model.can_generate():
            model.generation_config = _generation_config(directory)
    except (ImportError, OSError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"The model in {directory} cannot be built: {error}") from error
    return model.train()


def converted_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of stored tensors that transformers would rename or convert when it loads them into ``model``.

    The model, on any device, is not changed.
    """
    transforms = get_model_conversion_mapping(model)
    return [name for name in names if any(one.rename_source_key(name)[1] is not None for one in transforms)]


def is_causal(model: PreTrainedModel) -> bool:
    """Return whether source and target are one sequence (decoder-only) rather than two (encoder-decoder)."""
    return not model.config.is_encoder_decoder


def _read_config(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, model_class: ModelClass, *, grows: bool = False
) -> tuple[Path, PreTrainedConfig, type[Any]]:
    """Return the directory, its configuration, and the Auto class for it."""
    directory = _require_directory(path)
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json: it is not a Hugging Face model directory.")
    try:
        hf_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{directory / 'config.json'} cannot be read: {error}") from error
    auto_class = _auto_class(hf_config, model_class)
    if not grows:
        _require_vocabulary(hf_config, tokenizer)
    return directory, hf_config, auto_class


def _generation_config(directory: Path) -> GenerationConfig:
    """Return the generation config as ``from_pretrained`` does: the directory's own, or one made from its config."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    return GenerationConfig.from_pretrained(
        directory, config_file_name="config.json", local_files_only=True, _from_model_config=True
    )


def _require_directory(path: str | Path) -> Path:
    """Return the path, or raise if it is not a directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is not a directory. A model is read from a local Hugging Face directory (config.json, "
            "weights, tokenizer); download it first."
        )
    return directory


def _make_config(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return a Hugging Face configuration with defaults from the tokenizer; raise if an option does not exist."""
    options = dict(values)
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise ModelError("The model's config needs a model_type, such as t5, bart or gpt2.")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"Unknown model_type {model_type!r}.{_nearest(str(model_type), CONFIG_MAPPING.keys())}")
    config_class = CONFIG_MAPPING[model_type]
    # The configuration class accepts any keyword and would silently ignore a misspelt option.
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map, *PreTrainedConfig().to_dict()}
    known |= {*_SPECIAL_IDS, "vocab_size", "tie_word_embeddings"}
    for name in options:
        if name not in known:
            raise ModelError(f"A {model_type} config has no option {name!r}.{_nearest(name, known)}")
    try:
        bare = config_class(**options)
        defaults = {"vocab_size": len(tokenizer), **_special_ids(tokenizer, is_encoder_decoder=bare.is_encoder_decoder)}
        return config_class(**{**defaults, **options})
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"The {model_type} config is invalid: {error}") from error


def _special_ids(tokenizer: PreTrainedTokenizerBase, *, is_encoder_decoder: bool) -> dict[str, Any]:
    """Return the tokenizer's special ids; a configuration's defaults belong to its type's first checkpoint."""
    eos = tokenizer.eos_token_id
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": eos,
        "bos_token_id": eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
    }
    if is_encoder_decoder:
        ids |= {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": None}
    return ids


def _auto_class(hf_config: PreTrainedConfig, model_class: ModelClass) -> type[Any]:
    """Return the Auto class that builds or loads the model."""
    if model_class == "auto":
        model_class = "seq2seq" if hf_config.is_encoder_decoder else "causal"
    choices = {
        "seq2seq": (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        "causal": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    }
    auto_class, mapping = choices[model_class]
    if type(hf_config) not in mapping:
        fitting = [name for name, (_, other) in choices.items() if type(hf_config) in other]
        remedy = f"Use class {' or '.join(fitting)}." if fitting else "It cannot be trained to generate text."
        raise ModelError(f"Model type {hf_config.model_type} has no {model_class} model. {remedy}")
    return auto_class


_FLASH = "flash_attention_2"
_DROPS_WINDOW = ("phimoe", "qwen2_moe")  # their layers' window is only in the mask, which flash attention does not read


def _require_attention(hf_config: PreTrainedConfig, auto_class: type[Any], attention: str | None) -> None:
    """Raise if the model's class does not support an attention implementation, or computes something else by it."""
    if attention in (None, "eager"):
        return
    cls = class_of(auto_class, hf_config)
    offered = attentions(cls)
    if attention not in offered:
        raise ModelError(
            f"{cls.__name__} does not support attn_implementation {attention!r}. It supports {', '.join(offered)}."
        )
    kind, window = hf_config.model_type, sliding_window(hf_config)
    if attention == _FLASH and hf_config.is_encoder_decoder:
        raise ModelError(
            f"attn_implementation: {_FLASH}: transformers takes the padding of sources for that of targets there, and "
            f"{kind} has an encoder. Use sdpa."
        )
    if attention == _FLASH and window is not None and kind in _DROPS_WINDOW:
        raise ModelError(
            f"attn_implementation: {_FLASH}: transformers' {kind} does not tell it the window of {window} tokens. Use "
            "sdpa."
        )


def lacks_rows(hf_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has ids for which the table has no rows; many tables have spare ones."""
    return hf_config.get_text_config().vocab_size < len(tokenizer)


def _require_vocabulary(hf_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the tokenizer has ids for which the model has no embedding."""
    vocab_size = hf_config.get_text_config().vocab_size
    if lacks_rows(hf_config, tokenizer):
        raise ModelError(
            f"The model's vocab_size of {vocab_size} is smaller than the tokenizer's {len(tokenizer)}: "
            "use the tokenizer that belongs to the model, or a larger vocab_size."
        )


def _require_all_weights(directory: Path, info: Mapping[str, Any]) -> None:
    """Raise if a weight was missing in the files or had another shape, so that its values are random."""
    missing = sorted(info["missing_keys"])
    mismatched = [f"{name} {tuple(found)} for {tuple(needed)}" for name, found, needed in info["mismatched_keys"]]
    for kind, names in (("are missing", missing), ("have another shape than in the config", sorted(mismatched))):
        if names:
            shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
            raise ModelError(
                f"{len(names)} weights in {directory} {kind}: {shown}. Save the model again with save_pretrained, or "
                "correct config.json."
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest name, beginning with a space; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
