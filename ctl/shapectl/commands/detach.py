# SPDX-License-Identifier: Apache-2.0
"""`shapectl detach`: put back what was there before attach."""

from __future__ import annotations

import click

from shapectl.output import note, print_json, print_line
from shapectl.session import ShapeCommand, complete_device, session_of


@click.command("detach", cls=ShapeCommand)
@click.argument("device", shell_complete=complete_device)
@click.option("--dry-run", is_flag=True, help="Print the steps and change nothing.")
@click.pass_context
def command(ctx: click.Context, device: str, dry_run: bool) -> None:
    """Put DEVICE back to what it was before attach.

    Nothing of ours stays. On a DEVICE that is not attached there is nothing to do, and that is no
    error.
    """
    session = session_of(ctx)
    with session.engine() as engine:
        report = engine.detach(device, dry_run=dry_run)
    if session.json:
        print_json(report)
        return
    if dry_run:
        print_line(f"Steps to detach from {device} (nothing was changed)")
        for number, step in enumerate(report.steps, start=1):
            print_line(f"  {number:2}. {step}")
    elif report.changed:
        print_line(f"Detached from {device}: it is as it was before attach.")
    else:
        print_line(f"Nothing to do: shapectl is not attached to {device}.")
    for text in report.notes:
        note(text)
