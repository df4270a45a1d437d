# SPDX-License-Identifier: Apache-2.0
"""`shapectl class`: look at and set the ceilings of an attached interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shapeagent.model.errors import InputError
from shapeagent.model.types import Direction
from shapectl.commands.status import print_classes
from shapectl.output import print_json, print_line, rate_text, seconds_text
from shapectl.params import duration
from shapectl.session import ShapeGroup, device_option, pick_device, session_of

if TYPE_CHECKING:
    from shapectl.session import AnyEngine


@click.group("class", cls=ShapeGroup)
def command() -> None:
    """Show the classes of an attached interface, or set a ceiling."""


@command.command("show")
@device_option
@click.pass_context
def show(ctx: click.Context, device: str | None) -> None:
    """Show each class: rates, what is in force now, counters."""
    session = session_of(ctx)
    with session.engine() as engine:
        device = pick_device(engine, device)
        classes = engine.class_list(device)
    if session.json:
        print_json({"device": device, "classes": classes})
    else:
        print_classes(classes)


@command.command("set")
@click.argument("name")
@click.option(
    "--ceiling",
    metavar="RATE",
    required=True,
    help="What the class may never exceed: 20mbit, 1.5gbit, or 50% of the link rate.",
)
@click.option(
    "--for",
    "lease_s",
    type=duration,
    metavar="TIME",
    help="A lease: past it the kernel itself falls to the safe ceiling. Without it: until "
    "someone sets another.",
)
@click.option(
    "--direction",
    type=click.Choice([d.value for d in Direction]),
    default=Direction.EGRESS.value,
    show_default=True,
    help="Which way the ceiling holds.",
)
@device_option
@click.pass_context
def set_(
    ctx: click.Context,
    name: str,
    ceiling: str,
    lease_s: float | None,
    direction: str,
    device: str | None,
) -> None:
    """Set the ceiling of the class NAME.

    It changes in place, without losing a packet. With --for the ceiling is a
    lease: when it runs out the class falls to its safe ceiling, not to the
    ceiling before, whether or not anything of ours still runs.
    """
    session = session_of(ctx)
    ceiling_bits_per_s = None if "%" in ceiling else _parse_ceiling(ceiling, None)
    with session.engine() as engine:
        device = pick_device(engine, device)
        if ceiling_bits_per_s is None:
            ceiling_bits_per_s = _parse_ceiling(ceiling, _read_link_rate(engine, device))
        row = engine.class_set(
            device, name, ceiling_bits_per_s, lease_s=lease_s, direction=direction
        )
    if session.json:
        print_json({"device": device, "class": row})
        return
    then = (
        f"for {seconds_text(lease_s)}, then the safe ceiling "
        f"{rate_text(row.safe_ceiling_bits_per_s)}"
        if lease_s is not None
        else "until someone sets another"
    )
    print_line(f"{device} {direction}: {name} at most {rate_text(ceiling_bits_per_s)}, {then}")


def _parse_ceiling(text: str, link_rate_bits_per_s: int | None) -> int:
    from shapeagent.model.units import parse_rate

    return parse_rate(text, link_rate_bits_per_s=link_rate_bits_per_s)


def _read_link_rate(engine: AnyEngine, device: str) -> int:
    for interface in engine.status(device):
        return interface.link_rate_bits_per_s
    raise InputError(
        "not-attached",
        f"shapectl is not attached to {device}: there is no link rate to take a share of.",
        hint=f"sudo shapectl attach {device}",
    )
