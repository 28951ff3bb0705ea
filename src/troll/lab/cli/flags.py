"""The flags of ``troll train``: those of the run, of TROLL and of TRL, from the command line and from a YAML file."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool
from trl import ModelConfig

from troll.errors import InputError
from troll.lab.cli.main import PlainParser, as_words, wanted
from troll.lab.runs.folder import ABOUT, COMPARISON
from troll.lab.runs.formatting import one_line
from troll.lab.training.settings import DEFAULT_MODEL, GENERAL, SMALL, RunSettings
from troll.objective.presets import PRESETS
from troll.trl import TROLLConfig
from troll.trl.config import DEFAULT_UPDATES
from troll.trl.robust.fingerprint import translate_settings

GROUPS = {  # of --help
    "run": (*(field.name for field in dataclasses.fields(RunSettings)), "allow_changes"),
    "trust region": (
        *("trust_region", "preset", "kl_bound", "regression_coef", "tail", "advantage_estimator", "measure_kl"),
    ),
    "training, as in TRL": (
        *("learning_rate", "max_steps", "num_train_epochs", "updates_per_generation", "num_generations"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length", "temperature"),
        *("eval_steps", "save_steps", "report_to", "run_name", "seed", "bf16", "use_peft", "use_vllm"),
    ),
    "other": ("config", "help", "help_all"),
}
_HELP = {  # in place of the help of TRL and of TROLLConfig, which do not know the defaults of a run
    "kl_bound": "Radius of the trust region, in nats of KL(projected || old) per token. 0 keeps the old policy, inf "
    "constrains nothing. With kl_bound_schedule, where it starts.",
    "regression_coef": "Weight of the regression term, which pulls the network towards its projection.",
    "max_support": "Maximum number of tokens kept per position.",
    "tail_mass": "Probability that may be dropped per position.",
    "tail": "Treatment of the dropped probability: 'bucket' counts it as one more outcome, 'floor' gives every missing "
    "token 1e-12.",
    "preset": "Defaults of kl_bound, regression_coef, tail, max_support and tail_mass: ours, or those of the paper.",
    "updates_per_generation": "Optimizer updates per rollout. A trust region acts from the second one on. TRL's "
    "steps_per_generation, generation_batch_size or num_iterations can be set in its place.",
    "learning_rate": "Learning rate of AdamW.",
    "max_steps": "Number of updates. Overrides num_train_epochs.",
    "num_train_epochs": "Passes over the training problems.",
    "num_generations": "Completions per prompt, the group within which rewards are compared. Must divide the "
    "completions of a rollout.",
    "per_device_train_batch_size": "Completions per forward pass, on each GPU.",
    "gradient_accumulation_steps": "Forward passes per update.",
    "max_completion_length": "Maximum number of tokens of a completion.",
    "temperature": "Temperature of sampling.",
    "eval_steps": "Updates between evaluations on the held-out problems; a fraction of the run if below 1.",
    "save_steps": "Updates between checkpoints; a fraction of the run if below 1.",
    "report_to": "Where to log besides the run folder: trackio, wandb, tensorboard and others, or none.",
    "run_name": "Name of the run, and of its folder below --runs_dir.",
    "seed": "Seed of the training problems and of sampling.",
    "bf16": "Compute in bf16 (mixed precision) instead of fp32.",
    "use_peft": "Train a LoRA adapter instead of all parameters.",
    "use_vllm": "Generate with vLLM, which must be installed.",
}
_METAVARS = {
    **{"model": "NAME", "task": "NAME", "data": "FILE", "eval_data": "FILE", "task_options": "KEY=VALUE"},
    **{"reward": "FILE.py:FUNCTION", "runs_dir": "FOLDER", "resume": "RUN", "verl_overrides": "KEY=VALUE"},
    **{"kl_bound": "NATS", "learning_rate": "RATE", "report_to": "NAME", "run_name": "NAME", "config": "FILE.yaml"},
    **{"eval_steps": "N", "save_steps": "N", "arms": "ARM", "seeds": "SEED"},
}
_DEFAULTS = {  # in words
    "keep_checkpoints": f"true; false with {DEFAULT_MODEL}",
    "max_steps": f"as num_train_epochs says; {SMALL['max_steps']} with {DEFAULT_MODEL}",
    "max_completion_length": "that of the task, or 512",
    "run_name": "task and trust region, such as arithmetic-troll",
    "gpus_per_node": "as on this machine",
    "train_size": "all; 1024 for arithmetic, 1000 for gym:NAME",
    "eval_size": "all, or a tenth of --data but at most 200; 64 for arithmetic, 100 for gym:NAME",
    "updates_per_generation": str(DEFAULT_UPDATES),
    "bf16": "true with a GPU, else false",
    "use_cpu": "true without a GPU, else false",
}
_NOT_STORED = ("config", "resume", "dry_run", "run_name", "output_dir", "allow_changes")
_FILES = ("data", "eval_data", "task", "model")  # flags that may be a file or a folder

_REPLACED = {  # flags of TRL that have no effect here
    "model_name_or_path": "--model",
    "output_dir": "--runs_dir and --run_name",
    "resume_from_checkpoint": "--resume",
}


_CORRECT = "Correct the setting it names; --help_all describes it"
_LEAST = {"seed": 0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 0}
_POSITIVE = ("num_train_epochs", "temperature", "eval_steps", "save_steps")
"""Numbers that TRL does not check."""


class _Parser(PlainParser, HfArgumentParser):
    """TRL's parser of dataclasses, with errors in plain words."""


class Flags:
    """The flags of a command line and of the YAML file it names. The command line overrides the file."""

    def __init__(
        self,
        argv: Sequence[str],
        prog: str = "troll train",
        description: str = "",
        extra: Sequence[Any] = (),
        hidden: Collection[str] = (),
    ) -> None:
        """
        Args:
            argv: the command line.
            prog: the command.
            description: the start of its help.
            extra: dataclasses of further flags.
            hidden: flags that are not in the help.
        """
        self.description, self._hidden = description, hidden
        self.parser = _Parser([*extra, RunSettings, TROLLConfig, ModelConfig], prog=prog, add_help=False)
        self.parser.add_argument("--config", help="A YAML file of flags. Flags on the command line override the file.")
        self.parser.add_argument("-h", "--help", action="store_true", help="Show the flags that matter most.")
        self.parser.add_argument("--help_all", "--help-all", action="store_true", help="Show all flags, TRL's too.")
        self._extra = {prog.split()[-1]: tuple(f.name for kind in extra for f in dataclasses.fields(kind))}
        self._stock = vars(self.parser.parse_args([]))
        self._actions = {action.dest: action for action in reversed(self.parser._actions)}  # the first of a name
        self._defaults: dict[str, Any] = {}
        self._tokens = list(argv)
        first = self._parse(self._tokens)
        self.wants_help = first.help or first.help_all
        self._show_all = first.help_all
        if first.config is not None:
            self._tokens = [*self._from_file(Path(first.config)), *self._tokens]
        self.given = self._heads()
        for name in sorted(self.given & _REPLACED.keys()):
            raise InputError(f"--{name} has no effect here", f"Use {_REPLACED[name]}")

    def over(self, path: Path) -> Flags:
        """These flags on top of those of a YAML file."""
        both = copy.copy(self)
        both._tokens = [*self._from_file(path), *self._tokens]
        both.given = both._heads()
        return both

    def _heads(self) -> set[str]:
        """The names of the given flags."""
        heads = {token.split("=")[0] for token in self._tokens}
        return {action.dest for action in self.parser._actions if heads & set(action.option_strings)}

    def run(self) -> RunSettings:
        """The flags of the run."""
        settings: RunSettings = self._make(RunSettings, self._parse(self._tokens))
        return settings

    def own(self, kind: Any) -> Any:
        """The flags of a dataclass that was given as ``extra``."""
        return self._make(kind, self._parse(self._tokens))

    def value(self, name: str, default: Any) -> Any:
        """The value of a flag, or ``default`` if it was not given."""
        return getattr(self._parse(self._tokens), name) if name in self.given else default

    def configs(self, defaults: dict[str, Any], output_dir: str) -> tuple[TROLLConfig, ModelConfig]:
        """The configs of TROLL (with TRL's arguments) and of the model, with these defaults."""
        self._defaults = dict(defaults)
        self.parser.set_defaults(**defaults)
        namespace = self._parse(self._tokens)
        namespace.output_dir = output_dir
        _check_values(namespace)
        return self._make(TROLLConfig, namespace), self._make(ModelConfig, namespace)

    def resolved(self) -> dict[str, Any]:
        """The given flags and those whose default differs from TRL's or TROLL's, for ``config.yaml``."""
        values = vars(self._parse(self._tokens))
        decided = self.given | self._defaults.keys() | {name for name in values if values[name] != self._stock[name]}
        return {name: value for name, value in self.values().items() if name in decided}

    def values(self) -> dict[str, Any]:
        """All flags that define a run, as YAML values."""
        values = vars(self._parse(self._tokens))
        return anchored({name: _plain(value) for name, value in values.items() if name not in _NOT_STORED})

    def help(self) -> str:
        """The help text: the main flags, or all flags."""
        groups = self._extra | GROUPS
        if self._show_all:
            known = {name for names in groups.values() for name in names} | _REPLACED.keys()
            rest = [name for name in self._stock if name not in known]
            own = [name for name in rest if name in TROLLConfig.__annotations__]
            groups |= {"more of TROLL": tuple(own), "more of TRL": tuple(x for x in rest if x not in own)}
        parser = argparse.ArgumentParser(
            usage=f"{self.parser.prog} [flags]",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        for title, names in groups.items():
            group = parser.add_argument_group(title)
            for action in (self._actions[name] for name in names if name not in self._hidden):
                written = [x for x in action.option_strings if "-" not in x[2:]]
                on = action.default is True or GENERAL.get(action.dest) is True
                group.add_argument(*written, help=self._help_of(action), **_shape(action, on))
        return parser.format_help()

    def _help_of(self, action: argparse.Action) -> str:
        """The help of a flag with its default in a run, and where another model or preset has another one."""
        name = action.dest
        default = _DEFAULTS.get(name)
        if default is None:
            value = GENERAL.get(name, self._stock[name])
            value = getattr(PRESETS["default"], name, None) if value is None else value
            default = "" if value is None or value is False or value == [] else as_words(value)
            paper = getattr(PRESETS["paper"], name, value)
            default += f"; {as_words(paper)} with --preset paper" if paper != value else ""
            small = SMALL.get(name, value)
            alone = " and no --preset" if hasattr(PRESETS["default"], name) else ""
            default += f"; {as_words(small)} with {DEFAULT_MODEL}{alone}" if small != value else ""
        text = _HELP.get(name, str(action.help)).replace("%", "%%")
        return f"{text} (default: {default.removeprefix('; ')})" if default else text

    def _parse(self, tokens: list[str]) -> argparse.Namespace:
        namespace: argparse.Namespace
        namespace, rest = self.parser.parse_known_args(tokens)
        if rest:
            self.parser.refuse_unknown(rest, help_flag="--help_all")
        return namespace

    def _make(self, kind: Any, namespace: argparse.Namespace) -> Any:
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        try:
            return kind(**{name: value for name, value in vars(namespace).items() if name in names})
        except InputError:
            raise
        except (ValueError, TypeError, ImportError) as error:  # raised by TRL
            raise InputError(f"TRL rejected the configuration: {one_line(str(error))}", _CORRECT) from error

    def _from_file(self, path: Path) -> list[str]:
        """The flags of a YAML file as tokens of a command line, so that they are checked in the same way."""
        example = "Write one flag per line, such as 'kl_bound: 0.02'"
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"Cannot read --config {path}: {error.strerror}", "Check the path") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"--config {path} is not valid YAML: {one_line(str(error))}", example) from None
        if not isinstance(values, dict):
            raise InputError(f"--config {path} contains a {type(values).__name__}, not flags", example)
        if any((path.parent / name).is_file() for name in (ABOUT, COMPARISON)):  # perhaps of an earlier version
            values = translate_settings(values)
        tokens = []
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name not in self._actions or name == "config":
                self.parser.refuse_unknown([f"--{key}"], f"in {path}", "--help_all")
            flag = _as_tokens(self._actions[name], value)
            try:
                self._parse(flag)
            except InputError as error:
                kind = ("a list: " if self._actions[name].nargs == "+" else "") + wanted(self._actions[name])
                raise InputError(f"--config {path}: {key} must be {kind}, got {value!r}", error.fix) from error
            tokens += flag
        return tokens


def _check_values(namespace: argparse.Namespace) -> None:
    """Raise for numbers with which no run is possible, and for dictionaries that are not JSON."""
    for name in (*_LEAST, *_POSITIVE):
        value = getattr(namespace, name)
        fine = value is None or (math.isfinite(value) and (value >= _LEAST[name] if name in _LEAST else value > 0))
        if not fine:
            kind = f"at least {_LEAST[name]}" if name in _LEAST else "above 0"
            raise InputError(f"--{name} must be {kind}, got {value:g}", f"Leave --{name} out for the default")
    for name, value in vars(namespace).items():
        if isinstance(value, str) and value.startswith("{") and name not in TROLLConfig.__annotations__:
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                raise InputError(f"--{name} is not valid JSON: {error}", "For example: '{\"name\": 1}'") from None


def anchored(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with absolute paths for existing files and models, so that they hold in any working directory."""

    def full(name: str, text: Any) -> Any:
        if not isinstance(text, str) or text == DEFAULT_MODEL or (name == "task" and not text.endswith(".py")):
            return text
        path = Path(text)
        return str(path.absolute()) if path.is_file() or (path / "config.json").is_file() else text

    def reward(text: str) -> str:
        place, colon, function = text.rpartition(":")
        return f"{full('reward', place)}{colon}{function}"

    absolute = {name: full(name, value) if name in _FILES else value for name, value in values.items()}
    return absolute | {name: [reward(x) for x in absolute[name]] for name in ("reward",) if absolute.get(name)}


def _as_tokens(action: argparse.Action, value: Any) -> list[str]:
    """A value of a YAML file as tokens of a command line."""
    flag = f"--{action.dest}"
    if value is None or value == []:
        return []
    if isinstance(value, list):
        return [flag, *(str(x) for x in value)]
    if isinstance(value, bool):  # to YAML, a plain no is false
        words = ("false", "true") if action.type is string_to_bool or action.nargs == 0 else ("no", "yes")
        return [f"{flag}={words[value]}"]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _shape(action: argparse.Action, on: bool) -> dict[str, Any]:
    """How the value of a flag is shown in the help; ``on`` for one that is true by default."""
    if action.choices:
        return {"choices": action.choices}
    if on or (action.type is string_to_bool and action.nargs is None):
        return {"metavar": "true|false"}
    if action.type is string_to_bool or action.nargs == 0:
        return {"action": "store_true"}
    kinds = {int: "N", float: "X", dict: "JSON"}
    metavar = _METAVARS.get(action.dest, kinds.get(action.type, "TEXT"))  # type: ignore[call-overload]
    return {"metavar": metavar, "nargs": action.nargs}


def _plain(value: Any) -> Any:
    """The value as plain YAML types."""
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
