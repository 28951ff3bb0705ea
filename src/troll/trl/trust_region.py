"""The trust region of a run: ε of every token, α, and how they change during training.

``kl_bound_schedule`` and ``regression_coef_schedule`` are one line each, a kind and its values:

===================================  ==================================================================================
``geometric end=0.01 rollouts=50``   ε goes from ``kl_bound`` to ``end`` by the same factor per rollout
``linear end=0.01 rollouts=50``      the same, by the same difference
``projected target=0.03``            ε starts at ``kl_bound`` and keeps the projected fraction of tokens at ``target``
``network target=0.1``               ε starts at ``kl_bound`` and keeps the network's own mean KL at ``target``
``entropy max=1.0``                  ε of a token grows with its entropy; ``kl_bound`` is the mean, ``max`` a cap
``sequence limit=2.0``               the sum over a completion stays below ``limit``, each token below ``kl_bound``;
                                     ``by_prefix=true`` divides it among ``max_completion_length`` tokens
===================================  ==================================================================================

For α there is ``projected target=0.05``: α starts at ``regression_coef`` and grows, up to ten times, while more than
``target`` of the tokens are outside of the bound. docs/bounds.md compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import TrainerCallback

from troll.errors import InputError, suggestion
from troll.objective.bound_controllers import NetworkKLBound, ProjectedShareBound, RegressionController
from troll.objective.bounds import Adaptive, Bound, EntropyBound, FixedBound, Measured, ScheduledBound, SequenceBound
from troll.policy import PackedPolicy
from troll.projection import KL_BOUND
from troll.trl.robust.fingerprint import schedule_text

logger = get_logger(__name__)


class _Value(NamedTuple):
    """A value of a schedule: an example, what it must be in words, and whether a number is that."""

    example: float | bool
    expected: str
    fits: Callable[[float], bool]
    required: bool = True


_POSITIVE = ("a finite number > 0", lambda x: 0 < x < math.inf)
_FRACTION = ("a fraction of the tokens, > 0 and < 1", lambda x: 0 < x < 1)
_ROLLOUTS = _Value(50, "an integer ≥ 1", lambda x: x >= 1 and x == int(x))
BOUND_SCHEDULES: dict[str, dict[str, _Value]] = {
    "geometric": {"end": _Value(0.01, *_POSITIVE), "rollouts": _ROLLOUTS},
    "linear": {"end": _Value(0.01, "a finite number ≥ 0", lambda x: 0 <= x < math.inf), "rollouts": _ROLLOUTS},
    "projected": {"target": _Value(0.03, *_FRACTION)},
    "network": {"target": _Value(0.1, *_POSITIVE)},
    "entropy": {"max": _Value(1.0, *_POSITIVE, required=False)},
    "sequence": {
        "limit": _Value(2.0, *_POSITIVE),
        "by_prefix": _Value(True, "true or false", lambda x: x in (0, 1), required=False),
    },
}
"""Kinds of ``kl_bound_schedule`` and their values."""
REGRESSION_SCHEDULES: dict[str, dict[str, _Value]] = {"projected": {"target": _Value(0.05, *_FRACTION)}}
"""Kinds of ``regression_coef_schedule`` and their values."""

# ---------------------------------------------------------------------- schedules as settings


def parse_schedule(field: str, value: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A schedule as a dictionary, with its ``kind``; from one line, JSON or a dictionary.

    >>> parse_schedule("kl_bound_schedule", "geometric end=0.01 rollouts=50")
    {'kind': 'geometric', 'end': 0.01, 'rollouts': 50}
    """
    kinds = BOUND_SCHEDULES if field == "kl_bound_schedule" else REGRESSION_SCHEDULES
    if value is None:
        return None
    given = dict(value) if isinstance(value, Mapping) else _words(field, value)
    kind = _kind(field, given)
    for name in given:
        if name not in kinds[kind]:
            takes = ", ".join(name if x.required else f"{name} (optional)" for name, x in kinds[kind].items())
            near = suggestion(name, kinds[kind])
            fix = f"Did you mean {near!r}?" if near else f"For example {_example(field, kind)!r}"
            raise InputError(f"{field} {kind!r} takes {takes}, got {name}={given[name]}", fix)
    missing = [name for name, x in kinds[kind].items() if x.required and given.get(name) is None]
    if missing:
        raise InputError(f"{field} {kind!r} needs {' and '.join(missing)}", f"For example {_example(field, kind)!r}")
    values = {name: given[name] for name in kinds[kind] if given.get(name) is not None}
    return {"kind": kind, **{name: _value(field, kind, name, x) for name, x in values.items()}}


def _kind(field: str, given: dict[str, Any]) -> str:
    """Take the kind out of a schedule."""
    kinds = BOUND_SCHEDULES if field == "kl_bound_schedule" else REGRESSION_SCHEDULES
    example = next(iter(kinds))
    if "kind" not in given:
        values = {name: x.example for name, x in kinds[example].items()}
        keys = ", ".join(map(repr, given)) or "no keys"
        raise InputError(
            f"{field} must have the key 'kind', got {keys}", f"For example { ({'kind': example} | values) }"
        )
    kind = given.pop("kind")
    if kind not in tuple(kinds):
        near = suggestion(kind, kinds)
        fix = f"Did you mean {near!r}?" if near else f"For example {_example(field, example)!r}"
        raise InputError(f"{field} must be of kind {' or '.join(kinds)}, got {kind!r}", fix)
    return str(kind)


def canonical_schedule(field: str, value: str | Mapping[str, Any] | None) -> str | None:
    """A schedule in one line, in one spelling."""
    parsed = parse_schedule(field, value)
    return None if parsed is None else schedule_text(parsed.pop("kind"), parsed)


def _words(field: str, text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise InputError(
            f"{field} must be a string or a dictionary, got {text!r}", "For example 'geometric end=0.01 rollouts=50'"
        )
    if text.lstrip().startswith("{"):
        try:
            return _once(field, text, json.loads(text, object_pairs_hook=list))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            fix = "For example 'geometric end=0.01 rollouts=50'"
            raise InputError(f"{field} is not valid JSON ({error}): {text}", fix) from None
    kind, *words = text.split() or [""]
    for word in words:
        if "=" not in word:
            kinds = BOUND_SCHEDULES if field == "kl_bound_schedule" else REGRESSION_SCHEDULES
            example = _example(field, kind if kind in kinds else next(iter(kinds)))
            problem = f"{field} must be a kind and values as name=value, got {word!r} in {text!r}"
            raise InputError(problem, f"For example {example!r}")
    return _once(
        field, text, [("kind", kind), *((name, value) for name, _, value in (word.partition("=") for word in words))]
    )


def _once(field: str, text: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dictionary; a repeated name is refused."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{field} has {name} more than once: {text}", f"Write {name} once")
    return dict(pairs)


def _value(field: str, kind: str, name: str, value: Any) -> float | int | bool:
    rule = (BOUND_SCHEDULES if field == "kl_bound_schedule" else REGRESSION_SCHEDULES)[kind][name]
    number = _truth(value) if isinstance(rule.example, bool) else _number(value)
    if number is None or not rule.fits(number):
        raise InputError(
            f"{name} of {field} must be {rule.expected}, got {value!r}",
            f"For example {_example(field, kind, name)!r}",
        )
    return type(rule.example)(number)


def _number(value: Any) -> float | None:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return None if number is None or math.isnan(number) or math.isinf(number) else number


def _truth(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower())


def _example(field: str, kind: str, *optional: str) -> str:
    """A correct schedule of this kind, with these optional values."""
    values = (BOUND_SCHEDULES if field == "kl_bound_schedule" else REGRESSION_SCHEDULES)[kind]
    return schedule_text(kind, {name: x.example for name, x in values.items() if x.required or name in optional})


def make_bound(args: Any) -> Bound:
    """ε of a ``TROLLConfig``."""
    schedule = parse_schedule("kl_bound_schedule", args.kl_bound_schedule)
    if schedule is None:
        return FixedBound(args.kl_bound)
    kind, start = schedule["kind"], args.kl_bound
    if kind in ("geometric", "linear"):
        return ScheduledBound(start, schedule["end"], schedule["rollouts"], kind)
    if kind == "projected":
        return ProjectedShareBound(start, schedule["target"])
    if kind == "network":
        return NetworkKLBound(start, schedule["target"])
    if kind == "entropy":
        return EntropyBound(start, highest=schedule.get("max"))
    length = args.max_completion_length if schedule.get("by_prefix") else None
    return SequenceBound(schedule["limit"], start, length)


def make_regression(args: Any) -> RegressionController | None:
    """The controller of α; None if α is constant."""
    schedule = parse_schedule("regression_coef_schedule", args.regression_coef_schedule)
    return None if schedule is None else RegressionController(args.regression_coef, schedule["target"])


def check_schedules(args: Any) -> None:
    """Bring both schedules of a ``TROLLConfig`` into one spelling; refuse settings that contradict each other."""
    for field in ("kl_bound_schedule", "regression_coef_schedule"):
        setattr(args, field, canonical_schedule(field, getattr(args, field)))
    bound = parse_schedule("kl_bound_schedule", args.kl_bound_schedule) or {"kind": "fixed"}
    name = _first_set(args)
    if name is not None and args.trust_region != "troll":
        raise InputError(
            f"{name} needs trust_region='troll', got trust_region={args.trust_region!r}", "Leave one of them out"
        )
    controlled = bound["kind"] in ("projected", "network") or args.regression_coef_schedule is not None
    if controlled and not (args.updates_per_generation and args.updates_per_generation > 1):
        raise InputError(
            f"{name} needs at least 2 updates per rollout, got updates_per_generation={args.updates_per_generation}: "
            "in the first, the network is the old policy and there is nothing to measure",
            "The default is updates_per_generation=8",
        )
    if bound["kind"] == "projected" and args.regression_coef_schedule is not None:
        raise InputError(
            f"kl_bound_schedule={args.kl_bound_schedule!r} and "
            f"regression_coef_schedule={args.regression_coef_schedule!r} both control the projected fraction",
            "Leave one of them out, or use kl_bound_schedule='network target=0.1'",
        )
    if bound.get("by_prefix") and not args.max_completion_length:
        raise InputError("by_prefix=true needs max_completion_length", "For example max_completion_length=256")
    _check_starts(args, bound)


def _check_starts(args: Any, bound: Mapping[str, Any]) -> None:
    """Refuse a ``kl_bound`` or ``regression_coef`` that a schedule cannot start from."""
    limits = {"fixed": None, "sequence": None, "linear": "finite"}
    need = limits.get(bound["kind"], "a finite number > 0")
    if need is not None and not (args.kl_bound < math.inf and (need == "finite" or args.kl_bound > 0)):
        given = f"kl_bound_schedule={args.kl_bound_schedule!r}"
        raise InputError(f"kl_bound must be {need} with {given}, got {args.kl_bound}", f"The default is {KL_BOUND}")
    if args.regression_coef_schedule is not None and not args.regression_coef > 0:
        given = f"regression_coef_schedule={args.regression_coef_schedule!r}"
        raise InputError(f"regression_coef must be > 0 with {given}, got {args.regression_coef}", "The default is 1")
    if bound.get("max") is not None and bound["max"] < args.kl_bound:
        raise InputError(
            f"max of kl_bound_schedule must be at least kl_bound={args.kl_bound}, the mean of the bounds, got "
            f"{bound['max']}",
            f"For example 'entropy max={5 * args.kl_bound:g}'",
        )


def _first_set(args: Any) -> str | None:
    for field in ("kl_bound_schedule", "regression_coef_schedule"):
        if getattr(args, field) is not None:
            return f"{field}={getattr(args, field)!r}"
    return "scale_regression=True" if args.scale_regression else None


# ---------------------------------------------------------------------- the state during a run


class TrustRegionState:
    """ε and α of a run. All processes observe the same numbers, so they have the same state."""

    def __init__(self, args: Any) -> None:
        self._args, self._bound = args, make_bound(args)
        self.regression = make_regression(args)
        adaptive: dict[str, Adaptive | None] = {
            "kl_bound": None if isinstance(self._bound, FixedBound) else self._bound,
            "regression_coef": self.regression,
        }
        self._adaptive = {name: x for name, x in adaptive.items() if x is not None}
        self.measured: list[Measured] = []
        """Of the update in progress, one per forward pass."""

    @property
    def bound(self) -> Bound:
        """ε; a fixed one is read from the arguments each time, so that a callback may change it."""
        return FixedBound(self._args.kl_bound) if isinstance(self._bound, FixedBound) else self._bound

    @property
    def regression_coef(self) -> float:
        """α; a fixed one is read from the arguments each time."""
        value: float = self._args.regression_coef if self.regression is None else self.regression.now
        return value

    @property
    def now(self) -> dict[str, float]:
        """Present values of what changes during the run; empty if nothing does."""
        return {name: x.now for name, x in self._adaptive.items()}

    def begin_rollout(self) -> None:
        """A new rollout begins."""
        for x in self._adaptive.values():
            x.begin_rollout()

    def observe(self, passes: list[Measured]) -> None:
        """Take the measurements of an update, one per forward pass."""
        for x in self._adaptive.values():
            x.observe(Measured.of(passes))

    def sums(self, policies: list[PackedPolicy], loss_mask: Tensor) -> Tensor | None:
        """[2] sum over the counted tokens of the quantity whose mean the bound needs, and their number; None if none.

        One sequence at a time, to save memory.
        """
        total: Tensor | None = None
        for packed, counted in zip(policies, loss_mask, strict=True):
            values = self.bound.of_token(packed.unpack(check=False))
            if values is None:
                return None
            part = torch.stack([torch.where(counted, values, 0.0).sum(), counted.sum().to(values.dtype)])
            total = part if total is None else total + part
        return total

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return {
            name: {"kind": type(x).__name__, "settings": x.settings, "state": x.state_dict()}
            for name, x in self._adaptive.items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state; what has other settings now, or was not saved, starts again."""
        for name, x in self._adaptive.items():
            part = saved.get(name) or {}
            kind = _FORMER_KINDS.get(part.get("kind", ""), part.get("kind"))
            if part.get("settings") == x.settings and kind == type(x).__name__:
                x.load_state_dict(part["state"])
            else:
                logger.warning(f"{name} starts again at {x.now:g}: the checkpoint has no state for its settings.")


class ObserveUpdates(TrainerCallback):
    """Adapts ε and α after each update."""

    def __init__(self, region: TrustRegionState) -> None:
        self.region = region

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop what an earlier call of ``train`` has left."""
        self.region.measured.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Adapt to what the update measured; nothing is left of one that was skipped."""
        measured, self.region.measured = self.region.measured, []
        if measured:
            self.region.observe(measured)


_FORMER_KINDS = {
    "Schedule": "ScheduledBound",
    "HoldProjected": "ProjectedShareBound",
    "HoldNetworkKL": "NetworkKLBound",
    "SequenceBudget": "SequenceBound",
}
"""Class names in checkpoints of troll 0.1.0."""
