"""What is outside of the sandbox to be stolen or hurt, and whether it was. Every secret is random."""

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
from pathlib import Path
from types import TracebackType
from typing import Any

from troll.rewards.sandbox import isolation

SIGN = "troll-secret-"
_SHARED = Path("/dev/shm")
State = dict[str, tuple[int, int, int, bytes]]


class Scene:
    """A folder, a home, an environment variable, an open descriptor, shared memory, sockets that listen, and a process.

    All of them belong to the user of the sandbox, or are open to everybody: nothing but walls keeps a program away.
    ``facts`` says where they are, and not what is in them.
    """

    def __enter__(self) -> Scene:
        self.secret = SIGN + secrets.token_hex(16)
        self.mark = "troll-" + secrets.token_hex(4)
        self._user = isolation.user()
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="troll-scene-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._lay()
            self._environment(stack)
            self._listen(stack)
            handle = os.open(self.folder / "file", os.O_RDONLY)
            stack.callback(os.close, handle)
            os.set_inheritable(handle, True)
            self._shared(stack)
            self._start()
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        self._state = self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def facts(self) -> dict[str, Any]:
        """What a program is told."""
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
        """What has happened since it was last asked; and all is made good again."""
        found = [f"a message came by {name}" for name in self._received()]
        if (state := self._look()) != self._state:
            paths = sorted(
                path for path in state.keys() | self._state.keys() if state.get(path) != self._state.get(path)
            )
            found.append(f"these files have changed: {', '.join(paths)}")
            self._lay()
            self._state = self._look()
        if not self._answers():
            found.append("a process was killed")
            self._stop()
            self._start()
        return found

    def _lay(self) -> None:
        """The files."""
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

    def _look(self) -> State:
        found = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                seen = path.lstat()
                text = path.read_bytes() if path.is_file() else b""
                place = str(path.relative_to(self.folder))
                found[place] = (seen.st_mode, seen.st_uid, 0 if path.is_dir() else seen.st_mtime_ns, text)
        return found

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
        found = []
        for name, listening in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                if listening.type == socket.SOCK_STREAM:
                    listening.accept()[0].close()
                else:
                    listening.recv(100)
                found.append(name)
        return found

    def _shared(self, stack: contextlib.ExitStack) -> None:
        """Shared memory of both kinds, with the secret in it."""
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
            [isolation.python(), "-I", "-S", "-c", code],
            cwd=self.folder,
            env={"HF_TOKEN": self.secret},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            **who,
        )
        self._answers()

    def _answers(self) -> bool:
        """Whether the process does: one that was killed never does again, though it may take a while to end."""
        asked, answers = self._victim.stdin, self._victim.stdout
        assert asked is not None
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):
            asked.write(b"\n")
        return bool(select.select([answers], [], [], 60)[0] and answers.read(1))

    def _stop(self) -> None:
        self._victim.kill()
        with self._victim:  # closes its pipes and waits
            pass


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
