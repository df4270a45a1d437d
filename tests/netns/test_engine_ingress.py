# SPDX-License-Identifier: Apache-2.0
"""Arriving traffic: an IFB stands only under a lease, and never becomes a black hole for good."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import (
    BULK,
    MBIT,
    NORMAL,
    Bench,
    UdpSink,
    UdpSource,
    pause,
    steady_rate,
    wait_growth,
    wait_until,
    write_policy,
)
from hookkit import SHARERS, add_other_chains
from netlab import ip, tc

from shapeagent.kernel import filters
from shapeagent.model.errors import ConflictError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def arriving(one: Bench, port: int = NORMAL, **options: object) -> tuple[UdpSink, UdpSource]:
    """Return a sink on the device's side and a source on its peer's."""
    options = options or {"packets_per_s": 1000, "size": 64}
    sink = UdpSink(one.netns, port)
    return sink, UdpSource(one.pair.peer_netns, (one.pair.address4, port), **options)  # type: ignore[arg-type]


@pytest.mark.rates
def test_past_its_lease_the_redirect_ends_and_the_ceiling_stays(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """The kernel polices by itself instead; nobody renews, nothing is lost below the ceiling."""
    one = bench()
    policy = write_policy(
        tmp_path,
        lambda text: text.replace(
            'safe_ceiling = "50%"', 'safe_ceiling = "20%"\ningress_ceiling = "20%"'
        ),
    )
    one.attach(ingress="ifb", ingress_lease_s=1.5, policy_path=policy)
    sink, source = arriving(one)
    bulk_sink, bulk_source = arriving(one, BULK, bits_per_s=40 * MBIT)
    with sink, source, bulk_sink, bulk_source:
        pause(0.3)
        by_tree = steady_rate(bulk_sink.wire_bits, 20 * MBIT, 0.05, window_s=0.6, tries=1)
        assert not one.reasons("ingress").get("ifb-lease-expired"), "got a lease that ended early"
        wait_until(lambda: one.reasons("ingress").get("ifb-lease-expired", 0) > 0, "the end of it")
        pause(0.4)
        by_meter = steady_rate(bulk_sink.wire_bits, 20 * MBIT, 0.03)
        redirected = ip("-s", "link", "show", one.state()["ifb"], netns=one.netns)
        pause(0.2)
        still = ip("-s", "link", "show", one.state()["ifb"], netns=one.netns)
        source.end()
        wait_until(lambda: sink.received == source.sent, f"all probes, got {sink.received}")
    assert abs(by_tree / (20 * MBIT) - 1) <= 0.05, f"got {by_tree / MBIT:.1f} by the tree, want 20"
    assert abs(by_meter / (20 * MBIT) - 1) <= 0.03, f"got {by_meter / MBIT:.1f} after it, want 20"
    assert redirected == still, "got packets on the IFB after its lease, want none"
    assert sink.inversions == 0, f"got {sink.inversions} probes out of order, want none"


def test_attaching_again_renews_the_redirect(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="ifb", ingress_lease_s=0.2)
    sink, source = arriving(one)
    with sink, source:
        wait_until(lambda: one.reasons("ingress").get("ifb-lease-expired", 0) > 0, "the end of it")
        one.attach(ingress="ifb", ingress_lease_s=60)
        stale = one.reasons("ingress")["ifb-lease-expired"]
        before = sink.received
        wait_until(lambda: sink.received > before + 100, "traffic by way of the IFB")
        assert one.reasons("ingress")["ifb-lease-expired"] == stale, "got policing under a lease"


@pytest.mark.rates
@pytest.mark.parametrize("damage", ["down", "delete"])
def test_a_broken_ifb_loses_packets_until_its_lease_ends_and_no_longer(
    bench: Callable[..., Bench], damage: str
) -> None:
    """bpf-facts row 4: a redirect to an IFB that is down or gone loses the packet.

    The lease bounds it; status says so at once, and attaching again repairs it (F40).
    """
    one = bench()
    one.attach(ingress="ifb", ingress_lease_s=1.2)
    sink, source = arriving(one)
    with sink, source:
        wait_until(lambda: sink.received > 50, "traffic by way of the IFB")
        name = one.state()["ifb"]
        if damage == "down":
            ip("link", "set", name, "down", netns=one.netns)
        else:
            ip("link", "delete", name, netns=one.netns)
        pause(0.1)
        stuck = sink.received
        pause(0.2)
        lost = sink.received == stuck
        problems = one.status().problems
        wait_until(
            lambda: one.reasons("ingress").get("ifb-lease-expired", 0) > 0, "the lease's end"
        )
        stuck = sink.received
        wait_until(lambda: sink.received > stuck + 100, "traffic after the lease")
        repaired = one.attach(ingress="ifb").repaired
        assert len(repaired) == 1, f"got {repaired}, want the IFB"
        assert one.status().problems == (), f"got {one.status().problems}, want none"
        stale = one.reasons("ingress")["ifb-lease-expired"]
        wait_growth(lambda: sink.received, 100, "traffic by way of the IFB again")
        assert one.reasons("ingress")["ifb-lease-expired"] == stale, "got policing under a lease"
    print(f"IFB {damage}: {'nothing' if lost else 'traffic'} passed under the lease")
    assert any(name in text and "lost" in text for text in problems), f"got {problems}"
    report = one.engine.detach(one.device)
    assert report.changed, f"got {report}, want detached"


def test_detach_takes_the_filter_before_the_ifb(bench: Callable[..., Bench]) -> None:
    """Probes that arrive meanwhile are not lost."""
    one = bench()
    one.attach(ingress="ifb")
    sink, source = arriving(one)
    with sink, source:
        for _ in range(3):
            wait_growth(lambda: sink.received, 50, "traffic by way of the IFB")
            one.engine.detach(one.device)
            wait_growth(lambda: sink.received, 50, "traffic without it")
            one.attach(ingress="ifb")
        one.engine.detach(one.device)
        source.end()
        wait_until(lambda: sink.received == source.sent, f"all probes, got {sink.received}")


@pytest.mark.parametrize("who", SHARERS)
def test_an_ifb_shares_its_hook_with_nobody(bench: Callable[..., Bench], who: str) -> None:
    """After a redirect no other ingress filter, program or chain would see a packet."""
    one = bench()
    add, shown = SHARERS[who]
    remove = add(one.netns, one.device)
    before = one.host_state()
    with pytest.raises(ConflictError) as caught:
        one.attach(ingress="ifb")
    assert caught.value.reference == "ifb-hook-shared", f"got {caught.value.reference}"
    assert shown in caught.value.message, f"got {caught.value.message}, want {shown}"
    assert "--ingress police" in (caught.value.hint or ""), f"got {caught.value.hint}"
    assert one.host_state() == before, "got a changed host, want nothing done"
    one.attach(ingress="police")
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    one.engine.detach(one.device)
    remove()
    one.attach(ingress="ifb")
    assert one.status().problems == (), f"got {one.status().problems}, want none"


@pytest.mark.parametrize("who", SHARERS)
def test_who_comes_to_the_hook_later_is_shown(bench: Callable[..., Bench], who: str) -> None:
    """`status` names it, and the redirect is not renewed: past its lease the kernel polices."""
    one = bench()
    one.attach(ingress="ifb")
    add, shown = SHARERS[who]
    remove = add(one.netns, one.device)
    problems = one.status().problems
    assert len(problems) == 1, f"got {problems}, want one"
    assert shown in problems[0], f"got {problems}, want {shown}"
    with pytest.raises(ConflictError) as caught:
        one.attach(ingress="ifb")
    assert caught.value.reference == "attachment-damaged", f"got {caught.value.reference}"
    remove()
    assert one.status().problems == (), f"got {one.status().problems}, want none"


def test_chains_elsewhere_do_not_stand_in_the_way(bench: Callable[..., Bench]) -> None:
    one = bench()
    add_other_chains(one.netns, one.device)
    one.attach(ingress="ifb")
    assert one.status().problems == (), f"got {one.status().problems}, want none"


def test_a_lost_redirect_is_shown_and_passes_everything(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="ifb")
    before = one.host_state()
    sink, source = arriving(one)
    with sink, source:
        wait_growth(lambda: sink.received, 50, "traffic by way of the IFB")
        pref = str(filters.REDIRECT_PREF)
        tc("filter", "del", "dev", one.device, "ingress", "pref", pref, netns=one.netns)
        assert one.host_state() != before, "got the redirect still there, want it gone"
        wait_growth(lambda: sink.received, 50, "traffic past the IFB")
        source.end()
        wait_until(lambda: sink.received == source.sent, f"all probes, got {sink.received}")
    problems = one.status().problems
    assert len(problems) == 1, f"got {problems}, want one"
    assert "redirect" in problems[0], f"got {problems}, want our redirect missed"


def test_what_comes_back_from_the_ifb_is_the_packet_that_went(bench: Callable[..., Bench]) -> None:
    """Before 6.4 an IFB drops what bpf_redirect() hands to it."""
    one = bench()
    one.attach(ingress="ifb")
    sink, source = arriving(one)
    with sink, source:
        wait_growth(lambda: sink.received, 100, "traffic by way of the IFB")
        source.end()
        wait_until(lambda: sink.received == source.sent, f"all probes, got {sink.received}")
    shown = ip("-s", "-j", "link", "show", one.state()["ifb"], netns=one.netns)
    counts = json.loads(shown)[0]["stats64"]
    assert counts["tx"]["packets"] > 100, f"got {counts}, want all packets by the IFB"
    assert counts["rx"]["dropped"] == 0, f"got {counts}, want none dropped"


def test_detach_without_a_state_takes_the_redirect_too(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach(ingress="ifb")
    one.forget_kept()
    (one.engine.run_dir / one.key / "state.json").write_text("{")
    one.engine.detach(one.device)
    left = one.host_state().filters
    assert left == (), f"got {left}, want no filter of ours"


def test_ingress_that_is_only_counted_passes_everything(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.attach()
    sink, source = arriving(one, BULK, bits_per_s=40 * MBIT, limit=3000)
    with sink, source:
        wait_until(lambda: source.sent == 3000, "all datagrams sent")
        wait_until(lambda: sink.received == 3000, f"all of them, got {sink.received}")
    got = one.classes("ingress")["bulk"]
    assert got.packets == 3000, f"got {got.packets} counted, want 3000"
    want = 3000 * (1400 + 42 + 24)
    assert got.wire_bytes == want, f"got {got.wire_bytes} wire bytes, want {want}"
