# SPDX-License-Identifier: Apache-2.0
"""The hooks of a device: our programs on them, and who else stands there."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shapeagent.kernel import bpf, filters, nftables, tcx
from shapeagent.kernel import netns as namespaces
from shapeagent.kernel.rtnl import Rtnl
from shapeagent.model.errors import (
    ConflictError,
    FailedError,
    InputError,
    UnsupportedError,
)
from shapeagent.model.types import Direction, Hook, IngressMode

if TYPE_CHECKING:
    from shapeagent.service.state import AttachState

PROGRAMS = {Direction.EGRESS: "shp_egress", Direction.INGRESS: "shp_ingress"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where our two classifiers stand, or will."""

    rtnl: Rtnl
    netns: str | None
    index: int
    hook: Hook
    pins: Path

    @classmethod
    def of(cls, rtnl: Rtnl, state: AttachState, pins: Path) -> Place:
        """Return the place of an attachment."""
        return cls(rtnl, state.netns, state.index, Hook(state.hook), pins)

    def add(self, direction: Direction, program_fd: int) -> None:
        """Let a program run for every packet of a direction.

        Raises: ConflictError filter-slot-foreign, tcx-full.
        Undo: `remove`.
        """
        if self.hook is Hook.TCX:
            tcx.add_link(self.netns, self.index, direction, program_fd, self.pins)
        else:
            name = PROGRAMS[direction]
            filters.add_filter(self.rtnl, self.index, direction, program_fd, name)

    def swap(self, direction: Direction, program_fd: int, ours: Sequence[int]) -> None:
        """Put another program in the place of ours; every packet runs the old one or the new.

        Args:
            ours: ids of the programs that we may replace.
        Raises: ConflictError filter-slot-foreign, attachment-damaged.
        """
        name = PROGRAMS[direction]
        if self.hook is Hook.CLSACT:
            filters.replace_filter(
                self.rtnl, self.index, direction, program_fd, name, our_program_ids=ours
            )
        elif not tcx.update_link(self.pins, direction, program_fd):
            raise ConflictError(
                "attachment-damaged",
                f"Our {direction.value} link is gone.",
                hint="shapectl detach, then attach again",
            )

    def holder(self, direction: Direction) -> int | None:
        """Return the id of the program that stands as ours, None where none does."""
        if self.hook is Hook.TCX:
            link = tcx.find_link(self.pins, direction)
            return link.program_id if link is not None and link.index == self.index else None
        found = filters.find_ours(filters.list_filters(self.rtnl, self.index, direction))
        return None if found is None else found.program_id

    def read_back(self, wanted: Mapping[str, int], device: str) -> None:
        """Return when these programs (name → id) stand as ours. Raises: readback-differs."""
        for direction, name in PROGRAMS.items():
            found = self.holder(direction)
            if found != wanted[name]:
                raise FailedError(
                    "readback-differs",
                    f"The {direction.value} program of {device} is {found}, not {wanted[name]}.",
                )

    def remove(self, direction: Direction, ours: Sequence[int]) -> bool:
        """Take our program away; returns False where it was gone already (C30).

        Raises: ConflictError filter-slot-foreign where another program stands there.
        """
        if self.hook is Hook.TCX:
            return tcx.remove_link(self.pins, direction)
        return filters.del_filter(self.rtnl, self.index, direction, our_program_ids=ours)

    def ahead(self, direction: Direction) -> tuple[str, ...]:
        """Return who runs before our program, and may end the hook before it."""
        ours = self.holder(direction)
        programs = tcx.list_programs(self.netns, self.index, direction)
        if self.hook is Hook.TCX:
            programs = programs[: programs.index(ours)] if ours in programs else ()
            return tuple(f"tcx program {bpf.program_text(one)}" for one in programs)
        found = [f"tcx program {bpf.program_text(one)}" for one in programs]
        for info in filters.list_filters(self.rtnl, self.index, direction):
            if info.in_our_slot:
                break
            found.append(f"filter {info}")
        return tuple(found)


def choose_hook(asked: str | None, *, has_tcx: bool) -> Hook:
    """Return how to attach: tcx where the kernel has it, unless something else is asked for.

    Raises: InputError bad-hook; UnsupportedError tcx-missing.
    """
    if asked is None:
        return Hook.TCX if has_tcx else Hook.CLSACT
    try:
        hook = Hook(asked)
    except ValueError as error:
        raise InputError(
            "bad-hook",
            f"{asked!r} is no hook.",
            hint=f"one of {', '.join(one.value for one in Hook)}",
        ) from error
    if hook is Hook.TCX and not has_tcx:
        raise UnsupportedError(
            "tcx-missing",
            f"Kernel {os.uname().release} has no tcx, which came with 6.6.",
            hint="leave out --hook, or say --hook clsact",
        )
    return hook


def needs_clsact(hook: Hook, ingress: IngressMode) -> bool:
    """Return whether an attach needs clsact: for its filters, or for the redirect to an IFB."""
    return hook is Hook.CLSACT or ingress is IngressMode.IFB


def has_other_programs(netns: str | None, index: int, ours: Collection[int] = ()) -> bool:
    """Return whether a tcx program of someone else's is attached to a device, either direction."""
    return any(
        one not in ours
        for direction in Direction
        for one in tcx.list_programs(netns, index, direction)
    )


def hidden_error(place: Place, direction: Direction) -> FailedError:
    """Return the error for a hook on which our program is not reached."""
    ahead = place.ahead(direction)
    who = ", ".join(ahead) or "something that shapectl cannot see"
    return FailedError(
        "hidden",
        f"Our {direction.value} program does not run: hidden by {who}.",
        hint="detach, then attach again: a new tcx link runs before what is there"
        if tcx.is_supported()
        else f"tc filter show dev DEVICE {direction.value} shows it: ask its owner",
    )


def refuse_shared_hook(
    rtnl: Rtnl, netns: str | None, index: int, device: str, our_program_ids: Collection[int] = ()
) -> None:
    """Return when an IFB of ours would share the ingress hook with nobody.

    Raises: ConflictError ifb-hook-shared.
    """
    sharers = list_ingress_sharers(rtnl, netns, index, device, our_program_ids)
    if sharers:
        raise ConflictError(
            "ifb-hook-shared",
            f"Others use the ingress hook of {device}, and an IFB would take the packets from "
            f"them: {', '.join(sharers)}.",
            hint=f"shapectl attach {device} --ingress police",
        )


def list_ingress_sharers(
    rtnl: Rtnl, netns: str | None, index: int, device: str, our_program_ids: Collection[int] = ()
) -> tuple[str, ...]:
    """Return the filters, tcx programs and nftables chains of others on the ingress hook.

    A packet that comes back from an IFB passes none of them (skb_skip_tc_classify
    in __netif_receive_skb_core, net/core/dev.c).
    """
    found = [
        f"filter {info}"
        for info in filters.list_filters(rtnl, index, Direction.INGRESS)
        if not ((info.in_our_slot or info.in_redirect_slot) and info.program_id in our_program_ids)
    ]
    found += [
        f"tcx program {bpf.program_text(one)}"
        for one in tcx.list_programs(netns, index, Direction.INGRESS)
        if one not in our_program_ids
    ]
    users = namespaces.run_in_netns(netns, lambda: nftables.list_ingress_users(device))
    return (*found, *users)
