# SPDX-License-Identifier: Apache-2.0
"""Our programs as tcx links (Linux 6.6): before clsact's filters, and with no qdisc touched.

A link stands before all programs that were there, and lasts as long as its
pin or a descriptor of it, or until its device goes. Adding or deleting clsact
deactivates the device's queues (qdisc_graft() in net/sched/sch_api.c), and a
packet in flight is lost; a link comes and goes without it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel import bpf
from shapeagent.kernel import netns as namespaces
from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.model.types import Direction

HOOKS = {Direction.EGRESS: bpf.TCX_EGRESS, Direction.INGRESS: bpf.TCX_INGRESS}

_LOOPBACK = 1  # its index in every namespace
_LINK_CREATE = 28
_LINK_UPDATE = 29
_LINK_DETACH = 34
_F_BEFORE = 1 << 3
_LINK_TYPE_TCX = 11
_MOST = 64  # programs on one hook (BPF_MPROG_MAX)


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One link of ours; `index` is 0 once its device is gone or someone detached it."""

    id: int
    program_id: int
    index: int
    direction: Direction


def is_supported() -> bool:
    """Return whether the kernel has tcx."""
    attr = bytearray(struct.pack("=II", _LOOPBACK, bpf.TCX_EGRESS).ljust(64, b"\0"))
    try:
        bpf.bpf_call(bpf.PROG_QUERY, attr)
    except OSError as error:
        return error.errno == errno.ENODEV  # it knows the hook
    return True


def list_programs(netns: str | None, index: int, direction: Direction) -> tuple[int, ...]:
    """Return the ids of the programs on a hook in the order in which they run."""
    return namespaces.run_in_netns(netns, lambda: bpf.query_tcx(index, HOOKS[direction]))


def pin_path(pins: Path, direction: Direction) -> Path:
    """Return where the link of a direction is pinned."""
    return pins / f"link_{direction.value}"


def add_link(
    netns: str | None, index: int, direction: Direction, program_fd: int, pins: Path
) -> None:
    """Attach a program before all others of a hook, and pin the link.

    Raises: ConflictError tcx-full; FailedError bpf-failed.
    Undo: `remove_link`.
    """
    path = pin_path(pins, direction)
    attr = bytearray(
        struct.pack("=4I", program_fd, index, HOOKS[direction], _F_BEFORE).ljust(64, b"\0")
    )
    try:
        descriptor = namespaces.run_in_netns(netns, lambda: bpf.bpf_call(_LINK_CREATE, attr))
    except OSError as error:
        if error.errno == errno.ERANGE:
            raise ConflictError(
                "tcx-full",
                f"There are {_MOST} tcx programs on {direction.value} of device {index} already.",
                hint="bpftool net shows them; or attach with --hook clsact",
            ) from error
        bpf.raise_named(error, f"attach the {direction.value} program to device {index}")
    try:
        bpf.pin(descriptor, str(path))
    finally:
        os.close(descriptor)


def find_link(pins: Path, direction: Direction) -> LinkInfo | None:
    """Return our link of a direction, None where none is pinned."""
    with _opened(pins, direction) as descriptor:
        return None if descriptor is None else _info(descriptor)


def update_link(pins: Path, direction: Direction, program_fd: int) -> bool:
    """Put another program into our link at once: each packet runs the old one or the new.

    Returns False where the link is gone.
    """
    with _opened(pins, direction) as descriptor:
        if descriptor is None:
            return False
        attr = bytearray(struct.pack("=4I", descriptor, program_fd, 0, 0).ljust(64, b"\0"))
        try:
            bpf.bpf_call(_LINK_UPDATE, attr)
        except OSError as error:
            if error.errno == errno.ENOLINK:
                return False
            bpf.raise_named(error, f"replace the {direction.value} program")
    return True


def remove_link(pins: Path, direction: Direction) -> bool:
    """Detach and unpin our link; returns False where there was none."""
    with _opened(pins, direction) as descriptor:
        if descriptor is None:
            return False
        # at once, and not when the kernel comes round to the last reference
        attr = bytearray(struct.pack("=I", descriptor).ljust(64, b"\0"))
        try:
            bpf.bpf_call(_LINK_DETACH, attr)
        except OSError as error:
            if error.errno != errno.ENOLINK:
                bpf.raise_named(error, f"detach the {direction.value} program")
        pin_path(pins, direction).unlink()
    return True


@contextmanager
def _opened(pins: Path, direction: Direction) -> Iterator[int | None]:
    try:
        descriptor = bpf.get_pinned(str(pin_path(pins, direction)))
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _info(descriptor: int) -> LinkInfo:
    # struct bpf_link_info: type, id, prog_id, then of tcx: ifindex, attach_type
    kind, number, program, index, hook = struct.unpack_from(
        "=III4xII", bpf.object_info(descriptor, 40)
    )
    directions = {number: direction for direction, number in HOOKS.items()}
    if kind != _LINK_TYPE_TCX or hook not in directions:
        raise FailedError(
            "pin-differs",
            f"What is pinned as our link is none: type {kind}, hook {hook}.",
            hint="detach, then attach again",
        )
    return LinkInfo(number, program, index, directions[hook])
