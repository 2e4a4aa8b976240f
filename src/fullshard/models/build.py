"""Models and tokenizers: loaded from a local Hugging Face directory, or made from nothing but a config and texts."""

from __future__ import annotations

import difflib
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled
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
from transformers.utils import logging

from fullshard.errors import ModelError

ModelClass = Literal["auto", "seq2seq", "causal"]

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
"""T5's special tokens; a trained tokenizer gives them T5's ids 0, 1 and 2."""

PUNCTUATION = r"[^\w\s▁]"
"""Every character that is no part of a word; the word sign is one."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*", "*.tiktoken")
SENTENCEPIECE_HINT = (
    " (The directory has no tokenizer.json. A SentencePiece file is read with: pip install sentencepiece protobuf.)"
)
SHOWN_NAMES = 5

ONE_AT_A_TIME = threading.Lock()
"""transformers swaps methods of its classes while it loads a model, and what two threads swap stays swapped."""

_SPECIAL_IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a subword tokenizer with T5's special tokens. The same texts give the same tokenizer, on any rank.

    Byte-pair encoding on words marked by SentencePiece's word sign. (A unigram model is T5's own choice, but its
    trainer gives other scores on every run, and so another order of ids.) No piece spans two words, two parts of an
    identifier joined by underscores, or a word and a punctuation mark, so that a small vocabulary holds whole words.
    A character that occurs nowhere in the texts becomes ``<unk>``. Text survives encoding and decoding as it is, after
    Unicode's canonical composition.

    Args:
        texts: What to learn the pieces from, sources and targets alike.
        vocab_size: Most pieces to keep, special tokens included.

    Returns:
        A tokenizer with ``<pad>`` 0, ``</s>`` 1 and ``<unk>`` 2, that ends each text with ``</s>``.

    Raises:
        ModelError: The vocabulary has no room for the special tokens and the alphabet.
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
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS, UNK], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise ModelError(
            f"A vocabulary of {vocab_size} is too small: the special tokens and the characters of the texts alone are "
            f"{size}. Use a vocab_size well above that."
        )
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face directory; the network is not used. Any rank may call it.

    A tokenizer without a padding token (GPT-2's) pads with its end-of-sequence token; padding is masked everywhere.

    Args:
        path: The directory.

    Returns:
        The tokenizer.

    Raises:
        ModelError: There is no such directory or no tokenizer in it, it cannot be read, or it has no end-of-sequence
            token.
    """
    directory = _require_directory(path)
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelError(
            f"{directory} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Save it there with tokenizer.save_pretrained."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        hint = "" if (directory / "tokenizer.json").exists() else SENTENCEPIECE_HINT
        raise ModelError(f"The tokenizer in {directory} cannot be loaded: {error}{hint}") from error
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
    """Build a model with new weights, on the CPU in fp32. Every rank that gives the same seed gets the same weights.

    The vocabulary size and the ids of special tokens are the tokenizer's, unless the config names them. Torch's global
    random state is left as it was.

    Args:
        config: ``model_type`` and any options of that type's Hugging Face configuration.
        tokenizer: The tokenizer the model is for.
        model_class: ``seq2seq``, ``causal``, or ``auto``: what the type is.
        attention: How attention is computed, by transformers' name; None: as transformers chooses.
        seed: Seed of the weights.

    Returns:
        The model, in training mode.

    Raises:
        ModelError: The type or an option is unknown (the message names the nearest one), a value is not accepted, there
            is no such class for the type, the vocabulary is smaller than the tokenizer's, or the type has no such
            attention.
    """
    hf_config = _make_config(config, tokenizer)
    auto_class = _auto_class(hf_config, model_class)
    _require_vocabulary(hf_config, tokenizer)
    _require_attention(hf_config, auto_class, attention)
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
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
) -> PreTrainedModel:
    """Load a model from a local Hugging Face directory, on the CPU in fp32. Any rank may call it.

    The network is not used.

    Args:
        path: The directory, with ``config.json`` and weights.
        tokenizer: The tokenizer the model is used with.
        model_class: ``seq2seq``, ``causal``, or ``auto``: what the config says.
        attention: How attention is computed, by transformers' name; None: as transformers chooses.

    Returns:
        The model, in training mode.

    Raises:
        ModelError: There is no such directory, config or weights, weights are missing or of another shape (they would
            silently be random), there is no such class for the type, or the vocabulary is smaller than the tokenizer's.
    """
    directory, hf_config, auto_class = _read_config(path, tokenizer, model_class)
    _require_attention(hf_config, auto_class, attention)
    try:
        # Mismatched shapes are let through here to be reported below, with their names, like missing weights.
        with ONE_AT_A_TIME, _without_bar():
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
    return model.train()


def build_skeleton(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_class: ModelClass = "auto",
    attention: str | None = None,
) -> PreTrainedModel:
    """Build the model of a local Hugging Face directory without its weights, on the meta device. Any rank may call it.

    It is what :func:`load_model` returns, but for memory: weights are to be read into the shards.

    Args:
        path: The directory, with ``config.json``.
        tokenizer: The tokenizer the model is used with.
        model_class: ``seq2seq``, ``causal``, or ``auto``: what the config says.
        attention: How attention is computed, by transformers' name; None: as transformers chooses.

    Returns:
        The model, in training mode, its parameters fp32.

    Raises:
        ModelError: There is no such directory or config, there is no such class for the type, or the vocabulary is
            smaller than the tokenizer's.
    """
    directory, hf_config, auto_class = _read_config(path, tokenizer, model_class)
    _require_attention(hf_config, auto_class, attention)
    try:
        with ONE_AT_A_TIME, torch.device("meta"):
            model = auto_class.from_config(hf_config, dtype=torch.float32, attn_implementation=attention)
        if model.can_generate():
            model.generation_config = _generation_config(directory)
    except (ImportError, OSError, ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"The model in {directory} cannot be built: {error}") from error
    return model.train()


def converted_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Names of stored tensors that transformers would rename or compute with when it loads them into ``model``.

    Args:
        model: On any device; nothing is read or changed.
        names: As they are stored.
    """
    transforms = get_model_conversion_mapping(model)

    def is_converted(name: str) -> bool:
        renamings = (transform.rename_source_key(name) for transform in transforms)
        return any(pattern is not None for _, pattern in renamings)

    return [name for name in names if is_converted(name)]


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a model reads source and target as one sequence (decoder-only) rather than two (encoder-decoder)."""
    return not model.config.is_encoder_decoder


def _read_config(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, model_class: ModelClass
) -> tuple[Path, PreTrainedConfig, type[Any]]:
    """The directory, its configuration, and the Auto class for it."""
    directory = _require_directory(path)
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} holds no config.json: it is no Hugging Face model directory.")
    try:
        hf_config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{directory / 'config.json'} cannot be read: {error}") from error
    auto_class = _auto_class(hf_config, model_class)
    _require_vocabulary(hf_config, tokenizer)
    return directory, hf_config, auto_class


@contextmanager
def _without_bar() -> Iterator[None]:
    """Context in which transformers draws no bar over what a program prints of its own; the Hub's stay, afterwards."""
    hub_draws = not are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if hub_draws:
            logging.enable_progress_bar()


def _generation_config(directory: Path) -> GenerationConfig:
    """What ``from_pretrained`` gives a model: the directory's own, or what its model config says of generation."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    return GenerationConfig.from_pretrained(
        directory, config_file_name="config.json", local_files_only=True, _from_model_config=True
    )


def _require_directory(path: str | Path) -> Path:
    """The path as a directory that exists."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is no directory. A model is read from a local Hugging Face directory (config.json, weights, "
            "tokenizer); download it first."
        )
    return directory


def _make_config(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """A Hugging Face configuration of which every option exists, fitted to the tokenizer."""
    options = dict(values)
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise ModelError("The model's config needs a model_type, such as t5, bart or gpt2.")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"Unknown model_type {model_type!r}.{_nearest(str(model_type), CONFIG_MAPPING.keys())}")
    config_class = CONFIG_MAPPING[model_type]
    # The configuration class takes any keyword: a misspelt option would silently leave the default in place.
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
        raise ModelError(f"The {model_type} config is not accepted: {error}") from error


def _special_ids(tokenizer: PreTrainedTokenizerBase, *, is_encoder_decoder: bool) -> dict[str, Any]:
    """Ids that configurations default to those of their first checkpoint, such as BART's forced end at id 2."""
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
    """The Auto class that builds or loads the model."""
    if model_class == "auto":
        model_class = "seq2seq" if hf_config.is_encoder_decoder else "causal"
    choices = {
        "seq2seq": (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        "causal": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    }
    auto_class, mapping = choices[model_class]
    if type(hf_config) not in mapping:
        fitting = [name for name, (_, other) in choices.items() if type(hf_config) in other]
        remedy = f"Use class {' or '.join(fitting)}." if fitting else "It cannot be trained to write text."
        raise ModelError(f"Model type {hf_config.model_type} has no {model_class} model. {remedy}")
    return auto_class


def _require_attention(hf_config: PreTrainedConfig, auto_class: type[Any], attention: str | None) -> None:
    """Raise when the model's class does not offer a way to compute attention."""
    if attention in (None, "eager"):
        return
    model_class = auto_class._model_mapping[type(hf_config)]
    flags = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    offered = ["eager", *(name for name, flag in flags.items() if getattr(model_class, flag, False))]
    if attention not in offered:
        raise ModelError(
            f"{model_class.__name__} does not offer attn_implementation {attention!r}; it offers {', '.join(offered)}."
        )


def _require_vocabulary(hf_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise when the tokenizer makes ids that the model has no embedding for."""
    vocab_size = hf_config.get_text_config().vocab_size
    if vocab_size < len(tokenizer):
        raise ModelError(
            f"The model's vocab_size of {vocab_size} is smaller than the tokenizer's {len(tokenizer)}: "
            "use the tokenizer that belongs to the model, or a larger vocab_size."
        )


def _require_all_weights(directory: Path, info: Mapping[str, Any]) -> None:
    """Raise when a weight was not in the files, or had another shape, and so was left at random values."""
    missing = sorted(info["missing_keys"])
    mismatched = [f"{name} {tuple(found)} for {tuple(needed)}" for name, found, needed in info["mismatched_keys"]]
    for kind, names in (("are missing", missing), ("have another shape than the config's", sorted(mismatched))):
        if names:
            shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
            raise ModelError(
                f"{len(names)} weights in {directory} {kind}: {shown}. Save the model again with save_pretrained, or "
                "mend config.json."
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest name, with a leading space, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
