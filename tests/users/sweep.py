"""Every overridable function of torch, called on shards in many ways, and compared with the full tensor.

``python -m users.sweep`` in ``tests`` prints outcomes for docs/evidence/shards.md.
"""

import functools
import sys
import threading
import types
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from math import inf, prod
from textwrap import fill
from typing import NamedTuple
from zlib import crc32

import torch
from torch.overrides import get_testing_overrides

from fullshard.core.layout import ShardMeta
from fullshard.core.layout.unit_layout import LaneLayout, Placement
from fullshard.core.shards import RowSplit, Shard, as_shard, elementwise, row_split_of
from fullshard.core.shards.elementwise import about, refused
from fullshard.core.shards.rules import find_rule, plain_name
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError

RANKS = 2
NAME = "the.weight"


@dataclass(frozen=True)
class Subject:
    """A parameter split over two ranks: its shape, the elements of a shard of its lane, and what is never split."""

    shape: tuple
    shard_numel: int
    granule: int
    start: int = 0
    dtype: torch.dtype = torch.float32

    def meta(self, rank):
        row = prod(self.shape[1:]) if len(self.shape) > 1 else 1
        placement = Placement(0, self.start, prod(self.shape), row, self.granule)
        lane = LaneLayout(RANKS, self.shard_numel, (placement,))
        return ShardMeta(NAME, (), self.shape, lane, placement, rank)

    def holds_all(self, rank):
        start, stop = self.meta(rank).element_range
        return stop - start == prod(self.shape)

    def full(self, seed):
        generator = torch.Generator().manual_seed(seed)
        values = torch.rand(self.shape, generator=generator) * 0.8 + 0.1
        if seed % 2 and self.dtype.is_floating_point:
            values = values * torch.where(torch.rand(self.shape, generator=generator) < 0.3, -1.0, 1.0)
        return (values * 9 if self.dtype == torch.int64 else values.round() if self.dtype == torch.bool else values).to(
            self.dtype
        )


SUBJECTS = {
    "matrix": Subject((7, 6), 24, 6),  # 4 and 3 rows
    "vector": Subject((5,), 3, 1),  # 3 and 2 elements
    "alone": Subject((5,), 8, 1),  # rank 1 holds none
    "last": Subject((3, 4), 16, 4, start=16),  # rank 0 holds none
    "wide": Subject((2, 12), 16, 4),  # ranks hold parts of rows
    "number": Subject((), 1, 1),  # rank 1 holds none
    "cube": Subject((7, 3, 2), 24, 6),  # 4 and 3 rows: view(2, -1) of two rows here would mean these
    "integers": Subject((7, 6), 24, 6, dtype=torch.int64),
    "flags": Subject((7, 6), 24, 6, dtype=torch.bool),
}

CALLS = """
(x)|(x, y)|(x, f)|(f, x)|(x, 2)|(x, 0.5)|(2, x)|(x, 0.1, 0.9)|(x, y, z)|(x, y, 0.5)|(x, f, f)|(f, x, y)|(x, c)
(c, x)|(x, t)|(t, x)|(x, x)|(x, a)|(a, x)|(x, y, z, f)|(x, 0)|(x, 1)|(x, -1)|(x, dim=0)|(x, dim=1)
(x, dim=-1, keepdim=True)|(x, (0,))|(x, (0, 1))|(x, 0, True)|(x, 1, True)|(x, keepdim=True)|(x, 0, 1)|(x, 1, 0)
(x, 0, 0, 1)|(x, 2, 1)|(x, 1, 1)|(x, 2.0, 0)|(x, 2.0, 1)|(x, 2.0, 0, 0.5)|(x, 2.0, dim=1)|(x, 0, i)|(x, 1, i)
(x, 0, i, y)|(x, 0, i, 2.0)|(x, i)|(x, m)|(x, m, 2.0)|(m, x, y)|(m, x, 0.0)|(x, n, 2.0)|(n, x, 0.0)|(x, n)|(x, m, f)
([x, y])|([x, y], 0)|([x, y], 1)|([x, y], [y, z])|([x, y], 2.0)|([x, y], [y, z], [z, x])|([x, y], [2.0, 3.0])|(x, s)
(x, [-1])|(x, [1, -1])|(x, torch.float64)|([x, f])|([x, f], [f, y])|([f, f], [x, y])|([x, y], [f, f])|([x, y], f0)
(x, f0)|(f0, x)|([x, y], [y, z], 0.5)|(x, y, out=z)|(x, out=z)|(x, out=f)|(x, y, out=f)|(x, dtype=torch.float64)
(x, dim=None)|(x, p=1)|(x, ord=1)|(x, ord=inf)|(x, 0, dtype=torch.float64)|(x, -1, dtype=torch.float64)|(x, "fro")
(x, "nuc")|(x, "mean")|(x, y, alpha=2)|(x, y, value=2)|(x, y, z, value=2)|(x, decimals=1)|(x, min=0.2)|(x, max=y)
(x, min=f)|(x, correction=0)|(x, unbiased=False)|(x, False)|(x, None)|(x, slice(1, 3))|(x, (slice(None), 0))
(x, 0, 2.0)|(x, slice(1, 3), 2.0)|(x, slice(None), f)|(x, (slice(None), 0), 2.0)|(x, dim=(0,), keepdim=True)
(x, y, dim=0)|(x, y, 1)|(x, y, 0)|(x, y, rounding_mode="floor")|(x, nan=1.0)|(x, 3)|(x, -1, 2)|(x, 1, 1, 2)
(x, [0.5], dim=0)|(x, 0.5, -1)|(x, mean=1.0, std=0.5)|(x, generator=None)|(x, k=2)|(x, 1, keepdim=True)
(x, y, reduction="sum")|(x, y, atol=10)|(x, f, reduction="none")|(x, axis=0)|(x, 2, -1)|(x, 1.0, 0, True)
(x, other=y)|(x, other=f)|(x, f[:1])|(f[:1], x)|(x, -1, True)|(x, size=s)|(x, [2, 2])|(x, 1, [2, -1])|(x, c, 0.5)
(c, x, 0.5)|(c, x, x)|(n, x, x)|(n, f, x)|(c > 0.5, x, x)|(x, inplace=True)|(x, 0.1, 0.9, True)|(x, i, f[:2])
(x, c, c)|(x, 1.5, 0)|(x, (0, 1), 2)|(x, start_dim=1)|(x, 1, 2)|(x, f0 / 4, dim=1)
(x, torch.tensor([0.5]), dim=1)|(x, f[:, :1])
""".replace("\n", "|").strip("|").split("|")  # fmt: skip
"""Arguments: x, y, z shards alike; f the full tensor and f0 a number, plain; c a plain row and a the same for all
rows; t transposed; m a mask, sharded; n the full mask, plain; i indices; s the full shape."""

_CODE = {call: compile(f"take{call}", call, "eval") for call in CALLS}
UNINITIALISED = frozenset(["empty_like", "new_empty", "new_empty_strided"])
LEFT_OUT = {
    "index": "torch searches a number without end; refused for shards",
    "__setstate__": "unpickling",
    "set_": "set_() without arguments asks no class; with arguments it is refused",
    "_reduce_ex_internal": "pickling; Shard.__reduce_ex__ refuses",
    "__reduce_ex__": "pickling; Shard.__reduce_ex__ refuses",
    "__deepcopy__": "Shard's own",
    "__repr__": "Shard's own",
    "__format__": "text",
    "__dlpack__": "shares memory with other libraries",
}
_drawing = threading.Lock()


def functions():
    """Yield names and functions to sweep."""
    found = dict.fromkeys(get_testing_overrides())
    found.update(dict.fromkeys(one for name, one in vars(torch.nn.init).items() if name.endswith("_")
                               and not name.startswith("_") and callable(one)))  # fmt: skip
    for func in found:
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(func.__self__, "__name__", name)
        if name not in LEFT_OUT and not isinstance(func, types.ModuleType):
            yield name, func


@functools.lru_cache
def given(subject):
    """Return the full tensors that names of CALLS stand for."""
    full = subject.full(9)
    row = full.dim() > 0
    return {
        **{name: subject.full(seed + 1) for seed, name in enumerate("xyz")},
        "f": full,
        "t": full.mT if full.dim() > 1 else full,
        "c": full[0] if row else full,
        "a": full[:1] if row else full,
        "m": subject.full(8) > 0.5,
        "n": subject.full(8) > 0.5,
        "f0": torch.tensor(2.0),
        "i": torch.tensor([1, 0]),
    }


def arguments(subject, code, wrap):
    """Return what the names in a call stand for; ``wrap`` makes a shard of a full tensor."""
    made = {
        "torch": torch,
        "inf": inf,
        "slice": slice,
        "s": subject.shape,
        "take": lambda *args, **kwargs: (args, kwargs),
    }
    for name, full in given(subject).items():
        if name in code.co_names:
            made[name] = wrap(full.clone()) if name in "xyzm" else full.clone()
    return made


def call_of(func, call, subject, wrap, *, seeded):
    """Call ``func``; return what came out of it and the shards among the arguments, which it may have changed."""
    code = _CODE[call]
    made = arguments(subject, code, wrap)
    args, kwargs = eval(code, made)
    if seeded:
        with _drawing:
            torch.default_generator.manual_seed(0)
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)
    return flat(result), [made[name] for name in "xyzm" if name in made]


def flat(value):
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [one for inner in value for one in flat(inner)]
    return [value]


def sharded(subject, comm):
    """Return what makes a shard of this rank of a full tensor."""
    meta = subject.meta(comm.rank)
    row_split = row_split_of(meta, comm)
    start, stop = meta.element_range

    def wrap(full):
        return as_shard(full.flatten()[start:stop].reshape(meta.local_shape).clone(), row_split)

    return wrap


class Part(NamedTuple):
    """A shard taken apart, so that ranks' results can be put together afterwards."""

    rows: torch.Tensor
    row_split: RowSplit


def frozen(values):
    """Take shards apart."""
    return [Part(one.to_local().clone(), one.row_split) if isinstance(one, Shard) else one for one in values]


def assemble(parts):
    """Return the full tensor of (rows, row split) of every rank."""
    row_split = parts[0][1]
    if row_split.key is None:
        return torch.cat([rows for rows, _ in parts])
    if row_split.parts:
        pieces, at = [], [0] * len(parts)
        for place in range(len(row_split.parts)):
            mine = []
            for rank, (rows, joined) in enumerate(parts):
                of, _, here = joined.parts[place]
                mine.append((rows[at[rank] : at[rank] + here], of))
                at[rank] += here
            pieces.append(assemble(mine))
        return torch.cat(pieces)
    shapes = {of.full_shape(rows) for rows, of in parts}
    assert len(shapes) == 1, f"ranks say full shapes {shapes}"
    shape = shapes.pop()
    full = torch.zeros(prod(shape), dtype=parts[0][0].dtype)
    written = 0
    for rows, of in parts:
        start = of.first_element(rows)
        full[start : start + rows.numel()] = rows.flatten()
        written += rows.numel()
    assert written == full.numel(), f"{written} elements of {shape}"
    return full.view(shape)


def same(found, wanted):
    """True if two values are equal, tensors up to rounding."""
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return type(found) is type(wanted) and (
            found is wanted or found == wanted or isinstance(found, types.MethodType)
        )
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-6, equal_nan=True)


def differs(name, wanted, ranks):
    """Return how the ranks' values differ from ``wanted``; None if they do not."""
    if any(len(values) != len(wanted) for values in ranks):
        return "other number of results"
    for place, one in enumerate(wanted):
        mine = [values[place] for values in ranks]
        if any(isinstance(value, Part) for value in mine):
            if not all(isinstance(value, Part) for value in mine):
                return "a shard on some ranks only"
            try:
                mine = [assemble(mine)]
            except (AssertionError, RuntimeError, AttributeError) as error:
                return f"not one tensor: {error}"
        if name in UNINITIALISED:
            mine = [torch.zeros_like(value) for value in mine]
            one = torch.zeros_like(one)
        for value in mine:
            if not same(value, one):
                return f"{str(value)[:300]} for {str(one)[:300]}"
    return None


def judge(name, func, subject, wanted, ranks):
    """Return the outcome's kind and, of a failure, what happened."""
    errors = [one for one in ranks if isinstance(one, Exception)]
    if errors:
        # A plain tensor beside a shard is right in size on a rank that holds all rows.
        others = [rank for rank, one in enumerate(ranks) if not isinstance(one, Exception)]
        expected = all(SUBJECTS[subject].holds_all(rank) for rank in others)
        if expected and all(isinstance(one, ShardingError) for one in errors):
            named = all(plain_name(name) in str(one) or NAME in str(one) for one in errors)
            return ("refused", "") if named else ("failed", f"refused without a name: {errors[0]}")
        return "failed", f"raised {[repr(one)[:200] for one in ranks if isinstance(one, Exception)]}"
    local = find_rule(func) is about
    result = differs(name, wanted[0], [one[0] for one in ranks])
    changed = differs("", wanted[1], [one[1] for one in ranks])
    if result is None and changed is None:
        return "right", ""
    if local:
        return "local", ""
    return "failed", f"result {result}" if result else f"arguments {changed}"


@dataclass(frozen=True)
class Trial:
    """A call that the full tensor takes, and what came out of it."""

    name: str
    func: object
    call: str
    subject: str
    wanted: tuple

    @property
    def seeded(self):
        """True for functions that draw, without communication: torch's random state is the threads' in common."""
        return getattr(self.func, "__module__", "") == "torch.nn.init" or find_rule(self.func) in (
            elementwise.drawn,
            elementwise.drawn_like,
        )


def trials(share=1.0):
    """Yield a share of the calls that the full tensor takes; of further subjects, of those that the first two take."""
    accepted = defaultdict(set)
    first = ("matrix", "vector")
    for subject in (*first, *(one for one in SUBJECTS if one not in first)):
        for name, func in functions():
            for call in CALLS if subject in first else sorted(accepted[func]):
                if crc32(f"{name}{call}".encode()) % 1000 >= share * 1000:
                    continue
                try:
                    wanted = call_of(func, call, SUBJECTS[subject], lambda full: full, seeded=True)
                except Exception:  # the full tensor does not take it
                    continue
                if wanted[0] and wanted[0][0] is NotImplemented:
                    continue
                accepted[func].add(call)
                yield Trial(name, func, call, subject, wanted)
                if find_rule(func) is refused:
                    break  # whatever the arguments


def outcomes(batch):
    """Call each trial of a batch on shards; a batch in which ranks part ways is repeated one by one."""

    def work(comm):
        found = []
        for one in batch:
            wrap = sharded(SUBJECTS[one.subject], comm)
            try:
                result, changed = call_of(one.func, one.call, SUBJECTS[one.subject], wrap, seeded=one.seeded)
                found.append((frozen(result), frozen(changed)))
            except Exception as error:
                if "another rank failed" in str(error):
                    raise
                found.append(error)
        return found

    try:
        ranks = run_ranks(RANKS, work, timeout_s=1.5)
    except Exception as error:
        if len(batch) == 1:
            return [("failed", f"ranks part ways: {error!r}")]
        return [outcome for one in batch for outcome in outcomes([one])]
    return [
        judge(one.name, one.func, one.subject, one.wanted, mine)
        for one, mine in zip(batch, zip(*ranks, strict=True), strict=True)
    ]


def sweep(share=1.0, size=200):
    """Return (trial, kind, detail) of every call."""
    found, batch = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in trials(share):
            batch.append(one)
            if len(batch) == size:
                found += zip(batch, outcomes(batch), strict=True)
                batch = []
        found += zip(batch, outcomes(batch), strict=True)
    return [(one, kind, detail) for one, (kind, detail) in found]


def main():
    """Print the table of docs/evidence/shards.md; an argument is the share of calls."""
    found = sweep(float(sys.argv[1]) if sys.argv[1:] else 1.0)
    kinds = defaultdict(set)
    for one, kind, _ in found:
        kinds[one.name].add(kind)
    calls = Counter(kind for _, kind, _ in found)
    print("| outcome | calls | functions with such a call |\n|---|---|---|")
    for kind in ("right", "local", "refused", "failed"):
        print(f"| {kind} | {calls[kind]:,} | {sum(kind in of for of in kinds.values()):,} |")
    print(f"| all | {len(found):,} | {len(kinds):,} |")
    for title, wanted in (
        ("Always right", {"right"}),
        ("Right or refused, by arguments", {"right", "refused"}),
        ("About the rows here", {"local"}),
        ("Always refused", {"refused"}),
    ):
        names = {one for one, of in kinds.items() if of == wanted or (wanted == {"local"} and "local" in of)}
        shorts = sorted({plain_name(one) or one for one in names})
        listed = fill(" ".join(f"`{one}`" for one in shorts), 120, break_on_hyphens=False)
        print(f"\n## {title} ({len(names)})\n\n{listed}")
    for one, kind, detail in found:
        if kind == "failed":
            print("FAILED", one.name, one.call, one.subject, detail)


if __name__ == "__main__":
    main()
