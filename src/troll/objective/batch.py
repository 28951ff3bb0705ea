"""The checked inputs of every loss: which tokens count, their advantages and importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from troll.deferred import DeferredCheck, DeferredChecks, check_or_defer
from troll.errors import InputError, require_choice
from troll.inputs import require_same_device, require_tensor
from troll.policy import OnInvalid, SparsePolicy
from troll.policy.sparse import require_policy


@dataclass(frozen=True, eq=False)
class Batch:
    """Checked inputs of a loss. Outside ``counted`` all numbers are harmless constants."""

    counted: Tensor
    """[B, T] bool."""
    advantages: Tensor
    """[B, T]."""
    weights: Tensor | None
    """[B, T] off-policy importance weights, or None."""
    skipped: Tensor
    """[] tokens of the loss mask that were left out because a policy has no distribution there."""

    @classmethod
    def of(
        cls,
        proposal: SparsePolicy,
        old: SparsePolicy,
        advantages: Tensor,
        loss_mask: Tensor,
        importance_weights: Tensor | None,
        on_invalid: OnInvalid,
        deferred: DeferredChecks | None = None,
    ) -> Batch:
        """Check and broadcast. Advantages are [B] or [B, T]; importance weights are broadcast likewise.

        Checks that wait for the device run now, or are added to ``deferred`` if that is given.
        """
        require_choice("on_invalid", on_invalid, ("raise", "mask"))
        _check_policies(proposal, old)
        require_tensor("loss_mask", loss_mask, "[B, T]")
        if loss_mask.shape != old.shape:
            raise InputError(
                f"loss_mask must have one entry per token of the policies, shape {list(old.shape)}, got "
                f"{list(loss_mask.shape)}",
                "Cut the mask to the tokens that were scored, one row per sequence",
            )
        require_same_device("old", old.log_probs, "loss_mask", loss_mask)
        asked = loss_mask.bool()
        counted = asked & old.valid if proposal is old else asked & proposal.valid & old.valid
        batch = cls(
            counted=counted,
            advantages=_per_token("advantages", advantages, counted),
            weights=None
            if importance_weights is None
            else _per_token("importance_weights", importance_weights, counted),
            skipped=(asked & ~counted).sum(),
        )
        if not torch.compiler.is_compiling():
            check_or_defer(deferred, batch._deferred_check(asked, proposal, on_invalid))
        return batch

    def _deferred_check(self, asked: Tensor, proposal: SparsePolicy, on_invalid: OnInvalid) -> DeferredCheck:
        wrong = ~self.advantages.isfinite().all()
        if self.weights is not None:
            wrong = wrong | ~self.weights.isfinite().all()
        if on_invalid == "raise":
            wrong = wrong | (self.skipped > 0)
        return DeferredCheck(wrong, partial(self._refuse, asked, proposal, on_invalid))

    def _refuse(self, asked: Tensor, proposal: SparsePolicy, on_invalid: OnInvalid) -> None:
        if on_invalid == "raise" and bool(self.skipped > 0):
            at = (asked & ~self.counted).nonzero()[0].tolist()
            which = "the proposal" if not bool(proposal.valid[tuple(at)]) else "the old policy"
            raise InputError(
                f"{which} has no distribution at position {at}, which loss_mask counts",
                "Use the same loss_mask for the policies and the loss, or on_invalid='mask' to leave these out",
            )
        for name, x in (("advantages", self.advantages), ("importance_weights", self.weights)):
            if x is not None and not bool(x.isfinite().all()):
                at = (~x.isfinite()).nonzero()[0].tolist()
                raise InputError(
                    f"{name} must be finite, got {float(x[tuple(at)])} at position {at}",
                    "Check the rewards of that sequence"
                    if name == "advantages"
                    else "Check the sampler's log-probabilities",
                )


def _check_policies(proposal: SparsePolicy, old: SparsePolicy) -> None:
    require_policy("old", old, "Make it with troll.sparsify(old_logits, sampled)")
    require_policy("proposal", proposal, "Make it with troll.restrict(logits, old)")
    for name, policy in (("old", old), ("proposal", proposal)):
        if len(policy.shape) != 2:
            raise InputError(
                f"{name} must be a policy over [B, T] positions, got {list(policy.shape)}",
                "Score a batch of sequences; for a single one, add a dimension: logits[None], sampled[None]",
            )
    if old.shape != proposal.shape:
        raise InputError(
            f"proposal and old must have the same positions [B, T], got {list(proposal.shape)} and {list(old.shape)}",
            "Score the same completions with both",
        )
    require_same_device("proposal", proposal.log_probs, "old", old.log_probs)


def _per_token(name: str, x: Tensor, counted: Tensor) -> Tensor:
    """[B] or [B, T] → [B, T] with zeros outside the counted tokens."""
    require_tensor(name, x, "[B] or [B, T]")
    if x.requires_grad:
        raise InputError(f"{name} must be constants, got a tensor that requires gradient", f"Pass {name}.detach()")
    if x.shape not in (counted.shape, counted.shape[:1]):
        B, T = counted.shape
        raise InputError(
            f"{name} must be one per sequence, shape [{B}], or one per token, shape [{B}, {T}], got {list(x.shape)}",
            "Pass them in the order of the sequences, with the prompt tokens cut off",
        )
    require_same_device("loss_mask", counted, name, x)
    return torch.where(counted, x if x.dim() == 2 else x[:, None], 0.0)
