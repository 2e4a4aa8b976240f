"""A rank's random state as bytes: torch's, Python's and NumPy's."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from fullshard.errors import CheckpointError


def rng_bytes(device: torch.device) -> torch.Tensor:
    """Return this rank's current random state, on CUDA with its generator: JSON as uint8, (bytes,), on the CPU."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    values: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }
    if device.type == "cuda":
        values["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def restore_rng(state: torch.Tensor, device: torch.device) -> None:
    """Restore the random state that :func:`rng_bytes` returned.

    Raises:
        CheckpointError: The bytes are not such a state.
    """
    try:
        values = json.loads(bytes(state.tolist()))
        torch.set_rng_state(_decode(values["torch"]))
        version, keys, gauss = values["python"]
        random.setstate((version, tuple(keys), gauss))
        kind, words, *rest = values["numpy"]
        np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
        if device.type == "cuda" and "cuda" in values:
            torch.cuda.set_rng_state(_decode(values["cuda"]), device)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"The checkpoint's random state cannot be read: {error!r}. Check it with `fullshard verify`, or load an "
            "earlier checkpoint."
        ) from error


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def rng_name(rank: int) -> str:
    """Return the name of a rank's random state among a checkpoint's tensors."""
    return f"rank/{rank:05d}/rng"
