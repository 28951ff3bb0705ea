"""The rewards as verl's ``custom_reward_function``: one number per completion.

reward.custom_reward_function.path=pkg://troll.rewards.verl reward.custom_reward_function.name=math_score
"""

from __future__ import annotations

from typing import Any

from troll.rewards.code import code_reward
from troll.rewards.mathematics import math_reward
from troll.rewards.workers import PoolError


def math_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    r"""1.0 if the content of the last ``\boxed{…}`` equals ``ground_truth``, else 0.0.

    Raises:
        PoolError: no worker process could decide. verl cannot mask a completion, and 0 would be wrong.
    """
    return require_reward(math_reward([solution_str], [ground_truth])[0], "math")


def code_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    """1.0 if the last program in the solution passes its tests, else 0.0.

    ``ground_truth`` has the tests in any format of ``troll.rewards.read_problem``; verl's data sets have JSON with
    ``inputs`` and ``outputs``.

    Raises:
        PoolError: the sandbox failed. verl cannot mask a completion, and 0 would be wrong.
    """
    return require_reward(code_reward([solution_str], [ground_truth])[0], "code")


def require_reward(reward: float | None, name: str) -> float:
    """The reward; PoolError if it is None."""
    if reward is None:
        raise PoolError(f"no {name} reward: no worker process could decide", "Run troll doctor")
    return reward
