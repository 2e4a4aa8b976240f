"""bitsandbytes, imported when the first 4-bit or int8 weight needs it."""

from __future__ import annotations

import importlib
import logging
import sys
from functools import lru_cache
from typing import Any

from fullshard.errors import ConfigError

OLDEST = (0, 50)
"""The first version with kernels for CPUs."""

_REMEDY = "pip install 'fullshard[quantization]'"


@lru_cache(maxsize=1)
def bitsandbytes() -> Any:
    """Return the module ``bitsandbytes``.

    Raises:
        ConfigError: It is missing, or too old.
    """
    # On import it logs that the package `kernels` is missing, whose kernel is not used here.
    log = logging.getLogger("bitsandbytes")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        module = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            f"4-bit and int8 weights need bitsandbytes, which is missing ({error}): {_REMEDY}."
        ) from error
    finally:
        log.setLevel(before)
    version = str(getattr(module, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"4-bit and int8 weights need bitsandbytes {oldest} or newer; found {version}: {_REMEDY}.")
    return module


def keep_quiet() -> None:
    """Suppress bitsandbytes' log about a missing kernel that is not used; peft imports bitsandbytes too."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def loaded() -> Any | None:
    """Return bitsandbytes if somebody has imported it: only then can a model have its layers."""
    return bitsandbytes() if "bitsandbytes.nn" in sys.modules else None
