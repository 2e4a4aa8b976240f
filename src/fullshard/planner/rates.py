"""Measured times of operators and collectives on a machine, and the file that stores them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.planner.work import Issued, Operator

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""Errors raised by reading a file of another kind."""


@dataclass(frozen=True)
class Rates:
    """Times of operators and collectives on a machine with ``ranks`` ranks side by side; a speed for ``time_step``.

    Attributes:
        ranks: Ranks that ran at the same time, and share the machine's memory and caches.
        host_s: Seconds of a step between two operators.
        operators: Operators and the seconds that each took, in steps.
        collectives: By kind, with growing sizes: bytes that a rank sends, seconds alone, and seconds that no
            computation hid.
        queues: Whether operators are queued: False on the CPU.
        travels: Whether messages travel while CPU ranks compute, so that a unit's reduce is hidden behind the next one.
    """

    ranks: int
    host_s: float
    operators: Mapping[str, tuple[Operator, float]]
    collectives: Mapping[str, Sequence[tuple[int, float, float]]]
    queues: bool = False
    travels: bool = False

    def operator_seconds(self, operator: Operator) -> float:
        """Return the time of an operator; an unmeasured one is scaled from the nearest measured one.

        The nearest has the same name and dtype and, as far as possible, as much arithmetic, else as many bytes.

        Raises:
            ConfigError: Nothing was measured.
        """
        found = self.operators.get(operator.key)
        if found is not None:
            return found[1]
        if not operator.nbytes:
            return 0.0
        name = _name(operator)
        alike = [one for one in self.operators.values() if _name(one[0]) == name and one[0].nbytes]
        alike = alike or [one for one in self.operators.values() if bool(one[0].flops) == bool(operator.flops)]
        alike = [one for one in alike if one[0].dtype == operator.dtype] or alike
        if not alike:
            raise ConfigError("The rates have no operators. Measure them again: fullshard bench.")
        nearest, seconds = min(alike, key=lambda one: abs(math.log(_size(operator) / max(_size(one[0]), 1))))
        return seconds * _size(operator) / max(_size(nearest), 1)

    def collective_seconds(self, issued: Issued) -> tuple[float, float]:
        """Return the time of a collective alone, and how much of it is not hidden by computation.

        Between measured sizes both are interpolated; beyond them they are in proportion to the largest. A kind that was
        not measured is taken for an all-gather.

        Raises:
            ConfigError: No collective was measured.
        """
        sizes = self.collectives.get(issued.kind) or self.collectives.get("all_gather")
        if not sizes:
            raise ConfigError(
                "The rates have no collectives: they were measured on one rank. Measure them with as many ranks as "
                "there are on this machine: fullshard bench RUN --world 2."
            )
        sent = issued.sent_bytes
        if sent <= sizes[0][0] or len(sizes) == 1:
            share = max(sent / max(sizes[-1][0], 1), 1.0)
            return sizes[0][1] * share, sizes[0][2] * share
        at = next((place for place in range(1, len(sizes)) if sizes[place][0] >= sent), None)
        if at is None:
            return sizes[-1][1] * sent / sizes[-1][0], sizes[-1][2] * sent / sizes[-1][0]
        low, high = sizes[at - 1], sizes[at]
        share = (sent - low[0]) / (high[0] - low[0])
        return low[1] + share * (high[1] - low[1]), low[2] + share * (high[2] - low[2])


def read_rates(path: Path, ranks: int) -> Rates:
    """Return a machine's rates for ``ranks`` ranks side by side, or for the next smaller number that was measured.

    Raises:
        ConfigError: There is no file, it holds no rates, or none for so few ranks.
    """
    try:
        measured = {int(count): one for count, one in json.loads(path.read_text(encoding="utf-8"))["ranks"].items()}
        found = {count: _rates(count, values) for count, values in measured.items()}
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path}. Measure this machine's rates: fullshard bench RUN --out {path}."
        ) from None
    except (*_UNREADABLE, OSError) as error:
        raise ConfigError(f"{path} holds no rates ({error!r}). Measure them again: fullshard bench.") from error
    fitting = [count for count in found if count <= ranks]
    if not fitting:
        raise ConfigError(
            f"{path} has rates for {', '.join(map(str, found))} ranks side by side, not for {ranks}. Measure them: "
            f"fullshard bench RUN --world {ranks}."
        )
    return found[max(fitting)]


def write_rates(path: Path, machine: str, rates: Rates) -> None:
    """Write rates to a file; those for other numbers of ranks stay if the file is of this machine and torch.

    Raises:
        ConfigError: The file is something else.
    """
    about = {"machine": machine, "torch": torch.__version__}
    before, kept = rates_before(path), {}
    if before is not None and {key: before[0].get(key) for key in about} == about:
        kept = before[1]
    path.write_text(json.dumps({**about, "ranks": {**kept, str(rates.ranks): _values(rates)}}, indent=1) + "\n")


def rates_before(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return all of a file of rates, and its rates by number of ranks; None if there is no file. Any process.

    Raises:
        ConfigError: The file is something else.
    """
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values, {str(count): _values(_rates(int(count), one)) for count, one in values["ranks"].items()}
    except _UNREADABLE as error:
        raise ConfigError(f"{path} holds no rates ({error!r}). Write to another file: --out FILE.") from error


def _values(rates: Rates) -> dict[str, Any]:
    operators = {
        key: [seconds, operator.flops, operator.nbytes, None if operator.dtype is None else str(operator.dtype)[6:]]
        for key, (operator, seconds) in rates.operators.items()
    }
    collectives = {kind: [list(one) for one in sizes] for kind, sizes in rates.collectives.items()}
    kinds = {"queues": rates.queues, "travels": rates.travels}
    return {"host_s": rates.host_s, **kinds, "collectives": collectives, "operators": operators}


def _rates(ranks: int, values: dict[str, Any]) -> Rates:
    operators = {
        key: (Operator(key, flops, nbytes, None if dtype is None else getattr(torch, dtype)), seconds)
        for key, (seconds, flops, nbytes, dtype) in values["operators"].items()
    }
    collectives = {
        kind: [(int(sent), alone, never_hidden) for sent, alone, never_hidden in sizes]
        for kind, sizes in values["collectives"].items()
    }
    return Rates(ranks, values["host_s"], operators, collectives, values["queues"], values.get("travels", False))


def _name(operator: Operator) -> str:
    return operator.key.partition("(")[0]


def _size(operator: Operator) -> int:
    """Return the arithmetic of a product, the bytes of anything else."""
    return operator.flops or operator.nbytes
