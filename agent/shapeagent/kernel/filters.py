# SPDX-License-Identifier: Apache-2.0
"""The clsact qdisc and our filters in it: one per direction, and one that redirects.

Each has a fixed slot, so that a second attach finds it and a detach
removes it and nothing else. The preference lies under 49152, where the
kernel starts to number filters that ask for none: those run after us. A u32
filter without an action, or one that answers TC_ACT_OK, would hide us.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shapeagent.kernel import bpf
from shapeagent.kernel.abi import SHP_TO_IFB
from shapeagent.kernel.qdisc import dump_tree
from shapeagent.kernel.rtnl import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    RTM_GETTFILTER,
    RTM_NEWQDISC,
    RTM_NEWTFILTER,
    TC_H_CLSACT,
    TC_H_CLSACT_HANDLE,
    TC_H_MIN_EGRESS,
    TC_H_MIN_INGRESS,
    TCA_KIND,
    TCA_OPTIONS,
    NetlinkRefusal,
    Rtnl,
    TcMessage,
    attribute,
    attribute_text,
    attribute_u32,
    build_tc,
    named_error,
    nested,
    parse_attributes,
    parse_tc,
    parse_text,
)
from shapeagent.model.errors import ConflictError, UnsupportedError
from shapeagent.model.types import Direction

PREF = 0x5348  # "SH"
HANDLE = 0x5348
REDIRECT_PREF = PREF + 1  # behind the classifier
REDIRECT_NAME = "shp_to_ifb"
PROGRAM_PREFIX = "shp_"  # of all our programs
PROTOCOL = 0x0003  # ETH_P_ALL

_PARENT = {Direction.EGRESS: TC_H_MIN_EGRESS, Direction.INGRESS: TC_H_MIN_INGRESS}
_TCA_BPF_ACT = 1
_TCA_BPF_FD = 6
_TCA_BPF_NAME = 7
_TCA_BPF_FLAGS = 8
_TCA_BPF_ID = 11
_TCA_BPF_FLAG_ACT_DIRECT = 1
_TCA_ACT_KIND = 1
_TCA_ACT_OPTIONS = 2
_TCA_MIRRED_PARMS = 2
_MIRRED = struct.Struct("=7I")  # index, capab, action, refcnt, bindcnt, eaction, ifindex
_TC_ACT_STOLEN = 4
_TCA_EGRESS_REDIR = 1

# r2 = skb->cb[0]; r0 = 0, no match; if r2 is what the classifier wrote: r0 = -1, match; exit
_REDIRECT_CODE = b"".join(
    struct.pack("=BBhi", *one)
    for one in (
        (0x61, 0x12, 48, 0),
        (0xB7, 0, 0, 0),
        (0x55, 0x02, 1, SHP_TO_IFB),
        (0xB7, 0, 0, -1),
        (0x95, 0, 0, 0),
    )
)


@dataclass(frozen=True, slots=True)
class FilterInfo:
    """One filter at a clsact hook; `program_id` is 0 unless it is a bpf filter."""

    direction: Direction
    pref: int
    handle: int
    protocol: int  # ETH_P_*, host order
    kind: str
    name: str
    program_id: int
    direct_action: bool

    @property
    def in_our_slot(self) -> bool:
        """True when it stands where our classifier would."""
        return self._stands_at(PREF)

    @property
    def in_redirect_slot(self) -> bool:
        """True when it stands where our redirect to the IFB would."""
        return self._stands_at(REDIRECT_PREF)

    def _stands_at(self, pref: int) -> bool:
        return (self.pref, self.handle, self.protocol, self.kind) == (pref, HANDLE, PROTOCOL, "bpf")

    def __str__(self) -> str:
        program = f" program {self.program_id} {self.name}" if self.kind == "bpf" else ""
        return f"{self.direction} {self.kind} pref {self.pref} handle {self.handle:#x}{program}"


def ensure_clsact(rtnl: Rtnl, index: int) -> bool:
    """Return True when clsact was created, False when it was there already.

    Raises: ConflictError ingress-qdisc-foreign where the older `ingress`
        qdisc holds the hook (C28); UnsupportedError clsact-missing.
    Undo: `remove_clsact_if_empty`.
    """
    if has_clsact(rtnl, index):
        return False
    body = build_tc(
        index,
        attribute_text(TCA_KIND, "clsact"),
        handle=TC_H_CLSACT_HANDLE,
        parent=TC_H_CLSACT,
    )
    try:
        rtnl.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body)
    except NetlinkRefusal as error:
        if error.errno == errno.EEXIST and has_clsact(rtnl, index):
            return False  # someone else was quicker: theirs, and it stays
        if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
            raise UnsupportedError(
                "clsact-missing",
                f"The kernel has no clsact qdisc: {error.strerror}.",
                hint="Load the module: modprobe sch_ingress",
            ) from error
        raise named_error(error, "add clsact", f"device {index}") from error
    return True


def list_filters(rtnl: Rtnl, index: int, direction: Direction) -> tuple[FilterInfo, ...]:
    """Return the filters of one direction in the order in which they run; none without clsact.

    Foreign tcx programs are not in it: ask BPF_PROG_QUERY.
    """
    parent = _PARENT[direction]
    try:
        bodies = rtnl.dump(RTM_GETTFILTER, build_tc(index, parent=parent))
    except NetlinkRefusal as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return ()  # no clsact there
        raise named_error(error, "list the filters", f"device {index}") from error
    found = (_parse_filter(message, direction) for message in map(parse_tc, bodies))
    return tuple(info for info in found if info.handle)  # handle 0: the head of a preference


def add_filter(
    rtnl: Rtnl, index: int, direction: Direction, program_fd: int, name: str
) -> FilterInfo:
    """Return our new filter, as read back.

    Raises: ConflictError filter-slot-foreign where anything stands in our slot.
    Undo: `del_filter`.
    """
    _refuse_foreign(list_filters(rtnl, index, direction), None)
    _put_filter(rtnl, index, direction, program_fd, name, NLM_F_CREATE | NLM_F_EXCL)
    return _read_ours(rtnl, index, direction)


def replace_filter(
    rtnl: Rtnl,
    index: int,
    direction: Direction,
    program_fd: int,
    name: str,
    *,
    our_program_ids: Sequence[int],
) -> FilterInfo:
    """Return our filter with another program, as read back; no packet runs past it.

    Args:
        our_program_ids: ids of the programs that we may replace.
    Raises: ConflictError filter-slot-foreign where another program stands there.
    """
    _refuse_foreign(list_filters(rtnl, index, direction), our_program_ids)
    _put_filter(rtnl, index, direction, program_fd, name, NLM_F_CREATE)
    return _read_ours(rtnl, index, direction)


def del_filter(
    rtnl: Rtnl, index: int, direction: Direction, *, our_program_ids: Sequence[int]
) -> bool:
    """Return True when our filter was deleted, False when it was gone already (C30).

    Raises: ConflictError filter-slot-foreign where another program stands there.
    """
    holder = find_ours(list_filters(rtnl, index, direction))
    return _delete(rtnl, index, direction, holder, our_program_ids)


def load_redirect() -> int:
    """Return the descriptor of the program that matches what the classifier sends to the IFB."""
    descriptor, _log = bpf.load_program(REDIRECT_NAME, _REDIRECT_CODE)
    return descriptor


def add_redirect(rtnl: Rtnl, index: int, ifb_index: int, program_fd: int) -> FilterInfo:
    """Return our new ingress filter behind the classifier, as read back.

    It hands what its program matches to the IFB, by the action mirred.

    Raises: ConflictError filter-slot-foreign; UnsupportedError mirred-missing.
    Undo: `del_redirect`.
    """
    parms = _MIRRED.pack(0, 0, _TC_ACT_STOLEN, 0, 0, _TCA_EGRESS_REDIR, ifb_index)
    action = nested(
        1,  # the first and only one
        attribute_text(_TCA_ACT_KIND, "mirred"),
        nested(_TCA_ACT_OPTIONS, attribute(_TCA_MIRRED_PARMS, parms)),
    )
    options = nested(
        TCA_OPTIONS,
        nested(_TCA_BPF_ACT, action),
        attribute_u32(_TCA_BPF_FD, program_fd),
        attribute_text(_TCA_BPF_NAME, REDIRECT_NAME),
    )
    body = _filter_body(index, Direction.INGRESS, options, pref=REDIRECT_PREF)
    _refuse_foreign(list_filters(rtnl, index, Direction.INGRESS), None, pref=REDIRECT_PREF)
    try:
        rtnl.request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_EXCL, body)
    except NetlinkRefusal as error:
        if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
            raise UnsupportedError(
                "mirred-missing",
                f"The kernel has no action mirred: {error.strerror}.",
                hint="Use --ingress police, or load the module: modprobe act_mirred",
            ) from error
        raise named_error(error, "add the redirect", f"device {index}") from error
    found = find_redirect(list_filters(rtnl, index, Direction.INGRESS))
    if found is None:
        raise _removed_at_once(Direction.INGRESS, index)
    return found


def del_redirect(rtnl: Rtnl, index: int, *, our_program_ids: Sequence[int]) -> bool:
    """Return True when our redirect was deleted, False when it was gone already.

    Raises: ConflictError filter-slot-foreign where another program stands there.
    """
    holder = find_redirect(list_filters(rtnl, index, Direction.INGRESS))
    return _delete(rtnl, index, Direction.INGRESS, holder, our_program_ids)


def find_redirect(filters: Sequence[FilterInfo]) -> FilterInfo | None:
    """Return the filter in the slot of our redirect, None where it is empty."""
    for info in filters:
        if info.in_redirect_slot:
            return info
    return None


def find_ours(filters: Sequence[FilterInfo]) -> FilterInfo | None:
    """Return the filter in our slot, None where it is empty."""
    for info in filters:
        if info.in_our_slot:
            return info
    return None


def remove_clsact_if_empty(
    rtnl: Rtnl, index: int, *, created_by_us: bool, has_other_programs: bool
) -> bool:
    """Return True when clsact was deleted: it is ours and nobody uses it (C26).

    Args:
        created_by_us: `ensure_clsact` said so at attach.
        has_other_programs: a tcx program is attached to the device, either direction.
    """
    if not created_by_us or has_other_programs or not has_clsact(rtnl, index):
        return False
    if any(list_filters(rtnl, index, direction) for direction in Direction):
        return False
    body = build_tc(
        index, attribute_text(TCA_KIND, "clsact"), handle=TC_H_CLSACT_HANDLE, parent=TC_H_CLSACT
    )
    try:
        rtnl.request(RTM_DELQDISC, 0, body)
    except NetlinkRefusal as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return False
        raise named_error(error, "delete clsact", f"device {index}") from error
    return True


def has_clsact(rtnl: Rtnl, index: int) -> bool:
    """Return whether clsact is there, whoever made it.

    Raises: ConflictError ingress-qdisc-foreign.
    """
    hook = dump_tree(rtnl, index).hook
    if hook is None:
        return False
    if hook.kind != "clsact":
        raise ConflictError(
            "ingress-qdisc-foreign",
            f'The "{hook.kind}" qdisc of device {index} is owned by someone else, and clsact '
            "takes its place.",
            hint="See `tc filter show dev DEVICE ingress`; remove it with `tc qdisc del dev "
            "DEVICE ingress` when nobody needs it.",
        )
    return True


def _delete(
    rtnl: Rtnl,
    index: int,
    direction: Direction,
    holder: FilterInfo | None,
    our_program_ids: Sequence[int],
) -> bool:
    if holder is None:
        return False
    _refuse_foreign((holder,), our_program_ids, pref=holder.pref)
    try:
        rtnl.request(RTM_DELTFILTER, 0, _filter_body(index, direction, pref=holder.pref))
    except NetlinkRefusal as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return False
        raise named_error(error, "delete the filter", f"device {index}") from error
    return True


def _filter_body(index: int, direction: Direction, *attributes: bytes, pref: int = PREF) -> bytes:
    return build_tc(
        index,
        attribute_text(TCA_KIND, "bpf"),
        *attributes,
        handle=HANDLE,
        parent=_PARENT[direction],
        info=pref << 16 | socket.htons(PROTOCOL),
    )


def _put_filter(
    rtnl: Rtnl, index: int, direction: Direction, program_fd: int, name: str, flags: int
) -> None:
    options = nested(
        TCA_OPTIONS,
        attribute_u32(_TCA_BPF_FD, program_fd),
        attribute_text(_TCA_BPF_NAME, name),
        attribute_u32(_TCA_BPF_FLAGS, _TCA_BPF_FLAG_ACT_DIRECT),
    )
    try:
        rtnl.request(RTM_NEWTFILTER, flags, _filter_body(index, direction, options))
    except NetlinkRefusal as error:
        if error.errno in (errno.EEXIST, errno.EINVAL):
            _refuse_foreign(list_filters(rtnl, index, direction), None)
        raise named_error(error, f"add the {direction} filter", f"device {index}") from error


def _read_ours(rtnl: Rtnl, index: int, direction: Direction) -> FilterInfo:
    info = find_ours(list_filters(rtnl, index, direction))
    if info is None:
        raise _removed_at_once(direction, index)
    return info


def _removed_at_once(direction: Direction, index: int) -> ConflictError:
    return ConflictError(
        "filter-slot-foreign",
        f"Our {direction} filter on device {index} was removed at once by someone else.",
        hint="Find out who manages tc filters here.",
    )


def _refuse_foreign(
    filters: Sequence[FilterInfo], ours: Sequence[int] | None, *, pref: int = PREF
) -> None:
    """Raise where something that is not ours has our preference or slot."""
    for info in filters:
        if info.pref != pref:
            continue
        is_slot = info.in_our_slot or info.in_redirect_slot
        if ours is not None and is_slot and info.program_id in ours:
            continue
        raise ConflictError(
            "filter-slot-foreign",
            f"Our filter slot (pref {pref}) is held: {info}.",
            hint=f"See `tc filter show dev DEVICE {info.direction}`; it is not ours to remove.",
        )


def _parse_filter(message: TcMessage, direction: Direction) -> FilterInfo:
    options = parse_attributes(message.options) if message.kind == "bpf" else {}
    flags = options.get(_TCA_BPF_FLAGS, bytes(4))
    program_id = options.get(_TCA_BPF_ID, bytes(4))
    return FilterInfo(
        direction=direction,
        pref=message.info >> 16,
        handle=message.handle,
        protocol=socket.ntohs(message.info & 0xFFFF),
        kind=message.kind,
        name=parse_text(options.get(_TCA_BPF_NAME, b"")),
        program_id=int(struct.unpack_from("=I", program_id)[0]),
        direct_action=bool(struct.unpack_from("=I", flags)[0] & _TCA_BPF_FLAG_ACT_DIRECT),
    )
