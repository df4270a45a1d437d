# SPDX-License-Identifier: Apache-2.0
"""`ip` and `tc` for tests, and the shape of a test's veth pair."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass


def ip(*arguments: str, netns: str | None = None) -> str:
    """Return what `ip [-n NETNS] ARGUMENTS` printed. Raises CalledProcessError."""
    place = ("-n", netns) if netns else ()
    return _output(("ip", *place, *arguments))


def tc(*arguments: str, netns: str | None = None) -> str:
    """Return what `tc [-n NETNS] ARGUMENTS` printed. Raises CalledProcessError."""
    place = ("-n", netns) if netns else ()
    return _output(("tc", *place, *arguments))


_CHANGING = {"add", "append", "change", "del", "delete", "flush", "replace", "set"}
_changes: Counter[str | None] = Counter()


def changes(netns: str) -> int:
    """Return how often a test changed something in a namespace by `ip` and `tc`."""
    return _changes[netns]


def note_change(netns: str) -> None:
    """Count a change that a test makes by other ways than `ip` and `tc`."""
    _changes[netns] += 1


def _output(command: tuple[str, ...]) -> str:
    if command[1] == "-n":
        _changes[command[2]] += not _CHANGING.isdisjoint(command[4:6])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class VethPair:
    """Two namespaces joined by a veth: `device` in `netns` is the one under test."""

    netns: str
    peer_netns: str
    device: str = "d0"
    peer_device: str = "p0"
    address4: str = "192.0.2.1"
    peer_address4: str = "192.0.2.2"
    address6: str = "2001:db8::1"
    peer_address6: str = "2001:db8::2"


def load_program(return_code: int = -1) -> int:
    """Return the descriptor of a new SCHED_CLS program that only returns a code."""
    instructions = struct.pack("<BBhi", 0xB7, 0, 0, return_code) + struct.pack(
        "<BBhi", 0x95, 0, 0, 0
    )
    code = ctypes.create_string_buffer(instructions)
    gpl = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "=IIQQ", 3, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(gpl)
    ).ljust(128, b"\0")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
    descriptor = int(libc.syscall(number, 5, buffer, len(attributes)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "BPF_PROG_LOAD")
    return descriptor
