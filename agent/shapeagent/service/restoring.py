# SPDX-License-Identifier: Apache-2.0
"""The root qdisc that stood there before: kept at attach, put back at detach, read back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shapeagent.kernel import bpf, filters, link, qdisc, snapshot, tcx
from shapeagent.kernel.routes import ROUTE_PROTOCOL
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.kernel.snapshot import DeviceSnapshot
from shapeagent.model.errors import ConflictError, FailedError
from shapeagent.model.types import Direction, Hook, IngressMode, TreePlan
from shapeagent.service.hook import needs_clsact
from shapeagent.service.state import UNDO_HEADER, AttachState, StateDir


def hold_programs(pins: Path, wanted: DeviceSnapshot) -> None:
    """Pin the programs of a tree's bpf filters, which would end with their filters.

    Undo: `maps.remove_pins`.
    """
    for number in wanted.program_ids:
        descriptor = bpf.program_by_id(number)
        try:
            bpf.pin(descriptor, str(_held(pins, number)))
        finally:
            os.close(descriptor)


def _held(pins: Path, number: int) -> Path:
    return pins / f"held_{number}"


def take_over(rtnl: Rtnl, index: int, pins: Path, wanted: DeviceSnapshot) -> None:
    """Return when the tree on the device is still the one that was kept, and will be kept whole.

    Raises: ConflictError qdisc-changed.
    """
    differing = snapshot.differences(snapshot.take(rtnl, index, wanted.gso), wanted)
    if differing:
        raise ConflictError(
            "qdisc-changed",
            f"Someone changed the root qdisc of device {index} while shapectl was attaching.",
            details=differing,
            hint="attach again",
        )
    hold_programs(pins, wanted)


def put_root_back(
    rtnl: Rtnl, index: int, tree: TreePlan, wanted: DeviceSnapshot | None, pins: Path
) -> tuple[str, ...]:
    """Return what is worth a note, once the root that stood there before stands there again.

    Also from a restore that died half-way.

    Args:
        wanted: None where nothing was kept: then the kernel makes its default.
    Raises: ConflictError root-not-ours, where someone else's root stands there;
        FailedError restore-refused, restore-differs.
    """
    if wanted is None or wanted.is_default:
        qdisc.delete_root(rtnl, index, tree)
        return _default_notes(rtnl, index, wanted)
    found = snapshot.take(rtnl, index, wanted.gso)
    if not snapshot.differences(found, wanted):
        return ()
    present = found.objects if snapshot.is_part_of(found, wanted) else ()
    if not present:
        qdisc.delete_root(rtnl, index, tree)

    def program(number: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            return bpf.get_pinned(str(_held(pins, number)))
        return bpf.program_by_id(number)

    with snapshot.OpenPrograms(program) as programs:
        snapshot.put_back(rtnl, index, wanted, programs.open, present=present)
    found = snapshot.take(rtnl, index, wanted.gso)
    differing = snapshot.differences(found, wanted)
    if differing:
        raise FailedError(
            "restore-differs",
            f"The root qdisc of device {index} was put back and is not what it was.",
            details=differing,
            hint="see tc qdisc show",
        )
    return leaf_notes(found, wanted)


def _default_notes(rtnl: Rtnl, index: int, wanted: DeviceSnapshot | None) -> tuple[str, ...]:
    if wanted is None:
        return ()
    return leaf_notes(snapshot.take(rtnl, index, wanted.gso), wanted)


def leaf_notes(found: DeviceSnapshot, wanted: DeviceSnapshot) -> tuple[str, ...]:
    """Return what is worth saying where the kernel now makes other qdiscs by itself than it did.

    Its default is the administrator's choice, so the new one stays.
    """
    have = sorted({kind for _, kind in found.defaults} - {"noop"})  # noop: the device is down
    want = sorted({kind for _, kind in wanted.defaults} - {"noop"})
    if have == want or not have or not want:
        return ()
    text = (
        f"the kernel's own qdisc is {', '.join(have)} by now and was {', '.join(want)}: someone "
        "changed net.core.default_qdisc"
    )
    return (text,)


# --- the same as lines


def undo_text(
    rtnl: Rtnl,
    store: StateDir,
    state: AttachState,
    wanted: DeviceSnapshot,
    tree: TreePlan | None,
    pins: Path,
) -> str:
    """Return the lines that undo an attach with `tc`, `ip` and `rm` alone.

    Right at each step of it: what is not there yet is deleted in vain, and a
    root that is not ours is left alone (its handle must agree).
    """
    from shapeagent.kernel import tclines

    netns = state.netns
    tc, ip = tclines.tool_words("tc", netns), tclines.tool_words("ip", netns)
    device = state.device
    lines = [f"{UNDO_HEADER} {device} {netns or '-'}"]
    slot = f"protocol all pref {{}} handle {filters.HANDLE:#x} bpf"
    if state.ingress == "ifb" and not state.shadow:
        lines.append(f"{tc} filter del dev {device} ingress {slot.format(filters.REDIRECT_PREF)}")
    if state.hook == Hook.TCX.value:
        lines += [f"rm -r -f -- {tcx.pin_path(pins, direction)}" for direction in Direction]
    else:
        lines += [
            f"{tc} filter del dev {device} {direction.value} {slot.format(filters.PREF)}"
            for direction in Direction
        ]
    if state.ingress == "ifb" and not state.shadow:
        lines.append(f"{ip} link delete dev {state.ifb or _expected_ifb(rtnl, device)}")
    if tree is not None:
        kind = qdisc.root_kind(tree)
        lines.append(f"{tc} qdisc del dev {device} root handle {tree.handle:x}: {kind}")
        lines += tree_lines(rtnl, state, wanted, pins)[0]
    if state.gso_before is not None:
        before = state.gso_before
        lines.append(
            f"{ip} link set dev {device} gso_max_size {before.max_size_bytes} gso_max_segs "
            f"{before.max_segments}"
        )
        ipv4 = before.ipv4_max_size_bytes
        if ipv4 not in (None, before.max_size_bytes):  # else the kernel sets it with the first
            lines.append(f"{ip} link set dev {device} gso_ipv4_max_size {ipv4}")
        lines.append(f"{ip} route flush cache")
    if state.request.get("reroute_ipv6"):
        lines.append(f"{ip} -6 route flush dev {device} proto {ROUTE_PROTOCOL}")
    if not wanted.hook and needs_clsact(Hook(state.hook), IngressMode(state.ingress)):
        lines.append(f"{tc} qdisc del dev {device} clsact")
    lines += [f"rm -r -f -- {pins}", f"rm -r -f -- {store.folder}"]
    return "\n".join(lines) + "\n"


def _expected_ifb(rtnl: Rtnl, device: str) -> str:
    names = {name for one in link.list_devices(rtnl) for name in (one.name, *one.altnames)}
    return link.derive_ifb_name(device, names)


def tree_lines(
    rtnl: Rtnl, state: AttachState, wanted: DeviceSnapshot, pins: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (lines that make the old tree, objects that no line can make)."""
    from shapeagent.kernel import tclines

    around = tclines.Surroundings(
        device=state.device,
        netns=state.netns,
        device_names={one.index: one.name for one in link.list_devices(rtnl)},
        program_path=lambda number: str(_held(pins, number)),
    )
    return tclines.tree_lines(wanted, around)
