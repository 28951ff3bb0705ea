"""Does a run survive? ``python tests/torture/survive.py --kills 200``; ``--help`` says what else.

A run of 24 updates, 8 on each rollout, a checkpoint every 3, is killed with SIGKILL at random times, resumed, killed
again, resumed, until it is finished. Then it must be the run that nothing happened to, bit for bit, and each time it
must have gone on from at most 3 updates before.
"""

# ruff: noqa: E402, torch is told first how many threads it has
from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # before any thread exists, and so that two runs add up in the same order

import forks
import small_disk
import system_calls
import tortured

from troll.lab.training import settings as facts

PATIENCE = 300  # seconds that nothing here takes, unless it hangs


class Torture:
    """A run that nothing happened to, and ways to treat another one."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.scratch, self.seed = scratch, seed
        self.output = scratch / "output"
        forks.warm(lambda: tortured.begin(self.scratch / "warm"), self.output)
        began = time.monotonic()
        child = forks.fork(lambda: tortured.begin(self.scratch / "whole"), self.output)
        child.wait(PATIENCE)
        self.seconds = time.monotonic() - began
        self.whole = tortured.fingerprint(self.scratch / "whole" / tortured.NAME)

    def killed(self, trial: int, again: float = 0.4) -> dict[str, Any]:
        """A run that is killed at a random time, and maybe again after it was resumed, until it is finished."""
        random_ = random.Random(f"{self.seed}/{trial}")
        root = self.scratch / f"killed-{trial}"
        found: dict[str, Any] = {"trial": trial, "kills": [], "wrong": []}
        kill = True
        while True:
            before, begun = tortured.Seen.of(root), tortured.is_begun(root)
            child = forks.fork(lambda: (tortured.resume if begun else tortured.begin)(root), self.output)  # noqa: B023
            moment = random_.uniform(0, self.seconds) if kill else PATIENCE
            survived = child.wait(moment)
            child.kill()
            start = tortured.went_on_from(root, before) if begun else 0
            if found["kills"] and start is not None:
                found["kills"][-1]["went on from"] = start
                if found["kills"][-1]["seen"] - start > tortured.SAVE:
                    found["wrong"].append(f"lost {found['kills'][-1]['seen'] - start} updates: {found['kills'][-1]}")
            if survived:
                break
            if not kill:
                found["wrong"].append(f"no end after {PATIENCE} s")
                break
            seen = max([tortured.Seen.of(root).last, *(x["seen"] for x in found["kills"][-1:])])
            staged = sorted(path.name for path in (root / tortured.NAME).glob(".*"))
            found["kills"].append({"after": round(moment, 3), "seen": seen, "left behind": staged})
            kill = random_.random() < again
            if tortured.is_finished(root):  # it was killed when there was nothing left to do
                child.code = 0
                break
        if child.code == 0:
            found["wrong"] += [f"{x} differs" for x in tortured.differences(root / tortured.NAME, self.whole)]
        else:
            found["wrong"].append(f"exit code {child.code}: {child.said[-2000:]}")
        if not found["wrong"]:
            shutil.rmtree(root)
        return found

    def prepared(self) -> Path:
        """A run that ended in the middle of its last update, to be resumed again and again: a save, and the end."""
        place = self.scratch / "prepared"
        if not place.exists():
            forks.fork(lambda: tortured.break_off(place), self.output).wait(PATIENCE)
        return place

    def ended(self, root: Path, child: forks.Child) -> list[str]:
        """What is wrong with a run after something happened to the process that went on with it."""
        wrong = []
        if child.code not in (0, -9) and (child.code != 2 or tortured.complaint(child.said) is None):
            wrong.append(f"exit code {child.code}, and no clear sentence: {child.said[-1500:]}")
        if not tortured.is_finished(root):
            again = forks.fork(lambda: tortured.resume(root), self.output)
            again.wait(PATIENCE)
            if again.code != 0:
                return [*wrong, f"could not be resumed, exit code {again.code}: {again.said[-1500:]}"]
        return wrong + [f"{x} differs" for x in tortured.differences(root / tortured.NAME, self.whole)]

    def calls(self) -> tuple[list[system_calls.Call], list[str]]:
        """What going on with the prepared run asks of the disk; and what it should have synced, and has not."""
        root = self.scratch / "calls"
        shutil.copytree(self.prepared(), root)
        log = self.scratch / "strace"
        flags = ["-f", "-e", f"trace={','.join(system_calls.CALLS)}"]
        child = system_calls.traced(lambda: tortured.resume(root), self.output, flags, log, PATIENCE)
        if child.code != 0:
            raise RuntimeError(child.said)
        folder = root / tortured.NAME
        return system_calls.calls(log, folder, child.pid), system_calls.unsynced(log, folder)

    def failed_call(self, number: int, call: system_calls.Call, error: str | None) -> dict[str, Any]:
        """The prepared run, resumed: one system call fails or is the last."""
        root = self.scratch / f"call-{number}-{error}"
        shutil.copytree(self.prepared(), root)
        log = self.scratch / "strace"
        flags = call.failing(root / tortured.NAME, error)
        child = system_calls.traced(lambda: tortured.resume(root), self.output, flags, log, PATIENCE)
        text = log.read_text(errors="replace")
        met = "killed by SIGKILL" in text if error is None else "(INJECTED)" in text
        found = {"call": call.name, "path": call.path, "error": error, "met": met, "exit code": child.code}
        found["said"] = tortured.complaint(child.said)
        found["wrong"] = self.ended(root, child)
        if not found["wrong"]:
            shutil.rmtree(root)
        return found

    def bad_disk(self, free: int | None) -> dict[str, Any]:
        """The prepared run, resumed on a disk with so many bytes left, or that is read-only; then on a good one."""
        root = self.scratch / "disk"
        root.mkdir(exist_ok=True)
        told = self.scratch / "told"
        prepared = self.prepared()

        def work() -> int:
            small_disk.mount(root, 1 << 26)
            shutil.copytree(prepared, root, dirs_exist_ok=True)
            small_disk.change(root, small_disk.used(root) + (free or 0), read_only=free is None)
            child = forks.fork(lambda: tortured.resume(root), self.output)
            child.wait(PATIENCE)
            said = tortured.complaint(child.said)
            small_disk.change(root, 1 << 26)
            wrong = self.ended(root, child)
            told.write_text(json.dumps({"free": free, "exit code": child.code, "said": said, "wrong": wrong}))
            return 0

        forks.fork(work, self.scratch / "outer").wait(3 * PATIENCE)
        found: dict[str, Any] = json.loads(told.read_text())
        told.unlink()
        return found


def main() -> int:
    """Torture as asked; the exit code is 0 if everything survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="how often to kill, at random times")
    parser.add_argument("--calls", type=int, metavar="K", help="let every K-th system call that changes a file fail")
    parser.add_argument(
        "--disk", type=int, metavar="KIB", help="resume with 0, KIB, 2 KIB, ... free, until it is enough"
    )
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with the N-th call, to share the work")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--results", type=Path, help="where to write what happened, as JSON")
    parser.add_argument("--scratch", type=Path, help="a folder to work in, in which failures are kept")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=options.scratch, prefix="torture-"))
    torture = Torture(scratch, options.seed)
    results: dict[str, Any] = {"seconds of a run": round(torture.seconds, 2), "machine": facts.machine()}

    def note(kind: str, found: dict[str, Any]) -> None:
        results.setdefault(kind, []).append(found)
        print(json.dumps(found), flush=True)

    def kills() -> int:
        return sum(len(trial["kills"]) for trial in results.get("killed", []))

    while kills() < options.kills:
        note("killed", torture.killed(len(results.get("killed", []))))
    if options.calls:
        found, unsynced = torture.calls()
        note("synced", {"calls": len(found), "wrong": [f"not on the disk in time: {x}" for x in unsynced]})
        for number, call in list(enumerate(found))[options.first :: options.calls]:
            for error in (None, system_calls.ERRORS.get(call.name, "EIO")):
                note("failed calls", torture.failed_call(number, call, error))
    if options.disk:
        note("read-only disk", torture.bad_disk(None))
        free, enough = 0, False
        while not enough:
            tried = torture.bad_disk(free)
            note("full disk", tried)
            free, enough = free + 1024 * options.disk, tried["exit code"] == 0
    trials = [x for kind in results.values() if isinstance(kind, list) for x in kind]
    wrong = [x for trial in trials for x in trial["wrong"]]
    print(f"{kills()} kills, {len(trials)} trials, {len(wrong)} wrong", flush=True)
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    if not wrong:
        shutil.rmtree(scratch)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
