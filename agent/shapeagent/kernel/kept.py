# SPDX-License-Identifier: Apache-2.0
"""Copies of the state files in maps of the kernel, pinned beside the attachment's own.

They live exactly as long as the attachment, and nothing that damages a file
reaches them. One array map per file, of slots of 4 KiB; the first eight bytes
are length and CRC-32, so that a copy that was written half counts as none.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

from shapeagent.kernel import bpf
from shapeagent.kernel.bpf import MapShape, MapType
from shapeagent.kernel.maps import check_pin_folder
from shapeagent.model.errors import ShapeError

SLOT_BYTES = 4096
MOST_BYTES = 16 << 20  # of one file; a tree of some ten thousand classes
_LEAST_SLOTS = 4
_HEADER = struct.Struct("=II")
_PREFIX = "kept_"


def pin_of(pins: Path, name: str) -> Path:
    """Return where the copy of a file is pinned; a bpffs takes no dots."""
    return pins / f"{_PREFIX}{name.partition('.')[0]}"


def is_kept(pins: Path, name: str) -> bool:
    """Return whether there is a copy of that file, good or not."""
    return os.path.lexists(pin_of(pins, name))


def keep(pins: Path, name: str, data: bytes) -> bool:
    """Return whether the kernel now has a copy of a file; without a pin folder it has none.

    A copy that cannot be made is no reason to fail: the file itself is written.

    Effects: a pin in `pins`. Undo: `forget`, or `maps.remove_pins`.
    """
    if len(data) > MOST_BYTES or not pins.is_dir():
        return False
    sealed = _HEADER.pack(len(data), zlib.crc32(data)) + data
    slots = -(-len(sealed) // SLOT_BYTES)
    path = pin_of(pins, name)
    try:
        descriptor = _open_with_room(path, slots)
        try:
            for number in range(slots):
                part = sealed[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
                bpf.update(descriptor, number.to_bytes(4, "little"), part.ljust(SLOT_BYTES, b"\0"))
        finally:
            os.close(descriptor)
    except (OSError, ShapeError):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # an old copy would be taken for the last word
        return False
    return True


def _open_with_room(path: Path, slots: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        descriptor = bpf.get_pinned(str(path))
        shape = bpf.map_shape(descriptor)
        if shape.value_bytes == SLOT_BYTES and shape.max_entries >= slots:
            return descriptor
        os.close(descriptor)
        path.unlink()
    shape = MapShape(MapType.ARRAY, 4, SLOT_BYTES, max(_LEAST_SLOTS, slots + slots // 2), 0)
    descriptor = bpf.create_map(path.name, shape)
    try:
        bpf.pin(descriptor, str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_kept(pins: Path, name: str) -> bytes | None:
    """Return the kernel's copy of a file, None where there is none that is whole and ours."""
    try:
        check_pin_folder(pins)
        descriptor = bpf.get_pinned(str(pin_of(pins, name)))
    except (OSError, ShapeError):
        return None
    try:
        return _read(descriptor)
    except (OSError, ShapeError):
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes | None:
    shape = bpf.map_shape(descriptor)
    if (shape.type, shape.value_bytes) != (MapType.ARRAY, SLOT_BYTES):
        return None
    first = _slot(descriptor, 0)
    length, checksum = _HEADER.unpack_from(first)
    slots = -(-(length + _HEADER.size) // SLOT_BYTES)
    if slots > shape.max_entries:
        return None
    parts = [first, *(_slot(descriptor, number) for number in range(1, slots))]
    data = b"".join(parts)[_HEADER.size : _HEADER.size + length]
    return data if zlib.crc32(data) == checksum else None


def _slot(descriptor: int, number: int) -> bytes:
    return bpf.lookup(descriptor, number.to_bytes(4, "little"), SLOT_BYTES) or bytes(SLOT_BYTES)


def forget(pins: Path, name: str) -> None:
    """Remove the copy of a file."""
    with contextlib.suppress(OSError):
        pin_of(pins, name).unlink()
