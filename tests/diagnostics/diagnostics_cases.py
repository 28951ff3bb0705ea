"""Two policies small enough to write down all of their completions, and a batch of random ones."""

from __future__ import annotations

import itertools
import math

import torch

from troll import SparsePolicy, restrict, sparsify


class Enumerated:
    """Two autoregressive policies over V tokens: a table of logits for every prefix, and every completion there is.

    With ``ends`` a completion ends with token 0, or after T tokens.
    """

    def __init__(self, V=3, T=3, distance=0.8, seed=0, ends=False):
        g = torch.Generator().manual_seed(seed)
        self.V, self.T = V, T
        self.tables = [{}, {}]
        for t in range(T):
            for prefix in itertools.product(range(V), repeat=t):
                old = torch.randn(V, generator=g, dtype=torch.float64)
                self.tables[0][prefix] = old
                self.tables[1][prefix] = old + distance * torch.randn(V, generator=g, dtype=torch.float64)
        whole = {self._cut(o) if ends else o for o in itertools.product(range(V), repeat=T)}
        self.completions = sorted(whole)

    @staticmethod
    def _cut(o):
        return o[: o.index(0) + 1] if 0 in o else o

    def log_prob(self, which, o):
        """log π(o) by the product rule, with plain floats."""
        total = 0.0
        for t, token in enumerate(o):
            row = self.tables[which][o[:t]].tolist()
            total += row[token] - math.log(sum(math.exp(x) for x in row))
        return total

    def kl(self, a, b):
        """KL between the distributions of whole completions, by its definition."""
        return sum(
            math.exp(self.log_prob(a, o)) * (self.log_prob(a, o) - self.log_prob(b, o)) for o in self.completions
        )

    def probabilities(self):
        """[C] of each completion under the old policy."""
        return torch.tensor([math.exp(self.log_prob(0, o)) for o in self.completions], dtype=torch.float64)

    def batch(self, rows=None, K=None, tail="floor"):
        """Proposal, old policy and mask of these completions (indices into ``completions``), all by default."""
        chosen = [self.completions[i] for i in (range(len(self.completions)) if rows is None else rows)]
        sampled = torch.tensor([[*o, *[0] * (self.T - len(o))] for o in chosen])
        mask = torch.tensor([[t < len(o) for t in range(self.T)] for o in chosen])
        logits = torch.zeros(2, len(chosen), self.T, self.V, dtype=torch.float64)
        for i, o in enumerate(chosen):
            for t in range(len(o)):
                for which in range(2):
                    logits[which, i, t] = self.tables[which][o[:t]]
        old = sparsify(logits[0], sampled, K or self.V, 0.0, loss_mask=mask)
        if tail == "bucket":
            return restrict(logits[1], old, loss_mask=mask), old, mask
        return sparsify(logits[1], sampled, K or self.V, 0.0, loss_mask=mask), old, mask


def random_pair(seed=0, B=3, T=5, V=6, distance=0.8, K=None, tail="floor", temperature=1.0):
    """(logits that ask for a gradient, proposal of them, old policy, advantages, ragged mask)."""
    g = torch.Generator().manual_seed(seed)
    old_logits = 1.5 * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    logits = (old_logits + distance * torch.randn(B, T, V, generator=g, dtype=torch.float64)).requires_grad_()
    sampled = torch.randint(V, (B, T), generator=g)
    advantages = torch.randn(B, T, generator=g, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([T - i % T for i in range(B)])[:, None]
    old = sparsify(old_logits, sampled, K or V, 0.0, loss_mask=mask, temperature=temperature)
    if tail == "bucket":
        return logits, restrict(logits, old, loss_mask=mask), old, advantages, mask
    proposal = sparsify(logits, sampled, K or V, 0.0, loss_mask=mask, temperature=temperature)
    return logits, proposal, old, advantages, mask


def dense(policy: SparsePolicy) -> torch.Tensor:
    """Probabilities [B, T, V] of a policy that kept all tokens, by token id; zeros where it has no distribution."""
    probs = policy.log_probs.detach().double().exp()
    ids = policy.token_ids.clamp(min=0)
    return torch.zeros(*policy.shape, policy.vocab_size, dtype=torch.float64).scatter_add(-1, ids, probs)
