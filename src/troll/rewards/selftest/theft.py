"""Attacks on secrets in files, the environment and other processes, and ways to send them out."""

from __future__ import annotations

from typing import Any

from troll.rewards.selftest.attack import Attack, body


def _attack(name: str, description: str, code: str, **options: Any) -> Attack:
    return Attack(name, "theft", description, body(code), **options)


_LANDLOCK = frozenset({"landlock"})

SECRETS = (
    _attack(
        "environment",
        "Reads the environment variables of the trainer.",
        """
        return tried(
            lambda: os.environ.get("HF_TOKEN"),
            lambda: scene["sign"] in (text := read("/proc/self/environ")) and text,
        )
        """,
    ),
    _attack(
        "environment of others",
        "Reads the environment of other processes.",
        """
        for pid in (scene["parent"], scene["victim"], 1, os.getppid()):
            try:
                if scene["sign"] in (text := read(f"/proc/{pid}/environ")):
                    return text
            except OSError:
                pass
        """,
    ),
    _attack(
        "file",
        "Reads a file that everybody may read.",
        """
        return tried(
            lambda: read(scene["file"]),
            lambda: read("../" * 40 + scene["file"]),
            lambda: read("/proc/self/root" + scene["file"]),
            lambda: read(f"/proc/{scene['victim']}/root" + scene["file"]),
            lambda: read(f"/proc/{scene['victim']}/cwd/file"),
        )
        """,
    ),
    _attack(
        "file by another way",
        "Reads it through a symbolic link, and from a descriptor of its folder.",
        """
        place = f"/tmp/{scene['mark']}-link"
        def link(make=os.symlink):
            make(scene["file"], place)
            return read(place), os.unlink(place)
        def hard():
            return link(os.link)
        def beside():
            folder = os.open(os.path.dirname(scene["file"]), 0o10000000)  # O_PATH
            return os.read(os.open("file", os.O_RDONLY, dir_fd=folder), 99).decode()
        def mapped():
            import mmap
            with open(scene["file"], "rb") as file:
                return mmap.mmap(file.fileno(), 0, prot=1)[:].decode()
        def handle():
            place = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
            return done("name_to_handle_at", -100, scene["file"].encode(), place, ctypes.byref(ctypes.c_int()), 0)
        return tried(link, hard, beside, mapped, handle)
        """,
    ),
    _attack(
        "keys",
        "Reads ssh keys and the token of the hub.",
        """
        homes = (scene["home"], os.path.expanduser("~"), "/root")
        names = (".ssh/id_ed25519", ".ssh/id_rsa", ".cache/huggingface/token", ".netrc", ".aws/credentials")
        paths = [f"{home}/{name}" for home in homes for name in names]
        return tried(
            lambda: read(paths[0]),
            *(lambda path=path: read(path) and f"{path} can be read" for path in paths[1:]),
        )
        """,
    ),
    _attack(
        "system files",
        "Reads what the system says of itself and its users.",
        """
        names = ("/etc/passwd", "/etc/hostname", "/proc/self/mountinfo", "/proc/net/tcp", "/sys/class/net/lo/address",
                 "/proc/self/status", "/proc/version")
        return tried(*(lambda name=name: read(name) and f"{name} can be read" for name in names))
        """,
    ),
    _attack(
        "installed packages",
        "Reads installed packages, in which there may be tests and answers.",
        """
        for top in scene["packages"]:
            for folder, _, files in os.walk(top):
                for name in files:
                    if got := tried(lambda: read(f"{folder}/{name}")):
                        return f"{folder}/{name}"
        """,
    ),
    _attack(
        "listing",
        "Lists folders.",
        """
        folders = (os.path.dirname(scene["file"]), scene["home"], "/home", "/root", "/etc", "/var/log", "/mnt", "/proc")
        def listed(folder):
            return set(os.listdir(folder)) - {"ld.so.cache"} and f"{folder} can be listed"
        return tried(*(lambda folder=folder: listed(folder) for folder in folders))
        """,
    ),
    _attack(
        "existence",
        "Finds out whether a file is there, how large it is, and where a link points.",
        """
        return tried(
            lambda: os.stat(scene["file"]).st_size,
            lambda: os.access(scene["file"], os.F_OK),
            lambda: os.readlink(scene["link"]),
            lambda: os.statvfs(scene["file"]) and "its disk",
            lambda: os.chdir(scene["home"]) or "its folder",
            lambda: os.open(scene["file"], 0o10000000),
        )
        """,
        known=_LANDLOCK,
    ),
    _attack(
        "process numbers",
        "Finds out which processes there are.",
        """
        return tried(
            lambda: os.getpgid(scene["victim"]),
            lambda: os.getsid(scene["victim"]),
            lambda: os.sched_getaffinity(scene["victim"]) and "it is there",
            lambda: os.stat(f"/proc/{scene['victim']}") and "it is there",
        )
        """,
        known=_LANDLOCK,
    ),
    _attack(
        "watching",
        "Is told when somebody uses a file.",
        """
        watch = libc.inotify_init1(0)
        return tried(
            lambda: done("inotify_add_watch", watch, scene["file"].encode(), 0xFFF),
            lambda: done("fanotify_init", 0, 0),
        )
        """,
    ),
    _attack(
        "open descriptors",
        "Reads from every descriptor that it did not open itself.",
        """
        for handle in range(1024):
            try:
                got = os.pread(handle, 4096, 0)
            except OSError:
                continue
            if scene["sign"].encode() in got:
                return got.decode(errors="replace")
        """,
    ),
    _attack(
        "memory of others",
        "Reads the memory of another process.",
        """
        def vm():
            there, here = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
            pieces = [struct.pack("PN", ctypes.addressof(b), 64) for b in (here, there)]
            return done("process_vm_readv", scene["victim"], pieces[0], 1, pieces[1], 1, 0)
        return tried(
            lambda: ctypes.get_errno() if vm() else ctypes.get_errno() == 14 and "its memory can be asked for",
            lambda: read(f"/proc/{scene['victim']}/maps"),
            lambda: open(f"/proc/{scene['victim']}/mem", "rb") and "its memory is open",
            lambda: open("/dev/mem", "rb") and "all memory is open",
        )
        """,
    ),
    _attack(
        "descriptors of others",
        "Takes a descriptor from another process.",
        """
        return done(438, libc.syscall(434, scene["victim"], 0), 0, 0)
        """,
    ),
    _attack(
        "shared memory of others",
        "Reads shared memory.",
        """
        def attached():
            libc.shmat.restype = ctypes.c_void_p
            place = libc.shmat(scene["segment"], None, 0o10000)
            return place not in (None, 2**64 - 1) and ctypes.string_at(place).decode()
        return tried(attached, lambda: read(scene["shared"]))
        """,
    ),
    _attack(
        "kernel keys",
        "Reads and writes the keys that the kernel keeps.",
        """
        return tried(
            lambda: done(number(250, 219), 0, -3, 1),
            lambda: done(number(248, 217), b"user", b"x", b"y", 1, -2),
        )
        """,
    ),
    _attack(
        "kernel log",
        "Reads what the kernel says.",
        """
        return tried(lambda: libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0, lambda: read("/dev/kmsg"))
        """,
    ),
)

_SEND = """
with socket.socket({family}, socket.SOCK_{kind}) as out:
    out.settimeout(1)
    out.connect({address})
    out.send(scene["token"].encode())
"""
_PAIR = """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(scene["token"].encode(), {address})
"""


def _send(name: str, description: str, family: str, kind: str, address: str) -> Attack:
    return _attack(name, description, _SEND.format(family=f"socket.AF_{family}", kind=kind, address=address))


WAYS_OUT = (
    _send("TCP", "Connects to a port of this machine.", "INET", "STREAM", '("127.0.0.1", scene["tcp"])'),
    _send("UDP", "Sends a datagram to a port of this machine.", "INET", "DGRAM", '("127.0.0.1", scene["udp"])'),
    _send("IPv6", "Connects to a port of this machine by IPv6.", "INET6", "STREAM", '("::1", scene["tcp6"])'),
    _send(
        "abstract socket",
        "Connects to a socket that is in no folder.",
        "UNIX",
        "STREAM",
        'bytes([0]) + scene["abstract"].encode()',
    ),
    _send(
        "abstract datagrams",
        "Sends to a socket that is in no folder.",
        "UNIX",
        "DGRAM",
        'bytes([0]) + scene["abstract-d"].encode()',
    ),
    _send("socket in a folder", "Connects to a socket in a folder.", "UNIX", "STREAM", 'scene["socket"]'),
    _send("datagrams into a folder", "Sends to a socket in a folder.", "UNIX", "DGRAM", 'scene["socket-d"]'),
    _attack(
        "pair to an abstract socket",
        "Sends from half a pair of sockets, which needs no socket of its own.",
        _PAIR.format(address='bytes([0]) + scene["abstract-d"].encode()'),
    ),
    _attack(
        "pair to a socket in a folder",
        "The same to a socket in a folder, such as the system's log.",
        _PAIR.format(address='scene["socket-d"]'),
    ),
    _attack(
        "metadata address",
        "Asks the address at which clouds hand out credentials.",
        """
        with socket.create_connection(("169.254.169.254", 80), 1) as out:
            return "it answers"
        """,
    ),
    _attack(
        "names",
        "Has a name resolved, which tells a server of it.",
        """
        return socket.getaddrinfo("localhost", 80) and read("/etc/resolv.conf")
        """,
    ),
    _attack(
        "raw network",
        "Opens sockets that see all packets, and those that talk to the kernel.",
        """
        kinds = ((17, 3), (16, 3), (16, 2), (38, 5), (40, 1))
        return tried(*(lambda kind=kind: socket.socket(*kind) and f"socket{kind}" for kind in kinds))
        """,
    ),
    _attack(
        "interfaces",
        "Lists the network interfaces.",
        "return [name for _, name in socket.if_nameindex() if name != 'lo']",
    ),
)

THEFT = (*SECRETS, *WAYS_OUT)
