"""Every rule on a history where it must speak, with numbers by hand, and on one just beside it where it must not.

Rollouts have four updates each: the n-th begins with update 4n − 3 and ends with 4n.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from statistics import fmean
from typing import Any

import explain_cases as cases
import numpy as np
import pytest

from troll.lab.cli import check_command
from troll.lab.report.rules import RULES, Change, Finding, History, changes, find, learning
from troll.lab.report.rules.history import Array, trailing
from troll.lab.report.rules.learning import SMOOTH

RISING = cases.RISING
FLAT = [0.3, 0.32] * 6
PEAK = [0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9]
SUNK = [*PEAK, 0.2, 0.1, 0.1, 0.1, 0.1]
NOT_RISEN = "the reward was 0.300 in the first of 12 rollouts, and its mean over 3 at most 0.313"
OFF = {"trust_region": "none"}
CLIP = {"trust_region": "clip", "epsilon": 0.2}


def speaks(history: History, name: str) -> Finding | None:
    """What the rule of a name says."""
    (found,) = [x for x in find(history) if x.name == name] or [None]
    return found


@dataclass(frozen=True)
class Case:
    """A history in which a rule speaks, and what it says."""

    name: str
    history: History
    since: int
    said: int
    seen: str
    flags: list[str] = field(default_factory=list)
    level: str = "warning"
    until: int | None = None


def made(rewards: list[float] = RISING, held_out: Any = (), settings: Any = None, **columns: Any) -> History:
    named = {name.replace("__", "/"): values for name, values in columns.items()}
    return cases.history(rewards, named, held_out, **(settings or {}))


ENTROPY = [1.0, 0.5, 0.2, 0.09, 0.09, 0.08, 0.07, 0.06, 0.05, 0.05, 0.05, 0.05]
SLOW, SLOWEST = "--learning_rate 5e-06", "--learning_rate 3.33e-06"
HALF = "--updates_per_generation 2"

SPOKEN = [
    Case("one_update", made(settings={"updates_per_generation": 1}), 1, 1, "each rollout is used for one update",
         ["--updates_per_generation 8"]),
    Case("projected", made(troll__projected_fraction=[0.4, 0.05, 0.11, 0.12, 0.13] + [0.02] * 15), 9, 20,
         "12\xa0% of the tokens were projected, over 3 rollouts", ["--kl_bound 0.2", SLOW, HALF], until=20),
    Case("projected", made(troll__projected_fraction=0.2, settings={"kl_bound": 0.19}), 1, 12,
         "20\xa0% of the tokens were projected, over 3 rollouts", ["--kl_bound 0.2", SLOW, HALF]),
    Case("projected", made(troll__projected_fraction=0.2, settings={"kl_bound": 0.2}), 1, 12,
         "20\xa0% of the tokens were projected, over 3 rollouts", [SLOW, HALF]),
    Case("idle", made(troll__projected_fraction=0.0, troll__kl_before__max=0.02), 1, 20,
         "no token was projected in 20 rollouts; the largest token KL was 0.02, the bound is 0.05",
         ["--learning_rate 3e-05"], "note"),
    Case("idle", made(clip_ratio__region_mean=0.0, settings=CLIP), 1, 20, "no token was clipped in 20 rollouts",
         ["--learning_rate 3e-05"], "note"),
    Case("far_outside", made(troll__kl_before__p99=1.5, troll__kl_after__max=0.05), 1, 12,
         "the 99th percentile of the token KL is 1.5, 30 times the bound, while the projected policy stays within 0.05",
         ["--regression_coef 2", SLOW]),
    Case("far_outside", made(troll__kl_before__p99=1.5, settings={"regression_coef": 0.0}), 1, 12,
         "the 99th percentile of the token KL is 1.5, 30 times the bound",
         ["--regression_coef 1", SLOW]),
    Case("far_outside", made(troll__kl_before__p99=2.5, settings=OFF), 1, 12,
         "the 99th percentile of the token KL is 2.5, without a bound",
         [SLOW, "--trust_region troll"], "note"),
    # 0.02 of 0.02 + |0.03 − 0.02| is two thirds; the reward rests from the tenth rollout on.
    Case("regression_outweighs", made(PEAK + [0.9] * 6, loss=0.03, troll__regression=0.02), 33, 44,
         "67\xa0% of the loss is the regression term, and the reward has plateaued at 0.900",
         ["--regression_coef 0.1"]),
    Case("regression_outweighs", made([*PEAK, 0.9, 0.9, 0.4, 0.4, 0.4], loss=0.03, troll__regression=0.02), 33, 44,
         "67\xa0% of the loss is the regression term, and the reward fell to 0.400", ["--regression_coef 0.1"]),
    Case("projected", made(troll__projected_fraction=0.2, troll__kl_before__mean=0.21), 1, 12,
         "20\xa0% of the tokens were projected, over 3 rollouts", [SLOWEST, HALF]),
    Case("projected", made(troll__projected_fraction=0.2, troll__kl_before__mean=0.19), 1, 12,
         "20\xa0% of the tokens were projected, over 3 rollouts", ["--kl_bound 0.2", SLOW, HALF]),
    Case("clipped", made(clip_ratio__region_mean=0.25, settings=CLIP), 1, 12,
         "the clip removed the gradient of 25\xa0% of the tokens", [SLOW, HALF, "--trust_region troll"]),
    Case("clipped", made(clip_ratio__region_mean=0.6, settings={**CLIP, "importance_sampling_level": "sequence"}),
         1, 12, "the clip removed the gradient of 60\xa0% of the tokens", [SLOW, HALF, "--trust_region troll"]),
    Case("kept_mass", made(troll__kept_mass__old=0.998, settings={"tail": "floor"}), 1, 12,
         "the kept tokens have 0.9980 of the probability", ["--tail bucket", "--max_support 256"]),
    Case("kept_mass", made(troll__kept_mass__old=0.89), 1, 12, "the kept tokens have 0.8900 of the probability",
         ["--max_support 256"], "note"),
    Case("lost_mass", made(troll__lost_mass=[0.0, 0.02] + [0.0] * 18), 5, 8,
         "2.0\xa0% of the proposal's probability is on tokens that the old policy excludes",
         ["--top_k 0 --top_p 1.0"], until=8),
    # Means of five: 0.9 at most. Two low rollouts: ten steps have 1.6, and four of them 0.64, while 0.7 is lost.
    Case("reward_collapse", made(SUNK), 37, 44, "the reward fell from 0.900 to 0.120, each over 5 rollouts",
         [SLOWEST, "--regression_coef 2"]),
    Case("reward_collapse", made(SUNK, settings=OFF), 37, 44,
         "the reward fell from 0.900 to 0.120, each over 5 rollouts", [SLOWEST, "--trust_region troll"]),
    Case("reward_collapse", made(SUNK[:11]), 37, 44, "the reward fell from 0.900 to at most 0.200 on 2 rollouts",
         [SLOWEST, "--regression_coef 2"]),
    # One of two rollouts has lost no more than 0.5; the mean of five 0.62: 13 steps have 2.5, three of them 0.577.
    Case("reward_collapse", made([*PEAK, 0.4, 0.1, 0.4, 0.1, 0.4]), 37, 56,
         "the reward fell from 0.900 to 0.280, each over 5 rollouts", [SLOWEST, "--regression_coef 2"]),
    Case("entropy_collapse", made([0.1, 0.3, 0.5] + [0.5] * 9, entropy=ENTROPY), 29, 40,
         "entropy fell from 1 to 0.05, and the reward has plateaued at 0.500",
         [SLOWEST, "--entropy_coef 0.01", "--beta 0.01"]),
    Case("entropy_collapse", made([0.1, 0.3, 0.5] + [0.5] * 9 + [0.1] * 3, entropy=ENTROPY + [0.05] * 3), 29, 40,
         "entropy fell from 1 to 0.05, and the reward fell to 0.100",
         [SLOWEST, "--entropy_coef 0.01", "--beta 0.01"]),
    Case("no_signal", made([0.0] * 4, frac_reward_zero_std=0.95), 1, 12,
         "in 95\xa0% of the groups all completions have the same reward; the mean is 0.000", ["--num_generations 16"]),
    Case("no_signal", made([0.5, 0.1, 0.1, 0.1], frac_reward_zero_std=0.95), 1, 12,
         "in 95\xa0% of the groups all completions have the same reward; the mean is 0.100",
         [SLOWEST, "--num_generations 16"]),
    Case("settled", made([0.5, 0.9, 0.9, 0.9], frac_reward_zero_std=0.95), 1, 12,
         "in 95\xa0% of the groups all completions have the same reward; the mean is 0.900, so in at least 5\xa0% of "
         "the groups all are below 1, if no reward is negative",
         ["--num_generations 16", SLOWEST, "--entropy_coef 0.01"], "note"),
    # Of three rollouts, as the mean: 0.96 − 0.918, of which 4 % are certain.
    Case("settled", made([0.918] * 3, frac_reward_zero_std=[0.94, 0.98, 0.96]), 1, 12,
         "in 96\xa0% of the groups all completions have the same reward; the mean is 0.918, so in at least 4\xa0% of "
         "the groups all are below 1, if no reward is negative",
         ["--num_generations 16", SLOWEST, "--entropy_coef 0.01"], "note"),
    Case("solved", made([0.9, 0.94, 0.94, 0.94], frac_reward_zero_std=0.95), 1, 12,
         "in 95\xa0% of the groups all completions have the same reward; the mean is 0.940", [], "note"),
    Case("flat", made(FLAT), 1, 40, NOT_RISEN, []),  # nothing is known of the size of updates
    Case("flat", made(FLAT, troll__kl_before__p99=0.2), 1, 40, NOT_RISEN, ["--num_generations 16"]),
    Case("flat", made(FLAT, troll__kl_before__mean=0.06), 1, 40, NOT_RISEN, [SLOWEST]),
    Case("bound_exceeded", made(troll__kl_after__max=[0.05, 0.0501] + [0.05] * 18), 5, 8,
         "a projected token has a KL of 0.0501, above the bound of 0.05", until=8),
    Case("flat", made(FLAT, troll__kl_before__p99=0.001), 1, 40,
         NOT_RISEN, ["--learning_rate 3e-05"]),
    Case("flat", made(FLAT, troll__kl_before__p99=1.1), 1, 40,
         NOT_RISEN, [SLOWEST]),
    Case("flat", made(FLAT, troll__kl_before__p99=0.03, settings={"kl_bound": 0.2}), 1, 40,
         NOT_RISEN, ["--learning_rate 3e-05"]),
    Case("flat", made(FLAT, troll__kl_before__p99=0.03, settings={"kl_bound": 0.2, **CLIP}), 1, 40,
         NOT_RISEN, ["--num_generations 16"]),  # a clip has the setting and not the bound
    Case("held_out_gap", made([0.8] * 8, held_out=[(0, 0.3), (16, 0.55), (32, 0.5)]), 29, 32,
         "held-out reward 0.500, sampled reward 0.800", ["--beta 0.01"]),
    Case("cut_completions", made(completions__clipped_ratio=0.31), 1, 12,
         "31\xa0% of the completions were truncated at the maximum length", ["--max_completion_length 64"]),
    Case("skipped_updates", made(troll__skipped_updates=[None] * 5 + [2.0] * 15), 21, 24,
         "2 updates skipped so far, because loss or gradient was not finite", [SLOW, "--bf16 true"]),
    Case("skipped_updates", made(troll__skipped_tokens=[0.0, 3.0] + [0.0] * 18), 5, 8,
         "3 tokens excluded, because the network returned NaN or infinity", [SLOW, "--bf16 true"], until=8),
    Case("unscored", made(troll__unscored_completions=[None, 1.0] + [None] * 18), 5, 8,
         "1 completion of a rollout had no reward", until=8),
    Case("infra_error", made(code__infra_error=[0.0] * 19 + [0.25]), 77, 80,
         "25\xa0% of the programs could not be judged"),
    Case("gradient_spikes", made(grad_norm=[1.0] * 6 + [11.0, 1.0, 12.0] + [1.0] * 11), 17, 36,
         "the gradient norm was 12, 12 times the median of earlier rollouts, one of 2 spikes in 5 rollouts",
         [SLOW, "--max_grad_norm 0.2"], "note", until=36),
    Case("sampler_mismatch", made(**{"sampling/sampling_logp_difference/mean": 0.12}), 1, 12,
         "sampler and trainer differ by 0.12 in the log-probability of a token, on average",
         ["--vllm_importance_sampling_correction true"]),
    Case("unconverged", made(troll__unconverged_tokens=[0.0, 2.0] + [0.0] * 18), 5, 8,
         "the solver stopped early for 2 tokens", until=8),
]  # fmt: skip

SILENT = {
    "bound_exceeded": [
        made(troll__kl_after__max=float(np.float32(0.05))),
        made(troll__kl_after__max=0.3, settings={"kl_bound_schedule": "projected target=0.03"}),
        made(troll__kl_after__max=0.3, settings=OFF),
    ],
    "one_update": [made(settings={"updates_per_generation": 2}), made(settings={**OFF, "updates_per_generation": 1})],
    "projected": [
        made(troll__projected_fraction=[0.4, 0.2, 0.09] * 6 + [0.2, 0.2]),
        made(troll__projected_fraction=0.1),
        made(RISING[:2], troll__projected_fraction=0.9),
    ],
    "idle": [
        made(troll__projected_fraction=[0.0, 1e-4] + [0.0] * 18),
        made(RISING[:4], troll__projected_fraction=0.0),
        made(troll__projected_fraction=0.0, settings={"updates_per_generation": 1}),
        made(settings=OFF),
        made(clip_ratio__region_mean=1e-4, settings=CLIP),
    ],
    "far_outside": [
        made(troll__kl_before__p99=0.9),
        made(troll__kl_before__p99=1.9, settings=OFF),
        made(troll__kl_before__p99=[2.0, 2.0, 0.1] * 6 + [2.0, 2.0]),
        made(troll__kl_before__p99=1.5, settings={"kl_bound": 0.2}),
    ],
    "regression_outweighs": [
        made(loss=0.03, troll__regression=0.02),  # the reward rises
        made(PEAK + [0.9] * 6, loss=0.3, troll__regression=0.02),  # 0.02 of 0.3
        made(PEAK + [0.9] * 6, loss=0.03, troll__regression=0.02, settings={"regression_coef": 0.0}),
        made(PEAK + [0.9] * 6, troll__regression=0.02),  # the loss was not logged
        made(
            PEAK + [0.9] * 6, loss=0.03, troll__regression=0.02, troll__regression_coef=0.01
        ),  # α adapts, and is small
        made(PEAK + [0.9] * 6, loss=0.03, troll__regression=0.2, settings={"regression_coef": 0.1}),
        made(PEAK + [0.9] * 6, loss=[0.3] * 12 + [0.02, 0.3, 0.3], troll__regression=0.02),  # one without advantages
    ],
    "clipped": [
        made(clip_ratio__region_mean=0.19, settings=CLIP),
        made(clip_ratio__region_mean=0.3, settings={**CLIP, "importance_sampling_level": "sequence"}),
    ],
    "kept_mass": [
        made(troll__kept_mass__old=0.9991, settings={"tail": "floor"}),
        made(troll__kept_mass__old=0.95),
        made(troll__kept_mass__old=0.5, settings=CLIP),
    ],
    "lost_mass": [made(troll__lost_mass=0.0)],
    "reward_collapse": [
        made([*PEAK, 0.2, 0.9, 0.9, 0.9, 0.9]),
        made([*PEAK, 0.9, 0.1]),  # one rollout at the end is noise
        made([*PEAK, 0.4, 0.4]),  # within four steps of 0.13
        made([*PEAK, 0.6, 0.6, 0.6, 0.6, 0.6]),
        made([0.5, 0.1] * 10),  # nothing but noise
        made([x - 1 for x in RISING]),
    ],
    "entropy_collapse": [
        made(RISING[:12], entropy=ENTROPY),
        made([0.1, 0.5, 0.9] + [0.9] * 9, entropy=ENTROPY),
        made([0.1, 0.3, 0.5] + [0.5] * 9, entropy=[1.0] + [0.11] * 11),
    ],
    "no_signal": [
        made([0.0] * 4, frac_reward_zero_std=0.89),
        made([0.0] * 2, frac_reward_zero_std=1.0),
        made([0.5, 0.9, 0.9, 0.9], frac_reward_zero_std=0.95),
    ],
    "settled": [
        made([0.925] * 4, frac_reward_zero_std=0.95),  # 0.025 may be a problem or two
        made([0.5, 0.86, 0.86, 0.86], frac_reward_zero_std=0.89),
        made([0.5] * 4, frac_reward_zero_std=0.95),
        made([1.0, 1.0, 1.1], frac_reward_zero_std=1.0),
    ],
    "solved": [
        made([0.5, 0.94, 0.94], frac_reward_zero_std=0.85),
        made([0.0] * 4, frac_reward_zero_std=0.95),
        made([0.915] * 4, frac_reward_zero_std=0.95),
    ],
    "flat": [
        made(RISING),
        made(FLAT[:9]),
        made([0.9] * 12),
        made(FLAT, held_out=[(0, 0.3), (20, 0.5)]),
        made([0.3] + [0.5, 0.52] * 6),
    ],
    "held_out_gap": [
        made([0.8] * 8, held_out=[(0, 0.3), (16, 0.61), (32, 0.5)]),
        made([0.8] * 8, held_out=[(0, 0.3), (32, 0.5)]),
        made([0.8] * 8, held_out=[(0, 0.3), (16, 0.5), (32, 0.7)]),
        made([-0.8] * 8, held_out=[(16, -0.9), (32, -0.9)]),
    ],
    "cut_completions": [made(completions__clipped_ratio=0.29), made(completions__clipped_ratio=[1.0, 1.0, 0.1] * 7)],
    "skipped_updates": [made(troll__skipped_updates=0.0, troll__skipped_tokens=0.0)],
    "unscored": [made(troll__unscored_completions=0.0)],
    "infra_error": [made(code__infra_error=0.0)],
    "gradient_spikes": [
        made(grad_norm=[1.0] * 6 + [11.0] + [1.0] * 13),
        made(grad_norm=[1.0] * 6 + [9.0, 1.0, 9.0] + [1.0] * 11),
        made(grad_norm=[0.0] * 6 + [11.0, 0.0, 12.0] + [0.0] * 11),
        made(grad_norm=[1.0] * 6 + [11.0] + [1.0] * 5 + [12.0] + [1.0] * 7),  # six rollouts apart
    ],
    "sampler_mismatch": [made(**{"sampling/sampling_logp_difference/mean": 0.09})],
    "unconverged": [made(troll__unconverged_tokens=0.0)],
}


@pytest.mark.parametrize("case", SPOKEN, ids=lambda case: case.name)
def test_it_speaks(case: Case) -> None:
    found = speaks(case.history, case.name)
    assert found is not None
    assert found.seen == case.seen
    assert (found.since, found.said, found.until, found.level) == (case.since, case.said, case.until, case.level)
    assert [x.flags for x in found.changes if x.flags] == case.flags
    assert found.changes
    assert found.means


@pytest.mark.parametrize(("name", "history"), [(name, h) for name, all_of in SILENT.items() for h in all_of])
def test_it_is_silent(name: str, history: History) -> None:
    assert speaks(history, name) is None


def test_every_rule_is_tried_both_ways() -> None:
    assert {case.name for case in SPOKEN} == SILENT.keys()
    assert len(SILENT) == len(RULES)


def left_and_truth(rollouts: list[tuple[tuple[float, ...], ...]]) -> tuple[Array, Array]:
    """What the rule takes for alike and below 1, and what is, over three rollouts: of groups, of rewards."""
    same = [fmean(len(set(group)) == 1 for group in groups) for groups in rollouts]
    truth = [fmean(len(set(group)) == 1 and group[0] < 1 for group in groups) for groups in rollouts]
    left = learning._left(made([fmean(map(fmean, groups)) for groups in rollouts], frac_reward_zero_std=same))
    return left[SMOOTH - 1 :], trailing(np.array(truth), SMOOTH)[SMOOTH - 1 :]


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.25, 0.9, 1.0), (0.0, 1.0, 1.5)])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_left_is_a_lower_bound(values: tuple[float, ...], size: int) -> None:
    """In every rollout of three groups with such rewards, three times in a row, and between one and the next."""
    groups = combinations_with_replacement(values, size)
    rollouts = combinations_with_replacement(groups, 3)
    left, truth = left_and_truth([rollout for rollout in rollouts for _ in range(SMOOTH)])
    assert len(left) >= 8
    assert (left <= truth + 1e-12).all()


def test_what_is_left_is_exact_where_all_is_right_or_wrong() -> None:
    left, truth = left_and_truth(list(combinations_with_replacement([(0.0, 0.0), (1.0, 1.0)], 4)))
    np.testing.assert_allclose(left, truth, atol=1e-12)
    assert truth.max() == 0.75


def test_with_negative_rewards_it_is_no_bound() -> None:
    """Which is why the sentence says so: 19 groups are all right, and the twentieth has one right answer of eight."""
    found = speaks(made([(19 + fmean([-1.0] * 7 + [1.0])) / 20] * 3, frac_reward_zero_std=19 / 20), "settled")
    assert found is not None
    assert found.seen.endswith("if no reward is negative")


@pytest.mark.parametrize("mean", [0.84, 0.86, 0.9, 0.93, 0.95, 0.98, 1.0])
@pytest.mark.parametrize("same", [0.89, 0.91, 0.94, 0.97, 1.0])
def test_a_rollout_is_settled_or_solved_and_never_both(same: float, mean: float) -> None:
    names = {x.name for x in find(made([mean] * 3, frac_reward_zero_std=same))} & {"settled", "solved", "no_signal"}
    assert len(names) == (same > learning.SAME_REWARD)
    assert ("no_signal" in names) == (same > learning.SAME_REWARD and mean < 0.85)


def test_settled_and_then_solved() -> None:
    """Each with its own updates: what was said of the first rollouts stays true of them."""
    found = find(made([0.9] * 3 + [1.0] * 3, frac_reward_zero_std=1.0))
    assert [(x.name, x.since, x.said, x.until) for x in found] == [("settled", 1, 12, 20), ("solved", 13, 24, None)]


@pytest.mark.parametrize("flags", sorted({x for case in SPOKEN for x in case.flags}))
def test_what_to_type_can_be_typed(flags: str) -> None:
    check_command(["train", *shlex.split(flags)])


def test_a_run_without_anything_is_one_without_findings() -> None:
    assert find(made()) == []
    assert find(History.of([], [], {})) == []


def test_one_line_says_it_all() -> None:
    found = speaks(SPOKEN[1].history, "projected")
    assert found is not None
    assert found.line() == (
        "Warning (updates 9 to 20): 12\xa0% of the tokens were projected, over 3 rollouts. Updates leave the trust "
        "region, and the projection undoes much of each. Try --kl_bound 0.2 (a narrow bound slows learning; 0.2 "
        "learned more in the studies)."
    )
    unscored = speaks(made(troll__unscored_completions=1.0), "unscored")
    assert unscored is not None
    assert unscored.line().endswith(
        "excluded. Look at what the reward functions return; `troll doctor` checks the sandbox."
    )
    assert "since update 1" in unscored.line()


def test_without_the_settings_there_is_advice_without_numbers() -> None:
    rows = cases.lines(RISING, {"troll/projected_fraction": 0.3})
    (found,) = find(History.of(rows, [], {"trust_region": "troll"}))
    assert [x.flags for x in found.changes] == [""]
    assert found.changes[0].why.startswith("a lower learning rate")


def test_changes_come_once_and_the_gravest_first() -> None:
    history = made(
        SUNK,
        troll__projected_fraction=0.3,
        troll__kl_before__p99=1.5,
        completions__clipped_ratio=0.5,
        troll__unscored_completions=1.0,
    )
    names = [x.name for x in find(history)]
    assert names == ["unscored", "reward_collapse", "cut_completions", "projected", "far_outside"]
    assert [x.flags.split(" ")[0] for x in changes(find(history))] == [
        *("", "--learning_rate", "--regression_coef", "--max_completion_length", "--kl_bound"),
        "--updates_per_generation",
    ]
    assert Change(SLOWEST, "a high learning rate is the most common cause") in changes(find(history))


def test_warnings_come_before_notes() -> None:
    found = find(made(troll__projected_fraction=0.0, troll__unscored_completions=[None] * 19 + [1.0]))
    assert [(x.name, x.level) for x in found] == [("unscored", "warning"), ("idle", "note")]
