"""What the small commands share: a parser that raises, and the folder that a name stands for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from troll.errors import InputError
from troll.lab.runs import check_run_name
from troll.lab.runs.folder import ABOUT, COMPARISON


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print, and shows the default of every flag that has one."""

    def __init__(self, prog: str, description: str, **more: Any) -> None:
        super().__init__(prog, description=description, formatter_class=_Help, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """One sentence."""
        raise InputError(f"flags that cannot be used ({message})", "flags of this command", f"{self.prog} --help")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if told else str(action.help)


def yes_or_no(text: str) -> bool:
    """``true`` or ``false``, as TRL's flags take them."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


def existing_folder(given: str, runs_dir: str, expected: str = "a run or a comparison") -> Path:
    """The folder of a run or a comparison: a path, or a name below the folder of runs."""
    folder = Path(given)
    if not folder.is_dir() and not folder.is_absolute() and len(folder.parts) == 1:
        folder = Path(runs_dir) / check_run_name(given)
    if any((folder / name).is_file() for name in (ABOUT, COMPARISON)):
        return folder
    there = sorted(x.parent.name for name in (ABOUT, COMPARISON) for x in Path(runs_dir).glob(f"*/{name}"))
    hint = f"one of {', '.join(there[:8])}" + (", …" if len(there) > 8 else "") if there else "`troll train` first"
    raise InputError(f"{given!r}, which is no run in {Path(runs_dir)}", f"the folder or name of {expected}", hint)
