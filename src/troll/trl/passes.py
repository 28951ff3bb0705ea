"""The two passes over a batch, and the hook inside TRL's forward that runs them.

TRL's models never return logits. Their forward ends in a fused LM head. It collects the backbone's hidden states, the
weight (gathered if it is sharded), bias, logit scale and soft cap, and calls one function with them,
``trl.trainer.utils._ChunkedLogProbFunction``. ``Scorer`` replaces that function with a ``Pass`` during one forward:
``OldPolicyRecorder`` scores a rollout, ``ProjectedScorer`` an update on it. Everything TRL knows about models (vision,
tools, MoE, LoRA, sharding) stays in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor

from troll.deferred import DeferredChecks
from troll.objective import constrain, network_kl, ratios, token_stats
from troll.objective.bounds import Bound, FixedBound
from troll.policy import Head, PackedPolicy, SparsePolicy
from troll.trl.config import TROLLConfig

OLD_POLICY = "troll_old_policy"
"""Key of a batch: the sparse old policy, one ``PackedPolicy`` per sequence."""
BOUND_MEAN = "troll_bound_mean"
"""Key of a batch: [] mean over the rollout of the quantity that token bounds are relative to."""
ADVANTAGE_SIZE = "troll_advantage_size"
"""Key of a batch: [] mean |A| over the counted tokens of the rollout."""
REWARDS = "troll_rewards"
"""Key of a batch: [B] reward of each completion, NaN where there is none."""

_IGNORED = -100

# ---------------------------------------------------------------------- the hook


class TokenScores(NamedTuple):
    """The two outputs of a forward that TRL reads, one number per completion token."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, eq=False)
class Forward:
    """Input of TRL's fused head in one forward: N completion tokens, those with a label among B sequences of T."""

    hidden: Tensor
    """[N, H]."""
    sampled: Tensor
    """[N]."""
    head: Head
    temperature: float
    labelled: Tensor
    """[B, T] bool, with N times True."""
    sequences: slice
    """The rows of the batch in this forward."""

    @cached_property
    def places(self) -> Tensor:
        """[N] index of each token in the flattened grid [B, T]."""
        return self.labelled.flatten().nonzero()[:, 0]

    def on_grid(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N, ...] → [B, T, ...], with ``fill`` where there is no label."""
        grid = values.new_full((self.labelled.numel(), *values.shape[1:]), fill).index_copy(0, self.places, values)
        return grid.reshape(*self.labelled.shape, *values.shape[1:])


class Pass(Protocol):
    """Scores all sequences of a batch, in one or more forwards."""

    def wants(self, model: Any) -> bool:
        """Return whether a forward of this model belongs to the pass."""

    def begin(self) -> None:
        """Start with the first sequence; again if an earlier attempt ran out of memory."""

    def score(self, forward: Forward) -> TokenScores:
        """Return the scores of the completion tokens of one forward, [N]."""

    def finish(self, log_probs: Tensor) -> None:
        """Take TRL's log-probabilities of all sequences, [B, T]."""


class Scorer:
    """Callable that replaces the model in TRL's scoring function and scores the hidden states with a ``Pass``."""

    def __init__(self, model: Callable[..., Any], scoring: Pass, length: int) -> None:
        self.model, self.scoring, self.length = model, scoring, length
        self.done = 0
        scoring.begin()

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> Any:
        """Run the model's forward on the next sequences of the batch."""
        labelled = labels[:, -self.length :] != _IGNORED
        sequences = slice(self.done, self.done + len(labels))
        self.done = sequences.stop
        results: list[TokenScores] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def score(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            final_logit_softcapping: float | None,
            logit_scale: float,
            outputs: tuple[str, ...],
        ) -> tuple[Tensor, Tensor, None, None, None]:
            if set(outputs) != {"log_probs", "entropy"}:
                raise RuntimeError(f"TRL asked its fused head for {outputs} instead of log_probs and entropy")
            head = Head(weight, bias, logit_scale, final_logit_softcapping, trl_utils.maybe_gather_lm_head_ctx)
            total = len(hidden)
            rows = _rows(labelled, total)
            if rows is not None:
                hidden, targets = hidden[rows.to(hidden.device)], targets[rows.to(hidden.device)]
            forward = Forward(hidden, targets, head, temperature, labelled.to(hidden.device), sequences)
            scores = self.scoring.score(forward)
            results.append(TokenScores(*(forward.on_grid(x) for x in scores)))
            if rows is not None:
                scores = TokenScores(*(x.new_zeros(total).index_copy(0, rows.to(x.device), x) for x in scores))
            return *scores, None, None, None

        with _fused_head(score):
            output = self.model(**inputs, labels=labels, fused_lm_head=fused_lm_head)
        if len(results) != 1:
            raise RuntimeError(f"TRL's forward called its fused head {len(results)} times instead of once")
        for name, exact in results[0]._asdict().items():
            setattr(output, name, _exact(output[name][:, -self.length :], exact))
        return output


@contextmanager
def _fused_head(score: Callable[..., Any]) -> Iterator[None]:
    stock = trl_utils._ChunkedLogProbFunction
    trl_utils._ChunkedLogProbFunction = SimpleNamespace(apply=score)
    try:
        yield
    finally:
        trl_utils._ChunkedLogProbFunction = stock


def _rows(labelled: Tensor, total: int) -> Tensor | None:
    """Row of each labelled token [B, T], in order, among the ``total`` rows TRL passes to its head; None for all rows.

    On accelerators TRL passes only the labelled tokens, elsewhere all positions. Prompt tuning prepends virtual tokens,
    so completions are counted from the end.
    """
    B, T = labelled.shape
    if total == int(labelled.sum()):
        return None
    if total % B or total // B < T:
        raise RuntimeError(f"TRL's fused head received {total} rows for {B} sequences of {T} completion tokens")
    return torch.arange(total, device=labelled.device).reshape(B, total // B)[:, -T:][labelled]


def _exact(returned: Tensor, exact: Tensor) -> Tensor:
    """``returned`` with the value of ``exact`` and its own gradient: FSDP2 rounds the outputs of a forward to bf16."""
    returned = returned.to(exact.dtype)
    return exact.detach().to(returned.device) + (returned - returned.detach())


# ---------------------------------------------------------------------- the passes


class OldPolicyRecorder:
    """Scores a rollout as TRL does, and keeps the sparse old policy."""

    def __init__(self, model: Any, args: TROLLConfig) -> None:
        self.model, self.args = model, args
        self.policies: list[PackedPolicy] = []
        self.log_probs: Tensor | None = None

    def wants(self, model: Any) -> bool:
        """Return True for the first pass of the policy; with LoRA, the same model scores the reference afterwards."""
        return model is self.model and self.log_probs is None

    def begin(self) -> None:
        """Drop the policies of an attempt that ran out of memory."""
        self.policies.clear()

    def score(self, forward: Forward) -> TokenScores:
        """Log-probabilities of the full softmax, as TRL computes them."""
        policy, entropy = forward.head.sparsify(
            forward.hidden,
            forward.sampled,
            self.args.max_support,
            self.args.tail_mass,
            temperature=forward.temperature,
        )
        self.policies += _on_grid(policy, forward).pack().sequences()
        return TokenScores(policy.sampled_log_probs, entropy)

    def finish(self, log_probs: Tensor) -> None:
        """Keep the log-probabilities that the recorded policies belong to."""
        self.log_probs = log_probs

    def of(self, old_log_probs: Tensor) -> list[PackedPolicy]:
        """The recorded policies, one per sequence; ``old_log_probs`` must come from the same pass."""
        if self.log_probs is not old_log_probs:
            raise RuntimeError("TRL's old log-probabilities do not come from the first scoring pass of its policy")
        return self.policies


class ProjectedScorer:
    """Scores an update: log-probabilities of the current policy, projected onto the trust region around the old one.

    TRL takes the ratio to ``old_log_probs``, the full softmax of the old policy. What it is given makes that the ratio
    of the projected policy. With another ``trust_region`` than ``"troll"``, TRL's own loss is only measured.
    """

    def __init__(
        self,
        policies: list[PackedPolicy],
        old_log_probs: Tensor,
        loss_mask: Tensor,
        args: TROLLConfig,
        bound: Bound | None = None,
        bound_mean: Tensor | None = None,
    ) -> None:
        self.old = PackedPolicy.stack(policies).unpack(check=False)
        self.old_log_probs, self.loss_mask, self.args = old_log_probs, loss_mask.bool(), args
        self.bound, self.bound_mean = FixedBound(args.kl_bound) if bound is None else bound, bound_mean
        self.regression: Tensor | None = None
        """[B, T], differentiable."""
        self.names: list[str] = []
        self.stats: Tensor | None = None
        """[B, T, len(names) + 1] statistics per token, and 1 where the token counts."""
        self.checks: DeferredChecks = []
        """Run after TRL's loss is launched."""

    def wants(self, model: Any) -> bool:
        """Return True: every forward of an update belongs to the pass."""
        return True

    def begin(self) -> None:
        """Nothing is kept from an earlier attempt."""

    def score(self, forward: Forward) -> TokenScores:
        """Log-probabilities of the projected policy; those of the old policy where a token is masked out."""
        if forward.sequences != slice(0, len(self.loss_mask)):
            raise RuntimeError(f"TRL scored sequences {forward.sequences} of an update of {len(self.loss_mask)}")
        at, args, hidden = forward.places, self.args, forward.hidden
        counted = self.loss_mask.flatten()[at]
        old, old_log_probs = self.old.flatten()[at], self.old_log_probs.flatten()[at]
        if args.tail == "bucket":
            proposal, entropy = forward.head.restrict(hidden, old, loss_mask=counted, deferred=self.checks)
        else:
            proposal, entropy = forward.head.sparsify(
                hidden,
                forward.sampled,
                args.max_support,
                args.tail_mass,
                temperature=forward.temperature,
                loss_mask=counted,
                deferred=self.checks,
            )
        projects = args.trust_region == "troll"
        bound = self._bounds(forward, proposal, old) if projects else math.inf
        step = constrain(proposal, old, bound, counted, tail=args.tail, deferred=self.checks)
        log_probs = old_log_probs + step.log_ratio
        if not projects:
            log_probs = torch.where(counted, proposal.sampled_log_probs, old_log_probs)
        log_ratio = forward.on_grid((log_probs - old_log_probs).detach())
        of_grid = forward.labelled & self.loss_mask
        ratio = ratios(log_ratio, of_grid, args.importance_sampling_level).flatten()[at]
        pull = step.regression if projects else None
        stats = token_stats(proposal, old, ratio, step.projection, pull, entropy)
        if isinstance(bound, Tensor):
            stats["kl_bound"] = bound.to(ratio.dtype)
        self.names = list(stats)
        self.stats = forward.on_grid(torch.stack([*stats.values(), counted.to(ratio.dtype)], dim=-1))
        self.regression = None if pull is None else forward.on_grid(pull)
        return TokenScores(log_probs, entropy)

    def _bounds(self, forward: Forward, proposal: SparsePolicy, old: SparsePolicy) -> float | Tensor:
        """ε: one number, or one per token of this forward, [N]."""
        bounds = self.bound.token_bounds(
            self.old,
            forward.labelled & self.loss_mask,
            lambda: forward.on_grid(network_kl(proposal, old, tail=self.args.tail)),
            self.bound_mean,
        )
        return bounds.flatten()[forward.places] if isinstance(bounds, Tensor) else bounds

    def finish(self, log_probs: Tensor) -> None:
        """Nothing is left to do after the pass."""


def _on_grid(policy: SparsePolicy, forward: Forward) -> SparsePolicy:
    """A policy over [N] → one over [B, T], masked out where there is no label."""
    return SparsePolicy.trusted(
        forward.on_grid(policy.token_ids, -1),
        forward.on_grid(policy.log_probs, -math.inf),
        forward.on_grid(policy.log_tail),
        policy.vocab_size,
        policy.temperature,
    )
