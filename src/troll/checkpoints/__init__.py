"""Checkpoints that survive: written whole or not at all, read only if every byte is as it was written.

``store`` has the folders, ``state`` what is in them, ``files`` the single file. ``docs/long-runs.md`` says what is
promised.
"""

from troll.checkpoints.store import Found, checkpoints, last_good, recover, verify

__all__ = ["Found", "checkpoints", "last_good", "recover", "verify"]
