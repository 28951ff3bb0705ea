"""``troll train --engine verl``: the flags of ``troll train`` as hydra overrides of verl, launched and recorded.

``keys`` is the table from flags to verl's keys, ``refusals`` what has none, ``data`` the task as parquet files;
``reward`` and ``stop`` run inside verl, ``launch`` starts it, ``metrics`` turns its log into that of a run.
"""
