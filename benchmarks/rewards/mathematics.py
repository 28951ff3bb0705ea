"""Speed of the math reward, and its wrong verdicts on the regression table, compared with TRL's accuracy_reward.

    python benchmarks/rewards/mathematics.py MATH.json [--only speed|verdicts]

The file has records with a field ``answer``. Every answer that is not a plain number is given unchanged, and with a 0
added, so that only algebra can decide that it is equal. Writes mathematics.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from troll.rewards import MathReward
from troll.rewards.answers import Leaf, parse
from troll.rewards.checker import Checker, plain_command
from troll.rewards.workers import cores

HERE = Path(__file__).parent
PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy", "mpmath", "trl")
HANGS = "(((9^{9999})^{9999})^{999})^{999}"


def pairs(path: Path, most: int) -> tuple[list[str], list[tuple[str, str]]]:
    """All answers, and pairs of equal ones that need algebra."""
    answers = [str(row["answer"]) for row in json.loads(path.read_text()) if row.get("answer")]
    hard = []
    for answer in dict.fromkeys(answers):
        tree = parse(answer)
        if (
            isinstance(tree, Leaf)
            and tree.value is None
            and not re.search(r'[=<>:_"]|\\[lg]e', tree.relation + tree.unit)
        ):
            hard.append((answer, f"0+{tree.text}"))
    return answers, hard[:most]


def rate(reward: MathReward, given: list[str], golds: list[str]) -> tuple[float, float]:
    """Checks per second, and the share of rewards that are 1."""
    began = time.perf_counter()
    rewards = reward.score(given, golds)
    seconds = time.perf_counter() - began
    return len(given) / seconds, sum(one or 0.0 for one in rewards) / len(rewards)


def processor_ms(given: list[str], golds: list[str]) -> float:
    """CPU time per check in milliseconds, without the start of the process."""

    def spent(size: int) -> float:
        before = os.times()
        reward = MathReward(size=1)
        reward.score(["x+1", *given[:size]], ["1+x", *golds[:size]])
        reward.close()
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    return round(1000 * (spent(len(given)) - spent(0)) / len(given), 2)


def speed(path: Path) -> dict[str, Any]:
    """Checks per second for one process and for all, and the time to start one."""
    answers, hard = pairs(path, 400)
    golds, others = [gold for gold, _ in hard], [other for _, other in hard]
    found: dict[str, Any] = {"answers": len(answers), "answers_that_need_algebra": len(hard)}
    for name, size in (("one_process", 1), ("all_cores", cores())):
        reward = MathReward(size=size)
        reward.score(["x+1"] * 4 * size, ["1+x"] * 4 * size)  # started
        first, right = rate(reward, others, golds)
        again, _ = rate(reward, others, golds)
        whole, _ = rate(reward, answers, answers)
        wrong, _ = rate(reward, golds[1:] + golds[:1], golds)
        found[name] = {
            "processes": size,
            "first_time_per_s": round(first, 1),
            "expressions_seen_before_per_s": round(again, 1),
            "wrong_answers_per_s": round(wrong, 1),
            "all_answers_as_they_are_per_s": round(whole, 1),
            "judged_right": right,
        }
        reward.close()
    found["processor_ms_first_time"] = processor_ms(others, golds)  # independent of the load
    starts = []
    for _ in range(5):
        began = time.perf_counter()
        worker = Checker({"kind": "math"}, *plain_command())
        starts.append(time.perf_counter() - began)
        worker.end()
    reward = MathReward(size=1)
    reward.score(["x+1"], ["1+x"])
    began = time.perf_counter()
    assert reward.score([HANGS], ["x"]) == [0.0]
    found["hanging_answer_s"] = round(time.perf_counter() - began, 3)
    began = time.perf_counter()
    assert reward.score(["x+1"], ["1+x"]) == [1.0]
    found["next_answer_after_a_kill_s"] = round(time.perf_counter() - began, 3)
    found["restart_s"] = {"median": round(statistics.median(starts), 3), "worst": round(max(starts), 3)}
    began = time.perf_counter()
    readable = reward.readable(answers)
    found["reading_all_right_answers_s"] = round(time.perf_counter() - began, 2)
    found["right_answers_that_cannot_be_read"] = readable.count(False)
    reward.close()
    return found


def trl_says(case: tuple[str, str]) -> float | None:
    """TRL's accuracy_reward."""
    import logging

    logging.disable()
    from trl.rewards import accuracy_reward

    gold, answer = case
    return accuracy_reward([[{"role": "assistant", "content": f"\\boxed{{{answer}}}"}]], [f"${gold}$"])[0]  # type: ignore[no-any-return]


def verdicts() -> dict[str, Any]:
    """Wrong verdicts on the regression table: too generous, too strict."""
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "rewards"))
    from math_cases import CASES

    ours = MathReward()([f"\\boxed{{{case.answer}}}" for case in CASES], [case.gold for case in CASES])
    context = multiprocessing.get_context("spawn")
    theirs: list[float | str | None] = []
    pool = context.Pool(1)
    for case in CASES:
        try:
            theirs.append(pool.apply_async(trl_says, (case[:2],)).get(timeout=30))
        except multiprocessing.TimeoutError:
            theirs.append("hung for 30 s")
            pool.terminate()
            pool = context.Pool(1)
        except Exception as error:
            theirs.append(f"raised {type(error).__name__}")
    pool.terminate()
    found: dict[str, Any] = {"cases": len(CASES)}
    for name, said in (("troll math_reward", ours), ("trl accuracy_reward", theirs)):
        verdict = list(zip(CASES, said, strict=True))
        found[name] = {
            "wrong_answers_rewarded": sum(one == 1.0 and not case.right for case, one in verdict),
            "right_answers_not_rewarded": sum(one != 1.0 and case.right for case, one in verdict),
            "no_verdict": sum(not isinstance(one, float) for _, one in verdict),
        }
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=("speed", "verdicts"))
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)[13:],
        "cores": cores(),
        "load_before": round(os.getloadavg()[0], 2),  # other work on this machine
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    if asked.only != "verdicts":
        result["speed"] = speed(asked.file)
    if asked.only != "speed":
        result["verdicts"] = verdicts()
    (HERE / "mathematics.json").write_text(json.dumps(result, indent=1) + "\n")
    for part in ("speed", "verdicts"):
        for name, value in result.get(part, {}).items():
            print(f"{name:36}", value)


if __name__ == "__main__":
    main()
