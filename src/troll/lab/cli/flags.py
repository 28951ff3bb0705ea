"""The flags of ``troll train``: those of the run, of TROLL and of TRL, from the command line and from a YAML file."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool
from trl import ModelConfig

from troll.errors import InputError
from troll.lab.runs.folder import ABOUT, COMPARISON
from troll.lab.runs.formatting import one_line
from troll.lab.training.settings import DEFAULT_MODEL, RunSettings
from troll.trl import TROLLConfig
from troll.trl.robust.renamed_settings import translate_settings

SHOWN = {  # in --help
    "run": (*(field.name for field in dataclasses.fields(RunSettings)), "allow_changes"),
    "trust region": (
        *(
            "trust_region",
            "preset",
            "kl_bound",
            "regression_coef",
            "advantage_estimator",
            "measure_kl",
        ),
    ),
    "training, as in TRL": (
        *("learning_rate", "max_steps", "num_train_epochs", "updates_per_generation", "num_generations"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length", "temperature"),
        *("eval_steps", "save_steps", "report_to", "run_name", "seed", "bf16", "use_peft", "use_vllm"),
    ),
    "other": ("config", "help", "help_all"),
}
_NOT_STORED = ("config", "resume", "dry_run", "run_name", "output_dir", "allow_changes")
_FILES = ("data", "eval_data", "task", "model")  # flags that may be a file or a folder

_REPLACED = {  # flags of TRL that have no effect here
    "model_name_or_path": "--model",
    "output_dir": "--runs_dir and --run_name",
    "resume_from_checkpoint": "--resume",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the formatting of the description and shows defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default is not None and action.default is not False and action.default != []
        return f"{action.help} (default: %(default)s)" if shown else str(action.help)


_STYLE: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False, "add_help": False}


class _Parser(HfArgumentParser):
    """A parser that raises ``InputError``."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise InputError(f"{self.prog}: {message}", f"See {self.prog} --help")


class Flags:
    """The flags of a command line and of the YAML file it names. The command line overrides the file."""

    def __init__(self, argv: Sequence[str], prog: str = "troll train", description: str = "", extra: Any = ()) -> None:
        self.parser = _Parser(
            [*extra, RunSettings, TROLLConfig, ModelConfig],
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            **_STYLE,
        )
        self.parser.add_argument("--config", help="A YAML file of flags. Flags on the command line override the file.")
        self.parser.add_argument("-h", "--help", action="store_true", help="Show the flags that matter most.")
        self.parser.add_argument("--help_all", "--help-all", action="store_true", help="Show all flags, TRL's too.")
        self._extra = {prog.split()[-1]: tuple(f.name for kind in extra for f in dataclasses.fields(kind))}
        self._stock = vars(self.parser.parse_args([]))
        self._actions = {action.dest: action for action in reversed(self.parser._actions)}  # the first of a name
        self._defaults: dict[str, Any] = {}
        self._actions["run_name"].help = "Name of the run, and of its folder below --runs_dir."
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

    def help(self, defaults: dict[str, Any]) -> str:
        """The help text: the main flags, or all flags, with these defaults."""
        self.parser.set_defaults(**defaults)
        if self._show_all:
            return str(self.parser.format_help())
        short = _Parser([], usage=self.parser.usage, description=self.parser.description, **_STYLE)
        for title, names in (self._extra | SHOWN).items():
            if not names:
                continue
            group = short.add_argument_group(title)
            for action in (self._actions[name] for name in names if name in self._actions):
                written = [x for x in action.option_strings if "-" not in x[2:]]
                kind: dict[str, Any] = {"metavar": action.dest.split("_")[-1].upper()}
                if action.choices:
                    kind = {"choices": action.choices}
                elif action.default is True or (action.type is string_to_bool and action.nargs is None):
                    kind = {"metavar": "true|false"}
                elif action.type is string_to_bool or action.nargs == 0:
                    kind = {"action": "store_true"}
                group.add_argument(*written, help=action.help, default=action.default, **kind)
        return str(short.format_help())

    def _parse(self, tokens: list[str]) -> argparse.Namespace:
        namespace: argparse.Namespace
        namespace, rest = self.parser.parse_known_args(tokens)
        if rest:
            self._unknown(next((x for x in rest if x.startswith("--")), rest[0]), "on the command line")
        return namespace

    def _make(self, kind: Any, namespace: argparse.Namespace) -> Any:
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        try:
            return kind(**{name: value for name, value in vars(namespace).items() if name in names})
        except InputError:
            raise
        except (ValueError, TypeError, ImportError) as error:  # raised by TRL
            raise InputError(f"TRL rejected the configuration: {one_line(str(error))}", "Change these flags") from error

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
                self._unknown(f"--{key}", f"in {path}")
            flag = _as_tokens(self._actions[name], value)
            try:
                self._parse(flag)
            except InputError as error:
                raise InputError(
                    f"--config {path}: {key} must be {_wanted(self._actions[name])}, got {value!r}", error.fix
                ) from error
            tokens += flag
        return tokens

    def _unknown(self, flag: str, where: str) -> NoReturn:
        names = [x for action in self.parser._actions for x in action.option_strings if x.startswith("--")]
        close = difflib.get_close_matches(flag.split("=")[0].replace("-", "_").replace("__", "--", 1), names, n=2)
        fix = f"Did you mean {' or '.join(close)}?" if close else f"{self.parser.prog} --help_all lists all flags"
        raise InputError(f"Unknown flag {flag} {where}", fix)


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


def _wanted(action: argparse.Action) -> str:
    """The values that a flag accepts."""
    if action.choices:
        return " or ".join(map(str, action.choices))
    kinds = {string_to_bool: "true or false", int: "an integer", float: "a number"}
    return ("a list: " if action.nargs == "+" else "") + kinds.get(action.type, "text")


def _plain(value: Any) -> Any:
    """The value as plain YAML types."""
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
