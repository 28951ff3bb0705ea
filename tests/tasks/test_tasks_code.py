"""Model-written code: what passes, what does not, and programs that try to cheat or to get out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import pytest

from troll.errors import InputError
from troll.tasks import load_task, programs, sandbox, sandbox_status
from troll.tasks.programs import Expression, Statement, code_of, parse_test, same, verdict
from troll.tasks.sandbox import Sandbox, SandboxError

MBPP = [
    {
        "task_id": n,
        "text": f"Write a function to add {n}.",
        "test_list": [f"assert add(1) == {n + 1}", f"assert add(-{n}) == 0"],
        "test_setup_code": "",
    }
    for n in range(4)
]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef top(xs: List[int]) -> int:\n    '''Largest of xs.'''\n",
    "entry_point": "top",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3]) == 3, 'a'\n    assert True, 'b'\n"
    "    assert abs(candidate([-1.0]) + 1) < 1e-6\n",
}
GOOD = "def top(xs: List[int]) -> int:\n    return max(xs)"
TESTS = ["assert f(3) == 9", "assert f(-2) == 4"]
SQUARE = "def f(x):\n    return x * x\n"


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reward(task, index, *texts):
    row = {key: [value] * len(texts) for key, value in task.train[index].items()}
    return task.reward_funcs[0](prompts=row.pop("prompt"), completions=[[{"content": t}] for t in texts], **row)


def test_mbpp(tmp_path):
    task = load_task("mbpp", data=write(tmp_path / "mbpp.jsonl", MBPP))
    row = task.train[0]
    n = int(row["prompt"][0]["content"].split("add ")[1].split(".")[0])
    assert f"assert add(1) == {n + 1}" in row["prompt"][0]["content"]
    assert f"add(-{n}) == 0" not in row["prompt"][0]["content"]  # only the first test is shown
    right = f"```python\ndef add(x):\n    return x + {n}\n```"
    assert reward(task, 0, f"Here:\n{right}\nIt adds.", f"def add(x): return {n + 1}", "", "Sorry.") == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_what_mbpp_sets_up_runs_after_the_program(tmp_path):
    row = {**MBPP[0], "test_setup_code": "node = Node(7)", "test_list": ["assert value(node) == 7"]}
    task = load_task("mbpp", data=write(tmp_path / "m.jsonl", [row, {**row, "text": "Other."}]), held_out_size=1)
    program = "class Node:\n    def __init__(self, v): self.v = v\ndef value(n): return n.v\n"
    assert reward(task, 0, program, program.replace("Node", "Knot")) == [1.0, 0.0]


def test_humaneval(tmp_path):
    rows = [HUMANEVAL, {**HUMANEVAL, "prompt": HUMANEVAL["prompt"].replace("Largest", "Most")}]
    task = load_task("humaneval", data=write(tmp_path / "h.jsonl", rows), held_out_size=1)
    assert task.train["tests"][0] == ["assert top([1, 3]) == 3, 'a'", "assert abs(top([-1.0]) + 1) < 1e-06"]
    assert reward(task, 0, GOOD, GOOD.replace("max", "min"), "def top(xs): return 3") == [1.0, 0.0, 0.0]


def test_humaneval_with_more_than_asserts_runs_whole(tmp_path):
    test = "def check(candidate):\n    for n in range(3):\n        assert candidate([n, 0]) == n\n"
    rows = [{**HUMANEVAL, "test": test}, {**HUMANEVAL, "test": test, "prompt": HUMANEVAL["prompt"] + "#"}]
    task = load_task("humaneval", data=write(tmp_path / "h.jsonl", rows), held_out_size=1)
    assert task.train["tests"][0] == [f"{test}\ncheck(top)"]
    assert reward(task, 0, GOOD, GOOD.replace("max", "min")) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("assert f(1) == 2", Expression("f(1)", 2)),
        ("assert 2 == f(1), 'message'", Expression("f(1)", 2)),
        ("assert f((1, 2)) == -1.5", Expression("f((1, 2))", -1.5)),
        ("assert set(f(1)) == set((4, 5))", Expression("set(f(1))", {4, 5})),
        ("assert f(1) == [('a', None), {'b': True}]", Expression("f(1)", [("a", None), {"b": True}])),
        ("assert f(1) == g(1)", Statement("assert f(1) == g(1)")),
        ("assert f(1)", Statement("assert f(1)")),
        ("assert 1 == f(1) == 1", Statement("assert 1 == f(1) == 1")),
        ("assert f(1) != 2", Statement("assert f(1) != 2")),
        ("x = 1\nassert f(x) == 2", Statement("x = 1\nassert f(x) == 2")),
    ],
)
def test_expected_values_are_taken_out_of_tests(source, test):
    assert parse_test(source) == test


@pytest.mark.parametrize(
    ("given", "right", "equal"),
    [
        (1, 1.0, True),
        (True, 1, False),
        ([True], [1], False),
        ((1, [2]), (1, [2.0]), True),
        ([1], (1,), False),
        ({"a": 1}, {"a": True}, False),
        ({1: 2}, {1: 2}, True),
        ({1, 2}, {2, 1}, True),
        ("1", 1, False),
        ([1], [1, 2], False),
    ],
)
def test_same(given, right, equal):
    assert same(given, right) is equal


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1", "a = 1"),
        ("x\n```python\na = 1\n```\ny\n```\nb = 2\n```\nz", "b = 2"),
        ("```py\na = 1", "a = 1"),  # cut off
        ("  a = 1\n", "  a = 1"),
        ("\n", None),
        ("```\n\n```", None),
    ],
)
def test_code_of_a_completion(text, code):
    assert code_of(text) == code


def test_programs_that_do_what_they_should():
    assert verdict(SQUARE, TESTS) == "pass"
    assert verdict("print('hello', flush=True)\nimport sys\nsys.stderr.write('x')\n" + SQUARE, TESTS) == "pass"
    counter = "from collections import Counter\ndef f(x):\n    return Counter(x)\n"
    assert verdict(counter, ["assert f('aab') == {'a': 2, 'b': 1}"]) == "pass"
    assert verdict("import math\n" + SQUARE, ["assert math.isclose(f(3), 9)"]) == "pass"
    assert verdict(SQUARE, ["assert f(3) == 10"]) == "wrong"
    assert verdict(SQUARE, ["assert f(3) > 10"]) == "wrong"
    assert verdict("def f(x) return x", TESTS) == "error"


REPLY = '{"token": "", "reply": "9"}'
EQUAL = "def __eq__(self, other): return True"
CHEATS = {
    "always equal": f"class A:\n    {EQUAL}\n    __hash__ = None\ndef f(x): return A()",
    "literal repr of its own": "class A(int):\n    def __repr__(self): return '9 or 4'\ndef f(x): return A()",
    "number that equals all numbers": f"class A(float):\n    {EQUAL}\ndef f(x): return A('nan')",
    "exit with success": "import os\ndef f(x): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "raise SystemExit": "def f(x): raise SystemExit(0)",
    "patched builtins": "import builtins\nbuiltins.repr = lambda x: '9'\ndef f(x): return 9",
    "patched json": f"import json\njson.dumps = lambda x: {REPLY!r}\ndef f(x): return 0",
    "printed success": f"print({REPLY!r})\ndef f(x): print({REPLY!r}); return 0",
    "replies before the question": f"""
import os
for n in range(3, 9):
    try: os.write(n, b'{REPLY}\\n' * 3)
    except OSError: pass
def f(x): return 0""",
    "reply too long": "def f(x): return 'x' * 10**7",
    "deep reply": "def f(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
    "looks for the expected value in frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for v in [*frame.f_locals.values()]:
            if isinstance(v, dict) and 'value' in v: return eval(v['value'])
        frame = frame.f_back""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_programs_that_cheat_do_not_pass(name):
    assert verdict(CHEATS[name], TESTS) != "pass"


def test_a_program_cannot_reply_in_place_of_a_test_that_runs_inside():
    leave = "import os\nclass A:\n    def __gt__(self, other): os._exit(0)\ndef f(x): return A()"
    assert verdict(leave, ["assert f(3) > 2"]) != "pass"
    guess = """
import os
class A:
    def __gt__(self, other):
        for n in range(3, 9):
            try: os.write(n, b'{"token": "", "reply": true}\\n')
            except OSError: pass
        os._exit(0)
def f(x): return A()"""
    assert verdict(guess, ["assert f(3) > 2"]) != "pass"


def inside(*expressions: str, setup: str = "") -> list[str | None]:
    with Sandbox(60.0) as box:
        assert box.run("import os, socket, subprocess, resource, signal, ctypes\n" + setup)
        return [box.evaluate(expression) for expression in expressions]


def test_nothing_of_ours_can_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "secret").write_text("secret")
    variables, root, home, file, processes, files = inside(
        "dict(os.environ)",
        "sorted(os.listdir('/'))",
        "os.path.exists(os.path.expanduser('~/.ssh')) or os.path.exists('/home') or os.path.exists('/etc/passwd')",
        f"open({str(tmp_path / 'secret')!r}).read()",
        "[open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]",
        "[os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]",
    )
    assert set(eval(variables)) <= {"PWD", "LC_CTYPE"}
    assert "pytest" not in processes
    assert len(eval(processes)) == 2  # bubblewrap's and its own
    assert "driver.py" in root
    assert home == "False"
    assert file is None
    assert str(tmp_path) not in files


def test_nothing_of_ours_can_be_written(tmp_path):
    written = inside(
        f"os.makedirs({str(tmp_path / 'a')!r})",
        "open('/usr/a', 'w')",
        "open('/driver.py', 'a')",
        "os.chmod('/usr/bin', 0o777)",
        "open('/dev/a', 'w')",
        "open('/a', 'w')",
        "ctypes.CDLL(None).mount(None, b'/', None, 0x20, None)",
        "open('/tmp/mine', 'w').write('x')",
        "os.getuid()",
    )
    assert written[1:6] == [None] * 5
    assert written[6] == "-1"
    assert written[7:] == ["1", "65534"]
    assert not (tmp_path / "a").exists()


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert inside(f"socket.create_connection(('127.0.0.1', {port}), 2)", "len(socket.if_nameindex())") == [
            None,
            "1",
        ]


def test_limits_hold_and_cannot_be_raised():
    raised, memory, disk, opened = inside(
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "len(bytearray(3 << 30))",
        "open('/tmp/big', 'wb').write(b'x' * (100 << 20))",
        "len([os.open('/dev/null', 0) for _ in range(100)])",
        setup="signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
    )
    assert [raised, memory, disk, opened] == [None] * 4


def test_a_program_that_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(programs, "SECONDS", 1.0)
    spin = (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    assert verdict(spin + "while True: pass", TESTS) == "out of time"
    assert verdict("def f(x):\n    while True: pass", TESTS) == "out of time"


def test_what_a_program_starts_dies_with_it():
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    with Sandbox(60.0) as box:
        box.run(f"""
import os
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        os.execv('/usr/bin/sleep', ['{mark}', '1000'])""")
    for _ in range(100):
        if not any(mark in command for command in commands()):
            return
        time.sleep(0.1)
    pytest.fail("a child outlived the sandbox")


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return found


def test_status_is_found_by_running_a_program():
    assert sandbox_status() == (True, "bubblewrap", "a program ran in it, without network, files and privileges")


@pytest.fixture
def fresh_status():
    sandbox_status.cache_clear()
    yield
    sandbox_status.cache_clear()


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path, fresh_status):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sandbox_status() == (False, "none", "bubblewrap is not installed: apt install bubblewrap")
    with pytest.raises(InputError, match=r"the task mbpp, with the sandbox none .*try: apt install bubblewrap"):
        load_task("mbpp", data=write(tmp_path / "mbpp.jsonl", MBPP))
    with pytest.raises(InputError, match="apt install bubblewrap"):
        load_task("gym:spiral_matrix", train_size=1, held_out_size=1)
    with pytest.raises(InputError, match="apt install bubblewrap"):
        programs.passes_tests([SQUARE], tests=[TESTS], setup=[""])


def test_a_sandbox_that_does_not_start_is_an_error_and_no_reward(monkeypatch, tmp_path, fresh_status):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="did not start \\(bwrap: No permissions to create new namespace\\)"):
        programs.passes_tests([SQUARE], tests=[TESTS], setup=[""])
    usable, name, why = sandbox_status()
    assert (usable, name) == (False, "bubblewrap")
    assert "No permissions" in why


def test_a_setup_that_does_not_run_is_an_error_and_no_reward():
    with pytest.raises(SandboxError, match="import no_such_module"):
        verdict(SQUARE, TESTS, setup="import no_such_module")


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        (
            "mbpp",
            {**MBPP[0], "test_list": ["assert f( == 1"]},
            "m.jsonl, line 1: 'assert f\\( == 1' .*expected: Python code",
        ),
        ("mbpp", {**MBPP[0], "test_list": [3]}, "line 1: 3 .*expected: Python code"),
        ("mbpp", {**MBPP[0], "test_list": []}, "line 1: test_list is empty"),
        ("mbpp", {"text": "a"}, "line 1: text; expected: the field 'test_list'"),
        ("humaneval", {**HUMANEVAL, "entry_point": None}, "line 1: entry_point=None"),
    ],
)
def test_records_that_cannot_be_used_are_said(tmp_path, name, row, says):
    with pytest.raises(InputError, match=says):
        load_task(name, data=write(tmp_path / "m.jsonl", [row, row]))


def test_the_sandbox_is_not_left_open():
    assert sandbox.command(["true"], {})[-2:] == ["--", "true"]
    with Sandbox(10.0) as box:
        box.run("1")
        process = box._conversation._process
    assert process.poll() is not None
