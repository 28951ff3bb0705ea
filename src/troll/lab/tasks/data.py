"""Any data with a prompt column as a task, and the split of problems into those to train on and those held out."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sized
from typing import Any

from troll.errors import InputError
from troll.lab.tasks.records import Place, Record, need, read, to_dataset
from troll.lab.tasks.task import Request, Task, first_line

OPTIONS = {"skip_incomplete": False}
HELD_OUT = 200  # at most so many problems, and at most a tenth of them, where nothing is asked


def load(request: Request) -> Task:
    """The task ``data``: prompts, plain or chat, and whatever columns the rewards take."""
    if request.data is None:
        raise InputError('the task "data" without data', "a file, or a data set on the hub", "--data my.jsonl")
    train, held_out = splits(request, *sources(request, _prompt))
    return Task(
        name=request.name,
        description=f"prompts of {request.data}",
        train=to_dataset(train),
        held_out=to_dataset(held_out),
        reward_funcs=[],  # load_task has them
        answer_of=first_line,
    )


def _prompt(record: Record) -> Record:
    prompt = need(record, "prompt", (str, list))
    for message in prompt if isinstance(prompt, list) else ():
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            raise InputError(
                f"{record.place}: prompt has {message!r:.80}", "text, or messages with role and content", "that form"
            )
    return record


def sources(
    request: Request,
    problem: Callable[[Record], Record],
    usual: tuple[Place, Place | None] | None = None,
    options: Mapping[str, Any] = OPTIONS,
) -> tuple[list[Record], list[Record] | None]:
    """The problems to train on and, where they come from elsewhere, those to hold out.

    Args:
        request: its ``data`` and ``eval_data`` say where they are.
        problem: makes of a record one with a prompt, or raises.
        usual: where both are if the request does not say it.
        options: that the task has, with their defaults.
    """
    skip = request.choose(options)["skip_incomplete"]
    train, held_out = usual or (Place(""), None)
    if request.data is not None and request.data != train.source:
        train, held_out = Place(request.data), None
    if request.eval_data is not None and (held_out is None or request.eval_data != held_out.source):
        held_out = Place(request.eval_data, "test")
    return (
        _complete(read(*train), problem, skip),
        None if held_out is None else _complete(read(*held_out), problem, skip),
    )


def _complete(records: list[Record], problem: Callable[[Record], Record], skip: bool) -> list[Record]:
    """The problems the records hold; an incomplete one is an error, or left out where that was asked for."""
    complete = []
    for record in records:
        try:
            complete.append(problem(record))
        except InputError as error:
            if not skip:
                hint = f"{error.hint}; or the option skip_incomplete=true, to leave such records out"
                raise InputError(error.given, error.expected, hint) from error
            failure = error
    if not complete:
        raise failure
    return complete


def splits(request: Request, train: list[Record], held_out: list[Record] | None) -> tuple[list[Record], list[Record]]:
    """The problems to train on and those to hold out, of the sizes asked for, with no problem on both sides.

    The held-out ones are chosen by a hash of their prompt, so they do not depend on the seed, nor on the order of the
    file. Problems to train on are chosen by the seed.
    """
    source = request.data or request.name
    if held_out is None:
        unique = list({_key(record): record for record in reversed(train)}.values())
        size = request.held_out_size or min(HELD_OUT, max(1, len(unique) // 10))
        if size >= len(unique):
            raise InputError(
                f"held_out_size={size}; {source} has {len(unique)} different problems",
                "fewer, so that some are left to train on",
                f"held_out_size={max(1, len(unique) // 10)}; or more problems; or --eval_data",
            )
        held_out = sorted(unique, key=_key)[:size]
    elif request.held_out_size is not None:
        enough(held_out, request.held_out_size, "held_out_size", request.eval_data or source)
        held_out = sorted(held_out, key=_key)[: request.held_out_size]
    apart = {_key(record) for record in held_out}
    left = [record for record in train if _key(record) not in apart]
    if not left:
        raise InputError(f"{source}, all of which is held out", "problems to train on as well", "other held-out ones")
    if request.train_size is not None:
        enough(left, request.train_size, "train_size", source)
        left = random.Random(f"data {request.seed}").sample(left, request.train_size)
    return left, held_out


def _key(record: Record) -> str:
    return hashlib.sha256(json.dumps(record.row["prompt"], sort_keys=True, default=str).encode()).hexdigest()


def enough(problems: Sized, size: int, name: str, source: str) -> None:
    """Refuse to take more problems than there are."""
    if size > len(problems):
        there = f"{name}={len(problems)}"
        raise InputError(f"{name}={size}; {source} has {len(problems)} problems", "no more than there are", there)
