"""The TROLL objective from hidden states, in one pass over the logits: loss and gradients in the forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from troll.deferred import DeferredCheck, DeferredChecks, run_checks
from troll.errors import InputError
from troll.inputs import describe, require_floats
from troll.objective.aggregation import Aggregation, token_weights
from troll.objective.batch import Batch
from troll.objective.metrics import Metrics, TokenStats, summarise, token_stats
from troll.objective.presets import PresetName, resolve
from troll.objective.token_loss import token_loss
from troll.objective.troll import check_regression_coef, constrain
from troll.policy import Head, Scored, SparsePolicy, Tail
from troll.policy.sparse import require_policy
from troll.projection import MAX_LOST_MASS, check_kl_bound, check_lost_mass, check_max_lost_mass, expand_bound


def fused_troll_loss(
    hidden: Tensor,
    head: Head,
    old: SparsePolicy,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    preset: PresetName = "default",
    kl_bound: float | Tensor | None = None,
    regression_coef: float | None = None,
    tail: Tail | None = None,
    max_support: int | None = None,
    tail_mass: float | None = None,
    max_lost_mass: float = MAX_LOST_MASS,
    aggregation: Aggregation = "token_mean",
    max_length: int | None = None,
    total: float | Tensor | None = None,
    importance_weights: Tensor | None = None,
    memory_budget: int | None = None,
) -> tuple[Tensor, Metrics]:
    """``troll_loss`` of the policy that ``head`` makes of ``hidden`` [B, T, H]: the same loss, gradients and metrics.

    It takes three products of the size of the head where ``head.restrict`` and ``troll_loss`` take four, because the
    gradients are made in the forward, row by row. That is possible for ratios of tokens, not of sequences; the loss can
    be differentiated once; and a counted position whose logits are no distribution raises. It is faster than TRL's clip
    and takes the memory that ``memory_budget`` allows (bytes, see ``Head.token_loss``).

    Other arguments as for ``troll_loss``, with ``max_support`` and ``tail_mass`` for the proposal's support under
    ``tail="floor"``.

    >>> loss, metrics = troll.fused_troll_loss(hidden, head, old, advantages, mask)      # doctest: +SKIP
    >>> loss.backward()
    """
    settings = resolve(preset, regression_coef=regression_coef, tail=tail, max_support=max_support, tail_mass=tail_mass)
    kl_bound = settings.kl_bound if kl_bound is None else kl_bound
    require_floats("hidden", hidden, "[B, T, H]", "Pass the output of the model's last layer")
    if not isinstance(head, Head):
        raise InputError(f"head must be a Head, got {describe(head)}", "Pass troll.Head(model.lm_head.weight)")
    require_policy("old", old, "Make it with head.sparsify(old_hidden, sampled).policy")
    check_max_lost_mass(max_lost_mass)
    check_kl_bound(kl_bound)
    check_regression_coef(settings.regression_coef)
    if hidden.shape[:-1] != old.shape:
        raise InputError(
            "hidden must have shape [B, T, H] where old has shape [B, T], got "
            f"{list(hidden.shape)} and {list(old.shape)}",
            "Pass hidden states that predict the sampled tokens: hidden[:, :-1]",
        )
    checks: DeferredChecks = []  # run once all kernels are launched
    batch = Batch.of(old, old, advantages, loss_mask, importance_weights, "raise", checks)
    flat = old.flatten()
    parts: list[tuple[Tensor | slice, Callable[[], TokenStats]]] = []

    @cache
    def per_token() -> tuple[Tensor, Tensor]:
        """Made when the first logits are launched: the bounds, and the weights of the tokens in the aggregation."""
        bound = expand_bound(kl_bound, old.shape, old.log_probs).reshape(-1)
        return bound, token_weights(batch.counted, aggregation, max_length=max_length, total=total).flatten()

    advantages = batch.advantages.flatten()
    importance = None if batch.weights is None else batch.weights.flatten()

    def loss_of(scored: Scored, at: Tensor | slice) -> Tensor:
        bound, weights = per_token()
        proposal, before = scored.policy, flat[at]
        step = constrain(
            proposal, before, bound[at], tail=settings.tail, max_lost_mass=1.0, impl=head.impl, deferred=checks
        )
        losses, ratio = token_loss(
            step.log_ratio,
            advantages[at],
            regression=step.regression,
            regression_coef=settings.regression_coef,
            importance_weights=None if importance is None else importance[at],
        )
        stats = partial(token_stats, proposal, before, ratio, step.projection, step.regression, scored.entropy)
        parts.append((at, stats))
        return (losses * weights[at]).sum()

    target = old if settings.tail == "bucket" else old.sampled
    loss = head.token_loss(
        hidden,
        target,
        loss_of,
        settings.max_support,
        settings.tail_mass,
        temperature=old.temperature,
        loss_mask=batch.counted,
        memory_budget=memory_budget,
        deferred=checks,
    )
    stats = _on_grid([(at, part()) for at, part in parts], old.shape)
    metrics = {**summarise(stats, batch.counted), "skipped_tokens": batch.skipped}
    lost = metrics["lost_mass"]
    checks.append(DeferredCheck(lost > max_lost_mass, partial(check_lost_mass, lost, max_lost_mass)))
    run_checks(checks)
    return loss, metrics


def _on_grid(parts: list[tuple[Tensor | slice, TokenStats]], shape: torch.Size) -> TokenStats:
    """Numbers of some positions at a time, which these are among all of them → of all positions [B, T]."""
    names = list(parts[0][1])
    first = parts[0][1][names[0]]
    grid = first.new_zeros(len(names), shape.numel())
    for at, part in parts:
        grid[:, at] = torch.stack(list(part.values()))
    return dict(zip(names, grid.view(-1, *shape).unbind(), strict=True))
