# SPDX-License-Identifier: Apache-2.0
"""Qdisc trees: snapshot, build, read back, change in place, count, remove.

Bursts go to HTB and TBF as time at the class rate, in ticks of 64 ns
(PSCHED_SHIFT 6, include/net/pkt_sched.h); rates above 2^32 - 1 bytes/s go in
the RATE64 attributes. With a link layer given, the kernel wants no rate
tables (net/sched/sch_api.c, qdisc_get_rtab).
"""

from __future__ import annotations

import dataclasses
import errno
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shapeagent.kernel.rtnl import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    RTM_DELQDISC,
    RTM_GETQDISC,
    RTM_GETTCLASS,
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    TC_H_CLSACT,
    TC_H_ROOT,
    TCA_KIND,
    TCA_OPTIONS,
    TCA_STATS2,
    NetlinkRefusal,
    Rtnl,
    TcMessage,
    attribute,
    attribute_text,
    attribute_u32,
    attribute_u64,
    build_tc,
    iterate_attributes,
    named_error,
    nested,
    parse_attributes,
    parse_tc,
    qdisc_bodies,
)
from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.model.types import FqPlan, HtbClassPlan, LeafPlan, Profile, TreePlan

TICK_NS = 64
_U32_MAX = 0xFFFFFFFF
_LINKLAYER_ETHERNET = 1

# struct tc_ratespec: cell_log, linklayer, overhead, cell_align, mpu, rate
_RATESPEC = struct.Struct("=BBHhHI")
_HTB_GLOB = struct.Struct("=IIIII")  # version, rate2quantum, defcls, debug, direct_pkts
_HTB_OPT_TAIL = struct.Struct("=IIIII")  # buffer, cbuffer, quantum, level, prio
_HTB_VERSION = 3
_HTB_RATE_TO_QUANTUM = 10  # the kernel's own default; every class states its quantum
_TCA_HTB_PARMS = 1
_TCA_HTB_INIT = 2
_TCA_HTB_RATE64 = 6
_TCA_HTB_CEIL64 = 7

_TBF_OPT_TAIL = struct.Struct("=III")  # limit, buffer, mtu
_TCA_TBF_PARMS = 1
_TCA_TBF_BURST = 6

_PRIO_OPT = struct.Struct("=i16B")  # bands, priomap
_PRIO_MAX_BANDS = 16

_FIFO_OPT = struct.Struct("=I")  # limit
_TCA_FQ_CODEL_TARGET = 1
_TCA_FQ_CODEL_LIMIT = 2
_TCA_FQ_CODEL_INTERVAL = 3
_TCA_FQ_CODEL_ECN = 4
_TCA_FQ_CODEL_MEMORY_LIMIT = 9
_FQ_CODEL_LIMIT_PACKETS = 10240  # the kernel's default; memory is what limits
_FQ_CODEL_CLOCK_US = 2  # codel keeps time in units of 1.024 us

_TCA_FQ_LIMIT = 1
_TCA_FQ_FLOW_LIMIT = 2
_TCA_FQ_RATE_ENABLE = 5
_TCA_FQ_ORPHAN_MASK = 10
_TCA_FQ_HORIZON_US = 14
_TCA_FQ_HORIZON_DROP = 15
TCA_FQ_PRIOMAP = 16  # since 6.7; older kernels ignore it
_TCA_FQ_WEIGHTS = 17
# skb->priority 0..15 -> band: 6 and 7 first, 2 and the other patient ones last. The kernel's
# own map (net/sched/sch_fq.c, fq_prio2band), stated.
_FQ_PRIOMAP = struct.pack("=i16B", 3, 1, 2, 2, 2, 1, 2, 0, 0, *[1] * 8)
# Bytes that a band may send in its turn. The last has the kernel's least (FQ_MIN_WEIGHT): where
# the device pushes back, the first then waits for 48 KB of the others, not for 256 by default.
_FQ_WEIGHTS = struct.pack("=3i", 65_536, 32_768, 16_384)

_TCA_STATS_BASIC = 1
_TCA_STATS_QUEUE = 3
_TCA_STATS_PKT64 = 8
# TCA_STATS2 as nearly every qdisc and class has it: BASIC and QUEUE, each behind its header
# (gnet_stats_copy_basic() and gnet_stats_copy_queue(), net/core/gen_stats.c).
_USUAL_STATS = struct.Struct("=4sQI4x4s5I")
_USUAL_HEADERS = (
    struct.pack("=HH", 4 + 16, _TCA_STATS_BASIC),
    struct.pack("=HH", 4 + 20, _TCA_STATS_QUEUE),
)


@dataclass(frozen=True, slots=True, order=True)
class TreeNode:
    """One qdisc or class, without its counters."""

    is_class: bool
    parent: int
    handle: int
    kind: str
    options: bytes


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """The qdiscs and classes of a device; equal when their configuration is equal.

    `nodes` are those under the root, sorted; `hook` is the ingress or clsact
    qdisc, which belongs to no tree.
    """

    nodes: tuple[TreeNode, ...]
    hook: TreeNode | None

    @property
    def root(self) -> TreeNode | None:
        """The root qdisc, None where the kernel shows none."""
        for node in self.nodes:
            if node.parent == TC_H_ROOT and not node.is_class:
                return node
        return None

    @property
    def root_kind(self) -> str:
        """The kind of the root qdisc, "" where the kernel shows none."""
        return self.root.kind if self.root else ""


@dataclass(frozen=True, slots=True)
class ClassCounters:
    """The counters of one class or band; drops include those inside its leaf."""

    minor: int
    sent_bytes: int
    sent_packets: int
    backlog_bytes: int
    backlog_packets: int
    drops: int
    overlimits: int


#: These show each flow that has packets as a class: they come and go with the traffic.
_FLOWS_ARE_CLASSES = frozenset({"cake", "fq_codel", "fq_pie", "sfq"})


def dump_tree(rtnl: Rtnl, index: int) -> TreeSnapshot:
    """Return the qdiscs and classes of a device, comparable and without counters."""
    nodes: list[TreeNode] = []
    hook: TreeNode | None = None
    for message in _dump(rtnl, RTM_GETQDISC, index):
        node = _node(message, is_class=False)
        if message.parent == TC_H_CLSACT:
            hook = node
        else:
            nodes.append(node)
    nodes += [
        _node(message, is_class=True)
        for message in _dump(rtnl, RTM_GETTCLASS, index)
        if message.kind not in _FLOWS_ARE_CLASSES
    ]
    return TreeSnapshot(tuple(sorted(nodes)), hook)


def is_default_root(snapshot: TreeSnapshot) -> bool:
    """Return True when the kernel itself made every qdisc under the root.

    What the kernel makes (noqueue, pfifo_fast, mq with its leaves, whatever
    net.core.default_qdisc says) has handle 0; what a person or program adds
    gets a handle.
    """
    return all(node.handle >> 16 == 0 for node in snapshot.nodes if not node.is_class)


def apply_tree(
    rtnl: Rtnl,
    index: int,
    plan: TreePlan,
    on_step: Callable[[str], None] | None = None,
    *,
    takeover: bool = False,
) -> None:
    """Return when the planned tree stands at the root of the device.

    Args:
        takeover: put it in the place of whatever root stands there.
        on_step: called with a sentence before each change (after the first
            call something of ours may stand there).
    Raises: ConflictError qdisc-busy where a root that is not the kernel's
        default stands there; UnsupportedError qdisc-missing; FailedError
        interface-gone.
    Effects: the root before and what it held are dropped.
    Undo: `delete_root`, and for a takeover snapshot.put_back.
    """
    step = on_step or (lambda _: None)
    for what, body, kind in _tree_messages(index, plan):
        step(what)
        flags = NLM_F_CREATE | (NLM_F_REPLACE if takeover else NLM_F_EXCL)
        takeover = False  # of the root only
        try:
            rtnl.request(kind, flags, body)
        except OSError as error:
            raise named_error(error, what, f"device {index}") from error


def change_class(rtnl: Rtnl, index: int, handle: int, wanted: HtbClassPlan) -> None:
    """Return when the rates of a living HTB class are the wanted ones; its queue stays.

    Args:
        handle: major number of the HTB root.
    Raises: FailedError class-gone, interface-gone.
    Source: 0.013 ms and no packet lost (bpf-facts rows 7 and C40).
    """
    try:
        rtnl.request(RTM_NEWTCLASS, 0, _htb_class(index, handle, wanted))
    except NetlinkRefusal as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            raise FailedError(
                "class-gone",
                f"HTB class {handle:x}:{wanted.minor:x} is not on device {index}: "
                f"{error.strerror}.",
                hint="Someone replaced the qdisc: detach and attach again.",
            ) from error
        raise named_error(error, "change the class", f"device {index}") from error


def change_tree(rtnl: Rtnl, index: int, plan: TreePlan) -> None:
    """Return when every number of a living tree of ours is the planned one; its queues stay.

    Of fq_codel the limits stay, see `change_leaf`.

    Raises: FailedError class-gone, interface-gone.
    """
    for node in plan.classes:
        change_class(rtnl, index, plan.handle, node)
        if node.leaf is not None:
            change_leaf(rtnl, index, plan.handle << 16 | node.minor, node.leaf)
    changes: list[tuple[str, bytes]] = []
    if plan.tbf_rate_bytes_per_s:
        body = _qdisc(index, "tbf", TC_H_ROOT, plan.handle << 16, _tbf_options(plan))
        changes.append(("change the tbf", body))
    if plan.fq is not None:
        for queue, parent in _fq_places(plan):
            handle = plan.handle << 16 if parent == TC_H_ROOT else 0
            body = _qdisc(index, "fq", parent, handle, _fq_options(plan.fq))
            changes.append((f"change the fq of queue {queue}", body))
    for what, body in changes:
        try:
            rtnl.request(RTM_NEWQDISC, 0, body)
        except OSError as error:
            raise named_error(error, what, f"device {index}") from error
    for band, leaf in enumerate(plan.bands):
        change_leaf(rtnl, index, _prio_handle(plan) << 16 | (band + 1), leaf)


def rebuild_leaves(rtnl: Rtnl, index: int, plan: TreePlan) -> tuple[int, ...]:
    """Return the transmit queues of edt's mq that have their fq again.

    Where a queue has none (its packets are lost: noop) or one that the kernel
    made. What someone else put there stays.

    Raises: FailedError interface-gone; UnsupportedError qdisc-missing.
    """
    if plan.fq is None or plan.queues <= 1:
        return ()
    found = {message.parent: message for message in _dump(rtnl, RTM_GETQDISC, index)}
    rebuilt = []
    for queue, parent in _fq_places(plan):
        leaf = found.get(parent)
        if leaf is not None and leaf.handle >> 16:
            continue
        body = _qdisc(index, "fq", parent, 0, _fq_options(plan.fq))
        try:
            rtnl.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE, body)
        except OSError as error:
            raise named_error(error, f"rebuild the fq of queue {queue}", str(index)) from error
        rebuilt.append(queue)
    return tuple(rebuilt)


def change_leaf(rtnl: Rtnl, index: int, parent: int, wanted: LeafPlan) -> None:
    """Return when the numbers of a living queue are the wanted ones; what it holds stays.

    Of a bfifo its limit, of a fq_codel target and interval: lowering a limit of
    that drops what lies above it (fq_codel_change() in net/sched/sch_fq_codel.c).

    Args:
        parent: handle of the class above it.
    Raises: FailedError class-gone, interface-gone.
    """
    if wanted.kind == "bfifo":
        options = _leaf_options(wanted)
    else:
        options = nested(
            TCA_OPTIONS,
            attribute_u32(_TCA_FQ_CODEL_TARGET, wanted.target_us),
            attribute_u32(_TCA_FQ_CODEL_INTERVAL, wanted.interval_us),
        )
    try:
        rtnl.request(RTM_NEWQDISC, 0, _qdisc(index, wanted.kind, parent, 0, options))
    except NetlinkRefusal as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            raise FailedError(
                "class-gone",
                f"The {wanted.kind} under {parent >> 16:x}:{parent & 0xFFFF:x} is not on device "
                f"{index}: {error.strerror}.",
                hint="Someone replaced the qdisc: detach and attach again.",
            ) from error
        raise named_error(error, "change the queue", f"device {index}") from error


def class_stats(rtnl: Rtnl, index: int) -> dict[int, ClassCounters]:
    """Return minor number → counters of each class of the root's tree."""
    leaf_drops: dict[int, int] = {}
    for message in _dump(rtnl, RTM_GETQDISC, index):
        leaf_drops[message.parent] = _parse_counters(message).drops
    counters: dict[int, ClassCounters] = {}
    for message in _dump(rtnl, RTM_GETTCLASS, index):
        if message.kind not in ("htb", "prio"):
            continue
        found = _parse_counters(message)
        drops = max(found.drops, leaf_drops.get(message.handle, 0))
        counters[found.minor] = ClassCounters(
            found.minor,
            found.sent_bytes,
            found.sent_packets,
            found.backlog_bytes,
            found.backlog_packets,
            drops,
            found.overlimits,
        )
    return counters


def delete_root(rtnl: Rtnl, index: int, plan: TreePlan) -> bool:
    """Return True when our root was deleted, False when the kernel's default stands there.

    Raises: ConflictError root-not-ours where another handle or kind stands there.
    Effects: what the tree held is dropped; the kernel makes its default root.
    """
    kind = root_kind(plan)
    snapshot = dump_tree(rtnl, index)
    root = snapshot.root
    if root is not None and root.handle >> 16 == 0:
        return False
    if root is not None and not is_ours(snapshot, plan):
        raise ConflictError(
            "root-not-ours",
            f'Root qdisc "{root.kind} {root.handle >> 16:x}:" of device {index} is not '
            f'our "{kind} {plan.handle:x}:": left alone.',
            hint="See `tc qdisc show`; delete it yourself if nobody needs it.",
        )
    body = build_tc(
        index, attribute_text(TCA_KIND, kind), handle=plan.handle << 16, parent=TC_H_ROOT
    )
    try:
        rtnl.request(RTM_DELQDISC, 0, body)
    except NetlinkRefusal as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return False  # someone was quicker
        raise named_error(error, "delete the root qdisc", f"device {index}") from error
    return True


def is_ours(snapshot: TreeSnapshot, plan: TreePlan) -> bool:
    """Return True when the root is the planned one, whole or built only in part.

    Kind and handle are not enough, since anybody may use any handle: the
    default class must agree, and there must be no class that is not planned.
    """
    root = snapshot.root
    if root is None or root.kind != root_kind(plan) or root.handle >> 16 != plan.handle:
        return False
    if plan.profile is Profile.EDT:  # leaves not built yet are the kernel's own
        return all(
            node.kind == "fq" or node.handle >> 16 == 0
            for node in snapshot.nodes
            if not node.is_class and node is not root
        )
    if plan.profile is not Profile.HTB:
        return True
    glob = parse_attributes(root.options).get(_TCA_HTB_INIT, b"").ljust(_HTB_GLOB.size, b"\0")
    if _HTB_GLOB.unpack_from(glob)[2] != plan.default_minor:
        return False
    planned = {plan.handle << 16 | one.minor for one in plan.classes}
    found = {node.handle for node in snapshot.nodes if node.is_class and node.kind == "htb"}
    return found <= planned


def configuration(rtnl: Rtnl, index: int) -> tuple[tuple[object, ...], ...]:
    """Return all that `read_back` looks at; where it is equal, so is what `read_back` finds."""
    return tuple(
        (kind, message.parent, message.handle, message.attributes.get(TCA_KIND), message.options)
        for kind in (RTM_GETQDISC, RTM_GETTCLASS)
        for message in _dump(rtnl, kind, index)
    )


def read_back(rtnl: Rtnl, index: int, plan: TreePlan, *, leaf_limits: bool = True) -> None:
    """Return when every number of the tree on the device is the planned one.

    Args:
        leaf_limits: compare the limits of the queues too; they follow the
            ceilings at attach, and a later change of rates leaves them.
    Raises: FailedError readback-differs, naming the field, what was found and
        what was planned.
    """
    qdiscs = {m.parent: m for m in _dump(rtnl, RTM_GETQDISC, index)}
    classes = {m.handle: m for m in _dump(rtnl, RTM_GETTCLASS, index) if m.kind == "htb"}
    root = qdiscs.get(TC_H_ROOT)
    _expect("root kind", root.kind if root else "none", root_kind(plan))
    assert root is not None
    _expect("root handle", root.handle >> 16, plan.handle)
    if not leaf_limits:
        plan = _without_leaf_limits(plan)
    if plan.profile is Profile.HTB:
        _check_htb(root, classes, qdiscs, plan)
    elif plan.fq is not None:
        for queue, parent in _fq_places(plan):
            _check_fq(qdiscs.get(parent), plan.fq, f"fq of queue {queue}")
    else:
        _check_prio(root, qdiscs, plan)


def _without_leaf_limits(plan: TreePlan) -> TreePlan:
    def no_limit(leaf: LeafPlan) -> LeafPlan:
        return dataclasses.replace(leaf, limit_bytes=0)

    return dataclasses.replace(
        plan,
        classes=tuple(
            dataclasses.replace(one, leaf=no_limit(one.leaf)) if one.leaf else one
            for one in plan.classes
        ),
        bands=tuple(no_limit(leaf) for leaf in plan.bands),
    )


def burst_ticks(burst_bytes: int, rate_bytes_per_s: int) -> int:
    """Return a burst as the kernel takes it: its time at the rate, in ticks, rounded up."""
    return min(-(-burst_bytes * 1_000_000_000 // (rate_bytes_per_s * TICK_NS)), _U32_MAX)


def burst_bytes(ticks: int, rate_bytes_per_s: int) -> int:
    """Return the bytes that a burst in ticks is worth at the rate, rounded down."""
    return ticks * TICK_NS * rate_bytes_per_s // 1_000_000_000


def _dump(rtnl: Rtnl, kind: int, index: int) -> list[TcMessage]:
    """Return the qdiscs or classes of a device, parsed."""
    return rtnl.once(("tree", kind, index), lambda: _dump_now(rtnl, kind, index))


def _dump_now(rtnl: Rtnl, kind: int, index: int) -> list[TcMessage]:
    try:
        if kind == RTM_GETQDISC:
            bodies = qdisc_bodies(rtnl, index)
        else:
            bodies = rtnl.dump(kind, build_tc(index))
    except NetlinkRefusal as error:
        raise named_error(error, "read the qdisc tree", f"device {index}") from error
    return [message for message in map(parse_tc, bodies) if message.index == index]


def _node(message: TcMessage, *, is_class: bool) -> TreeNode:
    options = message.options
    if message.kind == "htb" and not is_class:
        options = _without_direct_packets(options)
    return TreeNode(is_class, message.parent, message.handle, message.kind, options)


def _without_direct_packets(options: bytes) -> bytes:
    """Return HTB's options with its one counter, direct_pkts, set to 0."""
    parts = []
    for kind, payload in iterate_attributes(options):
        if kind == _TCA_HTB_INIT:
            payload = payload[:16] + bytes(4)
        parts.append(attribute(kind, payload))
    return b"".join(parts)


def _parse_counters(message: TcMessage) -> ClassCounters:
    payload = message.attributes.get(TCA_STATS2, b"")
    if len(payload) >= _USUAL_STATS.size:
        basic, sent_bytes, sent_packets, queue, *counts = _USUAL_STATS.unpack_from(payload)
        if (basic, queue) == _USUAL_HEADERS:
            queue_packets, backlog, drops, _, overlimits = counts
            return ClassCounters(
                message.handle & 0xFFFF,
                sent_bytes,
                sent_packets,
                backlog,
                queue_packets,
                drops,
                overlimits,
            )
    stats = parse_attributes(payload)
    sent_bytes, sent_packets = struct.unpack_from(
        "=QI", stats.get(_TCA_STATS_BASIC, b"").ljust(12, b"\0")
    )
    if _TCA_STATS_PKT64 in stats:
        (sent_packets,) = struct.unpack_from("=Q", stats[_TCA_STATS_PKT64])
    queue_packets, backlog, drops, _, overlimits = struct.unpack_from(
        "=5I", stats.get(_TCA_STATS_QUEUE, b"").ljust(20, b"\0")
    )
    return ClassCounters(
        minor=message.handle & 0xFFFF,
        sent_bytes=sent_bytes,
        sent_packets=sent_packets,
        backlog_bytes=backlog,
        backlog_packets=queue_packets,
        drops=drops,
        overlimits=overlimits,
    )


def root_kind(plan: TreePlan) -> str:
    """Return the kind of the planned root qdisc."""
    if plan.profile is Profile.HTB:
        return "htb"
    if plan.profile is Profile.EDT:
        return "mq" if plan.queues > 1 else "fq"
    return "tbf" if plan.tbf_rate_bytes_per_s else "prio"


def _prio_handle(plan: TreePlan) -> int:
    """Return the major number of the prio qdisc: the root's, or the next one under a TBF."""
    return plan.handle + 1 if plan.tbf_rate_bytes_per_s else plan.handle


def _tree_messages(index: int, plan: TreePlan) -> Iterator[tuple[str, bytes, int]]:
    """Yield (what it does, body, message type) in the order of building."""
    if plan.profile is Profile.HTB:
        yield from _htb_messages(index, plan)
    elif plan.profile is Profile.EDT:
        yield from _edt_messages(index, plan)
    else:
        yield from _prio_messages(index, plan)


def _htb_messages(index: int, plan: TreePlan) -> Iterator[tuple[str, bytes, int]]:
    glob = _HTB_GLOB.pack(_HTB_VERSION, _HTB_RATE_TO_QUANTUM, plan.default_minor, 0, 0)
    options = nested(TCA_OPTIONS, attribute(_TCA_HTB_INIT, glob))
    yield (
        f"add root qdisc htb {plan.handle:x}:",
        _qdisc(index, "htb", TC_H_ROOT, plan.handle << 16, options),
        RTM_NEWQDISC,
    )
    for htb_class in plan.classes:
        yield (
            f"add class {plan.handle:x}:{htb_class.minor:x}",
            _htb_class(index, plan.handle, htb_class),
            RTM_NEWTCLASS,
        )
        if htb_class.leaf:
            parent = plan.handle << 16 | htb_class.minor
            yield from _leaf_message(index, parent, htb_class.leaf)


def _prio_messages(index: int, plan: TreePlan) -> Iterator[tuple[str, bytes, int]]:
    handle = _prio_handle(plan)
    parent = TC_H_ROOT
    if plan.tbf_rate_bytes_per_s:
        yield (
            f"add root qdisc tbf {plan.handle:x}:",
            _qdisc(index, "tbf", TC_H_ROOT, plan.handle << 16, _tbf_options(plan)),
            RTM_NEWQDISC,
        )
        parent = plan.handle << 16 | 1
    yield (
        f"add qdisc prio {handle:x}:",
        _qdisc(index, "prio", parent, handle << 16, attribute(TCA_OPTIONS, _prio_options(plan))),
        RTM_NEWQDISC,
    )
    for band, leaf in enumerate(plan.bands):
        yield from _leaf_message(index, handle << 16 | (band + 1), leaf)


def _fq_places(plan: TreePlan) -> Iterator[tuple[int, int]]:
    """Yield (transmit queue, parent) of every fq; mq's classes are its queues, from 1 on."""
    if plan.queues <= 1:
        yield 0, TC_H_ROOT
    for queue in range(plan.queues if plan.queues > 1 else 0):
        yield queue, plan.handle << 16 | (queue + 1)


def _edt_messages(index: int, plan: TreePlan) -> Iterator[tuple[str, bytes, int]]:
    if plan.queues > 1:
        yield (
            f"add root qdisc mq {plan.handle:x}:",
            _qdisc(index, "mq", TC_H_ROOT, plan.handle << 16, b""),
            RTM_NEWQDISC,
        )
    assert plan.fq is not None
    for queue, parent in _fq_places(plan):
        handle = plan.handle << 16 if parent == TC_H_ROOT else 0
        body = _qdisc(index, "fq", parent, handle, _fq_options(plan.fq))
        yield f"add qdisc fq for transmit queue {queue}", body, RTM_NEWQDISC


def _fq_options(plan: FqPlan) -> bytes:
    """Return fq's options: pacing off, or it would mark sockets for good (SK_PACING_FQ).

    It then looks at time stamps only. What is too far ahead is sent at the
    horizon, not dropped.
    """
    parts = [
        attribute_u32(_TCA_FQ_LIMIT, plan.limit_packets),
        attribute_u32(_TCA_FQ_FLOW_LIMIT, plan.flow_limit_packets),
        attribute_u32(_TCA_FQ_RATE_ENABLE, 0),
        attribute_u32(_TCA_FQ_ORPHAN_MASK, plan.orphan_mask),
        attribute_u32(_TCA_FQ_HORIZON_US, plan.horizon_us),
        attribute(_TCA_FQ_HORIZON_DROP, b"\0"),
    ]
    if plan.bands:
        parts.append(attribute(TCA_FQ_PRIOMAP, _FQ_PRIOMAP))
        parts.append(attribute(_TCA_FQ_WEIGHTS, _FQ_WEIGHTS))
    return nested(TCA_OPTIONS, *parts)


def fq_has_bands(message: TcMessage) -> bool:
    """Return True where an fq that the kernel shows has bands (since 6.7)."""
    return TCA_FQ_PRIOMAP in parse_attributes(message.options)


def _leaf_message(index: int, parent: int, leaf: LeafPlan) -> Iterator[tuple[str, bytes, int]]:
    yield (
        f"add qdisc {leaf.kind} under {parent >> 16:x}:{parent & 0xFFFF:x}",
        _qdisc(index, leaf.kind, parent, 0, _leaf_options(leaf)),
        RTM_NEWQDISC,
    )


def _qdisc(index: int, kind: str, parent: int, handle: int, options: bytes) -> bytes:
    return build_tc(index, attribute_text(TCA_KIND, kind), options, handle=handle, parent=parent)


def _ratespec(rate_bytes_per_s: int, overhead_bytes: int) -> bytes:
    rate = min(rate_bytes_per_s, _U32_MAX)
    return _RATESPEC.pack(0, _LINKLAYER_ETHERNET, overhead_bytes, 0, 0, rate)


def _htb_class(index: int, handle: int, plan: HtbClassPlan) -> bytes:
    parms = (
        _ratespec(plan.rate_bytes_per_s, plan.overhead_bytes)
        + _ratespec(plan.ceil_bytes_per_s, plan.overhead_bytes)
        + _HTB_OPT_TAIL.pack(
            burst_ticks(plan.burst_bytes, plan.rate_bytes_per_s),
            burst_ticks(plan.cburst_bytes, plan.ceil_bytes_per_s),
            plan.quantum_bytes,
            0,
            plan.priority,
        )
    )
    parts = [attribute(_TCA_HTB_PARMS, parms)]
    if plan.rate_bytes_per_s > _U32_MAX:
        parts.append(attribute_u64(_TCA_HTB_RATE64, plan.rate_bytes_per_s))
    if plan.ceil_bytes_per_s > _U32_MAX:
        parts.append(attribute_u64(_TCA_HTB_CEIL64, plan.ceil_bytes_per_s))
    return build_tc(
        index,
        attribute_text(TCA_KIND, "htb"),
        nested(TCA_OPTIONS, *parts),
        handle=handle << 16 | plan.minor,
        parent=handle << 16 | plan.parent_minor,
    )


def _tbf_options(plan: TreePlan) -> bytes:
    # The burst goes in bytes (BURST); `buffer` is ignored beside it.
    parms = (
        _ratespec(plan.tbf_rate_bytes_per_s, plan.tbf_overhead_bytes)
        + bytes(_RATESPEC.size)
        + _TBF_OPT_TAIL.pack(
            plan.tbf_limit_bytes,
            burst_ticks(plan.tbf_burst_bytes, plan.tbf_rate_bytes_per_s),
            0,
        )
    )
    return nested(
        TCA_OPTIONS,
        attribute(_TCA_TBF_PARMS, parms),
        attribute_u32(_TCA_TBF_BURST, plan.tbf_burst_bytes),
    )


def _prio_options(plan: TreePlan) -> bytes:
    """Return prio's bands and its map: packets that we did not mark go to the default's band."""
    bands = len(plan.bands)
    if not 2 <= bands <= _PRIO_MAX_BANDS:
        raise FailedError(
            "bad-plan",
            f"A prio qdisc has 2 to {_PRIO_MAX_BANDS} bands, got {bands}.",
            hint="Use --profile htb or police.",
        )
    default_band = plan.default_minor - 1
    return _PRIO_OPT.pack(bands, *[default_band] * 16)


def _leaf_options(leaf: LeafPlan) -> bytes:
    if leaf.kind == "bfifo":
        return attribute(TCA_OPTIONS, _FIFO_OPT.pack(leaf.limit_bytes))
    return nested(
        TCA_OPTIONS,
        attribute_u32(_TCA_FQ_CODEL_TARGET, leaf.target_us),
        attribute_u32(_TCA_FQ_CODEL_LIMIT, _FQ_CODEL_LIMIT_PACKETS),
        attribute_u32(_TCA_FQ_CODEL_INTERVAL, leaf.interval_us),
        attribute_u32(_TCA_FQ_CODEL_ECN, int(leaf.ecn)),
        attribute_u32(_TCA_FQ_CODEL_MEMORY_LIMIT, leaf.limit_bytes),
    )


def _expect(field: str, got: object, want: object) -> None:
    if got != want:
        raise FailedError(
            "readback-differs",
            f"{field}: got {got}, want {want}.",
            hint="The kernel took another value, or someone changed it: see `tc -s qdisc show`.",
        )


def _expect_near(field: str, got: int, want: int, tolerance: int) -> None:
    if abs(got - want) > tolerance:
        _expect(field, got, want)


def _check_htb(
    root: TcMessage, classes: dict[int, TcMessage], qdiscs: dict[int, TcMessage], plan: TreePlan
) -> None:
    glob = parse_attributes(root.options).get(_TCA_HTB_INIT, b"").ljust(_HTB_GLOB.size, b"\0")
    _expect("htb default class", _HTB_GLOB.unpack_from(glob)[2], plan.default_minor)
    wanted = {plan.handle << 16 | htb_class.minor for htb_class in plan.classes}
    _expect(
        "htb classes",
        sorted(f"{handle & 0xFFFF:x}" for handle in classes),
        sorted(f"{handle & 0xFFFF:x}" for handle in wanted),
    )
    for htb_class in plan.classes:
        handle = plan.handle << 16 | htb_class.minor
        _check_htb_class(classes[handle], htb_class, plan.handle)
        if htb_class.leaf:
            _check_leaf(qdiscs.get(handle), htb_class.leaf, f"{plan.handle:x}:{htb_class.minor:x}")


def _check_htb_class(found: TcMessage, plan: HtbClassPlan, major: int) -> None:
    name = f"class {major:x}:{plan.minor:x}"
    attributes = parse_attributes(found.options)
    parms = attributes.get(_TCA_HTB_PARMS, b"").ljust(44, b"\0")
    rate = _RATESPEC.unpack_from(parms, 0)
    ceil = _RATESPEC.unpack_from(parms, _RATESPEC.size)
    buffer, cbuffer, quantum, _, priority = _HTB_OPT_TAIL.unpack_from(parms, 2 * _RATESPEC.size)
    parent = major << 16 | plan.parent_minor if plan.parent_minor else TC_H_ROOT
    _expect(f"{name} parent", f"{found.parent:x}", f"{parent:x}")
    _expect(f"{name} rate", _rate(attributes, _TCA_HTB_RATE64, rate[5]), plan.rate_bytes_per_s)
    _expect(f"{name} ceil", _rate(attributes, _TCA_HTB_CEIL64, ceil[5]), plan.ceil_bytes_per_s)
    _expect(f"{name} overhead", (rate[2], ceil[2]), (plan.overhead_bytes, plan.overhead_bytes))
    _expect(f"{name} burst", buffer, burst_ticks(plan.burst_bytes, plan.rate_bytes_per_s))
    _expect(f"{name} cburst", cbuffer, burst_ticks(plan.cburst_bytes, plan.ceil_bytes_per_s))
    if plan.leaf is not None:
        # of others the kernel uses neither, and keeps those of their making (htb_change_class())
        _expect(f"{name} quantum", quantum, plan.quantum_bytes)
        _expect(f"{name} prio", priority, plan.priority)


def _rate(attributes: dict[int, bytes], kind: int, rate32: int) -> int:
    payload = attributes.get(kind)
    return rate32 if payload is None else int(struct.unpack_from("=Q", payload)[0])


def _check_prio(root: TcMessage, qdiscs: dict[int, TcMessage], plan: TreePlan) -> None:
    prio: TcMessage | None = root
    if plan.tbf_rate_bytes_per_s:
        parms = parse_attributes(root.options).get(_TCA_TBF_PARMS, b"").ljust(36, b"\0")
        rate = _RATESPEC.unpack_from(parms, 0)
        _, buffer, _ = _TBF_OPT_TAIL.unpack_from(parms, 2 * _RATESPEC.size)
        _expect("tbf rate", rate[5], plan.tbf_rate_bytes_per_s)
        _expect("tbf overhead", rate[2], plan.tbf_overhead_bytes)
        # The kernel turns BURST into time itself and counts the overhead in.
        # Source: psched_l2t_ns() in include/net/sch_generic.h.
        want = burst_ticks(
            plan.tbf_burst_bytes + plan.tbf_overhead_bytes, plan.tbf_rate_bytes_per_s
        )
        _expect_near("tbf burst in ticks", buffer, want, 2 + want // 1000)
        # `limit` is the inner bfifo's; prio takes its place and keeps its own.
        prio = qdiscs.get(plan.handle << 16 | 1)
    handle = _prio_handle(plan)
    _expect("prio kind", prio.kind if prio else "none", "prio")
    assert prio is not None
    _expect("prio handle", prio.handle >> 16, handle)
    fields = _PRIO_OPT.unpack_from(prio.options.ljust(_PRIO_OPT.size, b"\0"))
    _expect("prio bands", fields[0], len(plan.bands))
    _expect("prio map", set(fields[1:]), {plan.default_minor - 1})
    for band, leaf in enumerate(plan.bands):
        parent = handle << 16 | (band + 1)
        _check_leaf(qdiscs.get(parent), leaf, f"{handle:x}:{band + 1:x}")


def _check_fq(found: TcMessage | None, plan: FqPlan, name: str) -> None:
    _expect(f"{name} kind", found.kind if found else "none", "fq")
    assert found is not None
    attributes = parse_attributes(found.options)
    for field, kind, want in (
        ("limit", _TCA_FQ_LIMIT, plan.limit_packets),
        ("flow limit", _TCA_FQ_FLOW_LIMIT, plan.flow_limit_packets),
        ("pacing", _TCA_FQ_RATE_ENABLE, 0),
        ("orphan mask", _TCA_FQ_ORPHAN_MASK, plan.orphan_mask),
        ("horizon", _TCA_FQ_HORIZON_US, plan.horizon_us),
    ):
        got = int.from_bytes(attributes.get(kind, b"\xff" * 4), "little")
        _expect(f"{name} {field}", got, want)
    _expect(f"{name} horizon drop", attributes.get(_TCA_FQ_HORIZON_DROP, b"")[:1], b"\0")
    if plan.bands:
        _expect(f"{name} bands", attributes.get(TCA_FQ_PRIOMAP, b"")[:20], _FQ_PRIOMAP)
        _expect(f"{name} weights", attributes.get(_TCA_FQ_WEIGHTS, b"")[:12], _FQ_WEIGHTS)


def _check_leaf(found: TcMessage | None, leaf: LeafPlan, name: str) -> None:
    _expect(f"{name} queue", found.kind if found else "none", leaf.kind)
    assert found is not None
    if leaf.kind == "bfifo":
        (limit,) = _FIFO_OPT.unpack_from(found.options.ljust(4, b"\0"))
        _expect(f"{name} limit", limit, leaf.limit_bytes or limit)
        return
    attributes = parse_attributes(found.options)

    def number(kind: int) -> int:
        return int(struct.unpack_from("=I", attributes.get(kind, bytes(4)))[0])

    _expect_near(f"{name} target", number(_TCA_FQ_CODEL_TARGET), leaf.target_us, _FQ_CODEL_CLOCK_US)
    _expect_near(
        f"{name} interval", number(_TCA_FQ_CODEL_INTERVAL), leaf.interval_us, _FQ_CODEL_CLOCK_US
    )
    _expect(f"{name} ecn", bool(number(_TCA_FQ_CODEL_ECN)), leaf.ecn)
    if leaf.limit_bytes:
        _expect(f"{name} memory limit", number(_TCA_FQ_CODEL_MEMORY_LIMIT), leaf.limit_bytes)
