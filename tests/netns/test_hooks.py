# SPDX-License-Identifier: Apache-2.0
"""Beside the programs of others: whoever came first, ours runs, or somebody says who hides it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from enginekit import (
    BULK,
    Bench,
    UdpSink,
    UdpSource,
    add_bpf_filter,
    index_of,
    load_counter,
    read_counter,
    shapectl,
    wait_until,
)
from hookkit import attach_tcx
from netlab import ip, load_program, tc

from shapeagent.kernel import filters, tcx
from shapeagent.model.errors import ConflictError, FailedError, UnsupportedError
from shapeagent.model.types import Direction

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]

PASS, NEXT = 0, -1  # of a tcx program; TC_ACT_OK and TC_ACT_UNSPEC of a filter


def needs_tcx() -> None:
    if not tcx.is_supported():
        pytest.skip(f"kernel {os.uname().release} has no tcx")


@contextlib.contextmanager
def tcx_program(one: Bench, direction: Direction, answer: int, *, first: bool) -> Iterator[int]:
    """Have a tcx program of someone else's that always gives one answer; gives its id."""
    needs_tcx()
    with attach_tcx(one.netns, one.device, direction, load_program(answer), first=first) as number:
        yield number


def add_filter(one: Bench, direction: Direction, answer: int, pref: int) -> None:
    descriptor = load_program(answer)
    add_bpf_filter(one.netns, one.device, direction, descriptor, pref=pref)
    os.close(descriptor)


def send(one: Bench, count: int = 300) -> None:
    """Send datagrams of 1,000 bytes of bulk."""
    with UdpSink(one.pair.peer_netns, BULK) as sink:
        target = (one.pair.peer_address4, BULK)
        with UdpSource(one.netns, target, packets_per_s=3000, size=1000, limit=count) as source:
            wait_until(lambda: source.sent == count, "all sent")
        wait_until(lambda: sink.received == count, f"{count} datagrams, got {sink.received}")


@pytest.mark.parametrize("direction", list(Direction))
def test_a_tcx_link_runs_before_what_was_there(
    bench: Callable[..., Bench], direction: Direction
) -> None:
    """F42: a tcx program that ends the hook, and a filter that does, hide nothing."""
    one = bench()
    with tcx_program(one, direction, PASS, first=True):
        add_filter(one, direction, PASS, pref=1)
        before = one.host_state()
        one.attach()
        status = one.status()
        assert (status.hook, status.problems) == ("tcx", ()), f"got {status}"
        assert not [text for text in status.warnings if "before" in text], f"got {status.warnings}"
        send(one)
        assert one.packets().get("bulk", 0) >= 300, f"got {one.packets()}, want all of bulk"
        one.engine.detach(one.device)
        assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.hooks("tcx", "clsact")
@pytest.mark.parametrize("first", [True, False])
def test_a_tcx_program_that_says_next_hides_nothing(
    bench: Callable[..., Bench], first: bool
) -> None:
    """Whichever came first, both see every packet."""
    needs_tcx()
    one = bench()
    program, counter = load_counter()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, counter)
        place = (one.netns, one.device, Direction.EGRESS, program)
        if first:
            stack.enter_context(attach_tcx(*place, first=True))
            one.attach()
        else:
            one.attach()
            stack.enter_context(attach_tcx(*place, first=False))
        send(one, 10)  # the neighbours are known
        theirs, ours = read_counter(counter), one.packets()["bulk"]
        send(one)
        assert read_counter(counter) - theirs >= 300, "got fewer at theirs, want all"
        assert one.packets()["bulk"] - ours == 300, f"got {one.packets()['bulk'] - ours} at ours"
        assert one.status().problems == (), f"got {one.status().problems}, want none"
        one.engine.detach(one.device)


def test_clsact_behind_a_tcx_program_that_ends_the_hook_is_refused(
    bench: Callable[..., Bench],
) -> None:
    """F42: the self-test sees that our filter does not run; nothing is left of the attach."""
    one = bench()
    with tcx_program(one, Direction.EGRESS, PASS, first=True) as number:
        before = one.host_state()
        with pytest.raises(FailedError) as caught:
            one.attach(hook="clsact")
        assert caught.value.reference == "hidden", f"got {caught.value}"
        assert f"tcx program {number}" in caught.value.message, f"got {caught.value.message}"
        after = one.host_state()
        assert after.tree.hook is not None, "got no clsact, want it left to who has a program (C26)"
        tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
        assert one.host_state() == before, f"got {after}, want {before} and clsact"


def test_clsact_behind_a_filter_that_ends_the_hook_is_refused(bench: Callable[..., Bench]) -> None:
    """F42: the same with an older filter, on kernels without tcx too."""
    one = bench()
    add_filter(one, Direction.EGRESS, PASS, pref=filters.PREF - 1)
    before = one.host_state()
    ran = shapectl(
        "--netns", one.netns, "attach", one.device, "--link-rate", "100mbit", "--hook", "clsact"
    )
    assert (ran.code, "hidden" in ran.err) == (1, True), f"got {ran}"
    assert f"pref {filters.PREF - 1}" in ran.err, f"got {ran.err}, want who hides it"
    wait_until(lambda: one.host_state() == before, f"the host as before: {before}")


@pytest.mark.parametrize("direction", list(Direction))
def test_status_names_who_came_before_us_later(
    bench: Callable[..., Bench], direction: Direction
) -> None:
    """F42: `hidden-by` with the program and how little came; who could hide us is a warning."""
    one = bench()
    one.attach()
    with tcx_program(one, direction, PASS, first=True) as number:
        warnings = one.status().warnings
        assert any(f"tcx program {number}" in text for text in warnings), f"got {warnings}"
        pair = one.pair
        egress = direction is Direction.EGRESS
        netns, sink_netns = (pair.netns, pair.peer_netns)[:: 1 if egress else -1]
        address = pair.peer_address4 if egress else pair.address4
        with (
            UdpSink(sink_netns, BULK) as sink,
            UdpSource(netns, (address, BULK), packets_per_s=3000, size=1000, limit=300),
        ):
            wait_until(lambda: sink.received == 300, "bulk to arrive")
        problems = one.status().problems
        assert any(text.startswith(f"hidden-by tcx program {number}") for text in problems), (
            f"got {problems}, want who hides us"
        )
        if egress:
            with pytest.raises(ConflictError) as caught:
                one.attach()
            assert "hidden-by" in " ".join(caught.value.details), f"got {caught.value.details}"
    one.engine.detach(one.device)


def test_who_deletes_clsact_does_not_delete_us(bench: Callable[..., Bench]) -> None:
    needs_tcx()
    one = bench()
    tc("qdisc", "add", "dev", one.device, "clsact", netns=one.netns)
    one.attach()
    tc("qdisc", "del", "dev", one.device, "clsact", netns=one.netns)
    assert one.status().problems == (), f"got {one.status().problems}, want none"
    assert len(one.host_state().ours) == 2, f"got {one.host_state().ours}, want both"
    one.engine.detach(one.device)


def test_a_link_that_someone_detached_is_named(bench: Callable[..., Bench]) -> None:
    needs_tcx()
    one = bench()
    before = one.host_state()
    one.attach()
    tcx.remove_link(one.pins, Direction.EGRESS)
    problems = one.status().problems
    assert problems == ("our egress link is gone",), f"got {problems}"
    with pytest.raises(ConflictError) as caught:
        one.attach()
    assert caught.value.reference == "attachment-damaged", f"got {caught.value}"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


def test_a_device_made_again_has_none_of_our_links(bench: Callable[..., Bench]) -> None:
    """F12: a link ends with its device, and is not taken for one of the next with its index."""
    needs_tcx()
    one = bench()
    one.attach()
    index, pins = one.index, one.pins
    assert tcx.find_link(pins, Direction.EGRESS) is not None
    ip("link", "delete", one.device, netns=one.netns)
    gone = tcx.find_link(pins, Direction.EGRESS)
    assert gone is not None, "got no pin, want it"
    assert gone.index == 0, f"got {gone}, want no device"
    again = (
        "link",
        "add",
        one.device,
        "index",
        str(index),
        "type",
        "veth",
        "peer",
        "name",
        "other",
    )
    ip(*again, netns=one.netns)
    assert index_of(one.netns, one.device) == index
    assert tcx.list_programs(one.netns, index, Direction.EGRESS) == ()
    problems = one.engine.status()[0].problems
    assert problems, "got no problem on a device made again, want it named"
    one.engine.detach(one.device)


def test_a_kernel_without_tcx_says_so(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench()
    before = one.host_state()
    if tcx.is_supported():
        monkeypatch.setattr(tcx, "is_supported", lambda: False)
    with pytest.raises(UnsupportedError) as caught:
        one.attach(hook="tcx")
    assert caught.value.reference == "tcx-missing", f"got {caught.value}"
    assert one.host_state() == before
    one.attach()
    assert one.status().hook == "clsact", f"got {one.status().hook}, want the other way"
    one.engine.detach(one.device)
