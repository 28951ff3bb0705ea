"""Checks of what ``project`` is given."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from troll.errors import InputError
from troll.inputs import describe, require_floats, require_number, require_same_device, require_tensor

KL_BOUND = 0.2
"""ε, the radius of the trust region wherever none is given: faster than the paper's 0.05 on three tasks of four, and as
robust (docs/does-it-help.md)."""
_NORM_TOLERANCE = 1e-3


def check_kl_bound(kl_bound: float | Tensor) -> None:
    """Refuse a bound that is negative, NaN or not a number."""
    if isinstance(kl_bound, Tensor):
        require_bound_type(kl_bound)
        if torch.compiler.is_compiling() or not bool((~(kl_bound >= 0)).any()):
            return
        kl_bound = float(kl_bound[~(kl_bound >= 0)].flatten()[0])
    require_number(
        "kl_bound", kl_bound, "a number ≥ 0", lambda x: x >= 0, f"The default is {KL_BOUND}; the paper uses 0.05"
    )


def require_bound_type(kl_bound: Tensor) -> None:
    """Refuse a tensor that cannot be a bound, by its type alone."""
    require_tensor("kl_bound", kl_bound, "with one number per position")
    if kl_bound.dtype == torch.bool:
        raise InputError("kl_bound must be numbers ≥ 0, got a tensor of bool", f"The default is {KL_BOUND}")


def check_tensors(proposal: object, old: object) -> None:
    """Refuse what is not two tensors of log-probabilities on one device."""
    for name, x in (("proposal", proposal), ("old", old)):
        if type(x).__name__ in ("SparsePolicy", "PackedPolicy"):
            raise InputError(
                f"{name} must be a tensor of log-probabilities [..., K], got {describe(x)}",
                "Use troll.constrain(proposal, old, kl_bound), which projects sparse policies",
            )
        require_floats(
            name, x, "of log-probabilities [..., K]", "Pass float32 log-probabilities: logits.float().log_softmax(-1)"
        )
    require_same_device("proposal", cast(Tensor, proposal), "old", cast(Tensor, old))


def check_shapes(proposal: Tensor, old: Tensor) -> None:
    """Refuse rows of different shapes."""
    if proposal.shape != old.shape or proposal.dim() == 0 or proposal.shape[-1] == 0:
        raise InputError(
            f"proposal and old must have the same shape [..., K] with K ≥ 1, got {list(proposal.shape)} and "
            f"{list(old.shape)}",
            "Pass log-probabilities of the same tokens; for sparse policies use troll.constrain",
        )


def check_types(proposal: Tensor, old: Tensor) -> None:
    """Refuse other precisions, and an old policy that is not constant."""
    if proposal.dtype not in (torch.float32, torch.float64) or proposal.dtype != old.dtype:
        raise InputError(
            "proposal and old must both be float32 or both float64 (half precision cannot resolve a KL below 2e-5), "
            f"got {proposal.dtype} and {old.dtype}",
            "Use logits.float().log_softmax(-1) for both",
        )
    if old.requires_grad:
        raise InputError(
            "old must be a constant, got log-probabilities that require gradient",
            "Score it under torch.no_grad(), or pass old.detach()",
        )


def _log_norm(x: Tensor) -> Tensor:
    """log Σ e^x, 0 for a row that excludes everything."""
    empty = (x == -torch.inf).all(-1)
    return torch.where(empty.unsqueeze(-1), x.new_tensor(x.shape[-1]).log().neg(), x).logsumexp(-1)


def check_lost_mass(lost: Tensor, max_lost_mass: float) -> None:
    """Refuse a proposal that has, on average over these positions, too much mass where the old policy has none."""
    check_max_lost_mass(max_lost_mass)
    if bool(lost.sum() > max_lost_mass * max(1, lost.numel())):
        raise InputError(
            f"the proposal has on average {float(lost.mean()):.3g} of its probability on tokens that the old policy "
            f"excludes, more than max_lost_mass={max_lost_mass}",
            "Score both policies without top-k, top-p or min-p truncation, or truncate both to the same tokens",
        )


def check_max_lost_mass(max_lost_mass: float) -> None:
    """Refuse a limit that is negative, NaN or not a number."""
    require_number("max_lost_mass", max_lost_mass, "a number ≥ 0", lambda x: x >= 0, "The default is 0.1")


def jagged_rows(proposal: Any, old: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Values of both, and their common offsets."""
    jagged = all(x.is_nested and x.layout == torch.jagged and x.dim() == 2 for x in (proposal, old))
    if jagged:
        proposal, old = (x if x.lengths() is None else x.contiguous() for x in (proposal, old))
        offsets, other = proposal.offsets(), old.offsets()
        if offsets is other or torch.equal(offsets, other):
            return proposal.values(), old.values(), offsets
    raise InputError(
        "proposal and old must be two dense tensors, or two jagged ones [N, *] with the same offsets, got "
        f"{_form(proposal)} and {_form(old)}",
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
                f"{name} must be finite, or −inf for excluded tokens, got {float(x[tuple(at)])} at position {at[:-1]}, "
                f"token {at[-1]}",
                "Leave that position out before the projection, and find out why its logits are NaN or inf",
            )
        if bool(unnormalised.any()):
            at = unnormalised.nonzero()[0].tolist()
            raise InputError(
                f"{name} must be log-probabilities that sum to 1, got a sum of {float(norm[tuple(at)].exp()):.6g} at "
                f"position {at}",
                "Use torch.log_softmax(logits, dim=-1)",
            )
