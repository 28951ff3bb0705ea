"""The two passes over a batch: ``OldPolicyRecorder`` scores a rollout, ``ProjectedScorer`` an update on it.

Both are a ``Pass`` of ``forward``: TRL runs its model, they turn hidden states into log-probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from troll.deferred import DeferredChecks
from troll.objective import constrain, network_kl, ratios, token_stats
from troll.objective.bounds import Bound, FixedBound
from troll.policy import PackedPolicy, SparsePolicy
from troll.trl.config import TROLLConfig
from troll.trl.forward import Forward, TokenScores

OLD_POLICY = "troll_old_policy"
"""Key of a batch: the sparse old policy, one ``PackedPolicy`` per sequence."""
BOUND_MEAN = "troll_bound_mean"
"""Key of a batch: [] mean over the rollout of the quantity that token bounds are relative to."""
ADVANTAGE_SIZE = "troll_advantage_size"
"""Key of a batch: [] mean |A| over the counted tokens of the rollout."""
REWARDS = "troll_rewards"
"""Key of a batch: [B] reward of each completion, NaN where there is none."""


class OldPolicyRecorder:
    """TokenScores a rollout as TRL does, and keeps the sparse old policy."""

    def __init__(self, model: Any, args: TROLLConfig) -> None:
        self.model, self.args = model, args
        self.policies: list[PackedPolicy] = []
        self.log_probs: Tensor | None = None

    def wants(self, model: Any) -> bool:
        """Return True for the first pass of the policy; with LoRA, the same model scores the reference afterwards."""
        return model is self.model and self.log_probs is None

    def begin(self) -> None:
        """Drop the policies of an attempt that ran out of memory."""
        self.policies.clear()

    def score(self, forward: Forward) -> TokenScores:
        """Log-probabilities of the full softmax, as TRL computes them."""
        policy, entropy = forward.head.sparsify(
            forward.hidden,
            forward.sampled,
            self.args.max_support,
            self.args.tail_mass,
            temperature=forward.temperature,
        )
        self.policies += _on_grid(policy, forward).pack().sequences()
        return TokenScores(policy.sampled_log_probs, entropy)

    def finish(self, log_probs: Tensor) -> None:
        """Keep the log-probabilities that the recorded policies belong to."""
        self.log_probs = log_probs

    def of(self, old_log_probs: Tensor) -> list[PackedPolicy]:
        """The recorded policies, one per sequence; ``old_log_probs`` must come from the same pass."""
        if self.log_probs is not old_log_probs:
            raise RuntimeError("TRL's old log-probabilities do not come from the first scoring pass of its policy")
        return self.policies


class ProjectedScorer:
    """TokenScores the policy as it is now, brought into the trust region around the old one.

    TRL takes the ratio to ``old_log_probs``, the full softmax of the old policy. What it is given makes that the ratio
    of the projected policy. With another ``trust_region`` than ``"troll"``, TRL's own loss is only measured.
    """

    def __init__(
        self,
        policies: list[PackedPolicy],
        old_log_probs: Tensor,
        loss_mask: Tensor,
        args: TROLLConfig,
        bound: Bound | None = None,
        bound_mean: Tensor | None = None,
    ) -> None:
        self.old = PackedPolicy.stack(policies).unpack(check=False)
        self.old_log_probs, self.loss_mask, self.args = old_log_probs, loss_mask.bool(), args
        self.bound, self.bound_mean = FixedBound(args.kl_bound) if bound is None else bound, bound_mean
        self.regression: Tensor | None = None
        """[B, T], differentiable."""
        self.names: list[str] = []
        self.stats: Tensor | None = None
        """[B, T, len(names) + 1] statistics per token, and 1 where the token counts."""
        self.checks: DeferredChecks = []
        """Run after TRL's loss is launched."""

    def wants(self, model: Any) -> bool:
        """Return True: every forward of an update belongs to the pass."""
        return True

    def begin(self) -> None:
        """Nothing is kept from an earlier attempt."""

    def score(self, forward: Forward) -> TokenScores:
        """Log-probabilities of the projected policy; those of the old policy where a token is masked out."""
        if forward.sequences != slice(0, len(self.loss_mask)):
            raise RuntimeError(f"TRL scored sequences {forward.sequences} of an update of {len(self.loss_mask)}")
        at, args, hidden = forward.places, self.args, forward.hidden
        counted = self.loss_mask.flatten()[at]
        old, old_log_probs = self.old.flatten()[at], self.old_log_probs.flatten()[at]
        if args.tail == "bucket":
            proposal, entropy = forward.head.restrict(hidden, old, loss_mask=counted, deferred=self.checks)
        else:
            proposal, entropy = forward.head.sparsify(
                hidden,
                forward.sampled,
                args.max_support,
                args.tail_mass,
                temperature=forward.temperature,
                loss_mask=counted,
                deferred=self.checks,
            )
        projects = args.trust_region == "troll"
        bound = self._bounds(forward, proposal, old) if projects else math.inf
        step = constrain(proposal, old, bound, counted, tail=args.tail, deferred=self.checks)
        log_probs = old_log_probs + step.log_ratio
        if not projects:
            log_probs = torch.where(counted, proposal.sampled_log_probs, old_log_probs)
        log_ratio = forward.on_grid((log_probs - old_log_probs).detach())
        of_grid = forward.labelled & self.loss_mask
        ratio = ratios(log_ratio, of_grid, args.importance_sampling_level).flatten()[at]
        pull = step.regression if projects else None
        stats = token_stats(proposal, old, ratio, step.projection, pull, entropy)
        if isinstance(bound, Tensor):
            stats["kl_bound"] = bound.to(ratio.dtype)
        self.names = list(stats)
        self.stats = forward.on_grid(torch.stack([*stats.values(), counted.to(ratio.dtype)], dim=-1))
        self.regression = None if pull is None else forward.on_grid(pull)
        return TokenScores(log_probs, entropy)

    def _bounds(self, forward: Forward, proposal: SparsePolicy, old: SparsePolicy) -> float | Tensor:
        """ε: one number, or one per token of this forward, [N]."""
        bounds = self.bound.token_bounds(
            self.old,
            forward.labelled & self.loss_mask,
            lambda: forward.on_grid(network_kl(proposal, old, tail=self.args.tail)),
            self.bound_mean,
        )
        return bounds.flatten()[forward.places] if isinstance(bounds, Tensor) else bounds

    def finish(self, log_probs: Tensor) -> None:
        """Nothing is left to do after the pass."""


def _on_grid(policy: SparsePolicy, forward: Forward) -> SparsePolicy:
    """A policy over [N] → one over [B, T], masked out where there is no label."""
    return SparsePolicy.trusted(
        forward.on_grid(policy.token_ids, -1),
        forward.on_grid(policy.log_probs, -math.inf),
        forward.on_grid(policy.log_tail),
        policy.vocab_size,
        policy.temperature,
    )
