"""The shorter problems of GSM8K, with two worked examples in its own terse style: 65 tokens an answer instead of 250.

The problems come from the hub (``openai/gsm8k``), or from the folder in the variable GSM8K, with train.jsonl and
test.jsonl in it.
"""

import json
import os
import re
from pathlib import Path

from troll.rewards.answers import final_number

settings = {"max_completion_length": 128}
SHOTS = 2
QUESTION, ANSWER = 200, 300
"""The most characters: prompts of one length waste nothing on padding, and 2,818 problems are left."""


def read(split):
    """Questions with their worked answers."""
    if "GSM8K" in os.environ:
        path = Path(os.environ["GSM8K"]) / f"{split}.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    from datasets import load_dataset

    return list(load_dataset("openai/gsm8k", "main", split=split))


def plain(answer):
    """A worked answer without the marks of a calculator."""
    return re.sub(r"<<.*?>>", "", answer)


def turn(row):
    """A question and its answer."""
    question, answer = row["question"], plain(row["answer"])
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def short(row):
    """Whether neither the question nor the worked answer is long."""
    return len(row["question"]) <= QUESTION and len(plain(row["answer"])) <= ANSWER


def problem(row):
    """The examples, then the question."""
    steps = float(row["answer"].count("<<"))
    asked = [*examples, {"role": "user", "content": row["question"]}]
    return {"prompt": asked, "answer": final_number(row["answer"]), "difficulty": steps}


def reward(completions, answer, **columns):
    """1 for the right final number, 0 for a wrong one and for none."""
    return [float(final_number(c[-1]["content"]) == right) for c, right in zip(completions, answer, strict=True)]


rows = list(filter(short, read("train")))
examples = [message for row in rows[:SHOTS] for message in turn(row)]
train_dataset = [problem(row) for row in rows[SHOTS:]]
eval_dataset = [problem(row) for row in filter(short, read("test"))][:256]
