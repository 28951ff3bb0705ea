"""Attacks on the isolation: they change files and processes outside the sandbox, or gain privileges."""

from __future__ import annotations

from typing import Any

from troll.rewards.selftest.attack import Attack, body


def _attack(name: str, description: str, code: str, **options: Any) -> Attack:
    return Attack(name, "escape", description, body(code), **options)


FILES = (
    _attack(
        "write",
        "Writes into a folder that everybody may write to.",
        """
        for path in (scene["open"] + "/mine", "../" * 40 + scene["open"] + "/mine"):
            tried(lambda: open(path, "w").write("x"), lambda: os.mkdir(path), lambda: os.symlink("/", path))
        """,
    ),
    _attack(
        "overwrite",
        "Changes a file of its own user.",
        """
        tried(
            lambda: open(scene["own"], "a").write("x"),
            lambda: os.truncate(scene["own"], 0) is None,
            lambda: os.open(scene["own"], os.O_RDONLY | os.O_TRUNC) > 0,
        )
        """,
    ),
    _attack("truncate", "Empties a file without opening it.", "os.truncate(scene['own'], 0)"),
    _attack(
        "delete",
        "Deletes, renames and links files.",
        """
        other = scene["open"] + "/other"
        tried(
            lambda: os.link(scene["own"], other) is None,
            lambda: os.rename(scene["own"], other) is None,
            lambda: os.unlink(scene["own"]) is None,
        )
        """,
    ),
    _attack(
        "mode",
        "Changes the mode of a file of its own user.",
        """
        tried(
            lambda: os.chmod(scene["own"], 0o777) is None,
            lambda: os.fchmod(os.open(scene["own"], os.O_RDONLY), 0o777) is None,
            lambda: libc.syscall(452, -100, scene["own"].encode(), 0o777, 0) == 0,
        )
        """,
    ),
    _attack(
        "owner",
        "Changes the owner of a file of its own user.",
        """
        return tried(lambda: os.chown(scene["own"], os.getuid(), os.getgid()) is None and "chown was allowed")
        """,
    ),
    _attack("times", "Changes the times of a file of its own user.", "os.utime(scene['own'], (0, 0))"),
    _attack(
        "attributes",
        "Writes attributes of a file of its own user.",
        """
        os.setxattr(scene["own"], "user.x", b"y")
        return "an attribute was written"
        """,
    ),
    _attack(
        "link as result",
        "Puts links to files of the host where its own results should be.",
        """
        for name in ("result", "out.json", "stdout"):
            link = f"/tmp/{scene['mark']}-{name}"
            os.symlink(scene["own"], link)
            with open(link, "w") as file:
                file.write("x")
            os.unlink(link)
        """,
    ),
    _attack(
        "interpreter",
        "Changes the interpreter and what it imports.",
        """
        places = [os.__file__, sys.executable, "/usr/lib/x", "/usr/x", "/lib/x", "/bin/x", "/etc/ld.so.cache", "/x"]
        return tried(*(lambda place=place: open(place, "a") and place for place in places))
        """,
    ),
    _attack(
        "lock",
        "Holds a lock on a file of the system, for which others then wait.",
        """
        import fcntl
        with open(os.__file__, "rb") as file:
            return tried(
                lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) is None and "flock was allowed",
                lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB) is None and "a lock was allowed",
                lambda: fcntl.fcntl(file, 1024, fcntl.F_RDLCK) == 0 and "a lease was allowed",
            )
        """,
    ),
    _attack(
        "devices",
        "Opens and makes devices.",
        """
        names = ("mem", "kmem", "port", "sda", "vda", "nvme0n1", "fuse", "kvm", "loop0", "net/tun", "tty", "uinput")
        def made():
            os.mknod("/tmp/device", 0o60666, os.makedev(254, 0))
            return "a device was made"
        return tried(made, *(lambda name=name: os.open(f"/dev/{name}", os.O_RDWR) and name for name in names))
        """,
    ),
    _attack(
        "leftovers",
        "Leaves a file for the next run.",
        """
        for folder in (".", "/tmp", "/dev/shm", "/dev", "/", os.path.expanduser("~"), "/var/tmp", "/run"):
            place = f"{folder}/{scene['mark']}"
            if scene["turn"] == 0:
                tried(lambda: open(place, "w").write("from another run"))
            elif got := tried(lambda: read(place)):
                os.unlink(place)
                return got
        """,
        runs=2,
    ),
)

SIGNALS = (
    _attack("kill", "Kills a process of its own user.", "os.kill(scene['victim'], 9)"),
    _attack(
        "kill all",
        "Kills what started it, and everything.",
        """
        pids = (os.getppid(), scene["parent"], -1)
        return tried(*(lambda pid=pid: pid and os.kill(pid, 0) is None and f"kill({pid}) was allowed" for pid in pids))
        """,
    ),
    _attack(
        "kill other ways",
        "Sends signals by other calls.",
        """
        info = ctypes.create_string_buffer(struct.pack("iii", 9, 0, -1) + bytes(128))
        return tried(
            lambda: done(number(129, 138), scene["victim"], 9, info),
            lambda: done(number(234, 131), scene["victim"], scene["victim"], 9),
            lambda: done(number(200, 130), scene["victim"], 9),
            lambda: done(424, libc.syscall(434, scene["victim"], 0), 9, None, 0),
        )
        """,
    ),
    _attack(
        "signal from a pipe",
        "Has the kernel send a signal to another process when a pipe can be read.",
        """
        import fcntl
        a, b = os.pipe()
        return tried(
            lambda: fcntl.fcntl(a, fcntl.F_SETOWN, scene["victim"]) == 0 and "F_SETOWN was allowed",
            lambda: fcntl.fcntl(a, 10, 9) == 0 and "F_SETSIG was allowed",
        )
        """,
    ),
    _attack(
        "signal from a timer",
        "Has a timer send a signal to a thread of its choice.",
        """
        event = ctypes.create_string_buffer(struct.pack("qiii", 0, 9, 4, scene["victim"]) + bytes(64))
        return reached(number(222, 107), 1, event, ctypes.byref(ctypes.c_int()))
        """,
    ),
    _attack(
        "terminal",
        "Types commands into the terminal.",
        """
        import fcntl, termios
        def type_into(handle):
            fcntl.ioctl(handle, 0x5412, b"x")  # TIOCSTI
            return "it can type"
        def on(path):
            return type_into(os.open(path, os.O_RDWR))
        places = ("/dev/tty", "/dev/console", "/dev/pts/0")
        return tried(
            *(lambda handle=handle: type_into(handle) for handle in range(5)),
            *(lambda place=place: on(place) for place in places),
        )
        """,
    ),
    _attack(
        "trace",
        "Traces another process, and itself.",
        """
        return tried(lambda: done("ptrace", 16, scene["victim"], 0, 0), lambda: done("ptrace", 0, 0, 0, 0))
        """,
    ),
    _attack(
        "write memory of others",
        "Writes into the memory of another process.",
        """
        piece = struct.pack("PN", ctypes.addressof(ctypes.create_string_buffer(8)), 8)
        ctypes.set_errno(0)
        libc.process_vm_writev(scene["victim"], piece, 1, piece, 1, 0)
        return ctypes.get_errno() in (0, 14) and "its memory can be written"
        """,
    ),
)

PRIVILEGES = (
    _attack(
        "namespaces",
        "Makes namespaces, in which it would be root.",
        """
        flags = (0x10000000, 0x10020000, 0x00020000, 0x40000000, 0x20000000, 0x04000000, 0x00000080)
        return tried(
            *(lambda flag=flag: done("unshare", flag) for flag in flags),
            lambda: libc.syscall(number(56, 220), 0x10000011, 0, 0, 0, 0) > 0,
        )
        """,
    ),
    _attack(
        "other namespaces",
        "Enters the namespaces of another process.",
        """
        return tried(
            lambda: done("setns", os.open(f"/proc/{scene['victim']}/ns/mnt", 0), 0),
            lambda: done("setns", libc.syscall(434, scene["victim"], 0), 0x00020000),
        )
        """,
    ),
    _attack(
        "mount",
        "Mounts and remounts file systems.",
        """
        return tried(
            lambda: reached("mount", b"tmpfs", b"/not/there", b"tmpfs", 0, None),
            lambda: reached("mount", None, b"/not/there", None, 0x20 | 0x1000, None),
            lambda: reached("umount2", b"/not/there", 2),
            lambda: reached("pivot_root", b"/not/there", b"/not/there"),
            lambda: reached("chroot", b"/not/there"),
            lambda: reached(428, -100, b"/not/there", 0),  # open_tree
            lambda: reached(429, -1, b"", -1, b"", 0),  # move_mount
            lambda: reached(430, b"none", 0),  # fsopen
            lambda: reached(442, -100, b"/not/there", 0, bytes(32), 32),  # mount_setattr
        )
        """,
    ),
    _attack(
        "identity",
        "Becomes root, or another user, or gets capabilities.",
        """
        header, all_of_them = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6)
        return tried(
            lambda: os.getuid() != 0 and done("setuid", 0),
            lambda: os.getgid() != 0 and done("setgid", 0),
            lambda: done("setgroups", 1, struct.pack("I", 0)),
            lambda: done("capset", header, all_of_them),
            lambda: done("setfsuid", 0) and libc.setfsuid(-1) == 0 and os.getuid() != 0 and "the user of files is root",
        )
        """,
    ),
    _attack(
        "limits",
        "Raises its limits, and those of others.",
        """
        import resource
        def raised(name):
            soft, hard = resource.getrlimit(name)
            if hard == -1:
                return "there is no limit of memory"
            resource.setrlimit(name, (hard * 2, hard * 2))
            return "a limit was raised"
        return tried(
            lambda: raised(resource.RLIMIT_AS),
            lambda: raised(resource.RLIMIT_CPU),
            lambda: resource.prlimit(scene["victim"], resource.RLIMIT_CPU) and "limits of another process",
        )
        """,
    ),
    _attack(
        "priority",
        "Takes the processor away from others.",
        """
        return tried(
            lambda: done("setpriority", 0, scene["victim"], 19),
            lambda: done("sched_setscheduler", 0, 1, struct.pack("i", 50)),
            lambda: done("sched_setaffinity", scene["victim"], 8, struct.pack("Q", 1)),
            lambda: done(number(251, 30), 1, 0, 0x2000),  # ioprio_set
            lambda: done("setpriority", 0, 0, 5),
        )
        """,
    ),
    _attack(
        "its own end",
        "Switches off what ends it together with its sandbox.",
        """
        return tried(
            lambda: done("prctl", 1, 0, 0, 0, 0),  # the signal when its parent dies
            lambda: done("prctl", 36, 1, 0, 0, 0),  # it collects orphans
            lambda: done("prctl", 4, 1, 0, 0, 0),  # it can be traced
            lambda: done("setsid"),
            lambda: done("setpgid", 0, 0),
        )
        """,
    ),
    _attack(
        "kernel",
        "Calls those parts of the kernel in which holes are found.",
        """
        calls = {
            "io_uring": (425, 4, ctypes.create_string_buffer(256)),
            "bpf": (number(321, 280), 0, bytes(128), 128),
            "perf_event_open": (number(298, 241), bytes(128), 0, -1, -1, 0),
            "userfaultfd": (number(323, 282), 1),
            "memfd_create": (number(319, 279), b"x", 0),
            "memfd_secret": (447, 0),
            "add_key": (number(248, 217), b"keyring", b"x", None, 0, -2),
            "personality": (number(135, 92), 0x0040000),
            "seccomp": (number(317, 277), 2, 0, struct.pack("I", 0x7FFF0000)),
            "modify_ldt": (number(154, -1), 0, bytes(16), 16),
            "vmsplice": (number(278, 75), os.pipe()[1], struct.pack("PN", id(os), 8), 1, 0),
            "signalfd": (number(289, 74), -1, bytes(8), 8, 0),
            "landlock": (444, None, 0, 1),
            "quotactl": (number(179, 60), 0x80000100, None, 0, None),
        }
        return [name for name, call in calls.items() if libc.syscall(*call) >= 0]
        """,
    ),
    _attack(
        "machine",
        "Changes the clock, the name and the power of the machine.",
        """
        return tried(
            lambda: reached("sethostname", b"x", -1),
            lambda: reached(number(227, 112), 0, struct.pack("qq", -1, -1)),  # clock_settime
            lambda: reached("swapoff", b"/not/there"),
            lambda: reached(number(169, 142), 0, 0, 0, 0),  # reboot
            lambda: reached("delete_module", b"", 0),
        )
        """,
    ),
    _attack(
        "other calling conventions",
        "Makes system calls in the ways of other machines, which a filter may forget.",
        """
        import mmap
        if os.uname().machine != "x86_64":
            return None
        code = mmap.mmap(-1, 4096, prot=7)
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        def run(machine_code):
            code[: len(machine_code)] = machine_code
            return ctypes.CFUNCTYPE(ctypes.c_int)(address)()
        x32 = bytes.fromhex("b83e00004031ff31f60f05c3")  # kill(0, 0), the number with bit 30
        old = bytes.fromhex("53b82500000031db31c9cd805bc3")  # the same by int 0x80
        for name, machine_code in (("x32", x32), ("int 0x80", old)):
            if run(machine_code) == 0:
                return f"{name} was allowed"
        """,
    ),
    _attack(
        "devices of terminals",
        "Makes many terminals, of which a machine has a few thousand.",
        """
        opened = 0
        try:
            while opened < 500:
                os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
                opened += 1
        except OSError:
            pass
        return opened > 200 and f"{opened} terminals"
        """,
    ),
)

ESCAPE = (*FILES, *SIGNALS, *PRIVILEGES)
