"""What only some types of models have, and what is trained or refused because of it.

Mixtures of experts add their routers' loss if ``output_router_logits`` is set. Other types that add a term of their own
to the loss are refused, because they would silently be trained with a different loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fullshard.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GATE = "output_router_logits"
"""Name of transformers' option, in configurations and forwards."""

MIXTURES = frozenset(
    (
        *(
            "doge",
            "ernie4_5_moe",
            "flex_olmo",
            "gpt_oss",
            "granitemoe",
            "granitemoehybrid",
            "granitemoeshared",
            "jamba",
        ),
        *("jetmoe", "laguna", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe"),
        *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "switch_transformers"),
    )
)
"""Model types whose routers' loss a test compares with transformers'."""

_BALANCE = ("router_aux_loss_coef", ("aux_loss",))

_TERMS = {
    "jetmoe": (("aux_loss_coef", ("aux_loss",)),),
    "switch_transformers": (
        ("router_aux_loss_coef", ("encoder_aux_loss", "decoder_aux_loss")),
        ("router_z_loss_coef", ("encoder_z_loss", "decoder_z_loss")),
    ),
}
"""Coefficients in the configuration, and the outputs of forward that they multiply; ``_BALANCE`` for other types."""

_BOTH_WAYS = frozenset(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
"""Model types that read their input in both directions unless ``is_decoder`` is set; a test looks at every type."""

T5_FAMILY = frozenset({"t5", "mt5", "umt5", "longt5", "pop2piano", "switch_transformers"})
"""Model types with T5's layers."""


@dataclass(frozen=True)
class RouterLoss:
    """The routers' own loss of a mixture of experts.

    Attributes:
        terms: Names of outputs of the model's forward, and their coefficients.
    """

    terms: tuple[tuple[str, float], ...]

    def of(self, output: Any) -> Tensor:
        """Return the loss, 0-d, that transformers adds for one forward with ``output_router_logits``.

        Raises:
            ConfigError: No part of the model returned its routers' outputs, so there is nothing to train.
        """
        total: Any = 0.0
        for name, coefficient in self.terms:
            # A stack without routers returns the number 0 instead of a tensor.
            total = total + coefficient * getattr(output, name)
        if not isinstance(total, Tensor):
            raise ConfigError(
                "The routers' own loss cannot be trained: the model's forward returned no outputs of its routers. "
                "Either the model has no routers, or this release of transformers does not collect them (5.17 does not "
                f"for granitemoe). Upgrade transformers, or set model.{GATE}: false to train without that loss."
            )
        return total


def router_loss(config: PreTrainedConfig, wanted: bool | None = None) -> tuple[RouterLoss | None, str | None]:  # noqa: FBT001
    """Return the routers' loss to train, or None, and a note for the user if the model has routers; any process.

    Args:
        config: The model's configuration.
        wanted: ``model.output_router_logits`` of the run file; None: the configuration's.

    Raises:
        ConfigError: The routers' loss is requested, but the model has none, or one of an unknown form.
    """
    if config.model_type not in MIXTURES:
        config = getattr(config, "text_config", config)  # of a model with other parts, such as images
    kind = config.model_type
    coefficients = _TERMS.get(kind, (_BALANCE,))
    has_routers = kind in MIXTURES or hasattr(config, GATE)
    if not has_routers:
        if wanted:
            raise ConfigError(
                f"model.{GATE}: true needs a mixture of experts; {kind} has no routers. Remove it, or set it to null."
            )
        return None, None
    if not (getattr(config, GATE, False) if wanted is None else wanted):
        why = f"model.{GATE}: false" if wanted is False else f"the model's configuration does not set {GATE}"
        return None, f"the routers' own loss is not trained: {why}"
    if kind not in MIXTURES:
        raise ConfigError(
            f"model.{GATE} (or the same option of the model's configuration) adds the routers' own loss to the "
            f"training loss; how {kind} weighs it is not known here. Known are {', '.join(sorted(MIXTURES))}. Set "
            f"model.{GATE}: false to train {kind} without it."
        )
    terms = [(name, float(getattr(config, option))) for option, names in coefficients for name in names]
    shown = ", ".join(f"{option} {getattr(config, option):g}" for option, _ in coefficients)
    return RouterLoss(tuple(terms)), f"the routers' own loss is trained too ({shown})"


def require_plain_loss(config: PreTrainedConfig) -> None:
    """Refuse a model whose own loss has a term that is not trained here; any process.

    Raises:
        ConfigError: The term is a z-loss over all positions (Bamba), or a loss of several tokens ahead (ProphetNet).
    """
    kind = config.model_type
    if kind == "bamba" and getattr(config, "z_loss_coefficient", 0):
        raise ConfigError(
            f"bamba's own loss has a z-loss (z_loss_coefficient: {config.z_loss_coefficient:g}) over all positions, "
            "prompts and padding included, which is not trained here. Set z_loss_coefficient: 0 in the model's "
            "configuration; training.z_loss is the same over the targets."
        )
    if kind == "prophetnet" and not config.disable_ngram_loss:
        raise ConfigError(
            f"prophetnet's own loss is of {config.ngram} tokens ahead (disable_ngram_loss: false), of which only the "
            "next one would be trained here. Set disable_ngram_loss: true in the model's configuration to train that "
            "one alone."
        )
    if kind == "prophetnet" and config.eps:
        raise ConfigError(
            f"prophetnet's own loss has label smoothing (eps: {config.eps:g}), which is not trained here. Set eps: 0 "
            "in the model's configuration, and training.label_smoothing_factor."
        )


def require_left_to_right(config: PreTrainedConfig) -> None:
    """Refuse a decoder-only model that sees the tokens that it is to predict; any process.

    Transformers registers it for causal language modelling all the same.

    Raises:
        ConfigError: Its attention goes in both directions.
    """
    kind, remedy = config.model_type, "Use a model of another type."
    if kind == "xlnet" or (kind == "xlm" and not config.causal):
        remedy = remedy if kind == "xlnet" else "Set causal: true in the model's configuration."
    elif kind in _BOTH_WAYS and not config.is_decoder:
        remedy = "Set is_decoder: true in the model's configuration."
    else:
        return
    raise ConfigError(
        f"A {kind} model with this configuration reads its input in both directions: it would see the tokens that it "
        f"is to predict, and write nothing useful. {remedy}"
    )


def rates_of_dropout(owners: Iterable[object]) -> list[tuple[object, str, float]]:
    """Return the rates of dropout and jitter that are not 0 among the attributes of modules or configurations.

    Each is its owner, the attribute's name and its value; any process.
    """
    return [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, float) and value
        if "drop" in name or "jitter" in name or (name == "p" and "Drop" in type(owner).__name__)
    ]


def set_attention_dropout(model: PreTrainedModel, probability: float) -> None:
    """Set the dropout of T5's attention weights, in place, without changing its other dropout; any rank.

    T5's configuration has one rate for all dropout. The dropout masks of attention weights grow with the square of the
    length and are a large part of the activations in training.

    Args:
        model: On any device; not sharded.
        probability: At least 0, less than 1.

    Raises:
        ModelError: The model is not of T5's family.
    """
    kind = model.config.model_type
    if kind not in T5_FAMILY:
        own = [name for name in ("attention_dropout", "attn_pdrop") if hasattr(model.config, name)]
        raise ModelError(
            f"model.attention_dropout is for models of T5's family ({', '.join(sorted(T5_FAMILY))}); this is {kind}. "
            + (f"Its own option is {own[0]}, in model.config or the model's config.json." if own else "Remove it.")
        )
    for module in model.modules():
        # Other layers have an ``nn.Dropout`` under the same name.
        if "Attention" in type(module).__name__ and isinstance(getattr(module, "dropout", None), float):
            module.dropout = probability  # type: ignore[assignment]


def require_fp16_fit(kind: str) -> None:
    """Refuse a type of model that is known to overflow in float16; any process.

    Raises:
        ModelError: The model is of T5's family.
    """
    if kind in T5_FAMILY:
        raise ModelError(
            f"precision: fp16 is not supported for {kind}: T5 was trained in bfloat16, and its activations exceed "
            "float16's maximum of 65,504, mostly in the feed-forward layers. Keeping their output layer (wo) in "
            "float32 helps for some checkpoints only. Use precision: bf16 (or fp32), or set training.allow_fp16 to "
            "try fp16."
        )
