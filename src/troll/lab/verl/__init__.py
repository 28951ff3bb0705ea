"""``troll train --engine verl``: translates the flags to verl's keys, starts verl and records the run.

``setup`` holds the resolved flags and refuses those without a key, ``keys`` is the table from flags to verl's keys.
``data`` writes the task for verl and computes its rewards inside verl, ``stop_token_loop`` ends
completions at the task's stop token there. ``launch`` starts verl, ``metrics`` converts its log to ``metrics.jsonl``.
"""
