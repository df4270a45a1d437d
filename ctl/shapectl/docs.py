# SPDX-License-Identifier: Apache-2.0
"""Command reference and man page, written from the commands themselves.

`python -m shapectl.docs` writes docs/commands.md and docs/shapectl.1;
`--check` changes nothing and exits 1 where one of them is stale.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from shapeagent.model import rates, reports, schema, types
from shapectl import __version__
from shapectl.cli import cli
from shapectl.session import GLOBAL_OPTION_NAMES

_DEMO_ANSWER = (
    '`{"before": RUN, "after": RUN, "improvement_p99": before ÷ after, …}`; RUN has '
    "`signal` and `stream` (each `sent`, `lost`, `p50_us`, `p99_us`, `max_us`) and `bulk` "
    "(`throughput_bits_per_s`, `ceiling_bits_per_s`: wire bits; the ceiling is null before)"
)

_ERROR_ANSWER = (
    '{"error": "<reference>", "message": "…", "hint": "… or null", "details": ["…"], '
    '"exit_code": 2}'
)

#: What `--json` prints, by command: (command, text). `Name` in backquotes is an object below.
_JSON_ANSWERS = (
    ("attach", "`AttachReport`"),
    ("attach --dry-run", "`AttachPlan`"),
    ("detach", "`DetachReport`"),
    ("residue", "`ResidueReport`"),
    ("status", '`{"interfaces": [InterfaceStatus, …]}`'),
    ("top --once", '`{"interval_s": …, "interfaces": [InterfaceRates, …]}`'),
    ("events", "JSON Lines: one `Happened` per event, each on a line of its own"),
    ("doctor", "`DoctorReport`; `severity` is ok, info, warning or error"),
    ("explain", "`Explanation`"),
    ("explain --pcap", "JSON Lines: one `Explanation` per packet, each on a line of its own"),
    (
        "whitelist add, remove, import, replace",
        '`WhitelistChange` with `"device"` before its fields',
    ),
    ("whitelist list", '`{"device": …, "entries": [WhitelistRow, …]}`'),
    (
        "whitelist export",
        '`{"device": …, "entries": N, "file": path or null, "text": string or null}`',
    ),
    ("class show", '`{"device": …, "classes": [ClassStatus, …]}`'),
    ("class set", '`{"device": …, "class": ClassStatus}`'),
    ("policy show", "`Policy`, every rate resolved"),
    ("policy check", "`PolicySummary`; where the policy has errors, an error object"),
    ("policy example", '`{"source": "built-in", "text": …}`'),
    (
        "demo",
        _DEMO_ANSWER,
    ),
    (
        "agent certs",
        (
            '`{"folder": …, "trust_domain": …, "ca_kept": …, "certificates": [{"name", '
            '"certificate", "key", "identity", "role", "names", "not_after"}, …], "config": text}`'
        ),
    ),
    ("completion", '`{"shell": …, "script": …}`'),
)

_JSON_TYPES: tuple[type, ...] = (
    reports.AttachPlan,
    reports.ClassPlanRow,
    reports.AttachReport,
    reports.DetachReport,
    reports.InterfaceStatus,
    reports.ClassStatus,
    rates.InterfaceRates,
    rates.ClassRate,
    reports.Happened,
    reports.ResidueReport,
    reports.ResidueItem,
    reports.DoctorReport,
    reports.Finding,
    reports.Explanation,
    reports.WhitelistChange,
    reports.WhitelistRow,
    schema.PolicySummary,
    types.Policy,
    types.TrafficClass,
    types.Budget,
    types.Rule,
)

_EXIT_CODES = (
    (0, "done"),
    (1, "failed; `doctor`: an error was found; `residue`: something is left"),
    (2, "usage, input or policy is invalid; nothing was changed"),
    (3, "a privilege is missing"),
    (4, "the kernel, headers, compiler or a package lacks something needed"),
    (5, "existing state, or another owner, is in the way"),
    (6, "partly done"),
    (130, "stopped by Ctrl-C"),
)

_ENVIRONMENT = (
    ("SHAPECTL_AGENT", "the agent to ask, where --agent is not given"),
    ("SHAPECTL_AGENT_CERT", "the certificate for it, where --agent-cert is not given"),
    ("SHAPECTL_NETNS", "the network namespace, where --netns is not given"),
    ("NO_COLOR", "set to anything: no colour on a terminal either"),
)

_FILES = (
    ("/etc/shapectl/policy.toml", "the policy, where --policy is not given"),
    (
        "/etc/shapectl/management",
        "names of management devices, one a line: attach wants --yes-management there",
    ),
    (
        "/run/shapectl/",
        (
            "per interface the accepted policy, the whitelist's owners, reasons and expiries, what "
            "stood there before, and in `undo` the lines that shapectl-panic-off runs; what was "
            "found damaged is NAME.corrupt-TIME"
        ),
    ),
    (
        "/sys/fs/bpf/shapectl/",
        (
            "the pinned programs and maps of each attached interface, and in kept_* copies of its "
            "state files"
        ),
    ),
)


def commands(
    group: click.Group = cli, words: tuple[str, ...] = ("shapectl",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its full name, groups before their commands."""
    context = click.Context(group, info_name=words[-1])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{name} is listed and cannot be loaded"
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))


def _paragraphs(command: click.Command) -> list[str]:
    """Return the paragraphs of a command's help; one that keeps its lines begins with \\b."""
    text = inspect.cleandoc(command.help or "")
    return text.split("\n\n") if text else []


def _usage(words: tuple[str, ...], command: click.Command) -> str:
    pieces = [*words, "[OPTIONS]"]
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            name = _metavar(parameter) or str(parameter.name).upper()
            bare = parameter.required or name[0] == "[" or name[-1] == "]"
            pieces.append(name if bare else f"[{name}]")
    if isinstance(command, click.Group):
        pieces.append("COMMAND [ARGUMENTS]")
    return " ".join(pieces)


def _metavar(parameter: click.Parameter) -> str | None:
    # Not click's own text: that differs between its versions, and the pages must not.
    if parameter.metavar:
        return parameter.metavar
    if isinstance(parameter.type, click.Choice):
        return "|".join(map(str, parameter.type.choices))
    return None


def _options(command: click.Command, *, shared: bool = False) -> list[click.Option]:
    return [
        p
        for p in command.params
        if isinstance(p, click.Option) and (p.name in GLOBAL_OPTION_NAMES) is shared
    ]


def _option_words(option: click.Option) -> tuple[str, str]:
    """Return an option as it is typed, and its help with default and `required`."""
    typed = ", ".join((*option.opts, *option.secondary_opts))
    if not option.is_flag:
        typed += f" {_metavar(option) or 'TEXT'}"
    text = option.help or ""
    if option.required:
        text += " Required."
    if option.show_default:
        text += f" Default: {option.default}."
    return typed, text


def _json_fields(kind: type) -> list[tuple[str, str]]:
    return [(f.name, str(f.type)) for f in dataclasses.fields(kind)]


def _json_type_text(annotation: str) -> str:
    """Return a Python annotation in JSON's words."""
    text = annotation
    for python, json in (
        ("tuple[tuple[int, int], ...]", "array of [low, high]"),
        ("dict[str, dict[str, int]]", "object of objects of numbers"),
        ("dict[str, int]", "object of numbers"),
        (" | None", " or null"),
        ("bool", "true/false"),
    ):
        text = text.replace(python, json)
    if text.startswith("tuple[") and text.endswith(", ...]"):
        text = f"array of {text.removeprefix('tuple[').removesuffix(', ...]')}"
    words = {"str": "string", "int": "integer", "float": "number",
             "RuleKind": "string", "PortSide": "string", "Direction": "string",
             "Severity": "string"}  # fmt: skip
    return " ".join(words.get(word, word) for word in text.split(" "))


def render_markdown() -> str:
    """Return docs/commands.md."""
    out = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Written by `python -m shapectl.docs` from the commands: do not edit. -->",
        "# Commands",
        "",
        "Tables and JSON go to stdout; progress, warnings and errors to stderr. Changes need root.",
        "`attach` and `detach` name their interface; the others take `--device`, which may be",
        "left out where exactly one interface is attached.",
        "",
        "Rates are bits per second in lower case (`800mbit`, `1.5gbit`, `20%` of a known link);",
        "durations carry a unit (`60s`, `5m`, `1h`).",
        "",
        "## Options of every command",
        "Before or after the command's name. `shapectl --version` prints the version; `--help`",
        "(`-h`) after any command prints its help.",
        "",
    ]
    out += _markdown_options(_options(cli, shared=True))
    for words, command in commands():
        out += ["", f"{'##' if len(words) == 2 else '###'} {' '.join(words)}"]
        out += ["```", _usage(words, command), "```"]
        for paragraph in _paragraphs(command):
            if paragraph.startswith("\b"):
                out += ["```", *paragraph.splitlines()[1:], "```"]
            else:
                out += [paragraph, ""]
        options = _options(command)
        if options:
            if out[-1] != "":
                out.append("")
            out += _markdown_options(options)
        while out[-1] == "":
            out.pop()
    out += ["", "## Exit codes", "| code | meaning |", "|---|---|"]
    out += [f"| {code} | {text} |" for code, text in _EXIT_CODES]
    out += [
        "",
        "## Errors",
        "Every failure has a reference that does not change between versions, says what failed,",
        "and names the next command to type:",
        "```",
        "error: <reference>",
        "<message>",
        "  <detail>",
        "hint: <what to type>",
        "```",
        "",
        "## JSON",
        "With `--json` stdout holds the answer as one JSON object. A failure is an object there",
        "too, so that a program reads one stream, and the exit code tells them apart:",
        "```json",
        _ERROR_ANSWER,
        "```",
        "Fields are added, never renamed or removed. Rates are bits per second, times seconds",
        "since 1970 (UTC), sizes bytes, as each field's name says.",
        "",
        "| command | prints |",
        "|---|---|",
    ]
    out += [f"| `{name}` | {text} |" for name, text in _JSON_ANSWERS]
    for kind in _JSON_TYPES:
        out += ["", f"### {kind.__name__}", (kind.__doc__ or "").strip().splitlines()[0], ""]
        if (kind.__doc__ or "").startswith(f"{kind.__name__}("):
            out = out[:-2]
        out += ["| field | type |", "|---|---|"]
        out += [f"| `{name}` | {_json_type_text(text)} |" for name, text in _json_fields(kind)]
    out += ["", "## Environment", "| variable | meaning |", "|---|---|"]
    out += [f"| `{name}` | {text} |" for name, text in _ENVIRONMENT]
    out += ["", "## Files", "| path | holds |", "|---|---|"]
    out += [f"| `{name}` | {text} |" for name, text in _FILES]
    return "\n".join(out) + "\n"


def _markdown_options(options: Sequence[click.Option]) -> list[str]:
    rows = ["| option | meaning |", "|---|---|"]
    for option in options:
        typed, text = _option_words(option)
        typed, text = typed.replace("|", "\\|"), text.replace("|", "\\|")
        rows.append(f"| `{typed}` | {text} |")
    return rows


def _roff(text: str) -> str:
    """Return `text` safe as one line of roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    for character, name in (("…", "..."), ("µ", "\\(mc"), ("÷", "\\(di")):
        escaped = escaped.replace(character, name)
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def render_man() -> str:
    """Return docs/shapectl.1. No date: the page changes only when the commands do."""
    out = [
        '.\\" SPDX-License-Identifier: Apache-2.0',
        '.\\" Written by `python -m shapectl.docs` from the commands: do not edit.',
        f'.TH SHAPECTL 1 "" "shapectl {__version__}" "User Commands"',
        ".SH NAME",
        "shapectl \\- " + _roff((cli.help or "").strip().splitlines()[0].rstrip(".").lower()),
        ".SH SYNOPSIS",
        ".B shapectl",
        "[\\fIoptions\\fR] \\fIcommand\\fR [\\fIarguments\\fR]",
        ".SH DESCRIPTION",
        "Classifies every packet of an interface in the kernel, serves urgent classes first",
        "and holds bulk under a ceiling. Tables and JSON go to stdout, all else to stderr.",
        ".SH OPTIONS",
        "Before or after the command.",
    ]
    out += _man_options(_options(cli, shared=True))
    out += [".SH COMMANDS"]
    for words, command in commands():
        out += [f".SS {_roff(' '.join(words))}", ".nf", f"\\fB{_roff(_usage(words, command))}\\fR"]
        out += [".fi"]
        for paragraph in _paragraphs(command):
            out.append(".PP")
            if paragraph.startswith("\b"):
                out += [".nf", *(_roff(line) for line in paragraph.splitlines()[1:]), ".fi"]
            else:
                out.append(_roff(" ".join(paragraph.split())))
        out += _man_options(_options(command))
    for title, rows in (
        ("EXIT STATUS", [(str(code), text) for code, text in _EXIT_CODES]),
        ("ENVIRONMENT", _ENVIRONMENT),
        ("FILES", _FILES),
    ):
        out.append(f".SH {title}")
        for name, text in rows:
            out += [".TP", f"\\fB{_roff(name)}\\fR", _roff(text)]
    out += [".SH SEE ALSO", "docs/commands.md: the fields of \\fB\\-\\-json\\fR.", ".BR tc (8)"]
    return "\n".join(out) + "\n"


def _man_options(options: Sequence[click.Option]) -> list[str]:
    out: list[str] = []
    for option in options:
        typed, text = _option_words(option)
        out += [".TP", f"\\fB{_roff(typed)}\\fR", _roff(text)]
    return out


def pages(folder: Path) -> dict[Path, str]:
    """Return the wanted text of each generated file under `folder`."""
    return {folder / "commands.md": render_markdown(), folder / "shapectl.1": render_man()}


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where a page is stale.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(__file__).resolve().parents[2] / "docs",
    help="Where the pages are; else docs/ of this checkout.",
)
def main(check: bool, folder: Path) -> None:
    """Write the command reference and the man page, or check that they are fresh."""
    stale = [
        path
        for path, text in pages(folder).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if check:
            click.echo(f"stale: {path}; python -m shapectl.docs writes it", err=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages(folder)[path], encoding="utf-8")
            click.echo(f"written: {path}", err=True)
    if check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
