"""Every hack against every checker: ``python experiments/hacks/run.py --checkers FOLDER`` (see README.md).

Each pair runs in a separate process in bubblewrap: no network, only a scratch folder to write to, and a deadline.
Writes results.json and the tables of README.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkers import CHECKERS, REPOSITORIES

from troll.rewards.code import CodeReward
from troll.rewards.problems import read_problem
from troll.rewards.sandbox.isolation import isolations
from troll.rewards.selftest.hacks import CALLS, CHECK, HACKS, HONEST, STDIN, TESTS, WRONG

HERE = Path(__file__).resolve().parent
SECONDS = 120.0
RUNS = 2  # of each program, one after the other in the same folder: a hack may leave something for the next run
OURS = {"troll": "bubblewrap", "troll (Landlock)": "landlock"}
KINDS = {name: tuple(forms) for name, (_, forms) in CHECKERS.items()} | dict.fromkeys(OURS, ("function", "stdin"))
FULL, NOT, CRASHED, HUNG = "full score", "not", "checker crashed", "checker hung"


def ours(name: str, kind: str, program: str) -> str:
    """The worst verdict of troll's code reward on a program, over all formats of the tests."""
    forms: list[Any] = [{"inputs": [i for i, _ in STDIN], "outputs": [o for _, o in STDIN]}]
    if kind == "function":
        pairs = {"fn_name": "f", "inputs": [[x] for x, _ in CALLS], "outputs": [y for _, y in CALLS]}
        forms = [list(TESTS), pairs, [CHECK + "\ncheck(f)"]]
    problems = [read_problem(form) for form in forms * RUNS]
    said = {verdict.status for verdict in _reward(OURS[name]).verdicts([program] * len(problems), problems)}
    if "pass" in said:
        return FULL
    return CRASHED if "infra_error" in said else NOT


@functools.cache
def _reward(walls: str) -> CodeReward:
    return CodeReward(size=2, isolation=next(found for found in isolations() if found.name == walls))


def theirs(checker: str, kind: str, program: str, folder: Path) -> str:
    """The worst verdict of another checker on a program: "full score", "not", "checker crashed", "checker hung"."""
    form = CHECKERS[checker][1][kind]
    problem = {form: {"check": CHECK, "calls": CALLS, "stdin": STDIN}[form]}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(RUNS):
            said = _once(checker, program, problem, folder, scratch)
            if said != NOT:
                break
    return said


def _once(checker: str, program: str, problem: dict[str, Any], folder: Path, scratch: str) -> str:
    token = secrets.token_hex(8)
    inside = Path("/tmp", "checkers.py")
    python = folder / "venv" / "bin" / "python"
    walls = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/dev/shm"]
    walls += ["--bind", scratch, "/tmp", "--ro-bind", str(folder), str(folder)]
    walls += ["--ro-bind", str(HERE / "checkers.py"), str(inside), "--chdir", "/tmp", "--unshare-all"]
    walls += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    walls += ["--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "PATH", f"{python.parent}:/usr/bin:/bin"]
    try:
        done = subprocess.run(
            [*walls, "--", str(python), "-s", str(inside), str(folder), checker],
            input=json.dumps({"program": program, "problem": problem, "token": token}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return HUNG
    found = re.search(rf"^{token} (.*)$", done.stdout, flags=re.MULTILINE)
    if not found:
        return CRASHED
    return found[1].replace(" owned", ", code in the checker")


def measure(folder: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Checker → program → verdict, after honest programs got the full score and wrong ones did not."""
    programs = [("honest", *entry) for entry in HONEST] + [("wrong", *entry) for entry in WRONG]
    programs += [("hack", hack.name, hack.kind, hack.program) for hack in HACKS]
    pairs = [(name, *entry) for name in names for entry in programs if entry[2] in KINDS[name]]

    def judge(name: str, group: str, label: str, kind: str, program: str) -> tuple[str, str, str]:
        said = ours(name, kind, program) if name in OURS else theirs(name, kind, program, folder)
        print(f"{name:14} {group:7} {label:45} {said}", flush=True)
        if group != "hack" and said != (FULL if group == "honest" else NOT):
            raise SystemExit(f"{name} says {said!r} of the {group} program {label!r}: it is not used as it should be")
        return name, label if group == "hack" else f"{group}: {kind}: {label}", said

    with ThreadPoolExecutor(2) as pool:
        judged = list(pool.map(judge, *zip(*pairs, strict=True)))
    return {name: {label: said for other, label, said in judged if other == name} for name in names}


def versions(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The measured versions: of a package, or the commit of a repository."""
    found = {"Python": platform.python_version(), "Linux": platform.release()}
    python = str(folder / "venv" / "bin" / "python")
    for name in names:
        if name in OURS:
            found[name] = f"troll-rl {importlib.metadata.version('troll-rl')}"
        elif name in REPOSITORIES:
            command = ["git", "-C", str(folder / REPOSITORIES[name]), "log", "-1", "--format=%h of %cs"]
            found[name] = f"{REPOSITORIES[name]} {_output(command)}"
        else:
            code = f"import importlib.metadata as m; print(m.version({name.lower()!r}))"
            found[name] = f"{name.lower()} {_output([python, '-c', code])} from PyPI"
    return found


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tables(results: dict[str, dict[str, str]]) -> str:
    """A table for each kind of problem: hack × checker."""
    parts = []
    for kind, title in (("function", "A function, called by the tests"), ("stdin", "A program, from input to output")):
        names = [name for name in KINDS if kind in KINDS[name] and name in results]
        hacks = [hack for hack in HACKS if hack.kind == kind]
        rows = [[f"**{title}**", *names], ["---"] * (len(names) + 1)]
        rows += [[hack.name, *(results[name][hack.name].replace(NOT, "–") for name in names)] for hack in hacks]
        counts = [sum(results[name][hack.name].startswith(FULL) for hack in hacks) for name in names]
        rows.append([f"*fooled by, of {len(hacks)}*", *(f"*{count}*" for count in counts)])
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(parts)


def write(page: Path, content: str) -> None:
    """Put the tables between the markers of a page."""
    before, _, rest = page.read_text().partition("<!-- tables -->\n")
    page.write_text(
        f"{before}<!-- tables -->\n{content}\n<!-- end of tables -->{rest.partition('<!-- end of tables -->')[2]}"
    )


def main() -> None:
    """Measure and write; with ``--only``, measure some checkers again and keep the rest."""
    parser = argparse.ArgumentParser(description="Every hack against every checker.")
    parser.add_argument("--checkers", type=Path, required=True, help="folder with venv/ and the repositories")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="checkers to measure")
    given = parser.parse_args()
    file = HERE / "results.json"
    old = json.loads(file.read_text()) if file.exists() else {"versions": {}, "results": {}}
    folder = given.checkers.resolve()
    old["versions"] |= versions(folder, given.only)
    for name in given.only:
        old["results"] |= measure(folder, [name])
        file.write_text(json.dumps(old, indent=1, ensure_ascii=False) + "\n")
    write(HERE / "README.md", tables(old["results"]))


if __name__ == "__main__":
    main()
