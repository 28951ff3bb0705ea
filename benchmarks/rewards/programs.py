"""Programs judged per second in each sandbox, and whether a mixed batch loses a verdict.

python benchmarks/rewards/programs.py            prints tables and writes programs.json beside this file
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from troll.rewards.code import CodeReward
from troll.rewards.sandbox import Isolation, Sandbox, inside, isolations
from troll.rewards.sandbox.isolation import sandbox_python

CORES = len(os.sched_getaffinity(0))
ROUNDS, RUNS = 3, 1000
BOMBS = (
    "def f(x):\n    while True: pass",
    "import os\nwhile True: os.fork()",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "def f(x): return 10**10**8",
    "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "import os\nos.write(4, b'x' * (8 << 20))",
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "import os\nfor n in range(10**6): open(f'/tmp/{n}', 'w').write('x' * 10**6)",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "import os\nos.kill(1, 9)\nos._exit(0)",
)


def functions(count: int) -> tuple[list[str], list[Any]]:
    """Trivial programs with one call each."""
    return [f"def f(x): return x + {n}" for n in range(count)], [[f"assert f(1) == {n + 1}"] for n in range(count)]


def streams(count: int) -> tuple[list[str], list[Any]]:
    """Trivial programs that read and print."""
    tests = [{"inputs": ["1"], "outputs": [f"{n + 1}"]} for n in range(count)]
    return [f"print(int(input()) + {n})" for n in range(count)], tests


def judged(programs: list[str], tests: list[Any], isolation: Isolation) -> float:
    """Programs per second, all of them right."""
    reward = CodeReward(isolation=isolation)
    reward(completions=programs[:8], tests=tests[:8])  # starts the sandboxes
    began = time.perf_counter()
    found = reward(completions=programs, tests=tests)
    seconds = time.perf_counter() - began
    reward.close()
    assert found == [1.0] * len(programs)
    return len(programs) / seconds


def plain(count: int) -> float:
    """Programs per second with a plain Python process each and no isolation, as the baseline."""
    began = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        said = list(pool.map(lambda n: _python(f"def f(x): return x + {n}\nprint(f(1))"), range(count)))
    assert said == [f"{n + 1}\n" for n in range(count)]
    return count / (time.perf_counter() - began)


def _python(source: str) -> str:
    return subprocess.run(
        [sandbox_python(), "-I", "-S", "-c", source], capture_output=True, text=True, check=True
    ).stdout


def starts(isolation: Isolation, count: int = 20) -> float:
    """Seconds until the first answer of a new sandbox."""
    began = time.perf_counter()
    for n in range(count):
        sandbox = Sandbox([inside], isolation)
        run = sandbox.start(inside.probe)
        assert run.lines.ask(60, n) == 7 * n
        run.end()
        sandbox.end()
    return (time.perf_counter() - began) / count


def mixed(count: int = 1000) -> dict[str, Any]:
    """A batch with 5 % bombs: its time, and how many verdicts are lost or wrong."""
    rng = random.Random(0)
    rows = []
    for n in range(count):
        shift = rng.choice([n, n + 1])
        if n % 20 == 0:
            rows.append((BOMBS[n // 20 % len(BOMBS)], [f"assert f({n}) == {n}"], 0.0))
        elif n % 2:
            rows.append(
                (f"print(int(input()) + {n})", {"inputs": ["5"], "outputs": [f"{5 + shift}"]}, float(shift == n))
            )
        else:
            rows.append((f"def f(x): return x * {n}", [f"assert f(2) == {2 * shift}"], float(shift == n)))
    rng.shuffle(rows)
    programs, tests, right = zip(*rows, strict=True)
    reward = CodeReward(seconds=2.0)
    began = time.perf_counter()
    found = reward(completions=programs, tests=tests)
    seconds = time.perf_counter() - began
    statuses: Counter[str] = Counter()
    reward(
        completions=programs, tests=tests, log_metric=lambda name, share: statuses.update({name: round(share * count)})
    )
    reward.close()
    return {
        "programs": count,
        "bombs": sum(n % 20 == 0 for n in range(count)),
        "seconds": round(seconds, 1),
        "lost": sum(given is None for given in found),
        "wrong": sum(given != due for given, due in zip(found, right, strict=True)),
        "statuses": dict(statuses),
    }


def main() -> None:
    """Measure, print, write."""
    walls = {isolation.name: isolation for isolation in isolations()}
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):  # everything in every round, so that ratios are fair
        rounds.append(
            {
                "a process each, no sandbox": plain(RUNS // 5),
                "bubblewrap, functions": judged(*functions(RUNS), walls["bubblewrap"]),
                "bubblewrap, standard input": judged(*streams(RUNS), walls["bubblewrap"]),
                "Landlock, functions": judged(*functions(RUNS // 5), walls["landlock"]),
            }
        )
        print(json.dumps(rounds[-1]), file=sys.stderr)
    result = {
        "processor": next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.processor(),
        ),
        "cores": CORES,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "bubblewrap": subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.strip(),
        "load_before": os.getloadavg()[0],
        "per_second": rounds,
        "start_seconds": {name: starts(isolation) for name, isolation in walls.items()},
        "mixed": mixed(),
    }
    print(f"{result['processor']}, {CORES} cores, {result['bubblewrap']}\n")
    print("| programs per second | median | all rounds | against a process each |\n|---|---|---|---|")
    base = [one["a process each, no sandbox"] for one in rounds]
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        ratios = sorted(value / first for value, first in zip(values, base, strict=True))
        shown = ", ".join(f"{value:.0f}" for value in values)
        print(f"| {name} | {sorted(values)[ROUNDS // 2]:.0f} | {shown} | {ratios[ROUNDS // 2]:.2f} |")
    print("\n| start of a sandbox | ms |\n|---|---|")
    for name, seconds in result["start_seconds"].items():  # type: ignore[attr-defined]
        print(f"| {name} | {1000 * seconds:.0f} |")
    print(f"\nMixed batch: {result['mixed']}")
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
