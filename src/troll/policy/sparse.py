"""``SparsePolicy``: the few tokens of each position that carry nearly all of its probability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from troll.errors import InputError, require_choice
from troll.inputs import (
    describe,
    require_count,
    require_integers,
    require_positive,
    require_same_device,
    require_tensor,
)

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
    require_positive("temperature", temperature, "Pass the temperature at which the rollout was sampled")


def require_policy(name: str, policy: object, fix: str) -> None:
    """Refuse what is not a ``SparsePolicy``, such as logits; ``fix`` says how to make one."""
    if not isinstance(policy, SparsePolicy):
        if type(policy).__name__ == "PackedPolicy":
            fix = f"Pass {name}.unpack()"
        raise InputError(f"{name} must be a SparsePolicy, got {describe(policy)}", fix)


def _check_form(policy: SparsePolicy) -> None:
    ids, log_probs, log_tail = policy.token_ids, policy.log_probs, policy.log_tail
    made = "troll.sparsify(logits, sampled) makes token_ids, log_probs and log_tail"
    require_integers("token_ids", ids, "[..., K]", made)
    require_tensor("log_probs", log_probs, "[..., K]", made)
    require_tensor("log_tail", log_tail, "[...]", made)
    if ids.shape != log_probs.shape or ids.shape[:-1] != log_tail.shape or ids.dim() == 0 or ids.shape[-1] == 0:
        raise InputError(
            "token_ids, log_probs and log_tail must have the shapes [..., K], [..., K] and [...] with K ≥ 1, got "
            f"{list(ids.shape)}, {list(log_probs.shape)} and {list(log_tail.shape)}",
            made,
        )
    if ids.dtype != torch.int64:
        raise InputError(f"token_ids must be int64, got {ids.dtype}", "Pass token_ids.long()")
    if log_probs.dtype not in (torch.float32, torch.float64) or log_tail.dtype != log_probs.dtype:
        raise InputError(
            "log_probs and log_tail must both be float32 or both float64 (half precision cannot resolve a KL below "
            f"2e-5), got {log_probs.dtype} and {log_tail.dtype}",
            "Take the log-softmax in float32: logits.float().log_softmax(-1)",
        )
    require_same_device("log_probs", log_probs, "token_ids", ids)
    require_same_device("log_probs", log_probs, "log_tail", log_tail)
    require_count("vocab_size", policy.vocab_size, "Pass the vocabulary size of the model that made the logits")
    check_temperature(policy.temperature)
    if policy.made_by is not None:
        require_choice("made_by", policy.made_by, get_args(MadeBy))


def _check_content(policy: SparsePolicy) -> None:
    ids, log_probs, log_tail = policy.token_ids, policy.log_probs.detach(), policy.log_tail.detach()
    used = ids >= 0
    ordered = ids.sort(-1).values
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    mass = log_probs.exp().sum(-1) + log_tail.exp()
    problems: list[tuple[Tensor, str, str]] = [
        (
            ((ids < _PAD) | (ids >= policy.vocab_size)).any(-1),
            f"token_ids must be from 0 to vocab_size − 1 = {policy.vocab_size - 1}, or −1 in unused slots",
            "Pass the vocabulary size of the model that made the logits, and ids of its own tokenizer",
        ),
        (
            repeated,
            "token_ids must have every token at most once in a position",
            "Merge repeated tokens before you build the policy",
        ),
        (
            used.any(-1) & ~used[..., 0],
            "token_ids must have the sampled token in slot 0",
            "Use troll.sparsify(logits, sampled), which always keeps it there",
        ),
        (
            (used != (log_probs > -torch.inf)).any(-1),
            "log_probs must be −inf in the unused slots (token_ids −1) and only there",
            "Use troll.sparsify(logits, sampled), or set both in the same slots",
        ),
        (
            ~((mass - 1).abs() <= _MASS_TOLERANCE),
            "the probabilities exp(log_probs) and exp(log_tail) must sum to 1",
            "Pass log-probabilities of the full softmax, and log_tail = log(1 − Σ exp(log_probs))",
        ),
    ]
    if not bool(torch.stack([bad.any() for bad, _, _ in problems]).any()):  # one transfer from the device
        return
    for bad, rule, fix in problems:
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            given = (
                f"token_ids {_brief(ids[at])}, log_probs {_brief(log_probs[at])}, log_tail {float(log_tail[at]):.4g}"
            )
            raise InputError(f"{rule}, got {given} at position {list(at)}", fix)


def _brief(row: Tensor) -> str:
    shown = ", ".join(f"{x:.4g}" for x in row[:6].tolist())
    return f"[{shown}{', …' if row.numel() > 6 else ''}]"
