"""The base class and the types shared by all sections of the run file."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer

FrozenMapping = Annotated[
    dict[str, Any],
    AfterValidator(lambda values: MappingProxyType(dict(values))),
    PlainSerializer(dict, return_type=dict),
]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ConfigSection(BaseModel):
    """Base of all sections: frozen, with no other keys than those declared."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
