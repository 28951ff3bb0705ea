"""What ``project`` refuses, with a sentence that helps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from troll.errors import InputError

KL_BOUND = 0.2
"""ε, the radius of the trust region wherever none is given: faster than the paper's 0.05 on three tasks of four, and as
robust (docs/does-it-help.md)."""
_NORM_TOLERANCE = 1e-3


def check_kl_bound(kl_bound: float | Tensor) -> None:
    """Refuse a bound that is negative or NaN."""
    if isinstance(kl_bound, Tensor):
        if torch.compiler.is_compiling() or not bool((~(kl_bound >= 0)).any()):
            return
        kl_bound = float(kl_bound[~(kl_bound >= 0)].flatten()[0])
    if math.isnan(kl_bound) or kl_bound < 0:
        raise InputError(
            f"kl_bound must be a number ≥ 0, got {kl_bound}", f"The default is {KL_BOUND}; the paper uses 0.05"
        )


def check_shapes(proposal: Tensor, old: Tensor) -> None:
    """Refuse rows that do not belong together."""
    if proposal.shape != old.shape or proposal.dim() == 0 or proposal.shape[-1] == 0:
        raise InputError(
            f"Got proposal {list(proposal.shape)} and old {list(old.shape)}"
            ", expected the same shape [..., K] with K ≥ 1",
            "Use troll.policy.align, which brings two sparse policies onto one support",
        )


def check_types(proposal: Tensor, old: Tensor) -> None:
    """Refuse other precisions, and an old policy that is not constant."""
    if proposal.dtype not in (torch.float32, torch.float64) or proposal.dtype != old.dtype:
        raise InputError(
            f"Got proposal of {proposal.dtype}, old of {old.dtype}"
            ", expected float32 or float64, both the same (half precision cannot resolve a KL below 2e-5)",
            "Use logits.float().log_softmax(-1)",
        )
    if old.requires_grad:
        raise InputError(
            "Got an old policy that requires gradient, expected a constant",
            "Score it under torch.no_grad(), or pass old.detach()",
        )


def _log_norm(x: Tensor) -> Tensor:
    """log Σ e^x, 0 for a row that excludes everything."""
    empty = (x == -torch.inf).all(-1)
    return torch.where(empty.unsqueeze(-1), x.new_tensor(x.shape[-1]).log().neg(), x).logsumexp(-1)


def check_lost_mass(lost: Tensor, max_lost_mass: float) -> None:
    """Refuse a proposal that has, on average over these positions, too much mass where the old policy has none."""
    if bool(lost.sum() > max_lost_mass * max(1, lost.numel())):
        raise InputError(
            f"Got a proposal with {float(lost.mean()):.3g} of its mass, on average, on tokens the old one excludes, "
            f"expected at most max_lost_mass={max_lost_mass}",
            "Score both policies without top-k, top-p or min-p truncation, or truncate both to the same tokens",
        )


def jagged_rows(proposal: Any, old: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Values of both, and their common offsets."""
    jagged = all(x.is_nested and x.layout == torch.jagged and x.dim() == 2 for x in (proposal, old))
    if jagged:
        proposal, old = (x if x.lengths() is None else x.contiguous() for x in (proposal, old))
        offsets, other = proposal.offsets(), old.offsets()
        if offsets is other or torch.equal(offsets, other):
            return proposal.values(), old.values(), offsets
    raise InputError(
        f"Got proposal {_form(proposal)} and old {_form(old)}"
        ", expected two dense tensors, or two jagged ones [N, *] with the same offsets",
        "Use torch.nested.nested_tensor_from_jagged(values, offsets) for both",
    )


def _form(x: Any) -> str:
    if not x.is_nested:
        return f"dense {list(x.shape)}"
    lengths = x.offsets().diff().tolist() if x.layout == torch.jagged else [len(row) for row in x.unbind()]
    return f"nested ({x.layout}, {x.dim()} dimensions) with rows of {lengths[:4]}{'…' if len(lengths) > 4 else ''}"


def check_content(proposal: Tensor, old: Tensor, kl_bound: float | Tensor) -> bool:
    """Refuse what is no distribution, and a bad bound; whether the proposal has mass where the old policy has none.

    One transfer from the device. Nothing is looked at inside ``torch.compile``.
    """
    if torch.compiler.is_compiling():
        return True
    norms = [_log_norm(x) for x in (proposal, old)]
    seen = [(~(norm.abs() <= _NORM_TOLERANCE)).any() for norm in norms]  # also where a NaN or +inf is
    seen += [((old == -torch.inf) & (proposal > -torch.inf)).any()]
    if isinstance(kl_bound, Tensor):
        seen += [(~(kl_bound >= 0)).any().to(old.device)]
    else:
        check_kl_bound(kl_bound)
    first, second, outside, *bound = torch.stack(seen).tolist()
    if any(bound):
        check_kl_bound(kl_bound)
    if first or second:
        _refuse_content(proposal, old, norms)
    return bool(outside)


def _refuse_content(proposal: Tensor, old: Tensor, norms: list[Tensor]) -> None:
    for name, x, norm in (("proposal", proposal, norms[0]), ("old", old, norms[1])):
        wrong, unnormalised = ~(x < torch.inf), ~(norm.abs() <= _NORM_TOLERANCE)
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise InputError(
                f"Got {name} with log-probability {float(x[tuple(at)])} at position {at[:-1]}, token {at[-1]}"
                ", expected log-probabilities: finite, or −inf for excluded tokens",
                "Mask that position out before the projection, and find out why its logits are NaN or inf",
            )
        if bool(unnormalised.any()):
            at = unnormalised.nonzero()[0].tolist()
            raise InputError(
                f"Got {name} whose probabilities sum to {float(norm[tuple(at)].exp()):.6g} at position {at}"
                ", expected log-probabilities that are normalised over the support",
                "Use torch.log_softmax(logits, dim=-1)",
            )
