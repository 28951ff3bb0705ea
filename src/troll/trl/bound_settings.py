"""What a user can set of a bound that adapts, and the bound that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from troll.errors import InputError, require_choice
from troll.objective.bound_controllers import NetworkKLBound, ProjectedShareBound, RegressionController
from troll.objective.bounds import (
    Bound,
    Curve,
    EntropyBound,
    FixedBound,
    ScheduledBound,
    SequenceBound,
)

BoundKind = Literal["fixed", "schedule", "projected", "network", "entropy", "sequence"]
_NEEDS: dict[str, tuple[str, ...]] = {
    "schedule": ("bound_end", "bound_rollouts"),
    "projected": ("bound_target",),
    "network": ("bound_target",),
    "sequence": ("sequence_kl_bound",),
}
_MAY: dict[str, tuple[str, ...]] = {
    "schedule": ("bound_curve",),
    "entropy": ("bound_highest",),
    "sequence": ("sequence_by_prefix",),
}
_SUCH_AS = {"bound_end": 0.01, "bound_rollouts": 50, "bound_target": 0.03, "sequence_kl_bound": 2.0}


@dataclass
class BoundSettings:
    """Bounds that are not one number for the whole run. ``kl_bound`` is where they start, or their mean, or a cap."""

    bound: BoundKind = field(
        default="fixed",
        metadata={
            "help": "How the bound of a token follows from kl_bound: 'fixed' is kl_bound; 'schedule' goes from it to "
            "bound_end; 'projected' starts there and holds the projected share of the tokens at bound_target; "
            "'network' holds the KL that the network itself reaches; 'entropy' gives more room where the old policy is "
            "undecided, kl_bound on average; 'sequence' keeps the sum over every completion below sequence_kl_bound."
        },
    )
    bound_target: float | None = field(
        default=None,
        metadata={
            "help": "What is held: with bound 'projected' the share of the tokens, such as 0.03; with 'network' the "
            "mean KL of a token at the last update on a rollout, in nats."
        },
    )
    bound_end: float | None = field(default=None, metadata={"help": "With bound 'schedule': the last kl_bound."})
    bound_rollouts: int | None = field(
        default=None, metadata={"help": "With bound 'schedule': after how many rollouts bound_end is reached."}
    )
    bound_curve: Curve = field(
        default="geometric",
        metadata={"help": "With bound 'schedule': the same factor from rollout to rollout, or the same difference."},
    )
    bound_highest: float | None = field(
        default=None,
        metadata={"help": "With bound 'entropy': most that the bound of a token may be. Unset: there is no limit."},
    )
    sequence_kl_bound: float | None = field(
        default=None,
        metadata={
            "help": "With bound 'sequence': most nats of KL(projected || old), summed over the tokens of a completion. "
            "kl_bound holds for each token besides."
        },
    )
    sequence_by_prefix: bool = field(
        default=False,
        metadata={
            "help": "With bound 'sequence': share it among max_completion_length tokens instead of those of the "
            "completion, so that no bound depends on what comes after, and the KL of whole completions is bounded."
        },
    )
    regression_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Raise regression_coef, up to ten times, while the network is outside of the bound on more than "
            "this share of the tokens at the last update on a rollout, such as 0.05. Unset: it stays as it is."
        },
    )
    scale_regression: bool = field(
        default=False,
        metadata={
            "help": "Multiply regression_coef by the mean size of the advantages, over the tokens of the rollout: "
            "rewards ten times as large, or as rare, then leave the balance of the two terms as it is."
        },
    )


def make_bound(args: Any) -> Bound:
    """The bound of a ``TROLLConfig``."""
    makers: dict[str, Callable[[], Bound]] = {
        "fixed": lambda: FixedBound(args.kl_bound),
        "schedule": lambda: ScheduledBound(args.kl_bound, args.bound_end, args.bound_rollouts, args.bound_curve),
        "projected": lambda: ProjectedShareBound(args.kl_bound, args.bound_target),
        "network": lambda: NetworkKLBound(args.kl_bound, args.bound_target),
        "entropy": lambda: EntropyBound(args.kl_bound, highest=args.bound_highest),
        "sequence": lambda: SequenceBound(
            args.sequence_kl_bound, args.kl_bound, args.max_completion_length if args.sequence_by_prefix else None
        ),
    }
    return makers[args.bound]()


def make_regression(args: Any) -> RegressionController | None:
    """What adapts the weight of the regression; None where it is one number."""
    if args.regression_tolerance is None:
        return None
    return RegressionController(args.regression_coef, args.regression_tolerance)


def check_bounds(args: Any) -> None:
    """Refuse settings of the bound that do not go together, or cannot be."""
    require_choice("bound", args.bound, get_args(BoundKind))
    require_choice("bound_curve", args.bound_curve, get_args(Curve))
    _check_fields(args)
    adapts = args.bound != "fixed" or args.regression_tolerance is not None or args.scale_regression
    if adapts and args.trust_region != "troll":
        raise InputError(
            f"{_said(args)} with trust_region={args.trust_region!r}", "a trust region, which has a bound", "'troll'"
        )
    if (args.bound in ("projected", "network") or args.regression_tolerance is not None) and not (
        args.updates_per_generation and args.updates_per_generation > 1
    ):
        raise InputError(
            f"{_said(args)} with updates_per_generation={args.updates_per_generation}",
            "at least 2 whole updates on a rollout: in the first the network is the old policy, and nothing is to "
            "be measured",
            "updates_per_generation=8, the default",
        )
    if args.bound == "projected" and args.regression_tolerance is not None:
        raise InputError(
            f"bound='projected' with regression_tolerance={args.regression_tolerance}",
            "one controller of the share of the tokens outside of the bound, not two",
            "bound='network', or leaving regression_tolerance out",
        )
    if args.bound == "sequence" and args.sequence_by_prefix and not args.max_completion_length:
        raise InputError("sequence_by_prefix without max_completion_length", "a longest completion", "256")
    try:
        make_bound(args)
        make_regression(args)
    except InputError as error:
        raise InputError(
            f"{error.given} ({_said(args)}, kl_bound={args.kl_bound})", error.expected, error.hint
        ) from None


def _check_fields(args: Any) -> None:
    """Those that a bound needs must be there; others must not."""
    needed = _NEEDS.get(args.bound, ())
    for name in needed:
        if getattr(args, name) is None:
            raise InputError(f"bound={args.bound!r} without {name}", " and ".join(needed), f"{name}={_SUCH_AS[name]}")
    taken = {*needed, *_MAY.get(args.bound, ())}
    for kind in (_NEEDS, _MAY):
        for name in dict.fromkeys(name for names in kind.values() for name in names):
            if name not in taken and getattr(args, name) != getattr(BoundSettings, name):
                users = [bound for bound, names in kind.items() if name in names]
                raise InputError(
                    f"{name}={getattr(args, name)!r} with bound={args.bound!r}",
                    f"bound={' or '.join(map(repr, users))}: no other reads it",
                    f"bound={users[0]!r}, or leaving {name} out",
                )


def _said(args: Any) -> str:
    if args.bound != "fixed":
        return f"bound={args.bound!r}"
    scaled = args.scale_regression and args.regression_tolerance is None
    return "scale_regression=True" if scaled else f"regression_tolerance={args.regression_tolerance}"
