"""The run file's ``model`` section: the model, its tokenizer and adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fullshard.errors import ConfigError
from fullshard.program.config.section import STATE, ConfigSection, Fraction, FrozenMapping, Option


class TokenizerConfig(ConfigSection):
    """A tokenizer trained on the training data and saved with the model."""

    vocab_size: Annotated[PositiveInt, STATE] = 2000
    """Maximum vocabulary size, special tokens included."""


class AdapterConfig(ConfigSection):
    """A small set of new parameters, added with peft and trained while the model is frozen."""

    path: Annotated[str | None, Option("state", names="model")] = None
    """Go on with a trained adapter: the directory that peft saved, or an id on the Hub. Its own settings apply, and no
    other option can be given; the optimizer starts afresh. null: a new adapter."""
    type: Annotated[Literal["lora", "dora", "ia3", "prompt", "prefix"], STATE] = "lora"
    """lora, dora and ia3 change weights; prompt and prefix prepend trained vectors to the text."""
    r: Annotated[PositiveInt, Option("state", also=("lora_r", "rank", "lora_rank"))] = 8
    """Rank of lora and dora."""
    lora_alpha: Annotated[PositiveFloat, STATE] = 16.0
    """lora and dora are scaled by lora_alpha / r."""
    lora_dropout: Annotated[Fraction, STATE] = 0.0
    """Dropout before lora and dora."""
    target_modules: Annotated[str | tuple[str, ...] | None, STATE] = None
    """Names of the modules that lora, dora and ia3 change, or all-linear; null: peft's default for the model type."""
    num_virtual_tokens: Annotated[PositiveInt, STATE] = 20
    """Number of trained vectors of prompt and prefix."""
    options: Annotated[FrozenMapping, STATE] = Field(default_factory=dict)
    """Other options of peft's configuration class for this type, by their names in peft."""

    @field_validator("target_modules", mode="plain")
    @classmethod
    def _module_names(cls, value: object) -> str | tuple[str, ...] | None:
        if value is None or value == "all-linear":
            return value if value is None else "all-linear"
        if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise ValueError(f"expected all-linear or a list of module names such as [q, v]; got {value!r}")

    @model_validator(mode="after")
    def _settings_of_its_own(self) -> Self:
        written = sorted(self.model_fields_set - {"path"})
        if self.path is not None and written:
            raise ValueError(
                f"path takes the settings of the adapter's own adapter_config.json; remove {', '.join(written)}"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop options that a trained adapter has itself: otherwise a recorded run would be refused when read again."""
        return handler(self) if self.path is None else {"path": self.path}

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        kinds = {
            "r": ("lora", "dora"),
            "lora_alpha": ("lora", "dora"),
            "lora_dropout": ("lora", "dora"),
            "target_modules": ("lora", "dora", "ia3"),
            "num_virtual_tokens": ("prompt", "prefix"),
        }
        for name, types in kinds.items():
            if self.type not in types and self.given(name):
                raise ValueError(f"{name} is an option of {' and '.join(types)}; got type: {self.type}")
        return self


class QuantizationConfig(ConfigSection):
    """Quantised weights of the linear layers under an adapter; the name of a type alone is a short form."""

    type: Annotated[Literal["nf4", "int8"], Option("state", also=("bnb_4bit_quant_type",))] = "nf4"
    """nf4: 4 bits, in blocks of 64 weights; int8: 8 bits, with a scale for each row."""
    double_quant: Annotated[bool, Option("state", also=("bnb_4bit_use_double_quant",))] = True
    """Quantise the scales of nf4 too: 4.13 bits a weight and not 4.5."""
    compute_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, Option("state", also=("bnb_4bit_compute_dtype",))
    ] = None
    """Dtype that quantised layers compute in; null: that of training.precision."""
    skip: Annotated[tuple[str, ...], Option("state", also=("llm_int8_skip_modules",))] = ("lm_head",)
    """Modules that are not quantised: the last part of a name, or successive parts, such as decoder.block.0."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        return {"type": value} if isinstance(value, str) else value


class ModelConfig(ConfigSection):
    """The model: an existing one or a new one."""

    path: Annotated[
        str | None,
        Option("state", names="model", own_machine=True, also=("model_name", "name_or_path", "model_name_or_path")),
    ] = None
    """Local Hugging Face directory with config.json, weights and tokenizer, or a model id on the Hub. Set exactly one
    of path and config."""
    config: Annotated[FrozenMapping | None, Option("state", also=("config_name",))] = None
    """model_type and options of a Hugging Face configuration, for a new model with random weights. Set exactly one of
    path and config."""
    tokenizer: Annotated[TokenizerConfig | None, STATE] = None
    """How to train the tokenizer. Required with config; with path the directory's tokenizer is used."""
    model_class: Annotated[Literal["auto", "seq2seq", "causal"], Option("state", travels=True)] = Field(
        default="auto", alias="class"
    )
    """Encoder-decoder (seq2seq) or decoder-only (causal); auto: from the model's configuration."""
    attn_implementation: Annotated[
        Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None, Option("state", travels=True)
    ] = None
    """Attention implementation, if the model supports it; null: chosen by transformers."""
    attention_dropout: Annotated[Fraction | None, STATE] = None
    """Dropout of T5's attention weights, separate from its other dropout; null: from the model's configuration. Zero
    saves the memory of their masks, a large part of the activations."""
    output_router_logits: Annotated[bool | None, STATE] = None
    """Mixtures of experts: whether to train the routers' own loss too, weighted by the coefficients in the model's
    configuration, as transformers does; null: the model's configuration decides."""
    adapter: Annotated[AdapterConfig | None, Option("state", also=("adapter",))] = None
    """Train an adapter and freeze the model; null: train all parameters."""
    quantization: Annotated[QuantizationConfig | None, STATE] = None
    """Quantise the frozen weights under the adapter; null: they keep the run's precision."""

    freeze: Annotated[tuple[str, ...], Option("state", before=[])] = ()
    """Patterns of the names of parameters that are not trained, such as [encoder.*, shared.weight]; * stands for any
    characters, dots too (Python's fnmatch). Frozen parameters have no gradients and no optimizer state, and are
    published as they were."""
    train: Annotated[tuple[str, ...], Option("state", before=[])] = ()
    """Instead of freeze: patterns of the names of the only parameters that are trained."""

    new_tokens: Annotated[tuple[str, ...], Option("state", before=[])] = ()
    """Words or marks to add to the tokenizer as tokens of their own, such as [<ticket>, <reply>]. Where the table of
    embeddings (and an output layer of its own) has no rows for them, it gets new ones, with the values that
    transformers' resize_token_embeddings gives them. With an adapter (lora, dora) only the tokens' own rows are
    trained, and saved with it."""

    @field_validator("freeze", "train", "new_tokens", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _adds_tokens(self) -> Self:
        repeated = sorted({one for one in self.new_tokens if self.new_tokens.count(one) > 1})
        if repeated or not all(one.strip(" ") for one in self.new_tokens):  # a line break may be one
            raise ValueError(f"new_tokens: {f'{repeated[0]!r} is given twice' if repeated else 'a token is empty'}")
        adapter = self.adapter
        if (
            self.new_tokens
            and adapter is not None
            and (adapter.path is not None or adapter.type not in ("lora", "dora"))
        ):
            why = "an adapter of type lora or dora" if adapter.path is None else "a new adapter: another has its tokens"
            raise ValueError(f"new_tokens needs full fine-tuning or {why}. Remove one of them")
        return self

    @model_validator(mode="after")
    def _freezes_one_way(self) -> Self:
        if self.freeze and self.train:
            raise ValueError("freeze and train both say which parameters are trained; give one")
        if self.adapter is not None and (given := self.given("freeze", "train")):
            raise ValueError(
                f"{given[0]} needs a model without adapter, which freezes the whole model; to train layers beside it, "
                "name them in adapter.options: {modules_to_save: [...]}"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of path and config must be given; got {given}")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("config needs a tokenizer section too, such as tokenizer: {vocab_size: 2000}")
        if self.path is not None and self.tokenizer is not None:
            raise ValueError("tokenizer needs config: a model loaded from path has its own tokenizer")
        if self.quantization is None:
            return self
        if self.config is not None:
            raise ValueError(
                "quantization needs path: a model from config has random weights, which would be quantised and lost"
            )
        if self.adapter is None:
            raise ValueError(
                f"quantization: {self.quantization.type} needs an adapter, because quantised weights are frozen; add "
                "adapter: {type: lora}, or leave quantization out to train all parameters"
            )
        return self


def require_base(model: ModelConfig) -> None:
    """Refuse to train an adapter of a new model; a plan of one is possible, because it needs no weights.

    Raises:
        ConfigError: There is an adapter and no ``path``.
    """
    if model.adapter is not None and model.path is None:
        raise ConfigError(
            "model.adapter needs model.path: an adapter is saved without its base model, and the random weights of a "
            "model from model.config would be lost. Remove model.adapter to train the new model in full, or set "
            "model.path."
        )
