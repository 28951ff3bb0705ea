"""The targets of the attacks outside the sandbox, and how harm to them and the use of resources are detected."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from troll.rewards.sandbox import isolation

SIGN = "troll-secret-"
_SHARED = Path("/dev/shm")
State = dict[str, tuple[int, int, int, bytes]]


class Scene:
    """The targets: a folder, a home, an environment variable, an open descriptor, shared memory, sockets and a process.

    All of them belong to the user of the sandbox or are open to every user, so that only the sandbox protects them.
    ``facts`` has their paths and addresses, not the secret. The secret is random.
    """

    def __enter__(self) -> Scene:
        self.secret = SIGN + secrets.token_hex(16)
        self.mark = "troll-" + secrets.token_hex(4)
        self._user = isolation.sandbox_user()
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="troll-scene-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._write_files()
            self._environment(stack)
            self._listen(stack)
            handle = os.open(self.folder / "file", os.O_RDONLY)
            stack.callback(os.close, handle)
            os.set_inheritable(handle, True)
            self._shared(stack)
            self._start()
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        self._state = self._files()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def facts(self) -> dict[str, Any]:
        """The paths and addresses that an attack program gets."""
        files = {
            name: str(self.folder / name) for name in ("file", "own", "open", "home", "link", "socket", "socket-d")
        }
        return {
            **files,
            **self._places,
            "sign": SIGN,
            "mark": self.mark,
            "token": "out",
            "parent": os.getpid(),
            "victim": self._victim.pid,
            "packages": isolation.packages(),
        }

    def harm(self) -> list[str]:
        """The changes since the last call, one sentence each. Everything is restored."""
        harm = [f"a message arrived by {name}" for name in self._received()]
        if (state := self._files()) != self._state:
            paths = sorted(
                path for path in state.keys() | self._state.keys() if state.get(path) != self._state.get(path)
            )
            harm.append(f"these files have changed: {', '.join(paths)}")
            self._write_files()
            self._state = self._files()
        if not self._answers():
            harm.append("a process was killed")
            self._stop()
            self._start()
        return harm

    def _write_files(self) -> None:
        for folder in ("open", "home", "home/.ssh", "home/.cache", "home/.cache/huggingface"):
            if folder == "open":
                shutil.rmtree(self.folder / folder, ignore_errors=True)
            (self.folder / folder).mkdir(exist_ok=True)
        for name in ("file", "own", "home/.ssh/id_ed25519", "home/.cache/huggingface/token"):
            (self.folder / name).unlink(missing_ok=True)
            (self.folder / name).write_text(self.secret)
        if not (self.folder / "link").is_symlink():
            (self.folder / "link").symlink_to("file")
        for path in [self.folder, *self.folder.rglob("*")]:
            if self._user is not None:
                os.chown(path, self._user, self._user, follow_symlinks=False)
            if not path.is_symlink():
                path.chmod(0o777 if path.name.startswith(("open", "socket")) else 0o755 if path.is_dir() else 0o644)

    def _files(self) -> State:
        files = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                seen = path.lstat()
                text = path.read_bytes() if path.is_file() else b""
                place = str(path.relative_to(self.folder))
                files[place] = (seen.st_mode, seen.st_uid, 0 if path.is_dir() else seen.st_mtime_ns, text)
        return files

    def _environment(self, stack: contextlib.ExitStack) -> None:
        for name, value in (("HF_TOKEN", self.secret), ("HOME", str(self.folder / "home"))):
            before = os.environ.get(name)
            os.environ[name] = value
            stack.callback(_restore, name, before)

    def _listen(self, stack: contextlib.ExitStack) -> None:
        inet, unix, stream, datagram = socket.AF_INET, socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM
        wanted: list[tuple[str, int, int, Any]] = [
            ("tcp", inet, stream, ("127.0.0.1", 0)),
            ("udp", inet, datagram, ("127.0.0.1", 0)),
            ("tcp6", socket.AF_INET6, stream, ("::1", 0)),
            ("abstract", unix, stream, f"\0{self.mark}"),
            ("abstract-d", unix, datagram, f"\0{self.mark}-d"),
            ("socket", unix, stream, str(self.folder / "socket")),
            ("socket-d", unix, datagram, str(self.folder / "socket-d")),
        ]
        self._sockets: dict[str, socket.socket] = {}
        self._places: dict[str, Any] = {"tcp6": 9, "abstract": self.mark, "abstract-d": f"{self.mark}-d"}
        for name, family, kind, address in wanted:
            with contextlib.suppress(OSError):  # a machine without IPv6
                listening = stack.enter_context(socket.socket(family, kind))
                listening.bind(address)
                listening.setblocking(False)
                if kind == stream:
                    listening.listen()
                self._sockets[name] = listening
                if family != unix:
                    self._places[name] = listening.getsockname()[1]
        for name in ("socket", "socket-d"):
            (self.folder / name).chmod(0o777)

    def _received(self) -> list[str]:
        names = []
        for name, listening in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                if listening.type == socket.SOCK_STREAM:
                    listening.accept()[0].close()
                else:
                    listening.recv(100)
                names.append(name)
        return names

    def _shared(self, stack: contextlib.ExitStack) -> None:
        """Create System V and POSIX shared memory that contain the secret."""
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        segment = libc.shmget(0, 4096, 0o1666)
        if segment >= 0:
            stack.callback(libc.shmctl, segment, 0, None)
            place = libc.shmat(segment, None, 0)
            ctypes.memmove(place, self.secret.encode() + b"\0", len(self.secret) + 1)
            libc.shmdt(ctypes.c_void_p(place))
        path = (_SHARED if os.access(_SHARED, os.W_OK) else self.folder) / f"{self.mark}-shared"
        path.write_text(self.secret)
        path.chmod(0o666)
        stack.callback(path.unlink, missing_ok=True)
        self._places |= {"segment": segment, "shared": str(path)}

    def _start(self) -> None:
        who: dict[str, Any] = (
            {} if self._user is None else {"user": self._user, "group": self._user, "extra_groups": []}
        )
        code = "import sys\nfor _ in sys.stdin: print(flush=True)"
        self._victim = subprocess.Popen(
            [isolation.sandbox_python(), "-I", "-S", "-c", code],
            cwd=self.folder,
            env={"HF_TOKEN": self.secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            **who,
        )
        self._answers()

    def _answers(self) -> bool:
        """Whether the process answers. A killed process never does, though it may take a while to disappear."""
        requests, replies = self._victim.stdin, self._victim.stdout
        assert requests is not None
        assert replies is not None
        with contextlib.suppress(BrokenPipeError):
            requests.write(b"\n")
        return bool(select.select([replies], [], [], 60)[0] and replies.read(1))

    def _stop(self) -> None:
        self._victim.kill()
        with self._victim:  # close its pipes and wait
            pass


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def usage(mark: str) -> list[tuple[int, int]]:
    """The threads and the memory in kilobytes of each running process with this name."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if path.read_text().strip() == mark:
                lines = path.with_name("status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines if ":" in line)
                if "VmRSS" in status:  # not so if the process has ended
                    processes.append((int(status["Threads"]), int(status["VmRSS"].split()[0])))
    return processes


class UsageMonitor:
    """A context manager that records the peak threads and memory of all processes with a name."""

    def __init__(self, mark: str) -> None:
        self._mark, self._over = mark, threading.Event()
        self.threads = self.kilobytes = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> UsageMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            processes = usage(self._mark)
            self.threads = max(self.threads, sum(threads for threads, _ in processes))
            self.kilobytes = max(self.kilobytes, sum(kilobytes for _, kilobytes in processes))
