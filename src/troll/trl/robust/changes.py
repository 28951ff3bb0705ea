"""What has changed since a run began: told apart by whether it can change the course of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troll.errors import InputError

FREE = {
    # where it writes and what it says
    *("output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level", "log_level_replica"),
    *("log_on_each_node", "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
    *("log_completions_hub_repo", "push_to_hub", "skip_memory_metrics", "include_num_input_tokens_seen", "debug"),
    # which checkpoints it keeps, and how it was told to go on
    *("overwrite_output_dir", "resume_from_checkpoint", "restore_callback_states_from_checkpoint"),
    *(
        "enable_jit_checkpoint",
        "allow_changes",
        "keep_checkpoints",
        "max_skipped_updates",
        "do_train",
        "do_eval",
        "do_predict",
    ),
    "eval_on_start",  # over and done with
    # how fast it reads, and how long it waits
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "dataset_num_proc", "ddp_timeout", "local_rank", "torch_empty_cache_steps"),
    *("vllm_group_port", "vllm_gpu_memory_utilization"),
    # what is done with the model at the end
    *("save_model", "write_report", "runs_dir", "resume", "config", "dry_run"),
}
"""Settings that cannot change what an update does, by name."""
FREE_BEGINNINGS = ("logging_", "save_", "hub_", "push_to_hub_", "trackio_", "wandb_", "vllm_server_")
LENGTH = ("max_steps", "num_train_epochs")
"""How long a run is: it decides the learning rate of every update if that follows a schedule, else only the end."""
_CONSTANT = ("constant", "constant_with_warmup")
_ABSENT = "absent"
_SHOWN = 12


def differences(before: Mapping[str, Any], after: Mapping[str, Any], everything: bool = False) -> list[str]:
    """What differs between two descriptions of a run, a line each, ``name: before → after``.

    Both are mappings, nested at will; settings are known by their own name wherever they stand. Only what can change
    the course of the run is listed, unless everything is asked for.

    >>> differences({"settings": {"learning_rate": 5e-6, "save_steps": 8}}, {"settings": {"learning_rate": 1e-4}})
    ['learning_rate: 5e-06 → 0.0001']
    """
    old, new = dict(_flat(before)), dict(_flat(after))
    length_decides = _length_decides(old) or _length_decides(new)
    changed = [path for path in [*old, *(x for x in new if x not in old)] if not _same(old, new, path)]
    return [
        f"{_name(path)}: {_shown(old, path)} → {_shown(new, path)}"
        for path in changed
        if everything or decides(path[-1], length_decides)
    ]


def decides(setting: str, length: bool = True) -> bool:
    """Whether a setting can change the course of a run; its length can if the learning rate depends on it."""
    if setting in LENGTH:
        return length
    return setting not in FREE and not setting.startswith(FREE_BEGINNINGS)


def refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any], allow: bool = False) -> list[str]:
    """Raise if a run would go on as another one; where changes are allowed, return them."""
    found = differences(before, after)
    if not allow:
        refuse(found)
    return found


def refuse(found: Sequence[str]) -> None:
    """Raise if there are differences."""
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise InputError(
            f"a run to go on with that would not be the same ({'; '.join([*found[:_SHOWN], *more])})",
            "the settings, code and data it had",
            "what it had; or --allow_changes (allow_changes=True) to go on all the same",
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
    """None and nothing at all are the same: a file may leave out what is not set."""
    return bool(_plain(old.get(path)) == _plain(new.get(path)))


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples become lists."""
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _length_decides(flat: Mapping[_Path, Any]) -> bool:
    """Whether the learning rate of an update depends on how many there are; not known of a part of the settings."""
    settings = {path[-1]: value for path, value in flat.items()}
    if settings.get("lr_scheduler_type", _CONSTANT[0]) not in _CONSTANT:
        return True
    shares = [settings.get("warmup_ratio") or 0.0, settings.get("warmup_steps") or 0.0]
    return any(0 < share < 1 for share in shares)


def _name(path: _Path) -> str:
    """Settings by their own name, everything else with the place it stands in."""
    return ".".join(path[1:] if path[0] == "settings" and len(path) > 1 else path)


def _shown(flat: Mapping[_Path, Any], path: _Path) -> str:
    text = _ABSENT if flat.get(path) is None else str(flat[path])
    return text if len(text) <= 80 else f"{text[:77]}…"
