"""The math reward: 1 for an answer that equals the right one, 0 for a wrong, missing or hanging answer.

Most answers are decided exactly in this process (``troll.rewards.answers``). The others go to worker processes that
do algebra, with a deadline and a memory limit; they never run text of the model as code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from troll.errors import InputError
from troll.rewards.answers import Answer, Leaf, Pair, boxed, compare_leaves, equal_trees, parse, text_of
from troll.rewards.checker import SECONDS, Checker, Question, Reply, plain_command
from troll.rewards.workers import Pool

_MAX_PAIRS = 400  # of expressions to compare, for one answer


class MathReward:
    r"""TRL's reward function for answers in ``\boxed{…}``.

    Args:
        size: number of worker processes; default one per core of this trainer.
        seconds: wall time for an answer; one that takes longer is wrong.
    """

    __name__ = "math_reward"

    def __init__(self, *, size: int | None = None, seconds: float = SECONDS) -> None:
        if not 0 < seconds <= 60:
            raise InputError(f"seconds must be above 0 and at most 60, got {seconds}", f"The default is {SECONDS}")
        self._seconds = seconds
        self._pool: Pool[Question, Reply] = Pool(_start, size=size, name="math")

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
        """One reward per completion; None, which TRL masks, without a right answer or a process to decide."""
        return self.score([boxed(text_of(completion)) for completion in completions], answer)

    def score(self, given: Sequence[str | None], answer: Sequence[Any]) -> list[float | None]:
        """The rewards of answers without the box around them; None is a missing answer."""
        comparisons = [_Comparison(right, one) for one, right in zip(given, answer, strict=True)]
        undecided = [comparison for comparison in comparisons if comparison.pairs]
        questions = (Question({"pairs": list(one.pairs)}, self._seconds) for one in undecided)
        for comparison, reply in zip(undecided, self._pool.map(questions), strict=True):
            comparison.decide(reply)
        return [None if one.right is None else float(one.right) for one in comparisons]

    def readable(self, texts: Sequence[str]) -> list[bool]:
        """For each right answer, whether it can be compared by more than its text."""
        trees = [parse(text) for text in texts]
        needed = [
            None if tree is None else {leaf.relation for leaf in _leaves(tree) if _algebra(leaf)} for tree in trees
        ]
        leaves = sorted(set().union(*filter(None, needed)))
        parts = [leaves[i : i + 20] for i in range(0, len(leaves), 20)]
        replies = self._pool.map(Question({"texts": part}, 60.0) for part in parts)
        unreadable = {
            leaf
            for part, reply in zip(parts, replies, strict=True)
            for leaf, readable in zip(part, (reply and reply.value) or [True] * len(part), strict=True)
            if not readable
        }
        return [need is not None and not need & unreadable for need in needed]

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


class _Comparison:
    """A right answer and a given one: equal or not, or the pairs of expressions that decide it (``pairs``)."""

    def __init__(self, gold: Any, given: str | None) -> None:
        self.pairs: dict[Pair, bool] = {}
        self.right: bool | None = False
        if gold is None or not str(gold).strip():  # nothing to compare with
            self.right = None
            return
        right, answer = parse(str(gold)), None if given is None else parse(given)
        if right is None or answer is None:
            self.right = given is not None and str(gold).strip() == given
            return
        self._trees = right, answer
        self.right = equal_trees(right, answer, self._leaf)  # as if all undecided pairs were equal
        if not self.right or len(self.pairs) > _MAX_PAIRS:
            self.pairs, self.right = {}, False

    def _leaf(self, gold: Leaf, answer: Leaf) -> bool:
        result = compare_leaves(gold, answer)
        if isinstance(result, bool):
            return result
        return self.pairs.setdefault(result, True)

    def decide(self, reply: Reply | None) -> None:
        """Decide with the worker's reply about the pairs; without a reply there is no verdict."""
        if reply is None:
            self.right = None
            return
        equal = reply.value if isinstance(reply.value, list) else [False] * len(self.pairs)
        self.pairs = dict(zip(self.pairs, equal, strict=True))
        self.right = equal_trees(*self._trees, self._leaf)


def _algebra(leaf: Leaf) -> bool:
    """Whether the leaf is neither a number nor words."""
    return leaf.value is None and not leaf.text.startswith('"')


def _leaves(tree: Answer) -> list[Leaf]:
    return [tree] if isinstance(tree, Leaf) else [leaf for part in tree.parts for leaf in _leaves(part)]


def _start() -> Checker:
    if importlib.util.find_spec("math_verify") is None:
        raise InputError("the math reward needs math-verify", 'Run pip install "troll-rl[rewards]"')
    return Checker({"kind": "math"}, *plain_command())


_shared = MathReward()  # starts no process before its first use


def math_reward(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""TRL's reward function: 1.0 if the content of the last ``\boxed{…}`` equals ``answer``, else 0.0.

    None, which TRL masks, if there is no right answer or no worker process could decide. Callable from any thread.
    """
    return _shared(completions, answer, **columns)
