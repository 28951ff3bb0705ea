"""The entry point of ``troll``: dispatch to a command, and errors as one line on stderr with a non-zero exit code.

The parser and the lookup of run folders that the commands share are here too. Commands are imported when they are run.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from troll.errors import InputError, suggestion
from troll.lab.runs import check_run_name
from troll.lab.runs.folder import ABOUT, COMPARISON
from troll.lab.runs.formatting import one_line

COMMANDS = {
    "train": "fine-tune a model on a task with verifiable rewards",
    "compare": "train with several trust regions on the same seeds and budget, and compare them",
    "eval": "pass@1, pass@k and majority vote on held-out problems, before and after training",
    "runs": "list runs and comparisons, their status and how to resume them",
    "explain": "explain what happened in a run, and which settings to change",
    "report": "write an HTML report of a run or a comparison, with figures",
    "doctor": "check the installation: packages, GPU, kernels, sandbox, default model",
}
_MODULES = {"eval": "evaluate", "report": "runs", "explain": "runs"}
_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ESTALE),
)

HELP = """\
usage: troll COMMAND [flags]

Reinforcement learning of language models with a trust region in place of PPO's clip.

{commands}

Examples

  troll train                          train SmolLM2-135M on a CPU in minutes, without flags or network
  troll explain arithmetic-troll       what happened in this run, and what to change
  troll compare --arms troll clip      TROLL against PPO's clip, three seeds each

`troll COMMAND --help` shows the flags of a command, with examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for invalid input, 130 after Ctrl-C."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for terminals without Unicode
    try:
        if command in ("-h", "--help", "help"):
            print(HELP.format(commands="\n".join(f"  {name:9}{what}" for name, what in COMMANDS.items())), end="")
            return 0
        if command == "--version":
            from troll import __version__

            print(f"troll {__version__}")
            return 0
        return int(_function(command, "run")(rest))
    except InputError as error:
        print(f"troll: {one_line(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("troll"):
            raise
        print(f"troll: the package {error.name} is missing. Run: pip install 'troll-rl[train]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("troll: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        what = error.filename or "a file"
        print(
            f"troll: cannot read or write {one_line(str(what))}: {error.strerror}. Saved checkpoints are intact. "
            "Fix this, then resume; `troll runs` shows the command.",
            file=sys.stderr,
        )
        return 2


def check_command(argv: Sequence[str]) -> None:
    """Raise if a command line has an unknown command or flag, or an invalid value. Nothing is run."""
    command, *rest = argv
    if command not in ("--help", "--version", "help"):
        _function(command, "check")(rest)


def _function(command: str, name: str) -> Callable[[Sequence[str]], Any]:
    """``run`` or ``check`` of a command; ``run_explain`` where a module has several commands."""
    if command not in COMMANDS:
        near = suggestion(command, COMMANDS)
        fix = f"Did you mean `troll {near}`?" if near else f"The commands are {', '.join(COMMANDS)}"
        raise InputError(f"There is no command {command!r}", fix)
    module = importlib.import_module(f"troll.lab.cli.{_MODULES.get(command, command)}")
    function: Callable[[Sequence[str]], Any] = getattr(module, f"{name}_{command}", None) or getattr(module, name)
    return function


class PlainParser(argparse.ArgumentParser):
    """A parser that raises ``InputError`` in plain words instead of exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "exit_on_error": False, **kwargs})

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """As in argparse, with a readable error for a missing or superfluous value."""
        try:
            return super().parse_known_args(*args, **kwargs)
        except argparse.ArgumentError as error:
            name = str(error.argument_name).split("/")[0]
            action = next((x for x in self._actions if name in x.option_strings), None)
            if action is None:
                self.error(str(error))
            kind = wanted(action)
            needs = "needs a value" if kind == "text" else f"needs a value, {kind}"
            raise InputError(f"{name} {'takes no value' if action.nargs == 0 else needs}", self._see_help) from error

    def parse_args(self, *args: Any, **kwargs: Any) -> argparse.Namespace:  # type: ignore[override]
        """As in argparse, with a suggestion for an unknown flag."""
        namespace: argparse.Namespace
        namespace, rest = self.parse_known_args(*args, **kwargs)
        if rest:
            self.refuse_unknown(rest)
        return namespace

    def refuse_unknown(self, words: Sequence[str], where: str = "on the command line", help_flag: str = "") -> NoReturn:
        """Raise for the first unknown flag among ``words``, with the most similar known one."""
        flag = next((word for word in words if word.startswith("-")), None)
        if flag is None:
            raise InputError(f"{self.prog} does not take {words[0]!r}", self._see_help)
        names = [x for action in self._actions for x in action.option_strings if "-" not in x.removeprefix("--")]
        near = difflib.get_close_matches(flag.split("=")[0].replace("-", "_").replace("__", "--", 1), names, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"{self.prog} {help_flag or '--help'} lists all flags"
        raise InputError(f"Unknown flag {flag} {where}", fix)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        if message.startswith("the following arguments are required: "):
            needed = [str(x.metavar or x.dest) for x in self._actions if x.required]
            raise InputError(f"{self.prog} needs {' and '.join(needed)}", self._see_help)
        raise InputError(f"{self.prog}: {message}", self._see_help)

    @property
    def _see_help(self) -> str:
        return f"See {self.prog} --help"

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            raise self._wrong_value(action, text) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise self._wrong_value(action, value)

    def _wrong_value(self, action: argparse.Action, value: Any) -> InputError:
        name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
        near = suggestion(value, map(str, action.choices or ()))
        fix = f"Did you mean {near}?" if near else self._see_help
        return InputError(f"{name} must be {wanted(action)}, got {value!r}", fix)


def wanted(action: argparse.Action) -> str:
    """The values that a flag accepts, in words."""
    if action.choices:
        *others, last = map(str, action.choices)
        return f"{', '.join(others)} or {last}" if others else last
    kinds = {"int": "an integer", "float": "a number", "string_to_bool": "true or false", "yes_or_no": "true or false"}
    return kinds.get(getattr(action.type, "__name__", ""), "text")


class Parser(PlainParser):
    """The parser of a command: its help keeps the line breaks of the description and shows defaults."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, formatter_class=_Help)


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: {as_words(action.default)})" if shown else str(action.help)


def as_words(value: Any) -> str:
    """A value as it is written on the command line.

    >>> as_words(True), as_words([0, 1]), as_words(5e-06), as_words(1.0)
    ('true', '0 1', '5e-06', '1')
    """
    if isinstance(value, list | tuple):
        return " ".join(map(as_words, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def yes_or_no(text: str) -> bool:
    """``true`` or ``false``, as for TRL's flags."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return words[text.lower()]


def existing_folder(given: str, runs_dir: str, expected: str = "run or comparison") -> Path:
    """The folder of a run or a comparison, given as a path or as a name below ``runs_dir``."""
    folder = Path(given)
    if not folder.is_dir() and not folder.is_absolute() and len(folder.parts) == 1:
        folder = Path(runs_dir) / check_run_name(given)
    if any((folder / name).is_file() for name in (ABOUT, COMPARISON)):
        return folder
    names = sorted(x.parent.name for name in (ABOUT, COMPARISON) for x in Path(runs_dir).glob(f"*/{name}"))
    known = f"It has: {', '.join(names[:8])}" + (", …" if len(names) > 8 else "")
    command = "compare" if expected == "comparison" else "train"
    raise InputError(
        f"There is no {expected} {given!r} in {Path(runs_dir)}",
        known if names else f"Start one with `troll {command}`, or pass --runs_dir",
    )
