"""What is said at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from troll.lab.runs import Run, append_line, write_json
from troll.lab.runs.formatting import one_line
from troll.lab.runs.summary import sentences, summarise


def run_of(
    path: Path, lines: list[dict[str, Any]], region: str = "troll", bound: float | None = 0.05, adaptive: str = "fixed"
) -> Run:
    settings = {"trust_region": region, "kl_bound": bound, "bound": adaptive}
    write_json(path / "run.json", {"format": 1, "seconds": 12.5, "settings": settings})
    for line in lines:
        append_line(path / "metrics.jsonl", line)
    return Run(path)


def update(step: int, projected: float, after: float, reward: float | None = None) -> dict[str, Any]:
    line = {"step": step, "loss": 0.0, "troll/kl_before/mean": 0.1 * step, "troll/kl_after/max": after}
    return {**line, "troll/projected_fraction": projected} | ({} if reward is None else {"reward": reward})


def test_of_a_run_that_was_projected(tmp_path: Path) -> None:
    lines = [update(i, 0.5 * (i % 2), 0.01 * i, reward=float(i) if i % 2 else None) for i in range(1, 10)]
    lines += [{"step": 0, "eval_reward": 0.25}, {"step": 9, "eval_reward": 0.75}]
    run = run_of(tmp_path, lines)
    found = summarise(run)
    assert (found.reward_first, found.reward_last, found.rollouts) == (1.0, pytest.approx(7.0), 5)  # of 5, 7 and 9
    assert (found.held_out_first, found.held_out_last) == (0.25, 0.75)
    assert found.projected == pytest.approx(0.5 * 5 / 9)
    assert found.kl_mean == pytest.approx(0.5)
    assert (found.kl_after_max, found.kl_bound, found.seconds) == (0.09, 0.05, 12.5)
    assert sentences(run) == [
        "Reward 1.000 → 7.000 (first rollout, mean of the last 3).",
        "Held-out reward 0.250 → 0.750.",
        "The trust region projected 27.8% of the tokens; "
        "the largest KL after projection was 0.0900, the bound is 0.05.",
    ]


def test_of_a_run_in_which_nothing_was_projected(tmp_path: Path) -> None:
    run = run_of(tmp_path, [update(1, 0.0, 0.01, reward=0.5)])
    assert sentences(run)[-1] == "No token left the trust region of 0.05: it changed nothing in this run."
    assert sentences(run)[0] == "Reward 0.500 → 0.500 (first rollout, the last)."


def test_of_a_run_whose_bound_adapts_it_is_not_said_that_it_was_broken(tmp_path: Path) -> None:
    run = run_of(tmp_path, [update(1, 0.5, 0.07)], adaptive="projected")
    assert sentences(run)[-1].endswith("the largest KL after projection was 0.0700, the bound adapts, from 0.05.")


def test_of_a_run_with_an_infinite_bound(tmp_path: Path) -> None:
    run = run_of(tmp_path, [update(1, 0.0, 3.0)], bound=float("inf"))
    assert run.about["settings"]["kl_bound"] is None
    assert sentences(run) == ["No token left the trust region of inf: it changed nothing in this run."]


def test_of_a_run_without_projection(tmp_path: Path) -> None:
    run = run_of(tmp_path, [{"step": 1, "loss": 0.0, "troll/kl_before/mean": 0.125}], region="clip")
    assert summarise(run).kl_bound is None
    assert sentences(run) == ["Mean token KL to the policy that made the rollout: 0.1250."]


def test_of_a_run_that_measured_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, [{"step": 1, "loss": None, "reward": None}, {"step": 1, "eval_reward": 0.5}], region="none")
    found = summarise(run)
    assert (found.reward_first, found.reward_last, found.projected, found.kl_mean) == (None, None, None, None)
    assert (found.held_out_first, found.held_out_last) == (None, 0.5)  # one evaluation is no change
    assert sentences(run) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain  text", "plain  text"),
        ("a\nb\r\n\tc", "a b c"),
        ("\x1b[2J\x1b]0;title\x07x\x9b31m", "[2J ]0;title x 31m"),
        ("\u202egnp.exe\u2028b\u2029c\ud83d", "gnp.exe b c"),
        ("漢字 🙂 é → −", "漢字 🙂 é → −"),
        ("\x00", ""),
    ],
)
def test_a_line_cannot_do_anything_to_a_terminal(text: str, shown: str) -> None:
    assert one_line(text) == shown
