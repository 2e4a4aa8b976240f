"""The losses of preferences, of the log-probabilities of completions: pure functions.

With p the log-probability of a completion under the model, r that under the reference, w for the chosen completion and
l for the rejected one::

    dpo     -log sigmoid(beta ((p_w - r_w) - (p_l - r_l)))                      arXiv:2305.18290, equation 7
    ipo     ((p_w - r_w) - (p_l - r_l) - 1 / (2 beta))^2                        arXiv:2310.12036, equation 17
    simpo   -log sigmoid(beta (p_w - p_l) - gamma)                              arXiv:2405.14734, equation 6
    orpo    -p_w - beta log sigmoid(log odds(p_w) - log odds(p_l))              arXiv:2403.07691, equations 6 and 7

In dpo p is the sum over the completion's tokens; in simpo, orpo and, as in TRL, ipo it is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

ObjectiveName = Literal["dpo", "ipo", "simpo", "orpo"]


@dataclass(frozen=True)
class Preference:
    """A loss of preferences, by TRL's names of its options."""

    name: ObjectiveName
    beta: float = 0.1  # how strongly the model is held to the reference; of orpo the weight of the odds
    simpo_gamma: float = 0.5  # margin that simpo asks for

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with the log-probabilities of a reference."""
        return self.name in ("dpo", "ipo")

    @property
    def averages(self) -> bool:
        """True if a completion's log-probability is the mean of its tokens', not their sum."""
        return self.name != "dpo"

    def of_pairs(self, logps_B: Tensor, tokens_B: Tensor, reference_B: Tensor) -> PairLosses:
        """Return the losses of pairs, whose chosen and rejected completions are rows next to each other.

        Args:
            logps_B: Log-probability of each completion, summed over its tokens, (B,) for B / 2 pairs.
            tokens_B: Number of those tokens, (B,); 0 in a filler, whose loss is finite and meaningless.
            reference_B: The same as ``logps_B`` under the reference; not read without one.
        """
        if self.averages:
            # A filler is neither certain nor impossible: the odds of either are infinite.
            logps_B = torch.where(tokens_B > 0, logps_B / tokens_B.clamp(min=1), -1.0)
            reference_B = reference_B / tokens_B.clamp(min=1)
        gains_B = logps_B - reference_B if self.uses_reference else logps_B
        chosen_P, rejected_P = gains_B[::2], gains_B[1::2]
        losses_P = self._losses(chosen_P, rejected_P)
        return PairLosses(losses_P, self.beta * chosen_P.detach(), self.beta * rejected_P.detach())

    def _losses(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        margins_P = chosen_P - rejected_P
        if self.name == "ipo":
            return (margins_P - 1 / (2 * self.beta)).square()
        if self.name == "simpo":
            return -logsigmoid(self.beta * margins_P - self.simpo_gamma)
        if self.name == "orpo":
            return -chosen_P - self.beta * logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
        return -logsigmoid(self.beta * margins_P)


@dataclass(frozen=True)
class PairLosses:
    """The losses of P pairs, and the rewards of their completions, as TRL defines them."""

    losses_P: Tensor
    chosen_P: Tensor  # beta times the (mean) log-probability, less the reference's where there is one; no gradient
    rejected_P: Tensor


def _log_odds(logps: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the mean log-probabilities of tokens."""
    # Of a probability that rounds to 1 the odds would be infinite.
    return logps - torch.log(-torch.expm1(logps.clamp(max=-1e-6)))
