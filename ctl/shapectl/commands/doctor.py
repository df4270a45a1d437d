# SPDX-License-Identifier: Apache-2.0
"""`shapectl doctor`: what would go wrong, and which command mends it."""

from __future__ import annotations

from itertools import groupby

import click

from shapeagent.model.reports import DoctorReport, Finding, Severity
from shapectl.output import print_json, print_line, print_marked
from shapectl.session import ShapeCommand, complete_device, missing_package, session_of

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


@click.command("doctor", cls=ShapeCommand)
@click.argument("device", required=False, shell_complete=complete_device)
@click.pass_context
def command(ctx: click.Context, device: str | None) -> int:
    """Say what is wrong with this host or DEVICE, and what to type.

    Without DEVICE: the host and each physical interface that is up, without
    what is well. Nothing is changed and no module is loaded. Works without
    root, and then says what it could not see.

    An error keeps attach from working; only errors make the exit code 1.
    """
    session = session_of(ctx)
    try:
        from shapeagent.service.doctor import examine
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    report = examine(device, netns=session.netns)
    if session.json:
        print_json(report)
    else:
        print_report(report)
    return 1 if report.errors else 0


def print_report(report: DoctorReport) -> None:
    """Print the findings by subject; what is well only where one device was asked for."""
    brief = report.device is None
    well = 0
    for subject, group in groupby(report.findings, key=lambda one: one.subject):
        findings = list(group)
        shown = [one for one in findings if not brief or one.severity is not Severity.OK]
        well += sum(one.severity is Severity.OK for one in findings)
        if not shown:
            print_line(f"{subject}: all well")
            print_line()
            continue
        print_line(subject)
        for finding in shown:
            _print_finding(finding)
        print_line()
    if report.unseen:
        print_line(f"not seen, for lack of privilege: {', '.join(report.unseen)}")
    infos = sum(one.severity is Severity.INFO for one in report.findings)
    print_line(
        f"errors {report.errors}, warnings {report.warnings}, to know {infos}, well {well}"
        + ("; with a DEVICE, or --json, each is listed" if brief else "")
    )


def _print_finding(finding: Finding) -> None:
    print_marked(
        f"{finding.severity.value:<7}",
        f"{finding.id}: {finding.what}",
        colour=_COLOURS.get(finding.severity),
    )
    if finding.why:
        print_line(f"           why: {finding.why}")
    if finding.fix:
        print_line(f"           fix: {finding.fix}")
