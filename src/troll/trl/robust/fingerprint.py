"""The fingerprint of a run: versions, settings, model, rewards and data. Resume is refused if it has changed.

A checkpoint stores the fingerprint: versions of packages (not their source files), settings, the size of the model, the
files of reward functions, and rows, columns and the first rows of the data. Settings that cannot affect an update
(``FREE``) are left out. Settings of earlier versions are translated (``translate_settings``).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import troll
from troll.errors import InputError

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "vllm")
_ROWS = 32  # of the dataset whose text is hashed

# ---------------------------------------------------------------------- the fingerprint of a trainer


def fingerprint(trainer: Any) -> dict[str, Any]:
    """Fingerprint of a ``TROLLTrainer``, for JSON.

    Nothing in it depends on the working directory, the time, or the number of threads.
    """
    return {
        "settings": settings(trainer.args),
        "processes": trainer.accelerator.num_processes,
        "model": _model(trainer.model),
        "rewards": _rewards(trainer),
        "data": {"train": _data(trainer.train_dataset), "held_out": _data(trainer.eval_dataset)},
        "versions": versions(),
    }


def settings(args: Any) -> dict[str, Any]:
    """The settings that can affect an update."""
    return {name: _plain(value) for name, value in args.to_dict().items() if affects_training(name)}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, troll and the installed ones of ``packages``, by default those that an update depends on."""
    found = {"python": platform.python_version(), "troll": troll.__version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _model(model: Any) -> dict[str, Any]:
    """Class and sizes; the parameters themselves come from the checkpoint."""
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__.removeprefix("FSDP"),  # the prefix of fully_shard
        "parameters": sum(x.numel() for x in parameters),
        "trained": sum(x.numel() for x in parameters if x.requires_grad),
    }


def _rewards(trainer: Any) -> dict[str, Any]:
    """Name of each reward function → hash of its code; of a reward model, its name."""
    found: dict[str, Any] = {}
    for name, reward in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        model: Any = getattr(reward, "config", None)
        found[name] = str(model._name_or_path) if hasattr(model, "_name_or_path") else code_hash(reward)
    return found


def code_hash(reward: Any) -> str:
    """Hash of the file of a reward function; of the function alone if the file is the training script.

    The name instead if there is no source file, and for rewards of this package, which have its version.
    """
    function = inspect.unwrap(reward if inspect.isroutine(reward) else getattr(reward, "func", type(reward)))
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    try:
        if getattr(function, "__module__", None) == "__main__":
            return _hash(inspect.getsource(function).encode())
        file = Path(inspect.getfile(function)).resolve()
        ours = file.is_relative_to(Path(troll.__file__).resolve().parent)
        return f"{_OURS}{name}" if ours else _hash(file.read_bytes())
    except (OSError, TypeError):
        return name


_OURS = "troll:"


def _data(data: Any) -> Any:
    """Rows, columns, and a hash of the first rows; for streamed data the columns alone."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {name: _data(part) for name, part in data.items()}
    columns = getattr(data, "column_names", None)
    if not hasattr(data, "__len__"):
        return {"columns": columns}
    plain = data.with_format(None) if hasattr(data, "with_format") else data  # without a transform, may be random
    rows = [plain[i] for i in range(min(_ROWS, len(data)))]
    text = json.dumps(_plain(rows), sort_keys=True)
    return {"rows": len(data), "columns": columns, "first_rows": _hash(text.encode())}


def _plain(value: Any) -> Any:
    """The value for JSON; the type's name of anything but text, numbers and containers of these."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | type(None)) else f"<{type(value).__name__}>"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# ---------------------------------------------------------------------- which settings affect training

FREE = {
    # where the run writes, and what it logs
    *("output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level", "log_level_replica"),
    *("log_on_each_node", "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
    *("log_completions_hub_repo", "push_to_hub", "skip_memory_metrics", "include_num_input_tokens_seen", "debug"),
    # which checkpoints it keeps, and how it is resumed
    *("overwrite_output_dir", "resume_from_checkpoint", "restore_callback_states_from_checkpoint"),
    *("enable_jit_checkpoint", "allow_changes", "keep_checkpoints", "max_skipped_updates"),
    *("do_train", "do_eval", "do_predict"),
    "eval_on_start",  # happens only once
    "preset",  # its values are settings of their own
    # speed of data loading, time-outs
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "dataset_num_proc", "ddp_timeout", "local_rank", "torch_empty_cache_steps"),
    *("vllm_group_port", "vllm_gpu_memory_utilization"),
    # after training
    *("save_model", "write_report", "runs_dir", "resume", "config", "dry_run"),
}
"""Settings that cannot change what an update does."""
FREE_PREFIXES = ("logging_", "save_", "hub_", "push_to_hub_", "trackio_", "wandb_", "vllm_server_")
LENGTH = ("max_steps", "num_train_epochs")
"""The length of a run. It affects every update if the learning rate follows a schedule, else only the end."""
_CONSTANT = ("constant", "constant_with_warmup")


def affects_training(setting: str, length: bool = True) -> bool:
    """Whether a setting can affect training; ``length``: whether the length of the run does."""
    if setting in LENGTH:
        return length
    return setting not in FREE and not setting.startswith(FREE_PREFIXES)


# ---------------------------------------------------------------------- differences

_ABSENT = "absent"
_SHOWN = 12


def differences(before: Mapping[str, Any], after: Mapping[str, Any], everything: bool = False) -> list[str]:
    """Differences between two fingerprints or settings, one line each: ``name: before → after``.

    Both are nested mappings. Only differences that can affect training are listed, unless ``everything`` is True.

    >>> differences({"settings": {"learning_rate": 5e-6, "save_steps": 8}}, {"settings": {"learning_rate": 1e-4}})
    ['learning_rate: 5e-06 → 0.0001']
    """
    old, new = dict(_flat(before)), dict(_flat(after))
    length = _length_matters(old) or _length_matters(new)
    changed = [path for path in [*old, *(x for x in new if x not in old)] if not _same(old, new, path)]
    return [
        f"{_name(path)}: {_shown(old, path)} → {_shown(new, path)}"
        for path in changed
        if everything or affects_training(path[-1], length)
    ]


def refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any], allow: bool = False) -> list[str]:
    """Raise if something that affects training has changed; with ``allow``, return the changes."""
    changes = differences(before, after)
    if not allow:
        refuse(changes)
    return changes


def refuse(changes: Sequence[str]) -> None:
    """Raise if there are changes."""
    if changes:
        more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        raise InputError(
            f"resume refused: the run has changed since the checkpoint ({'; '.join([*changes[:_SHOWN], *more])})",
            "Restore the earlier values, or pass --allow_changes (allow_changes=True) to resume with the changes",
        )


_Path = tuple[str, ...]


def _flat(value: Mapping[str, Any], above: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    for name, inner in value.items():
        path = (*above, str(name))
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, path)
        else:
            yield path, inner


def _same(old: Mapping[_Path, Any], new: Mapping[_Path, Any], path: _Path) -> bool:
    """None and a missing name are the same: a file may leave out unset settings."""
    return bool(_listed(old.get(path)) == _listed(new.get(path)))


def _listed(value: Any) -> Any:
    """As JSON returns it: tuples become lists."""
    return [_listed(x) for x in value] if isinstance(value, list | tuple) else value


def _length_matters(flat: Mapping[_Path, Any]) -> bool:
    """Whether the learning rate of an update depends on the number of updates; False if the schedule is unknown."""
    by_name = {path[-1]: value for path, value in flat.items()}
    if by_name.get("lr_scheduler_type", _CONSTANT[0]) not in _CONSTANT:
        return True
    shares = [by_name.get("warmup_ratio") or 0.0, by_name.get("warmup_steps") or 0.0]
    return any(0 < share < 1 for share in shares)


def _name(path: _Path) -> str:
    """Settings by name, everything else by its full path."""
    return ".".join(path[1:] if path[0] == "settings" and len(path) > 1 else path)


def _shown(flat: Mapping[_Path, Any], path: _Path) -> str:
    text = _ABSENT if flat.get(path) is None else str(flat[path])
    return text if len(text) <= 80 else f"{text[:77]}…"


# ---------------------------------------------------------------------- fingerprints in checkpoints


def stored_fingerprint(about: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint in a checkpoint's ``troll.json``, of this version or translated from 0.1.0.

    0.1.0 also hashed the source files of troll; they are not compared. ``present`` is the fingerprint of the run.
    """
    if "fingerprint" in about:
        return dict(about["fingerprint"])
    try:
        stored = {name: value for name, value in about["identity"].items() if name != "code"}
        stored["settings"] = translate_settings(stored["settings"])
        ours = {name for name, code in present.get("rewards", {}).items() if str(code).startswith(_OURS)}
        stored["rewards"] = {
            name: present["rewards"][name] if name in ours else code for name, code in stored["rewards"].items()
        }
    except (KeyError, AttributeError, TypeError):
        raise InputError(
            "the checkpoint has no fingerprint that this version of troll can read",
            "Resume with the version that wrote it, or start a new run from the checkpoint's model",
        ) from None
    return stored


# ---------------------------------------------------------------------- settings of troll 0.1.0 by their present names

_Settings = Mapping[str, Any]


def _bound_schedule(old: _Settings) -> str | None:
    """``kl_bound_schedule`` of the former fields bound, bound_end, bound_rollouts, …"""
    kind = old.get("bound") or "fixed"
    values = {
        "schedule": {"end": old.get("bound_end"), "rollouts": old.get("bound_rollouts")},
        "projected": {"target": old.get("bound_target")},
        "network": {"target": old.get("bound_target")},
        "entropy": {"max": old.get("bound_highest")},
        "sequence": {"limit": old.get("sequence_kl_bound"), "by_prefix": old.get("sequence_by_prefix") or None},
    }
    if kind not in values:
        return None
    word = old.get("bound_curve") or "geometric" if kind == "schedule" else kind
    return schedule_text(word, values[kind])


def schedule_text(kind: str, values: Mapping[str, Any]) -> str:
    """A schedule in one line, as the settings have it: ``"geometric end=0.01 rollouts=50"``. None is left out."""
    words = [f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in values.items() if x is not None]
    return " ".join([kind, *words])


RENAMED_SETTINGS: dict[str, tuple[tuple[str, ...], Callable[[_Settings], Any]]] = {
    "kl_bound_schedule": (
        (
            *("bound", "bound_target", "bound_end", "bound_rollouts", "bound_curve", "bound_highest"),
            *("sequence_kl_bound", "sequence_by_prefix"),
        ),
        _bound_schedule,
    ),
    "regression_coef_schedule": (
        ("regression_tolerance",),
        lambda old: (
            None
            if old["regression_tolerance"] is None
            else schedule_text("projected", {"target": old["regression_tolerance"]})
        ),
    ),
    "on_invalid_reward": (
        ("reward_errors",),
        lambda old: {"stop": "raise"}.get(old["reward_errors"], old["reward_errors"]),
    ),
    "eval_size": (("held_out_size",), lambda old: old["held_out_size"]),
    "allow_unsandboxed_code": (
        ("dangerously_run_code_unsandboxed",),
        lambda old: old["dangerously_run_code_unsandboxed"],
    ),
}
"""New name → the former names it replaces, and its value as a function of the former settings."""


def translate_settings(old: _Settings) -> dict[str, Any]:
    """Settings of an earlier version (of a run's ``run.json`` or ``config.yaml``, or a checkpoint) by present names.

    >>> translate_settings({"bound": "projected", "bound_target": 0.03, "reward_errors": "stop", "seed": 0})
    {'seed': 0, 'kl_bound_schedule': 'projected target=0.03', 'on_invalid_reward': 'raise'}
    """
    former = {name for names, _ in RENAMED_SETTINGS.values() for name in names}
    new = {name: value for name, value in old.items() if name not in former}
    for name, (names, value) in RENAMED_SETTINGS.items():
        if new.get(name) is None and names[0] in old:
            new[name] = value(old)
    return new


def bound_kind(settings: _Settings) -> str:
    """Kind of the bound in a run's settings, of any version: ``fixed``, or the kind of its schedule."""
    schedule = translate_settings(settings).get("kl_bound_schedule")
    return schedule.split()[0] if schedule else "fixed"
