# SPDX-License-Identifier: Apache-2.0
"""`shapectl confirm`: keep an attach that would else be undone."""

from __future__ import annotations

import click

from shapectl.output import print_json, print_line, seconds_text
from shapectl.session import ShapeCommand, complete_device, pick_device, session_of


@click.command("confirm", cls=ShapeCommand)
@click.argument("device", required=False, shell_complete=complete_device)
@click.pass_context
def command(ctx: click.Context, device: str | None) -> None:
    """Keep what `attach --confirm` did to DEVICE.

    DEVICE may be left out where exactly one is attached. Once it was undone, or confirmed, there
    is nothing to confirm, and that is an error.
    """
    session = session_of(ctx)
    with session.engine() as engine:
        name = pick_device(engine, device)
        left_s = engine.confirm(name)
    if session.json:
        print_json({"device": name, "left_s": round(left_s, 1)})
        return
    print_line(f"{name} stays attached ({seconds_text(left_s)} were left).")
