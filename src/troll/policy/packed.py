"""``PackedPolicy``: a ``SparsePolicy`` without its unused slots (compressed sparse rows), for storage and transport.

Bytes per position with n kept tokens: 3 n for the ids (24 bits hold every vocabulary), 4 n for the log-probabilities,
2 for n, 4 for the tail: 62 for n = 8, where the padded form with 64 slots has 772. The sampled token is the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from troll.errors import InputError
from troll.policy.sparse import SparsePolicy

_ID_BYTES = 3


@dataclass(frozen=True, eq=False)
class PackedPolicy:
    """The kept tokens of all positions one after another. ``unpack`` gives the original back bit for bit."""

    counts: Tensor
    """[...] int16, kept tokens per position."""
    token_ids: Tensor
    """[nnz, 3] uint8, little-endian ids."""
    log_probs: Tensor
    """[nnz] fp32 (or fp64)."""
    log_tail: Tensor
    """[...] fp32 (or fp64)."""
    slots: int
    """Slots per position of the padded form (K)."""
    vocab_size: int
    temperature: float

    @classmethod
    def of(cls, policy: SparsePolicy) -> PackedPolicy:
        """Pack a policy; it becomes a constant."""
        policy = policy.detach()
        if policy.vocab_size > 1 << (8 * _ID_BYTES):
            raise InputError(f"a vocabulary of {policy.vocab_size}", "at most 2²⁴ tokens", "keeping the padded form")
        if policy.token_ids.shape[-1] > torch.iinfo(torch.int16).max:
            raise InputError(
                f"{policy.token_ids.shape[-1]} slots per position", "at most 32,767", "a smaller max_support (64)"
            )
        used = policy.token_ids >= 0
        if bool((used[..., 1:] & ~used[..., :-1]).any()):
            raise InputError(
                "a policy with unused slots between used ones", "unused slots at the end", "packing a sparsified policy"
            )
        at = used.flatten().nonzero()[:, 0]
        ids = policy.token_ids.flatten()[at].to(torch.int32)
        return cls(
            counts=used.sum(-1).to(torch.int16),
            token_ids=ids.view(torch.uint8).reshape(-1, 4)[:, :_ID_BYTES].contiguous(),
            log_probs=policy.log_probs.flatten()[at],
            log_tail=policy.log_tail,
            slots=policy.token_ids.shape[-1],
            vocab_size=policy.vocab_size,
            temperature=policy.temperature,
        )

    def unpack(self, *, check: bool = True) -> SparsePolicy:
        """The padded form. ``check`` it unless the pack has not left this process."""
        slot = torch.arange(self.slots, device=self.counts.device)
        used = slot < self.counts.unsqueeze(-1)
        first = self.counts.flatten().cumsum(0, dtype=torch.int64).reshape(self.counts.shape) - self.counts
        at = torch.where(used, first.unsqueeze(-1) + slot, len(self.log_probs))  # unused slots take what is put last
        digits = torch.nn.functional.pad(self.token_ids, (0, 4 - _ID_BYTES)).view(torch.int32)[:, 0]
        ids = torch.cat([digits, digits.new_full((1,), -1)])[at].long()
        log_probs = torch.cat([self.log_probs, self.log_probs.new_full((1,), -torch.inf)])[at]
        make = SparsePolicy if check else SparsePolicy.trusted
        return make(ids, log_probs, self.log_tail, self.vocab_size, self.temperature)

    def sequences(self) -> list[PackedPolicy]:
        """A policy over [B, ...] as B policies over [...], which share its memory."""
        sizes = self.counts.reshape(len(self.counts), -1).sum(-1, dtype=torch.int64).tolist()
        ids, log_probs = torch.split(self.token_ids, sizes), torch.split(self.log_probs, sizes)
        parts = zip(self.counts, ids, log_probs, self.log_tail, strict=True)
        return [PackedPolicy(*part, self.slots, self.vocab_size, self.temperature) for part in parts]

    @classmethod
    def stack(cls, policies: Sequence[PackedPolicy]) -> PackedPolicy:
        """Policies over [...] as one over [B, ...], padded to the widest support that occurs."""
        first = policies[0]
        if any((p.vocab_size, p.temperature) != (first.vocab_size, first.temperature) for p in policies):
            raise InputError(
                "policies over different vocabularies or at different temperatures", "one of each", "one rollout"
            )
        counts = torch.stack([p.counts for p in policies])
        return cls(
            counts=counts,
            token_ids=torch.cat([p.token_ids for p in policies]),
            log_probs=torch.cat([p.log_probs for p in policies]),
            log_tail=torch.stack([p.log_tail for p in policies]),
            slots=max(1, int(counts.max())) if counts.numel() else 1,
            vocab_size=first.vocab_size,
            temperature=first.temperature,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(x.nbytes for x in (self.counts, self.token_ids, self.log_probs, self.log_tail))
