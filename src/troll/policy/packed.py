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
from troll.inputs import describe, is_integer, require_count, require_tensor
from troll.policy.sparse import SparsePolicy, check_temperature, require_policy

_ID_BYTES = 3
_TENSORS = ("counts", "token_ids", "log_probs", "log_tail")


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
        require_policy("policy", policy, "Make it with troll.sparsify(logits, sampled)")
        policy = policy.detach()
        if policy.vocab_size > 1 << (8 * _ID_BYTES):
            raise InputError(
                f"a packed policy can have at most 2²⁴ tokens in its vocabulary, got vocab_size={policy.vocab_size}",
                "Store the SparsePolicy itself",
            )
        if policy.token_ids.shape[-1] > torch.iinfo(torch.int16).max:
            raise InputError(
                f"a packed policy can have at most 32,767 slots per position, got {policy.token_ids.shape[-1]}",
                "Use a smaller max_support; the default is 64",
            )
        used = policy.token_ids >= 0
        if bool((used[..., 1:] & ~used[..., :-1]).any()):
            raise InputError(
                "the policy has unused slots between used ones, as a proposal made by troll.restrict may; a packed "
                "policy has them at the end",
                "Pack the old policy, made by troll.sparsify",
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
        first = _alike(policies)
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

    @classmethod
    def cat(cls, policies: Sequence[PackedPolicy]) -> PackedPolicy:
        """Policies over [n_i] as one over [Σ n_i]; ``slots`` is the widest of theirs."""
        first = _alike(policies)
        tensors = {name: torch.cat([getattr(p, name) for p in policies]) for name in _TENSORS}
        return cls(
            **tensors,
            slots=max(p.slots for p in policies),
            vocab_size=first.vocab_size,
            temperature=first.temperature,
        )

    def to_bytes(self) -> Tensor:
        """All tensors of a policy over [n] one after another, [7 nnz + 6 n] uint8; fp32 only."""
        if self.log_probs.dtype != torch.float32 or self.counts.dim() != 1:
            raise InputError(
                f"to_bytes needs a float32 policy over [n] positions, got {self.log_probs.dtype} over "
                f"{list(self.counts.shape)}",
                "Pack float32 policies, one sequence at a time: packed.sequences() splits a batch",
            )
        return torch.cat([getattr(self, name).contiguous().view(torch.uint8).flatten() for name in _TENSORS])

    @classmethod
    def from_bytes(
        cls, data: Tensor, positions: int, slots: int, vocab_size: int, temperature: float = 1.0
    ) -> PackedPolicy:
        """The policy over [``positions``] that ``to_bytes`` made these of."""
        require_tensor("data", data, "[n] of uint8", "Pass what to_bytes() returned")
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise InputError(
                f"data must be a uint8 tensor [n], got {data.dtype} {list(data.shape)}", "Pass what to_bytes() returned"
            )
        if not is_integer(positions) or positions < 0:
            raise InputError(
                f"positions must be an integer ≥ 0, got {describe(positions)}", "Pass its number of tokens"
            )
        require_count("slots", slots, "Pass the slots of the packed policy")
        require_count("vocab_size", vocab_size, "Pass the vocab_size of the packed policy")
        check_temperature(temperature)
        nnz, rest = divmod(len(data) - 6 * positions, _ID_BYTES + 4)
        if nnz < 0 or rest:
            raise InputError(
                f"data has {len(data)} bytes and cannot be a policy over {positions} positions, which has 6 bytes per "
                "position and 7 per kept token",
                "Pass the number of positions these bytes were made for",
            )
        counts, ids, log_probs, log_tail = torch.split(data, [2 * positions, _ID_BYTES * nnz, 4 * nnz, 4 * positions])
        return cls(
            counts.clone().view(torch.int16),  # a copy is aligned
            ids.reshape(nnz, _ID_BYTES),
            log_probs.clone().view(torch.float32),
            log_tail.clone().view(torch.float32),
            slots=slots,
            vocab_size=vocab_size,
            temperature=temperature,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(getattr(self, name).nbytes for name in _TENSORS)


def _alike(policies: Sequence[PackedPolicy]) -> PackedPolicy:
    """The first of policies that can be joined."""
    wrong = (
        [p for p in policies if not isinstance(p, PackedPolicy)] if isinstance(policies, (list, tuple)) else [policies]
    )
    if wrong or not policies:
        raise InputError(
            f"policies must be a list of at least one PackedPolicy, got {describe(wrong[0]) if wrong else 'none'}",
            "Pack each with policy.pack()",
        )
    first = policies[0]
    if any((p.vocab_size, p.temperature) != (first.vocab_size, first.temperature) for p in policies):
        raise InputError(
            "policies must have the same vocab_size and the same temperature, got different ones",
            "Join policies of one rollout only",
        )
    return first
