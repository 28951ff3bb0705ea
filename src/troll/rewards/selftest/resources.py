"""Attacks on resources: processes, memory, disk and time of the machine, and replies that break or delay the judge."""

from __future__ import annotations

from typing import Any

from troll.rewards.selftest.attack import Attack, body

MAX_THREADS = 400  # more than a run may have
LARGE = 3 << 30  # bytes, more than a run may have

_FORK = """
pid = {fork}
if pid == 0:
    time.sleep(4)
    os._exit(0)
return pid > 0 and "it has a child"
"""
_THREAD_FLAGS = 0x00050F00  # CLONE_VM | FS | FILES | SIGHAND | THREAD | SYSVSEM
_BARE = f"""
import mmap
if os.uname().machine != "x86_64":
    return None
code = mmap.mmap(-1, 4096, prot=7)  # clone; the child pauses for ever and needs no stack
code.write(bytes.fromhex("b83800000031d24d31d24d31c00f0585c07401c3b8220000000f05ebf7"))
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
clone = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong)(address)
threads = 0
while threads < 3000 and clone({_THREAD_FLAGS}, address + 4096) > 0:
    threads += 1
return threads > {MAX_THREADS} and f"{{threads}} threads"
"""
_FILL = """
import contextlib, itertools
filled = 0
for folder in (".", "/tmp", "/dev/shm", "/dev", "/", scene["open"]):
    with contextlib.suppress(OSError):
        for name in itertools.count():
            with open(f"{folder}/x{name}", "wb") as file:
                while file.tell() < 15 << 20 and filled <= 200 << 20:
                    filled += file.write(bytes(1 << 20))
            if filled > 200 << 20:
                [os.unlink(f"{folder}/x{n}") for n in range(name + 1)]
                return f"{filled >> 20} MB in files"
"""
_INODES = """
import contextlib
made = 0
for folder in (".", "/tmp", "/dev/shm"):
    with contextlib.suppress(OSError):
        for name in range(3000):
            os.close(os.open(f"{folder}/i{name}", os.O_CREAT))
            made += 1
        [os.unlink(f"{folder}/i{name}") for name in range(3000)]
return made > 2100 and f"{made} files"
"""
_BUFFERS = """
import contextlib
held = kept = 0
pairs = []
with contextlib.suppress(OSError):
    while True:
        pairs.append(os.pipe())
        with contextlib.suppress(OSError):
            import fcntl
            fcntl.fcntl(pairs[-1][1], 1031, 1 << 20)
        os.set_blocking(pairs[-1][1], False)
        with contextlib.suppress(BlockingIOError):
            while True:
                held += os.write(pairs[-1][1], bytes(1 << 16))
return held > 30 << 20 and f"{held >> 20} MB in pipes"
"""


def _attack(name: str, description: str, code: str, **options: Any) -> Attack:
    return Attack(name, "resources", description, body(code), **options)


PROCESSES = (
    _attack("fork", "Starts another process, as a fork bomb does.", _FORK.format(fork="os.fork()")),
    _attack(
        "bare clone",
        "The same by the system call, with other flags.",
        _FORK.format(fork="libc.syscall(number(56, 220), 0x80000000 | 17, 0, 0, 0, 0)"),
    ),
    _attack(
        "clone3",
        "The same by the call whose flags no filter sees.",
        """
        flags = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
        pid = libc.syscall(435, ctypes.byref(flags), 88)
        if pid == 0:
            os._exit(0)
        return pid > 0 and "it has a child"
        """,
    ),
    _attack("vfork", "The same by the call that borrows memory.", "return done(number(58, -1), 0)"),
    _attack(
        "spawn",
        "Runs a shell.",
        """
        import subprocess
        return subprocess.run(["/bin/sh", "-c", "echo ran"], capture_output=True, text=True).stdout
        """,
    ),
    _attack(
        "daemon",
        "Forks twice, so that what is left belongs to nobody, and stays when its run ends.",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(5)
            os._exit(0)
        os.wait()
        return "it has a daemon"
        """,
    ),
    _attack(
        "exec in a thread",
        "Replaces itself by another program.",
        """
        command = ["sh", "-c", f"echo x > {scene['open']}/mine"]
        threading.Thread(target=lambda: os.execv("/bin/sh", command)).start()
        time.sleep(0.3)
        """,
    ),
    _attack(
        "threads",
        f"Starts more than {MAX_THREADS} threads.",
        f"""
        threading.stack_size(1 << 16)
        threads = 0
        try:
            while threads < 1000:
                threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
                threads += 1
        except RuntimeError:
            pass
        return threads > {MAX_THREADS} and f"{{threads}} threads"
        """,
        known=frozenset({"root"}),
    ),
    _attack(
        "bare threads", "Starts thousands of threads that have no stack.", _BARE, seconds=5.0, known=frozenset({"root"})
    ),
)

MEMORY = (
    _attack("one block", "Asks for 3 GB at once.", f"import mmap\nreturn mmap.mmap(-1, {LARGE}) and '3 GB'"),
    _attack(
        "many blocks",
        "Asks for 3 GB in pieces, from many threads.",
        f"""
        import mmap
        kept = []
        def more():
            while len(kept) < {LARGE >> 24}:
                kept.append(mmap.mmap(-1, 1 << 24))
        for thread in [threading.Thread(target=more) for _ in range(8)]:
            thread.start()
        for thread in threading.enumerate()[1:]:
            thread.join()
        return len(kept) >= {LARGE >> 24} and "3 GB"
        """,
    ),
    _attack("files in memory", "Fills every folder that it can write to.", _FILL, runs=2),
    _attack("many files", "Makes thousands of files.", _INODES, runs=2),
    _attack(
        "large file",
        "Makes a file of 100 MB.",
        """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for folder in ("/tmp", scene["open"]):
            try:
                with open(folder + "/large", "wb") as file:
                    os.unlink(file.name)
                    file.truncate(100 << 20)
                    return "100 MB"
            except OSError:
                pass
        """,
    ),
    _attack("pipes", "Keeps data in pipes, where no limit of memory counts.", _BUFFERS),
    _attack(
        "descriptors", "Opens a thousand files.", "return len([os.dup(0) for _ in range(1000)]) and '1000 descriptors'"
    ),
    _attack("anonymous files", "Makes files that are in no folder.", "return os.memfd_create('x') >= 0 and 'it can'"),
    _attack(
        "locked memory",
        "Keeps memory from being swapped out.",
        """
        return done("mlockall", 3)
        """,
    ),
    _attack(
        "shared memory",
        "Makes shared memory that outlives it.",
        """
        segment = libc.shmget(0, 1 << 20, 0o1666)
        return segment >= 0 and done("shmctl", segment, 0, None)
        """,
    ),
    _attack(
        "message queue",
        "Makes a message queue that outlives it.",
        """
        return done("mq_open", b"/troll", 0o102, 0o600, 0) and done("mq_unlink", b"/troll")
        """,
    ),
)

TIME = (
    _attack(
        "spin",
        "Ignores all signals and never returns.",
        """
        import signal
        for n in range(1, 65):
            try:
                signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
        """,
        seconds=0.5,
    ),
    _attack(
        "spin in threads",
        "Keeps all cores busy.",
        """
        for _ in range(50):
            threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
        """,
        seconds=0.7,
    ),
    _attack("sleep", "Waits for ever, which takes no processor time.", "time.sleep(1000)", seconds=0.5),
    _attack("huge power", "Computes 10 ** 10 ** 10, where no signal is looked at.", "10 ** 10 ** 10", seconds=0.5),
    _attack(
        "regular expression",
        "Has a pattern backtrack for years.",
        """
        import re
        re.match("(a+)+$", "a" * 50 + "b")
        """,
        seconds=0.5,
    ),
    _attack(
        "recursion",
        "Recurses until the stack of C overflows.",
        """
        sys.setrecursionlimit(1 << 30)
        deep = lambda x: deep(x + 1)
        nested = []
        for _ in range(1_000_000):
            nested = [nested]
        repr(nested)
        """,
    ),
    _attack("segmentation fault", "Reads address 0.", "ctypes.string_at(0)"),
    _attack(
        "no signals left",
        "Ends in a way that cannot be waited for: its main thread leaves first.",
        """
        threading.Thread(target=time.sleep, args=(60,)).start()
        libc.pthread_exit(None)
        """,
        seconds=0.5,
    ),
    _attack(
        "flood of output",
        "Prints without end.",
        """
        os.set_blocking(1, False)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            os.write(1, bytes(1 << 16))
            os.write(2, bytes(1 << 16))
        """,
    ),
)


def _reply(name: str, description: str, line: str, then: str = "time.sleep(60)", **options: Any) -> Attack:
    """The program writes this reply, an expression for bytes, and then does not return."""
    code = f"import os, time\ndef f(x):\n    os.write(4, {line})\n    while True: {then}\n"
    return Attack(name, "resources", description, code, ("assert f(3) == 9",), **options)


def _value(name: str, description: str, program: str, test: str, **options: Any) -> Attack:
    return Attack(name, "resources", description, program, (test,), **options)


REPLIES = (
    _reply("endless reply", "Replies with a line that does not end.", "b'9' * (1 << 24)"),
    _reply(
        "slow reply",
        "Replies with one byte at a time, for ever.",
        "b'9'",
        "time.sleep(0.001); os.write(4, b'9')",
        seconds=0.7,
    ),
    _reply(
        "busy reply", "Replies with one byte at a time, as fast as it can.", "b'9'", "os.write(4, b'9')", seconds=0.7
    ),
    _reply("half a reply", "Replies with half a line.", "b'{\"value\": 9'", seconds=0.5),
    _reply("flood of replies", "Replies a thousand times.", "b'{\"value\": 9}\\n' * 1000"),
    _reply(
        "deep reply", "Replies with brackets in brackets.", "b'{\"value\": ' + b'[' * 200000 + b']' * 200000 + b'}\\n'"
    ),
    _reply(
        "deep tuples",
        "Replies with just as many as JSON allows, and the decoder does not.",
        "b'{\"value\": ' + b'{\"tuple\": [' * 490 + b']}' * 490 + b'}\\n'",
    ),
    _reply("long integer", "Replies with a million digits.", "b'{\"value\": ' + b'9' * 1000000 + b'}\\n'"),
    _reply(
        "long complex number",
        "Replies with a complex number that is no float.",
        "b'{\"value\": {\"complex\": [' + b'9' * 4000 + b', 0]}}\\n'",
    ),
    _reply("unhashable error", "Replies with an error that cannot be looked up.", 'b\'{"value": 9, "error": []}\\n\''),
    _reply("unhashable items", "Replies with a set of lists.", 'b\'{"value": {"set": [[], [9]]}}\\n\''),
    _reply(
        "colliding items",
        "Replies with a set of numbers that all have one hash.",
        "b'{\"value\": {\"set\": [' + b','.join(b'%d' % (n * (2**61 - 1)) for n in range(40000)) + b']}}\\n'",
        seconds=1.0,
    ),
    _reply(
        "colliding keys",
        "Replies with a dict whose keys all have one hash.",
        "b'{\"value\": {\"dict\": [' + b','.join(b'[%d,0]' % (n * (2**61 - 1)) for n in range(30000)) + b']}}\\n'",
        seconds=1.0,
    ),
    _reply("no text", "Replies with bytes that are no UTF-8.", "b'\\xff\\xfe{\\x80\\n'"),
    _reply("not a number", "Replies with NaN and infinities.", "b'{\"value\": [NaN, Infinity, -Infinity, 1e999]}\\n'"),
    _reply("lone surrogates", "Replies with characters that cannot be written.", 'b\'{"value": "\\\\ud800"}\\n\''),
    _reply("no reply", "Closes the pipe and goes on.", "b''", "os.closerange(0, 9); time.sleep(60)"),
    _value(
        "poisoned test",
        "Returns a number that makes the test itself compute for ever.",
        "def f(x): return 10 ** 4000",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nassert 512 >= 2 ** f(3)",
        seconds=4.0,
    ),
    _value(
        "fat test",
        "Returns a number that makes the test itself run out of memory.",
        "def f(x): return 10 ** 10",
        "assert len([0] * f(3)) < 10",
    ),
    _value(
        "colliding test",
        "Returns numbers with one hash, for the test to put into a set.",
        "def f(x): return [n * (2**61 - 1) for n in range(30000)]",
        "assert 10 > len(set(f(3)))",
        seconds=1.0,
    ),
    Attack(
        "silent stop",
        "hack",
        "Raises StopIteration, which ends the loop in the test that would find it wrong.",
        "def f(x): raise StopIteration",
        ("assert all(map(f, [1, 2, 3]))",),
    ),
)

RESOURCES = (*PROCESSES, *MEMORY, *TIME, *REPLIES)
