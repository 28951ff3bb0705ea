"""Rewards in the form of verl's ``custom_reward_function``: one completion, one number.

reward.custom_reward_function.path=pkg://troll.rewards.verl reward.custom_reward_function.name=math_score
"""

from __future__ import annotations

from typing import Any

from troll.rewards.code import code_reward
from troll.rewards.mathematics import math_reward
from troll.rewards.workers import PoolError


def math_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    r"""1.0 if what is in the last ``\boxed{…}`` equals ``ground_truth``, else 0.0.

    Raises:
        PoolError: no process could be had to decide. verl cannot leave a completion out, and 0 would be a lie.
    """
    return decided(math_reward([solution_str], [ground_truth])[0], "math")


def code_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    """1.0 if the last program in the solution passes its tests, else 0.0.

    ``ground_truth`` has the tests, in any form that ``troll.rewards.read_problem`` takes; verl's data sets have
    JSON with ``inputs`` and ``outputs``.

    Raises:
        PoolError: the sandbox failed. verl cannot leave a completion out, and 0 would be a lie.
    """
    return decided(code_reward([solution_str], [ground_truth])[0], "code")


def decided(reward: float | None, name: str) -> float:
    """The reward, if there is one."""
    if reward is None:
        raise PoolError(f"no {name} reward: no process could be had to decide", "one", "troll doctor")
    return reward
