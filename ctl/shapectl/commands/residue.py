# SPDX-License-Identifier: Apache-2.0
"""`shapectl residue`: anything of ours that is left."""

from __future__ import annotations

import click

from shapectl.output import note, print_json, print_line
from shapectl.session import ShapeCommand, session_of


@click.command("residue", cls=ShapeCommand)
@click.pass_context
def command(ctx: click.Context) -> int:
    """List what shapectl left behind, and how to remove it.

    Pins, programs, maps, filters, qdiscs, IFBs, segment limits, routes and
    state that belong to no attachment in force; in every named network
    namespace, or in that of --netns. Exit code 0 when there is nothing, 1 else.
    """
    session = session_of(ctx)
    # an agent may not look at other people's programs: root itself does, beside it
    ask = session.local_engine if session.agent is None else session.engine
    with ask() as engine:
        report = engine.residue()
    if session.json:
        print_json(report)
        return 1 if report.items else 0
    maps: dict[str, list[str]] = {}
    for item in report.items:
        if item.kind == "map":
            number, _, holder = item.what.removeprefix("map ").partition(" of ")
            maps.setdefault(holder, []).append(number)
            continue
        place = f" in namespace {item.netns}" if item.netns else ""
        print_line(f"{item.kind:<14} {item.what}{place}")
        print_line(f"  remove: {item.fix}")
    for holder, numbers in maps.items():
        print_line(f"{'maps':<14} {len(numbers)} of {holder}: {', '.join(numbers)}")
        print_line("  remove: they end with it, and with their last pin or descriptor")
    if not report.items:
        note(f"Nothing is left; attachments in force: {report.attached}.")
    return 1 if report.items else 0
