"""A task in the form that verl reads: two parquet files, and its rewards as verl's ``custom_reward_function``.

``write_task`` runs before verl starts. ``score`` runs in verl's reward workers, which make the task again from the
request in ``task.json``.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import yaml

from troll.errors import InputError
from troll.lab.runs import write_json
from troll.lab.tasks import Task, load_task
from troll.rewards.workers import PoolError
from troll.trl.robust.reward_validation import checked_rewards

if TYPE_CHECKING:
    from troll.lab.training.settings import RunSettings

TRAIN, HELD_OUT, TASK, STOP = "train.parquet", "held_out.parquet", "task.json", "stop.yaml"


def write_task(task: Task, request: Mapping[str, Any], folder: Path) -> None:
    """Write the problems to ``train.parquet`` and ``held_out.parquet``, and the request that makes the task again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems, split in ((TRAIN, task.train_dataset, "train"), (HELD_OUT, task.eval_dataset, "held_out")):
        rows = [_row(task.name, row, index, split) for index, row in enumerate(problems)]
        datasets.Dataset.from_list(rows).to_parquet(str(folder / name))
    write_json(folder / TASK, request)


def write_stop(path: Path, token: int) -> None:
    """Write verl's ``agent_loop_config_path``: completions end at this token, too."""
    loop = {"name": "troll_stop", "_target_": "troll.lab.verl.stop_token_loop.StopTokenAgentLoop", "stop": token}
    path.write_text(yaml.safe_dump([loop], sort_keys=False), encoding="utf-8")


def _row(source: str, row: Mapping[str, Any], index: int, split: str) -> dict[str, Any]:
    """One problem. The columns for the rewards are JSON: parquet would give all rows the same types."""
    try:
        columns = json.dumps(dict(row), ensure_ascii=False)
    except TypeError as error:
        raise InputError(
            f"{split}[{index}] has a column that cannot be written as JSON ({error})",
            "Use text, numbers, lists and dictionaries",
        ) from error
    return {
        "data_source": source.replace("/", "-"),
        "prompt": [{"role": message["role"], "content": message["content"]} for message in _messages(row["prompt"])],
        "reward_model": {"style": "rule", "ground_truth": columns},
        "extra_info": {"index": index, "split": split},
    }


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as chat messages; plain text is one message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not all(isinstance(message["content"], str) for message in prompt):
        raise InputError(f"--engine verl supports text prompts only, got {prompt!r:.80}", "Use --engine trl")
    return list(prompt)


def request_of(
    settings: RunSettings, options: Mapping[str, Any], seed: int, weights: Sequence[float] | None
) -> dict[str, Any]:
    """The arguments of ``troll.lab.tasks.load_task`` with absolute paths, and the weights of the rewards."""
    return {
        "task": {
            "name": _absolute(settings.task) if settings.task.endswith(".py") else settings.task,
            "data": _absolute(settings.data),
            "eval_data": _absolute(settings.eval_data),
            "options": dict(options),
            "reward": [f"{_absolute(path)}:{name}" for path, _, name in (x.rpartition(":") for x in settings.reward)],
            "train_size": settings.train_size,
            "eval_size": settings.eval_size,
            "seed": seed,
        },
        "weights": weights,
        "unsandboxed": settings.allow_unsandboxed_code,
    }


def _absolute(name: str | None) -> str | None:
    """The absolute path if the name is that of a file, else the name."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def plain_template(task: Task, tokenizer: Any) -> str | None:
    """For plain-text prompts: a chat template that renders the text unchanged; None for chat prompts.

    verl renders every prompt with a chat template. A plain prompt is one message there. Its text, after the token that
    the tokenizer puts before plain text, gives the tokens that TRL generates from.
    """
    plain = [isinstance(row["prompt"], str) for data in (task.train_dataset, task.eval_dataset) for row in data]
    if not any(plain):
        return None
    if not all(plain):
        raise InputError("the task mixes plain-text prompts and chat prompts", "Use one kind of prompt")
    first = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    return ("{{ bos_token }}" if first else "") + "{% for message in messages %}{{ message.content }}{% endfor %}"


def longest_prompt(task: Task, tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> int:
    """Length of the longest prompt of all problems, in tokens."""
    prompts = [row["prompt"] for data in (task.train_dataset, task.eval_dataset) for row in data]
    if template is None and tokenizer.chat_template is None:
        raise InputError(
            "the task has chat prompts, and the model has no chat template",
            "Use the -Instruct version of the model, or a task with plain-text prompts",
        )
    tokens = tokenizer.apply_chat_template(
        [_messages(prompt) for prompt in prompts],
        chat_template=template or tokenizer.chat_template,
        add_generation_prompt=True,
        return_dict=True,
        **options,
    )
    return max(map(len, tokens["input_ids"]))


# ------------------------------------------------------------------ rewards, in verl's reward workers

_loading = threading.Lock()


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, task: str, **_: Any
) -> Any:
    """The reward of one completion for verl: ``score``, the weighted sum, and each reward by its name.

    Args:
        data_source, extra_info: not used; verl passes them to every reward function.
        solution_str: the completion.
        ground_truth: the columns of its problem, as ``write_task`` writes them.
        task: path of ``task.json``.

    Raises:
        PoolError: all rewards are None. verl cannot leave a completion out, and 0 would be wrong.
    """
    functions, weights = _rewards(task)
    columns = {name: [value] for name, value in json.loads(ground_truth).items()}
    (prompt,) = columns.pop("prompt")
    completion = solution_str if isinstance(prompt, str) else [{"role": "assistant", "content": solution_str}]
    values = [x for (x,) in checked_rewards(functions, prompts=[prompt], completions=[completion], **columns)]
    known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    names = [function.__name__ for function in functions]
    if not known:
        raise PoolError(
            f"all rewards of a completion are None ({', '.join(names)}), and verl cannot leave a completion out",
            "Run troll doctor if a sandbox failed, or return a number from the reward function",
        )
    each = {f"rewards/{name}": value for name, value in zip(names, values, strict=True) if value is not None}
    return {"score": sum(known), **each}


def _rewards(path: str) -> tuple[Sequence[Any], Sequence[float]]:
    with _loading:  # verl calls score from many threads
        return _loaded(path)


@functools.cache
def _loaded(path: str) -> tuple[Sequence[Any], Sequence[float]]:
    from troll.rewards.sandbox import allow_unsandboxed

    request = json.loads(Path(path).read_text(encoding="utf-8"))
    allow_unsandboxed(request["unsandboxed"])
    task: Task = load_task(**request["task"])
    return task.reward_funcs, request["weights"] or [1.0] * len(task.reward_funcs)
