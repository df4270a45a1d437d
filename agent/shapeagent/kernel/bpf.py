# SPDX-License-Identifier: Apache-2.0
"""The bpf(2) system call: maps, programs, pins, test runs.

Called directly through libc, so that neither BCC nor LLVM is loaded outside
the compiling child. Layouts are those of `union bpf_attr` in
include/uapi/linux/bpf.h, which the kernel never changes, only extends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from shapeagent.model.errors import FailedError, PrivilegeError, ShapeError, UnsupportedError

_SYS_BPF = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "s390x": 351, "ppc64le": 361}
_LIBC = ctypes.CDLL(None, use_errno=True)

_MAP_CREATE = 0
_MAP_LOOKUP = 1
_MAP_UPDATE = 2
_MAP_DELETE = 3
_MAP_GET_NEXT_KEY = 4
_PROG_LOAD = 5
_OBJ_PIN = 6
_OBJ_GET = 7
_PROG_TEST_RUN = 10
_PROG_GET_NEXT_ID = 11
_MAP_GET_NEXT_ID = 12
_PROG_GET_FD_BY_ID = 13
_MAP_GET_FD_BY_ID = 14
_OBJ_GET_INFO = 15
PROG_QUERY = 16
_BTF_LOAD = 18
_BTF_GET_FD_BY_ID = 19
_MAP_LOOKUP_BATCH = 24
_MAP_UPDATE_BATCH = 26

_PROG_TYPE_SCHED_CLS = 3
_PSEUDO_MAP_FD = 1
_LD_IMM64 = 0x18

F_NO_PREALLOC = 1

TCX_INGRESS = 46
TCX_EGRESS = 47
NETKIT_PRIMARY = 54
NETKIT_PEER = 55


class MapType(IntEnum):
    HASH = 1
    ARRAY = 2
    PROG_ARRAY = 3
    PERCPU_ARRAY = 6
    LRU_HASH = 9
    LPM_TRIE = 11
    ARRAY_OF_MAPS = 12


@dataclass(frozen=True, slots=True)
class MapShape:
    """What makes two maps interchangeable."""

    type: int
    key_bytes: int
    value_bytes: int
    max_entries: int
    flags: int


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What the kernel says about a loaded program."""

    id: int
    name: str
    tag: str
    map_ids: tuple[int, ...]
    btf_id: int
    verified_instructions: int


@dataclass(frozen=True, slots=True)
class TestRun:
    """The result of BPF_PROG_TEST_RUN."""

    returned: int
    data: bytes
    context: bytes
    duration_ns: int  # mean of the repeats


def bpf_call(command: int, attr: bytearray) -> int:
    """Return the result of bpf(2). `attr` is read and written in place.

    Raises:
        OSError: with the kernel's errno.
    """
    number = _SYS_BPF.get(os.uname().machine)
    if number is None:
        raise UnsupportedError(
            "unknown-machine", f"The bpf system call of {os.uname().machine} is not known."
        )
    buffer = (ctypes.c_char * len(attr)).from_buffer(attr)
    result: int = _LIBC.syscall(number, command, ctypes.byref(buffer), len(attr))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def raise_named(error: OSError, doing: str) -> NoReturn:
    """Raise what the kernel answered as an error with a name."""
    if error.errno == errno.EPERM:
        raise PrivilegeError(
            "missing-capability",
            f"Cannot {doing}: {error.strerror}. It needs CAP_BPF and CAP_NET_ADMIN.",
            hint="run it with sudo; as root with both: a seccomp profile forbids bpf()",
        ) from error
    if error.errno in (errno.E2BIG, errno.ENOSPC):
        raise FailedError("map-full", f"Cannot {doing}: the map is full.") from error
    raise FailedError("bpf-failed", f"Cannot {doing}: {error.strerror}.") from error


def _address(buffer: ctypes.Array[ctypes.c_char] | None) -> int:
    return ctypes.addressof(buffer) if buffer is not None else 0


def _name(text: str) -> bytes:
    return text.encode()[:15].ljust(16, b"\0")


def create_map(name: str, shape: MapShape, *, inner_fd: int = 0) -> int:
    """Return the descriptor of a new map without BTF.

    Without BTF, so that a kernel before 6.12 takes inner maps of any size
    into an array of maps (bpf-facts row 3).
    """
    attr = bytearray(120)
    struct.pack_into(
        "=IIIIIII16s",
        attr,
        0,
        shape.type,
        shape.key_bytes,
        shape.value_bytes,
        shape.max_entries,
        shape.flags,
        inner_fd,
        0,
        _name(name),
    )
    try:
        return bpf_call(_MAP_CREATE, attr)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UnsupportedError(
                "map-refused",
                f"The kernel refused map {name} ({shape}): {error.strerror}.",
            ) from error
        raise_named(error, f"create map {name}")


def wait_for_readers() -> None:
    """Return when every program run that began before the call has ended.

    An update of an array of maps waits for an RCU grace period (7 to 20 ms),
    so one is made only to be written (bpf-facts 2.3).
    """
    shape = MapShape(MapType.ARRAY, 4, 4, 1, 0)
    inner = create_map("shp_grace_in", shape)
    try:
        outer = create_map("shp_grace", MapShape(MapType.ARRAY_OF_MAPS, 4, 4, 1, 0), inner_fd=inner)
        try:
            update(outer, bytes(4), inner.to_bytes(4, "little"))
        finally:
            os.close(outer)
    finally:
        os.close(inner)


def map_shape(fd: int) -> MapShape:
    """Return the shape of an open map."""
    info = object_info(fd, 80)
    kind, _id, key_bytes, value_bytes, entries, flags = struct.unpack_from("=6I", info, 0)
    return MapShape(kind, key_bytes, value_bytes, entries, flags)


def map_id(fd: int) -> int:
    """Return the kernel's id of an open map."""
    found: int = struct.unpack_from("=2I", object_info(fd, 80), 0)[1]
    return found


def lookup(fd: int, key: bytes, value_bytes: int) -> bytes | None:
    """Return the value under `key`, or None. Per-CPU maps: `value_bytes` × possible CPUs."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value_buffer = ctypes.create_string_buffer(value_bytes)
    attr = _element(fd, key_buffer, value_buffer)
    try:
        bpf_call(_MAP_LOOKUP, attr)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise_named(error, "look up a map entry")
    return value_buffer.raw


def lookup_batch(fd: int, count: int, value_bytes: int) -> bytes | None:
    """Return the values of the first `count` elements of an array, end to end.

    None where the kernel has no batches for such a map (per-CPU arrays: 5.13),
    or gave fewer. Per-CPU maps: `value_bytes` × possible CPUs.
    """
    place = ctypes.create_string_buffer(8)
    keys = ctypes.create_string_buffer(4 * count)
    values = ctypes.create_string_buffer(value_bytes * count)
    attr = _Attr(56)
    struct.pack_into(
        "=QQQQIIQQ", attr, 0, 0, _address(place), _address(keys), _address(values), count, fd, 0, 0
    )
    try:
        bpf_call(_MAP_LOOKUP_BATCH, attr)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise_named(error, "look up map entries")
        if error.errno != errno.ENOENT:  # which says that this was the end of the map
            return None
    (found,) = struct.unpack_from("=I", attr, 32)
    return values.raw if found == count else None


def update(fd: int, key: bytes, value: bytes, flags: int = 0) -> None:
    """Write one entry; returns after the RCU grace period for arrays of maps.

    Raises:
        FailedError: "map-full" (hash E2BIG, trie ENOSPC).
    """
    attr = _element(
        fd,
        ctypes.create_string_buffer(key, len(key)),
        ctypes.create_string_buffer(value, len(value)),
        flags,
    )
    try:
        bpf_call(_MAP_UPDATE, attr)
    except OSError as error:
        raise_named(error, "write a map entry")


def delete(fd: int, key: bytes) -> bool:
    """Remove one entry. Returns False where there was none."""
    attr = _element(fd, ctypes.create_string_buffer(key, len(key)), None)
    try:
        bpf_call(_MAP_DELETE, attr)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise_named(error, "delete a map entry")
    return True


# The buffers live as long as the attr that holds their addresses.
_Buffer = ctypes.Array[ctypes.c_char]


class _Attr(bytearray):
    keep: tuple[_Buffer | None, ...] = ()


def _element(fd: int, key: _Buffer, value: _Buffer | None, flags: int = 0) -> _Attr:
    attr = _Attr(32)
    struct.pack_into("=IxxxxQQQ", attr, 0, fd, _address(key), _address(value), flags)
    attr.keep = (key, value)
    return attr


def update_batch(
    fd: int, keys: bytes, values: bytes, count: int, *, key_bytes: int, value_bytes: int
) -> None:
    """Write `count` entries laid end to end in `keys` and `values`.

    Not atomic: a full map leaves part of them written, so write batches only
    into a map that no reader sees yet.

    Raises:
        FailedError: "map-full", or "bpf-failed".
    """
    if not count:
        return
    if len(keys) != count * key_bytes or len(values) != count * value_bytes:
        raise ValueError(f"got {len(keys)} and {len(values)} bytes for {count} entries")
    key_buffer = ctypes.create_string_buffer(keys, len(keys))
    value_buffer = ctypes.create_string_buffer(values, len(values))
    attr = _Attr(56)
    struct.pack_into(
        "=QQQQIIQQ", attr, 0, 0, 0, _address(key_buffer), _address(value_buffer), count, fd, 0, 0
    )
    attr.keep = (key_buffer, value_buffer)
    try:
        bpf_call(_MAP_UPDATE_BATCH, attr)
    except OSError as error:
        raise_named(error, f"write {count} map entries")


def iterate(fd: int, key_bytes: int, value_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield each entry of a map; entries that vanish in between are left out."""
    key: bytes | None = None
    while True:
        next_key = ctypes.create_string_buffer(key_bytes)
        key_buffer = ctypes.create_string_buffer(key, key_bytes) if key is not None else None
        attr = _Attr(32)
        struct.pack_into("=IxxxxQQQ", attr, 0, fd, _address(key_buffer), _address(next_key), 0)
        attr.keep = (key_buffer, next_key)
        try:
            bpf_call(_MAP_GET_NEXT_KEY, attr)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise_named(error, "walk a map")
        key = next_key.raw
        value = lookup(fd, key, value_bytes)
        if value is not None:
            yield key, value


def pin(fd: int, path: str) -> None:
    """Pin a map or program at `path` in a bpffs (no dots in its names)."""
    name = ctypes.create_string_buffer(path.encode())
    attr = _Attr(24)
    struct.pack_into("=QII", attr, 0, _address(name), fd, 0)
    attr.keep = (name,)
    try:
        bpf_call(_OBJ_PIN, attr)
    except OSError as error:
        raise_named(error, f"pin {path}")


def get_pinned(path: str) -> int:
    """Return a descriptor of what is pinned at `path`.

    Raises:
        FileNotFoundError: nothing is pinned there.
    """
    name = ctypes.create_string_buffer(path.encode())
    attr = _Attr(24)
    struct.pack_into("=QII", attr, 0, _address(name), 0, 0)
    attr.keep = (name,)
    try:
        return bpf_call(_OBJ_GET, attr)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(path) from error
        raise_named(error, f"open {path}")


def object_info(fd: int, length: int) -> bytes:
    """Return the first bytes of what the kernel says about a map, program, link or BTF."""
    buffer = ctypes.create_string_buffer(length)
    attr = _Attr(16)
    struct.pack_into("=IIQ", attr, 0, fd, length, _address(buffer))
    attr.keep = (buffer,)
    try:
        bpf_call(_OBJ_GET_INFO, attr)
    except OSError as error:
        raise_named(error, "read object information")
    return buffer.raw


# struct bpf_prog_info, offsets in bytes
_INFO_BYTES = 232
_INFO_JITED_LEN = 16
_INFO_NR_MAP_IDS = 52
_INFO_MAP_IDS = 56
_INFO_NAME = 64
_INFO_BTF_ID = 128
_INFO_FUNC_REC = 132
_INFO_FUNC = 136
_INFO_NR_FUNC = 144
_INFO_VERIFIED = 216


def program_facts(fd: int) -> ProgramFacts:
    """Return id, name, tag, maps, BTF id and verified instructions of a program."""
    info = object_info(fd, _INFO_BYTES)
    count = struct.unpack_from("=I", info, _INFO_NR_MAP_IDS)[0]
    ids = ctypes.create_string_buffer(4 * max(count, 1))
    request = ctypes.create_string_buffer(_INFO_BYTES)
    struct.pack_into("=I", request, _INFO_NR_MAP_IDS, count)
    struct.pack_into("=Q", request, _INFO_MAP_IDS, ctypes.addressof(ids))
    _info_into(fd, request)
    return ProgramFacts(
        id=struct.unpack_from("=I", info, 4)[0],
        name=info[_INFO_NAME : _INFO_NAME + 16].split(b"\0")[0].decode(),
        tag=info[8:16].hex(),
        map_ids=struct.unpack_from(f"={count}I", ids, 0),
        btf_id=struct.unpack_from("=I", info, _INFO_BTF_ID)[0],
        verified_instructions=struct.unpack_from("=I", info, _INFO_VERIFIED)[0],
    )


def is_jited(fd: int) -> bool:
    """Return whether a program was compiled to machine code, not left to the interpreter."""
    return bool(struct.unpack_from("=I", object_info(fd, _INFO_BYTES), _INFO_JITED_LEN)[0])


def _info_into(fd: int, request: _Buffer) -> None:
    attr = _Attr(16)
    struct.pack_into("=IIQ", attr, 0, fd, len(request), ctypes.addressof(request))
    bpf_call(_OBJ_GET_INFO, attr)


def program_func_info(fd: int) -> tuple[bytes, int]:
    """Return the function records of a program and the size of one.

    Line records are of no use here: their offsets are those of the program as
    the verifier rewrote it, and a load wants those of the original.
    """
    info = object_info(fd, _INFO_BYTES)
    record, count = (
        struct.unpack_from("=I", info, offset)[0] for offset in (_INFO_FUNC_REC, _INFO_NR_FUNC)
    )
    funcs = ctypes.create_string_buffer(max(1, record * count))
    request = ctypes.create_string_buffer(_INFO_BYTES)
    struct.pack_into("=I", request, _INFO_FUNC_REC, record)
    struct.pack_into("=Q", request, _INFO_FUNC, ctypes.addressof(funcs))
    struct.pack_into("=I", request, _INFO_NR_FUNC, count)
    _info_into(fd, request)
    return funcs.raw[: record * count], record


def btf_of(btf_id: int) -> bytes:
    """Return the raw BTF that the kernel holds under an id."""
    attr = bytearray(16)
    struct.pack_into("=I", attr, 0, btf_id)
    fd = bpf_call(_BTF_GET_FD_BY_ID, attr)
    try:
        size = struct.unpack_from("=QI", object_info(fd, 16), 0)[1]
        data = ctypes.create_string_buffer(size)
        request = ctypes.create_string_buffer(16)
        struct.pack_into("=QI", request, 0, ctypes.addressof(data), size)
        _info_into(fd, request)
        return data.raw
    finally:
        os.close(fd)


def load_btf(raw: bytes) -> int:
    """Return a descriptor of BTF loaded from bytes."""
    data = ctypes.create_string_buffer(raw, len(raw))
    attr = _Attr(32)
    struct.pack_into("=QQIII", attr, 0, _address(data), 0, len(raw), 0, 0)
    attr.keep = (data,)
    return bpf_call(_BTF_LOAD, attr)


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """BTF and function records of one program, as the kernel wants them back."""

    btf_fd: int
    func_info: bytes
    func_record_bytes: int


def load_program(
    name: str,
    instructions: bytes,
    *,
    license_text: str = "GPL",
    debug: DebugInfo | None = None,
    log_level: int = 0,
    log_bytes: int = 1 << 20,
) -> tuple[int, str]:
    """Load a TC classifier. Returns its descriptor and the verifier's log.

    Raises:
        UnsupportedError: "verifier-refused", with the end of the log.
        PrivilegeError: "missing-capability".
    """
    try:
        return _load(name, instructions, license_text, debug, log_level, log_bytes)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise_named(error, f"load program {name}")
        if log_level:
            raise FailedError(
                "bpf-failed", f"Cannot load program {name}: {error.strerror}."
            ) from error
    # one more attempt, only to learn why
    log = ctypes.create_string_buffer(1 << 24)
    try:
        fd = _load_with(name, instructions, license_text, debug, 1, log)
        return fd, ""
    except OSError as error:
        tail = log.value.decode(errors="replace").strip().splitlines()[-12:]
        raise UnsupportedError(
            "verifier-refused",
            f"The kernel's verifier refused program {name}: {error.strerror}.",
            hint="report it with the lines above, and with `uname -r`; traffic is untouched",
            details=tail,
        ) from error


def _load(
    name: str,
    instructions: bytes,
    license_text: str,
    debug: DebugInfo | None,
    log_level: int,
    log_bytes: int,
) -> tuple[int, str]:
    if not log_level:
        return _load_with(name, instructions, license_text, debug, 0, None), ""
    log = ctypes.create_string_buffer(log_bytes)
    fd = _load_with(name, instructions, license_text, debug, log_level, log)
    return fd, log.value.decode(errors="replace")


def _load_with(
    name: str,
    instructions: bytes,
    license_text: str,
    debug: DebugInfo | None,
    log_level: int,
    log: _Buffer | None,
) -> int:
    code = ctypes.create_string_buffer(instructions, len(instructions))
    terms = ctypes.create_string_buffer(license_text.encode())
    attr = _Attr(144)
    struct.pack_into(
        "=IIQQIIQII16sI",
        attr,
        0,
        _PROG_TYPE_SCHED_CLS,
        len(instructions) // 8,
        _address(code),
        _address(terms),
        log_level,
        len(log) if log is not None else 0,
        _address(log),
        0,
        0,
        _name(name),
        0,
    )
    keep: list[_Buffer | None] = [code, terms, log]
    if debug is not None and debug.func_info:
        funcs = ctypes.create_string_buffer(debug.func_info, len(debug.func_info))
        struct.pack_into(
            "=IIQI",
            attr,
            72,
            debug.btf_fd,
            debug.func_record_bytes,
            _address(funcs),
            len(debug.func_info) // debug.func_record_bytes,
        )
        keep.append(funcs)
    attr.keep = tuple(keep)
    return bpf_call(_PROG_LOAD, attr)


def bind_maps(instructions: bytes, maps: dict[int, int]) -> bytes:
    """Return the instructions with map descriptors filled in: instruction index → descriptor."""
    code = bytearray(instructions)
    for index, fd in maps.items():
        struct.pack_into("=i", code, index * 8 + 4, fd)
    return bytes(code)


def map_references(instructions: bytes) -> list[tuple[int, int]]:
    """Return (instruction index, descriptor) of each map that the code names."""
    found = []
    index = 0
    while index < len(instructions) // 8:
        opcode, registers, _offset, immediate = struct.unpack_from("=BBhi", instructions, index * 8)
        if opcode == _LD_IMM64:
            if registers >> 4 == _PSEUDO_MAP_FD:
                found.append((index, immediate))
            index += 1
        index += 1
    return found


def run_program(
    fd: int,
    data: bytes,
    *,
    context: bytes = b"",
    repeat: int = 1,
    out_bytes: int | None = None,
) -> TestRun:
    """Run a program on one packet by BPF_PROG_TEST_RUN.

    Args:
        data: 14 to about 3,700 bytes; IPv4 needs 34, IPv6 54 (bpf-facts row 11).
        context: struct __sk_buff, or empty.

    Raises:
        OSError: EINVAL where the kernel does not take such a packet.
    """
    source = ctypes.create_string_buffer(data, len(data))
    out = ctypes.create_string_buffer(out_bytes if out_bytes is not None else len(data) + 256)
    attr = _Attr(80)
    in_ctx = ctypes.create_string_buffer(context, len(context)) if context else None
    out_ctx = ctypes.create_string_buffer(len(context)) if context else None
    struct.pack_into(
        "=IIIIQQIIIIQQ",
        attr,
        0,
        fd,
        0,
        len(data),
        len(out),
        _address(source),
        _address(out),
        repeat,
        0,
        len(context),
        len(context),
        _address(in_ctx),
        _address(out_ctx),
    )
    attr.keep = (source, out, in_ctx, out_ctx)
    bpf_call(_PROG_TEST_RUN, attr)
    returned, _in, out_len = struct.unpack_from("=III", attr, 4)
    duration = struct.unpack_from("=I", attr, 36)[0]
    return TestRun(
        returned=ctypes.c_int32(returned).value,
        data=out.raw[:out_len],
        context=out_ctx.raw if out_ctx is not None else b"",
        duration_ns=duration,
    )


def query_tcx(ifindex: int, attach_type: int) -> tuple[int, ...]:
    """Return the program ids on a tcx or netkit hook, which no tc of Debian 12 shows.

    Returns an empty tuple where the kernel has no tcx (before 6.6) or no such device.
    """
    ids = ctypes.create_string_buffer(4 * 64)
    attr = _Attr(64)
    struct.pack_into("=IIIIQI", attr, 0, ifindex, attach_type, 0, 0, _address(ids), 64)
    attr.keep = (ids,)
    try:
        bpf_call(PROG_QUERY, attr)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
            return ()
        raise_named(error, "query tcx programs")
    count = struct.unpack_from("=I", attr, 24)[0]
    return struct.unpack_from(f"={count}I", ids, 0)


def program_ids() -> Iterator[int]:
    """Yield the ids of all programs in the kernel, upwards; none is opened."""
    return _ids(_PROG_GET_NEXT_ID, "list the programs")


def map_ids() -> Iterator[int]:
    """Yield the ids of all maps in the kernel, upwards; none is opened."""
    return _ids(_MAP_GET_NEXT_ID, "list the maps")


def _ids(command: int, doing: str) -> Iterator[int]:
    number = _next_id(command, 0, doing)
    while number is not None:
        yield number
        number = _next_id(command, number, doing)


def _next_id(command: int, number: int, doing: str) -> int | None:
    attr = bytearray(16)
    struct.pack_into("=I", attr, 0, number)
    try:
        bpf_call(command, attr)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise_named(error, doing)
    return int(struct.unpack_from("=I", attr, 4)[0])


def map_by_id(number: int) -> int:
    """Return a descriptor of a map, such as an inner map whose id a look-up gave.

    Raises:
        FileNotFoundError: no map has this id.
    """
    attr = bytearray(16)
    struct.pack_into("=I", attr, 0, number)
    try:
        return bpf_call(_MAP_GET_FD_BY_ID, attr)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(f"map {number}") from error
        raise_named(error, f"open map {number}")


def program_by_id(program_id: int) -> int:
    """Return a descriptor of a loaded program.

    Raises:
        FileNotFoundError: no program has this id.
    """
    attr = bytearray(16)
    struct.pack_into("=I", attr, 0, program_id)
    try:
        return bpf_call(_PROG_GET_FD_BY_ID, attr)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(f"program {program_id}") from error
        raise_named(error, f"open program {program_id}")


def program_text(program_id: int) -> str:
    """Return a program as people know it: "51 cil_to_netdev"; its id alone where it is gone."""
    with contextlib.suppress(ShapeError, OSError):
        descriptor = program_by_id(program_id)
        try:
            return f"{program_id} {program_facts(descriptor).name}".rstrip()
        finally:
            os.close(descriptor)
    return str(program_id)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; one that is closed already is left."""
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise


__all__ = [
    "F_NO_PREALLOC",
    "NETKIT_PEER",
    "NETKIT_PRIMARY",
    "PROG_QUERY",
    "TCX_EGRESS",
    "TCX_INGRESS",
    "DebugInfo",
    "MapShape",
    "MapType",
    "ProgramFacts",
    "ShapeError",
    "TestRun",
    "bind_maps",
    "bpf_call",
    "btf_of",
    "close_all",
    "create_map",
    "delete",
    "get_pinned",
    "is_jited",
    "iterate",
    "load_btf",
    "load_program",
    "lookup",
    "map_by_id",
    "map_id",
    "map_ids",
    "map_references",
    "map_shape",
    "object_info",
    "pin",
    "program_by_id",
    "program_func_info",
    "program_text",
    "program_facts",
    "program_ids",
    "query_tcx",
    "raise_named",
    "run_program",
    "update",
    "update_batch",
    "wait_for_readers",
]
