"""Rewards as verl calls them: by keyword, one completion at a time, from many threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from troll.rewards import verl
from troll.rewards.verl import code_score, math_score
from troll.rewards.workers import PoolError

TESTS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})


def call(score, text: str, truth) -> float:
    return score(data_source="any", solution_str=text, ground_truth=truth, extra_info={"index": 1}, router=None)


def test_programs():
    right = "```python\nprint(sum(map(int, input().split())))\n```"
    assert call(code_score, right, TESTS) == 1.0
    assert call(code_score, "print(3)", TESTS) == 0.0
    assert call(code_score, "def f(x): return x + 1", ["assert f(1) == 2"]) == 1.0
    with ThreadPoolExecutor(8) as threads:
        texts = [f"def f(x): return x + {n}" for n in range(24)]
        found = list(threads.map(lambda text: call(code_score, text, ["assert f(1) == 3"]), texts))
    assert found == [float(n == 2) for n in range(24)]


def test_answers():
    assert call(math_score, r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert call(math_score, r"so \boxed{\frac{1}{3}}", "0.5") == 0.0


@pytest.mark.parametrize("name", ["code", "math"])
def test_no_verdict_is_no_score(monkeypatch, name):
    monkeypatch.setattr(verl, f"{name}_reward", lambda *_: [None])
    with pytest.raises(PoolError, match=f"no {name} reward"):
        call(getattr(verl, f"{name}_score"), "", [])
