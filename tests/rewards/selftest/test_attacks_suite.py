"""The attacks: none succeeds in a sandbox, for any user; and outside of one, or with a wall missing, they do."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import pyseccomp
import pytest

import troll
from troll.errors import InputError
from troll.rewards import judge
from troll.rewards.judge import CodeWorker
from troll.rewards.sandbox import Isolation, isolation, isolations, sandbox
from troll.rewards.selftest import suite
from troll.rewards.selftest.attack import Attack
from troll.rewards.selftest.scene import Scene

WALLS = {walls.name: walls for walls in isolations()}
OPEN = Isolation("open", "no isolation", limits={}, filtered=False)
KNOWN = {"bubblewrap": set(), "landlock": {"existence", "process numbers"}}
THREADS = {"threads", "bare threads"} if os.uname().machine == "x86_64" else {"threads"}
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be, or become, another user")
ANSWERS = {attack.name for attack in suite.ATTACKS if attack.answers}
SHORT = [
    "fork",
    "threads",
    "many blocks",
    "files in memory",
    "unhashable error",
    "colliding items",
    "environment",
    "file",
]
SHORT += [
    "keys",
    "TCP",
    "pair to a socket in a folder",
    "mode",
    "kill",
    "lock",
    "leftovers",
    "other calling conventions",
]


def succeeded(walls: Isolation, *names: str) -> dict[str, suite.Result]:
    results = list(suite.run(walls, names or None))
    assert [result.name for result in results] == [name for name in suite.names() if name in (names or suite.names())]
    return {result.name: result for result in results if not result.held}


def told(found: dict[str, suite.Result]) -> dict[str, str]:
    return {name: result.detail for name, result in found.items()}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[[Container[str]], None]:
    """Gives attacks that are to succeed the time that they need on a busy machine."""

    def make(names: Container[str]) -> None:
        attacks = [
            dataclasses.replace(attack, seconds=10 * attack.seconds) if attack.name in names else attack
            for attack in suite.ATTACKS
        ]
        monkeypatch.setattr(suite, "ATTACKS", tuple(attacks))

    return make


@pytest.mark.parametrize("name", WALLS)
def test_some_attacks_in_a_short_time(name: str) -> None:
    assert told(succeeded(WALLS[name], *SHORT)) == {}


def test_no_answer_is_accepted() -> None:
    assert told(succeeded(WALLS["bubblewrap"], *ANSWERS)) == {}


def test_an_answer_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (attack,) = [attack for attack in suite.ATTACKS if attack.name == "percent"]
    reward = suite.MathReward(size=1)
    monkeypatch.setattr(reward, "score", lambda given, golds: [1.0] * len(given))
    assert next(suite._scored(reward, attack)) == "5\\% was accepted for 5"
    monkeypatch.setattr(reward, "score", lambda given, golds: [0.0] * len(given))
    assert list(suite._scored(reward, attack)) == ["a right answer did not earn 1 after it"]


def test_without_math_verify_its_attacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda _: None)
    assert {attack.name for attack in suite._chosen(None)} == set(suite.names()) - ANSWERS


@pytest.mark.slow
@pytest.mark.parametrize("name", WALLS)
def test_no_attack_succeeds_that_is_not_known_to(name: str) -> None:
    found = succeeded(WALLS[name])
    assert set(told(found)) == KNOWN[name], told(found)
    assert all(result.known for result in found.values())


@pytest.fixture
def for_everybody() -> Iterator[Path]:
    """A copy of the package that any user can read, without what needs torch; pytest's folders are their owner's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(Path(troll.__file__).parent, folder / "troll", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "troll" / "__init__.py").write_text("")
        shutil.copy(pyseccomp.__file__, folder)
        (folder / "home").mkdir()
        os.chown(folder / "home", isolation.NOBODY, isolation.NOBODY)
        folder.chmod(0o755)
        yield folder


@ROOT
@pytest.mark.slow
def test_the_same_as_an_ordinary_user(for_everybody: Path) -> None:
    python, who = isolation.sandbox_python(), isolation.NOBODY
    if not isolation.executable_by_all(Path(python)):
        pytest.skip(f"no Python {sys.version_info.major}.{sys.version_info.minor} that another user can run")
    env = {"PATH": os.environ["PATH"], "HOME": str(for_everybody / "home"), "PYTHONPATH": str(for_everybody)}
    running = {
        name: subprocess.Popen(
            [python, "-B", "-m", "troll.rewards.selftest.suite", "--json", "--isolation", name],
            user=who,
            group=who,
            extra_groups=[],
            cwd=for_everybody,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in WALLS
    }
    for name, process in running.items():
        out, errors = process.communicate(timeout=300)
        results = [json.loads(line) for line in out.splitlines()]
        programs = [name for name in suite.names() if name not in ANSWERS]  # the copy has no math-verify
        assert [result["name"] for result in results] == programs, errors
        found = {result["name"]: result["detail"] for result in results if not result["held"]}
        assert set(found) == KNOWN[name], found
        assert process.returncode == 0


@ROOT
@pytest.mark.slow
def test_root_that_stays_root_has_no_limit_of_threads_and_all_else_holds(
    monkeypatch: pytest.MonkeyPatch, patient: Callable[[Container[str]], None]
) -> None:
    patient(THREADS)
    for module in (sandbox, isolation):
        monkeypatch.setattr(module, "sandbox_user", lambda: None)
    found = succeeded(WALLS["bubblewrap"], *(attack.name for attack in suite.ATTACKS))
    assert told(found).keys() == THREADS, told(found)
    assert all(result.known for result in found.values())


STOLEN = ["environment of others", "file", "file by another way", "keys", "shared memory of others"]
SENT = ["TCP", "UDP", "abstract socket", "abstract datagrams", "socket in a folder", "datagrams into a folder"]
SENT += ["pair to an abstract socket", "pair to a socket in a folder"]
CHANGED = ["write", "overwrite", "truncate", "delete", "mode", "times", "link as result", "exec in a thread"]
KILLED = ["kill", "kill other ways"]
GOT = ["fork", "clone3", "spawn", "daemon", "one block", "many blocks", "files in memory", "many files"]
GOT += ["large file", "pipes", "descriptors", "listing", "existence", "process numbers", "watching", "system files"]
GOT += ["descriptors of others", "leftovers", "lock", "kill all", "signal from a pipe", "trace", "mount", "limits"]
GOT += ["priority", "its own end", "kernel", "machine", "owner", "memory of others"]


@pytest.mark.slow
def test_without_walls_they_succeed(patient: Callable[[Container[str]], None]) -> None:
    """So that an attack that holds says something. Only those that do no harm to the machine."""
    wanted = {*STOLEN, *SENT, *CHANGED, *KILLED, *GOT, *THREADS}
    patient(wanted)
    found = told(succeeded(OPEN, *wanted))
    assert wanted - set(found) == set()
    ways = {"troll-secret-": STOLEN, "a message arrived by ": SENT, "these files have changed: ": CHANGED}
    ways |= {"a process was killed": KILLED, "it got ": GOT}
    for way, names in ways.items():
        assert {name: found[name] for name in names if way not in found[name]} == {}
    assert "a process outlived its run" in found["daemon"]


def test_what_a_careless_parent_hands_down_is_found() -> None:
    """The environment and open descriptors: outside of a sandbox, in a process that gets all of them."""
    programs = {attack.name: attack.program for attack in suite.ATTACKS}
    with Scene() as scene:
        for name in ("environment", "open descriptors"):
            code = f"scene = {scene.facts!r}\n{programs[name]}\nprint(attack())"
            done = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True)
            assert scene.secret in done.stdout, name


@pytest.mark.parametrize(
    ("walls", "names"),
    [
        (dataclasses.replace(WALLS["bubblewrap"], filtered=False), {"fork", "lock", "trace", "kernel"}),
        (dataclasses.replace(WALLS["bubblewrap"], limits={}), {"one block", "pipes", "limits", "descriptors"}),
        (dataclasses.replace(WALLS["bubblewrap"], limits={"RLIMIT_AS": 1 << 33}), {"one block", "threads"}),
        (
            dataclasses.replace(WALLS["landlock"], filtered=False),
            {"mode", "times", "kill", "fork", "lock", "socket in a folder", "pair to a socket in a folder"},
        ),
        (
            dataclasses.replace(WALLS["landlock"], listable=(), readable=()),
            {"file", "file by another way", "keys", "write", "overwrite", "delete", "listing", "installed packages"},
        ),
        (dataclasses.replace(WALLS["landlock"], readable=("/",)), {"file", "keys", "installed packages"}),
    ],
)
def test_every_wall_is_needed(walls: Isolation, names: set[str], patient: Callable[[Container[str]], None]) -> None:
    patient(names)
    if "installed packages" in names and not isolation.packages():
        names = names - {"installed packages"}
    found = succeeded(walls, *names)
    assert set(found) == names, told(found)


def test_bubblewrap_alone_hides_files_network_and_processes() -> None:
    """Without the filter of system calls, which is a second wall in front of these."""
    walls = dataclasses.replace(WALLS["bubblewrap"], filtered=False)
    changed = [name for name in CHANGED if name != "exec in a thread"]
    assert told(succeeded(walls, *STOLEN, *SENT, *changed, *KILLED, "listing", "existence", "interfaces")) == {}


LEAKS = """
import os
def outcome(what):
    try:
        return bool(what())
    except OSError as error:
        return type(error).__name__
def look(file, link, folder, missing):
    ways = {
        "stat": lambda: os.stat(file), "exists": lambda: os.path.exists(file), "access": lambda: os.access(file, 4),
        "readlink": lambda: os.readlink(link), "path": lambda: os.open(file, os.O_PATH),
        "missing": lambda: os.path.exists(missing), "open": lambda: open(file), "listdir": lambda: os.listdir(folder),
        "write": lambda: open(file, "a"), "create": lambda: open(missing, "w"), "chmod": lambda: os.chmod(file, 0o777),
        "utime": lambda: os.utime(file), "truncate": lambda: os.truncate(file, 0), "unlink": lambda: os.unlink(file),
        "chown": lambda: os.chown(file, os.getuid(), -1), "rename": lambda: os.rename(file, missing),
        "link": lambda: os.link(file, missing), "mkdir": lambda: os.mkdir(missing),
    }
    return {name: outcome(way) for name, way in ways.items()}
"""


def test_what_landlock_leaks_is_that_a_file_is_there_and_nothing_else() -> None:
    with Scene() as scene:
        worker = CodeWorker(WALLS["landlock"])
        run = worker.start(judge.inside.serve_calls)
        run.lines.ask(10, {"run": LEAKS})
        places = [scene.facts["own"], scene.facts["link"], scene.facts["home"], scene.facts["open"] + "/missing"]
        reply = run.lines.ask(10, {"evaluate": f"look(*{places!r})"})
        run.end()
        worker.end()
        assert scene.harm() == []
    found = dict(judge.values.decode(reply["value"]))
    leaks = {"stat": True, "exists": True, "access": True, "readlink": True, "path": True, "missing": False}
    filtered = dict.fromkeys(["chmod", "utime", "truncate", "chown", "link"], "PermissionError")
    walled = dict.fromkeys(["open", "listdir", "write", "create", "unlink", "rename", "mkdir"], "PermissionError")
    assert found == {**leaks, **filtered, **walled}


class Test_the_suite_can_fail:  # noqa: N801
    """Each way in which success is seen, shown with an attack that has it."""

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch):
        def make(program: str, *tests: str, **options) -> str:
            attack = Attack("mine", "hack", "It tries.", program, tests, **options)
            monkeypatch.setattr(suite, "_all", lambda: [attack])
            (result,) = suite.run(WALLS["bubblewrap"])
            assert result.held == (result.detail == "")
            return result.detail

        return make

    def test_by_what_it_brings_back(self, made) -> None:
        assert made("def attack(): return 'loot\\x1b'") == "it got 'loot\\x1b'"
        assert made("def attack(): return 0") == ""
        assert made("def attack(): 1 / 0") == ""
        assert made("def attack():\n    while True: pass", seconds=0.2) == ""

    def test_by_the_verdict(self, made) -> None:
        test = "assert f(3) == 9"
        assert made("def f(x): return x * x", test) == "it passed"
        assert made("def f(x): return 8", test) == ""
        assert made("def f(x): return x", "assert f(object()) >= 1").startswith(
            "there is no verdict (a test calls a function with"
        )

    def test_by_a_judge_that_fails(self, made, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "_honest_passes", lambda worker: True)
        monkeypatch.setattr(judge.values, "decode", lambda value: {}[value])
        assert made("def f(x): return 8", "assert f(3) == 9") == "the judge failed (KeyError: None)"

    def test_by_a_judge_that_is_late(self, made, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "GRACE_SECONDS", -100.0)
        assert made("def f(x): return 8", "assert f(3) == 9") == "the judge was delayed"

    def test_by_what_it_takes(self, made, monkeypatch: pytest.MonkeyPatch) -> None:
        wait = suite.ATTACKS[0].program.split("def attack")[0] + "def attack(): time.sleep(1)"
        assert made(wait) == ""
        monkeypatch.setattr(suite, "MAX_THREADS", 0)
        monkeypatch.setattr(suite, "MAX_KILOBYTES", 1 << 10)
        assert made(wait).startswith("it had 1 threads; it had ")

    def test_by_honest_programs_that_no_longer_pass(self, made, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "HONEST", "def f(x): return x")
        assert made("def attack(): pass") == "an honest program did not pass after it"


def test_there_are_enough_and_each_says_what_it_tries() -> None:
    assert len(suite.ATTACKS) >= 100
    assert len(set(suite.names())) == len(suite.names()) > 150
    for attack in suite.ATTACKS:
        assert attack.description.endswith(".")
        assert not attack.description.endswith("..")
        assert attack.known <= {"landlock", "root"}
        compile(attack.program, attack.name, "exec")


def test_an_attack_that_there_is_not() -> None:
    with pytest.raises(InputError, match=r"no attack named frok.*--list"):
        list(suite.run(WALLS["bubblewrap"], ["fork", "frok"]))


def test_as_a_program() -> None:
    def ran(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "troll.rewards.selftest.suite", *flags], capture_output=True, text=True
        )

    assert ran("--list").stdout.splitlines() == suite.names()
    held = ran("--isolation", "landlock", "kill", "existence")
    assert held.returncode == 0
    assert [line.split()[:3] for line in held.stdout.splitlines()] == [
        ["theft", "existence", "known"],
        ["escape", "kill", "held"],
    ]
    (line,) = ran("--json", "kill").stdout.splitlines()
    assert {**json.loads(line), "seconds": 0, "description": ""} == {
        "name": "kill",
        "category": "escape",
        "description": "",
        "held": True,
        "known": False,
        "detail": "",
        "seconds": 0,
    }
