# SPDX-License-Identifier: Apache-2.0
"""What of an attachment others took away or replaced, and how it is put back in place.

The maps and programs are pinned all the time, so nothing is compiled and no
counter, ceiling or whitelist is lost by it.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf, filters, link, qdisc, tcx
from shapeagent.model.types import Direction, Hook
from shapeagent.service.hook import PROGRAMS

if TYPE_CHECKING:
    from shapeagent.service.engine import Attached


class Part(StrEnum):
    """A thing of ours that others can change."""

    TREE = "tree"
    EGRESS_PROGRAM = "egress program"
    INGRESS_PROGRAM = "ingress program"
    SEGMENT_LIMIT = "segment limit"


_PROGRAM_PARTS = {
    Direction.EGRESS: Part.EGRESS_PROGRAM,
    Direction.INGRESS: Part.INGRESS_PROGRAM,
}


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that is not as we left it, and who has its place; "" for nobody."""

    part: Part
    holder: str

    def __str__(self) -> str:
        return f"our {self.part.value} is gone" + (f": {self.holder} is there" * bool(self.holder))


def find_lost(attached: Attached) -> tuple[Lost, ...]:
    """Return what others took away or replaced; the device itself is there."""
    found = [*_lost_tree(attached), *lost_programs(attached)]
    state = attached.state
    if state.gso_set is not None:
        now = link.read_gso(attached.rtnl, state.index)
        if now != state.gso_set:
            words = f"gso_max_size {now.max_size_bytes} gso_max_segs {now.max_segments}"
            found.append(Lost(Part.SEGMENT_LIMIT, words))
    return tuple(found)


def _lost_tree(attached: Attached) -> list[Lost]:
    tree = attached.tree(Direction.EGRESS)
    if tree is None:
        return []
    index = attached.state.index
    if not attached.engine.tree_problem(attached.rtnl, index, tree):
        return []
    snapshot = qdisc.dump_tree(attached.rtnl, index)
    root = snapshot.root
    if qdisc.is_default_root(snapshot) or root is None:
        return [Lost(Part.TREE, "")]
    if qdisc.is_ours(snapshot, tree):
        return [Lost(Part.TREE, "ours with other numbers")]
    return [Lost(Part.TREE, f'root qdisc "{root.kind} {root.handle >> 16:x}:"')]


def lost_programs(attached: Attached) -> list[Lost]:
    """Return which of our programs do not stand where they should."""
    found = []
    state = attached.state
    for direction, name in PROGRAMS.items():
        holder = attached.place.holder(direction)
        if holder != state.program_ids.get(name) and holder not in state.spare_ids:
            who = "" if holder is None else f"program {holder}"
            found.append(Lost(_PROGRAM_PARTS[direction], who))
    return found


def put_back(attached: Attached, lost: Lost) -> None:
    """Return when a part of ours stands again where it stood.

    A foreign root qdisc in the place of our tree is replaced; a foreign program
    at our pref and handle is not.

    Raises: ConflictError filter-slot-foreign, tcx-full; FailedError
        readback-differs; UnsupportedError.
    Effects: what a replaced qdisc held is dropped.
    """
    if lost.part is Part.TREE:
        _put_tree_back(attached)
    elif lost.part is Part.SEGMENT_LIMIT:
        assert attached.state.gso_set is not None
        link.set_gso(attached.rtnl, attached.state.index, attached.state.gso_set)
    else:
        direction = next(one for one, part in _PROGRAM_PARTS.items() if part is lost.part)
        _put_program_back(attached, direction)


def _put_tree_back(attached: Attached) -> None:
    tree = attached.tree(Direction.EGRESS)
    assert tree is not None
    index = attached.state.index
    snapshot = qdisc.dump_tree(attached.rtnl, index)
    if qdisc.is_ours(snapshot, tree):
        qdisc.delete_root(attached.rtnl, index, tree)  # in part, or with other numbers
        snapshot = qdisc.dump_tree(attached.rtnl, index)
    qdisc.apply_tree(attached.rtnl, index, tree, takeover=not qdisc.is_default_root(snapshot))
    qdisc.read_back(attached.rtnl, index, tree)


def _put_program_back(attached: Attached, direction: Direction) -> None:
    state, place = attached.state, attached.place
    descriptor = bpf.get_pinned(str(attached.pins / PROGRAMS[direction]))
    try:
        if place.hook is Hook.TCX:
            tcx.remove_link(attached.pins, direction)  # its pin outlives what it was attached to
        elif filters.ensure_clsact(attached.rtnl, state.index) and not state.clsact_created:
            attached.save(dataclasses.replace(state, clsact_created=True))
        place.add(direction, descriptor)
    finally:
        os.close(descriptor)
