"""Every exception fullshard raises, in one tree.

::

    FullshardError
    ├── UserError                 the user can fix it; the message says how
    │   ├── ConfigError           a setting is unknown, misspelt or contradicts another      exit code 2
    │   ├── DataError             a data file is missing, empty or malformed                 exit code 3
    │   ├── ModelError            a model or tokenizer cannot be built or loaded             exit code 4
    │   ├── WrapError             the wrap policy does not fit the model                     exit code 5
    │   ├── ShardingError         a sharded model was used in a way that cannot work         exit code 6
    │   ├── ProcessGroupError     there is no usable process group or mesh                   exit code 7
    │   ├── MismatchError         ranks hold different models or run different units         exit code 8
    │   ├── CheckpointError       a checkpoint cannot be written or read                     exit code 9
    │   │   └── StoreError        an object store cannot be reached, or refuses
    │   ├── TrainingError         the loss or the gradient is no longer a finite number      exit code 10
    │   ├── MemoryLimitError      the run needs more memory than there is                    exit code 11
    │   └── HubError              the Hugging Face Hub refuses, or cannot be reached         exit code 12
    ├── RunStopped                a run was stopped on request and saved a checkpoint        exit code 75
    └── InvariantError            an internal error of fullshard: please report it           exit code 70

Messages state the rule, the actual numbers and the remedy. A user error found while ranks work together is
raised on every rank with the same text.
"""

from importlib.metadata import version
from typing import Any


class FullshardError(Exception):
    """Base of every exception that fullshard raises on purpose.

    Attributes:
        exit_code: Exit code of the program that ends with it.
        transient: True if the same run may succeed when its ranks are restarted, as after a lost connection.
    """

    exit_code = 1
    transient = False


class UserError(FullshardError):
    """An error that the user can fix."""


class ConfigError(UserError):
    """A setting is unknown, misspelt, out of range or contradicts another."""

    exit_code = 2


class DataError(UserError):
    """A data file is missing, empty or malformed."""

    exit_code = 3


class ModelError(UserError):
    """A model or tokenizer cannot be built or loaded."""

    exit_code = 4


class WrapError(UserError):
    """The wrap policy does not fit the model."""

    exit_code = 5


class ShardingError(UserError):
    """A sharded model was used in a way that cannot work."""

    exit_code = 6


class ProcessGroupError(UserError):
    """There is no usable process group or mesh."""

    exit_code = 7


class MismatchError(UserError):
    """Ranks hold different models, policies or data, or run different units."""

    exit_code = 8


class CheckpointError(UserError):
    """A checkpoint cannot be written or read."""

    exit_code = 9


class StoreError(CheckpointError):
    """An object store cannot be reached or refuses, so that nothing is known of its checkpoints."""


class TrainingError(UserError):
    """Training cannot continue: the loss or the gradient is no longer a finite number."""

    exit_code = 10


class MemoryLimitError(UserError):
    """The run needs more memory than there is, by its plan before it starts or by a failed allocation in training."""

    exit_code = 11


class HubError(UserError):
    """The Hugging Face Hub refuses an upload, or cannot be reached."""

    exit_code = 12


class RunStopped(FullshardError):
    """A training run was stopped on request (SIGTERM, Ctrl-C) after saving a checkpoint; not a failure.

    Attributes:
        step: Optimizer steps taken.
        checkpoint: Directory of the checkpoint to resume from.
    """

    exit_code = 75  # sysexits.h: EX_TEMPFAIL, try again later

    def __init__(self, message: str, *, step: int, checkpoint: str) -> None:
        """Create the error; ``message`` says how to resume."""
        super().__init__(message)
        self.step = step
        self.checkpoint = checkpoint


class InvariantError(FullshardError):
    """An internal error of fullshard; please report it."""

    exit_code = 70


def private_name(owner: Any, name: str, package: str) -> Any:
    """Return ``owner.name``, which ``package`` does not promise to keep.

    Raises:
        ConfigError: The installed version has no such name.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        of = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigError(
            f"fullshard uses {of}.{name} of {package}, which version {version(package)} does not have. Install a "
            f"version of {package} that has it, or a newer fullshard."
        ) from None
