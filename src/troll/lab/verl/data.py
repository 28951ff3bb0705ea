"""A task as verl reads it: two parquet files, and what the reward needs to score a completion of theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import yaml

from troll.errors import InputError
from troll.lab.runs import write_json
from troll.lab.tasks import Task
from troll.lab.training.settings import RunSettings

TRAIN, HELD_OUT, TASK, STOP = "train.parquet", "held_out.parquet", "task.json", "stop.yaml"


def write_task(task: Task, request: Mapping[str, Any], folder: Path) -> None:
    """The problems as ``train.parquet`` and ``held_out.parquet``, and the request that makes the task again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems, split in ((TRAIN, task.train_dataset, "train"), (HELD_OUT, task.eval_dataset, "held_out")):
        rows = [_row(task.name, row, index, split) for index, row in enumerate(problems)]
        datasets.Dataset.from_list(rows).to_parquet(str(folder / name))
    write_json(folder / TASK, request)


def write_stop(path: Path, token: int) -> None:
    """The file that makes completions end at a token: verl's ``agent_loop_config_path``."""
    loop = {"name": "troll_stop", "_target_": "troll.lab.verl.stop_token_loop.StopTokenAgentLoop", "stop": token}
    path.write_text(yaml.safe_dump([loop], sort_keys=False), encoding="utf-8")


def _row(source: str, row: Mapping[str, Any], index: int, split: str) -> dict[str, Any]:
    """One problem. The columns that rewards take are JSON, since parquet would make their types alike."""
    try:
        columns = json.dumps(dict(row), ensure_ascii=False)
    except TypeError as error:
        raise InputError(
            f"{split}[{index}] ({error})", "columns of text, numbers and lists", "writing it so"
        ) from error
    return {
        "data_source": source.replace("/", "-"),
        "prompt": [{"role": message["role"], "content": message["content"]} for message in _messages(row["prompt"])],
        "reward_model": {"style": "rule", "ground_truth": columns},
        "extra_info": {"index": index, "split": split},
    }


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as a chat; plain text is one message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not all(isinstance(message["content"], str) for message in prompt):
        raise InputError(f"the prompt {prompt!r:.80}", "text alone with --engine verl", "--engine trl")
    return list(prompt)


def request_of(
    settings: RunSettings, options: Mapping[str, Any], seed: int, weights: Sequence[float] | None
) -> dict[str, Any]:
    """What ``troll.lab.tasks.load_task`` was asked, with paths that hold in any working directory, and the weights."""
    return {
        "task": {
            "name": _anywhere(settings.task) if settings.task.endswith(".py") else settings.task,
            "data": _anywhere(settings.data),
            "eval_data": _anywhere(settings.eval_data),
            "options": dict(options),
            "reward": [f"{_anywhere(place)}:{name}" for place, _, name in (x.rpartition(":") for x in settings.reward)],
            "train_size": settings.train_size,
            "eval_size": settings.eval_size,
            "seed": seed,
        },
        "weights": weights,
        "unsandboxed": settings.allow_unsandboxed_code,
    }


def _anywhere(name: str | None) -> str | None:
    """A path from the root, where the name is that of a file."""
    return str(Path(name).absolute()) if name is not None and Path(name).exists() else name


def plain_template(task: Task, tokenizer: Any) -> str | None:
    """For prompts of plain text: a chat template that gives the text as it is, tokenized as TRL does it.

    verl renders every prompt with a chat template. A prompt here is one message, so its text alone, after whatever the
    tokenizer puts in front of plain text, is what TRL generates from.
    """
    plain = [isinstance(row["prompt"], str) for data in (task.train_dataset, task.eval_dataset) for row in data]
    if not any(plain):
        return None
    if not all(plain):
        raise InputError("a task with plain prompts and chat prompts", "one kind of prompt", "making them alike")
    before = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    return ("{{ bos_token }}" if before else "") + "{% for message in messages %}{{ message.content }}{% endfor %}"


def longest_prompt(task: Task, tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> int:
    """In tokens, of all problems."""
    prompts = [row["prompt"] for data in (task.train_dataset, task.eval_dataset) for row in data]
    if template is None and tokenizer.chat_template is None:
        raise InputError(
            "chat prompts for a model without a chat template",
            "a model that was made for chats",
            "its -Instruct version; or a task with plain prompts",
        )
    tokens = tokenizer.apply_chat_template(
        [_messages(prompt) for prompt in prompts],
        chat_template=template or tokenizer.chat_template,
        add_generation_prompt=True,
        return_dict=True,
        **options,
    )
    return max(map(len, tokens["input_ids"]))
