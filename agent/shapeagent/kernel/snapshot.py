# SPDX-License-Identifier: Apache-2.0
"""A device's qdisc tree as it was: taken, proven to be writable, written back.

`take` keeps what a dump says; `prove` makes it again on a scratch device in a
private namespace and compares the dumps, since no table of kinds could say as
surely what this kernel takes back. `put_back` makes it on the device itself.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shapeagent.kernel import bpf
from shapeagent.kernel.link import create_scratch
from shapeagent.kernel.netns import run_in_new_netns
from shapeagent.kernel.rtnl import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_GETQDISC,
    RTM_GETTCLASS,
    RTM_GETTFILTER,
    TC_H_CLSACT,
    TC_H_ROOT,
    NetlinkRefusal,
    Rtnl,
    TcMessage,
    attribute,
    build_tc,
    iterate_attributes,
    named_error,
    parse_tc,
)
from shapeagent.kernel.tcobjects import (
    CLASSES_ARE_MADE,
    TcObject,
    What,
    build_request,
    handle_text,
    has_automatic_table,
    is_u32_table,
    parse_object,
    program_id_of,
    redirect_targets,
    stands_before_older,
    unknowable,
)
from shapeagent.model.errors import ConflictError, FailedError, ShapeError
from shapeagent.model.types import GsoLimits

_SCHEMA = 1
_MAX_DETAILS = 8
_ROOT_MAJOR = -1
# Kinds whose classes have filters of their own beside those of the qdisc.
_CLASSES_WITH_FILTERS = frozenset({"htb", "hfsc", "cbq", "atm"})


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """What stood on a device before us.

    `objects` are what somebody made, in the order of making it again; what the
    kernel makes by itself (handle 0) is only named, in `defaults`: pairs of
    (parent, kind). `hook` is the kind of the ingress qdisc, "" for none.
    """

    objects: tuple[TcObject, ...]
    defaults: tuple[tuple[int, str], ...]
    hook: str
    gso: GsoLimits

    @property
    def is_default(self) -> bool:
        """True where the kernel made the whole tree."""
        return not self.objects

    @property
    def root_text(self) -> str:
        """The root qdisc as `tc` names it: "htb 1:", "mq 0:"."""
        for one in self.objects:
            if one.what is What.QDISC and one.parent == TC_H_ROOT:
                return f"{one.kind} {handle_text(one.handle)}"
        kinds = [kind for parent, kind in self.defaults if parent == TC_H_ROOT]
        return f"{kinds[0] if kinds else 'none'} 0:"

    @property
    def program_ids(self) -> tuple[int, ...]:
        """The programs of its bpf filters, which end with their filters unless they are held."""
        return tuple(sorted({program_id_of(one) for one in self.objects} - {0}))

    def to_json(self) -> str:
        """Return the snapshot as JSON text."""
        objects = [
            {
                **{field.name: getattr(one, field.name) for field in dataclasses.fields(one)},
                "options": None if one.options is None else one.options.hex(),
                "extra": one.extra.hex(),
            }
            for one in self.objects
        ]
        gso = {field.name: getattr(self.gso, field.name) for field in dataclasses.fields(self.gso)}
        return json.dumps(
            {
                "schema": _SCHEMA,
                "objects": objects,
                "defaults": self.defaults,
                "hook": self.hook,
                "gso": gso,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> DeviceSnapshot:
        """Return the snapshot that `to_json` wrote.

        Raises: ValueError where it is damaged or of another schema.
        """
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("schema") != _SCHEMA:
            raise ValueError("unknown schema")
        try:
            objects = tuple(
                TcObject(
                    **{
                        **one,
                        "what": What(one["what"]),
                        "options": None
                        if one["options"] is None
                        else bytes.fromhex(one["options"]),
                        "extra": bytes.fromhex(one["extra"]),
                    }
                )
                for one in raw["objects"]
            )
            defaults = tuple((int(parent), str(kind)) for parent, kind in raw["defaults"])
            return cls(objects, defaults, str(raw["hook"]), GsoLimits(**raw["gso"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"damaged: {error}") from error


def take(rtnl: Rtnl, index: int, gso: GsoLimits) -> DeviceSnapshot:
    """Return what stands on a device now.

    Raises: FailedError interface-gone.
    """
    defaults: list[tuple[int, str]] = []
    qdiscs: list[TcObject] = []
    hook = ""
    for message in _dump(rtnl, RTM_GETQDISC, index):
        if message.parent == TC_H_CLSACT:
            hook = message.kind
        elif message.handle >> 16 == 0:
            defaults.append((message.parent, message.kind))
        else:
            qdiscs.append(parse_object(message, What.QDISC))
    classes = [
        parse_object(message, What.CLASS)
        for message in _dump(rtnl, RTM_GETTCLASS, index)
        # hfsc's own root class (minor 0) comes with the qdisc
        if message.kind in CLASSES_ARE_MADE and message.handle & 0xFFFF
    ]
    places = [one.handle for one in qdiscs]
    places += [one.handle for one in classes if one.kind in _CLASSES_WITH_FILTERS]
    filters = [one for place in places for one in _filters(rtnl, index, place)]
    objects = (*tree_order(qdiscs, classes), *_filter_order(filters))
    return DeviceSnapshot(objects, tuple(sorted(defaults)), hook, gso)


def _dump(rtnl: Rtnl, kind: int, index: int, parent: int = 0) -> Iterator[TcMessage]:
    try:
        bodies = rtnl.dump(kind, build_tc(index, parent=parent))
    except NetlinkRefusal as error:
        raise named_error(error, "read the qdisc tree", f"device {index}") from error
    return (one for one in map(parse_tc, bodies) if one.index == index)


def _filters(rtnl: Rtnl, index: int, parent: int) -> list[TcObject]:
    found = [
        parse_object(one, What.FILTER)
        for one in _dump(rtnl, RTM_GETTFILTER, index, parent)
        if one.parent == parent
    ]
    # a preference shows itself (handle 0), and u32 its own table: they come with the first filter
    full = {
        _preference(one)
        for one in found
        if one.handle and not (is_u32_table(one) and has_automatic_table(one))
    }
    return [
        one
        for one in found
        if _preference(one) not in full
        or (one.handle and not (is_u32_table(one) and has_automatic_table(one)))
    ]


def _preference(one: TcObject) -> tuple[int, int, bytes, str]:
    return one.parent, one.info, one.extra, one.kind


def tree_order(qdiscs: Sequence[TcObject], classes: Sequence[TcObject]) -> list[TcObject]:
    """Return every qdisc behind the class that it stands under, every class behind its parent."""
    below: dict[int, list[TcObject]] = {}  # by major of the qdisc above
    for one in sorted(qdiscs, key=lambda each: (each.parent, each.handle)):
        above = _ROOT_MAJOR if one.parent == TC_H_ROOT else one.parent >> 16
        below.setdefault(above, []).append(one)
    made: dict[int, list[TcObject]] = {}  # by major of their qdisc
    for one in classes:
        made.setdefault(one.handle >> 16, []).append(one)
    ordered: list[TcObject] = []
    waiting = below.pop(_ROOT_MAJOR, [])
    while waiting:
        one = waiting.pop(0)
        ordered += [one, *_class_order(made.pop(one.handle >> 16, []))]
        waiting += below.pop(one.handle >> 16, [])
    # what hangs from nothing that was dumped stays in, and the rebuild refuses it
    return [*ordered, *(one for rest in (below, made) for group in rest.values() for one in group)]


def _class_order(classes: Sequence[TcObject]) -> list[TcObject]:
    ordered: list[TcObject] = []
    waiting = sorted(classes, key=lambda one: one.handle)
    while waiting:
        handles = {one.handle for one in waiting}
        later = [one for one in waiting if one.parent in handles]
        if len(later) == len(waiting):
            return [*ordered, *waiting]  # a ring, which no kernel makes
        ordered += [one for one in waiting if one.parent not in handles]
        waiting = later
    return ordered


def _filter_order(filters: Sequence[TcObject]) -> list[TcObject]:
    """Return filters so that their tables come first and each is asked in the same turn again."""
    groups: dict[tuple[int, int, bytes, str], list[TcObject]] = {}
    for one in filters:
        groups.setdefault(_preference(one), []).append(one)

    def turn(group: list[TcObject]) -> int:
        # u32 numbers the table of each preference as they come
        return min((one.handle >> 20 for one in group if has_automatic_table(one)), default=0)

    ordered: list[TcObject] = []
    for group in sorted(groups.values(), key=turn):
        tables = [one for one in group if is_u32_table(one)]
        others = [one for one in group if not is_u32_table(one)]
        if others and stands_before_older(others[0]):
            others.reverse()
        ordered += tables + others
    return ordered


def put_back(
    rtnl: Rtnl,
    index: int,
    wanted: DeviceSnapshot,
    program_fd: Callable[[int], int],
    *,
    present: Iterable[TcObject] = (),
) -> None:
    """Return when every object of the snapshot was made on the device, but for `present`.

    Raises: FailedError restore-refused, naming the object and the kernel's words.
    Effects: where the snapshot has a root of its own, the device's default root goes.
    """
    there = {_comparable(one) for one in present}
    for one in wanted.objects:
        if _comparable(one) in there:
            continue
        try:
            kind, body = build_request(one, index, program_fd)
            rtnl.request(kind, NLM_F_CREATE | NLM_F_EXCL, body)
        except (OSError, ShapeError) as error:
            words = error.message if isinstance(error, ShapeError) else error.strerror or str(error)
            raise FailedError(
                "restore-refused",
                f"The kernel does not take back {one}: {words}.",
                hint=f"See what stands there: tc qdisc show; errno "
                f"{errno.errorcode.get(getattr(error, 'errno', 0) or 0, 'none')}.",
            ) from error


def differences(found: DeviceSnapshot, wanted: DeviceSnapshot) -> tuple[str, ...]:
    """Return in words what of the tree is not as wanted; empty where all is."""
    have = [_comparable(one) for one in found.objects]
    want = [_comparable(one) for one in wanted.objects]
    if have == want:
        return ()
    had, wants = set(have), set(want)
    texts = [f"{one} is not there, or not as it was" for one in want if one not in had]
    texts += [f"{one} was not there, or not so" for one in have if one not in wants]
    if not texts:
        texts.append("the filters stand in another order")
    if len(texts) > _MAX_DETAILS:
        texts[_MAX_DETAILS:] = [f"and {len(texts) - _MAX_DETAILS} more"]
    return tuple(texts)


def is_part_of(found: DeviceSnapshot, wanted: DeviceSnapshot) -> bool:
    """Return whether all that stands there belongs to the wanted tree: a restore that died."""
    want = {_comparable(one) for one in wanted.objects}
    return bool(found.objects) and all(_comparable(one) in want for one in found.objects)


def _comparable(one: TcObject) -> TcObject:
    """Return the object with the number of u32's automatic table as the first one's."""
    if not has_automatic_table(one):
        return one
    handle = 0x80000000 | one.handle & 0xFFFFF
    parts = []
    for number, payload in iterate_attributes(one.options or b""):
        if number == 2:  # TCA_U32_HASH: the table and bucket again
            payload = struct.pack("=I", handle & 0xFFFFF000)
        parts.append(attribute(number, payload))
    return dataclasses.replace(one, handle=handle, options=b"".join(parts))


def prove(wanted: DeviceSnapshot, device: str, *, queues: int) -> None:
    """Return when the tree was made on a scratch device and dumped as equal.

    Args:
        queues: transmit queues of the device.
    Raises: ConflictError qdisc-not-restorable, naming the object.
    Effects: a namespace of its own, which ends with the call.
    """
    for one in wanted.objects:
        what = unknowable(one)
        if what:
            raise _not_restorable(device, f"{one}: the kernel does not tell {what}")
    run_in_new_netns(lambda: _prove_here(wanted, device, queues))


def _prove_here(wanted: DeviceSnapshot, device: str, queues: int) -> None:
    with Rtnl() as rtnl:
        index = make_scratch(rtnl, wanted, queues)
        try:
            with OpenPrograms() as programs:
                put_back(rtnl, index, wanted, programs.open)
        except FailedError as error:
            raise _not_restorable(device, error.message) from error
        differing = differences(take(rtnl, index, wanted.gso), wanted)
    if differing:
        raise _not_restorable(device, "made again, it is not what it was", differing)


def make_scratch(rtnl: Rtnl, wanted: DeviceSnapshot, queues: int) -> int:
    """Return the index of a scratch device with what the tree needs around it.

    Raises: UnsupportedError scratch-missing.
    """
    for target in sorted({each for one in wanted.objects for each in redirect_targets(one)}):
        if target > 1:  # 1 is the loopback device, which every namespace has
            create_scratch(rtnl, f"target{target}", queues=1, index=target)
    return create_scratch(rtnl, "scratch", queues=queues)


class OpenPrograms:
    """Programs opened by id for as long as filters are made of them.

    Args:
        opener: gives the descriptor of a program by its id.
    """

    def __init__(self, opener: Callable[[int], int] = bpf.program_by_id) -> None:
        self._opener = opener
        self._opened: list[int] = []

    def __enter__(self) -> OpenPrograms:
        return self

    def __exit__(self, *_: object) -> None:
        bpf.close_all(self._opened)

    def open(self, number: int) -> int:
        """Return a descriptor of the program; closed with the others."""
        self._opened.append(self._opener(number))
        return self._opened[-1]


def _not_restorable(device: str, why: str, details: Sequence[str] = ()) -> ConflictError:
    return ConflictError(
        "qdisc-not-restorable",
        f"The root qdisc of {device} could not be put back as it is: {why.rstrip('.')}.",
        hint=f"shapectl attach {device} --profile police leaves qdiscs alone; or, if nobody needs "
        f"it: tc qdisc del dev {device} root",
        details=details,
    )
