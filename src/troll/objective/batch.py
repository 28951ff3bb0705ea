"""What every loss is given, checked once: which tokens count, their advantages and importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from troll.deferred import DeferredCheck, DeferredChecks, check_or_defer
from troll.errors import InputError, require_choice
from troll.policy import OnInvalid, SparsePolicy


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

        What waits for the device is checked now, or put off where ``later`` is given.
        """
        require_choice("on_invalid", on_invalid, ("raise", "mask"))
        for name, policy in (("proposal", proposal), ("old", old)):
            if not isinstance(policy, SparsePolicy):
                raise InputError(
                    f"{name} must be a SparsePolicy, got {_kind(policy)}",
                    "Make the old policy with troll.sparsify(old_logits, sampled) and the proposal with "
                    "troll.restrict(logits, old)",
                )
        if len(proposal.shape) != 2 or loss_mask.shape != proposal.shape:
            raise InputError(
                f"Got a proposal over {list(proposal.shape)} positions and loss_mask {list(loss_mask.shape)}"
                ", expected [B, T] for both",
                "Pass logits[None] and loss_mask[None] for a single sequence",
            )
        if old.shape != proposal.shape:
            raise InputError(
                f"Got a proposal over {list(proposal.shape)} positions and an old policy over {list(old.shape)}"
                ", expected the same positions for both",
                "Score the same completions with both",
            )
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
            which = "proposal" if not bool(proposal.valid[tuple(at)]) else "old policy"
            raise InputError(
                f"Got a {which} without a distribution at position {at}, which loss_mask counts"
                ", expected a distribution at every counted position",
                "Use the same loss_mask for sparsify and the loss, or on_invalid='mask' to leave such positions out",
            )
        for name, x in (("advantages", self.advantages), ("importance_weights", self.weights)):
            if x is not None and not bool(x.isfinite().all()):
                at = (~x.isfinite()).nonzero()[0].tolist()
                raise InputError(
                    f"Got {name} {float(x[tuple(at)])} at position {at}, expected finite numbers",
                    "Check the reward of that sequence",
                )


def _kind(x: object) -> str:
    return f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _per_token(name: str, x: Tensor, counted: Tensor) -> Tensor:
    """[B] or [B, T] → [B, T] with zeros outside the counted tokens."""
    if x.requires_grad:
        raise InputError(f"Got {name} that require gradient, expected constants", f"Pass {name}.detach()")
    if x.shape not in (counted.shape, counted.shape[:1]):
        raise InputError(
            f"Got {name} {list(x.shape)} for a batch {list(counted.shape)}"
            ", expected one per sequence [B] or one per token [B, T]",
            f"Pass {name}.reshape(B) or {name}.expand(B, T)",
        )
    return torch.where(counted, x if x.dim() == 2 else x[:, None], 0.0)
