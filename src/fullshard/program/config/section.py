"""The base class of all sections of the run file, and what the program knows of an option besides its value.

A field is annotated with an :class:`Option`. Resuming, the search for settings that fit, the plan and the files that
travel with a model read it there: none of them has a list of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.fields import FieldInfo

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

    def given(self, *names: str) -> list[str]:
        """Return those of some options that differ from their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


@dataclass(frozen=True)
class Searched:
    """How ``sharding: auto`` and ``fullshard plan --fit`` vary an option that the run file leaves open.

    Options of one scope are varied in the order of their fields, the later ones faster.
    """

    scope: Literal["last", "all", "rank"]  # last: only where nothing fits otherwise; all: alike for all ranks' memory;
    # rank: it does not change what a rank keeps between steps
    values: tuple[Any, ...]  # values to try, the fastest first
    needs: str | None = None  # dotted key of an option without which it has no effect
    idle: tuple[str, Any] | None = None  # dotted key and value of an option with which it has none


@dataclass(frozen=True)
class Option:
    """What the program knows of an option, or of all unknown ones of a section, besides its value."""

    # What a run may do with it when it resumes. free: change it; same: change it if the user names the checkpoint;
    # evaluation: the same, but evaluations before are not compared with later ones; state: not change it at all, as
    # the saved state depends on it.
    resume: Literal["free", "same", "evaluation", "state"]
    # What its value names. file: a file of rows; dataset: a directory or an id on the Hub, and model likewise; resuming
    # compares these by content, and a run file names them relative to itself. place: where the run writes, or resumes.
    names: Literal["file", "dataset", "model", "place"] | None = None
    draws_rows: bool = False  # whether it is a number of rows, which a hash chooses
    holds_out: bool = False  # whether it is a share of rows to hold out, which ``data.held_out_by`` chooses
    own_machine: bool = False  # whether machines of a run may have other values; what it names must be the same
    travels: bool = False  # whether it decides how a model is asked: saved with the model, and published with it
    planned: bool = True  # whether a plan of the run may depend on it
    searched: Searched | None = None  # how the search for settings that fit varies it; None: it does not
    also: tuple[str, ...] = ()  # names of other programs for it, with the same values: an unknown key's error tells it
    before: Any = None  # what runs did whose version did not have it, if their checkpoints are to be resumed


FREE, SAME, STATE = Option("free"), Option("same"), Option("state")
EVALUATION, ASKED = Option("evaluation"), Option("same", travels=True)
REPORTED = Option("free", planned=False)  # of what a run reports, and where


def section_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, alone, optional or by name; None for a plain option."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field by dotted key, a section before those in it; ``*`` stands for a name that the user chooses."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        if (inner := section_in(field)) is not None:
            yield from fields_of(inner, f"{key}.*." if get_origin(field.annotation) is Mapping else f"{key}.")


def options_of(section: type[BaseModel], prefix: str = "") -> dict[str, Option]:
    """Return the option of each field of a section by dotted key, as from :func:`fields_of`."""
    return {key: option for key, field in fields_of(section, prefix) if (option := own_option(field)) is not None}


def own_option(field: FieldInfo) -> Option | None:
    """Return what a field says of itself."""
    return next((one for one in field.metadata if isinstance(one, Option)), None)


def option_at(section: type[BaseModel], key: str) -> Option:
    """Return the option at a dotted key, or of the section around it, for a key of another version or of free text."""
    found, inner = SAME, section
    parts = iter(key.split("."))
    for part in parts:
        fields = {} if inner is None else {field.alias or name: field for name, field in inner.model_fields.items()}
        if part not in fields:
            break
        field = fields[part]
        found, inner = own_option(field) or found, section_in(field)
        if get_origin(field.annotation) is Mapping:
            next(parts, None)
    return found
