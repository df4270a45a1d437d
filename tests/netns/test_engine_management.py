# SPDX-License-Identifier: Apache-2.0
"""Attaching to the way in needs a yes; a server with one NIC is only told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import Bench, Ran, environment, shapectl
from netlab import ip

from shapeagent.model.errors import ConflictError
from shapeagent.model.reports import AttachRequest
from shapeagent.service import management

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

RATE = ("--link-rate", "100mbit")


def test_a_device_named_mgmt_needs_a_yes(bench: Callable[..., Bench]) -> None:
    one = bench()
    ip("link", "property", "add", "dev", one.device, "altname", "mgmt7", netns=one.netns)
    before = one.host_state()
    words = ("--netns", one.netns, "attach", one.device, *RATE)
    for more in ((), ("--dry-run",)):
        ran = shapectl(*words, *more)
        assert ran.code == 5, f"got exit {ran.code}: {ran.err}, want 5"
        assert ran.err.startswith("error: management-device\n"), f"got {ran.err}"
        assert "--yes-management" in ran.err, f"got {ran.err}, want the way round it"
    assert one.host_state() == before, "got a changed host, want nothing done"
    ran = shapectl(*words, "--dry-run", "--yes-management")
    assert ran.code == 0, f"got exit {ran.code}: {ran.err}, want the plan"
    assert "mgmt7" in ran.err, f"got {ran.err}, want a warning that says why"


def test_a_listed_device_needs_a_yes_until_it_is_attached(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    listed = tmp_path / "management"
    listed.write_text(f"# the way in\n\n{one.device}  # front\nnot-there\n")
    monkeypatch.setattr(management, "MANAGEMENT_PATH", listed)
    with pytest.raises(ConflictError, match=str(listed)) as caught:
        one.attach()
    assert caught.value.reference == "management-device", f"got {caught.value.reference}"
    report = one.attach(yes_management=True)
    assert any("not-there" in text for text in report.plan.warnings), (
        f"got {report.plan.warnings}, want a word about the name that is no device"
    )
    again = one.attach()
    assert not again.changed, "got a change, want the same attachment"
    plan = one.engine.plan_attach(AttachRequest(device=one.device, link_rate_bits_per_s=10**8))
    assert any(str(listed) in text for text in plan.warnings), f"got {plan.warnings}"
    one.engine.detach(one.device)
    one.check_programs_gone()


def plan_over_ssh(one: Bench, server: str) -> Ran:
    """Return a dry run in the device's own namespace, as over an SSH session to `server`."""
    return shapectl(
        *("attach", one.device, *RATE, "--dry-run", "--json"),
        env=environment(SSH_CONNECTION=f"192.0.2.1 50000 {server} 22"),
        prefix=("nsenter", f"--net=/run/netns/{one.netns}"),
    )


def test_the_only_nic_carries_the_session_and_is_not_refused(bench: Callable[..., Bench]) -> None:
    one = bench()
    for server, want in (
        (one.pair.address4, True),
        (one.pair.address6, True),
        (f"::ffff:{one.pair.address4}", True),
        ("198.51.100.1", False),
    ):
        ran = plan_over_ssh(one, server)
        assert ran.code == 0, f"got exit {ran.code}: {ran.err}, want the plan"
        warnings = json.loads(ran.out)["warnings"]
        got = any("carries your SSH session" in text for text in warnings)
        assert got is want, f"got {warnings} for {server}, want a warning: {want}"
