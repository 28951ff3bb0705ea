"""Run folders: JSON files written during training and read by every other command.

``docs/runs.md`` describes the format. ``writer`` writes it, ``folder`` reads it. Nothing here needs torch or a trainer.
"""

from troll.lab.runs.folder import Comparison, Run, TokenHistory
from troll.lab.runs.writer import append_line, check_run_name, free_run_name, write_json

__all__ = [
    "Comparison",
    "Run",
    "TokenHistory",
    "append_line",
    "check_run_name",
    "free_run_name",
    "write_json",
]
