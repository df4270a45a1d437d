# SPDX-License-Identifier: Apache-2.0
"""What the running kernel can do and what this process may do."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Collection
from pathlib import Path

from shapeagent.kernel import prepared
from shapeagent.kernel.link import create_scratch
from shapeagent.kernel.netns import run_in_new_netns
from shapeagent.kernel.qdisc import fq_has_bands
from shapeagent.kernel.rtnl import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_DELQDISC,
    RTM_GETQDISC,
    RTM_NEWQDISC,
    TC_H_CLSACT,
    TC_H_CLSACT_HANDLE,
    TC_H_ROOT,
    TCA_KIND,
    TCA_OPTIONS,
    NetlinkRefusal,
    Rtnl,
    attribute,
    attribute_text,
    build_tc,
    nested,
    parse_tc,
)
from shapeagent.model.errors import FailedError, PrivilegeError, UnsupportedError
from shapeagent.model.types import KernelFacts

BPFFS_DIR = Path("/sys/fs/bpf")

_CLOCK_MONOTONIC_COARSE = 6  # its resolution is TICK_NSEC (kernel/time/posix-timers.c)
LOOPBACK_INDEX = 1  # of lo in every network namespace
_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21
_CAP_PERFMON = 38
_CAP_BPF = 39
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8

# Options that each kind wants at least; kinds that want none are not listed.
_RATE = struct.pack("=BBHhHI", 0, 1, 0, 0, 0, 125_000)  # 1 Mbit/s, Ethernet
_HTB_OPTIONS = nested(TCA_OPTIONS, attribute(2, struct.pack("=5I", 3, 10, 0, 0, 0)))
_TBF_PARMS = _RATE + bytes(12) + struct.pack("=3I", 10_000, 1_000_000, 0)
_TBF_OPTIONS = nested(TCA_OPTIONS, attribute(1, _TBF_PARMS), attribute(6, struct.pack("=I", 5000)))
_PRIO_OPTIONS = attribute(TCA_OPTIONS, struct.pack("=i16B", 3, *[1] * 16))
_FIFO_OPTIONS = attribute(TCA_OPTIONS, struct.pack("=I", 10_000))
_NETEM_OPTIONS = attribute(TCA_OPTIONS, struct.pack("=6I", 0, 1000, 0, 0, 0, 0))
_PROBED = {
    "htb": _HTB_OPTIONS,
    "tbf": _TBF_OPTIONS,
    "prio": _PRIO_OPTIONS,
    "bfifo": _FIFO_OPTIONS,
    "pfifo": _FIFO_OPTIONS,
    "pfifo_fast": b"",
    "netem": _NETEM_OPTIONS,
    "fq_codel": b"",
    "fq": b"",
    "cake": b"",
    "mq": b"",
}
_HOOKS = ("ingress", "clsact")


def read_kernel_facts(kept: Path | None = None) -> KernelFacts:
    """Return what the running kernel is and can do.

    Args:
        kept: file in which `prepared` kept it, for a process without CAP_SYS_ADMIN.
    Raises: PrivilegeError missing-capability, needs-root-cli.
    """
    try:
        qdiscs, fq_bands = run_in_new_netns(_probe_here)
    except PrivilegeError:
        if kept is None:
            raise
        found = prepared.read(kept)
        if found is None:
            raise prepared.needs_root_cli("Probing the kernel", "shapectl agent prepare") from None
        return found
    return KernelFacts(
        release=os.uname().release,
        qdiscs=qdiscs,
        jiffy_ns=read_jiffy_ns(),
        possible_cpus=read_possible_cpus(),
        fq_bands=fq_bands,
    )


def read_jiffy_ns() -> int:
    """Return the length of one jiffy in nanoseconds."""
    return round(time.clock_getres(_CLOCK_MONOTONIC_COARSE) * 1e9)


def probe_qdiscs() -> frozenset[str]:
    """Return the kinds of qdisc that the kernel really adds, clsact included.

    Each is added to a scratch device in a private namespace, so the host sees
    nothing of it (the kernel may load a module).

    Raises: PrivilegeError missing-capability; UnsupportedError scratch-missing.
    """
    return run_in_new_netns(_probe_here)[0]


def probe_quietly(kinds: Collection[str]) -> frozenset[str]:
    """Return those of the kinds of qdisc that the kernel adds to a loopback device.

    The device is that of a private namespace, so nothing is made that anyone
    sees. Ask only for kinds that are in the kernel already, or it will load
    their modules.

    Raises: PrivilegeError missing-capability.
    """

    def probe() -> frozenset[str]:
        with Rtnl() as rtnl:
            return frozenset(kind for kind in kinds if _can_add_kind(rtnl, LOOPBACK_INDEX, kind))

    return run_in_new_netns(probe)


def read_possible_cpus(path: Path = Path("/sys/devices/system/cpu/possible")) -> int:
    """Return how many values a look-up in a per-CPU map gives: one per possible CPU.

    Holes between the ids are not counted, and offline CPUs are (C102): the
    kernel packs the values of `for_each_possible_cpu`.
    """
    text = path.read_text().strip()
    try:
        return sum(_count_range(part) for part in text.split(","))
    except ValueError as error:
        raise FailedError(
            "bad-cpu-list", f"{path} holds {text!r}, not a list of CPUs.", hint=f"cat {path}"
        ) from error


def require_privileges(
    status_path: Path = Path("/proc/thread-self/status"),
    uid_map_path: Path = Path("/proc/thread-self/uid_map"),
) -> None:
    """Return when this process may do what attach does.

    Raises: PrivilegeError missing-privilege, naming the capabilities (C119).
    """
    missing = missing_capabilities(status_path.read_text())
    if not missing and not has_whole_uid_map(uid_map_path.read_text()):
        raise PrivilegeError(
            "missing-privilege",
            "This process is root in a user namespace only, and the kernel asks for CAP_BPF and "
            "CAP_NET_ADMIN of the host.",
            hint="Run it with sudo outside the user namespace.",
        )
    if missing:
        raise PrivilegeError(
            "missing-privilege",
            f"This process lacks {', '.join(missing)}.",
            hint="Run it with sudo.",
        )


def has_whole_uid_map(text: str) -> bool:
    """Return whether /proc/PID/uid_map is that of the first user namespace: every id as it is.

    Source: user_namespaces(7). The kernel checks the right to load programs there, whatever
    capabilities a later namespace gives (bpf_capable() in include/linux/capability.h).
    """
    return text.split() == ["0", "0", "4294967295"]


def missing_capabilities(status: str) -> tuple[str, ...]:
    """Return the names of the needed capabilities that a /proc/PID/status text lacks.

    CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON (capability.h, since 5.8). What it alone may do
    (enter namespaces, mount bpffs, open others' programs) names it where it is needed.
    """
    effective = 0
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)

    def lacks(number: int) -> bool:
        return not effective >> number & 1

    missing = []
    if lacks(_CAP_SYS_ADMIN):
        missing += ["CAP_BPF"] if lacks(_CAP_BPF) else []
        missing += ["CAP_PERFMON"] if lacks(_CAP_PERFMON) else []
    if lacks(_CAP_NET_ADMIN):
        missing.append("CAP_NET_ADMIN")
    return tuple(missing)


def is_bpffs(folder: Path, mountinfo: Path = Path("/proc/thread-self/mountinfo")) -> bool:
    """Return True when a bpf file system is mounted on exactly this folder."""
    kind = ""
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == str(folder):
            kind = after.split()[0]  # the last mount on a folder is the one that shows
    return kind == "bpf"


def ensure_bpffs(folder: Path = BPFFS_DIR) -> bool:
    """Return True when a bpf file system was mounted, False when it was there.

    Raises: UnsupportedError no-bpffs where it cannot be mounted or is read-only (F6).
    Effects: mounts it with mode 0700, as systemd does.
    Undo: `umount FOLDER`; detach leaves it, since others may use it by then.
    """
    mounted = False
    command = f"mount -t bpf bpf {folder}"
    if not is_bpffs(folder):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"bpf", os.fsencode(folder), b"bpf", _MS_NOSUID_NODEV_NOEXEC, b"mode=0700"):
            code = ctypes.get_errno()
            if code == errno.EPERM:
                raise PrivilegeError(
                    "missing-privilege",
                    f"Cannot mount bpffs on {folder}: {os.strerror(code)}.",
                    hint="It needs CAP_SYS_ADMIN: run it with sudo.",
                )
            raise UnsupportedError(
                "no-bpffs", f"Cannot mount bpffs on {folder}: {os.strerror(code)}.", hint=command
            )
        mounted = True
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise UnsupportedError(
            "no-bpffs",
            f"The bpf file system on {folder} is read-only.",
            hint=f"mount -o remount,rw {folder}",
        )
    return mounted


def _count_range(text: str) -> int:
    first, _, last = text.partition("-")
    return int(last or first) - int(first) + 1


def _probe_here() -> tuple[frozenset[str], bool]:
    with Rtnl() as rtnl:
        index = create_scratch(rtnl, "probe0", queues=2)
        found = {kind for kind in (*_PROBED, *_HOOKS) if _can_add_kind(rtnl, index, kind)}
        fq_bands = "fq" in found and _fq_has_bands(rtnl, index)
    return frozenset(found), fq_bands


def _fq_has_bands(rtnl: Rtnl, index: int) -> bool:
    """Return whether fq shows its map of bands: an older one would ignore ours silently."""
    add = build_tc(index, attribute_text(TCA_KIND, "fq"), handle=1 << 16, parent=TC_H_ROOT)
    rtnl.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, add)
    return any(
        message.kind == "fq" and message.index == index and fq_has_bands(message)
        for message in map(parse_tc, rtnl.dump(RTM_GETQDISC, build_tc(index)))
    )


def _can_add_kind(rtnl: Rtnl, index: int, kind: str) -> bool:
    if kind in _HOOKS:
        return _can_add(rtnl, index, kind, b"", parent=TC_H_CLSACT, handle=TC_H_CLSACT_HANDLE)
    return _can_add(rtnl, index, kind, _PROBED[kind])


def _can_add(
    rtnl: Rtnl,
    index: int,
    kind: str,
    options: bytes,
    *,
    parent: int = TC_H_ROOT,
    handle: int = 1 << 16,
) -> bool:
    name = attribute_text(TCA_KIND, kind)
    body = build_tc(index, name, options, handle=handle, parent=parent)
    try:
        rtnl.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body)
    except NetlinkRefusal:
        return False
    rtnl.request(RTM_DELQDISC, 0, build_tc(index, name, handle=handle, parent=parent))
    return True
