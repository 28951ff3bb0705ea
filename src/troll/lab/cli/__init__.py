"""The command ``troll``."""

from troll.lab.cli.main import check_command, main

__all__ = ["check_command", "main"]
