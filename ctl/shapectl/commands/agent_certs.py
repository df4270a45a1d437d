# SPDX-License-Identifier: Apache-2.0
"""`shapectl agent certs`: a development CA and certificates for the agent's TCP address."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from shapeagent.model.errors import InputError
from shapectl.output import note, print_json, print_line, print_table, print_text
from shapectl.session import ShapeCommand, missing_package, session_of

_TRUST_DOMAIN = "shapectl.test"
_ROLES = ("observer", "operator", "admin")


@click.command("certs", cls=ShapeCommand)
@click.option(
    "--out",
    "folder",
    default="shapectl-certs",
    show_default=True,
    metavar="FOLDER",
    help="Where the PEM files go.",
)
@click.option(
    "--trust-domain",
    default=_TRUST_DOMAIN,
    show_default=True,
    metavar="DOMAIN",
    help="The SPIFFE trust domain of every id.",
)
@click.option(
    "--server-name",
    "server_names",
    multiple=True,
    metavar="NAME",
    help="A DNS name or address that clients connect to; again for more. "
    "Without it: this host's name, localhost, 127.0.0.1 and ::1.",
)
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="ROLE=ID",
    help="A client's role and SPIFFE id, or only its path: operator=/ns/prod/sa/scheduler; "
    "again for more. Without it: one of each role.",
)
@click.option("--days", default=30, show_default=True, help="How long the certificates hold.")
@click.option("--ca-days", default=365, show_default=True, help="How long the CA holds.")
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@click.option(
    "--keep-ca", is_flag=True, help="Sign with the CA that is in the folder, and leave it."
)
@click.pass_context
def certs(
    ctx: click.Context,
    folder: str,
    trust_domain: str,
    server_names: tuple[str, ...],
    clients: tuple[str, ...],
    days: int,
    ca_days: int,
    force: bool,
    keep_ca: bool,
) -> None:
    """Make a development CA and certificates for agent and clients.

    Keys are ECDSA P-256, readable by you alone. Prints what was made and the
    lines for /etc/shapectl/agent.toml. A running agent takes new files up by
    itself. Not for production: the CA's key lies beside the rest.
    """
    try:
        from shapeagent.service.identity.certs import CertsRequest, make_certs
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    session = session_of(ctx)
    report = make_certs(
        CertsRequest(
            folder=Path(folder),
            trust_domain=trust_domain,
            server_names=server_names or _own_names(),
            clients=tuple(_client(text, trust_domain) for text in clients or _ROLES),
            days=days,
            ca_days=ca_days,
            force=force,
            keep_ca=keep_ca,
        )
    )
    if session.json:
        print_json(report)
        return
    print_table(
        ("certificate", "role", "identity", "names", "until"),
        [
            (row.certificate, row.role, row.identity, ", ".join(row.names) or None, row.not_after)
            for row in report.certificates
        ],
    )
    note("each key is in the file beside it, NAME-key.pem, mode 0600")
    print_line()
    print_line("for /etc/shapectl/agent.toml:")
    print_line()
    print_text(report.config)


def _client(text: str, trust_domain: str) -> tuple[str, str]:
    role, equals, identity = text.partition("=")
    if role not in _ROLES or (equals and not identity):
        raise InputError(
            "client-role",
            f"{text!a} does not begin with a role and '=': {', '.join(_ROLES)}.",
            hint="--client operator=/ns/prod/sa/scheduler",
        )
    if not equals:
        identity = f"/{role}"
    if identity.startswith("/"):
        identity = f"spiffe://{trust_domain}{identity}"
    return role, identity


def _own_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys((socket.gethostname(), "localhost", "127.0.0.1", "::1")))
