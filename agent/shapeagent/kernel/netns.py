# SPDX-License-Identifier: Apache-2.0
"""Work in another network namespace, by a thread that entered it.

Only the network namespace is entered, so `/sys/fs/bpf` stays what it was
(`ip netns exec` hides it behind a new `/sys`), and nothing is forked
(pyroute2's own way forks, which a process with threads must not). A socket
opened in there stays in there, whichever thread uses it later.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import FailedError, InputError, PrivilegeError, ShapeError

NETNS_DIR = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_SO_NETNS_COOKIE = 71  # linux/uapi asm-generic/socket.h, since 5.14

_entered = threading.local()  # `name`: which namespace a thread of ours entered
_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


def list_netns() -> tuple[str, ...]:
    """Return the names of the named network namespaces, sorted."""
    try:
        return tuple(sorted(os.listdir(NETNS_DIR)))
    except FileNotFoundError:
        return ()


def run_in_netns(netns: str | None, function: Callable[[], _T]) -> _T:
    """Return what `function` returns when it runs in the named network namespace.

    Args:
        netns: a name under /run/netns; None is the namespace of this process.
            In a thread that is there already it runs right here.
    Raises: InputError no-such-netns; PrivilegeError missing-capability;
        whatever `function` raises.
    Effects: `function` runs in a thread of its own; the caller's threads stay
        in their namespace.
    """
    if netns == getattr(_entered, "name", None):
        return function()
    descriptor = _open_netns(netns)
    try:
        return _run_in_thread(lambda: _enter(descriptor, netns), function)
    finally:
        os.close(descriptor)


def run_in_new_netns(function: Callable[[], _T]) -> _T:
    """Return what `function` returns when it runs in a fresh, private network namespace.

    The namespace ends with the call, when `function` leaves no socket open.

    Raises: PrivilegeError missing-capability; whatever `function` raises.
    """
    return _run_in_thread(_unshare, function)


def open_rtnl(netns: str | None) -> Rtnl:
    """Return a rtnetlink socket that belongs to the named network namespace.

    Raises: InputError no-such-netns; PrivilegeError missing-capability.
    """
    return run_in_netns(netns, Rtnl)


def read_netns_cookie(rtnl: Rtnl) -> int:
    """Return the cookie of the namespace of this socket: unique until the next boot.

    Source: SO_NETNS_COOKIE, Linux 5.14.
    """
    try:
        value = rtnl.raw.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError as error:
        raise FailedError(
            "no-netns-cookie",
            f"The kernel gives no network namespace cookie: {error.strerror}.",
            hint="shapectl needs Linux 5.15 or later.",
        ) from error
    return int(struct.unpack("=Q", value)[0])


def _open_netns(netns: str | None) -> int:
    if netns is None:  # from a thread that entered another: the main thread never does
        return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if not netns or "/" in netns or netns in (".", ".."):
        raise InputError(
            "no-such-netns",
            f"{netns!r} is not the name of a network namespace.",
            hint="Give a name as `ip netns list` prints it.",
        )
    try:
        return os.open(NETNS_DIR / netns, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        import difflib

        names = list_netns()
        near = difflib.get_close_matches(netns, names, n=3) or names[:5]
        raise InputError(
            "no-such-netns",
            f"No network namespace {netns!r}: {error.strerror}.",
            hint=f"There are: {', '.join(near)}." if near else "See `ip netns list`: it is empty.",
        ) from error


def _enter(descriptor: int, netns: str | None) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        place = f"network namespace {netns}" if netns else "the network namespace of this process"
        raise _entry_error(f"enter {place}", ctypes.get_errno())
    _entered.name = netns


def _unshare() -> None:
    if _libc.unshare(_CLONE_NEWNET):
        raise _entry_error("create a network namespace", ctypes.get_errno())


def _entry_error(what: str, code: int) -> ShapeError:
    message = f"Cannot {what}: {os.strerror(code)}."
    if code == 1:
        return PrivilegeError(
            "missing-capability", message, hint="It needs CAP_SYS_ADMIN: run it with sudo."
        )
    return FailedError("netns-failed", message, hint="See `ip netns list`.")


def _run_in_thread(enter: Callable[[], None], function: Callable[[], _T]) -> _T:
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            enter()
            results.append(function())
        except BaseException as error:  # handed to the caller below, whatever it is
            errors.append(error)

    thread = threading.Thread(target=work, name="shapectl-netns")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
