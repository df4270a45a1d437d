# SPDX-License-Identifier: Apache-2.0
"""Our maps: shapes, making and pinning, opening what is pinned.

Made by us and not by BCC, so that their sizes are known before anything is
compiled and an existing pin of another shape is noticed (BCC takes it
silently). Pins lie in a folder of mode 0700, since a bpffs is often 1777.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shapeagent.kernel import abi, bpf
from shapeagent.kernel.bpf import MapShape, MapType
from shapeagent.model.codes import Code
from shapeagent.model.errors import ConflictError, ShapeError

FLOW_ENTRIES = 131_072  # 11 MB for IPv4 (bpf-facts 3)
MOVED_ENTRIES = 16_384
FRAG_ENTRIES = 8_192
BUDGET_ENTRIES = 65_536
SPARED_ENTRIES = 16_384  # flows that lost their last packet in front of fq
MANUAL_ENTRIES = 65_536
CGROUP_ENTRIES = 1_024
CODE_SLOTS = 64
#: Of the pins that are no maps of `SHAPES`: programs first, then what is held or kept for later.
PIN_PREFIXES = ("shp_", "held_", "kept_", "link_")

_U32 = 4
_U64 = 8


def _size(struct: type[ctypes.Structure]) -> int:
    return ctypes.sizeof(struct)


@dataclass(frozen=True, slots=True)
class ListKind:
    """One kind of whitelist: an array of maps and the shape of what it holds."""

    name: str
    inner_type: MapType
    key_bytes: int
    value_bytes: int
    slots: int

    def inner_shape(self, entries: int) -> MapShape:
        """Return the shape of an inner map for so many entries."""
        return MapShape(
            self.inner_type, self.key_bytes, self.value_bytes, max(1, entries), bpf.F_NO_PREALLOC
        )


_LISTED = _size(abi.Listed)
LIST_KINDS: Mapping[str, ListKind] = {
    kind.name: kind
    for kind in (
        ListKind("hosts4", MapType.HASH, _size(abi.Host4), _size(abi.Host), 2),
        ListKind("hosts6", MapType.HASH, _size(abi.Host6), _size(abi.Host), 2),
        ListKind("pairs4", MapType.HASH, _size(abi.Pair4), _LISTED, 2),
        ListKind("pairs6", MapType.HASH, _size(abi.Pair6), _LISTED, 2),
        ListKind("nets4", MapType.HASH, _size(abi.Lpm4), _size(abi.Host), 2),
        ListKind("nets6", MapType.HASH, _size(abi.Lpm6), _size(abi.Host), 2),
        ListKind("lpm4", MapType.LPM_TRIE, _size(abi.Lpm4), _LISTED, 4),
        ListKind("lpm6", MapType.LPM_TRIE, _size(abi.Lpm6), _LISTED, 4),
    )
}


def _array(value_bytes: int, entries: int, kind: MapType = MapType.ARRAY) -> MapShape:
    return MapShape(kind, _U32, value_bytes, entries, 0)


def _lru(key: type[ctypes.Structure], value: type[ctypes.Structure], entries: int) -> MapShape:
    return MapShape(MapType.LRU_HASH, _size(key), _size(value), entries, 0)


SHAPES: Mapping[str, MapShape] = {
    "ctl": _array(_U64, 1),
    "config": _array(_size(abi.Config), 1),
    "classes": _array(_size(abi.Class), 2 * abi.SHP_MAX_CLASSES),
    "meters": _array(_size(abi.Meter), abi.SHP_METER_SLOTS),
    "rules": _array(_size(abi.Rule), 2 * abi.SHP_MAX_RULES),
    "ports": _array(_size(abi.PortRules), 4 * 65536),
    "fields": _array(_U32, 4 * abi.SHP_FIELD_SLOTS),
    "marks": _array(_size(abi.MarkRule), 2 * abi.SHP_MAX_MARKS),
    "cgroups": MapShape(
        MapType.HASH,
        _size(abi.CgroupKey),
        _size(abi.CgroupRule),
        CGROUP_ENTRIES,
        bpf.F_NO_PREALLOC,
    ),
    "flows4": _lru(abi.Flow4Key, abi.Flow, FLOW_ENTRIES),
    "flows6": _lru(abi.Flow6Key, abi.Flow, FLOW_ENTRIES),
    "moved4": _lru(abi.Flow4Key, abi.Moved, MOVED_ENTRIES),
    "moved6": _lru(abi.Flow6Key, abi.Moved, MOVED_ENTRIES),
    "frags": _lru(abi.FragKey, abi.Flow, FRAG_ENTRIES),
    "budgets": _lru(abi.Source, abi.Budget, BUDGET_ENTRIES),
    "spared": MapShape(MapType.LRU_HASH, _U32, 1, SPARED_ENTRIES, 0),
    "manual": MapShape(
        MapType.HASH,
        _size(abi.ManualKey),
        _size(abi.Manual),
        MANUAL_ENTRIES,
        bpf.F_NO_PREALLOC,
    ),
    "net_lengths": _array(_size(abi.NetLength), 4 * abi.SHP_NET_LENGTHS),
    "counts": _array(_size(abi.Count), 2 * abi.SHP_MAX_CLASSES, MapType.PERCPU_ARRAY),
    "reasons": _array(_U64, 2 * CODE_SLOTS, MapType.PERCPU_ARRAY),
    "inserts": _array(_size(abi.Inserts), 1, MapType.PERCPU_ARRAY),
    "again": _array(_U32, abi.SHP_AGAIN_SLOTS, MapType.PROG_ARRAY),
    "scratch": _array(_size(abi.Scratch), 2, MapType.PERCPU_ARRAY),
    **{
        kind.name: MapShape(MapType.ARRAY_OF_MAPS, _U32, _U32, kind.slots, 0)
        for kind in LIST_KINDS.values()
    },
}


def create_pinned(folder: Path) -> dict[str, int]:
    """Make and pin every map in `folder`. Returns name → descriptor.

    The slots of the arrays of maps are empty.

    Effects: `folder` exists, 0700, with one pin per map.
    Undo: `remove_pins(folder)`.
    """
    make_pin_folder(folder)
    maps: dict[str, int] = {}
    try:
        for name, shape in SHAPES.items():
            maps[name] = (
                _create_outer(LIST_KINDS[name]) if name in LIST_KINDS else _create(name, shape)
            )
            bpf.pin(maps[name], str(folder / name))
    except BaseException:
        bpf.close_all(list(maps.values()))
        remove_pins(folder)
        raise
    return maps


def _create(name: str, shape: MapShape) -> int:
    return bpf.create_map(name, shape)


def _create_outer(kind: ListKind) -> int:
    inner = bpf.create_map(kind.name, kind.inner_shape(1))  # only its shape counts
    try:
        return bpf.create_map(kind.name, SHAPES[kind.name], inner_fd=inner)
    finally:
        os.close(inner)


class PinnedMaps(Mapping[str, int]):
    """The maps pinned in a folder, each opened and checked when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._inner: dict[tuple[str, int], tuple[int, int]] = {}  # (kind, slot) → id, descriptor

    def keep_inner(self, kind: str, slot: int, fd: int) -> None:
        """Keep a descriptor of an inner map: by its id only CAP_SYS_ADMIN could open it again."""
        self.drop_inner(kind, slot)
        self._inner[kind, slot] = (bpf.map_id(fd), os.dup(fd))

    def kept_inner(self, kind: str, slot: int, number: int) -> int | None:
        """Return a descriptor of the inner map with this id, None where another one was kept."""
        known, fd = self._inner.get((kind, slot), (0, -1))
        return os.dup(fd) if known == number else None

    def drop_inner(self, kind: str, slot: int) -> None:
        """Close what was kept of a slot, so that the kernel can free it."""
        found = self._inner.pop((kind, slot), None)
        if found is not None:
            os.close(found[1])

    def __getitem__(self, name: str) -> int:
        """Return the descriptor of a map.

        Raises:
            FileNotFoundError: its pin is missing.
            ConflictError: "pin-differs".
        """
        if name not in self._open:
            self._open[name] = _open_one(self._folder, name)
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SHAPES)

    def __len__(self) -> int:
        return len(SHAPES)

    def close(self) -> None:
        """Close what was opened."""
        bpf.close_all([*self._open.values(), *(fd for _, fd in self._inner.values())])
        self._open.clear()
        self._inner.clear()


def has_our_shape(folder: Path, name: str) -> bool | None:
    """Return whether a pinned map has the shape of this version's, None where none is pinned."""
    try:
        os.close(_open_one(folder, name))
    except FileNotFoundError:
        return None
    except ConflictError:
        return False
    return True


def have_other_shapes(folder: Path) -> bool:
    """Return whether a map that is pinned in a folder has another shape than this version's."""
    return any(has_our_shape(folder, name) is False for name in SHAPES)


def remove_unused(folder: Path, former: Collection[int]) -> None:
    """Remove the pins of former maps (by id) whose names this version does not have."""
    for path in folder.iterdir():
        if path.name in SHAPES or path.name.startswith(PIN_PREFIXES):
            continue
        with _opened(path) as descriptor:
            if bpf.map_id(descriptor) in former:
                path.unlink()


def copy_percpu(source: int, target: int, shape: MapShape, cpus: int) -> None:
    """Copy every element of a per-CPU array into another of the same shape."""
    value_bytes = shape.value_bytes * cpus
    for index in range(shape.max_entries):
        key = index.to_bytes(_U32, "little")
        value = bpf.lookup(source, key, value_bytes)
        if value is not None:
            bpf.update(target, key, value)


def _open_one(folder: Path, name: str) -> int:
    fd = bpf.get_pinned(str(folder / name))
    got, want = bpf.map_shape(fd), SHAPES[name]
    if got != want:
        os.close(fd)
        raise ConflictError(
            "pin-differs",
            f"{folder / name}: got {got}, want {want}.",
            hint="of another version of shapectl: attach again, which swaps them in place",
        )
    return fd


def remove_pins(folder: Path) -> int:
    """Remove a pin folder and what is ours in it. Returns how many pins went.

    Raises:
        ConflictError: "pins-foreign" where something else is in it: that stays, and the folder.
    """
    try:
        check_pin_folder(folder)
    except FileNotFoundError:
        return 0
    # by descriptor: a link put in the folder's place now leads nowhere
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = os.listdir(descriptor)
        foreign = _foreign_pins(folder, names)
        for name in names:
            if name not in foreign:
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    if foreign:
        raise ConflictError(
            "pins-foreign",
            f"{folder} holds what is not ours, and it was left there: {', '.join(foreign)}.",
            hint=f"look whose it is (bpftool map show, bpftool prog show), then: rm -r -- {folder}",
        )
    folder.rmdir()
    return len(names)


def maps_in_use(folder: Path) -> set[int]:
    """Return the ids of the maps that the programs pinned in a folder use."""
    used: set[int] = set()
    for path in folder.glob(f"{PIN_PREFIXES[0]}*"):
        with contextlib.suppress(OSError, ShapeError), _opened(path) as descriptor:
            used |= set(bpf.program_facts(descriptor).map_ids)
    return used


def _foreign_pins(folder: Path, names: Iterable[str]) -> list[str]:
    """Return what in a pin folder is not ours: not by its name, and no map that ours use.

    Another version may have maps of other names.
    """
    unknown = {name for name in names if name not in SHAPES and not name.startswith(PIN_PREFIXES)}
    if not unknown:
        return []
    used = maps_in_use(folder)
    for name in tuple(unknown):
        with contextlib.suppress(OSError, ShapeError), _opened(folder / name) as descriptor:
            if bpf.map_id(descriptor) in used:
                unknown.discard(name)
    return sorted(unknown)


@contextlib.contextmanager
def _opened(pin: Path) -> Iterator[int]:
    descriptor = bpf.get_pinned(str(pin))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_pin_folder(folder: Path) -> None:
    """Make a pin folder and the one above it, 0700, ours.

    A bpffs is often 1777, so anybody may have made them first.

    Raises:
        ConflictError: "pins-foreign" where one is a link, or not ours alone.
    """
    for one in (folder.parent, folder):
        try:
            one.mkdir(mode=0o700)
        except FileExistsError:
            _check_folder(one, sticky=one != folder)
        else:
            one.chmod(0o700)


def _check_folder(folder: Path, *, sticky: bool = False) -> None:
    """Refuse a folder that is not ours alone; a `sticky` one of ours will do as parent."""
    status = folder.lstat()
    closed = not status.st_mode & 0o022 or (sticky and status.st_mode & stat.S_ISVTX)
    ours = status.st_uid == os.geteuid() and closed
    if not stat.S_ISDIR(status.st_mode) or not ours:
        raise ConflictError(
            "pins-foreign",
            f"{folder} is not a folder of ours alone: someone else made it or may write to it.",
            hint=f"look at it (ls -ld {folder}) and remove it: rm -r {folder}",
        )


def check_pin_folder(folder: Path) -> None:
    """Return when a pin folder is ours alone. Raises: ConflictError pins-foreign; OSError."""
    _check_folder(folder.parent, sticky=True)
    _check_folder(folder)


def read_array(fd: int, index: int, struct: type[ctypes.Structure]) -> ctypes.Structure:
    """Return one element of an array map as its structure."""
    raw = bpf.lookup(fd, index.to_bytes(4, "little"), _size(struct))
    if raw is None:
        raise IndexError(index)
    return struct.from_buffer_copy(raw)


def write_array(fd: int, index: int, value: ctypes.Structure | bytes) -> None:
    """Write one element of an array map."""
    bpf.update(fd, index.to_bytes(4, "little"), bytes(value))


def read_percpu_u64(fd: int, index: int, fields: int, cpus: int) -> list[int]:
    """Return `fields` u64 counters of one per-CPU array element, summed over all CPUs.

    Buffers are sized by possible CPUs, ids with holes included.
    """
    raw = bpf.lookup(fd, index.to_bytes(4, "little"), 8 * fields * cpus)
    if raw is None:
        raise IndexError(index)
    values = memoryview(raw).cast("Q")
    return [sum(values[field::fields]) for field in range(fields)]


def read_all_percpu_u64(fd: int, entries: int, fields: int, cpus: int) -> list[list[int]]:
    """Return what `read_percpu_u64` does of every element, by one system call."""
    size = 8 * fields * cpus
    raw = bpf.lookup_batch(fd, entries, size)
    if raw is None:
        return [read_percpu_u64(fd, index, fields, cpus) for index in range(entries)]
    values = memoryview(raw).cast("Q")
    each_cpu = list(zip(*[iter(values)] * fields, strict=True))
    return [
        list(map(sum, zip(*each_cpu[first : first + cpus], strict=True)))
        for first in range(0, entries * cpus, cpus)
    ]


def reason_counts(fd: int, cpus: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return code name → packets of egress and of ingress, zeroes left out."""
    counts = read_all_percpu_u64(fd, 2 * CODE_SLOTS, 1, cpus)
    egress, ingress = (
        {code.label: counts[first + code][0] for code in Code if counts[first + code][0]}
        for first in (0, CODE_SLOTS)
    )
    return egress, ingress
