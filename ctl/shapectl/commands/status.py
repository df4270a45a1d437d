# SPDX-License-Identifier: Apache-2.0
"""`shapectl status`: what is attached, what is in force, what was counted."""

from __future__ import annotations

import click

from shapeagent.model.reports import ClassStatus, InterfaceStatus
from shapectl.output import (
    bytes_text,
    note,
    print_json,
    print_line,
    print_table,
    rate_text,
    seconds_text,
    time_text,
    warn,
)
from shapectl.session import ShapeCommand, complete_device, session_of


@click.command("status", cls=ShapeCommand)
@click.argument("device", required=False, shell_complete=complete_device)
@click.pass_context
def command(ctx: click.Context, device: str | None) -> None:
    """Show every attached interface, or DEVICE.

    Per class and direction: the ceiling in force, its lease, packets, wire
    bytes, drops and CE marks; then why packets got their class, and whatever
    is not as attach left it.
    """
    session = session_of(ctx)
    with session.engine() as engine:
        interfaces = engine.status(device)
    if session.json:
        print_json({"interfaces": interfaces})
        return
    if not interfaces:
        note("shapectl is attached to no interface here.")
        return
    for position, interface in enumerate(interfaces):
        if position:
            print_line()
        _print_interface(interface)


def _print_interface(interface: InterfaceStatus) -> None:
    place = f" in namespace {interface.netns}" if interface.netns else ""
    shadow = ", shadow: no packet is changed" if interface.shadow else ""
    limit = bytes_text(interface.segment_limit_bytes) if interface.segment_limit_bytes else "off"
    programs = ", ".join(f"{name} {number}" for name, number in interface.programs.items())
    print_line(
        f"{interface.device}{place}: profile {interface.profile}, ingress {interface.ingress}, "
        f"hook {interface.hook}, "
        f"link {rate_text(interface.link_rate_bits_per_s)}{shadow}"
    )
    print_line(
        f"  attached {time_text(interface.attached_unix_s)}, policy {interface.policy_source}, "
        f"segment limit {limit}, programs {programs or 'none'}"
    )
    print_line(
        f"  whitelist {interface.whitelist_entries:,} entries, "
        f"generation {interface.whitelist_generation}"
    )
    if interface.unconfirmed_s is not None:
        print_line(
            f"  not confirmed: undone in {seconds_text(interface.unconfirmed_s)}, "
            f"unless: shapectl confirm {interface.device}"
        )
    print_line()
    print_classes(interface.classes)
    if any(interface.reasons.values()):
        print_line()
        print_table(
            ("decided by", "direction", ">packets"),
            [
                (reason, direction, f"{packets:,}")
                for direction, reasons in interface.reasons.items()
                for reason, packets in sorted(reasons.items(), key=lambda item: -item[1])
                if packets
            ],
        )
    for problem in interface.problems:
        warn(f"{interface.device}: not as attach left it: {problem}")
    for warning in interface.warnings:
        warn(f"{interface.device}: {warning}")


def print_classes(classes: tuple[ClassStatus, ...]) -> None:
    """Print the classes of one interface as a table to stdout."""
    print_table(
        (
            "class", "direction", ">guarantee", ">ceiling", ">in force", "lease",
            ">packets", ">wire bytes", ">drops", ">CE marks", ">backlog",
        ),
        [
            (
                row.name,
                row.direction,
                rate_text(row.guarantee_bits_per_s or None),
                rate_text(row.ceiling_bits_per_s),
                rate_text(row.ceiling_in_force_bits_per_s),
                lease_text(row),
                f"{row.packets:,}",
                bytes_text(row.wire_bytes),
                f"{row.drops + (row.queue_drops or 0):,}",
                f"{row.ce_marks:,}",
                bytes_text(row.backlog_bytes),
            )
            for row in classes
        ],
    )  # fmt: skip


def lease_text(row: ClassStatus) -> str | None:
    """Return how long the ceiling of `row` still holds; None where it has no lease."""
    if row.lease_s_left is None:
        return None
    if row.lease_s_left <= 0:
        return "over: safe ceiling"
    return f"{seconds_text(row.lease_s_left)} left"
