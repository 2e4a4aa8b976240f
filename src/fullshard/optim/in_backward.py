"""Optimizer steps inside backward: a parameter is updated, and its gradient freed, as soon as that is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fullshard.comm import together
from fullshard.errors import CheckpointError, ConfigError, ShardingError
from fullshard.optim.guard.guard import refuse_equal_names, refuse_parts
from fullshard.optim.shards import by_comm, meta_of, require_model


class StepInBackward:
    """The optimizers that :func:`step_in_backward` made, one a parameter.

    torch's learning rate schedulers take one optimizer each: make one for every optimizer of this,
    ``[LambdaLR(o, factor) for o in steps.optimizers.values()]``, and step them all after backward.

    Attributes:
        optimizers: By the first name of the parameter, for the parameters of which this rank holds rows.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], optimizers: dict[str, Optimizer], handles: list[RemovableHandle]
    ) -> None:
        """Keep what :func:`step_in_backward` made for ``params``."""
        self.optimizers = optimizers
        self._params = params
        self._handles = handles

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group; every rank calls it, between backwards."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of each optimizer by the parameter's name: of this rank's rows; any rank, no communication."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over what ``state_dict()`` gave on the same rank of a world of the same size.

        Raises:
            CheckpointError: It is of other parameters; nothing has changed then.
        """
        if state.keys() != self.optimizers.keys():
            missing, unknown = sorted(self.optimizers.keys() - state), sorted(state.keys() - self.optimizers)
            raise CheckpointError(
                f"The state is of other parameters than the {len(self.optimizers)} of this rank: {missing} have none, "
                f"{unknown} are unknown here. Load what state_dict() gave on this rank with the same model and ranks."
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: backward would step the parameters by the one that was copied only.

        Raises:
            ShardingError: Always.
        """
        raise ShardingError(
            "What step_in_backward returned cannot be copied or pickled: backward steps by this one alone. Copy or "
            "save state_dict(), or save it with the model by fullshard.Checkpoints."
        )

    def remove(self) -> None:
        """Step no more: from the next backward on gradients stay in ``.grad``. The optimizers keep their state."""
        for handle in self._handles:
            handle.remove()
        for param in self._params:
            del param.shard_optimizer  # type: ignore[attr-defined]
        self._handles, self._params = [], []


def step_in_backward(model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> StepInBackward:
    """Have backward itself update each parameter and free its gradient; every rank calls it once, after fully_shard.

    Reduced gradients then exist for a unit or two at a time instead of for the whole model. After ``backward()`` the
    weights are new and every ``.grad`` is None; ``optimizer.step()`` and ``zero_grad()`` are left out of the loop.

    Each backward is a step. Because no gradient outlives its own:

    - clipping by the global norm is not possible: ``clip_grad_norm_`` raises;
    - gradients are accumulated only inside ``no_sync(model)``: run all micro-batches but the last in it, and the
      backward of the last one, outside, steps with the sum;
    - a loss must not be scaled for float16: nothing takes the scale off again before the step;
    - a loss that is not finite reaches the weights: look at it before ``backward()``;
    - an optimizer whose ranks exchange something about a parameter (Adafactor or Muon of a matrix that is split over
      ranks, 8-bit AdamW where blocks are) is refused: ranks that hold no rows do not step. Matrices that are whole on a
      rank are fine.

    Parameters left out of sharding are left out here as well, and so is what is unfrozen later: they keep their
    gradients and need an optimizer.

    Args:
        model: A sharded model.
        make_optimizer: Called with a list of one parameter, this rank's rows of it, for every trainable parameter of
            which this rank has any; returns its optimizer. It may look at ``param.shard_meta.name``.

    Returns:
        The optimizers.

    Raises:
        ConfigError: The model has no sharded trainable parameters, or several sharded models are in it whose
            parameters have the same names, or a rank's optimizer cannot step its parameter alone; on every rank.
        ShardingError: Its parameters step in backward already.
    """
    require_model(model, "step_in_backward")
    params = [p for p in model.parameters() if p.requires_grad and hasattr(p, "shard_meta")]
    if not params:
        raise ConfigError("step_in_backward found no sharded trainable parameters: call fully_shard(model) first.")
    refuse_steps_in_backward(params, "step_in_backward")
    refuse_equal_names(params)
    optimizers = _made_together(params, make_optimizer)
    for number, param in enumerate(model.parameters()):
        own: Any = optimizers.get(meta_of(param).name)
        if hasattr(own, "first_number"):  # else all would draw the same random bits
            own.first_number = number
    handles: list[RemovableHandle] = []
    for param in params:
        # On the parameter, so that the hook holds nothing: Python's collector does not see through autograd's hooks.
        param.shard_optimizer = optimizers.get(param.shard_meta.name)  # type: ignore[attr-defined]
        if param.numel():
            handles.append(param.register_post_accumulate_grad_hook(_step))
    return StepInBackward(params, optimizers, handles)


def _made_together(
    params: Sequence[nn.Parameter], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> dict[str, Optimizer]:
    """The optimizers of the parameters that this rank holds rows of; where one is refused, it is on every rank."""
    optimizers: dict[str, Optimizer] = {}

    def make(of_comm: Sequence[nn.Parameter]) -> None:
        for param in of_comm:
            if param.numel():
                optimizers[meta_of(param).name] = made = make_optimizer([param])
                refuse_parts(made)
                _refuse_communication(made, param)

    for comm, of_comm in by_comm(params):
        together(comm, partial(make, of_comm))
    return {meta_of(param).name: optimizers[meta_of(param).name] for param in params if param.numel()}


def _refuse_communication(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Refuse an optimizer that says it exchanges something about this parameter with other ranks."""
    communicates: Callable[[nn.Parameter], bool] | None = getattr(optimizer, "communicates", None)
    if communicates is not None and communicates(param):
        meta = meta_of(param)
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step {meta.name}, {meta.global_shape}, in backward: {len(meta.owners)} "
            f"of {meta.layout.world_size} ranks hold parts of it, which have to exchange sums in a step, and in "
            "backward each rank steps for itself. Step after backward, or give make_optimizer an elementwise "
            "optimizer for it (AdamW; look at param.shard_meta)."
        )


def _step(param: nn.Parameter) -> None:
    """The hook on a shard whose gradient is reduced."""
    param.shard_optimizer.step()  # type: ignore[attr-defined]
    param.grad = None


def refuse_steps_in_backward(params: Iterable[nn.Parameter], what: str) -> None:
    """Refuse ``what`` for parameters that :func:`step_in_backward` took over.

    Raises:
        ShardingError: There is one; also on a rank that holds no rows of it.
    """
    count = sum(hasattr(p, "shard_optimizer") for p in params)
    if count:
        raise ShardingError(
            f"{what} cannot be used on a model whose parameters step in backward, as {count} of this one do: their "
            "gradients are gone after backward, and were used as they came. Call remove() on what step_in_backward "
            "returned and use one optimizer after backward."
        )
