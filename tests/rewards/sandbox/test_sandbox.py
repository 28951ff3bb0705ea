"""The sandbox: how it is chosen, what a run can do, how its end is reported. The attacks are in ``selftest``."""

from __future__ import annotations

import ast
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from troll.errors import InputError
from troll.rewards.sandbox import (
    UNSANDBOXED_VARIABLE,
    Sandbox,
    SandboxError,
    allow_unsandboxed,
    best,
    inside,
    isolation,
    isolations,
    sandbox,
    status,
)
from troll.rewards.sandbox.isolation import bubblewrap, executable_by_all, sandbox_python, sandbox_user, syscall_filter
from troll.rewards.workers.process import PipeClosed, ReplyLate

ALL = {isolation.name: isolation for isolation in isolations(unsandboxed=True)}


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.delenv(UNSANDBOXED_VARIABLE, raising=False)
    sandbox._tried.cache_clear()
    yield
    sandbox._tried.cache_clear()


@pytest.fixture(params=["bubblewrap", "landlock"])
def box(request):
    made = Sandbox([inside], ALL[request.param])
    yield made
    made.end()


def evaluate(box: Sandbox, *expressions: str, setup: str = "import os", limits=None) -> list:
    run = box.start(inside.serve_calls, limits)
    try:
        assert run.lines.ask(10, {"run": setup}) == {"value": None}
        return [run.lines.ask(10, {"evaluate": expression}) for expression in expressions]
    finally:
        run.end()


def test_a_run_answers_and_its_end_is_told(box):
    run = box.start(inside.serve_calls)
    run.lines.ask(10, {"run": "x = [0] * 5_000_000\nfor i in range(300_000): x[i] = i"})
    assert run.lines.ask(10, {"evaluate": "sum(x[:10])"}) == {"value": 45}
    ending = run.end()
    assert (ending.code, ending.signal) == (None, signal.SIGKILL)
    assert ending.kilobytes > 40_000
    assert 0 < ending.seconds < 5


def test_a_run_that_ends_itself(box):
    run = box.start(inside.serve_calls)
    with pytest.raises(PipeClosed):
        run.lines.ask(10, {"run": "import os; os._exit(7)"})
    assert run.end().code == 7


def test_a_run_that_says_nothing_is_late_and_then_killed(box):
    run = box.start(inside.serve_calls)
    with pytest.raises(ReplyLate):
        run.lines.ask(0.3, {"run": "while True: pass"})
    assert run.end().signal == signal.SIGKILL


def test_limits_can_be_others(box):
    run = box.start(inside.serve_calls, {"RLIMIT_CPU": 1})
    with pytest.raises(PipeClosed):
        run.lines.ask(20, {"run": "while True: pass"})
    ending = run.end()
    assert ending.signal == signal.SIGKILL
    assert 0.5 < ending.seconds < 3  # the kernel counts in ticks
    many = evaluate(box, "len(os.listdir('/usr'))", "os.open('/usr', 0)", limits={"RLIMIT_NOFILE": 5})
    assert many[1] == {"error": "limit"}
    with pytest.raises(SandboxError, match="a run did not start"):
        box.start(inside.serve_calls, {"RLIMIT_NONSENSE": 1})
    assert evaluate(box, "1 + 1") == [{"value": 2}]


def test_without_file_descriptors_it_is_the_sandbox_that_fails(box):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [int(name) for name in os.listdir("/proc/self/fd")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
    free = [os.open("/dev/null", 0) for _ in range(max(used) + 1 - len(used))]
    try:
        with pytest.raises(SandboxError, match="ulimit -n"):
            box.start(inside.serve_calls)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in free:
            os.close(handle)
    assert evaluate(box, "1 + 1") == [{"value": 2}]


def test_runs_know_nothing_of_each_other():
    box = Sandbox([inside], ALL["bubblewrap"])
    assert box.reusable
    write = "import os\nopen('/tmp/left', 'w').write('x')\nimport sys\nsys.left = 1"
    assert evaluate(box, "os.listdir('/tmp')", "sys.left", "os.getpid()", setup=write) == [
        {"value": ["left"]},
        {"value": 1},
        {"value": 1},
    ]
    assert evaluate(box, "os.listdir('/tmp')", "hasattr(sys, 'left')", setup="import os, sys") == [
        {"value": []},
        {"value": False},
    ]
    first, second = box.start(inside.serve_calls), box.start(inside.serve_calls)  # side by side
    for run, word in ((first, "one"), (second, "two")):
        run.lines.ask(10, {"run": f"open('/tmp/{word}', 'w')"})
    for run, word in ((first, "one"), (second, "two")):
        assert run.lines.ask(10, {"run": "import os"}) == {"value": None}
        assert run.lines.ask(10, {"evaluate": "os.listdir('/tmp')"}) == {"value": [word]}
    first.end(), second.end()
    box.end()


def test_landlock_is_used_once():
    box = Sandbox([inside], ALL["landlock"])
    assert not box.reusable
    box.end()


def test_what_honest_programs_use_works(box):
    setup = """
import asyncio, threading, datetime, random, decimal, re, hashlib, time, sqlite3, json, os
import subprocess, multiprocessing, ssl
async def later(): await asyncio.sleep(0.01); return 3
found = []
threads = [threading.Thread(target=found.append, args=(i,)) for i in range(20)]
for t in threads: t.start()
for t in threads: t.join()
"""
    assert evaluate(
        box,
        "asyncio.run(later())",
        "sorted(found)[-1]",
        "hashlib.sha256(b'').hexdigest()[:4]",
        "sqlite3.connect(':memory:').execute('select 1+1').fetchone()",
        "len(os.urandom(8)), random.random() < 1",
        "time.time() > 0 and datetime.datetime.now().year > 2000",
        setup=setup,
    ) == [
        {"value": 3},
        {"value": 19},
        {"value": "e3b0"},
        {"value": {"tuple": [2]}},
        {"value": {"tuple": [8, True]}},
        {"value": True},
    ]


def test_hashes_are_the_same_in_every_sandbox(box):
    assert evaluate(box, "hash('a word')") == evaluate(box, "hash('a word')")
    other = Sandbox([inside], box.isolation)
    assert evaluate(box, "list({'a', 'b', 'c', 'd'})") == evaluate(other, "list({'a', 'b', 'c', 'd'})")
    other.end()


def test_everything_ends_with_the_sandbox(box):
    run = box.start(inside.serve_calls)
    assert run.lines.ask(10, {"evaluate": "1"}) == {"value": 1}
    box.end()
    with pytest.raises(PipeClosed):
        run.lines.receive(20)
    with pytest.raises(SandboxError, match="ended before its run"):
        run.wait(20)
    run.close()
    with pytest.raises(SandboxError, match=f"{box.isolation.name} has ended"):
        box.start(inside.serve_calls)


def test_a_sandbox_dies_with_its_owner(tmp_path):
    script = """
import sys, time
from troll.rewards.sandbox import Sandbox, inside, isolations
for isolation in isolations()[:2]:
    box = Sandbox([inside], isolation)
    run = box.start(inside.serve_calls)
    run.lines.send(5, {"run": "while True: pass"})
    print(box._process.pid, flush=True)
    globals()[isolation.name] = box, run
time.sleep(100)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    started = [int(owner.stdout.readline()) for _ in range(2)]
    children = [child for pid in started for child in _below(pid)]
    assert len(children) >= 4  # of each a server's supervisor and a run, at least
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 20
    while time.monotonic() < until and any(map(_lives, [*started, *children])):
        time.sleep(0.05)
    assert [pid for pid in (*started, *children) if _lives(pid)] == []


def _below(pid: int) -> list[int]:
    """All processes that a process started, and those that they did."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *_below(child)]
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_fork_of_the_owner_does_not_end_the_sandbox(box):
    pid = os.fork()
    if pid == 0:
        box.end()
        os._exit(0)
    os.waitpid(pid, 0)
    assert evaluate(box, "1 + 1") == [{"value": 2}]


def test_modules_that_do_not_load_are_said():
    broken = types.ModuleType("broken")
    broken.__file__ = str(Path(__file__).parent / "broken_module.txt")
    with pytest.raises(SandboxError, match=r"did not start \(SyntaxError"):
        Sandbox([broken], ALL["bubblewrap"])


def test_status_is_found_by_running_a_program(fresh):
    usable, name, why = status()
    assert (usable, name) == (True, "bubblewrap")
    assert why == "a test program ran, without network, files, privileges and most system calls"
    assert best().name == "bubblewrap"


def test_without_bubblewrap_it_is_landlock(monkeypatch, tmp_path, fresh):
    monkeypatch.setenv("PATH", str(tmp_path))
    usable, name, why = status()
    assert (usable, name) == (True, "landlock")
    assert "bubblewrap, the sandbox for model-written code, is not installed" in why
    assert best().name == "landlock"


def test_bubblewrap_that_does_not_start_is_said(monkeypatch, tmp_path, fresh):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"bubblewrap did not start \(.*"):
        Sandbox([inside], ALL["bubblewrap"])
    usable, name, why = status()
    assert (usable, name) == (True, "landlock")
    assert "bubblewrap did not start" in why


def nothing_holds(monkeypatch, tmp_path):
    """A machine without namespaces and without Landlock."""
    monkeypatch.setenv("PATH", str(tmp_path))
    server = sandbox._SERVER.read_text().replace('call("syscall", 444, None, 0, 1)', 'call("syscall", 99999, 0, 0, 0)')
    (tmp_path / "server.py").write_text(server)
    monkeypatch.setattr(sandbox, "_SERVER", tmp_path / "server.py")


def test_without_walls_nothing_runs(monkeypatch, tmp_path, fresh):
    nothing_holds(monkeypatch, tmp_path)
    usable, name, why = status()
    assert (usable, name) == (False, "none")
    assert "is not installed" in why
    assert "landlock did not start" in why
    assert "Function not implemented" in why
    with pytest.raises(SandboxError, match="--allow_unsandboxed_code") as raised:
        Sandbox([inside])
    assert "apt install bubblewrap" in str(raised.value)


def test_code_runs_without_a_sandbox_only_if_allowed(monkeypatch, tmp_path, fresh):
    nothing_holds(monkeypatch, tmp_path)
    allow_unsandboxed(False)
    assert status()[0] is False
    monkeypatch.setenv(UNSANDBOXED_VARIABLE, "yes")
    assert status()[0] is False
    allow_unsandboxed(True)
    usable, name, why = status()
    assert (usable, name) == (True, "none")
    assert f"with all your permissions, because {UNSANDBOXED_VARIABLE} is set" in why
    box = Sandbox([inside])
    assert box.isolation.name == "none"
    assert evaluate(box, "os.path.exists('/proc/1')") == [{"value": True}]
    box.end()


def test_a_working_sandbox_is_used_even_if_none_is_allowed(monkeypatch, fresh):
    monkeypatch.setenv(UNSANDBOXED_VARIABLE, "1")
    assert best().name == "bubblewrap"


def test_without_the_filter_nothing_runs(monkeypatch, fresh):
    syscall_filter.cache_clear()
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(InputError, match="apt install libseccomp2"):
        Sandbox([inside], ALL["bubblewrap"])
    assert status()[0] is False
    monkeypatch.undo()
    syscall_filter.cache_clear()


def test_the_filter_lets_no_process_be_made_and_no_signal_sent():
    names = set(isolation._ALLOWED.split()) | set(isolation._ONE_OF)
    never = """fork vfork clone clone3 execve execveat kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open
    pidfd_send_signal pidfd_getfd ptrace process_vm_readv process_vm_writev socket connect bind listen accept mount
    umount2 unshare setns pivot_root chroot chmod fchmod fchmodat chown io_uring_setup bpf perf_event_open keyctl
    add_key userfaultfd memfd_create shmget shmat msgget semget mq_open setpriority sched_setaffinity personality
    init_module kexec_load reboot swapon quotactl name_to_handle_at open_by_handle_at setuid capset seccomp iopl"""
    assert names.isdisjoint(never.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave root")
def test_root_is_left_where_the_interpreter_allows_it(box):
    if not executable_by_all(Path(sandbox_python())):
        pytest.skip("only root can reach the interpreter")
    assert sandbox_user() == 65534
    status_file = Path(f"/proc/{box._process.pid}/status").read_text()
    assert "Uid:\t65534\t65534\t65534\t65534" in status_file
    assert "Groups:\t \n" in status_file


def test_who_may_run_an_interpreter(tmp_path):
    tmp_path.chmod(0o755)
    program = tmp_path / "program"
    program.write_text("")
    program.chmod(0o755)
    reachable = all(part.stat().st_mode & 0o001 for part in tmp_path.parents)
    assert executable_by_all(program) is reachable
    program.chmod(0o750)
    assert not executable_by_all(program)
    assert not executable_by_all(tmp_path / "missing")


def test_the_server_is_plain_python_of_the_standard_library():
    source = Path(sandbox.__file__).with_name("server.py").read_text()
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imported if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_command_in_bubblewrap(tmp_path):
    (tmp_path / "note").write_text("seen")
    done = subprocess.run(
        bubblewrap(["/bin/sh", "-c", "cat /seen/note; echo $WORD; ls /"], {"/seen": tmp_path}, {"WORD": "said"}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("seensaid\n")
    assert "home" not in done.stdout
    assert "proc" not in done.stdout


def test_many_threads_share_a_sandbox():
    box = Sandbox([inside], ALL["bubblewrap"])
    wrong: list[int] = []

    def ask(start: int) -> None:
        for n in range(start, start + 20):
            run = box.start(inside.probe)
            if run.lines.ask(20, n) != 7 * n:
                wrong.append(n)
            run.end()

    threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    box.end()
    assert wrong == []
