"""The data that every way is given: one size, one seed, the same tensors for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from ours import outside, reference_sparsify
from torch import Tensor

import troll

SEQUENCES = 8
KL_BOUND = 0.05
TAIL_MASS = 1e-5


@dataclass(frozen=True)
class Size:
    """N tokens, V words of vocabulary, H hidden numbers, K tokens kept at most."""

    N: int
    V: int
    H: int
    K: int = 64

    @classmethod
    def parse(cls, text: str) -> Size:
        """``8192x151936x2560`` or ``8192x151936x2560x64``."""
        return cls(*(int(x) for x in text.split("x")))

    def __str__(self) -> str:
        return f"{self.N}x{self.V}x{self.H}x{self.K}"


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch of 8 sequences, as the last layer of a model leaves it."""

    size: Size
    hidden: Tensor
    """[N, H], requires gradient."""
    weight: Tensor
    """[V, H], requires gradient."""
    sampled: Tensor
    """[N], drawn from the old policy."""
    old: troll.SparsePolicy
    """[N], of hidden states that lie a step away."""
    advantages: Tensor
    """[8], one per sequence."""
    loss_mask: Tensor
    """[N] bool."""

    @property
    def token_advantages(self) -> Tensor:
        """[N]."""
        return self.advantages.repeat_interleave(self.size.N // SEQUENCES)

    def grid(self, x: Tensor) -> Tensor:
        """[N, ...] → [8, N / 8, ...]."""
        return x.reshape(SEQUENCES, -1, *x.shape[1:])

    @property
    def old_grid(self) -> troll.SparsePolicy:
        """The old policy, [8, N / 8]."""
        return troll.SparsePolicy.trusted(
            *(self.grid(x) for x in (self.old.token_ids, self.old.log_probs, self.old.log_tail)),
            self.old.vocab_size,
            self.old.temperature,
        )

    @torch.no_grad()
    def logits(self) -> Tensor:
        """[N, V]."""
        return self.hidden @ self.weight.t()

    def forget(self) -> None:
        """Drop the gradients."""
        self.hidden.grad = self.weight.grad = None

    def head(self, tokens: int) -> Problem:
        """The same with the first tokens of each sequence only."""
        n = tokens // SEQUENCES

        def cut(x: Tensor) -> Tensor:
            return self.grid(x.detach())[:, :n].flatten(0, 1).contiguous()

        old = troll.SparsePolicy.trusted(
            *(cut(x) for x in (self.old.token_ids, self.old.log_probs, self.old.log_tail)), self.size.V, 1.0
        )
        return replace(
            self,
            size=replace(self.size, N=n * SEQUENCES),
            hidden=cut(self.hidden).requires_grad_(),
            weight=self.weight.detach().requires_grad_(),
            sampled=cut(self.sampled),
            old=old,
            loss_mask=cut(self.loss_mask),
        )

    @torch.no_grad()
    def facts(self) -> dict[str, float]:
        """What the data is like: how many tokens are kept, what they hold, how many positions lie outside."""
        part = self.head(min(self.size.N, 1024))
        return {
            "outside the region": outside(part, part.logits()),
            "support, mean": self.old.support_size.float().mean().item(),
            "kept mass, mean": self.old.kept_mass.mean().item(),
            "kept mass, least": self.old.kept_mass.min().item(),
        }


@torch.no_grad()
def make(size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Hidden states that point, more or less strongly, to 24 words each, and old ones a step away from them.

    The rows of the weight have length 1. A hidden state is noise, worth logits of deviation 2, plus multiples of the
    rows of 24 words, so that these have logits from a₀ downwards with a₀ between 14 and 30: positions from flat (all 64
    slots used) to sure (one token). The step has logits of deviation 0.3 in the median, log-normally spread, so that
    some of the positions are outside the trust region and most are not.
    """
    torch.manual_seed(seed)
    N, V, H, K = size.N, size.V, size.H, size.K
    options = {"device": device, "dtype": torch.float32}
    weight = (torch.randn(V, H, **options) / H**0.5).to(dtype)
    top = 14 + 16 * torch.rand(N, 1, **options)
    heights = top - torch.rand(N, 24, **options).mul_(3).cumsum(-1)
    words = torch.randint(V, (N, 24), device=device)
    hidden = 2 * torch.randn(N, H, **options)
    for slot in range(24):
        hidden += heights[:, slot, None] * weight[words[:, slot]].float()
    step = torch.randn(N, H, **options) * (0.3 * torch.randn(N, 1, **options).exp())
    moved, hidden = (hidden + step).to(dtype), hidden.to(dtype)
    sampled, parts = [], []
    for start in range(0, N, 1024):  # all logits need not exist at once
        z = moved[start : start + 1024] @ weight.t()
        for rows in z.split(256):
            sampled.append(rows.float().softmax(-1).multinomial(1)[:, 0])
        parts.append(reference_sparsify(z, torch.cat(sampled)[start:], K, TAIL_MASS))
    old = troll.SparsePolicy.trusted(
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("token_ids", "log_probs", "log_tail")), V, 1.0
    )
    return Problem(
        size=size,
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        sampled=torch.cat(sampled),
        old=old,
        advantages=torch.randn(SEQUENCES, **options),
        loss_mask=torch.ones(N, dtype=torch.bool, device=device),
    )
