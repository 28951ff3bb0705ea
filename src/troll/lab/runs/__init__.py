"""What a run leaves behind: a folder of JSON files, written by training, read by everything else.

``docs/runs.md`` describes the format. Nothing here needs torch or a trainer.
"""

from troll.lab.runs.folder import Comparison, Run, TokenHistory, append_line, write_json
from troll.lab.runs.names import check_run_name, free_run_name

__all__ = [
    "Comparison",
    "Run",
    "TokenHistory",
    "append_line",
    "check_run_name",
    "free_run_name",
    "write_json",
]
