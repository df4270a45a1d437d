# SPDX-License-Identifier: Apache-2.0
"""`shapectl policy`: read, check and write policies; needs no privilege."""

from __future__ import annotations

import click

from shapeagent.model.types import Policy, PortSide, Rule, RuleKind
from shapectl.output import note, print_json, print_line, print_table, print_text, rate_text
from shapectl.params import rate
from shapectl.session import ShapeGroup, session_of

_PROTOCOL_NAMES = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6", 132: "sctp"}


@click.group("policy", cls=ShapeGroup)
def command() -> None:
    """Show, check or write a policy.

    A policy is one TOML file: the classes, their rates, and the rules. These
    commands need no privilege.
    """


#: What `policy show` takes shares of, where no link is named.
_EXAMPLE_LINK_BITS_PER_S = 1_000_000_000


@command.command("show")
@click.argument("file", required=False)
@click.option(
    "--link-rate",
    "link_rate_bits_per_s",
    type=rate,
    metavar="RATE",
    help="The link rate that shares such as 20% are taken of; else 1gbit, as an example.",
)
@click.pass_context
def show(ctx: click.Context, file: str | None, link_rate_bits_per_s: int | None) -> None:
    """Show the policy that attach would use, every rate resolved.

    Reads FILE (- for stdin), else /etc/shapectl/policy.toml, else the built-in
    policy.
    """
    from shapeagent.service import documents

    session = session_of(ctx)
    text, source = documents.read_policy(file)
    policy = documents.load_policy_text(
        text, source, link_rate_bits_per_s or _EXAMPLE_LINK_BITS_PER_S
    )
    if session.json:
        print_json(policy)
        return
    _print_policy(policy)
    if link_rate_bits_per_s is None:
        note("rates are those of a 1gbit link, as an example; --link-rate RATE for yours")


@command.command("check")
@click.argument("file", required=False)
@click.option(
    "--link-rate",
    "link_rate_bits_per_s",
    type=rate,
    metavar="RATE",
    help="Check with this link rate too: sums, and rates that become too low or too high.",
)
@click.pass_context
def check(ctx: click.Context, file: str | None, link_rate_bits_per_s: int | None) -> None:
    """Check a policy and print every error.

    Exit code 2 where there is one. Reads FILE (- for stdin), else
    /etc/shapectl/policy.toml, else the built-in policy.
    """
    from shapeagent.service import documents

    session = session_of(ctx)
    text, source = documents.read_policy(file)
    summary = documents.check_policy_text(text, source, link_rate_bits_per_s)
    if session.json:
        print_json(summary)
        return
    print_line(
        f"ok: {summary.source}: {len(summary.classes)} classes "
        f"({', '.join(summary.classes)}), {summary.rules} rules"
    )


@command.command("example")
@click.pass_context
def example(ctx: click.Context) -> None:
    """Print the built-in policy, to begin your own with."""
    from shapeagent.service import documents

    text = documents.example_policy_text()
    if session_of(ctx).json:
        print_json({"source": "built-in", "text": text})
    else:
        print_text(text)


def _print_policy(policy: Policy) -> None:
    print_line(f"policy {policy.source} (sha256 {policy.digest[:12]})")
    print_line(
        f"  link {rate_text(policy.link_rate_bits_per_s)}, default class "
        f"{policy.default_class}, control class {policy.control_class}"
        + (", shadow" if policy.shadow else "")
    )
    print_line()
    print_table(
        (
            "class", ">priority", ">guarantee", ">ceiling", ">safe ceiling",
            ">ingress ceiling", "budget per source", ">dscp", ">mark",
        ),
        [
            (
                row.name,
                row.priority,
                rate_text(row.guarantee_bits_per_s),
                rate_text(row.ceiling_bits_per_s),
                rate_text(row.safe_ceiling_bits_per_s),
                rate_text(row.ingress_ceiling_bits_per_s),
                f"{rate_text(row.budget.rate_bits_per_s)}, then {row.budget.overflow_class}"
                if row.budget
                else None,
                row.dscp,
                f"{row.mark:#x}" if row.mark is not None else None,
            )
            for row in policy.classes
        ],
    )  # fmt: skip
    print_line()
    print_table(
        (">rule", "name", "class", "direction", "matches"),
        [
            (
                rule.number,
                rule.name,
                rule.traffic_class,
                rule.direction.value if rule.direction else "both",
                _matches_text(rule) + (" (always)" if rule.protected else ""),
            )
            for rule in policy.rules
        ],
    )


def _matches_text(rule: Rule) -> str:
    protocols = "/".join(_PROTOCOL_NAMES.get(p, str(p)) for p in rule.protocols)
    match rule.kind:
        case RuleKind.PORT:
            ports = ", ".join(
                str(low) if low == high else f"{low}-{high}" for low, high in rule.ports
            )
            side = "" if rule.side is PortSide.EITHER else f"{rule.side.value} "
            return f"{protocols or 'tcp/udp'} {side}port {ports}"
        case RuleKind.PROTOCOL:
            return f"protocol {protocols}"
        case RuleKind.DSCP:
            return "dscp " + ", ".join(map(str, rule.dscp))
        case RuleKind.MARK:
            return f"mark {rule.mark_value:#x}/{rule.mark_mask:#x}"
        case RuleKind.CGROUP:
            return f"cgroup {rule.cgroup}"
