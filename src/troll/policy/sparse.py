"""``SparsePolicy``: the few tokens of each position that carry nearly all of its probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from troll.errors import InputError

if TYPE_CHECKING:
    from troll.policy.packed import PackedPolicy

_MASS_TOLERANCE = 1e-3  # fp32 log-probabilities of a million tokens sum to 1 within 1e-4
_PAD = -1

MadeBy = Literal["sparsify", "restrict"]


@dataclass(frozen=True, eq=False)
class SparsePolicy:
    """Token distributions restricted to their supports; what was dropped is known by its mass.

    Invariants, checked at construction (not inside ``torch.compile``, and not again in what is made from a policy):

    - slot 0 holds the sampled token; a position without any token was masked out (``valid`` is False there);
    - ids are unique within a position and inside the vocabulary; unused slots have id −1 and log-probability −inf;
    - kept and dropped mass sum to 1.
    """

    token_ids: Tensor
    """[..., K] int64, slot 0 the sampled token."""
    log_probs: Tensor
    """[..., K] fp32 (or fp64), log-probabilities of the full distribution, not renormalised."""
    log_tail: Tensor
    """[...] log of the probability outside the support."""
    vocab_size: int
    temperature: float = 1.0
    made_by: MadeBy | None = None
    """Whose tokens these are: the policy's own most probable ones (``sparsify``), or those another policy kept
    (``restrict``); None where it is not known. Decides which ``tail`` fits a proposal, see ``troll.policy.align``."""

    def __post_init__(self) -> None:
        _check_form(self)
        if not torch.compiler.is_compiling():
            _check_content(self)

    @property
    def shape(self) -> torch.Size:
        """Shape of the positions, without the support."""
        return self.log_tail.shape

    @property
    def valid(self) -> Tensor:
        """[...] False where the position was masked out and holds no distribution."""
        return self.token_ids[..., 0] >= 0

    @property
    def sampled(self) -> Tensor:
        """[...] ids of the sampled tokens."""
        return self.token_ids[..., 0]

    @property
    def sampled_log_probs(self) -> Tensor:
        """[...] log-probabilities of the sampled tokens under the full distribution."""
        return self.log_probs[..., 0]

    @property
    def support_size(self) -> Tensor:
        """[...] how many tokens are kept."""
        return (self.token_ids >= 0).sum(-1)

    @property
    def kept_mass(self) -> Tensor:
        """[...] probability of the kept tokens."""
        return -torch.expm1(self.log_tail)

    def __getitem__(self, index: Any) -> SparsePolicy:
        """Choose positions: an index into the leading dimensions (``policy[rows]``, ``policy[mask]``)."""
        return self._map(lambda x: x[index])

    def flatten(self) -> SparsePolicy:
        """The same positions in one dimension."""
        positions = len(self.shape)
        return self._map(lambda x: x.reshape(-1, *x.shape[positions:]))

    def detach(self) -> SparsePolicy:
        """The same numbers as constants."""
        return self._map(lambda x: x.detach() if x.requires_grad else x)

    def to(self, device: torch.device | str) -> SparsePolicy:
        """The same numbers on another device."""
        return self._map(lambda x: x.to(device))

    def pack(self) -> PackedPolicy:
        """The same numbers without the unused slots, for storage and transport."""
        from troll.policy.packed import PackedPolicy

        return PackedPolicy.of(self)

    def _map(self, f: Callable[[Tensor], Tensor]) -> SparsePolicy:
        return SparsePolicy.trusted(
            f(self.token_ids), f(self.log_probs), f(self.log_tail), self.vocab_size, self.temperature, self.made_by
        )

    @classmethod
    def trusted(
        cls,
        token_ids: Tensor,
        log_probs: Tensor,
        log_tail: Tensor,
        vocab_size: int,
        temperature: float,
        made_by: MadeBy | None = None,
    ) -> SparsePolicy:
        """A policy whose invariants hold by the way it was made: they are not checked."""
        policy = object.__new__(cls)
        values = (token_ids, log_probs, log_tail, vocab_size, temperature, made_by)
        for name, value in zip(cls.__dataclass_fields__, values, strict=True):
            object.__setattr__(policy, name, value)
        return policy


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is not a positive number."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(
            f"Got temperature={temperature}, expected a number > 0", "Pass the temperature the rollout was sampled with"
        )


def _check_form(policy: SparsePolicy) -> None:
    ids, log_probs, log_tail = policy.token_ids, policy.log_probs, policy.log_tail
    if ids.shape != log_probs.shape or ids.shape[:-1] != log_tail.shape or ids.dim() == 0 or ids.shape[-1] == 0:
        raise InputError(
            f"Got token_ids {list(ids.shape)}, log_probs {list(log_probs.shape)}, log_tail {list(log_tail.shape)}"
            ", expected shapes [..., K], [..., K] and [...] with K ≥ 1",
            "Use troll.sparsify(logits, sampled), which makes all three",
        )
    if ids.dtype != torch.int64:
        raise InputError(f"Got token_ids of {ids.dtype}, expected int64", "Pass token_ids.long()")
    if log_probs.dtype not in (torch.float32, torch.float64) or log_tail.dtype != log_probs.dtype:
        raise InputError(
            f"Got log_probs of {log_probs.dtype}, log_tail of {log_tail.dtype}"
            ", expected float32 or float64, both the same (half precision cannot resolve a KL below 2e-5)",
            "Take the log-softmax in float32: logits.float().log_softmax(-1)",
        )
    check_temperature(policy.temperature)


def _check_content(policy: SparsePolicy) -> None:
    ids, log_probs, log_tail = policy.token_ids, policy.log_probs.detach(), policy.log_tail.detach()
    used = ids >= 0
    ordered = ids.sort(-1).values
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    mass = log_probs.exp().sum(-1) + log_tail.exp()
    problems: list[tuple[Tensor, str, str]] = [
        (
            ((ids < _PAD) | (ids >= policy.vocab_size)).any(-1),
            f"token ids from 0 to {policy.vocab_size - 1} (vocab_size={policy.vocab_size}), −1 in unused slots",
            "the vocabulary size of the model that made the logits, and ids of its own tokenizer",
        ),
        (repeated, "every token id at most once in a position", "merging repeated ids before building the policy"),
        (
            used.any(-1) & ~used[..., 0],
            "the sampled token in slot 0",
            "troll.sparsify(logits, sampled), which always keeps it",
        ),
        ((used != (log_probs > -torch.inf)).any(-1), "−inf exactly in the unused slots", "troll.sparsify"),
        (
            ~((mass - 1).abs() <= _MASS_TOLERANCE),
            "kept and dropped probability that sum to 1",
            "log-probabilities of the full softmax, and log_tail = log(1 − Σ kept)",
        ),
    ]
    if not bool(torch.stack([bad.any() for bad, _, _ in problems]).any()):  # one transfer from the device
        return
    for bad, expected, hint in problems:
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            given = f"position {list(at)} with token_ids {_brief(ids[at])}, log_probs {_brief(log_probs[at])}"
            raise InputError(f"Got {given}, log_tail {float(log_tail[at]):.4g}, expected {expected}", f"Try {hint}")


def _brief(row: Tensor) -> str:
    shown = ", ".join(f"{x:.4g}" for x in row[:6].tolist())
    return f"[{shown}{', …' if row.numel() > 6 else ''}]"
