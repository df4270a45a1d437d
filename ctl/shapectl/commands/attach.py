# SPDX-License-Identifier: Apache-2.0
"""`shapectl attach`: begin to classify and shape an interface's traffic."""

from __future__ import annotations

from typing import Any

import click

from shapeagent.model.reports import AttachPlan, AttachReport, AttachRequest
from shapeagent.model.types import Hook, IngressMode, Profile
from shapectl.output import (
    bytes_text,
    print_json,
    print_line,
    print_table,
    rate_text,
    seconds_text,
    warn,
)
from shapectl.params import duration, mark_mask, rate, segment_limit
from shapectl.session import ShapeCommand, complete_device, session_of


@click.command("attach", cls=ShapeCommand)
@click.argument("device", shell_complete=complete_device)
@click.option(
    "--policy",
    "policy_path",
    metavar="FILE",
    help="The policy; else /etc/shapectl/policy.toml, else the built-in one.",
)
@click.option(
    "--profile",
    type=click.Choice([p.value for p in Profile]),
    help="The queues that carry the policy out; else decided by probing kernel and device.",
)
@click.option(
    "--link-rate",
    "link_rate_bits_per_s",
    type=rate,
    metavar="RATE",
    help="What the bottleneck carries (100mbit, 2.5gbit); else read from the device.",
)
@click.option(
    "--ingress",
    type=click.Choice([m.value for m in IngressMode]),
    default=IngressMode.COUNT.value,
    show_default=True,
    help="Arriving packets: count them, police classes with a ceiling, or queue them on an IFB.",
)
@click.option(
    "--ingress-lease",
    "ingress_lease_s",
    type=duration,
    metavar="TIME",
    default="1h",
    show_default=True,
    help="How long the IFB redirect stands if nobody renews it.",
)
@click.option(
    "--hook",
    type=click.Choice([h.value for h in Hook]),
    help="How the programs are attached: by tcx links, which run before what is there and touch "
    "no qdisc, or as clsact filters; else tcx where the kernel has it (6.6).",
)
@click.option("--shadow", is_flag=True, help="Classify and count, change no packet.")
@click.option(
    "--segment-limit",
    type=segment_limit,
    metavar="auto|off|BYTES",
    help="Largest segment that bulk may hand to the wire; else the policy's.",
)
@click.option(
    "--reroute-ipv6",
    is_flag=True,
    help="Make living IPv6 flows take up the segment limit, by a brief more specific route.",
)
@click.option(
    "--mark",
    "egress_mark_mask",
    type=mark_mask,
    metavar="MASK",
    help="Bits of skb->mark that shapectl may write on egress; else the policy's (none).",
)
@click.option(
    "--mark-ingress",
    "ingress_mark_mask",
    type=mark_mask,
    metavar="MASK",
    help="The same on ingress, where a mark can change routing.",
)
@click.option(
    "--yes-management",
    is_flag=True,
    help="Attach also to a management device: one that /etc/shapectl/management lists, that is "
    "named mgmt…, or that carries your SSH session while another NIC is up.",
)
@click.option(
    "--confirm",
    "confirm_s",
    type=duration,
    metavar="TIME",
    help="Undo it after TIME (3s to 1h) unless `shapectl confirm` comes: for a device that "
    "carries your own session.",
)
@click.option(
    "--takeover",
    is_flag=True,
    help="Replace a root qdisc of someone else's: a copy is kept, proven on a scratch device, and "
    "put back on detach.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@click.pass_context
def command(ctx: click.Context, /, dry_run: bool, **options: Any) -> None:
    """Classify and shape the traffic of DEVICE.

    Running it again on an attached DEVICE changes only what differs. `shapectl
    detach DEVICE` puts back what was there.
    """
    session = session_of(ctx)
    request = AttachRequest(**options)
    with session.engine() as engine:
        if dry_run:
            plan = engine.plan_attach(request)
            if session.json:
                print_json(plan)
            else:
                _print_plan(plan)
            return
        report = engine.attach(request)
    if session.json:
        print_json(report)
    else:
        _print_report(report)


def _print_plan(plan: AttachPlan) -> None:
    print_line(f"Plan for {_place(plan)} (nothing was changed)")
    print_line(f"  profile        {plan.profile}: {plan.profile_reason}")
    print_line(f"  ingress        {plan.ingress}")
    print_line(f"  hook           {plan.hook}")
    print_line(
        f"  link rate      {rate_text(plan.link_rate_bits_per_s)} ({plan.link_rate_source}), "
        "wire bits: 24 B per frame are counted in"
    )
    limit = bytes_text(plan.segment_limit_bytes) if plan.segment_limit_bytes else "off"
    note = f" ({plan.segment_limit_note})" if plan.segment_limit_note else ""
    print_line(f"  segment limit  {limit}{note}")
    print_line(f"  policy         {plan.policy_source} (sha256 {plan.policy_digest[:12]})")
    print_line()
    print_table(
        (
            "class", ">guarantee", ">ceiling", ">safe ceiling",
            ">burst", ">burst time", ">quantum", "queue", "enforced by",
        ),
        [
            (
                row.name,
                rate_text(row.guarantee_bits_per_s),
                rate_text(row.ceiling_bits_per_s),
                rate_text(row.safe_ceiling_bits_per_s),
                bytes_text(row.burst_bytes) if row.burst_bytes else None,
                f"{row.burst_us:,.0f} µs" if row.burst_bytes else None,
                bytes_text(row.quantum_bytes) if row.quantum_bytes else None,
                row.queue or None,
                row.enforced_by,
            )
            for row in plan.classes
        ],
    )  # fmt: skip
    print_line()
    print_line("Steps")
    for number, step in enumerate(plan.steps, start=1):
        print_line(f"  {number:2}. {step}")
    for warning in plan.warnings:
        warn(warning)


def _print_report(report: AttachReport) -> None:
    plan = report.plan
    verb = "Attached to" if report.changed else "Already attached, nothing to change:"
    print_line(
        f"{verb} {_place(plan)}: profile {plan.profile}, ingress {plan.ingress}, hook {plan.hook}, "
        f"link {rate_text(plan.link_rate_bits_per_s)}, policy {plan.policy_source}"
    )
    if report.changed:
        how = f"compiled in {report.compile_s:.2f}s" if report.compiled else "cached program"
        counts = ", ".join(
            f"{name} {count:,}" for name, count in sorted(report.verified_instructions.items())
        )
        verified = f", verified instructions: {counts}" if counts else ""
        print_line(f"  {report.total_s:.2f}s in all, {how}{verified}")
    for text in report.repaired:
        print_line(f"  repaired: {text}")
    words = _netns_words(plan)
    if report.unconfirmed_s is not None:
        print_line(
            f"  undone in {seconds_text(report.unconfirmed_s)} by {report.undone_by}, "
            f"unless: shapectl {words}confirm {plan.device}"
        )
    print_line(f"  undo: shapectl {words}detach {plan.device}")
    for warning in plan.warnings:
        warn(warning)


def _netns_words(plan: AttachPlan) -> str:
    return f"--netns {plan.netns} " if plan.netns else ""


def _place(plan: AttachPlan) -> str:
    return f"{plan.device} in namespace {plan.netns}" if plan.netns else plan.device
