"""The flags of ``troll train``: the run's own, TROLL's and all of TRL's; on the command line or in a YAML file."""

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
from troll.lab.runs.formatting import one_line
from troll.lab.training.settings import DEFAULT_MODEL, RunSettings
from troll.trl import TROLLConfig

SHOWN = {  # what --help shows
    "what to run": (*(field.name for field in dataclasses.fields(RunSettings)), "allow_changes"),
    "the trust region": (
        *("trust_region", "kl_bound", "regression_coef", "max_support", "tail", "advantage_estimator", "measure_kl"),
    ),
    "training, as in TRL": (
        *("learning_rate", "max_steps", "num_train_epochs", "updates_per_generation", "num_generations"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length", "temperature"),
        *("eval_steps", "save_steps", "report_to", "run_name", "seed", "bf16", "use_peft", "use_vllm"),
    ),
    "more": ("config", "help", "help_all"),
}
_OWN = ("config", "resume", "dry_run", "run_name", "output_dir", "allow_changes")  # not part of what a run is
_FILES = ("data", "eval_data", "task", "model")  # flags that may be a file or a folder

_INSTEAD = {  # flags of TRL that would do nothing here
    "model_name_or_path": "--model",
    "output_dir": "--runs_dir and --run_name",
    "resume_from_checkpoint": "--resume",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """The description as it is written, and the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.default is not None and action.default is not False and action.default != []
        return f"{action.help} (default: %(default)s)" if told else str(action.help)


_STYLE: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False, "add_help": False}


class _Parser(HfArgumentParser):
    """Raises what argparse would print."""

    def error(self, message: str) -> NoReturn:
        """One sentence."""
        raise InputError(f"flags that cannot be used ({message})", "flags of this command", f"{self.prog} --help")


class Flags:
    """What was said on the command line and in the YAML file it names."""

    def __init__(self, argv: Sequence[str], prog: str = "troll train", description: str = "", extra: Any = ()) -> None:
        self.parser = _Parser(
            [*extra, RunSettings, TROLLConfig, ModelConfig],
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            **_STYLE,
        )
        self.parser.add_argument("--config", help="A YAML file of flags; those on the command line go before it.")
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
        self.said = self._heads()
        for name in sorted(self.said & _INSTEAD.keys()):
            raise InputError(f"--{name}, which has no effect here", "another flag for the same", _INSTEAD[name])

    def over(self, path: Path) -> Flags:
        """These flags, and those of a YAML file for what they do not say."""
        both = copy.copy(self)
        both._tokens = [*self._from_file(path), *self._tokens]
        both.said = both._heads()
        return both

    def _heads(self) -> set[str]:
        """Names of the flags that were said."""
        heads = {token.split("=")[0] for token in self._tokens}
        return {action.dest for action in self.parser._actions if heads & set(action.option_strings)}

    def run(self) -> RunSettings:
        """The part that says what to run."""
        settings: RunSettings = self._make(RunSettings, self._parse(self._tokens))
        return settings

    def own(self, kind: Any) -> Any:
        """The flags of a dataclass that was given as ``extra``."""
        return self._make(kind, self._parse(self._tokens))

    def value(self, name: str, default: Any) -> Any:
        """Of one flag, if it was given."""
        return getattr(self._parse(self._tokens), name) if name in self.said else default

    def configs(self, defaults: dict[str, Any], output_dir: str) -> tuple[TROLLConfig, ModelConfig]:
        """The settings of TROLL and TRL, and of the model, with these defaults for what was not said."""
        self._defaults = dict(defaults)
        self.parser.set_defaults(**defaults)
        namespace = self._parse(self._tokens)
        namespace.output_dir = output_dir
        return self._make(TROLLConfig, namespace), self._make(ModelConfig, namespace)

    def resolved(self) -> dict[str, Any]:
        """Every flag that was said, or has another default here than in TRL or TROLL, for ``config.yaml``."""
        values = vars(self._parse(self._tokens))
        decided = self.said | self._defaults.keys() | {name for name in values if values[name] != self._stock[name]}
        return {name: value for name, value in self.values().items() if name in decided}

    def values(self) -> dict[str, Any]:
        """Every flag that is part of what a run is, as YAML takes it."""
        values = vars(self._parse(self._tokens))
        return anchored({name: _plain(value) for name, value in values.items() if name not in _OWN})

    def help(self, defaults: dict[str, Any]) -> str:
        """The flags that matter most, with these defaults; or all."""
        if self._show_all:
            return str(self.parser.format_help())
        self.parser.set_defaults(**defaults)
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
        except (ValueError, TypeError, ImportError) as error:  # TRL's own checks
            sentence = one_line(str(error))
            raise InputError(f"settings that TRL refuses ({sentence})", "others", "changing what it names") from error

    def _from_file(self, path: Path) -> list[str]:
        """A YAML file as flags, so that they are checked as flags are."""
        expected = "a YAML file with one flag per line, such as 'kl_bound: 0.02'"
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"--config {path}, which cannot be read ({error.strerror})", expected, "its path"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            sentence = one_line(str(error))
            raise InputError(f"--config {path}, which is not YAML ({sentence})", expected, "correcting it") from None
        if not isinstance(values, dict):
            raise InputError(f"--config {path} with a {type(values).__name__} in it", expected, "'flag: value' lines")
        tokens = []
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name not in self._actions or name == "config":
                self._unknown(f"--{key}", f"in {path}")
            said = _as_tokens(self._actions[name], value)
            try:
                self._parse(said)
            except InputError as error:
                raise InputError(
                    f"--config {path}, where {key} is {value!r}", _wanted(self._actions[name]), error.hint
                ) from error
            tokens += said
        return tokens

    def _unknown(self, flag: str, where: str) -> NoReturn:
        names = [x for action in self.parser._actions for x in action.option_strings if x.startswith("--")]
        close = difflib.get_close_matches(flag.split("=")[0].replace("-", "_").replace("__", "--", 1), names, n=2)
        hint = " or ".join(close) if close else f"{self.parser.prog} --help_all"
        raise InputError(f"the unknown flag {flag} {where}", "a flag of this command or of TRL's GRPOConfig", hint)


def anchored(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same flags, whichever folder they are read in: files and models that exist here by their full path."""

    def full(name: str, text: Any) -> Any:
        if not isinstance(text, str) or text == DEFAULT_MODEL or (name == "task" and not text.endswith(".py")):
            return text
        path = Path(text)
        return str(path.absolute()) if path.is_file() or (path / "config.json").is_file() else text

    def reward(text: str) -> str:
        place, colon, function = text.rpartition(":")
        return f"{full('reward', place)}{colon}{function}"

    found = {name: full(name, value) if name in _FILES else value for name, value in values.items()}
    return found | {name: [reward(x) for x in found[name]] for name in ("reward",) if found.get(name)}


def _as_tokens(action: argparse.Action, value: Any) -> list[str]:
    """A value of a YAML file as it is written on a command line."""
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
    """What a flag takes."""
    if action.choices:
        return " or ".join(map(str, action.choices))
    kinds = {string_to_bool: "true or false", int: "a whole number", float: "a number"}
    return ("a list: " if action.nargs == "+" else "") + kinds.get(action.type, "text")


def _plain(value: Any) -> Any:
    """As YAML writes it."""
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
