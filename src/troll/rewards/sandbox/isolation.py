"""The walls around model-written code: bubblewrap, or Landlock where there are no namespaces, or none if that is asked.

Inside bubblewrap there is a read-only Python, an empty /tmp, no network, no /proc, no privileges. With Landlock the
same system is there, but only Python can be read. The filter of system calls and the limits are the same in both.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from troll.errors import InputError

DANGER = "TROLL_DANGEROUSLY_RUN_CODE_UNSANDBOXED"
NOBODY = 65534
_LIMITS = {
    "RLIMIT_AS": 1 << 30,
    "RLIMIT_CPU": 6,  # seconds
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CORE": 0,
    "RLIMIT_MEMLOCK": 0,
    "RLIMIT_MSGQUEUE": 0,
}


@dataclass(frozen=True)
class Isolation:
    """One way to keep a process apart.

    Attributes:
        name: bubblewrap, landlock or none.
        means: what it means for a program.
        limits: of a run, by the names of the module resource.
        filtered: whether system calls are filtered.
        renews: whether every run can have mounts and process numbers of its own.
        listable, readable: what Landlock leaves to be listed and to be read; empty for no Landlock.
    """

    name: str
    means: str
    limits: Mapping[str, int] = field(default_factory=lambda: dict(_LIMITS))
    filtered: bool = True
    renews: bool = False
    listable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """What to run in place of ``argv``."""
        return bubblewrap(argv, env=env, renews=True) if self.name == "bubblewrap" else list(argv)


def allow_unsandboxed(asked: bool) -> None:
    """Where there is no sandbox, run code without one from now on, here and in processes that this one starts."""
    if asked:
        os.environ[DANGER] = "1"


def isolations(danger: bool = False) -> list[Isolation]:
    """All there are, the best first; with danger, also none at all."""
    return [
        Isolation(
            "bubblewrap",
            "without network, files, privileges and most system calls",
            {**_LIMITS, "RLIMIT_NPROC": 64},
            renews=True,
        ),
        Isolation(
            "landlock",
            "without network, files, privileges and most system calls; it can see that a file of yours is there",
            {**_LIMITS, "RLIMIT_NPROC": 256},  # more than the user has, which varies
            listable=tuple({os.path.realpath(path) for path in _system() if os.path.isdir(path)}),
            readable=tuple(_without({os.path.realpath(path) for path in _system()}, packages())),
        ),
        *([Isolation("none", f"with all that you may do here, because {DANGER} is set", filtered=False)] * danger),
    ]


def python() -> str:
    """The interpreter for the sandbox: the one that runs this, outside of any virtual environment.

    For root it is one that everybody may run, if there is one of the same version, so that root can be left.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.base_prefix, "bin", name)
    candidates = [own if own.exists() else Path(os.path.realpath(sys.executable)), Path("/usr/bin", name)]
    for path in candidates if os.geteuid() == 0 else []:
        if for_everybody(path):
            return str(path)
    return str(next((path for path in candidates if os.access(path, os.X_OK)), candidates[0]))


def for_everybody(path: Path) -> bool:
    """Whether any user can reach and run this file."""
    real = path.resolve()
    return real.exists() and all(part.stat().st_mode & 0o001 for part in [real, *real.parents])


def user() -> int | None:
    """Whom to become before anything else: nobody, if this is root and the interpreter lets us."""
    return NOBODY if os.geteuid() == 0 and for_everybody(Path(python())) else None


def bubblewrap(
    argv: Sequence[str],
    visible: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    renews: bool = False,
) -> list[str]:
    """The command that runs ``argv`` in bubblewrap.

    Args:
        argv: the command inside.
        visible: path inside → a file or folder that can be read there, besides the interpreter.
        env: all environment variables inside.
        renews: leave it the one privilege, over its own namespaces, to make new ones for every run.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError("model-written code to run, without bubblewrap", "a sandbox for it", "apt install bubblewrap")
    parts = [bwrap]
    for path in _system():
        if os.path.islink(path):
            parts += ["--symlink", os.readlink(path), path]
        else:
            parts += ["--ro-bind", path, path]
    for path in packages():
        parts += ["--tmpfs", path, "--remount-ro", path]
    parts += ["--dev", "/dev", "--remount-ro", "/dev"]
    parts += ["--size", str(64 << 20), "--tmpfs", "/tmp"]
    for inside, source in (visible or {}).items():
        parts += ["--ro-bind", str(source.resolve()), inside]
    parts += ["--remount-ro", "/", "--chdir", "/tmp", "--unshare-all", "--unshare-user", "--uid", str(NOBODY)]
    parts += ["--gid", str(NOBODY), "--cap-drop", "ALL", *(["--cap-add", "CAP_SYS_ADMIN"] if renews else [])]
    parts += ["--disable-userns", "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in (env or {}).items():
        parts += ["--setenv", name, value]
    return [*parts, "--", *argv]


def _system() -> list[str]:
    """What the interpreter needs of the system."""
    roots = dict.fromkeys(["/usr", _prefix()])
    below = [f"{root}/{name}" for root in roots for name in ("bin", "lib", "lib32", "lib64")]
    paths = [*below, "/usr/share/zoneinfo", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]
    return [path for path in paths if os.path.exists(path)]


def packages() -> list[str]:
    """Folders of installed packages, in which there may be tests and answers. Nothing in the sandbox needs them."""
    kinds = [f"lib*/python*/{name}" for name in ("site-packages", "dist-packages")]
    found = {path.resolve() for root in ("/usr", _prefix()) for kind in kinds for path in Path(root).glob(kind)}
    return sorted(map(str, found))


def _prefix() -> str:
    return os.path.realpath(Path(python()).resolve().parent.parent)


def _without(paths: Iterable[str], hidden: Sequence[str]) -> Iterator[str]:
    """Paths that together cover these, but not what is hidden below them."""
    for path in paths:
        if any(other.startswith(f"{path}/") for other in hidden):
            yield from _without((entry.path for entry in os.scandir(path) if not entry.is_symlink()), hidden)
        elif path not in hidden:
            yield path
