"""Which command was asked for, and what becomes of errors: one sentence, and an exit code other than 0."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from troll.errors import InputError
from troll.lab.runs.formatting import one_line

COMMANDS = {
    "train": "fine-tune a model on a task with verifiable rewards",
    "compare": "train under several trust regions with the same seeds and budget, and say what differs",
    "eval": "pass@1, pass@k and majority vote on held-out problems, before and after training",
    "runs": "list runs and comparisons with their state, and say how to go on with them",
    "explain": "say what happened in a run, what is wrong with it, and what to change",
    "report": "draw a run or a comparison: one HTML file, and figures for papers",
    "doctor": "what is installed, what is in use and why, and what to do",
}
MODULES = {"eval": "evaluate"}
_OF_THE_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ESTALE),
)

HELP = """\
usage: troll COMMAND [flags]

Reinforcement learning of language models with a trust region in place of PPO's clip.

{commands}

Begin with

  troll train                          a real model on a CPU, in minutes: no flags, no network
  troll report runs/arithmetic-troll   what the trust region did, in pictures
  troll explain arithmetic-troll       the same in words, and what to change next
  troll runs                           what there is, and how to go on with it
  troll compare --arms troll clip      against clipping, with three seeds

`troll COMMAND --help` says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 if it did what was asked, 2 if it was asked for something that cannot be."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no arrow gets a question mark
    try:
        if command in ("-h", "--help", "help"):
            print(HELP.format(commands="\n".join(f"  {name:9}{what}" for name, what in COMMANDS.items())), end="")
            return 0
        if command == "--version":
            from troll import __version__

            print(f"troll {__version__}")
            return 0
        return int(_module(command).run(rest))
    except InputError as error:
        print(f"troll: {one_line(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("troll"):
            raise
        print(f"troll: {error.name} is missing; try: pip install 'troll-rl[train]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("troll: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        what = error.filename or "a file"
        print(
            f"troll: {one_line(str(what))} cannot be written or read ({error.strerror}); what was saved before is as "
            "it was; mend that, then go on (`troll runs` says with what)",
            file=sys.stderr,
        )
        return 2


def check_command(argv: Sequence[str]) -> None:
    """Raise if a command line names a command or flag that does not exist, or a value that cannot be. Runs nothing."""
    command, *rest = argv
    if command not in ("--help", "--version", "help"):
        _module(command).check(rest)


def _module(command: str) -> ModuleType:
    if command not in COMMANDS:
        raise InputError(f"the command {command!r}", " or ".join(COMMANDS), "troll --help")
    return importlib.import_module(f"troll.lab.cli.{MODULES.get(command, command)}")
