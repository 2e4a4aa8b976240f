"""Muon for sharded models: momentum on the shards, each matrix orthogonalised on one rank, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from fullshard.core.comm import Comm
from fullshard.core.layout import ShardMeta
from fullshard.core.optim.muon_rounds import (
    NS_DTYPES,
    MuonMatrix,
    MuonRounds,
    RoundPlan,
    dense_gradient,
    plan_of,
    step_unsplit,
)
from fullshard.core.optim.shards import (
    RowsOptimizer,
    by_comm,
    comm_of,
    is_split,
    meta_of,
    refuse_torch_options,
    require_model,
    require_same_parameters,
)
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError, ConfigError


def muon_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    adamw_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for ``Muon``: hidden matrices to Muon, the rest to AdamW.

    The choice uses unsharded shapes, so it is the same before and after ``fully_shard``. Every rank calls it; no
    communication. AdamW's are

    - embeddings: weights of ``nn.Embedding``, also when tied to another module;
    - the output head: ``model.get_output_embeddings()`` as transformers' models have it; else the last ``nn.Linear``
      whose weight has the shape of an embedding's;
    - parameters without exactly two dimensions: norms, biases, convolutions, stacked experts.

    Norms, biases and single numbers (fewer than two dimensions) are not decayed.

    Args:
        model: Any module.
        weight_decay: Of the matrices that Muon steps.
        adamw_lr: Learning rate of AdamW's groups; None: the optimizer's ``lr``, which fits with
            ``adjust_lr_fn="match_rms_adamw"``.
        adamw_weight_decay: Of AdamW's parameters that decay; None: ``weight_decay``.

    Returns:
        At most three groups, in this order: Muon's, AdamW's with weight decay, AdamW's without; none is empty.

    Raises:
        ConfigError: ``model`` is not a module.
    """
    require_model(model, "muon_groups")
    apart = _embeddings_and_head(model)
    hidden, decayed, plain = [], [], []
    for param in model.parameters():
        dims = len(meta_of(param).global_shape)
        (plain if dims < 2 else hidden if dims == 2 and id(param) not in apart else decayed).append(param)
    lr = {} if adamw_lr is None else {"lr": adamw_lr}
    decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
    groups = [
        {"params": hidden, "use_muon": True, "weight_decay": weight_decay},
        {"params": decayed, "use_muon": False, "weight_decay": decay, **lr},
        {"params": plain, "use_muon": False, "weight_decay": 0.0, **lr},
    ]
    return [group for group in groups if group["params"]]


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings and of the output head."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    get_head: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    if head is None:
        shapes = {(one.num_embeddings, one.embedding_dim) for one in embeddings}
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        head = next((one for one in reversed(linear) if (one.out_features, one.in_features) in shapes), None)
    apart = [*embeddings, head]
    return {id(module.weight) for module in apart if isinstance(getattr(module, "weight", None), nn.Parameter)}  # type: ignore[union-attr]


def split_group(
    group: dict[str, Any], muon_options: dict[str, Any], adamw_options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Split a user's parameter group into groups of which each is stepped by one of the two optimizers.

    Args:
        group: ``params``, a list; ``use_muon``, optional; options of either optimizer, and any other keys, which both
            parts get.
        muon_options: Muon's options with their defaults.
        adamw_options: AdamW's options with their defaults.

    Returns:
        One group, or two, Muon's first, if ``use_muon`` is not set and there are parameters for both.

    Raises:
        ConfigError: ``use_muon`` is set for a parameter that is not a matrix, or an option belongs to the other
            optimizer.
    """
    kinds = ((True, muon_options, adamw_options), (False, adamw_options, muon_options))
    if "use_muon" in group:
        use_muon, options, others = kinds[not group["use_muon"]]
        if use_muon:
            _require_matrices(group)
        if foreign := sorted(group.keys() & others.keys() - options.keys()):
            raise ConfigError(
                f"A parameter group with use_muon={use_muon} has options of the other optimizer: "
                f"{', '.join(foreign)}. Remove them; the options of this one are {', '.join(options)}."
            )
        return [{**options, **group, "use_muon": use_muon}]
    if "eps" in group:
        raise ConfigError(
            "eps has different meanings in Muon and AdamW. Set use_muon=True or use_muon=False in a parameter group "
            "that sets eps."
        )
    parts = []
    for use_muon, options, others in kinds:
        kept = {key: value for key, value in group.items() if key in options or key not in others}
        params = [entry for entry in group["params"] if _is_matrix(entry) == use_muon]
        parts.append({**options, **kept, "params": params, "use_muon": use_muon})
    return [part for part in parts if part["params"]] or parts[1:]


def _tensor_of(entry: Any) -> Any:
    """Return the parameter of an entry of ``params``, which may be ``(name, parameter)``."""
    return entry[1] if isinstance(entry, tuple) else entry


def _is_matrix(entry: Any) -> bool:
    tensor = _tensor_of(entry)
    # An entry that is not a tensor stays in AdamW's group, where torch refuses it.
    return isinstance(tensor, torch.Tensor) and len(meta_of(tensor).global_shape) == 2 and not tensor.is_complex()  # type: ignore[arg-type]


def _require_matrices(group: dict[str, Any]) -> None:
    for number, entry in enumerate(group["params"]):
        if not _is_matrix(entry):
            meta = meta_of(_tensor_of(entry))
            name = entry[0] if isinstance(entry, tuple) else meta.name or f"number {number} of its group"
            raise ConfigError(
                f"Muon steps real matrices, of two dimensions when unsharded; parameter {name} has shape "
                f"{meta.global_shape}. Put it in a group with use_muon=False, or leave use_muon out."
            )


class Muon(RowsOptimizer):
    r"""Muon for matrices and AdamW for everything else, on sharded and unsharded models.

    For a matrix it computes what ``torch.optim.Muon`` does: momentum, Newton-Schulz, decoupled weight decay. Momentum
    is elementwise, so each rank keeps that of its rows. A matrix that is complete on a rank is orthogonalised there; a
    split one is gathered on one of the ranks that hold parts of it, in ``ns_dtype``, and its rows are sent back. Owners
    are balanced by work, and communication overlaps with the computation of other matrices.

    Each parameter group is split in two: parameters with ``use_muon=True``, or without ``use_muon`` and with two
    dimensions when unsharded, are stepped by Muon; the rest by AdamW. Embeddings and output heads are matrices too, but
    better left to AdamW: :func:`~fullshard.core.optim.muon` sorts a model's parameters. Muon's
    groups have the options of ``torch.optim.Muon``, ``use_muon`` and ``ns_dtype``; AdamW's have ``lr``, ``betas``,
    ``eps``, ``weight_decay`` and ``use_muon``.

    Every rank makes it with the same parameters, also those of which it holds no rows, and every rank calls ``step``.

    Sources: Keller Jordan, https://kellerjordan.github.io/posts/muon; J. Liu et al., Muon is Scalable for LLM Training,
    https://arxiv.org/abs/2502.16982; results of ``torch.optim.Muon`` and ``torch.optim.AdamW``.
    """

    def __init__(  # noqa: PLR0913 (torch.optim.Muon's arguments)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        """Step ``params``.

        Args:
            params: Parameters, pairs of names and parameters, or groups of them (dicts), in the same order on every
                rank.
            lr: Learning rate of both.
            weight_decay: Decoupled weight decay of both.
            momentum: Decay rate of Muon's momentum.
            nesterov: Whether Muon uses Nesterov momentum.
            ns_coefficients: a, b and c of Newton-Schulz.
            eps: Smallest norm that an update is divided by.
            ns_steps: Newton-Schulz iterations, below 100.
            adjust_lr_fn: Factor of ``lr`` for a (rows, columns) matrix: ``"original"`` or None,
                ``sqrt(max(1, rows / columns))``; ``"match_rms_adamw"``, ``0.2 sqrt(max(rows, columns))``, which allows
                AdamW's learning rates.
            ns_dtype: Dtype in which Newton-Schulz is computed and matrices are exchanged: ``torch.bfloat16``,
                ``float32`` or ``float64``; stored by name in parameter groups.
            adamw_betas: AdamW's decay rates of the moments.
            adamw_eps: AdamW's eps.

        Raises:
            ConfigError: An option is out of range, or a group sets ``use_muon`` for a parameter that is not a matrix.
        """
        shared = {"lr": lr, "weight_decay": weight_decay}
        momenta = {"momentum": momentum, "nesterov": nesterov}
        iteration = {"ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps}
        own = {"adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype}
        self._muon_options = {**shared, **momenta, **iteration, **own}
        self._adamw_options = {**shared, "betas": tuple(adamw_betas), "eps": adamw_eps}
        self._checked = False
        self._plans: dict[tuple[int, torch.dtype], tuple[tuple[ShardMeta, ...], RoundPlan]] = {}
        super().__init__(params, dict(shared))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or the two that it is split into; every rank calls it.

        Raises:
            ConfigError: An option is out of range, or ``use_muon`` is set for a parameter that is not a matrix.
        """
        given = param_group["params"]
        if isinstance(given, set):
            super().add_param_group(param_group)  # raises: a set has no order
        group = {**param_group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}
        parts = split_group(group, self._muon_options, self._adamw_options)
        for part in parts:
            _check_options(part)
        for part in parts:
            super().add_param_group(part)
        self._checked = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles."""
        options = {"_muon_options": self._muon_options, "_adamw_options": self._adamw_options}
        return {**super().__getstate__(), **options}

    @on_rows
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load groups, also those of torch.optim.Muon, which lack ``use_muon`` and ``ns_dtype``."""
        for group, old in zip(state["param_groups"], getattr(self, "param_groups", state["param_groups"]), strict=True):
            for key in ("use_muon", "ns_dtype"):
                if key in old:
                    group.setdefault(key, old[key])
            refuse_torch_options(group, "Muon")
            if group["use_muon"] != old["use_muon"]:
                raise ConfigError(
                    f"The loaded parameter group has use_muon={group['use_muon']} where this optimizer's has "
                    f"{old['use_muon']}. Load the state of an optimizer with the same groups in the same order."
                )
        super().__setstate__(state)
        self._checked, self._plans = False, {}

    def _update_all(self) -> None:
        self._require_same_parameters()
        matrices = [
            (param, MuonMatrix(param, group, self.state))
            for group in self.param_groups
            if group["use_muon"]
            for param in group["params"]
            if param.requires_grad
        ]
        rounds = self._start_rounds(matrices)
        step_unsplit([one for param, one in matrices if not is_split(param) and one.has_gradient])
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adamw(group)
        for one in rounds:
            one.finish()

    def communicates(self, param: nn.Parameter) -> bool:
        """Return whether ranks communicate about a parameter in a step: a split matrix that Muon steps."""
        return is_split(param) and any(param is one for one in self._of_muon())

    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """Return the keys of a parameter's state after a step.

        Raises:
            CheckpointError: The group is Muon's and this optimizer's is AdamW's, or the reverse, or it has an option
                that neither implements.
        """
        refuse_torch_options(group, "Muon", CheckpointError)
        use_muon = any(param is one for one in self._of_muon())
        if group["use_muon"] != use_muon:
            raise CheckpointError(
                f"The saved parameter group has use_muon={group['use_muon']} where this optimizer's has {use_muon}. "
                "Load the state of an optimizer with the same groups."
            )
        return dict.fromkeys(("momentum_buffer",) if use_muon else ("step", "exp_avg", "exp_avg_sq"))

    def _of_muon(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups if group["use_muon"] for param in group["params"]]

    def _require_same_parameters(self) -> None:
        if self._checked:
            return
        for comm, params in by_comm(self._params()):
            require_same_parameters(comm, params, "Muon")
            matrices = [param for param in self._of_muon() if comm_of(param) is comm]
            require_same_parameters(
                comm, [*params, *matrices], "Muon (all parameters, and again those with use_muon=True)"
            )
        self._checked = True

    def _start_rounds(self, matrices: Sequence[tuple[nn.Parameter, MuonMatrix]]) -> list[MuonRounds]:
        """Start gathering the split matrices, separately for each group of ranks and dtype."""
        started = []
        of_param = {id(param): one for param, one in matrices}
        for comm, params in by_comm(param for param, _ in matrices):
            unsplit = [of_param[id(param)] for param in params if not is_split(param)]
            for dtype in NS_DTYPES.values():
                split = [one for param in params if is_split(param) and (one := of_param[id(param)]).dtype == dtype]
                if split:
                    started.append(MuonRounds(comm, self._plan(comm, split, unsplit), split))
        return started

    def _plan(self, comm: Comm, split: Sequence[MuonMatrix], unsplit: Sequence[MuonMatrix]) -> RoundPlan:
        """Return the plan for these matrices, the last step's if they are the same."""
        metas = tuple(matrix.meta for matrix in (*split, *unsplit))
        key = (id(comm), split[0].dtype)
        if key not in self._plans or self._plans[key][0] != metas:
            self._plans[key] = (metas, plan_of(comm, split, unsplit))
        return self._plans[key][1]

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None and param.numel()]
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # independent of torch's defaults
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            list(params),
            [dense_gradient(param).to(param.dtype) for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            has_complex=any(param.is_complex() for param in params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _check_options(group: dict[str, Any]) -> None:
    """Refuse options that are out of range, and store the dtype by name, which JSON can hold."""
    numbers = [key for key in ("lr", "weight_decay", "momentum", "eps") if not group.get(key, 0.0) >= 0]
    if numbers:
        raise ConfigError(f"Muon's {', '.join(numbers)} must be 0 or more; got {[group[key] for key in numbers]}.")
    refuse_torch_options(group, "Muon")
    if not group["use_muon"]:
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ConfigError(f"betas of Muon's AdamW must be two numbers from 0 to below 1; got {group['betas']}.")
        return
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ConfigError(f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw'; got {group['adjust_lr_fn']!r}.")
    if len(group["ns_coefficients"]) != 3 or not 0 <= group["ns_steps"] < 100:
        raise ConfigError(
            f"Newton-Schulz takes three coefficients and 0 to 99 steps; got {group['ns_coefficients']} and "
            f"{group['ns_steps']} steps."
        )
    name = str(group["ns_dtype"]).removeprefix("torch.")
    if name not in NS_DTYPES:
        raise ConfigError(f"ns_dtype must be one of {', '.join(NS_DTYPES)}; got {name}.")
    group["ns_dtype"] = name
