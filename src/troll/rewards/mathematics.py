"""Mathematical answers: 1 for one that equals the right one, 0 for a wrong one, for none, and for one that hangs.

Most answers are settled exactly, here (``troll.rewards.answers``). The rest goes to processes that do algebra, with a
deadline, a memory limit, and no way to run what the model wrote as code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from troll.errors import InputError
from troll.rewards.answers import Answer, Leaf, Pair, boxed, certain, read, same
from troll.rewards.checker import SECONDS, Checker, Question, Reply, apart
from troll.rewards.text import text_of
from troll.rewards.workers import Pool

_PAIRS = 400  # of expressions, for one answer


class MathReward:
    r"""TRL's reward function for answers in ``\boxed{…}``.

    Args:
        size: processes at a time; one per core of this trainer where nothing is said.
        seconds: for an answer, on the clock; one that takes longer is wrong.
    """

    __name__ = "math_reward"

    def __init__(self, *, size: int | None = None, seconds: float = SECONDS) -> None:
        if not 0 < seconds <= 60:
            raise InputError(f"seconds={seconds}", "more than 0, at most 60", f"{SECONDS}, the default")
        self._seconds = seconds
        self._pool: Pool[Question, Reply] = Pool(_start, size=size, name="math")

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
        """One reward per completion; None, which TRL leaves out, for no right answer, or no process to decide."""
        return self.score([boxed(text_of(completion)) for completion in completions], answer)

    def score(self, given: Sequence[str | None], answer: Sequence[Any]) -> list[float | None]:
        """The same for answers as they stand in the box; None is no answer."""
        asked = [_Comparison(right, one) for one, right in zip(given, answer, strict=True)]
        open_ones = [one for one in asked if one.pairs]
        questions = (Question({"pairs": list(one.pairs)}, self._seconds) for one in open_ones)
        for one, reply in zip(open_ones, self._pool.map(questions), strict=True):
            one.hear(reply)
        return [None if one.right is None else float(one.right) for one in asked]

    def readable(self, texts: Sequence[str]) -> list[bool]:
        """Which right answers can be compared by more than their text."""
        trees = [read(text) for text in texts]
        needed = [
            None if tree is None else {leaf.relation for leaf in _leaves(tree) if _algebra(leaf)} for tree in trees
        ]
        leaves = sorted(set().union(*filter(None, needed)))
        parts = [leaves[i : i + 20] for i in range(0, len(leaves), 20)]
        replies = self._pool.map(Question({"texts": part}, 60.0) for part in parts)
        unreadable = {
            leaf
            for part, reply in zip(parts, replies, strict=True)
            for leaf, fine in zip(part, (reply and reply.value) or [True] * len(part), strict=True)
            if not fine
        }
        return [need is not None and not need & unreadable for need in needed]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


class _Comparison:
    """A right answer and a given one: equal or not, or the pairs of expressions that decide it."""

    def __init__(self, gold: Any, given: str | None) -> None:
        self.pairs: dict[Pair, bool] = {}
        self.right: bool | None = False
        if gold is None or not str(gold).strip():  # nothing to compare with
            self.right = None
            return
        right, answer = read(str(gold)), None if given is None else read(given)
        if right is None or answer is None:
            self.right = given is not None and str(gold).strip() == given
            return
        self._trees = right, answer
        self.right = same(right, answer, self._ask)  # as if all pairs that are not certain were equal
        if not self.right or len(self.pairs) > _PAIRS:
            self.pairs, self.right = {}, False

    def _ask(self, gold: Leaf, answer: Leaf) -> bool:
        known = certain(gold, answer)
        if isinstance(known, bool):
            return known
        return self.pairs.setdefault(known, True)

    def hear(self, reply: Reply | None) -> None:
        """Decide, by what the process said of the pairs."""
        if reply is None:
            self.right = None
            return
        said = reply.value if isinstance(reply.value, list) else [False] * len(self.pairs)
        self.pairs = dict(zip(self.pairs, said, strict=True))
        self.right = same(*self._trees, self._ask)


def _algebra(leaf: Leaf) -> bool:
    """Whether it is neither a number nor words."""
    return leaf.value is None and not leaf.text.startswith('"')


def _leaves(tree: Answer) -> list[Leaf]:
    return [tree] if isinstance(tree, Leaf) else [leaf for part in tree.parts for leaf in _leaves(part)]


def _start() -> Checker:
    if importlib.util.find_spec("math_verify") is None:
        raise InputError("the math reward without math-verify", "the package", 'pip install "troll-rl[rewards]"')
    return Checker({"kind": "math"}, *apart())


_shared = MathReward()  # it has no process before it is asked


def math_reward(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    r"""TRL's reward function: 1.0 if what is in the last ``\boxed{…}`` equals ``answer``, else 0.0.

    None, which TRL leaves out, where there is no right answer, or no process could be had to decide. From any thread.
    """
    return _shared(completions, answer, **columns)
