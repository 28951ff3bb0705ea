"""Problem sets with a final answer (GSM8K, MATH) and with tests (MBPP, HumanEval, other programs).

Each set has a parser from its records to a problem with a chat prompt, and default sources on the hub. ``--data``
replaces the source. An answer in GSM8K is a number. An answer in MATH is any expression
(``troll.rewards.mathematics``). Programs are run in a sandbox.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troll.errors import InputError
from troll.lab.tasks import data
from troll.lab.tasks.data import DataSource, Record, field, read_problems, split, to_dataset
from troll.lab.tasks.task import Request, Reward, Task
from troll.rewards.answers import boxed, expression, final_number, text_of
from troll.rewards.code import CodeReward, code_of
from troll.rewards.judge import SECONDS
from troll.rewards.latex import number
from troll.rewards.mathematics import MathReward
from troll.rewards.problems import Stream, read_problem
from troll.rewards.sandbox import best

CODE_OPTIONS = {**data.OPTIONS, "partial": False, "seconds": SECONDS}


@dataclass(frozen=True)
class _ProblemSet:
    description: str
    sources: tuple[DataSource, DataSource | None] | None
    """To train on and to evaluate on; None if ``--data`` is required."""
    parse: Callable[[Record], Record]
    reward: Callable[[Mapping[str, Any]], Reward]
    """Makes the reward function from the options."""
    answer_of: Callable[[str], str | None]
    max_completion_length: int
    is_code: bool = False


def load(request: Request) -> Task:
    """The tasks ``gsm8k``, ``math``, ``mbpp``, ``humaneval`` and ``code``."""
    chosen = _SETS[request.name]
    if chosen.is_code:
        best()  # raises if there is no sandbox
    if chosen.sources is None and request.data is None:
        raise InputError(
            f"--task {request.name} needs --data", "Pass a file or a dataset on the hub, e.g. --data problems.jsonl"
        )
    defaults = CODE_OPTIONS if chosen.is_code else data.OPTIONS
    options = request.choose(defaults)
    if chosen.is_code and not options["seconds"] > 0:
        raise InputError(f"seconds must be > 0, got {options['seconds']}", f"The default is {SECONDS:g}")
    train, held_out = split(request, *read_problems(request, chosen.parse, chosen.sources, defaults))
    reward = chosen.reward(options)
    if isinstance(reward, MathReward):
        _check_answers([*train, *held_out], reward)
    return Task(
        name=request.name,
        description=f"{chosen.description}, {request.data or chosen.sources[0].name}",  # type: ignore[index]
        train_dataset=to_dataset(train),
        eval_dataset=to_dataset(held_out),
        reward_funcs=[reward],
        answer_of=chosen.answer_of,
        settings={"max_completion_length": chosen.max_completion_length},
    )


def same_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the right final number, 0 for a wrong or missing one."""
    return [float(final_number(text_of(c)) == right) for c, right in zip(completions, answer, strict=True)]


def _check_answers(problems: Sequence[Record], reward: MathReward) -> None:
    """Warn of reference answers that are not parsable as mathematics and are compared as text; raise if all are."""
    readable = reward.readable([problem.row["answer"] for problem in problems])
    rest = [problem for problem, fine in zip(problems, readable, strict=True) if not fine]
    if len(rest) == len(problems):
        raise InputError(
            f"{rest[0].origin}: the answer {rest[0].row['answer']!r:.80} is not a mathematical expression, "
            "nor is any other answer",
            "The field 'answer' must contain the final answer alone, in LaTeX",
        )
    if rest:
        shown = "; ".join(f"{problem.origin}: {problem.row['answer']!r:.60}" for problem in rest[:3])
        warnings.warn(
            f"{len(rest)} of {len(problems)} reference answers cannot be parsed as mathematics and are compared as "
            f"text: {shown}{'; …' if len(rest) > 3 else ''}",
            stacklevel=2,
        )


def _gsm8k(record: Record) -> Record:
    question = field(record, ("question", "problem", "prompt"))
    answer = field(record, ("answer", "final_answer"), (str, int, float))
    right = number(str(answer)) or final_number(str(answer))
    if right is None:
        raise InputError(
            f"{record.origin}: the answer is not a number; it ends in {str(answer)[-60:]!r}",
            "Write a number, or text that ends in '#### number'",
        )
    steps = str(answer).count("<<")  # GSM8K marks every calculation
    extra = {"difficulty": float(steps)} if steps else {}
    return _chat(record, _SHARPS, question, right, extra)


def _math(record: Record) -> Record:
    problem = field(record, ("problem", "question", "prompt"))
    if any(name in record.row for name in _ANSWERS) or "solution" not in record.row:
        right = str(field(record, _ANSWERS, (str, int, float)))
        right = boxed(right) or right
    else:
        solved = boxed(field(record, "solution"))
        if solved is None:
            raise InputError(f"{record.origin}: the solution has no \\boxed{{…}}", "Add a field 'answer'")
        right = solved
    level = re.search(r"\d+(\.\d+)?", str(record.row.get("difficulty", record.row.get("level", ""))))
    return _chat(record, _BOX, problem, right, {"difficulty": float(level[0])} if level else {})


def _chat(record: Record, system: str, question: str, answer: str, extra: dict[str, float]) -> Record:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Record({"prompt": messages, "answer": answer, **extra}, record.origin)


_ANSWERS = ("answer", "final_answer", "expected_answer")
_SHARPS = (
    "Solve the problem step by step. End with a line that has #### and the final answer as a plain number, "
    "for example: #### 42"
)
_BOX = "Solve the problem step by step. Put the final answer in \\boxed{}."


def _mbpp(record: Record) -> Record:
    text = field(record, ("text", "prompt"))
    tests = field(record, "test_list", (list,))
    setup, after = "\n".join(record.row.get("test_imports") or []), record.row.get("test_setup_code") or ""
    question = f"{text}\nReply with the Python code in one block. It has to pass tests such as this one:\n{tests[0]}"
    return _program(record, question, tests, setup, after)


def _humaneval(record: Record) -> Record:
    start, name, test = (field(record, key) for key in ("prompt", "entry_point", "test"))
    for code in (start, test):
        _program(record, "", [code])  # raises if it cannot be parsed
    question = f"Complete this function. Reply with all of its Python code in one block.\n```python\n{start}```"
    helpers = _without_function(start, name)
    return _program(record, question, _asserts(test, name), helpers, given=helpers)


def _code(record: Record) -> Record:
    prompt = field(record, ("prompt", "question", "problem", "text"), (str, list))
    tests = field(record, ("tests", "input_output", "test_list"), (str, list, dict))
    tests = tests if isinstance(tests, str) else json.dumps(tests)  # one type for the column
    setup, prepare, given = (record.row.get(name) or "" for name in ("setup", "prepare", "given"))
    if isinstance(prompt, list):
        return _program(record, prompt, tests, setup, prepare, given)
    question = f"{prompt}\nReply with the Python code in one block."
    return _program(record, question, tests, setup, prepare, given, mention_stdin=True)


def _asserts(source: str, name: str) -> list[str]:
    """The asserts in HumanEval's ``check(candidate)``, or the complete code if it contains more than asserts."""
    complete = [f"{source}\ncheck({name})"]
    bodies = [
        node.body for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "check"
    ]
    if len(bodies) != 1:
        return complete
    asserts = [node for node in bodies[0] if isinstance(node, ast.Assert)]
    rest = [node for node in bodies[0] if not isinstance(node, ast.Assert | ast.Pass)]
    if not asserts or any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in rest):
        return complete
    for node in asserts:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == "candidate":
                inner.id = name
    return [ast.unparse(node) for node in asserts if not isinstance(node.test, ast.Constant)] or complete


def _without_function(source: str, name: str) -> str:
    """The code without the function of this name: imports and helpers remain."""
    body = [node for node in ast.parse(source).body if getattr(node, "name", None) != name]
    return "\n".join(map(ast.unparse, body))


def _program(
    record: Record,
    question: Any,
    tests: Any,
    setup: str = "",
    prepare: str = "",
    given: str = "",
    mention_stdin: bool = False,
) -> Record:
    """A programming problem. Raises, with the origin of the record, if its tests cannot be judged."""
    try:
        problem = read_problem(tests, setup, prepare, given)
    except InputError as error:
        raise InputError(f"{record.origin}: {error.problem}", error.fix) from error
    if mention_stdin and isinstance(problem.cases[0], Stream):
        question += " It reads standard input and prints the answer."
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    row = {"prompt": messages, "tests": tests, "setup": setup, "prepare": prepare, "given": given}
    return Record(row, record.origin)


def _code_reward(options: Mapping[str, Any]) -> Reward:
    return CodeReward(partial=options["partial"], seconds=options["seconds"])


_GSM8K, _MBPP, _HUMANEVAL = "openai/gsm8k", "google-research-datasets/mbpp", "openai/openai_humaneval"
_SETS = {
    "gsm8k": _ProblemSet(
        "grade-school word problems",
        (DataSource(_GSM8K, "train", "main"), DataSource(_GSM8K, "test", "main")),
        _gsm8k,
        lambda _: same_number,
        final_number,
        512,
    ),
    "math": _ProblemSet(
        "competition mathematics",
        (DataSource("DigitalLearningGmbH/MATH-lighteval"), DataSource("HuggingFaceH4/MATH-500", "test")),
        _math,
        lambda _: MathReward(),
        expression,
        1024,
    ),
    "mbpp": _ProblemSet(
        "short Python functions",
        (DataSource(_MBPP, "train", "full"), DataSource(_MBPP, "test", "full")),
        _mbpp,
        _code_reward,
        code_of,
        512,
        is_code=True,
    ),
    "humaneval": _ProblemSet(
        "Python functions from their docstring",
        (DataSource(_HUMANEVAL, "test"), None),
        _humaneval,
        _code_reward,
        code_of,
        512,
        is_code=True,
    ),
    "code": _ProblemSet("programs", None, _code, _code_reward, code_of, 1024, is_code=True),
}
