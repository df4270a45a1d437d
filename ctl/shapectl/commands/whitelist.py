# SPDX-License-Identifier: Apache-2.0
"""`shapectl whitelist`: which addresses get which class, whatever their ports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shapeagent.model.reports import WhitelistChange
from shapeagent.model.types import Match, WhitelistEntry
from shapectl.output import (
    note,
    print_json,
    print_line,
    print_table,
    print_text,
    time_text,
    warn,
)
from shapectl.params import decide_expiry, duration
from shapectl.session import ShapeGroup, device_option, pick_device, session_of

if TYPE_CHECKING:
    from shapeagent.service.listfiles import LineDefaults

Function = TypeVar("Function", bound=Callable[..., Any])


@click.group("whitelist", cls=ShapeGroup)
def command() -> None:
    """Give addresses and prefixes a class.

    An ENTRY is an address (192.0.2.7, 2001:db8::7), a prefix (192.0.2.0/24) or
    a pair of exact addresses (SOURCE,DESTINATION). Source is this host's side
    in both directions. A line of a file is an ENTRY, then what differs from
    the options:

    \b
    192.0.2.7 class=signal match=source owner=ops reason="etcd 3" expires=+2h
    192.0.2.7>198.51.100.9   # a pair, and a comment
    """


def _class_option(function: Function) -> Function:
    return click.option(
        "--class",
        "class_name",
        metavar="NAME",
        default="signal",
        show_default=True,
        help="The class that matching packets get.",
    )(function)


def _match_option(function: Function) -> Function:
    return click.option(
        "--match",
        type=click.Choice([m.value for m in Match]),
        default=Match.DESTINATION.value,
        show_default=True,
        help="Which address the entry names, seen from this host: destination is the other end "
        "(of arriving packets their source), source our own, either whichever fits. With either, "
        "a prefix that holds this host's own address claims all of its traffic.",
    )(function)


def _owner_options(function: Function) -> Function:
    for option in reversed(
        (
            click.option("--owner", default="", help="Who answers for the entry."),
            click.option("--reason", default="", help="Why it exists."),
            click.option("--expires", metavar="WHEN", help="When it ends: 2026-12-01T00:00:00Z."),
            click.option(
                "--for",
                "for_s",
                type=duration,
                metavar="TIME",
                help="How long it lasts: 30m, 12h.",
            ),
        )
    ):
        function = option(function)
    return function


def _everything_option(function: Function) -> Function:
    return click.option(
        "--yes-everything",
        is_flag=True,
        help="Allow 0.0.0.0/0 and ::/0, which match every packet.",
    )(function)


def _lenient_option(function: Function) -> Function:
    return click.option(
        "--lenient", is_flag=True, help="Skip and count bad lines instead of refusing the file."
    )(function)


@command.command("add")
@click.argument("entries", nargs=-1, required=True, metavar="ENTRY...")
@_class_option
@_match_option
@_owner_options
@_everything_option
@device_option
@click.pass_context
def add(
    ctx: click.Context,
    entries: tuple[str, ...],
    class_name: str,
    match: str,
    owner: str,
    reason: str,
    expires: str | None,
    for_s: float | None,
    yes_everything: bool,
    device: str | None,
) -> None:
    """Add each ENTRY.

    An ENTRY that is there gets the new class, owner, reason and expiry.
    """
    session = session_of(ctx)
    defaults = _defaults(class_name, match, owner, reason, expires, for_s)
    parsed, notices = _parse_entries(entries, defaults)
    with session.engine() as engine:
        device = pick_device(engine, device)
        change = engine.whitelist_add(device, parsed, yes_everything=yes_everything)
    _print_change(device, change, notices, as_json=session.json)


@command.command("remove")
@click.argument("entries", nargs=-1, required=True, metavar="ENTRY...")
@_match_option
@device_option
@click.pass_context
def remove(ctx: click.Context, entries: tuple[str, ...], match: str, device: str | None) -> None:
    """Remove each ENTRY; an entry that is not there is no error."""
    session = session_of(ctx)
    parsed, notices = _parse_entries(entries, _defaults("signal", match))
    with session.engine() as engine:
        device = pick_device(engine, device)
        change = engine.whitelist_remove(device, parsed)
    _print_change(device, change, notices, as_json=session.json)


@command.command("list")
@device_option
@click.pass_context
def list_(ctx: click.Context, device: str | None) -> None:
    """List the entries in force."""
    session = session_of(ctx)
    with session.engine() as engine:
        device = pick_device(engine, device)
        rows = engine.whitelist_list(device)
    if session.json:
        print_json({"device": device, "entries": rows})
        return
    if not rows:
        note(f"the whitelist of {device} is empty")
        return
    print_table(
        ("match", "source", "destination", "class", "owner", "reason", "expires"),
        [
            (
                row.match,
                row.source,
                row.destination,
                row.traffic_class,
                row.owner or None,
                row.reason or None,
                time_text(row.expires_unix_s),
            )
            for row in rows
        ],
    )


@command.command("import")
@click.argument("file")
@_class_option
@_match_option
@_owner_options
@_lenient_option
@_everything_option
@device_option
@click.pass_context
def import_(
    ctx: click.Context,
    file: str,
    class_name: str,
    match: str,
    owner: str,
    reason: str,
    expires: str | None,
    for_s: float | None,
    lenient: bool,
    yes_everything: bool,
    device: str | None,
) -> None:
    """Add every entry of FILE, all of them or none.

    FILE may be - for stdin. The options stand for what a line leaves open.
    One bad line refuses the file and names each bad line, unless --lenient.
    """
    session = session_of(ctx)
    defaults = _defaults(class_name, match, owner, reason, expires, for_s)
    parsed, notices = _read_entries(file, defaults, lenient=lenient)
    with session.engine() as engine:
        device = pick_device(engine, device)
        change = engine.whitelist_import(device, parsed, yes_everything=yes_everything)
    _print_change(device, change, notices, as_json=session.json)


@command.command("replace")
@click.argument("file")
@_class_option
@_match_option
@_owner_options
@_lenient_option
@_everything_option
@click.option(
    "--expect-generation",
    "expected_generation",
    type=click.IntRange(min=0),
    metavar="N",
    help="Refuse if the list has changed since generation N (status shows it).",
)
@device_option
@click.pass_context
def replace(
    ctx: click.Context,
    file: str,
    class_name: str,
    match: str,
    owner: str,
    reason: str,
    expires: str | None,
    for_s: float | None,
    lenient: bool,
    yes_everything: bool,
    expected_generation: int | None,
    device: str | None,
) -> None:
    """Put the entries of FILE in place of the whole list.

    FILE may be - for stdin. All of it takes effect at one instant.
    """
    session = session_of(ctx)
    defaults = _defaults(class_name, match, owner, reason, expires, for_s)
    parsed, notices = _read_entries(file, defaults, lenient=lenient)
    with session.engine() as engine:
        device = pick_device(engine, device)
        change = engine.whitelist_replace(
            device,
            parsed,
            yes_everything=yes_everything,
            expected_generation=expected_generation,
        )
    _print_change(device, change, notices, as_json=session.json)


@command.command("export")
@click.argument("file", required=False)
@device_option
@click.pass_context
def export(ctx: click.Context, file: str | None, device: str | None) -> None:
    """Write the entries in force as import reads them.

    To FILE, or to stdout. FILE is replaced as a whole.
    """
    from shapeagent.service.documents import write_document
    from shapeagent.service.listfiles import export_whitelist

    session = session_of(ctx)
    with session.engine() as engine:
        device = pick_device(engine, device)
        rows = engine.whitelist_list(device)
    text = export_whitelist(rows)
    to_file = file is not None and file != "-"
    if file is not None and to_file:
        write_document(file, text)
    if session.json:
        print_json(
            {
                "device": device,
                "entries": len(rows),
                "file": file if to_file else None,
                "text": None if to_file else text,
            }
        )
    elif to_file:
        note(f"{len(rows):,} entries written to {file}")
    else:
        print_text(text)


def _defaults(
    class_name: str,
    match: str,
    owner: str = "",
    reason: str = "",
    expires: str | None = None,
    for_s: float | None = None,
) -> LineDefaults:
    from shapeagent.service.listfiles import LineDefaults

    return LineDefaults(
        traffic_class=class_name,
        match=Match(match),
        owner=owner,
        reason=reason,
        expires_unix_s=decide_expiry(expires, for_s),
        now_unix_s=time.time(),
    )


def _parse_entries(
    texts: Sequence[str], defaults: LineDefaults
) -> tuple[tuple[WhitelistEntry, ...], tuple[str, ...]]:
    from shapeagent.service.listfiles import parse_whitelist_entry

    entries: list[WhitelistEntry] = []
    notices: list[str] = []
    for text in texts:
        entry, said = parse_whitelist_entry(text, defaults)
        entries.append(entry)
        notices.extend(said)
    return tuple(entries), tuple(notices)


def _read_entries(
    file: str, defaults: LineDefaults, *, lenient: bool
) -> tuple[tuple[WhitelistEntry, ...], tuple[str, ...]]:
    from shapeagent.service.listfiles import parse_whitelist_file

    return parse_whitelist_file(file, defaults, lenient=lenient)


def _print_change(
    device: str, change: WhitelistChange, notices: Sequence[str], *, as_json: bool
) -> None:
    all_notices = (*notices, *(n for n in change.notices if n not in notices))
    if as_json:
        print_json(
            {
                "device": device,
                "added": change.added,
                "changed": change.changed,
                "removed": change.removed,
                "unchanged": change.unchanged,
                "total": change.total,
                "generation": change.generation,
                "notices": all_notices,
                "warnings": change.warnings,
            }
        )
        return
    changed = f"{change.changed:,} changed, " if change.changed else ""
    print_line(
        f"{device}: {change.added:,} added, {changed}{change.removed:,} removed, "
        f"{change.unchanged:,} unchanged; {change.total:,} in force, "
        f"generation {change.generation}"
    )
    for text in all_notices:
        note(text)
    for text in change.warnings:
        warn(text)
