"""Which positions are scored, and what was sampled there: checked arguments of ``sparsify``, ``restrict``, ``Head``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from troll.deferred import DeferredCheck
from troll.errors import InputError, require_choice
from troll.policy.sparse import check_temperature

OnInvalid = Literal["raise", "mask"]
MAX_SUPPORT = 64
"""K, the most tokens kept per position, unless another number is given."""
TAIL_MASS = 1e-5
"""δ, the probability that may be dropped per position, unless another number is given."""


def check_support(max_support: int, tail_mass: float) -> None:
    """Refuse a support that no policy can have."""
    if max_support < 1:
        raise InputError(f"Got max_support={max_support}, expected at least 1 token", "Try 64, the default")
    if not 0 <= tail_mass < 1:
        raise InputError(f"Got tail_mass={tail_mass}, expected 0 ≤ tail_mass < 1", "Try 1e-5, the default")


def check_vocabulary(given: int, old: int) -> None:
    """Refuse logits over another vocabulary than the old policy's."""
    if given != old:
        raise InputError(
            f"Got logits over {given} tokens and an old policy over {old}, expected the same vocabulary",
            "Try scoring both with the same model (and the same padding of its embedding)",
        )


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


class Positions:
    """Positions flattened to rows: which count, and what was sampled there."""

    def __init__(
        self,
        vocab_size: int,
        sampled: Tensor,
        temperature: float,
        loss_mask: Tensor | None,
        on_invalid: OnInvalid,
        skip: Tensor | None = None,
    ) -> None:
        if sampled.is_floating_point() or sampled.is_complex() or sampled.dtype == torch.bool:
            raise InputError(
                f"Got sampled of {sampled.dtype}, expected integers", "Try the sampled token ids: sampled.long()"
            )
        if loss_mask is not None and loss_mask.shape != sampled.shape:
            raise InputError(
                f"Got loss_mask {list(loss_mask.shape)} for positions {list(sampled.shape)}"
                ", expected one entry per position",
                "Try the mask of the completion tokens, aligned with the sampled tokens",
            )
        require_choice("on_invalid", on_invalid, ("raise", "mask"))
        check_temperature(temperature)
        self.shape = sampled.shape
        self.vocab_size = vocab_size
        self.counted: Tensor | None = None
        """[N] which rows count; None where all do."""
        self.sampled = sampled.reshape(-1).long()
        counted = _both(None if loss_mask is None else loss_mask.bool(), None if skip is None else ~skip)
        if counted is not None:
            self.counted = counted.reshape(-1)
            # Under the mask any id goes, also a padding id of -100.
            self.sampled = torch.where(self.counted, self.sampled, 0)
        self.temperature = temperature
        self.on_invalid = on_invalid

    def check_ids(self) -> None:
        """Refuse sampled tokens that are none of the vocabulary."""
        bad = (self.sampled < 0) | (self.sampled >= self.vocab_size)
        if not torch.compiler.is_compiling() and bool(bad.any()):
            raise InputError(
                f"Got sampled token {int(self.sampled[bad][0])} at position {self._name(bad)}"
                f", expected ids from 0 to {self.vocab_size - 1}",
                "Try the tokenizer of this model; padding positions belong under loss_mask",
            )

    def check(self, slot_0: Tensor, scaled_logits: Callable[[int], Tensor]) -> DeferredCheck:
        """Whether a counted row has no token in slot 0 [N]: its logits define no distribution with the sampled one.

        ``scaled_logits`` gives the logits of one row.
        """
        bad = slot_0 < 0 if self.counted is None else (slot_0 < 0) & self.counted
        any_bad = bad.any() if self.on_invalid == "raise" else bad.new_zeros(())
        return DeferredCheck(any_bad, lambda: self._refuse(bad, scaled_logits))

    def _refuse(self, bad: Tensor, scaled_logits: Callable[[int], Tensor]) -> None:
        self.check_ids()
        row = int(bad.nonzero()[0])
        z = scaled_logits(row)
        culprit = (~(z < torch.inf)).nonzero().flatten().tolist()
        if not culprit and math.isfinite(float(z.max())):
            raise InputError(
                f"Got sampled token {int(self.sampled[row])} with logit −inf at position {self._name(bad)}"
                ", expected a sampled token that can be sampled",
                "Try scoring without top-k, top-p or min-p truncation, and sampled ids aligned with the logits",
            )
        what = f"logit {float(z[culprit[0]])} of token {culprit[0]}" if culprit else "only −inf logits"
        raise InputError(
            f"Got {what} at position {self._name(bad)} ({int(bad.sum())} such positions)"
            ", expected finite logits, or −inf for tokens that are excluded",
            "Try on_invalid='mask' to leave such positions out and count them, or a smaller learning rate",
        )

    def _name(self, bad: Tensor) -> list[int]:
        return list(bad.reshape(self.shape).nonzero()[0].tolist())
