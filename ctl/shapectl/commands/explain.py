# SPDX-License-Identifier: Apache-2.0
"""`shapectl explain`: what the loaded program says about a packet."""

from __future__ import annotations

from pathlib import Path

import click

from shapeagent.model.errors import InputError
from shapeagent.model.reports import ExplainRequest, Explanation
from shapeagent.model.types import Direction
from shapectl import params
from shapectl.output import note, print_json, print_json_line, print_line, rate_text
from shapectl.params import Endpoint
from shapectl.session import ShapeCommand, device_option, pick_device, session_of

#: Stands in for a port that the question leaves open, usually the client's: one
#: that Linux could have picked, and that no rule of the built-in policy names.
OPEN_PORT = 54321

_WITH_PORTS = frozenset({"tcp", "udp", "sctp", "6", "17", "132"})


@click.command("explain", cls=ShapeCommand)
@click.argument("source", type=params.endpoint, required=False, metavar="[SOURCE")
@click.argument("destination", type=params.endpoint, required=False, metavar="DESTINATION]")
@click.option(
    "--protocol",
    type=params.protocol,
    metavar="PROTOCOL",
    default="tcp",
    show_default=True,
    help="tcp, udp, icmp, icmpv6, sctp, or a number.",
)
@click.option(
    "--direction",
    type=click.Choice([d.value for d in Direction]),
    default=Direction.EGRESS.value,
    show_default=True,
    help="egress: SOURCE is on this side; ingress: DESTINATION is.",
)
@click.option(
    "--dscp",
    type=params.dscp,
    default="0",
    metavar="DSCP",
    help="DSCP of the packet: 0..63, or ef, cs1, af41.",
)
@click.option(
    "--mark",
    type=params.mark,
    default="0",
    metavar="NUMBER",
    help="skb->mark of the packet: 42, 0x2a.",
)
@click.option("--pcap", metavar="FILE", help="Explain each packet of a capture file instead.")
@device_option
@click.pass_context
def command(
    ctx: click.Context,
    source: Endpoint | None,
    destination: Endpoint | None,
    protocol: str,
    direction: str,
    dscp: int,
    mark: int,
    pcap: str | None,
    device: str | None,
) -> None:
    """Say which class a packet gets, and why.

    SOURCE and DESTINATION are ADDRESS[:PORT], for IPv6 [ADDRESS]:PORT. The
    packet runs through the program that is loaded on the interface, without
    being sent, counted or remembered.

    \b
    shapectl explain 10.0.0.5:41000 10.0.0.9:2379
    shapectl explain [2001:db8::5]:50000 [2001:db8::9]:443 --protocol udp
    shapectl explain --pcap capture.pcap --direction ingress
    """
    session = session_of(ctx)
    if pcap is not None:
        if source is not None:
            raise InputError(
                "usage",
                "--pcap FILE and SOURCE DESTINATION exclude each other.",
                hint="give one of them",
            )
        with session.engine() as engine:
            device = pick_device(engine, device)
            for explanation in engine.explain_pcap(device, Path(pcap), direction):
                if session.json:
                    print_json_line(explanation)
                else:
                    _print_short(explanation)
        return
    if source is None or destination is None:
        raise InputError(
            "usage",
            "SOURCE and DESTINATION are missing, or --pcap FILE.",
            hint="shapectl explain 10.0.0.5:41000 10.0.0.9:2379",
        )
    request = _decide_request(source, destination, protocol, direction, dscp, mark)
    with session.engine() as engine:
        explanation = engine.explain(pick_device(engine, device), request)
    if session.json:
        print_json(explanation)
    else:
        _print_long(explanation)


def _decide_request(
    source: Endpoint,
    destination: Endpoint,
    protocol: str,
    direction: str,
    dscp: int,
    mark: int,
) -> ExplainRequest:
    if source.version != destination.version:
        raise InputError(
            "address-family",
            f"{source.address} is IPv{source.version}, "
            f"{destination.address} is IPv{destination.version}.",
            hint="both ends of a packet have the same family",
        )
    ports = [source.port, destination.port]
    if protocol in _WITH_PORTS:
        if ports == [None, None]:
            raise InputError(
                "endpoint",
                f"{protocol} packets have ports, and neither end names one.",
                hint=f"{_with_port(destination)} for the destination's, "
                "or --protocol icmp for a packet without.",
            )
        if None in ports:
            end = "source" if source.port is None else "destination"
            note(f"the {end} names no port: {OPEN_PORT} stands in for it")
        ports = [OPEN_PORT if port is None else port for port in ports]
    elif ports != [None, None]:
        raise InputError("endpoint", f"{protocol} packets have no ports.", hint="leave :PORT out")
    return ExplainRequest(
        source=source.address,
        destination=destination.address,
        protocol=protocol,
        source_port=ports[0],
        destination_port=ports[1],
        direction=direction,
        dscp=dscp,
        mark=mark,
    )


def _with_port(end: Endpoint) -> str:
    return f"[{end.address}]:443" if end.version == 6 else f"{end.address}:443"


def _decided_by(explanation: Explanation) -> str:
    parts = [explanation.reason]
    if explanation.rule:
        parts.append(f"rule {explanation.rule}")
    if explanation.prefix:
        parts.append(f"whitelist {explanation.prefix}")
    return ", ".join(parts)


def _print_short(explanation: Explanation) -> None:
    print_line(f"{explanation.packet}  {explanation.traffic_class}  ({_decided_by(explanation)})")


def _print_long(explanation: Explanation) -> None:
    print_line(f"packet    {explanation.packet} ({explanation.direction})")
    print_line(f"class     {explanation.traffic_class}")
    print_line(f"reason    {explanation.reason}")
    print_line(f"rule      {explanation.rule or '-'}")
    print_line(f"prefix    {explanation.prefix or '-'}")
    print_line(f"priority  {explanation.priority_text}")
    print_line(f"mark      {explanation.mark:#x}" if explanation.mark else "mark      -")
    print_line(f"ceiling   {rate_text(explanation.ceiling_bits_per_s, none='none')}")
    for text in explanation.notes:
        print_line(f"note      {text}")
