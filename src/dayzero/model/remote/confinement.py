"""Confines the process that calls it, for good: no network, bounded memory and time, no way to write outside its work folder.

On Linux new user, network, process and mount namespaces do it, and hold for whatever the process starts. Where the system
refuses them, an audit hook inside the interpreter refuses connections and new processes; native code can get around that,
so `Confinement` says which of the two holds. Not done here: hiding files that the user may read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 32 << 30  # of address space, which the libraries alone take several GiB of
FILE_BYTES = 256 << 20
WORK_FOLDER_OPTIONS = b"size=1g,mode=700"

# linux/sched.h, linux/prctl.h, sys/mount.h, linux/mount.h, linux/capability.h
_NEW_USER, _NEW_NETWORK, _NEW_PROCESSES, _NEW_MOUNTS = 0x10000000, 0x40000000, 0x20000000, 0x00020000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_SYS_MOUNT_SETATTR, _AT_CURRENT_FOLDER, _AT_RECURSIVE, _MOUNT_ATTR_READ_ONLY = 442, -100, 0x8000, 1
_CAPABILITY_VERSION_3 = 0x20080522

# Audit events of CPython: those that reach for the network, and those that start another program or process.
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo",
            "socket.sendto", "socket.sendmsg")  # fmt: skip
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """What holds: `namespaces` (else the audit hook alone), `read_only` file system, and why not where not."""

    namespaces: bool
    read_only: bool
    reason: str = ""


def confine(work: Path, *, cpu_s: int, use_namespaces: bool = True) -> Confinement:
    """Confine this process, which must have one thread yet. Where there are namespaces, it goes on in a child of its own."""
    _end_with_parent()
    _limit(cpu_s)
    confinement = Confinement(namespaces=False, read_only=False, reason="switched off by the caller")
    if use_namespaces:
        try:
            read_only, reason = _enter_namespaces(work)
            confinement = Confinement(namespaces=True, read_only=read_only, reason=reason)
        except OSError as error:
            confinement = Confinement(namespaces=False, read_only=False, reason=str(error))
    if confinement.namespaces:
        # The first child is process 1 of its namespace: when it ends, all in there ends. The second one is ordinary.
        _continue_in_child()
        _continue_in_child()
    if sys.platform == "linux":
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if confinement.namespaces:
            _drop_capabilities()
    os.chdir(work)
    return confinement


def refuse_network(confinement: Confinement, tell: Callable[[str], None]) -> None:
    """From now on connections raise PermissionError, after `tell` was told of them; without namespaces new processes too."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NETWORK:
            aim = next((item for item in arguments if isinstance(item, (str, bytes, tuple))), "")
            tell(f"{event} {aim!r:.100}")
            raise PermissionError(f"the release's code may not use the network ({event} {aim!r:.100})")
        if event in _PROCESSES and not confinement.namespaces:
            raise PermissionError(f"the release's code may not start processes ({event})")

    sys.addaudithook(hook)


def _limit(cpu_s: int) -> None:
    import resource

    for name, wanted in (("RLIMIT_CPU", cpu_s), ("RLIMIT_AS", MEMORY_BYTES), ("RLIMIT_FSIZE", FILE_BYTES), ("RLIMIT_CORE", 0)):
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            if sys.platform == "linux":  # elsewhere some of them cannot be set; the time limit of the parent holds
                raise


def _enter_namespaces(work: Path) -> tuple[bool, str]:
    """New namespaces for this process's children and itself. Whether the file system is read-only there, or why not."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no namespaces")
    user, group = os.getuid(), os.getgid()
    rest = _NEW_NETWORK | _NEW_PROCESSES | _NEW_MOUNTS
    try:
        _call("unshare", _NEW_USER | rest)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    except OSError:
        _call("unshare", rest)  # a privileged user needs no user namespace
    try:
        _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_READ_ONLY, 0, 0, 0)
        _call("syscall", _SYS_MOUNT_SETATTR, _AT_CURRENT_FOLDER, b"/", _AT_RECURSIVE, ctypes.byref(attributes),
              ctypes.c_size_t(ctypes.sizeof(attributes)))  # fmt: skip
        _call("mount", b"tmpfs", os.fsencode(work), b"tmpfs", _MS_NOSUID | _MS_NODEV, WORK_FOLDER_OPTIONS)
    except OSError as error:
        return False, str(error)
    return True, ""


def _continue_in_child() -> None:
    """Fork. The child returns; this process waits for it and ends as it ended."""
    child = os.fork()
    if child == 0:
        _end_with_parent()
        return
    while True:  # process 1 also inherits whatever loses its parent
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _drop_capabilities() -> None:
    """A new user namespace gives all of them, and with them the read-only mounts could be undone."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
