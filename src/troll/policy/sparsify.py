"""Logits → ``SparsePolicy``: on the policy's own most probable tokens, or on another policy's support."""

from __future__ import annotations

import torch
from torch import Tensor

from troll.errors import InputError
from troll.policy.gather import log_probs_at, scaled
from troll.policy.positions import OnInvalid, Positions, check_support, check_vocabulary
from troll.policy.select import log_norms, select, undefined
from troll.policy.sparse import SparsePolicy


def sparsify(
    logits: Tensor,
    sampled: Tensor,
    max_support: int = 64,
    tail_mass: float = 1e-5,
    *,
    temperature: float = 1.0,
    loss_mask: Tensor | None = None,
    on_invalid: OnInvalid = "raise",
) -> SparsePolicy:
    """Keep the most probable tokens of each position until 1 − ``tail_mass`` of the probability is covered.

    The choice is exact and greedy, at most ``max_support`` tokens, and always has the sampled token, in slot 0. The
    log-probabilities are those of the full softmax and carry gradient to the logits; the choice itself is constant.

    Args:
        logits: [..., V], any float type; computed in fp32 (fp64 for fp64).
        sampled: [...] ids of the tokens that were sampled at these positions.
        max_support: most tokens kept per position (K); V for dense distributions.
        tail_mass: probability that may be dropped (δ); 0 keeps ``max_support`` tokens whatever their mass.
        temperature: the sampling temperature; the policy is softmax(logits / temperature).
        loss_mask: [...] positions that count. The others get an empty support: their logits are not read (they may
            be NaN) and receive zero gradient.
        on_invalid: what to do where counted logits are NaN or +inf or give the sampled token no probability:
            ``"raise"``, or ``"mask"`` those positions (``valid`` is False there; the losses count them). Inside
            ``torch.compile``, where nothing can be raised, they are masked.
    """
    check_support(max_support, tail_mass)
    flat = _Rows(logits, sampled, temperature, loss_mask, on_invalid)
    with torch.no_grad():
        log_norm = log_norms(flat.logits, temperature)
        ids = select(flat.logits, flat.sampled, log_norm, max_support, tail_mass, temperature)
        ids = flat.drop_uncounted(ids, log_norm)
    return flat.policy(ids, log_norm)


def restrict(
    logits: Tensor, old: SparsePolicy, *, loss_mask: Tensor | None = None, on_invalid: OnInvalid = "raise"
) -> SparsePolicy:
    """The policy of these logits on the support and at the temperature of ``old``: the proposal for ``tail="bucket"``.

    Nothing is selected; what lies outside the support of ``old`` is the tail, with its exact mass and gradient.
    Arguments as for ``sparsify``; positions that ``old`` masks out stay masked out.
    """
    flat = _Rows(logits, old.sampled, old.temperature, loss_mask, on_invalid, skip=~old.valid)
    check_vocabulary(flat.logits.shape[-1], old.vocab_size)
    with torch.no_grad():
        log_norm = log_norms(flat.logits, old.temperature)
        ids = flat.drop_uncounted(old.token_ids.reshape(-1, old.token_ids.shape[-1]), log_norm)
        # A kept token that became impossible leaves the support; its mass, zero, joins the tail.
        ids = torch.where(flat.at(ids.clamp(min=0)) == -torch.inf, -1, ids)
    return flat.policy(ids, log_norm)


class _Rows(Positions):
    """Checked inputs, flattened to rows."""

    def __init__(
        self,
        logits: Tensor,
        sampled: Tensor,
        temperature: float,
        loss_mask: Tensor | None,
        on_invalid: OnInvalid,
        skip: Tensor | None = None,
    ) -> None:
        if not logits.is_floating_point():
            raise InputError(f"logits of {logits.dtype}", "a floating type", "the model's output logits")
        if logits.dim() < 1 or logits.shape[-1] < 1 or sampled.shape != logits.shape[:-1]:
            raise InputError(
                f"logits {list(logits.shape)} and sampled {list(sampled.shape)}",
                "[..., V] and [...]",
                "logits that predict the sampled tokens: logits[:, :-1] and input_ids[:, 1:]",
            )
        super().__init__(logits.shape[-1], sampled, temperature, loss_mask, on_invalid, skip)
        self.logits = logits.reshape(-1, logits.shape[-1]) if sampled.dim() != 1 else logits

    def at(self, ids: Tensor) -> Tensor:
        """The scaled logits of these tokens, [N, K]."""
        return scaled(self.logits.gather(-1, ids), self.temperature)

    def drop_uncounted(self, ids: Tensor, log_norm: Tensor) -> Tensor:
        """Empty the support where the mask says so, and where the logits define no distribution."""
        bad = self.counted & undefined(log_norm, self.at(self.sampled[:, None])[:, 0])
        self.refuse(bad, lambda row: scaled(self.logits[row], self.temperature))
        return torch.where((self.counted & ~bad)[:, None], ids, -1)

    def policy(self, ids: Tensor, log_norm: Tensor) -> SparsePolicy:
        """The policy of these logits at the kept ids."""
        log_probs, log_tail = log_probs_at(self.logits, ids, log_norm, self.temperature)
        return SparsePolicy.trusted(
            ids.reshape(*self.shape, ids.shape[-1]),
            log_probs.reshape(*self.shape, ids.shape[-1]),
            log_tail.reshape(self.shape),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
        )
