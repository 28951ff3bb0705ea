"""The command ``troll``."""

from troll.cli.main import check_command, main

__all__ = ["check_command", "main"]
