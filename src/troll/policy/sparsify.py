"""Logits → ``SparsePolicy``: on the policy's own most probable tokens, or on another policy's support."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.policy.gather import log_probs_at, scaled
from troll.policy.select import log_norms, select
from troll.policy.sparse import SparsePolicy, check_temperature

OnInvalid = Literal["raise", "mask"]


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
    if max_support < 1:
        raise InputError(f"max_support={max_support}", "at least 1 token", "64, the default")
    if not 0 <= tail_mass < 1:
        raise InputError(f"tail_mass={tail_mass}", "0 ≤ tail_mass < 1", "1e-5, the default")
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
    if old.vocab_size != flat.logits.shape[-1]:
        raise InputError(
            f"logits over {flat.logits.shape[-1]} tokens and an old policy over {old.vocab_size}",
            "the same vocabulary",
            "scoring both with the same model (and the same padding of its embedding)",
        )
    with torch.no_grad():
        log_norm = log_norms(flat.logits, old.temperature)
        ids = flat.drop_uncounted(old.token_ids.reshape(-1, old.token_ids.shape[-1]), log_norm)
        # A kept token that became impossible leaves the support; its mass, zero, joins the tail.
        ids = torch.where(flat.at(ids.clamp(min=0)) == -torch.inf, -1, ids)
    return flat.policy(ids, log_norm)


class _Rows:
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
        if sampled.is_floating_point() or sampled.is_complex() or sampled.dtype == torch.bool:
            raise InputError(f"sampled of {sampled.dtype}", "integers", "the sampled token ids: sampled.long()")
        if loss_mask is not None and loss_mask.shape != sampled.shape:
            raise InputError(
                f"loss_mask {list(loss_mask.shape)} for positions {list(sampled.shape)}",
                "one entry per position",
                "the mask of the completion tokens, aligned with the sampled tokens",
            )
        require_choice("on_invalid", on_invalid, ("raise", "mask"))
        check_temperature(temperature)
        self.shape = sampled.shape
        self.logits = logits.reshape(-1, logits.shape[-1]) if sampled.dim() != 1 else logits
        counted = torch.ones_like(sampled, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
        self.counted = (counted if skip is None else counted & ~skip).reshape(-1)
        # Under the mask any id goes, also a padding id of -100.
        self.sampled = torch.where(self.counted, sampled.reshape(-1), 0).long()
        self.temperature = temperature
        self.on_invalid = on_invalid
        if not torch.compiler.is_compiling():
            self._check_ids()

    def _check_ids(self) -> None:
        bad = (self.sampled < 0) | (self.sampled >= self.logits.shape[-1])
        if bool(bad.any()):
            raise InputError(
                f"sampled token {int(self.sampled[bad][0])} at position {self._name(bad)}",
                f"ids from 0 to {self.logits.shape[-1] - 1}",
                "the tokenizer of this model; padding positions belong under loss_mask",
            )

    def at(self, ids: Tensor) -> Tensor:
        """The scaled logits of these tokens, [N, K]."""
        return scaled(self.logits.gather(-1, ids), self.temperature)

    def drop_uncounted(self, ids: Tensor, log_norm: Tensor) -> Tensor:
        """Empty the support where the mask says so, and where the logits define no distribution."""
        chance = self.at(self.sampled[:, None])[:, 0]
        bad = self.counted & ~(log_norm[:, 1].isfinite() & (chance > -torch.inf))
        if self.on_invalid == "raise" and not torch.compiler.is_compiling() and bool(bad.any()):
            row = int(bad.nonzero()[0])
            if math.isfinite(float(log_norm[row, 1])):
                raise InputError(
                    f"sampled token {int(self.sampled[row])} with logit −inf at position {self._name(bad)}",
                    "a sampled token that can be sampled",
                    "scoring without top-k, top-p or min-p truncation, and sampled ids aligned with the logits",
                )
            z = scaled(self.logits[row], self.temperature)
            culprit = (~(z < torch.inf)).nonzero().flatten().tolist()
            what = "only −inf logits"
            if culprit:
                what = f"logit {float(z[culprit[0]])} of token {culprit[0]}"
            raise InputError(
                f"{what} at position {self._name(bad)} ({int(bad.sum())} such positions)",
                "finite logits, or −inf for tokens that are excluded",
                "on_invalid='mask' to leave such positions out and count them, or a smaller learning rate",
            )
        return torch.where((self.counted & ~bad)[:, None], ids, -1)

    def policy(self, ids: Tensor, log_norm: Tensor) -> SparsePolicy:
        """The policy of these logits at the kept ids."""
        log_probs, log_tail = log_probs_at(self.logits, ids, log_norm, self.temperature)
        return SparsePolicy(
            ids.reshape(*self.shape, ids.shape[-1]),
            log_probs.reshape(*self.shape, ids.shape[-1]),
            log_tail.reshape(self.shape),
            vocab_size=self.logits.shape[-1],
            temperature=self.temperature,
        )

    def _name(self, bad: Tensor) -> list[int]:
        return list(bad.reshape(self.shape).nonzero()[0].tolist())
