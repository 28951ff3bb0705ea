"""Checks at construction, before a model is loaded: types of settings, datasets and their columns."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from datasets import Dataset, IterableDataset
from trl import GRPOTrainer

from troll.errors import InputError

# ---------------------------------------------------------------------- types of settings

_Kinds = dict[type | None, str]
"""The classes that a value may have, and their names in a message; None if it may be None."""
_CLASSES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool, np.bool_), "True or False"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str, os.PathLike), "a string"),
    dict: ((Mapping,), "a dictionary"),
    list: ((list, tuple), "a list"),
}
_LOOSE = ("scale_rewards", "fsdp", "kl_bound_schedule", "regression_coef_schedule")
"""The first two are declared as strings, and TRL and transformers take more; the others have a check of their own."""
_OR_NONE = ("max_grad_norm", "top_k", "top_p", "repetition_penalty")
"""Declared as numbers; None turns them off."""


def check_types(settings: Any) -> None:
    """Refuse values of another type than the field's, such as ``num_generations="8"``."""
    for entry in fields(settings):
        kinds = _field_kinds(settings.__class__).get(entry.name)
        name, value = entry.name, getattr(settings, entry.name)
        if kinds is None or (value is None and (None in kinds or entry.default is None or name in _OR_NONE)):
            continue
        expected = " or ".join(dict.fromkeys(kinds[kind] for kind in kinds if kind is not None))
        if value is None and (Integral in kinds or Real in kinds):
            raise InputError(f"{name} must be {expected}, got None", f"The default is {entry.default!r}")
        known = tuple(kind for kind in kinds if kind is not None)
        is_number = isinstance(value, bool) and bool not in kinds  # to Python, True is a whole number
        if value is not None and (is_number or not isinstance(value, known)):
            meant = _meant(value, kinds)
            raise InputError(
                f"{name} must be {expected}, got the {type(value).__name__} {value!r}",
                f"Pass {expected}" if meant is None else f"Write {name}={meant!r}",
            )


@cache
def _field_kinds(config: Any) -> dict[str, _Kinds]:
    """The classes of the values of each field; fields with other types than ``_CLASSES`` and enums are left out."""
    hints = get_type_hints(config)
    found: dict[str, _Kinds] = {}
    for entry in fields(config):
        kinds: _Kinds = {}
        hint = hints[entry.name]
        union = get_origin(hint) in (Union, types.UnionType)
        for member in get_args(hint) if union else (hint,):
            base = get_origin(member) or member
            if base in _CLASSES:
                classes, words = _CLASSES[base]
                kinds |= dict.fromkeys(classes, words)
            elif isinstance(base, type) and issubclass(base, Enum):
                kinds[base] = "a string"
            elif base is types.NoneType:
                kinds[None] = "None"
            else:
                break
        else:
            if entry.name not in _LOOSE:
                found[entry.name] = kinds
    return found


def _meant(value: Any, kinds: _Kinds) -> Any:
    """The value of the right type that was probably meant, None if it is not obvious."""
    if isinstance(value, str) and bool in kinds and value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind, convert in ((Integral, int), (Real, float)):
        if kind in kinds and (isinstance(value, str) or (isinstance(value, float) and value.is_integer())):
            try:
                return convert(value)
            except ValueError:
                continue
    return None


# ---------------------------------------------------------------------- datasets

_PROMPT_COLUMNS = (
    *("question", "problem", "query", "instruction", "input", "text", "prompts", "messages", "conversations"),
)


def check_datasets(*args: Any, **kwargs: Any) -> None:
    """Refuse datasets that TRL cannot train on, given the arguments of a trainer."""
    given = inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments
    train, evaluation = given.get("train_dataset"), given.get("eval_dataset")
    if train is None and given.get("environment_factory") is None:
        raise InputError("train_dataset is missing", "Pass a datasets.Dataset with a column 'prompt'")
    _check_dataset("train_dataset", train)
    if isinstance(evaluation, dict):
        for name, part in evaluation.items():
            _check_dataset(f"eval_dataset[{name!r}]", part)
    else:
        _check_dataset("eval_dataset", evaluation)


def _check_dataset(name: str, dataset: Any) -> None:
    if dataset is None:
        return
    if not isinstance(dataset, Dataset | IterableDataset):
        raise InputError(
            f"{name} must be a Dataset or an IterableDataset of the library datasets, got a {type(dataset).__name__}",
            _dataset_fix(dataset),
        )
    columns = dataset.column_names
    if not isinstance(columns, list) or "prompt" in columns:  # unknown for some streamed datasets
        return
    likely = next((x for x in _PROMPT_COLUMNS if x in columns), None)
    raise InputError(
        f"{name} has no column 'prompt', its columns are {', '.join(map(repr, columns)) or 'none'}",
        f'Rename the column with the prompts, for example dataset.rename_column("{likely}", "prompt")'
        if likely
        else "Add a column 'prompt', with a string or a list of messages per row",
    )


def _dataset_fix(dataset: Any) -> str:
    if isinstance(dataset, str | os.PathLike):
        return f"Load it first, for example datasets.load_dataset({str(dataset)!r}, split='train')"
    if isinstance(dataset, Mapping):
        return f"Pass one of its parts: {', '.join(map(repr, dataset))}" if dataset else "It is empty"
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        return "Convert it with datasets.Dataset.from_list(…)"
    return "For example datasets.Dataset.from_list([{'prompt': 'What is 2 + 3?'}])"


def check_rollout_size(args: Any, dataset: Any) -> None:
    """Refuse a dataset smaller than a rollout: TRL drops incomplete rollouts and would not train at all."""
    prompts = args.generation_batch_size // args.num_generations
    if hasattr(dataset, "__len__") and len(dataset) < prompts:
        raise InputError(
            f"train_dataset has {len(dataset)} prompts, fewer than the {prompts} of one rollout "
            f"(generation_batch_size={args.generation_batch_size}, num_generations={args.num_generations})",
            "Use more prompts, a smaller per_device_train_batch_size, or fewer updates_per_generation",
        )
