# SPDX-License-Identifier: Apache-2.0
"""`shapectl events`: what happened on the agent's host."""

from __future__ import annotations

import time

import click

from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import Happened
from shapectl.output import print_json_line, print_line, warn
from shapectl.session import ShapeCommand, complete_device, session_of


@click.command("events", cls=ShapeCommand)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Go on with each new event until Ctrl-C, also when the agent restarts.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only events of this kind (attached, put-back, whitelist-changed); again for more.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    shell_complete=complete_device,
    help="Only events of this interface; else of all.",
)
@click.pass_context
def command(ctx: click.Context, follow: bool, kinds: tuple[str, ...], device: str | None) -> None:
    """Show what happened: attachments, changes, repairs, conflicts.

    What the agent remembers of its run. Only an agent has events; without one each command tells
    its own. With --json each event is a line.
    """
    session = session_of(ctx)
    with session.remote_engine() as engine:
        if engine is None:
            raise ConflictError(
                "no-agent",
                "No agent runs here, and only an agent has events.",
                hint="systemctl start shapectl-agent, or --agent ADDRESS",
            )
        for one in engine.events(device, kinds=kinds, follow=follow):
            if session.json:
                print_json_line(one)
            else:
                _print(one)


def _print(one: Happened) -> None:
    if one.lost:
        warn(f"{one.lost:,} events before this are no longer remembered")
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.unix_s))
    who = one.details.get("who")
    by = f" (by {who})" if who else ""
    print_line(f"{moment}  {one.kind:<17} {one.device or '-':<15}  {one.text}{by}")
