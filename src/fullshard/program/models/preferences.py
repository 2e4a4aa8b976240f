"""The losses of preferences, of the log-probabilities of completions: pure functions.

With p the log-probability of a completion under the model, r that under the reference, w for the chosen completion and
l for the rejected one, or of kto for a desirable and an undesirable one::

    dpo     -log sigmoid(beta ((p_w - r_w) - (p_l - r_l)))                      arXiv:2305.18290, equation 7
    ipo     ((p_w - r_w) - (p_l - r_l) - 1 / (2 beta))^2                        arXiv:2310.12036, equation 17
    simpo   -log sigmoid(beta (p_w - p_l) - gamma)                              arXiv:2405.14734, equation 6
    orpo    -p_w - beta log sigmoid(log odds(p_w) - log odds(p_l))              arXiv:2403.07691, equations 6 and 7
    kto     1 - sigmoid(beta (p_w - r_w - z)), 1 - sigmoid(beta (z - p_l + r_l))    arXiv:2402.01306, equations 7 and 8

In dpo and kto p is the sum over the completion's tokens; in simpo, orpo and, as in TRL, ipo it is their mean. In kto
z = max(0, mean of p_u - r_u) over unrelated completions u of the same prompts; it has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

ObjectiveName = Literal["dpo", "ipo", "simpo", "orpo", "kto"]


@dataclass(frozen=True)
class Preference:
    """A loss of preferences, by TRL's names of its options."""

    name: ObjectiveName
    beta: float = 0.1  # how strongly the model is held to the reference; of orpo the weight of the odds
    simpo_gamma: float = 0.5  # margin that simpo asks for
    desirable_weight: float = 1.0  # factor of kto's losses of desirable completions
    undesirable_weight: float = 1.0

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with the log-probabilities of a reference."""
        return self.name in ("dpo", "ipo", "kto")

    @property
    def averages(self) -> bool:
        """True if a completion's log-probability is the mean of its tokens', not their sum."""
        return self.name not in ("dpo", "kto")

    def of_labels(
        self, logps_P: Tensor, reference_P: Tensor, desirable_P: Tensor, divergence: Tensor
    ) -> PreferenceLosses:
        """Return kto's losses of completions that are desirable or not.

        Args:
            logps_P: Log-probability of each completion, summed over its tokens, (P,).
            reference_P: The same under the reference.
            desirable_P: bool, (P,).
            divergence: z of the module's docstring, 0-d.
        """
        gains_P = logps_P - reference_P
        signs_P = torch.where(desirable_P, 1.0, -1.0)
        weights_P = torch.where(desirable_P, self.desirable_weight, self.undesirable_weight)
        losses_P = weights_P * torch.sigmoid(-self.beta * signs_P * (gains_P - divergence))
        rewards_P, desirable_P = self.beta * gains_P.detach(), desirable_P.to(gains_P.dtype)
        sides = rewards_P * desirable_P, desirable_P, rewards_P * (1 - desirable_P), 1 - desirable_P
        return PreferenceLosses(losses_P, torch.stack([*sides, torch.zeros_like(rewards_P)]))

    def of_pairs(self, logps_B: Tensor, tokens_B: Tensor, reference_B: Tensor) -> PreferenceLosses:
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
        chosen_P, rejected_P, ones_P = chosen_P.detach(), rejected_P.detach(), torch.ones_like(losses_P)
        right_P = (chosen_P > rejected_P).to(ones_P.dtype)
        return PreferenceLosses(
            losses_P, torch.stack([self.beta * chosen_P, ones_P, self.beta * rejected_P, ones_P, right_P])
        )

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
class PreferenceLosses:
    """The losses of P pairs or labelled completions, and the rewards of their completions, as TRL defines them."""

    losses_P: Tensor
    # (5, P): reward of the chosen completion, 1 if there is one, the same of the rejected one, 1 if the chosen one's is
    # greater; a reward is beta times the (mean) log-probability, less the reference's where there is one; no gradient
    rewards: Tensor


def reward_means(sums: Sequence[float], *, paired: bool) -> dict[str, float]:
    """Return the means, by TRL's names, of the rows of :attr:`PreferenceLosses.rewards` summed over P.

    Those of a side that no completion is of are left out, and without pairs the accuracy.
    """
    chosen, num_chosen, rejected, num_rejected, right = sums
    sides = {"chosen": (chosen, num_chosen), "rejected": (rejected, num_rejected)}
    found = {f"rewards/{name}": total / count for name, (total, count) in sides.items() if count}
    if len(found) == len(sides):
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found | ({"rewards/accuracies": right / num_chosen} if paired and num_chosen else {})


def _log_odds(logps: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the mean log-probabilities of tokens."""
    # Of a probability that rounds to 1 the odds would be infinite.
    return logps - torch.log(-torch.expm1(logps.clamp(max=-1e-6)))
