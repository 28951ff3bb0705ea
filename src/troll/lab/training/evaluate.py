"""Evaluation on held-out problems: samples several answers to each, scores them with the task's reward, and computes
pass@k and majority vote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset

from troll.errors import InputError
from troll.lab.runs.statistics import Interval, majority, over_problems, pass_at_k, resampled
from troll.lab.tasks.task import Reward, Task, text_of
from troll.modeling import gqa_decoding
from troll.trl.robust.reward_validation import checked_rewards

MAJORITY = "majority"
_FULL = 1 - 1e-6
_GROUPS = 6  # of difficulty, at most


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Answers are sampled from the full distribution at this temperature; 0 is greedy decoding."""

    samples: int = 8
    temperature: float = 1.0
    max_completion_length: int = 256
    batch_size: int = 64
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("samples", "max_completion_length", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"{name} must be at least 1, got {getattr(self, name)}", f"Leave --{name} out for the default"
                )
        if not self.temperature >= 0:
            raise InputError(f"temperature must be ≥ 0, got {self.temperature}", "The default is 1")
        if self.temperature == 0 and self.samples > 1:
            raise InputError(
                f"With temperature=0 all {self.samples} samples of a problem are the same", "Use --samples 1"
            )


@dataclass(frozen=True)
class Scores:
    """The scored samples: for every problem and sample, whether it is right and its answer."""

    right: list[list[bool]]
    answers: list[list[str | None]]
    difficulty: list[float] | None = None

    def by_problem(self, measure: str) -> list[float]:
        """``pass@K`` or ``majority`` of every problem."""
        if measure == MAJORITY:
            return [majority(a, r) for a, r in zip(self.answers, self.right, strict=True)]
        k = int(measure.removeprefix("pass@"))
        return [pass_at_k(len(r), sum(r), k) for r in self.right]

    def summary(self, measures: Sequence[str]) -> dict[str, Any]:
        """The measures with their intervals, as in ``eval.json``."""
        found: dict[str, Any] = {name: as_json(over_problems(self.by_problem(name))) for name in measures}
        if self.difficulty is not None:
            first = self.by_problem("pass@1")
            found["by_difficulty"] = {
                label: {**as_json(over_problems([first[i] for i in group])), "problems": len(group)}
                for label, group in _groups(self.difficulty).items()
            }
        return found


def difference(after: Scores, before: Scores, measure: str) -> Interval:
    """The mean difference of two models on the same problems, paired by problem."""
    pairs = zip(after.by_problem(measure), before.by_problem(measure), strict=True)
    return resampled([x - y for x, y in pairs])


def as_json(found: Interval) -> dict[str, float | None]:
    """The interval as ``value``, ``low`` and ``high``."""
    return {"value": found.mean, "low": found.low, "high": found.high}


def evaluate(
    model: Any, tokenizer: Any, task: Task, problems: Dataset, how: Sampling, advance: Callable[[int], None]
) -> Scores:
    """Sample and score; ``advance`` is called with the number of new samples. The same seed gives the same scores.

    A sample is right if its reward is 1, where its reward is that of the first function that does not return None.
    Rewards must be between 0 and 1.
    """
    torch.manual_seed(how.seed)
    rows = [row for row in problems for _ in range(how.samples)]
    right: list[bool] = []
    answers: list[str | None] = []
    for start in range(0, len(rows), how.batch_size):
        batch = rows[start : start + how.batch_size]
        ids = _generate(model, tokenizer, [row["prompt"] for row in batch], task.stop, how)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        chat = [isinstance(row["prompt"], list) for row in batch]
        completions = [
            [{"role": "assistant", "content": text}] if c else text for text, c in zip(texts, chat, strict=True)
        ]
        right += _judge(task.reward_funcs, batch, completions, ids)
        answers += [task.answer_of(text_of(completion)) for completion in completions]
        advance(len(batch))
    return Scores(
        right=list(_split(right, how.samples)),
        answers=list(_split(answers, how.samples)),
        difficulty=_difficulty(problems),
    )


def stop_token(stop: str, tokenizer: Any) -> int:
    """The token at which completions of a task end."""
    ids = tokenizer.encode(stop, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(
            f"Completions of this task end at {stop!r}, which must be one token of the model but is {len(ids)}",
            "Use another model, or a task with chat prompts, which end at the EOS token",
        )
    return int(ids[0])


@torch.inference_mode()
def _generate(model: Any, tokenizer: Any, prompts: Sequence[Any], stop: str | None, how: Sampling) -> list[list[int]]:
    """Token ids of one completion per prompt, generated and truncated as in TRL: the end token is the last."""
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    ends |= set() if stop is None else {stop_token(stop, tokenizer)}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = [_tokens(tokenizer, prompt, how.chat_template_kwargs) for prompt in prompts]
    longest = max(map(len, tokens))
    inputs = torch.tensor([[pad] * (longest - len(x)) + x for x in tokens], device=model.device)
    mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in tokens], device=model.device)
    drawn = {"do_sample": True, "temperature": how.temperature, "top_p": 1.0, "top_k": 0}
    with gqa_decoding():
        output = model.generate(
            input_ids=inputs, attention_mask=mask, max_new_tokens=how.max_completion_length, pad_token_id=pad,
            eos_token_id=sorted(ends), repetition_penalty=1.0, disable_compile=True,
            **(drawn if how.temperature else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
        )  # fmt: skip
    return [_cut(ids, ends) for ids in output[:, longest:].tolist()]


def _tokens(tokenizer: Any, prompt: Any, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise InputError("The task has chat prompts, but the model has no chat template", "Use an instruct model")
    made = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )
    return list(made["input_ids"])


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    last = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]


def _judge(
    rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], completions: Sequence[Any], ids: list[list[int]]
) -> list[bool]:
    """Whether each completion is right."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    given = {"prompts": [row["prompt"] for row in rows], "completions": completions, "completion_ids": ids, **columns}
    table = checked_rewards(rewards, **given)
    values = [next((x for x in row if x is not None), 0.0) for row in zip(*table, strict=True)]
    for value in values:
        if not 0 <= value <= 1 + 1e-6:
            raise InputError(
                f"`troll eval` needs rewards from 0 (wrong) to 1 (right), got {value:g}",
                "Pass such a function with --reward",
            )
    return [value >= _FULL for value in values]


def _difficulty(problems: Dataset) -> list[float] | None:
    if "difficulty" not in problems.column_names:
        return None
    values = list(problems["difficulty"])
    known = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    return [float(x) for x in values] if known else None


def _groups(difficulty: Sequence[float]) -> dict[str, list[int]]:
    """Indices of the problems by difficulty: one group per value, or groups of similar size for many values."""
    distinct = sorted(set(difficulty))
    if len(distinct) <= _GROUPS:
        bounds = [(x, x) for x in distinct]
    else:
        ordered = sorted(difficulty)
        starts = sorted({ordered[len(ordered) * i // _GROUPS] for i in range(_GROUPS)})
        ends = [max(x for x in distinct if x < start) for start in starts[1:]]
        bounds = list(zip(starts, [*ends, distinct[-1]], strict=True))
    return {
        f"{low:g}" if low == high else f"{low:g} to {high:g}": [i for i, x in enumerate(difficulty) if low <= x <= high]
        for low, high in bounds
    }


def _split(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[i : i + size] for i in range(0, len(values), size))
