# SPDX-License-Identifier: Apache-2.0
"""Another version in the place of the one that runs: no packet goes past it, none is forgotten."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import (
    BULK,
    MBIT,
    SIGNAL_UDP,
    Bench,
    UdpSink,
    UdpSource,
    entry,
    wait_until,
)

from shapeagent.kernel import abi, bpf, maps, source
from shapeagent.kernel import compile as compiler
from shapeagent.kernel.netns import open_rtnl
from shapeagent.model.errors import ConflictError, FailedError, ShapeError
from shapeagent.model.types import Direction
from shapeagent.service import hook, selftest, swapping
from shapeagent.service.hook import Place
from shapeagent.service.state import StateDir

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
    pytest.mark.hooks("tcx", "clsact"),
]

SWAPS = 1_000


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Give a function that makes our source another one: a constant more, of this text."""

    def change(text: str) -> None:
        folder = tmp_path / "bpf"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source.source_dir(), folder)
        main = folder / source.MAIN_FILE
        main.write_text(f"{main.read_text()}\n/* {text} */\nstatic const int {text} = 1;\n")
        monkeypatch.setattr(compiler, "source_dir", lambda: folder)

    return change


def store_of(one: Bench) -> StateDir:
    return StateDir(one.engine.run_dir, one.key)


def changed(one: Bench) -> None:
    """Give an attachment something to remember."""
    one.engine.class_set(one.device, "bulk", 30 * MBIT, lease_s=600)
    one.engine.class_set(one.device, "stream", 40 * MBIT)
    one.engine.whitelist_add(
        one.device, [entry("203.0.113.0/24"), entry("2001:db8:9::1"), entry("198.51.100.9")]
    )


def remembered(one: Bench) -> tuple[object, ...]:
    """Return what must be the same behind a swap."""
    status = one.status()
    return (
        status.whitelist_entries,
        status.problems,
        [(row.name, row.direction, row.ceiling_in_force_bits_per_s) for row in status.classes],
        one.engine.whitelist_list(one.device),
        one.host_state().tree,
        one.host_state().gso,
    )


def test_another_source_is_swapped_in_place(
    bench: Callable[..., Bench], newer: Callable[[str], None]
) -> None:
    """The maps stay: flows, counters, ceilings with their leases, and lists go on."""
    one = bench()
    before = one.host_state()
    one.attach()
    changed(one)
    with UdpSink(one.pair.peer_netns, SIGNAL_UDP) as sink:
        target = (one.pair.peer_address4, SIGNAL_UDP)
        with UdpSource(one.netns, target, packets_per_s=1000, size=64, limit=50):
            wait_until(lambda: sink.received == 50, "signal to arrive")
    wanted, counted = remembered(one), one.packets()
    ids, digest = one.status().programs, one.state()["source_digest"]
    newer("another_version")
    report = one.attach()
    assert report.changed, "got unchanged, want the programs swapped"
    assert any("swapped" in text for text in report.repaired), f"got {report.repaired}"
    assert one.state()["source_digest"] != digest, "got the old digest, want the new one's"
    now = one.status().programs
    assert set(now.values()).isdisjoint(ids.values()), f"got {now}, want other programs"
    assert remembered(one) == wanted, f"got {remembered(one)}, want {wanted}"
    packets = one.packets()
    assert all(packets[name] >= count for name, count in counted.items()), f"got {packets}"
    again = one.attach()
    assert not again.changed, "got changed, want nothing left to do"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


@pytest.mark.parametrize("why", ["shape", "layout", "counts"])
def test_an_older_layout_is_migrated(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """F4: maps of another shape are made anew and filled; counters are copied if they fit."""
    one = bench()
    before = one.host_state()
    with monkeypatch.context() as patch:
        name = "counts" if why == "counts" else "flows4"
        shape = maps.SHAPES[name]
        other = bpf.MapShape(shape.type, shape.key_bytes, shape.value_bytes, 1024, shape.flags)
        patch.setitem(maps.SHAPES, name, other)
        if why == "layout":
            patch.setattr(abi, "SHP_ABI_VERSION", abi.SHP_ABI_VERSION - 1)
        one.attach(ingress="police")
        changed(one)
        wanted = remembered(one)
        with UdpSink(one.pair.peer_netns, BULK) as sink:
            target = (one.pair.peer_address4, BULK)
            with UdpSource(one.netns, target, packets_per_s=1000, size=1400, limit=200):
                wait_until(lambda: sink.received == 200, "bulk to arrive")
    if why == "layout":
        (one.pins / "spared").rename(one.pins / "former")  # a map that this version does not have
        with pytest.raises(ConflictError) as caught:
            one.engine.class_set(one.device, "bulk", 50 * MBIT)
        assert caught.value.reference == "other-version-attached", f"got {caught.value}"
        assert "swaps it in place" in str(caught.value.hint), f"got {caught.value.hint}"
    one.attach(ingress="police")
    assert remembered(one) == wanted, f"got {remembered(one)}, want {wanted}"
    want = 0 if why == "counts" else 200
    assert one.packets().get("bulk", 0) == want, f"got {one.packets()}, want {want} of bulk"
    warnings = one.status().warnings
    assert not [text for text in warnings if "passed by" in text], f"got {warnings}"
    assert one.state()["abi_version"] == abi.SHP_ABI_VERSION
    assert not (one.pins / "former").exists(), "got a pin of the old layout, want it gone"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"
    one.check_programs_gone()


def test_a_later_version_is_left_running(bench: Callable[..., Bench]) -> None:
    """F4: a downgrade is refused with the reason; what runs goes on, and detach works."""
    one = bench()
    before = one.host_state()
    one.attach()
    one.change_state(abi_version=abi.SHP_ABI_VERSION + 1)
    for call in (
        one.attach,
        one.status,
        lambda: one.engine.class_set(one.device, "bulk", 50 * MBIT),
        lambda: one.engine.whitelist_add(one.device, [entry("203.0.113.7")]),
    ):
        with pytest.raises(ConflictError) as caught:
            call()
        assert caught.value.reference == "newer-version-attached", f"got {caught.value}"
    assert len(one.host_state().ours) == 2, f"got {one.host_state().ours}, want it running"
    one.engine.detach(one.device)
    assert one.host_state() == before, f"got {one.host_state()}, want {before}"


@pytest.mark.parametrize("where", ["load", "swap", "self-test"])
def test_a_swap_that_fails_leaves_what_ran(
    bench: Callable[..., Bench],
    newer: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    one = bench()
    one.attach()
    wanted, ids = remembered(one), one.status().programs
    newer("another_version")

    def fail(*_: object, **__: object) -> None:
        raise FailedError("for-the-test", "not today")

    with monkeypatch.context() as patch:
        if where == "load":
            patch.setattr(swapping, "load_image", fail)
        elif where == "swap":
            real = Place.swap

            def swap(self: Place, direction: Direction, fd: int, ours: tuple[int, ...]) -> None:
                if direction is Direction.INGRESS and fd not in (0,) and not seen:
                    seen.append(1)
                    fail()
                real(self, direction, fd, ours)

            seen: list[int] = []
            patch.setattr(Place, "swap", swap)
        else:
            patch.setattr(selftest, "run", fail)
        with pytest.raises(ShapeError) as caught:
            one.attach()
        assert caught.value.reference == "for-the-test", f"got {caught.value}"
        assert one.status().programs == ids, f"got {one.status().programs}, want {ids}"
    assert remembered(one) == wanted, f"got {remembered(one)}, want {wanted}"
    assert one.attach().changed, "got unchanged, want the swap done now"
    one.engine.detach(one.device)
    one.check_programs_gone()


def test_a_thousand_hot_swaps_miss_no_packet(bench: Callable[..., Bench]) -> None:
    """Every packet of a flow is counted once, in its class, whichever program it meets."""
    one = bench()
    one.attach(profile="police")
    store = store_of(one)
    state = store.read()
    assert state is not None
    with open_rtnl(one.netns) as rtnl:
        _swap_many(one, rtnl, store)
    one.engine.detach(one.device)
    one.check_programs_gone()


def _swap_many(one: Bench, rtnl: object, store: StateDir) -> None:
    image, _ = compiler.find_image()
    state = store.read()
    assert state is not None
    pinned = maps.PinnedMaps(one.pins)
    sets = [compiler.load_image(image, pinned) for _ in range(2)]
    ours = (*state.our_ids, *(program.id for each in sets for program in each.values()))
    one.program_ids |= set(ours)
    store.write(dataclasses.replace(state, spare_ids=ours))
    place = Place.of(rtnl, state, one.pins)  # type: ignore[arg-type]
    try:
        with UdpSink(one.pair.peer_netns, BULK) as sink:
            target = (one.pair.peer_address4, BULK)
            with UdpSource(one.netns, target, packets_per_s=5000, size=64) as flow:
                wait_until(lambda: sink.received > 100, "the flow")
                began = one.packets()["bulk"]
                sent = flow.sent
                for number in range(SWAPS):
                    for direction, name in hook.PROGRAMS.items():
                        place.swap(direction, sets[number % 2][name].fd, ours)
                swapped = flow.sent - sent
                flow.end()
            wait_until(lambda: sink.received == flow.sent, "every datagram")
        counted = one.packets()["bulk"]
        assert counted - began >= swapped, f"got {counted - began}, want at least {swapped}"
        assert counted == flow.sent, f"got {counted} counted, want {flow.sent}"
        print(f"{one.hook}: {SWAPS} swaps, {swapped} packets meanwhile, none missed")
        assert swapped > SWAPS / 10, f"got {swapped} packets during {SWAPS} swaps, want load"
    finally:
        bpf.close_all([program.fd for each in sets for program in each.values()])
        pinned.close()
