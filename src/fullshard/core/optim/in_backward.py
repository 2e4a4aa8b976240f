"""Optimizer steps inside backward: a parameter is updated, and its gradient freed, as soon as that is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fullshard.core.comm import together
from fullshard.core.optim.guard import refuse_equal_names, refuse_parts
from fullshard.core.optim.shards import by_comm, holds_rows, meta_of, require_model
from fullshard.core.shards import some_ranks_only
from fullshard.errors import CheckpointError, ConfigError, ShardingError


class StepInBackward:
    """The optimizers that :func:`step_in_backward` made, one for each parameter.

    torch's learning rate schedulers take one optimizer each: make one for every optimizer,
    ``[LambdaLR(o, factor) for o in steps.optimizers.values()]``, and step them all after backward.

    Attributes:
        optimizers: By the parameter's first name, for the parameters of which this rank holds rows.
        of_param: The same, by parameter.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], made: dict[nn.Parameter, Optimizer], handles: list[RemovableHandle]
    ) -> None:
        """Store what :func:`step_in_backward` made for ``params``."""
        self._params = params
        self.of_param = made
        self._handles = handles

    @property
    def optimizers(self) -> dict[str, Optimizer]:  # noqa: D102 (described in the class)
        return {meta_of(param).name: made for param, made in self.of_param.items()}  # modules may have been renamed

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group; every rank calls it, between backwards."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each optimizer by the parameter's name, of this rank's rows; no communication."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load what ``state_dict()`` returned on the same rank of a world of the same size.

        Raises:
            CheckpointError: The state is of other parameters; nothing has changed then.
        """
        if state.keys() != self.optimizers.keys():
            missing, unknown = sorted(self.optimizers.keys() - state), sorted(state.keys() - self.optimizers)
            raise CheckpointError(
                f"The state is of other parameters than the {len(self.optimizers)} of this rank: it lacks {missing}, "
                f"and {unknown} are unknown. Load what state_dict() returned on this rank with the same model and "
                "number of ranks."
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: backward would still step the parameters with the original.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            "What step_in_backward returned cannot be copied or pickled: backward would still use the original. Copy "
            "or save state_dict(), or save it with the model by fullshard.Checkpoints."
        )

    def remove(self) -> None:
        """Stop stepping in backward: from now on gradients stay in ``.grad``. The optimizers keep their state."""
        for handle in self._handles:
            handle.remove()
        for param in self._params:
            del param.shard_optimizer  # type: ignore[attr-defined]
        self._handles, self._params = [], []


def step_in_backward(model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> StepInBackward:
    """Update each parameter inside backward and free its gradient; every rank calls it once, after ``fully_shard``.

    Reduced gradients then exist for a unit or two at a time instead of for the full model. After ``backward()`` the
    weights are updated and every ``.grad`` is None; leave ``optimizer.step()`` and ``zero_grad()`` out of the loop.
    Each backward is a step, and no gradient outlives it:

    - clipping by the global norm is not possible: ``clip_grad_norm_`` raises an error;
    - gradients accumulate only inside ``no_sync(model)``: run all micro-batches but the last in it; the backward of the
      last one, outside, steps with the sum;
    - the loss must not be scaled for float16: gradients are not unscaled before the step;
    - a loss that is not finite reaches the weights: check it before ``backward()``;
    - an optimizer that communicates about its parameter (Adafactor or Muon of a split matrix, 8-bit AdamW of split
      blocks) is refused, because ranks that hold no rows do not step. Matrices that are complete on one rank are
      accepted.

    Parameters left out of sharding, and those unfrozen later, keep their gradients and need an optimizer of their own.

    Args:
        model: A sharded model.
        make_optimizer: Called with a list of one parameter (this rank's rows) for every trainable parameter of which
            this rank has any; returns its optimizer. It may read ``param.shard_meta.name``.

    Returns:
        The optimizers.

    Raises:
        ConfigError: The model has no sharded trainable parameters, contains several sharded models whose parameters
            have the same names, or an optimizer cannot step its parameter without communication; on every rank.
        ShardingError: Its parameters step in backward already.
    """
    require_model(model, "step_in_backward")
    params = [p for p in model.parameters() if p.requires_grad and hasattr(p, "shard_meta")]
    if not params:
        raise ConfigError("step_in_backward found no sharded trainable parameters: call fully_shard(model) first.")
    refuse_steps_in_backward(params, "step_in_backward")
    refuse_equal_names(params)
    made = _made_together(params, make_optimizer)
    for number, param in enumerate(model.parameters()):
        own: Any = made.get(param)
        if hasattr(own, "first_number"):  # without it all would draw the same random bits
            own.first_number = number
    handles: list[RemovableHandle] = []
    for param in params:
        # Stored on the parameter, so that the hook refers to nothing: Python's garbage collector does not follow
        # autograd's hooks, so a reference from the hook to its parameter would never be freed.
        param.shard_optimizer = made.get(param)  # type: ignore[attr-defined]
        handles.append(param.register_post_accumulate_grad_hook(_step))
    return StepInBackward(params, made, handles)


def _made_together(
    params: Sequence[nn.Parameter], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> dict[nn.Parameter, Optimizer]:
    """Make the optimizers of the parameters that this rank holds rows of; an error is raised on every rank."""
    optimizers: dict[nn.Parameter, Optimizer] = {}

    def make(of_comm: Sequence[nn.Parameter]) -> None:
        for param in of_comm:
            if holds_rows(param):
                optimizers[param] = made = make_optimizer([param])
                refuse_parts(made)
                _refuse_communication(made, param)

    for comm, of_comm in by_comm(params):
        together(comm, partial(make, of_comm))
    return {param: optimizers[param] for param in params if holds_rows(param)}


def _refuse_communication(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Raise an error if an optimizer reports that it communicates about this parameter."""
    communicates: Callable[[nn.Parameter], bool] | None = getattr(optimizer, "communicates", None)
    if communicates is not None and communicates(param):
        meta = meta_of(param)
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step {meta.name}, {meta.global_shape}, in backward: "
            f"{len(meta.owners)} of {meta.layout.world_size} ranks hold parts of it and must exchange sums in a step, "
            "while in backward each rank steps without communication. Step after backward, or return an elementwise "
            "optimizer (AdamW) for it; param.shard_meta identifies the parameter."
        )


def _step(param: nn.Parameter) -> None:
    """Step a shard whose gradient is reduced, if rows of it are here, and free the gradient. Autograd calls it."""
    if param.shard_optimizer is not None:  # type: ignore[attr-defined]
        meta = meta_of(param)
        everywhere = len(meta.owners) == meta.layout.world_size
        with nullcontext() if everywhere else some_ranks_only(f"the step of {meta.name} in backward"):
            param.shard_optimizer.step()  # type: ignore[attr-defined]
    param.grad = None


def refuse_steps_in_backward(params: Iterable[nn.Parameter], what: str) -> None:
    """Raise an error if :func:`step_in_backward` is in use for any of ``params``.

    Args:
        params: Parameters, also those that this rank holds no rows of.
        what: The function that cannot be used then, for the message.

    Raises:
        ShardingError: It is.
    """
    count = sum(hasattr(p, "shard_optimizer") for p in params)
    if count:
        raise ShardingError(
            f"{what} cannot be used on a model whose parameters step in backward, as {count} of this one do: their "
            "gradients are used and freed inside backward. Call remove() on what step_in_backward returned and use "
            "one optimizer after backward."
        )
