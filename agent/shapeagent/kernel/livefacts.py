# SPDX-License-Identifier: Apache-2.0
"""What the kernel answers about itself and its devices. Changes nothing, loads no module."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from shapeagent.kernel import bpf, ethtool, filters, link, nftables, tcx
from shapeagent.kernel.netns import run_in_new_netns
from shapeagent.kernel.probe import LOOPBACK_INDEX, probe_quietly
from shapeagent.kernel.qdisc import TreeNode
from shapeagent.kernel.rtnl import RTM_GETQDISC, TC_H_CLSACT, TC_H_ROOT, Rtnl, build_tc, parse_tc
from shapeagent.model.errors import ShapeError
from shapeagent.model.hostfacts import BpfProbe, DeviceAnswers, KernelAnswers, ModuleState
from shapeagent.model.types import DeviceFacts, Direction

_T = TypeVar("_T")

#: Kind of qdisc → module. mq is always there.
QDISC_MODULES = {
    "clsact": "sch_ingress",
    "htb": "sch_htb",
    "tbf": "sch_tbf",
    "prio": "sch_prio",
    "fq": "sch_fq",
    "fq_codel": "sch_fq_codel",
}
_IN_KERNEL = (ModuleState.BUILTIN, ModuleState.LOADED)
_PROBE_NAME = "shp_doctor"
# r0 = -1 (TC_ACT_UNSPEC); exit
_PASS = struct.pack("=BBhi", 0xB7, 0, 0, -1) + struct.pack("=BBhi", 0x95, 0, 0, 0)


def probe_kernel(
    modules: Mapping[str, ModuleState], *, loads_modules: bool, image_cached: bool
) -> KernelAnswers:
    """Return what the kernel does when asked, without making it load a module.

    Args:
        modules: what is in the kernel already.
        loads_modules: False where the kernel cannot load any, so that asking is free.
    Effects: a private network namespace for the length of the call.
    """

    def may_ask(module: str) -> bool:
        return not loads_modules or modules[module] in _IN_KERNEL

    probe, descriptor = probe_bpf()
    asked = frozenset(kind for kind, module in QDISC_MODULES.items() if may_ask(module))
    try:
        qdiscs = _allowed(lambda: probe_quietly(asked))
        attaches = None
        if qdiscs is not None and descriptor >= 0 and "clsact" in qdiscs and may_ask("cls_bpf"):
            attaches = _allowed(lambda: run_in_new_netns(lambda: _can_attach(descriptor)))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return KernelAnswers(
        bpf=probe,
        qdiscs=qdiscs,
        qdiscs_asked=asked,
        attaches=attaches,
        has_tcx=tcx.is_supported(),
        image_cached=image_cached,
    )


def probe_bpf() -> tuple[BpfProbe, int]:
    """Return what bpf(2) does, and the descriptor of a loaded program, -1 without one.

    The maps of the probe are closed again; nothing is pinned or attached.
    """
    try:
        descriptor, _log = bpf.load_program(_PROBE_NAME, _PASS)
    except ShapeError as error:
        return BpfProbe(refusal=error.message), -1
    except OSError as error:
        return BpfProbe(refusal=f"{error.strerror}."), -1
    return (
        BpfProbe(
            refusal="",
            jited=bpf.is_jited(descriptor),
            full_trie_updates=_updates_full_trie(),
            missing_maps=tuple(_missing_maps()),
        ),
        descriptor,
    )


def answer_for(
    rtnl: Rtnl,
    facts: DeviceFacts,
    trees: Mapping[int, list[TreeNode]],
    *,
    attached: bool,
    neighbours: Mapping[str, int],
) -> DeviceAnswers:
    """Return what netlink, ethtool and bpf say of one device of this thread's namespace.

    Args:
        trees: what `read_qdiscs` gave.
        attached: shapectl is attached to the device.
        neighbours: name → index of the devices above and below.
    """
    nodes = trees.get(facts.index, [])
    root = next((node for node in nodes if node.parent == TC_H_ROOT), None)
    hook = next((node.kind for node in nodes if node.parent == TC_H_CLSACT), "")
    found = [
        one for direction in Direction for one in filters.list_filters(rtnl, facts.index, direction)
    ]
    ours = [
        one
        for one in found
        if (one.in_our_slot or one.in_redirect_slot) and one.name.startswith(filters.PROGRAM_PREFIX)
    ]
    return DeviceAnswers(
        kind=facts.kind,
        root=f"{root.kind} {root.handle >> 16:x}:" if root else "",
        default_root=not is_shaped(nodes),
        has_fq=any(node.kind == "fq" for node in nodes),
        hook=hook,
        filters=tuple(str(one) for one in found if one not in ours),
        slot_taken=any(one.in_our_slot for one in found if one not in ours),
        tcx=_allowed(lambda: _hook_programs(facts)),
        xdp=link.read_xdp(rtnl, facts.index),
        ingress_chains=_allowed(lambda: nftables.list_ingress_users(facts.name)),
        offloads=ethtool.read_offloads(rtnl, facts.name),
        ring=None if facts.kind else ethtool.read_ring(rtnl, facts.name),
        gso_max_bytes=facts.gso_ipv4_max_size or facts.gso_max_size,
        attached=attached,
        shaped_neighbours=tuple(
            name for name, index in neighbours.items() if is_shaped(trees.get(index, []))
        ),
    )


def is_shaped(nodes: Collection[TreeNode]) -> bool:
    """Return whether someone set the root: what the kernel makes by itself has handle 0."""
    return any(node.handle >> 16 for node in nodes if node.parent != TC_H_CLSACT)


def read_qdiscs(rtnl: Rtnl) -> dict[int, list[TreeNode]]:
    """Return device index → its qdiscs, by one dump for all devices."""
    found: dict[int, list[TreeNode]] = {}
    for message in map(parse_tc, rtnl.dump(RTM_GETQDISC, build_tc(0))):
        node = TreeNode(False, message.parent, message.handle, message.kind, b"")
        found.setdefault(message.index, []).append(node)
    return found


def _allowed(function: Callable[[], _T]) -> _T | None:
    """Return the answer, None where this process may not ask or the kernel will not say."""
    try:
        return function()
    except (ShapeError, OSError):
        return None


def _can_attach(program_fd: int) -> bool:
    with Rtnl() as rtnl:
        try:
            filters.ensure_clsact(rtnl, LOOPBACK_INDEX)
            filters.add_filter(rtnl, LOOPBACK_INDEX, Direction.EGRESS, program_fd, _PROBE_NAME)
        except ShapeError:
            return False
    return True


def _updates_full_trie() -> bool:
    """Return whether an entry of a full trie can be written again (ENOSPC before 532d6b36b2bf)."""
    key, value = struct.pack("=I4s", 32, bytes(4)), bytes(4)
    shape = bpf.MapShape(bpf.MapType.LPM_TRIE, len(key), len(value), 1, bpf.F_NO_PREALLOC)
    try:
        descriptor = bpf.create_map(_PROBE_NAME, shape)
    except ShapeError:
        return False
    try:
        for _ in range(2):
            bpf.update(descriptor, key, value)
    except ShapeError:
        return False
    finally:
        os.close(descriptor)
    return True


def _missing_maps() -> list[str]:
    missing = []
    inner = -1
    for kind, shape in (
        ("array", bpf.MapShape(bpf.MapType.ARRAY, 4, 4, 1, 0)),
        ("array of maps", bpf.MapShape(bpf.MapType.ARRAY_OF_MAPS, 4, 4, 1, 0)),
        ("hash", bpf.MapShape(bpf.MapType.HASH, 4, 4, 1, bpf.F_NO_PREALLOC)),
        ("LRU hash", bpf.MapShape(bpf.MapType.LRU_HASH, 4, 4, 16, 0)),
        ("LPM trie", bpf.MapShape(bpf.MapType.LPM_TRIE, 8, 4, 1, bpf.F_NO_PREALLOC)),
        ("per-CPU array", bpf.MapShape(bpf.MapType.PERCPU_ARRAY, 4, 8, 1, 0)),
    ):
        try:
            nested = shape.type == bpf.MapType.ARRAY_OF_MAPS
            descriptor = bpf.create_map(_PROBE_NAME, shape, inner_fd=inner if nested else 0)
        except ShapeError:
            missing.append(kind)
            continue
        if shape.type == bpf.MapType.ARRAY:
            inner = descriptor
        else:
            os.close(descriptor)
    if inner >= 0:
        os.close(inner)
    return missing


def _hook_programs(facts: DeviceFacts) -> tuple[str, ...]:
    """Return the programs on the tcx hooks, and on those of a netkit device."""
    hooks = {"tcx ingress": bpf.TCX_INGRESS, "tcx egress": bpf.TCX_EGRESS}
    if facts.kind == "netkit":
        hooks |= {"netkit primary": bpf.NETKIT_PRIMARY, "netkit peer": bpf.NETKIT_PEER}
    found = [
        f"{name} program {text}"
        for name, hook in hooks.items()
        for text in map(bpf.program_text, bpf.query_tcx(facts.index, hook))
        if not text.partition(" ")[2].startswith(filters.PROGRAM_PREFIX)
    ]
    return tuple(found)
