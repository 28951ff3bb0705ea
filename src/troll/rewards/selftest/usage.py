"""What a run takes of the machine, seen from outside by the name of its process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


def marked(name: str) -> list[tuple[int, int]]:
    """Threads and kilobytes of memory of each process that goes by this name and has not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if path.read_text().strip() == name:
                lines = path.with_name("status").read_text().splitlines()
                said = dict(line.split(":", 1) for line in lines if ":" in line)
                if "VmRSS" in said:  # a process that has ended has none
                    found.append((int(said["Threads"]), int(said["VmRSS"].split()[0])))
    return found


class Watch:
    """Counts what processes with a mark use, while they run."""

    def __init__(self, mark: str) -> None:
        self._mark, self._over = mark, threading.Event()
        self.tasks = self.kilobytes = 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            seen = marked(self._mark)
            self.tasks = max(self.tasks, sum(tasks for tasks, _ in seen))
            self.kilobytes = max(self.kilobytes, sum(kilobytes for _, kilobytes in seen))
